"""Files of results, each written whole or not at all."""
from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from kvlab.record.reading import SCHEMA_VERSION, schema
from kvlab.record.seal import sealed_parquet

if TYPE_CHECKING:
    import pandas as pd

    from kvlab.record.anonymous import Anonymous

CHECKSUM = "checksum"                                # the key of it in a JSON file
_LINES = 2**16                                       # of a table that are turned into text at once
FORMULA = r"\A('*[=+\-@\t])"                         # what a spreadsheet runs, with the quotes that keep it from that
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
        return self.strerror or ""


@contextlib.contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn the system's error about writing into `folder` into a StoreError: which folder, why, what to do."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        why, remedy = _WHY.get(error.errno or 0, (error.strerror or str(error), "choose another folder"))
        where = error.filename if (why, remedy) == _FILE and error.filename else folder
        raise StoreError(error.errno, f"cannot write results to {where}: {why}; {remedy}. "
                                      "Comparisons committed before are kept") from error


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait until what is measured is on disk; they do then what they do.

    (Only the main thread is interrupted.)
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting = []
    # a handler that Python does not know (None), or none at all, is left as it is
    before = {sign: found for sign in (signal.SIGINT, signal.SIGTERM) if callable(found := signal.getsignal(sign))}
    for sign in before:
        signal.signal(sign, lambda *what: waiting.append(what))
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)
        if waiting:
            before[waiting[0][0]](*waiting[0])


def made_folder(folder: Path) -> Path:
    """The folder, made if it is not there; StoreError says why it cannot be (its own parent must exist)."""
    with explained(folder):
        folder.mkdir(exist_ok=True)
    return folder


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` when the block ends well.

    A reader, or a kill at any moment, sees the old content or the new. A link that stands there is replaced and
    nothing is written where it leads: the folder may be a stranger's.
    """
    temporary = path.with_name(path.name + ".tmp")
    with explained(path.parent):
        try:
            temporary.unlink(missing_ok=True)
            with open(temporary, "x+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _settled(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def _settled(folder: Path) -> None:
    """Have a new name in a folder survive a power cut too, where the system can be asked for that."""
    with contextlib.suppress(OSError):                   # Windows opens no folder, and some file systems sync none
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def atomic_write(path: Path, data: bytes) -> None:
    """Write the file whole: a reader, or a kill at any moment, sees the old content or the new."""
    with atomic_file(path) as file:
        file.write(data)


def sealed(content: dict[str, Any]) -> bytes:
    """The content as JSON with a checksum of it, by which `unsealed` sees that it was damaged."""
    return json.dumps({**content, CHECKSUM: _checksum(content)}, indent=2).encode()


def unsealed(content: dict[str, Any]) -> dict[str, Any]:
    """The content without its checksum, which must agree (ValueError) where there is one: the first files had none."""
    content = dict(content)
    said = content.pop(CHECKSUM, "")
    if said and said != _checksum(content):
        raise ValueError("its checksum does not agree: something changed it")
    return content


def _checksum(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def write_csv(table: pd.DataFrame | Iterable[pd.DataFrame], path: Path | str) -> None:
    """Any table, or its parts one after another, as UTF-8 CSV without an index; text in quotes.

    Absent text and numbers are empty fields, carriage returns in text become line feeds. Text that a spreadsheet would
    take for a formula (it begins with = + - @ or a tab, also behind ') gets a ' before it, which `read_table` takes
    away again. Refused: a part with other columns than the first, or with text where that has numbers (ValueError).
    """
    import pandas as pd
    import pyarrow
    from pyarrow.csv import CSVWriter
    with atomic_file(Path(path)) as file, contextlib.ExitStack() as stack:
        writer, first = None, None
        for part in [table] if isinstance(table, pd.DataFrame) else table:
            for start in range(0, max(len(part), 1), _LINES):
                columns = [_csv_column(values) for _, values in part.iloc[start:start + _LINES].items()]
                arrow = pyarrow.table(columns, names=[str(name) for name in part])
                if writer is None or first is None:
                    writer, first = stack.enter_context(CSVWriter(file, arrow.schema)), arrow.schema
                if arrow.schema.names != first.names or any(
                        own == pyarrow.large_string() != head for own, head in zip(arrow.schema.types, first.types)):
                    raise ValueError(f"a part of the table has other columns than the first: {arrow.schema.names} "
                                     f"instead of {first.names}, or text in one that began with numbers")
                writer.write_table(arrow)


def _csv_column(values: pd.Series):
    """As Arrow writes it: numbers, truth values and times as they are, all else as text."""
    import pyarrow
    import pyarrow.compute as pc
    try:
        column = pyarrow.Array.from_pandas(values)
        if pyarrow.types.is_primitive(column.type):
            return column
        column = column.cast(pyarrow.large_string())
    except (pyarrow.ArrowException, OverflowError, UnicodeError):    # lists, several types, half a character
        texts = values.map(lambda value: str(value).encode(errors="backslashreplace").decode(), na_action="ignore")
        column = pyarrow.Array.from_pandas(texts, type=pyarrow.large_string())
    return pc.replace_substring_regex(pc.replace_substring_regex(column, "\r\n?", "\n"), FORMULA, r"'\1")


def write_parquet(table: pd.DataFrame, path: Path | str) -> None:
    """A result table as Parquet, checked against `schema()`; metric units and schema version in the file metadata."""
    write_parts(lambda: [table], path)


def write_parts(parts: Callable[[], Iterable[pd.DataFrame]], path: Path | str,
                units: dict[str, str] | None = None) -> None:
    """A result table in parts as `write_parquet` writes it, never held whole.

    units: of all metrics in it, which stand in the schema that is written first; None: gone through once for them.
    """
    import pyarrow
    import pyarrow.parquet
    rules, writer = schema(), None
    if units is None:
        units = {}
        for part in parts():
            _gather_units(units, part)
    with atomic_file(Path(path)) as file, contextlib.ExitStack() as stack:
        for part in parts():
            _gather_units(dict(units), part)
            arrow = pyarrow.Table.from_pandas(rules.validate(part), preserve_index=False)
            arrow = arrow.replace_schema_metadata({**arrow.schema.metadata, "kvlab.units": json.dumps(units),
                                                   "kvlab.schema_version": str(SCHEMA_VERSION)})
            writer = writer or stack.enter_context(sealed_parquet(file, arrow.schema))
            writer.write_table(arrow)


def write_frame(frame: pd.DataFrame, path: Path) -> None:
    """A table of another form as Parquet, such as the samples beside a run; without its index."""
    import pyarrow
    arrow = pyarrow.Table.from_pandas(frame, preserve_index=False)
    with atomic_file(path) as file, sealed_parquet(file, arrow.schema) as writer:
        writer.write_table(arrow)


def _gather_units(units: dict[str, str], part: pd.DataFrame) -> None:
    for metric, unit in part[["metric", "unit"]].drop_duplicates().itertuples(index=False):
        if units.setdefault(metric, unit) != unit:
            raise ValueError(f"{metric} has the units {units[metric]!r} and {unit!r}; each metric has one unit")


FORMATS = {"csv": ".csv", "parquet": ".parquet", "latex": ".tex", "chrome-trace": ".trace.json.gz"}


def export(run: Path | str, format: str, out: Path | str | None = None, *, wide: bool = False,
           anonymous: Anonymous | None = None) -> Path:
    """Write a run for other programs and return the file: csv, parquet, latex or chrome-trace.

    run: a run directory, a file of results, or the URL of one. out: a file, or a folder that is there (default: the
    current one). wide: one line per case instead of one per reading, in csv and parquet; latex always is. chrome-trace:
    the traces of a run made with --trace, one process per trial. anonymous: takes out what identifies, and can say then
    what that was.
    Refused: an unknown format, a run without traces, anonymous ones, the file of results itself as `out` (ValueError),
    a folder that is not there (StoreError).
    """
    from kvlab.record._places import is_url
    from kvlab.record.remote import fetched
    from kvlab.record.store import read_parts, read_table
    from kvlab.registry import no_such
    run = fetched(run) if is_url(run) else Path(run)
    if format not in FORMATS:
        raise no_such("export format", format, FORMATS)
    if wide and format == "chrome-trace":
        raise ValueError("--wide is about tables, and chrome-trace has none; use csv or parquet")
    if anonymous and format == "chrome-trace":
        raise ValueError("--anonymous is about tables; a trace holds names of processes, modules and files that kvlab "
                         "does not look through: use csv, parquet or latex")
    out = Path("." if out is None else out)
    if out.is_dir():
        kept = ".wide" if wide and format in ("csv", "parquet") else ""         # beside the long one, not over it
        name = "anonymous" if anonymous else run.resolve().name if run.is_dir() else run.stem
        out /= name + kept + FORMATS[format]
    if out.exists() and any(out.samefile(kept) for kept in ([run] if run.is_file() else run.glob("*"))):
        raise ValueError(f"{out} is what would be exported; give another --out")
    cut = anonymous.table if anonymous else lambda table: table
    if format == "chrome-trace":
        from kvlab.record._merged import write_merged
        write_merged(run, read_table(run), out)
    elif format == "latex":
        from kvlab.record._latex import latex
        atomic_write(out, latex(cut(read_table(run))).encode())
    elif wide:
        from kvlab.record.wide import wide as wide_view
        frame = wide_view(cut(read_table(run)))
        write_csv(frame, out) if format == "csv" else write_frame(frame, out)
    elif format == "csv":
        write_csv(map(cut, read_parts(run)), out)
    else:
        write_parts(lambda: map(cut, read_parts(run)), out)
    return out
