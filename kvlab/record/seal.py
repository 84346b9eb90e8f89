"""A Parquet file's checksum of all its bytes, kept in its own footer.

Its pages may have checksums; their heads and the footer have none, and DuckDB looks at none of them: with one bit
changed it gives another number. A file of another length is not a damaged one, but what somebody made of it.
"""
from __future__ import annotations

import contextlib
import os
import re
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

KEY = b"kvlab.seal"                                  # in the metadata of the file
_OPEN = b"crc32=%08x of %015d bytes" % (0, 0)        # its value, until all else is written
_SEAL = re.compile(rb"crc32=([0-9a-f]{8}) of (\d{15}) bytes")
_PART = 2**20                                        # read at once; a file's own notes lie so near to its end


@contextlib.contextmanager
def sealed_parquet(file: BinaryIO, schema: pyarrow.Schema) -> Iterator[pyarrow.parquet.ParquetWriter]:
    """A writer of a Parquet file that is sealed when the block ends well. file: to be written and read."""
    import pyarrow.parquet
    with pyarrow.parquet.ParquetWriter(file, schema.with_metadata({**(schema.metadata or {}), KEY: _OPEN}),
                                       compression="zstd", write_page_checksum=True) as writer:
        yield writer
    size, at, said = _found(file)
    assert said is not None
    crc = _crc32(file, at)
    file.seek(at)
    file.write(b"crc32=%08x of %015d bytes" % (crc, size))


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
    footer = min(size, int.from_bytes(file.read(4), "little") + 8, _PART)
    file.seek(size - footer)
    said = max(_SEAL.finditer(file.read(footer)), key=re.Match.start, default=None)
    return size, size - footer + (said.start() if said else 0), said


def _crc32(file: BinaryIO, at: int) -> int:
    """Of all bytes but those of the seal."""
    file.seek(0)
    crc, left = 0, at
    while part := file.read(min(_PART, left)):
        crc, left = zlib.crc32(part, crc), left - len(part)
    file.seek(at + len(_OPEN))
    while part := file.read(_PART):
        crc = zlib.crc32(part, crc)
    return crc
