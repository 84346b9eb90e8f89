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
from typing import TYPE_CHECKING, ClassVar

from kvlab.record.reading import Reading, missing
from kvlab.studies._run import Finding, case_row

if TYPE_CHECKING:
    import pandas as pd

SIZES = {"smoke": 100, "small": 10_000, "large": 100_000}       # cases
METRICS = {"checksum": "count", "worker_memory": "B", "worker_files": "count", "finished_s": "s"}
TENTH = 10                                                      # the first and last tenth of a run are compared


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
        memory, files = _memory(), _files()
        return [case_row(self, reading) for reading in (
            Reading("checksum", found, "count", "measured", "derived", "zlib.crc32"),
            Reading("worker_memory", memory, "B", "measured", "counter", "/proc/self/statm") if memory is not None else
            missing("worker_memory", "B", "this system has no /proc/self/statm"),
            Reading("worker_files", files, "count", "measured", "counter", "/proc/self/fd") if files is not None else
            missing("worker_files", "count", "this system has no /proc/self/fd"),
            Reading("finished_s", time.monotonic(), "s", "measured", "timer", "time.monotonic"))]


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
    """Whether every checksum is right and there once, what a case took, and what the workers kept."""
    sums = table[(table["metric"] == "checksum") & (table["kind"] == "measured")]
    right = sum(value == checksum(index) for index, value in zip(sums["seed"], sums["value"]))
    n = table["comparison_id"].nunique()
    found = [Finding("checksums", f"{right:,} of {n:,} cases gave the right checksum, {len(sums) - right:,} a wrong "
                     f"one, {n - len(sums):,} none.", right / n if n else None, "ratio", None, None, "measured")]
    for worker, rows in table[table["metric"] == "finished_s"].groupby("worker"):
        took = rows["value"].max() - rows["value"].min()
        if len(rows) > 1:
            where, each = f" on {worker}" if worker else "", took / (len(rows) - 1)
            found.append(Finding(f"case_s{where and '_' + worker}", f"A case took {1e3 * each:.2f} ms{where}, from the "
                                 "first answer to the last.", each, "s", None, None, "measured"))
    for metric, what, unit in (("worker_memory", "memory", "B"), ("worker_files", "open files", "count")):
        rows = table[(table["metric"] == metric) & (table["kind"] == "measured")]
        if len(rows) >= 2 * TENTH:
            tenth = len(rows) // TENTH
            first, last = rows["value"].iloc[tenth:2 * tenth].median(), rows["value"].iloc[-tenth:].median()
            found.append(Finding(f"{metric}_growth", f"A worker's {what} went from {_said(first, unit)} in the second "
                                 f"tenth of the cases to {_said(last, unit)} in the last.", last - first, unit, None,
                                 None, "measured"))
    return found


def _said(value: float, unit: str) -> str:
    from kvlab.units import display
    return display(value, unit) if unit == "B" else f"{value:.0f}"


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
