"""What a table of readings says: fitted lines with their intervals, and the smallest difference it can tell."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Estimate:
    """A number, its interval, and how many tokens or seeds it is from."""
    value: float
    low: float
    high: float
    n: int

    def through(self, function: Callable[[float], float]) -> Estimate:
        """The estimate of an increasing function of this one (perplexity = exp of the mean NLL)."""
        return Estimate(function(self.value), function(self.low), function(self.high), self.n)


def t_interval(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Mean with Student's t-interval; low and high are nan for a single value, which tells no spread.

    Refused (ValueError): no values, a value that is not finite, a confidence outside 0 … 1.
    Source: Student (1908), The probable error of a mean, Biometrika 6.
    """
    values = np.asarray(list(values), dtype=float)
    if not values.size or not np.isfinite(values).all():
        raise ValueError(f"an interval needs at least one value and finite ones, got {values.tolist()}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} must lie between 0 and 1")
    mean, n = float(values.mean()), len(values)
    if n == 1:
        return Estimate(mean, math.nan, math.nan, 1)
    from scipy.stats import t
    half = float(t.ppf((1 + confidence) / 2, n - 1) * values.std(ddof=1) / math.sqrt(n))
    return Estimate(mean, mean - half, mean + half, n)


def share(hits: int, n: int) -> Estimate:
    """The share of n that hits are, with its exact 95 % interval, which is wide where n is small.

    Refused (ValueError): n below 1, hits outside 0 … n.
    Source: Clopper and Pearson (1934), The use of confidence or fiducial limits, Biometrika 26.
    """
    if not 0 <= hits <= n or n < 1:
        raise ValueError(f"{hits} of {n} is no share; hits must lie between 0 and n, and n be at least 1")
    from scipy.special import betaincinv
    low = betaincinv(hits, n - hits + 1, 0.025) if hits else 0.0
    high = betaincinv(hits + 1, n - hits, 0.975) if hits < n else 1.0
    return Estimate(hits / n, float(low), float(high), n)


def fit(x, y, low, high, power: bool = False, draws: int = 2000) -> tuple[float, float, float]:
    """Slope of y over x (of their logarithms: an exponent) with the 95 % interval that the points' intervals give.

    Each draw moves every point inside its own interval; points weigh by relative size, so that the longest does not
    decide alone. The scatter around the line widens the interval too, by Student's t for the few points there are.
    Source: weighted least squares; a parametric bootstrap of the points, Efron and Tibshirani (1993), chapter 6.
    """
    from scipy.stats import norm, t
    x, y, low, high = (np.asarray(a, dtype=float) for a in (x, y, low, high))
    rng = np.random.default_rng(0)
    sigma = np.maximum((high - low) / 3.92, 0)
    X, Y, weight = (np.log(x), np.log(y), np.ones_like(y)) if power else (x, y, 1 / y)

    def slope(values):
        return np.polyfit(X, values, 1, w=weight)
    best = slope(Y)
    residual = (Y - np.polyval(best, X)) * weight
    freedom = len(x) - 2
    wider = t.ppf(0.975, freedom) / norm.ppf(0.975) if freedom > 0 else 0.0
    scatter = float(np.sqrt((residual**2).sum() / freedom)) * wider if freedom > 0 else 0.0
    spread = np.sqrt((sigma / y if power else sigma)**2 + (scatter / weight)**2)
    slopes = slope((Y + rng.normal(0, 1, (draws, len(Y))) * spread).T)[0]
    return float(best[0]), float(np.quantile(slopes, 0.025)), float(np.quantile(slopes, 0.975))


SAME = ("variant", "kv_format", "block_size", "page_order")          # what an A/A pair has in common


def aa_resolution(rows: pd.DataFrame) -> tuple[float, float, float] | None:
    """Ratio of the two medians of an A/A pair, with the interval that theirs give.

    Source: median A ÷ median B; low A ÷ high B … high A ÷ low B.
    """
    times = rows[(rows["metric"] == "latency_s") & (rows["kind"] == "measured")]
    for _, group in times.groupby("comparison_id", sort=False):
        again = group[group["replica"] == 1]
        if len(again) != 1:
            continue
        first = group[group["replica"] == 0]
        for column in SAME:                                         # a variant may stand there in several layouts
            if column in first:
                first = first[first[column].map(str) == str(again[column].iloc[0])]        # as text: no blocks is NA
        if len(first) == 1:
            a, b = first.iloc[0], again.iloc[0]
            return a["value"] / b["value"], a["low"] / b["high"], a["high"] / b["low"]
    return None
