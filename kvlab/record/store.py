"""A run directory: every committed comparison survives a kill, and none is measured twice.

<parent>/<study>/<UTC>-<id>/ holds manifest.json (written first), readings.jsonl (the journal), readings.parquet
(at close), workers.json (of a run on several machines) and, when first used, samples/, traces/ and figures/.
"""
from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.record import journal
from kvlab.record._places import is_url, local_place, opened
from kvlab.record.environment import Manifest, opened_file
from kvlab.record.export import (
    StoreError,
    atomic_file,
    atomic_write,
    explained,
    sealed,
    uninterrupted,
    unsealed,
    write_parts,
)
from kvlab.record.held import Held
from kvlab.record.reading import READING, SCHEMA_VERSION, Reading, complete
from kvlab.record.remote import Mirror, fetched, mark
from kvlab.record.tables import JOURNAL, PARQUET, lines_of, read_parts, read_table, tables_of, whole
from kvlab.registry import no_such

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["RunStore", "StoreError", "find_run", "read_parts", "read_table"]
_WORKERS = "workers.json"


class RunStore:
    """The readings of one run, committed comparison by comparison.

    path: the run directory (of a run at a URL, its copy on this machine). manifest: what the run was. committed: ids of
    the comparisons that need not be measured again. problems: one sentence for each thing in the journal that was not
    accepted when the run was opened. Rows stay on disk, so memory does not grow with them. One process at a time may
    append: the first to `hold` the run.
    """

    def __init__(self, path: Path, manifest: Manifest):
        self.path, self.manifest = path, manifest
        self.committed: set[str] = set()
        self.problems: list[str] = []
        self._units: dict[str, str] = {}
        self._end = _size(path / JOURNAL)                  # of the journal, up to its last commit line
        for one in journal.read(lines_of(path / JOURNAL, self._end), self.problems):
            self.committed.add(one.comparison_id)
            self._units.update((row["metric"], row["unit"]) for row in one.rows)
        self._rewrite = bool(self.problems)                 # leave the dropped lines out before appending
        self._held = Held(path)
        self._mirror = Mirror.of(path)

    @classmethod
    def create(cls, parent: Path | str, study: str, manifest: Manifest) -> RunStore:
        """A new run directory <parent>/<study>/<run_id>; parent is made if the folder above it exists.

        parent: a folder, or an fsspec URL: then `path` is a copy on this machine that is mirrored there. StoreError
        says why a folder cannot be written to.
        """
        if study != manifest.study or not study.isidentifier():
            raise ValueError(f"study {study!r} must be a plain name and that of the manifest ({manifest.study!r})")
        url = f"{str(parent).rstrip('/')}/{study}/{manifest.run_id}" if is_url(parent) else None
        path = local_place(url) if url else Path(parent) / study / manifest.run_id
        parent = path.parent.parent
        if url:
            opened(url)                                     # refused before anything is made
        with explained(parent):
            parent.mkdir(exist_ok=True, parents=url is not None)
            path.parent.mkdir(exist_ok=True)
            path.mkdir()
            atomic_write(path / "manifest.json", manifest.text())
            (path / JOURNAL).touch()
            if url:
                mark(path, url)
        return cls(path, manifest)

    @classmethod
    def open(cls, path: Path | str, hold: bool = False) -> RunStore:
        """An existing run with all its committed comparisons; the directory is not changed before `append`.

        hold: take it for this process first, so that nobody appends between. A damaged or uncommitted part of the
        journal is left out and said in `problems`. Refused: a folder that is no run directory, one that another process
        holds (StoreError), results of a schema version that this kvlab does not know (ValueError).
        """
        path = fetched(path) if is_url(path) else Path(path)
        manifest = Manifest.read(path)
        if not hold:
            return cls(path, manifest)
        held = Held(path)
        held.take()
        try:
            store = cls(path, manifest)
            store._held = held
            store.hold()
        except BaseException:
            held.let_go()
            raise
        return store

    @property
    def artifacts(self) -> Path:
        """The run directory, with samples/, traces/ and figures/ in it: a reading's `artifact` is relative to it."""
        with explained(self.path):
            for name in ("samples", "traces", "figures", "telemetry", "slurm", "worker.log"):
                if (self.path / name).is_symlink():         # a stranger's run could have anything overwritten
                    raise StoreError(errno.ELOOP, f"{self.path / name} is a link, and kvlab writes to none in a run; "
                                                  "remove it, or start a new run")
            for name in ("samples", "traces", "figures"):
                (self.path / name).mkdir(exist_ok=True)
        return self.path

    @property
    def place(self) -> str:
        """Where the run is, for people: the run directory, or the URL that it is mirrored to."""
        return self._mirror.url if self._mirror else str(self.path)

    def hold(self) -> None:
        """Take the run for this process until `close`; StoreError says which process has it and since when."""
        known = self._held.taken
        self._held.take()
        try:
            if self._mirror:
                self._mirror.take()
        except BaseException:
            if not known:
                self._held.let_go()
            raise

    def share(self) -> None:
        """Copy what is new in the run directory to the URL that it is mirrored to, if there is one."""
        if self._mirror:
            self._mirror.send(now=True)

    def append(self, comparison_id: str, rows: Iterable[dict[str, Any]]) -> None:
        """Commit one comparison: on return its rows (context columns + asdict(reading)) survive a power cut.

        run_id, study and comparison_id are filled in. Refused before anything is written: a comparison already
        committed, a row of another comparison, a reading that `Reading` refuses, a second unit for a metric
        (ValueError), a journal that another process went on with (ValueError), an unknown column (KeyError).
        StoreError: the folder is full or gone, or another process holds the run; append may be tried again.
        """
        if not comparison_id or comparison_id in self.committed:
            raise ValueError(f"comparison {comparison_id!r} is already committed (or empty); a resumed run skips "
                             "those in `committed`")
        own = {"run_id": self.manifest.run_id, "study": self.manifest.study, "comparison_id": comparison_id}
        full: list[dict[str, Any]] = []
        units: dict[str, str] = {}
        for given in rows:
            if (given.get("comparison_id") or comparison_id) != comparison_id:
                raise ValueError(f"a row of comparison {given['comparison_id']!r} was given with {comparison_id!r}")
            full.append(row := complete({**given, **own}))
            Reading(**{name: row[name] for name in READING})
            known = self._units.get(row["metric"]) or units.setdefault(row["metric"], row["unit"])
            if known != row["unit"]:
                raise ValueError(f"metric {row['metric']!r} has unit {row['unit']!r}, and {known!r} elsewhere in this "
                                 "run; a metric has one unit")
        self.hold()
        with explained(self.path), uninterrupted():
            self._write(journal.encode(comparison_id, full))
            self.committed.add(comparison_id)
            self._units.update(units)
        if self._mirror:
            self._mirror.send()

    def _write(self, lines: bytes) -> None:
        path = self.path / JOURNAL
        if self._changed():
            raise ValueError(f"{path} has changed since this run was opened (another process wrote to it, or "
                             "an earlier write failed); open the run again")
        if self._rewrite or not path.exists():
            self._clean()
        if self.manifest.schema_version != SCHEMA_VERSION:  # rows of today's version follow
            self.manifest = self.manifest.model_copy(update={"schema_version": SCHEMA_VERSION})
            atomic_write(self.path / "manifest.json", self.manifest.text())
        (self.path / PARQUET).unlink(missing_ok=True)      # about to be out of date: readers take the journal
        if self._mirror:
            self._mirror.drop(PARQUET)
        with open(path, "r+b", buffering=0) as file:
            file.seek(self._end)
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

    def _changed(self) -> bool:
        """Whether the journal is not as this object knows it."""
        return _size(self.path / JOURNAL) != self._end

    def _clean(self) -> None:
        """Write the journal again, without what was dropped from it."""
        path = self.path / JOURNAL
        with atomic_file(path) as file:
            for one in self._comparisons():
                file.writelines(one.lines)
        self._end, self._rewrite = _size(path), False
        if self._mirror:
            self._mirror.restart()

    def met(self, worker: str, environment: dict[str, Any]) -> None:
        """Note the environment of a worker that measures for this run; its rows carry `worker`."""
        known = self.workers
        if known.get(worker) != environment:
            atomic_write(self.path / _WORKERS, sealed({**known, worker: environment}))

    @property
    def workers(self) -> dict[str, dict[str, Any]]:
        """The environments of the workers of a run on several machines, by the id in the column `worker`."""
        return read_workers(self.path)

    def _comparisons(self) -> Iterator[journal.Committed]:
        """What is committed, from disk, one comparison after another."""
        return journal.read(lines_of(self.path / JOURNAL, self._end), [])

    def rows(self) -> list[dict[str, Any]]:
        """All committed rows in the order they were appended, each with every column."""
        return [row for one in self._comparisons() for row in one.rows]

    def table(self) -> pd.DataFrame:
        """All committed rows as the result table."""
        return whole(tables_of(self._comparisons()))

    def close(self) -> None:
        """Write readings.parquet, checked, and let the run go; it can be opened and appended to again.

        Where another process went on with the run, its journal stays the last word. StoreError: one has it now.
        """
        try:
            known = self._held.taken
            self._held.take()
            if not self._changed():
                if self._rewrite and known:                 # damage that cost nothing, such as a comparison twice
                    self._clean()
                write_parts(lambda: tables_of(self._comparisons()), self.path / PARQUET, self._units)
            if self._mirror and self._mirror.taken:
                self._mirror.let_go()
        finally:
            self._held.let_go()


def read_workers(run: Path) -> dict[str, dict[str, Any]]:
    """The environments in a run's workers.json by worker; empty where the run was made on one machine."""
    path = run / _WORKERS
    try:
        with opened_file(path) as file:
            found = json.load(file)
        found = unsealed(found) if isinstance(found, dict) else found
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StoreError(error.errno, f"{path} cannot be read: {error.strerror}; check its permissions") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it: the readings do without") from None
    if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
        raise ValueError(f"{path} is damaged: it must hold environments by worker; delete it: the readings do without")
    return found


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def find_run(text: str, parent: Path | str) -> Path:
    """The run directory that is meant: a path, a run_id, or the beginning of a run_id or of its last six digits.

    Of an fsspec URL of a run, or of one file of results, the copy on this machine, brought up to date. KeyError: none
    is meant (with near matches), or more than one; an id in a folder that is a URL.
    """
    if is_url(text):
        return fetched(text)
    if text and any((Path(text) / name).exists() for name in ("manifest.json", JOURNAL, PARQUET)):
        return Path(text)                                   # without its manifest too: that is what is said then
    if is_url(parent):
        raise KeyError(f"run {text!r} is not looked for in {parent}; give the run's URL, "
                       f"{parent.rstrip('/')}/<study>/<run_id>")
    runs = sorted(manifest.parent for manifest in Path(parent).glob("*/*/manifest.json"))
    found = [run for run in runs if text and (run.name.startswith(text) or run.name[-6:].startswith(text))]
    if len(found) == 1:
        return found[0]
    if found:
        raise KeyError(f"run {text!r} could be any of {', '.join(run.name for run in found)}; give more of it")
    if Path(text).is_file():
        raise KeyError(f"{text} is not a file of results; give a run's directory or id, or a .parquet, .csv or .jsonl "
                       "file")
    raise no_such("run", text, [run.name[-6:] if len(text) <= 6 else run.name for run in runs])
