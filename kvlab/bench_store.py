"""Benchmark gates of the store at size: ten million readings, as one file and as a thousand runs, asked by SQL.

The readings are those that ship with kvlab, repeated: each run has ids of its own, numbers scattered around the real
ones, and a manifest of one of four machines. Whole commands are measured, the interpreter's start included.
"""
from __future__ import annotations

import atexit
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.record.seal import sealed_parquet
from kvlab.units import MiB

if TYPE_CHECKING:
    import pyarrow

RUNS, READINGS = 1000, 10_000                   # readings of a run
TRIES = 5
MACHINES = ("AMD EPYC 7B13", "AMD EPYC 9654", "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "Neoverse-V2")
QUERIES = {
    "grouped": "SELECT study, variant, kv_len, count(*) AS n, median(value) AS median, quantile_cont(value, 0.95) AS "
               "p95 FROM readings WHERE metric = 'latency_s' AND kind = 'measured' GROUP BY ALL ORDER BY ALL",
    "joined": "SELECT cpu, readings.study, metric, count(*) AS n, avg(value) AS mean FROM readings JOIN runs USING "
              "(run_id) WHERE kind IN ('measured', 'simulated') GROUP BY ALL ORDER BY ALL",
    "all of it": "SELECT study, metric, kind, count(*) AS n, median(value) AS median FROM readings GROUP BY ALL",
}


def gates() -> list[tuple]:
    """(name, unit, goal, measure) of every gate; the median, least and most of whole commands."""
    found = [(f"query of {RUNS * READINGS:,} readings in {where}, {name}, whole command", unit, goal,
              partial(_command, unit, where, ("query", sql, "--json")))
             for where in ("one file", f"{RUNS:,} runs") for name, sql in QUERIES.items()
             for unit, goal in (("s", "<= 2.0"), ("B", f"<= {512 * MiB}"))]
    return [*found, (f"ls runs of {RUNS:,} runs, whole command", "s", "<= 4.0",
                     partial(_command, "s", f"{RUNS:,} runs", ("ls", "runs", "--json", "--out")))]


@cache
def _store() -> Path:
    """The synthetic store, made when it is first asked for and deleted at the end."""
    folder = tempfile.TemporaryDirectory(prefix="kvlab-bench-store-")
    atexit.register(folder.cleanup)
    synthetic_runs(Path(folder.name) / "runs", RUNS, READINGS)
    synthetic_file(Path(folder.name) / "all.parquet", RUNS, READINGS)
    return Path(folder.name)


@cache
def _measured(where: str, arguments: tuple[str, ...]) -> list[tuple[float, float]]:
    """(wall seconds, peak bytes) of some runs of the command, in a process of its own each."""
    from kvlab.bench import _WATCH
    found, store = [], _store() / ("all.parquet" if where == "one file" else "runs")
    command = [sys.executable, "-m", "kvlab", *arguments, str(store)]
    for _ in range(TRIES):
        told = subprocess.run([sys.executable, "-c", _WATCH, *command], check=True, capture_output=True, text=True)
        status, seconds, peak = told.stdout.split()
        if status != "0":
            raise RuntimeError(f"the command ended with status {status}: {told.stderr.strip()[-200:]}")
        found.append((float(seconds), float(peak)))
    return found


def _command(unit: str, where: str, arguments: tuple[str, ...]) -> tuple[float, float, float]:
    found = sorted(pair[unit == "B"] for pair in _measured(where, arguments))
    return found[len(found) // 2], found[0], found[-1]


def synthetic_runs(out: Path, runs: int, readings: int) -> None:
    """So many closed runs of so many readings each, as <out>/<study>/<run>."""
    for manifest, table in _runs(runs, readings):
        path = out / manifest["study"] / manifest["run_id"]
        path.mkdir(parents=True)
        (path / "manifest.json").write_text(json.dumps(manifest, indent=2), encoding="utf-8")
        with open(path / "readings.parquet", "w+b") as file, sealed_parquet(file, table.schema) as writer:
            writer.write_table(table)


def synthetic_file(out: Path, runs: int, readings: int) -> None:
    """The readings of the same runs as one Parquet file, in the row groups that kvlab writes."""
    import pyarrow
    writer, waiting, rows = None, [], 0
    with open(out, "w+b") as file, contextlib.ExitStack() as stack:
        for _, table in _runs(runs, readings):
            writer = writer or stack.enter_context(sealed_parquet(file, table.schema))
            waiting.append(table)
            rows += len(table)
            if rows >= 2**16:
                writer.write_table(pyarrow.concat_tables(waiting).unify_dictionaries())
                waiting, rows = [], 0
        assert writer is not None
        if waiting:
            writer.write_table(pyarrow.concat_tables(waiting).unify_dictionaries())


def _runs(runs: int, readings: int) -> Iterator[tuple[dict, pyarrow.Table]]:
    """(manifest, readings) of each run: the studies that ship with kvlab in turn, an hour apart."""
    import numpy as np

    from kvlab.catalog import data_dir
    from kvlab.record.reading import SCHEMA_VERSION
    from kvlab.record.store import read_table
    chance, known = np.random.default_rng(0), []
    for path in sorted((data_dir() / "reference").glob("*.parquet")):
        about = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        about.pop("checksum", None)                             # of the shipped manifest, which is changed below
        known.append((about, _coded(read_table(path))))
    for number in range(runs):
        about, columns = known[number % len(known)]
        when = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=number)
        run_id = f"{when:%Y%m%dT%H%M%SZ}-{number:06x}"
        manifest = {**about, "schema_version": SCHEMA_VERSION, "created_utc": f"{when:%Y-%m-%dT%H:%M:%SZ}",
                    "run_id": run_id, "environment": {**about["environment"], "cpu": MACHINES[number // 10 % 4]}}
        yield manifest, _repeated(columns, readings, run_id, chance)


def _coded(frame) -> dict:
    """Each column as its numbers, or as (codes, words): text is a few words that come again and again."""
    import pandas as pd
    return {name: values.astype("float64" if str(values.dtype) == "Int64" else values.dtype).to_numpy()
            if str(values.dtype) != "string" else pd.factorize(values) for name, values in frame.items()}


def _repeated(columns: dict, rows: int, run_id: str, chance) -> pyarrow.Table:
    """The columns over and over until there are so many rows; each time they are other comparisons and cases."""
    import numpy as np
    import pyarrow

    from kvlab.record.reading import COLUMNS, SCHEMA_VERSION
    length = len(columns["value"])
    at, turn = np.arange(rows) % length, np.arange(rows) // length
    scatter, made = chance.lognormal(0, 0.1, rows), {}
    for name, dtype in COLUMNS.items():
        if dtype != "string":
            values = columns[name][at] * (scatter if name in ("value", "low", "high") else 1)
            made[name] = pyarrow.array(values, from_pandas=True).cast(
                pyarrow.int64() if dtype == "Int64" else pyarrow.float64())
            continue
        codes, words = columns[name]
        codes = codes[at]
        if name == "run_id":
            codes, words = np.zeros(rows, dtype=int), [run_id]
        elif name in ("comparison_id", "case_id"):
            codes, words = codes + turn * len(words), [
                word and f"{i:03x}{run_id[-4:]}{word[7:]}" for i in range(turn[-1] + 1) for word in words]
        made[name] = pyarrow.DictionaryArray.from_arrays(
            pyarrow.array(codes.astype(np.int32)), pyarrow.array(list(words), pyarrow.large_string()))
    return pyarrow.table(made).replace_schema_metadata({"kvlab.schema_version": str(SCHEMA_VERSION),
                                                        "kvlab.units": "{}"})
