"""The traces of a run in one Chrome trace: a process per trial, each beginning at zero."""
from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.record.export import atomic_file
from kvlab.record.trace import load, usable

if TYPE_CHECKING:
    import pandas as pd

_TIMED = ("X", "s", "t", "f")   # complete events, and the arrows from a launch to its kernel


def traces_of(run: Path, table: pd.DataFrame) -> Iterator[tuple[str, Path]]:
    """(what it is of, trace file) of each trial of a run that has one.

    A path that leads out of the run is refused (ValueError): the table may be anybody's.
    """
    folder = (run if run.is_dir() else run.parent).resolve()
    rows = table[table["artifact"].str.startswith("traces/")].drop_duplicates("artifact")
    for row in rows.to_dict("records"):
        path = folder / row["artifact"]
        if not path.resolve().is_relative_to(folder):
            raise ValueError(f"{run} names a trace outside of itself: {row['artifact']!r}; its traces are not read")
        yield f"{row['variant']} {row['kv_format']} {row['phase']} kv_len={row['kv_len']} ({row['case_id']})", path


def write_merged(run: Path, table: pd.DataFrame, out: Path) -> None:
    """All traces of a run into one gzip file, one in memory at a time."""
    found = list(traces_of(run, table))
    if not found:
        raise ValueError(f"{run} has no traces; make a run with them: kvlab run STUDY --trace")
    with atomic_file(out) as raw, gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=6, mtime=0) as file:
        about = {"runs": sorted(set(table["run_id"])), "trials": [label for label, _ in found]}
        file.write(b'{"displayTimeUnit":"ms","kvlab":%s,"traceEvents":[' % json.dumps(about).encode())
        between = b"\n"
        for number, (label, path) in enumerate(found, 1):
            for event in _events(path, number, label):
                file.write(between + json.dumps(event, separators=(",", ":")).encode())
                between = b",\n"
        file.write(b"\n]}\n")


def _events(path: Path, number: int, label: str) -> Iterator[dict]:
    """A trace's events as those of one process, whose lanes (threads, streams of a GPU) are numbered through."""
    data, _ = load(path)
    events = [e for e in data["traceEvents"] if isinstance(e, dict) and e.get("cat") != "Trace"]
    names = {(str(e.get("pid")), str(e.get("tid"))): e["args"].get("name") for e in events
             if e.get("name") == "thread_name" and isinstance(e.get("args"), dict)}
    timed = [e for e in events if e.get("ph") in _TIMED and usable(e.get("ts")) and usable(e.get("dur", 0))]
    start = min((e["ts"] for e in timed), default=0)
    lanes: dict[tuple[str, str], int] = {}
    yield dict(ph="M", name="process_name", pid=number, tid=0, args=dict(name=label))
    for event in timed:
        lane = str(event.get("pid")), str(event.get("tid"))
        if lane not in lanes:
            lanes[lane] = len(lanes) + 1
            name = str(names.get(lane) or " / ".join(lane))
            yield dict(ph="M", name="thread_name", pid=number, tid=lanes[lane], args=dict(name=name))
        flow = {"id": f"{number}.{event['id']}"} if "id" in event else {}        # arrows stay within their trial
        yield {**event, "pid": number, "tid": lanes[lane], "ts": event["ts"] - start, **flow}
