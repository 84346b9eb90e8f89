"""The ratio of two readings with its interval, and what that interval allows to say.

Samples of one round resemble each other, so an interval from pooled samples is too narrow. Of 120 pairs of the same
trial measured together (sdpa, 512 and 2,048 tokens, two cores with other work) it held the ratio 1 in 80 %; rounds
drawn first, 93 %; the quotient of the two stored intervals, 88 %. Minutes apart it holds it in 55 to 76 %: between
two runs it is an interval within the runs, no 95 % interval of the ratio, and they must differ by more than the margin
before they differ (of 150 such pairs 2 did, and 12 to 23 at 3 to 2 %, what an A/A pair gives).
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kvlab.comparing._sides import Side
from kvlab.record import seal
from kvlab.record.environment import opened_file
from kvlab.serving.bench_files import PER_REQUEST

LARGEST_SAMPLES = 2**26                                                     # bytes of a file of samples


@dataclass(frozen=True)
class Limits:
    """How close to 1 a ratio counts as 1, and how far from 1 as another: `margin` and `resolution` as shares.

    resolution: by how much two measurements of one trial differ here; None where no A/A pair tells. A margin of
    equivalence does not grow with noise: where the resolution exceeds it, nothing is the same.
    """
    margin: float
    resolution: float | None
    between_runs: bool

    @property
    def resolves(self) -> bool:
        return self.resolution is None or self.resolution <= self.margin

    @property
    def beyond(self) -> float:
        if self.resolution is None:
            return self.margin
        return max(self.margin, self.resolution) if self.between_runs else self.resolution


def verdict(low: float | None, high: float | None, limits: Limits, time: bool) -> str:
    """SAME, FASTER, SLOWER (LESS, MORE where it is no time) or AMBIGUOUS, from the interval of B / A.

    SAME: the whole interval is within the margin of 1, and the measurement resolves that margin. FASTER, …: the whole
    interval is further from 1 than `limits.beyond`. Distances are factors: [1 / (1 + x), 1 + x] is within x, so that
    swapping A and B swaps the words.
    """
    if low is None or high is None:
        return "AMBIGUOUS"
    beyond = limits.beyond
    if limits.resolves and 1 / (1 + limits.margin) <= low and high <= 1 + limits.margin:
        return "SAME"
    if low > 1 + beyond:
        return "SLOWER" if time else "MORE"
    if high < 1 / (1 + beyond):
        return "FASTER" if time else "LESS"
    return "AMBIGUOUS"


def interval(side_a: Side, one: dict, side_b: Side, other: dict) -> tuple[float | None, float | None, str]:
    """(low, high, remark) of other / one: from raw samples by rounds where both kept them, else from their intervals.

    A modelled number has no interval and is exact.
    """
    if one["metric"] == other["metric"] and one["metric"] in ("latency_s", *PER_REQUEST):
        samples = [_samples(side, row) for side, row in ((side_a, one), (side_b, other))]
        if all(s is not None and len(s) > 1 and sum(map(len, s)) > 5 for s in samples):
            together = (one["run_id"], one["comparison_id"]) == (other["run_id"], other["comparison_id"])
            return *ratio_interval(*samples, together), ""
    ends = [(row["value"],) * 2 if row["low"] is None and row["kind"] in ("modelled", "simulated")
            else (row["low"], row["high"]) for row in (one, other)]
    lacking = [name for name, pair in zip("AB", ends) if None in pair]
    if lacking:
        return None, None, f"{' and '.join(lacking)} without an interval"
    (low_a, high_a), (low_b, high_b) = ends
    if min(low_a, low_b) < 0 or high_a == 0:
        return (1.0, 1.0, "both 0") if low_a == high_a == low_b == high_b == 0 else (None, None, "no ratio to A")
    exact = low_a == high_a and low_b == high_b
    return low_b / high_a, high_b / low_a if low_a else math.inf, "" if exact else "from the stored intervals"


def in_cycles(low: float, high: float, one: dict, other: dict, cycles_a: dict, cycles_b: dict) -> tuple[float, float]:
    """The interval of B / A in cycles, from that in time: the clock of each side is its cycles over its time.

    An end of a side without an interval is its value.
    """
    (low_a, high_a), (low_b, high_b) = ([_end(cycles, end) / _end(time, end) for end in ("low", "high")]
                                        for time, cycles in ((one, cycles_a), (other, cycles_b)))
    return low * low_b / high_a, high * high_b / low_a


def _end(row: dict, end: str) -> float:
    """An end of a row's interval, 1e-300 at the least so that it divides."""
    return max(row["value"] if row[end] is None else row[end], 1e-300)


def ratio_interval(a: list, b: list, together: bool, draws: int = 1000) -> tuple[float, float]:
    """95 % bootstrap interval of median(b) / median(a); a and b are lists of rounds, each an array of samples.

    Of two runs it says what their own rounds scatter, not what the time between the runs changes.

    Rounds are drawn with replacement, then samples within them. together: the rounds were interleaved, and what one
    brought to both sides cancels: both draw the same ones.
    """
    import numpy as np
    rng = np.random.default_rng(0)

    def medians(rounds, chosen):
        sizes = np.array([len(r) for r in rounds])
        samples, starts = np.concatenate(rounds), np.cumsum(sizes) - sizes
        each = -(-min(len(samples), 2000) // len(rounds))    # of a round; more samples do not narrow it any further
        picked = np.repeat(chosen, each, axis=1)
        within = (rng.random(picked.shape) * sizes[picked]).astype(int)
        return np.median(samples[starts[picked] + within], axis=1)
    chosen_a, chosen_b = (rng.integers(0, len(x), (draws, len(x))) for x in (a, b))
    if together and len(a) == len(b):
        chosen_b = chosen_a
    low, high = np.quantile(medians(b, chosen_b) / medians(a, chosen_a), [0.025, 0.975])
    return float(low), float(high)


def _samples(side: Side, row: dict) -> list | None:
    """Samples of the case by round; None where the run or file kept none, or none that can be read.

    Without those taken while the GPU was slowed down, if the reading is without them: its n tells.
    """
    if side.samples is not None:
        return side.samples.get((row["case_id"], row["metric"]))
    if side.run is None or not row["artifact"]:
        return None
    path = (side.run / row["artifact"].replace("\0", "")).resolve()
    if not path.is_relative_to(side.run.resolve() / "samples") or not path.is_file():    # nor where links lead out
        return None
    frame = _read(path, path.stat().st_mtime_ns)
    if frame is None:
        return None
    own = frame[frame["case_id"] == row["case_id"]]
    if len(own) != row["n"] == (~own["throttled"]).sum():
        own = own[~own["throttled"]]
    rounds = [group.to_numpy(dtype=float) for _, group in own.groupby("round")["seconds"]]
    return rounds if rounds and all((r > 0).all() for r in rounds) else None


@lru_cache(maxsize=64)
def _read(path: Path, changed: int):
    import pyarrow
    import pyarrow.parquet
    if path.stat().st_size > LARGEST_SAMPLES:
        return None
    try:
        with opened_file(path) as file:
            seal.check(file)
        found = pyarrow.parquet.read_table(path, partitioning=None).to_pandas()
        flags = found["throttled"].astype("boolean").fillna(False).astype(bool) if "throttled" in found else False
        return found[["case_id", "round", "seconds"]].astype({"seconds": float}).assign(throttled=flags)
    except (pyarrow.ArrowException, OSError, KeyError, ValueError, TypeError):
        return None
