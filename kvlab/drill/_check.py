"""What a run directory holds, read twice: by kvlab, and line by line without it."""
from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kvlab.record.store import RunStore, read_table
from kvlab.studies.soak import METRICS, Tiny, checksum


@dataclass
class Found:
    """committed: ids of the cases that count. failed: those of them whose row says failed or oom. doubled, half: ids.

    closed: whether readings.parquet is there. wrong: sentences.
    """
    committed: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    doubled: set[str] = field(default_factory=set)
    half: set[str] = field(default_factory=set)
    closed: bool = False
    wrong: list[str] = field(default_factory=list)


def looked_at(run: Path, cases: dict[str, Tiny], may_fail: set[str]) -> Found:
    """Everything in the run against what its cases must give.

    What kvlab refuses to read, or reads otherwise than it lies there, is a sentence of `wrong`.
    """
    store = RunStore.open(run)
    found = Found(committed=set(store.committed))
    if strange := found.committed - set(cases):
        found.wrong.append(f"{len(strange)} cases are committed that were never given, such as {min(strange)}")
    times = _commits(run / "readings.jsonl")
    found.doubled = {name for name, n in times.items() if n > 1}
    judge(found, store.rows(), cases, may_fail)
    table = read_table(run)
    found.closed = (run / "readings.parquet").exists()
    judge(found, table.to_dict("records"), cases, may_fail)
    return found


def judge(found: Found, rows: Iterable[dict], cases: dict[str, Tiny], may_fail: set[str]) -> None:
    """Sort the rows' cases into those that are there whole, half, twice, or as failed."""
    by_case: dict[str, list[dict]] = {name: [] for name in found.committed}
    for row in rows:
        by_case.setdefault(row["comparison_id"], []).append(row)
    for name, own in by_case.items():
        metrics = Counter(row["metric"] for row in own)
        if name in may_fail and len(own) == 1 and own[0]["status"] in ("failed", "oom") and own[0]["error"]:
            found.failed.add(name)
        elif set(metrics) == set(METRICS) and set(metrics.values()) == {2}:
            found.doubled.add(name)
        elif name not in found.committed or metrics != Counter(METRICS.keys()) or name not in cases or any(
                row["seed"] != cases[name].index or row["status"] != "ok" for row in own) or not any(
                row["metric"] == "checksum" and row["value"] == checksum(cases[name].index) for row in own):
            found.half.add(name)


def _commits(journal: Path) -> Counter[str]:
    """How often each case is committed, by the text of the journal alone."""
    times: Counter[str] = Counter()
    if journal.exists():
        for line in journal.read_bytes().split(b"\n")[:-1]:
            if line.startswith(b'{"commit":'):
                try:
                    times[json.loads(line)["commit"]["comparison_id"]] += 1
                except (ValueError, KeyError, TypeError):
                    continue                                # torn, or damaged on purpose
    return times
