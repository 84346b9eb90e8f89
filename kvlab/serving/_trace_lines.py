"""The lines of a text file of any size, plain or gzip, one at a time; a line that is none says so instead of raising.

No state but one line: a 10 GB file costs as much memory as a small one.
"""
from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import BinaryIO

from kvlab.catalog._files import opened

LONGEST_LINE = 2**20            # bytes; a Mooncake line of a million-token prompt has 20,000
MOST_PACKED = 100               # times a packed file's own size beyond 2 MiB; traces of requests reach 20
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class _Packed(gzip.GzipFile):
    """A gzip file that ends with BadGzipFile where it unpacks to very much more than it is."""

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        if self.tell() > max(2**21, MOST_PACKED * os.fstat(self.fileno()).st_size):
            raise gzip.BadGzipFile(f"it unpacks to more than {MOST_PACKED} times its bytes, as no trace does")
        return data


class BadLine(ValueError):
    """A line that cannot be used, and why."""


def lines(path: Path, what: str = "a trace") -> Generator[tuple[int, str | BadLine, bool], None, None]:
    """(line number from 1, text or what is wrong with the line, whether it is complete) of every line not blank.

    complete: it ends with a line end. A byte order mark is dropped. Refused: what is no regular file, UTF-16, and a
    gzip file that is damaged or cut off (ValueError that names the line).
    """
    with opened(path, what) as file:
        start = file.read(2)
        file.seek(0)
        if start in _UTF16:
            raise ValueError(f"{path} is UTF-16 text; give UTF-8 (iconv -f UTF-16 -t UTF-8)")
        source = _Packed(fileobj=file) if start == b"\x1f\x8b" else file
        number = 0
        try:
            for number, data in enumerate(_raw(source), 1):
                complete = data.endswith(b"\n")
                if len(data) > LONGEST_LINE:
                    yield number, BadLine(f"is longer than {LONGEST_LINE:,} bytes"), complete
                    continue
                try:
                    text = data.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError as error:
                    yield number, BadLine(f"is not UTF-8 text (byte {error.start + 1})"), complete
                    continue
                if text:
                    yield number, text, complete
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} is a damaged or cut-off gzip file: it ends after line {number:,} ({error}); "
                             "fetch it again") from error


def _raw(source: BinaryIO | gzip.GzipFile) -> Iterator[bytes]:
    """The lines; of one that is too long its first LONGEST_LINE + 1 bytes, and the last one that tells its end."""
    reader = source if isinstance(source, io.BufferedReader) else io.BufferedReader(source, 2**16)
    while data := reader.readline(LONGEST_LINE + 1):
        if len(data) > LONGEST_LINE:
            while not data.endswith(b"\n") and (rest := reader.readline(LONGEST_LINE)):
                data = data[:LONGEST_LINE] + rest[-1:]      # its last byte tells whether the line ends
        yield data
