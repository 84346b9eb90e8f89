"""SQL over the readings of many runs: one table `readings`, one table `runs`, read by DuckDB inside this process.

DuckDB is shut in: it opens the Parquet files that were looked at (see `sources`) and no other, writes nothing but its
own spilled data, takes nothing from the network, and one SELECT is all that it is given to run.
"""
from __future__ import annotations

import contextlib
import json
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.record._select import explained, first, only_reads, plain
from kvlab.record.export import StoreError
from kvlab.record.reading import COLUMNS
from kvlab.record.sources import Bad, Source, sources

if TYPE_CHECKING:
    import duckdb
    import pandas as pd
    import pyarrow

MEMORY = "1GiB"
_SQL = {"string": "VARCHAR", "Int64": "BIGINT", "float64": "DOUBLE"}
READINGS = {name: _SQL[dtype] for name, dtype in COLUMNS.items()}
_NAMES = [f'"{name}"' for name in READINGS]                 # "case" is a word of SQL
RUNS = {"run_id": "VARCHAR", "study": "VARCHAR", "size": "VARCHAR", "device": "VARCHAR", "created_utc": "TIMESTAMP",
        "state": "VARCHAR", "cases": "BIGINT", "kvlab": "VARCHAR", "git_commit": "VARCHAR", "python": "VARCHAR",
        "torch": "VARCHAR", "platform": "VARCHAR", "cpu": "VARCHAR", "cores": "BIGINT", "memory_bytes": "BIGINT",
        "gpus": "VARCHAR", "engine": "VARCHAR", "argv": "VARCHAR", "options": "JSON", "environment": "JSON",
        "path": "VARCHAR"}
_BATCH = 2**14                                              # rows of a result that are held at once


def query(sql: str, *stores: Path | str, memory: str = MEMORY) -> pd.DataFrame:
    """The result of one SELECT over `readings` and `runs` as a DataFrame.

    stores: run directories or ids, folders of runs, files of results, patterns, or "reference"; default: profiles.
    `readings` has the columns of the result table, `runs` one line per run (kvlab.record.query.RUNS), to be joined by
    run_id; of a run that is not finished what is committed counts. memory: what DuckDB may hold ("512MiB", "4GiB");
    beyond it spills to a temporary folder. A run of a folder that cannot be read is left out with a warning. Refused:
    SQL that is wrong or more than one SELECT (ValueError, one sentence), stores that are not there.
    """
    import pandas as pd
    import pyarrow
    with opened(stores or ("profiles",), memory) as store:
        found = store.select(sql).read_all()
        for said in (*store.problems, *(one.why for one in store.bad)):
            warnings.warn(said, stacklevel=2)
    return found.to_pandas(types_mapper={pyarrow.string(): pd.StringDtype(), pyarrow.int64(): pd.Int64Dtype()}.get)


@contextlib.contextmanager
def opened(stores: Iterable[Path | str], memory: str = MEMORY) -> Iterator[Store]:
    """The readings of the stores, ready to be asked; its temporary files go when the block ends."""
    import duckdb
    with tempfile.TemporaryDirectory(prefix="kvlab-query-", ignore_cleanup_errors=True) as spill:
        con = _connected(memory, spill)
        try:
            store = Store(con)
            try:
                store.load(sources(tuple(stores)))
            except duckdb.OutOfMemoryException as error:
                raise explained(error, READINGS, RUNS) from None
            yield store
        finally:
            con.close()


def _connected(memory: str, spill: str) -> duckdb.DuckDBPyConnection:
    import duckdb
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    config: dict[str, str | bool | int | float | list[str]] = {
        "autoinstall_known_extensions": False, "autoload_known_extensions": False,
        "allow_community_extensions": False, "allow_persistent_secrets": False, "python_enable_replacements": False,
        "temp_directory": spill, "threads": cores, "memory_limit": memory}
    try:
        return duckdb.connect(":memory:", config=config)
    except duckdb.Error as error:
        raise ValueError(f"memory {memory!r} is no amount that DuckDB knows ({first(error)}); write it as 512MiB or "
                         "4GiB") from None


class Store:
    """Two tables and how to ask them.

    runs: lines of `runs` by run_id. bad: what is not in the tables, and why. problems: a sentence for each thing in a
    journal that was not accepted.
    """

    def __init__(self, con: duckdb.DuckDBPyConnection):
        self.runs: dict[str, dict[str, Any]] = {}
        self.bad: list[Bad] = []
        self.problems: list[str] = []
        self._con = con
        self._files: dict[tuple[str, ...], dict[str, Path]] = {}    # by columns that they lack: files, of what
        con.execute("CREATE SCHEMA own")                        # where SHOW TABLES does not look
        con.execute(f"CREATE TABLE own.kept ({', '.join(map(' '.join, zip(_NAMES, READINGS.values())))})")

    def load(self, found: Iterable[Source | Bad]) -> None:
        """Read manifests and journals, find the Parquet files, and shut DuckDB in."""
        import duckdb
        for one in found:
            if isinstance(one, Bad):
                self.bad.append(one)
                continue
            try:
                self._add(one)
            except (ValueError, StoreError, RecursionError, duckdb.Error) as error:
                self.runs = {name: run for name, run in self.runs.items() if run["path"] != _utf8(one.path)}
                why = f"{one.readings} cannot be read: {first(error)}" if isinstance(error, duckdb.Error) else \
                    " ".join(str(error).split())
                if one.named:
                    raise error if isinstance(error, StoreError) else ValueError(why) from None
                self.bad.append(Bad(one.path, why))
        parts = [_scan(files, lacks) for lacks, files in self._files.items()]
        self._con.execute(f"CREATE VIEW readings AS {' UNION ALL '.join([*parts, 'SELECT * FROM own.kept'])}")
        self._write_runs()
        allowed = ", ".join(_text(file) for files in self._files.values() for file in files)
        self._con.execute(f"SET allowed_paths = [{allowed}]")
        self._con.execute("SET enable_external_access = false")
        self._con.execute("SET lock_configuration = true")

    def _add(self, source: Source) -> None:
        """One run or file. ValueError: one of its runs is there already, its manifest or its text is damaged."""
        if source.manifest is not None:
            self._claim(source, source.manifest.run_id, _about(source))
        if source.rows is None:
            return self._keep(source)
        file = str(source.readings)
        if source.manifest is None:                         # which runs it holds is in the readings alone
            for run_id, study in self._con.execute(
                    f"SELECT DISTINCT run_id, study FROM read_parquet({_text(file)})").fetchall():
                self._claim(source, run_id, dict(run_id=run_id, study=study))
        self._files.setdefault(source.lacks, {})[file] = source.path

    def _claim(self, source: Source, run_id: str, line: dict[str, Any]) -> None:
        line["path"] = _utf8(source.path)
        if self.runs.setdefault(run_id, line)["path"] != line["path"]:
            raise ValueError(f"{source.path} holds readings of the run {run_id}, and so does "
                             f"{self.runs[run_id]['path']}: they would count twice; keep or name one of the two")

    def _keep(self, source: Source) -> None:
        """What is committed in a journal, or the rows of a CSV."""
        import pyarrow

        from kvlab.record.store import read_parts
        with warnings.catch_warnings(record=True) as said, self._whole_or_not():
            warnings.simplefilter("always")
            for frame in read_parts(source.path):
                if source.manifest is None:
                    for run_id, study in frame[["run_id", "study"]].drop_duplicates().itertuples(index=False):
                        self._claim(source, run_id, dict(run_id=run_id, study=study))
                self._con.register("part", pyarrow.Table.from_pandas(frame, preserve_index=False))
                self._con.execute("INSERT INTO own.kept BY NAME SELECT * FROM part")
                self._con.unregister("part")
        self.problems += [f"{source.path}: {one.message}" for one in said]

    @contextlib.contextmanager
    def _whole_or_not(self) -> Iterator[None]:
        self._con.begin()
        try:
            yield
        except BaseException:
            self._con.rollback()
            raise
        self._con.commit()

    def _write_runs(self) -> None:
        lines = json.dumps([{name: one.get(name, "" if kind == "VARCHAR" else None) for name, kind in RUNS.items()}
                            for one in self.runs.values()])
        self._con.execute("CREATE TABLE runs AS SELECT unnest(from_json(?::JSON, ?), max_depth := 2)",
                          [lines, json.dumps([RUNS])])

    def counts(self) -> dict[str, tuple[int, int, int]]:
        """By run_id: comparisons, readings, and how many of these failed.

        A run whose file is damaged goes to `bad`.
        """
        import duckdb
        ask = ("SELECT run_id, count(DISTINCT comparison_id), count(*), count(*) FILTER (status IN ('failed', 'oom')) "
               "FROM {} GROUP BY run_id")
        try:
            found = self._con.execute(ask.format("readings")).fetchall()
        except (duckdb.Error, UnicodeDecodeError):          # some file of many: which?
            found = self._con.execute(ask.format("own.kept")).fetchall()
            for file, path in (one for files in self._files.values() for one in files.items()):
                try:
                    found += self._con.execute(ask.format(f"read_parquet({_text(file)})")).fetchall()
                except (duckdb.Error, UnicodeDecodeError) as error:
                    self.bad.append(Bad(path, f"{file} cannot be read: {first(error)}"))
        return {run_id: tuple(numbers) for run_id, *numbers in found}

    def select(self, sql: str) -> pyarrow.RecordBatchReader:
        """The result of one SELECT, streamed; ValueError says in one sentence what is wrong with it."""
        import duckdb
        import pyarrow
        try:
            only_reads(self._con, sql)
            found = self._con.sql(sql)
            reader = found.to_arrow_reader(_BATCH)
        except (duckdb.Error, UnicodeDecodeError) as error:
            raise explained(error, READINGS, RUNS) from None
        fields = [pyarrow.field(field.name, plain(field.type)) for field in reader.schema]
        schema = pyarrow.schema(fields)

        def batches() -> Iterator[pyarrow.RecordBatch]:
            try:
                for batch in reader:
                    yield batch.cast(schema)
            except (duckdb.Error, UnicodeDecodeError) as error:     # the latter: a damaged file, quoted by DuckDB
                raise explained(error, READINGS, RUNS) from None
            except pyarrow.ArrowInvalid as error:
                raise ValueError(f"a whole number of the result is beyond 64 bits ({error}); cast it, as in "
                                 "sum(x)::DOUBLE") from None
        return pyarrow.RecordBatchReader.from_batches(schema, batches())


def _about(source: Source) -> dict[str, Any]:
    """A run's line in `runs`; ValueError where the manifest holds what no run of kvlab writes."""
    manifest = source.manifest
    assert manifest is not None
    env = manifest.environment
    try:
        created = datetime.fromisoformat(manifest.created_utc).replace(tzinfo=None)
        jsons = {name: json.loads(_utf8(json.dumps(value, allow_nan=False, ensure_ascii=False)))
                 for name, value in (("options", manifest.options), ("environment", env))}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source.path} is damaged: its manifest holds what no kvlab writes ({error})") from None
    found = dict(run_id=manifest.run_id, study=manifest.study, size=manifest.size, device=manifest.device,
                 state="closed" if source.rows is not None else "unfinished", gpus=gpus(env),
                 engine=manifest.options.get("engine") or "local", argv=" ".join(manifest.argv),
                 **{name: env.get(name) or "" for name in
                    ("kvlab", "git_commit", "python", "torch", "platform", "cpu")})
    return {**{name: _utf8(text) for name, text in found.items()}, **jsons, "created_utc": str(created),
            "cases": manifest.cases, "cores": _whole(env.get("logical_cores")),
            "memory_bytes": _whole(env.get("memory_bytes"))}


def _utf8(text: object) -> str:
    """Without halves of characters, which a manifest or the name of a file may have."""
    return str(text).encode(errors="replace").decode()


def gpus(environment: dict[str, Any]) -> str:
    """The GPUs of a manifest's environment in words, such as "2 × NVIDIA H200"; empty where it has none."""
    listed = environment.get("gpus")
    found = [str(one.get("name")) for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    return ", ".join(name if times == 1 else f"{times} × {name}" for name, times in Counter(found).items())


def _whole(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**63 else None


def _scan(files: Iterable[str], lacks: tuple[str, ...]) -> str:
    columns = ", ".join(f"{'NULL' if kind != 'VARCHAR' else _text('')}::{kind} AS {quoted}" if name in lacks else quoted
                        for quoted, (name, kind) in zip(_NAMES, READINGS.items()))
    return f"SELECT {columns} FROM read_parquet([{', '.join(map(_text, files))}])"


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
