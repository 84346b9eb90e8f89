"""Result tables from disk: a run's Parquet or journal, or a file of results, in parts that fit the memory."""
from __future__ import annotations

import errno
import warnings
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.record import journal, seal
from kvlab.record._places import is_url
from kvlab.record.environment import Manifest, opened_file
from kvlab.record.export import FORMULA, StoreError
from kvlab.record.migrate import check_schema_version, migrated, version_of
from kvlab.record.reading import COLUMNS, KINDS, STATUSES, table
from kvlab.record.remote import fetched

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow

JOURNAL, PARQUET = "readings.jsonl", "readings.parquet"
_PART = 2**16                                               # rows of a table that are held at once
_ROWS = 2**12                                               # of them as Python's objects, which take ten times as much


def lines_of(path: Path, end: int | None = None) -> Iterator[bytes]:
    """The lines of a journal up to a byte (all of them); none where the run was killed before there was one."""
    try:
        with opened_file(path) as file:
            for line in file:
                if end is not None and end <= 0:
                    return
                yield line
                if end is not None:
                    end -= len(line)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(error.errno, f"{path} cannot be read: {error.strerror}; check its permissions") from error


def tables_of(comparisons: Iterable[journal.Committed], lines: int = _PART) -> Iterator[pd.DataFrame]:
    """Committed comparisons as tables of about so many rows, one at least."""
    rows: list[dict[str, Any]] = []
    frames: list[pd.DataFrame] = []
    first = True
    for row in chain.from_iterable(one.rows for one in comparisons):
        rows.append(row)
        if len(rows) >= min(_ROWS, lines):
            frames.append(table(rows))
            rows = []
            if sum(map(len, frames)) >= lines:
                yield whole(frames)
                frames, first = [], False
    if rows or frames or first:
        yield whole([*frames, table(rows)] if rows or not frames else frames)


def whole(parts: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """The parts of a table as one."""
    import pandas as pd
    parts = list(parts)
    return parts[0] if len(parts) == 1 else pd.concat(parts, ignore_index=True)


def read_table(path: Path | str) -> pd.DataFrame:
    """The result table of a run directory, or of a .parquet, .csv or .jsonl file of one.

    Of a run directory its parquet if it was closed, else the committed part of its journal.
    Refused in one sentence: a path that does not exist (StoreError), another kind of file, another schema version,
    other columns (ValueError). Damage in a journal is a warning.
    """
    return whole(read_parts(path))


def read_parts(path: Path | str, lines: int = _PART) -> Iterator[pd.DataFrame]:
    """The result table in parts of about so many lines, one at least; of a CSV all is held in memory, else one part."""
    path = fetched(path) if is_url(path) else Path(path)
    if not path.exists():
        raise StoreError(errno.ENOENT, f"there are no results at {path}; give a run directory, a .parquet or a .csv")
    if path.is_dir():
        Manifest.read(path)
        closed = path / PARQUET
        path = closed if closed.exists() else path / JOURNAL
    if path.suffix == ".parquet":
        yield from _from_parquet(path, lines)
    elif path.suffix == ".jsonl":
        problems: list[str] = []
        yield from tables_of(journal.read(lines_of(path), problems), lines)
        for problem in problems:
            warnings.warn(f"{path.parent.name}/{problem}", stacklevel=3)
    elif path.suffix == ".csv":
        whole = _from_csv(path)
        for start in range(0, max(1, len(whole)), lines):
            yield whole.iloc[start:start + lines]
    else:
        raise ValueError(f"{path} is no result table; give a run directory or one of: .parquet, .csv, .jsonl")


def _from_parquet(path: Path, lines: int) -> Iterator[pd.DataFrame]:
    import pyarrow
    import pyarrow.parquet
    try:
        with opened_file(path) as raw:
            seal.check(raw)
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            version = (file.schema_arrow.metadata or {}).get(b"kvlab.schema_version", b"unknown").decode()
            known = check_schema_version(int(version) if version.isdigit() else version, str(path))
            left = file.metadata.num_rows
            if left == 0:
                yield _typed(_frame(file.schema_arrow.empty_table()), path, known)
            for batch in file.iter_batches(lines):
                left -= len(batch)
                yield _typed(_frame(pyarrow.Table.from_batches([batch])), path, known)
            if left:                                         # the head of a page has no checksum: one can seem empty
                raise pyarrow.ArrowInvalid(f"{abs(left)} rows {'fewer' if left > 0 else 'more'} than its footer says")
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as Parquet ({' '.join(str(error).split())}); in a run directory, "
                         "delete it and the journal is read instead") from None


def _frame(arrow: pyarrow.Table) -> pd.DataFrame:
    """By the columns' own types: what pandas notes beside them has no checksum."""
    import pandas as pd
    import pyarrow
    types = {pyarrow.string(): pd.StringDtype(), pyarrow.large_string(): pd.StringDtype(),
             pyarrow.int64(): pd.Int64Dtype()}
    return arrow.replace_schema_metadata(None).to_pandas(types_mapper=types.get)


def _from_csv(path: Path) -> pd.DataFrame:
    import pandas as pd
    numbers = {name: [""] for name, dtype in COLUMNS.items() if dtype != "string"}
    try:
        names = pd.read_csv(path, nrows=0).columns
        frame = read_csv(path, dtype={name: COLUMNS.get(name, "string") for name in names}, keep_default_na=False,
                         na_values=numbers)
        for name in frame.columns:                           # the quote before a formula: see write_csv
            if frame[name].dtype == "string":
                frame[name] = frame[name].str.replace(rf"^'(?={FORMULA[2:]})", "", regex=True)
        return _typed(frame, path, version_of(names))
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as CSV ({error})") from None


def read_csv(file, **how) -> pd.DataFrame:
    """A stranger's CSV as pandas reads it, but no line may have more cells than the first.

    pandas makes an index of as many levels of them, of 10 KiB in seconds. ParserError: its own, or for such a line.
    """
    import pandas as pd
    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)
        try:
            return pd.read_csv(file, index_col=False, **how)
        except pd.errors.ParserWarning:
            raise pd.errors.ParserError("a line has more cells than the first") from None


def _typed(frame: pd.DataFrame, path: Path, version: int) -> pd.DataFrame:
    frame = migrated(frame, version)
    wrong = [*(name for name in COLUMNS if name not in frame), *sorted(set(frame.columns) - set(COLUMNS))]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(f"{path} is not the result table of this kvlab: missing or unknown columns "
                         f"{', '.join(wrong[:5])}{more}; give a run directory, or a table that kvlab wrote")
    try:
        typed = frame[list(COLUMNS)].astype(COLUMNS)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the result table of this kvlab: a column holds another type ({error}); give a "
                         "run directory, or a table that kvlab wrote") from None
    for name, allowed in (("kind", KINDS), ("status", STATUSES)):
        if odd := set(typed[name].unique()) - {*allowed, ""}:
            raise ValueError(f"{path} has a {name} {sorted(odd, key=str)[0]!r}, which kvlab does not know; allowed: "
                             f"{', '.join(allowed)}")
    return typed
