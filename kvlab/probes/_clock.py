"""How kvlab takes times: which clock, how samples are summarised, when there are enough of them.

Source: research on triton.testing, NVBench and FlashInfer's timers; see docs/design.md, "How we measure".
"""
from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Clock:
    """A source of seconds and what to call it in a row."""
    now: Callable[[], float]
    method: str


def clock(threads: int) -> Clock:
    """Thread CPU time for one thread (other programs do not count in it), wall time for several.

    torch computes in the calling thread when it has one thread. Windows counts thread time in steps of about 16 ms,
    so there wall time is taken, and the row says so.
    """
    if threads == 1 and sys.platform != "win32":
        return Clock(time.thread_time, "timer:thread_cpu")
    return Clock(time.perf_counter, "timer:wall")


@dataclass(frozen=True)
class Summary:
    """A sample's median with its 95 % bootstrap interval, its 5th and 95th percentile and relative deviation.

    A single sample has no interval, two to five have their whole range.
    """
    median: float
    low: float | None
    high: float | None
    p5: float
    p95: float
    rel_std: float
    n: int

    @property
    def rel_half_width(self) -> float:
        if self.low is None or self.median <= 0:
            return float("inf")
        return (self.high - self.low) / 2 / self.median


def bootstrap(statistic: Callable[[np.ndarray], np.ndarray], samples: np.ndarray, resamples: int = 1000,
              ) -> tuple[float, float]:
    """95 % percentile bootstrap interval of statistic(samples along axis 1); reproducible (fixed seed)."""
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(samples), (resamples, len(samples)))
    low, high = np.quantile(statistic(samples[picks]), [0.025, 0.975])
    return float(low), float(high)


def summarise(seconds: list[float], resamples: int = 1000) -> Summary:
    """Summary of one trial's samples."""
    x = np.asarray(seconds, dtype=float)
    if len(x) == 1:
        low = high = None
    elif len(x) <= 5:
        low, high = float(x.min()), float(x.max())
    else:
        low, high = bootstrap(lambda draws: np.median(draws, axis=1), x, resamples)
    median = float(np.median(x))
    spread = float(x.std(ddof=1) / x.mean()) if len(x) > 1 and x.mean() > 0 else 0.0
    p5, p95 = np.quantile(x, [0.05, 0.95])
    return Summary(median, low, high, float(p5), float(p95), spread, len(x))


def paired_ratio(a: list[float], b: list[float]) -> tuple[float, float, float]:
    """Median of a / b over pairs taken side by side, with its 95 % bootstrap interval."""
    ratio = np.asarray(a, dtype=float) / np.asarray(b, dtype=float)
    low, high = bootstrap(lambda draws: np.median(draws, axis=1), ratio)
    return float(np.median(ratio)), low, high
