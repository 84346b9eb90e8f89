"""Does a long run hold out? Many tiny cases: the time kvlab spends on each, and the memory and files it keeps.

A case computes a checksum of its number, so that a result that is lost, doubled or half written shows. Run it on a new
cluster, or on a new file system, before anything that takes days: `kvlab run soak --engine ray`.
"""
from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from kvlab.record.environment import cpu_name
from kvlab.record.reading import Reading, missing
from kvlab.studies._run import Finding, case_row
from kvlab.units import MiB, display

if TYPE_CHECKING:
    import pandas as pd

SIZES = {"smoke": 100, "small": 10_000, "large": 100_000}       # cases
PAUSE_S = 10.0                      # a tiny case takes far less: nothing was run meanwhile
METRICS = {"checksum": "count", "worker_memory": "B", "worker_files": "count", "finished_s": "s"}
TENTH = 10                                                      # the second and last tenth of a run are compared
PACED = 1_000                                                   # cases a worker, below which a tenth's pace is luck
HERE = "this machine"                                           # the worker whose name is ""


@dataclass(frozen=True)
class Tiny:
    """A case of almost no work: a checksum of its number, after work_s seconds of computing.

    take_bytes: memory that it takes meanwhile, all written to.
    """
    index: int
    work_s: float = 0.0
    take_bytes: int = 0
    timed: ClassVar[bool] = False

    @property
    def comparison_id(self) -> str:
        return f"tiny-{self.index:07d}"

    def columns(self) -> dict:
        return dict(study="soak", seed=self.index, device="cpu")

    def rows(self) -> list[dict]:
        """Its checksum, what the process that computed it holds by then, and when that was."""
        taken = bytearray(b"\1") * self.take_bytes
        end = time.thread_time() + self.work_s
        found = checksum(self.index)
        while time.thread_time() < end:
            zlib.crc32(bytes(1 << 16))
        del taken
        return [case_row(self, reading) for reading in (
            _held("checksum", found, "count", "zlib.crc32", "derived"),
            _held("worker_memory", _memory(), "B", "/proc/self/statm"),
            _held("worker_files", _files(), "count", "/proc/self/fd"),
            _held("finished_s", time.monotonic(), "s", "time.monotonic", "timer"))]


def checksum(index: int) -> int:
    """What the case of that number must give."""
    return zlib.crc32(b"kvlab soak %d" % index)


def cases(size: str = "small", *, device: str = "cpu", variants=None, model=None) -> Iterator[Tiny]:
    """One case after another, as many as the size says."""
    if device != "cpu" or variants or model:
        raise ValueError("soak computes checksums on CPUs; leave out --device, --variants and --model")
    return (Tiny(index) for index in range(SIZES[size]))


def run(case: Tiny, *, artifacts=None, watch=None) -> list[dict]:
    """The rows of a case."""
    return case.rows()


def findings(table: pd.DataFrame) -> list[Finding]:
    """Whether every checksum is right and there once, the pace of the answers, and what the workers kept."""
    found = [_checksums(table)]
    places = [(worker, mine) for worker, mine in _answers(table).groupby("worker") if len(mine) > 1]
    if places:
        found.append(_pace(places))
    places = [(worker, mine) for worker, mine in places if len(mine) >= 2 * TENTH]
    if paced := [(worker, mine) for worker, mine in places if len(mine) >= PACED]:
        found.append(_slowing(paced))
    for metric, what, unit in (("worker_memory", "most memory", "B"), ("worker_files", "most open files", "count")):
        told = [(worker, mine.dropna(subset=metric)) for worker, mine in places if metric in mine]
        told = [(worker, mine) for worker, mine in told if len(mine) >= 2 * TENTH]
        if told:
            found.append(_growth(told, metric, what, unit))
    return found


def _checksums(table: pd.DataFrame) -> Finding:
    sums = table[(table["metric"] == "checksum") & (table["kind"] == "measured")]
    right = (sums["value"] == sums["seed"].map(checksum)).groupby(sums["comparison_id"]).all()
    n, good, again = table["comparison_id"].nunique(), int(right.sum()), len(sums) - len(right)
    said = (f"{good:,} of {n:,} cases gave the right checksum, {len(right) - good:,} a wrong one, {n - len(right):,} "
            "none." + (f" {again:,} checksums are there twice." if again else ""))
    return Finding("checksums", said, good / n if n else None, "ratio", None, None, "measured")


def _answers(table: pd.DataFrame) -> pd.DataFrame:
    """A line per case that was answered, in the order in which they were: its worker and what it measured.

    `finished_s` is without the pauses of its worker; `paused` says behind which of them a case came.
    """
    rows = table[(table["kind"] == "measured") & table["metric"].isin(METRICS)]
    wide = rows.pivot_table(index=["worker", "comparison_id"], columns="metric", values="value", aggfunc="first")
    if "finished_s" not in wide:
        return wide.reset_index().iloc[:0]
    wide = wide.reset_index().sort_values("finished_s")
    steps = wide.groupby("worker")["finished_s"].diff().fillna(0.0)
    wide["paused"] = steps > PAUSE_S
    wide["finished_s"] = steps.where(~wide["paused"], 0.0).groupby(wide["worker"]).cumsum()
    return wide


def _pace(places: list[tuple[str, pd.DataFrame]]) -> Finding:
    means = {worker: float(mine["finished_s"].iloc[-1] - mine["finished_s"].iloc[0]) / (len(mine) - 1)
             for worker, mine in places}
    fast, slow = min(means, key=means.get), max(means, key=means.get)
    said = f"Between two answers lay {display(means[slow], 's')} on average."
    if len(means) > 1:
        said = (f"Between two answers of a worker lay {display(means[fast], 's')} ({fast or HERE}) to "
                f"{display(means[slow], 's')} ({slow or HERE}) on average, over {len(means)} workers.")
    if pauses := sum(int(mine["paused"].sum()) for _, mine in places):
        said += f" {pauses:,} pause{'s' * (pauses > 1)} of over {PAUSE_S:.0f} s, as before a --resume, left out."
    return Finding("case_s", said, means[slow], "s", None, None, "measured")


def _slowing(places: list[tuple[str, pd.DataFrame]]) -> Finding:
    """The time of each tenth in units of the second's: of the worker whose last is the longest."""
    ratios = {worker: _tenths(mine)["finished_s"].agg(lambda at: (at.iloc[-1] - at.iloc[0]) / (len(at) - 1))
              for worker, mine in places}
    ratios = {worker: taken / taken[1] for worker, taken in ratios.items()}
    worst = max(ratios, key=lambda worker: ratios[worker].iloc[-1])
    last, between = float(ratios[worst].iloc[-1]), ratios[worst].iloc[2:-1]
    said = (f"The last tenth of the cases took {last:.2f} × the time of the second, and those between them "
            f"{between.min():.2f} to {between.max():.2f} ×{_of(worst, places)}.")
    return Finding("slowing", said, last, "ratio", None, None, "measured")


def _growth(places: list[tuple[str, pd.DataFrame]], metric: str, what: str, unit: str) -> Finding:
    """The most that a worker held in a tenth of its cases: there may be several processes behind one name."""
    most = {worker: _tenths(mine)[metric].max() for worker, mine in places}
    worst = max(most, key=lambda worker: most[worker].iloc[-1] - most[worker][1])
    second, last = float(most[worst][1]), float(most[worst].iloc[-1])
    ends = [display(value, unit) if unit == "B" else f"{value:.0f}" for value in (second, last)]
    grown = f"{(last - second) / MiB:+.2f} MiB" if unit == "B" else f"{last - second:+.0f}"
    said = (f"The {what} that a worker held went from {ends[0]} in the second tenth of the cases to {ends[1]} in the "
            f"last: {grown}{_of(worst, places)}.")
    return Finding(f"{metric}_growth", said, last - second, unit, None, None, "measured")


def _tenths(mine: pd.DataFrame):
    """A worker's answers, grouped by the tenth of its run (0 to 9)."""
    return mine.groupby([TENTH * i // len(mine) for i in range(len(mine))])


def _of(worker: str, places: list) -> str:
    return f" (the largest of {len(places)} workers, {worker or HERE})" if len(places) > 1 else ""


def _held(metric: str, value: float | None, unit: str, source: str, method: str = "counter") -> Reading:
    if value is None:
        return missing(metric, unit, f"this system has no {source}", source=source, hardware=_cpu())
    return Reading(metric, value, unit, "measured", method, source, hardware=_cpu())


@cache
def _cpu() -> str:
    return cpu_name()


def _memory() -> int | None:
    """Resident bytes of this process, from what costs a few microseconds."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _files() -> int | None:
    """Open files of this process."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return None
