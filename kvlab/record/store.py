"""A run directory: every committed comparison survives a kill, and none is measured twice.

<parent>/<study>/<UTC>-<id>/ holds manifest.json (written first), readings.jsonl (the journal), readings.parquet
(at close) and, when first used, samples/, traces/ and figures/.
"""
from __future__ import annotations

import contextlib
import errno
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.record.environment import Manifest
from kvlab.record.export import StoreError, atomic_write, explained, uninterrupted, write_parquet
from kvlab.record.journal import encode, replay
from kvlab.record.reading import COLUMNS, READING, Reading, check_schema_version, complete, table
from kvlab.registry import no_such

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["RunStore", "StoreError", "find_run", "read_table"]
_JOURNAL, _PARQUET = "readings.jsonl", "readings.parquet"


class RunStore:
    """The readings of one run, committed comparison by comparison.

    path: the run directory. manifest: what the run was. problems: one sentence for each thing in the journal that
    was not accepted when the run was opened. Only one process at a time may append.
    """

    def __init__(self, path: Path, manifest: Manifest, committed: dict[str, list[dict]], problems: list[str],
                 journal_bytes: int):
        self.path, self.manifest, self.problems = path, manifest, problems
        self._committed = committed
        self._units = {row["metric"]: row["unit"] for rows in committed.values() for row in rows}
        self._end = journal_bytes                           # of the journal, up to its last commit line
        self._rewrite = bool(problems)                      # leave the dropped lines out before appending

    @classmethod
    def create(cls, parent: Path | str, study: str, manifest: Manifest) -> RunStore:
        """A new run directory <parent>/<study>/<run_id>; parent is made if the folder above it exists.

        StoreError says why a folder cannot be written to.
        """
        if study != manifest.study or not study.isidentifier():
            raise ValueError(f"study {study!r} must be a plain name and that of the manifest ({manifest.study!r})")
        parent = Path(parent)
        path = parent / study / manifest.run_id
        with explained(parent):
            parent.mkdir(exist_ok=True)
            path.parent.mkdir(exist_ok=True)
            path.mkdir()
            atomic_write(path / "manifest.json", manifest.model_dump_json(indent=2).encode())
            (path / _JOURNAL).touch()
        return cls(path, manifest, {}, [], 0)

    @classmethod
    def open(cls, path: Path | str) -> RunStore:
        """An existing run with all its committed comparisons; the directory is not changed before `append`.

        A damaged or uncommitted part of the journal is left out and said in `problems`. Refused: a folder that is
        no run directory (StoreError), results of another schema version (ValueError).
        """
        path = Path(path)
        manifest = Manifest.read(path)
        return cls(path, manifest, *_replayed(path / _JOURNAL))

    @property
    def committed(self) -> set[str]:
        """Ids of the comparisons that need not be measured again."""
        return set(self._committed)

    @property
    def artifacts(self) -> Path:
        """The run directory, with samples/, traces/ and figures/ in it: a reading's `artifact` is relative to it."""
        with explained(self.path):
            for name in ("samples", "traces", "figures"):
                (self.path / name).mkdir(exist_ok=True)
        return self.path

    def append(self, comparison_id: str, rows: Iterable[dict[str, Any]]) -> None:
        """Commit one comparison: on return its rows (context columns + asdict(reading)) survive a power cut.

        run_id, study and comparison_id are filled in. Refused before anything is written: a comparison already
        committed, a row of another comparison, a reading that `Reading` refuses, a second unit for a metric
        (ValueError), a journal that another process went on with (ValueError), an unknown column (KeyError).
        StoreError: the folder is full or gone; append may be tried again.
        """
        if not comparison_id or comparison_id in self._committed:
            raise ValueError(f"comparison {comparison_id!r} is already committed (or empty); a resumed run skips "
                             "those in `committed`")
        own = {"run_id": self.manifest.run_id, "study": self.manifest.study, "comparison_id": comparison_id}
        full, units = [], dict(self._units)
        for given in rows:
            if (given.get("comparison_id") or comparison_id) != comparison_id:
                raise ValueError(f"a row of comparison {given['comparison_id']!r} was given with {comparison_id!r}")
            full.append(row := complete({**given, **own}))
            Reading(**{name: row[name] for name in READING})
            if units.setdefault(row["metric"], row["unit"]) != row["unit"]:
                raise ValueError(f"metric {row['metric']!r} has unit {row['unit']!r}, and {units[row['metric']]!r} "
                                 "elsewhere in this run; a metric has one unit")
        with explained(self.path), uninterrupted():
            self._write(encode(comparison_id, full))
            self._committed[comparison_id], self._units = full, units

    def _write(self, lines: bytes) -> None:
        journal = self.path / _JOURNAL
        if self._rewrite or not journal.exists():
            kept = b"".join(encode(name, rows) for name, rows in self._committed.items())
            atomic_write(journal, kept)
            self._end, self._rewrite = len(kept), False
        (self.path / _PARQUET).unlink(missing_ok=True)      # about to be out of date: readers take the journal
        with open(journal, "r+b", buffering=0) as file:
            if file.seek(0, os.SEEK_END) != self._end:
                raise ValueError(f"{journal} has changed since this run was opened (another process writes to it, or "
                                 "an earlier write failed); open the run again")
            try:
                left = memoryview(lines)
                while left:
                    left = left[file.write(left):]          # unbuffered: a full disk may take a part
                os.fsync(file.fileno())
            except BaseException:
                with contextlib.suppress(OSError):
                    file.truncate(self._end)                # what the caller believes lost must not come back
                raise
        self._end += len(lines)

    def rows(self) -> list[dict[str, Any]]:
        """All committed rows in the order they were appended, each with every column."""
        return [row for rows in self._committed.values() for row in rows]

    def table(self) -> pd.DataFrame:
        """All committed rows as the result table."""
        return table(self.rows())

    def close(self) -> None:
        """Write readings.parquet, checked; the run can be opened and appended to again."""
        write_parquet(self.table(), self.path / _PARQUET)


def _replayed(journal: Path) -> tuple[dict[str, list[dict]], list[str], int]:
    try:
        data = journal.read_bytes()
    except FileNotFoundError:                               # killed between the manifest and the journal
        data = b""
    except OSError as error:
        raise StoreError(error.errno, f"{journal} cannot be read: {error.strerror}; check its permissions") from error
    return *replay(data), len(data)


def read_table(path: Path | str) -> pd.DataFrame:
    """The result table of a run directory, or of a .parquet, .csv or .jsonl file of one.

    Of a run directory its parquet if it was closed, else the committed part of its journal.
    Refused in one sentence: a path that does not exist (StoreError), another kind of file, another schema version,
    other columns (ValueError). Damage in a journal is a warning.
    """
    import pandas as pd
    parts = list(read_parts(path, lines=2**30))
    return parts[0] if len(parts) == 1 else pd.concat(parts, ignore_index=True)


def read_parts(path: Path | str, lines: int = 2**16) -> Iterator[pd.DataFrame]:
    """The result table in parts of so many lines, one at least: of Parquet no more than a part is held in memory."""
    path = Path(path)
    if not path.exists():
        raise StoreError(errno.ENOENT, f"there are no results at {path}; give a run directory, a .parquet or a .csv")
    if path.is_dir():
        Manifest.read(path)
        closed = path / _PARQUET
        path = closed if closed.exists() else path / _JOURNAL
    if path.suffix == ".parquet":
        yield from _from_parquet(path, lines)
        return
    readers = {".csv": _from_csv, ".jsonl": _from_journal}
    if path.suffix not in readers:
        raise ValueError(f"{path} is no result table; give a run directory or one of: .parquet, {', '.join(readers)}")
    whole = readers[path.suffix](path)
    for start in range(0, max(1, len(whole)), lines):
        yield whole.iloc[start:start + lines]


def _from_parquet(path: Path, lines: int) -> Iterator[pd.DataFrame]:
    import pyarrow
    import pyarrow.parquet
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            version = (file.schema_arrow.metadata or {}).get(b"kvlab.schema_version", b"unknown").decode()
            check_schema_version(int(version) if version.isdigit() else version, str(path))
            if file.metadata.num_rows == 0:
                yield _typed(file.schema_arrow.empty_table().to_pandas(), path)
            for batch in file.iter_batches(lines):
                yield _typed(pyarrow.Table.from_batches([batch]).to_pandas(), path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as Parquet ({error}); in a run directory, delete it and the journal "
                         "is read instead") from None


def _from_csv(path: Path) -> pd.DataFrame:
    import pandas as pd
    numbers = {name: [""] for name, dtype in COLUMNS.items() if dtype != "string"}
    try:
        names = pd.read_csv(path, nrows=0).columns
        return _typed(pd.read_csv(path, dtype={name: COLUMNS.get(name, "string") for name in names},
                                  keep_default_na=False, na_values=numbers), path)
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as CSV ({error})") from None


def _from_journal(path: Path) -> pd.DataFrame:
    committed, problems, _ = _replayed(path)
    for problem in problems:
        warnings.warn(f"{path.parent.name}/{problem}", stacklevel=3)
    return table(row for rows in committed.values() for row in rows)


def _typed(frame: pd.DataFrame, path: Path) -> pd.DataFrame:
    wrong = [*(name for name in COLUMNS if name not in frame), *sorted(set(frame.columns) - set(COLUMNS))]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(f"{path} is not the result table of this kvlab: missing or unknown columns "
                         f"{', '.join(wrong[:5])}{more}; give a run directory, or a table that kvlab wrote")
    return frame[list(COLUMNS)].astype(COLUMNS)


def find_run(text: str, parent: Path | str) -> Path:
    """The run directory that is meant: a path, a run_id, or the beginning of a run_id or of its last six digits.

    KeyError: none is meant (with near matches), or more than one.
    """
    runs = sorted(manifest.parent for manifest in Path(parent).glob("*/*/manifest.json"))
    if text and (Path(text) / "manifest.json").is_file():
        return Path(text)
    found = [run for run in runs if text and (run.name.startswith(text) or run.name[-6:].startswith(text))]
    if len(found) == 1:
        return found[0]
    if found:
        raise KeyError(f"run {text!r} could be any of {', '.join(run.name for run in found)}; give more of it")
    if Path(text).is_file():
        raise KeyError(f"{text} is not a file of results; give a run's directory or id, or a .parquet, .csv or .jsonl "
                       "file")
    raise no_such("run", text, [run.name[-6:] if len(text) <= 6 else run.name for run in runs])
