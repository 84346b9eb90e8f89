"""Files of results, each written whole or not at all."""
from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.record.reading import SCHEMA_VERSION, schema

if TYPE_CHECKING:
    import pandas as pd

_FULL = ("there is no space left", "free some space, or choose another folder")
_LOCKED = ("it is not writable", "choose a folder you may write to")
_FILE = ("a file stands where a folder is needed", "move it away, or choose another folder")
_WHY = {errno.ENOSPC: _FULL, errno.EDQUOT: _FULL, errno.EACCES: _LOCKED, errno.EPERM: _LOCKED,
        errno.EROFS: ("its file system is read-only", "choose a folder you may write to"),
        errno.ENOTDIR: _FILE, errno.EEXIST: _FILE,
        errno.ENOENT: ("it or the folder above it does not exist", "create it first, or choose another folder")}


class StoreError(OSError):
    """A result folder or file that cannot be read or written, said in one sentence."""

    def __str__(self) -> str:
        return self.strerror


@contextlib.contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn the system's error about writing into `folder` into a StoreError: which folder, why, what to do."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        why, remedy = _WHY.get(error.errno, (error.strerror or str(error), "choose another folder"))
        where = error.filename if (why, remedy) == _FILE and error.filename else folder
        raise StoreError(error.errno, f"cannot write results to {where}: {why}; {remedy}. "
                                      "Comparisons committed before are kept") from error


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait until what is measured is on disk; it is raised then. (Only the main thread is interrupted.)"""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting = []
    before = signal.signal(signal.SIGINT, lambda *what: waiting.append(what))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if waiting and callable(before):
            before(*waiting[0])


def atomic_write(path: Path, data: bytes) -> None:
    """Write the file whole: a reader, or a kill at any moment, sees the old content or the new."""
    temporary = path.with_name(path.name + ".tmp")
    with explained(path.parent):
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def write_csv(table: pd.DataFrame, path: Path | str) -> None:
    """Any table as UTF-8 CSV without an index; absent text and numbers are empty fields, carriage returns in text
    become line feeds."""
    text = table.replace("\r\n?", "\n", regex=True).to_csv(index=False, lineterminator="\n")
    atomic_write(Path(path), text.encode())


def write_parquet(table: pd.DataFrame, path: Path | str) -> None:
    """A result table as Parquet, checked against `schema()`; metric units and schema version in the file metadata."""
    import pyarrow
    import pyarrow.parquet
    arrow = pyarrow.Table.from_pandas(schema().validate(table), preserve_index=False)
    units = dict(zip(table["metric"], table["unit"], strict=True))
    arrow = arrow.replace_schema_metadata({**arrow.schema.metadata, "kvlab.units": json.dumps(units),
                                           "kvlab.schema_version": str(SCHEMA_VERSION)})
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(arrow, sink)
    atomic_write(Path(path), sink.getvalue().to_pybytes())
