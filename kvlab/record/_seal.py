"""A Parquet file's checksum of all its bytes, kept in its own footer.

Its pages may have checksums; their heads and the footer have none, and DuckDB looks at none of them: with one bit
changed it gives another number. A file of another length is not a damaged one, but what somebody made of it.
"""
from __future__ import annotations

import os
import re
import zlib
from typing import BinaryIO

KEY = "kvlab.seal"                                   # in the metadata of the file
OPEN = f"crc32={0:08x} of {0:015d} bytes"            # its value, until all else is written
_SEAL = re.compile(rb"crc32=([0-9a-f]{8}) of (\d{15}) bytes")
_PART = 2**20


def seal(file: BinaryIO) -> None:
    """Fill in the seal of a Parquet file that was written whole, with {KEY: OPEN} in its metadata (else ValueError)."""
    size, at, said = _found(file)
    if said is None:
        raise ValueError(f"a file to be sealed needs {KEY}={OPEN!r} in its metadata")
    crc = _crc32(file, at)
    file.seek(at)
    file.write(f"crc32={crc:08x} of {size:015d} bytes".encode())


def check(file: BinaryIO) -> None:
    """ArrowInvalid where a Parquet file has not the bytes that were sealed; one without a seal passes."""
    import pyarrow
    size, at, said = _found(file)
    if said and int(said[2]) == size and int(said[1], 16) != _crc32(file, at):
        raise pyarrow.ArrowInvalid("its checksum does not agree: something changed it")


def _found(file: BinaryIO) -> tuple[int, int, re.Match[bytes] | None]:
    """(bytes of the file, where its seal begins, the seal): the last in the footer, where the file's own notes are."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 8))
    footer = min(size, int.from_bytes(file.read(4), "little") + 8)
    file.seek(size - footer)
    said = max(_SEAL.finditer(file.read(footer)), key=re.Match.start, default=None)
    return size, size - footer + (said.start() if said else 0), said


def _crc32(file: BinaryIO, at: int) -> int:
    """Of all bytes but those of the seal."""
    file.seek(0)
    crc, left = 0, at
    while part := file.read(min(_PART, left)):
        crc, left = zlib.crc32(part, crc), left - len(part)
    file.seek(at + len(OPEN))
    while part := file.read(_PART):
        crc = zlib.crc32(part, crc)
    return crc
