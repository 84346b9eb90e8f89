"""What few seeds can say: intervals, a trend over ratios, a knee on a logarithmic axis.

Everything is Student's t over seeds, which are few: n stands beside every number, and "no effect" is said only where
an interval lies inside a margin that was named beforehand.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from kvlab.accuracy.statistics import Estimate


class Trend(NamedTuple):
    """Page's test that values fall from column to column: statistic L, p of that order by chance, rows, columns."""
    statistic: float
    p: float
    rows: int
    columns: int


class Knee(NamedTuple):
    """Does the slope over log2(ratio) change at `at`? change: slope beyond it minus slope before, per doubling.

    p: of the F test, hinge against straight line (curvature of either sign; nan where the points do not allow one).
    verdict: "knee" (the whole interval of the change is below -margin), "no knee beyond the margin" (the whole interval
    is above it) or "inconclusive"; why: in words.
    """
    at: float
    change: Estimate
    margin: float
    p: float
    verdict: str
    why: str


def t_interval(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Mean with Student's t-interval; low and high are nan for a single value, which tells no spread.

    Refused (ValueError): no values, a value that is not finite, a confidence outside 0 … 1.
    """
    values = np.asarray(list(values), dtype=float)
    if not values.size or not np.isfinite(values).all():
        raise ValueError(f"an interval needs at least one value and finite ones, got {values.tolist()}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} must lie between 0 and 1")
    mean, n = float(values.mean()), len(values)
    if n == 1:
        return Estimate(mean, math.nan, math.nan, 1)
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1) * values.std(ddof=1) / math.sqrt(n))
    return Estimate(mean, mean - half, mean + half, n)


def trend(values: Sequence[Sequence[float]]) -> Trend:
    """Page's trend test over rows [independent repetitions, columns in the order in which they should fall].

    Rows must be independent: one per seed. Values of one model at several N are not.
    Source: Page 1963 (doi 10.1080/01621459.1963.10500843).
    """
    table = np.asarray(values, dtype=float)
    if table.ndim != 2 or table.shape[0] < 2 or table.shape[1] < 3:
        raise ValueError(f"a trend test needs at least 2 rows (seeds) and 3 columns (ratios), got {table.shape}")
    found = stats.page_trend_test(table[:, ::-1])                    # the test is for values that rise
    return Trend(float(found.statistic), float(found.pvalue), *table.shape)


def knee(ratios: Sequence[float], values: Sequence[Sequence[float]], *, at: float = 16, margin: float) -> Knee:
    """Test for a knee at ratio `at`: rows of `values` are seeds, columns the ratios; a loss makes values fall.

    Each seed has its own least-squares hinge y = a + b·x + c·max(0, x - log2(at)), x = log2(ratio); the change of slope
    c has a t-interval over seeds. A curve that bends the other way (losses that get smaller) has c > 0 and is no knee.
    Inconclusive where no ratio lies beyond `at`, fewer than two up to it, or there are fewer than two seeds.
    """
    if not margin > 0:
        raise ValueError(f"margin={margin!r} must be above 0: how much of a change of slope would matter")
    x, y = np.log2(np.asarray(ratios, dtype=float)), np.asarray(values, dtype=float)
    if y.ndim != 2 or y.shape[1] != len(x):
        raise ValueError(f"values of shape {y.shape} do not fit {len(x)} ratios; rows are seeds, columns ratios")
    bend = np.maximum(0, x - math.log2(at))
    nothing = Estimate(math.nan, math.nan, math.nan, len(y))
    lacks = ("no ratio beyond it was tried" if not bend.any() else
             "fewer than two ratios up to it were tried" if (bend == 0).sum() < 2 else
             "one seed tells no spread" if len(y) < 2 else "")
    if lacks:
        return Knee(at, nothing, margin, math.nan, "inconclusive", lacks)
    hinge = np.stack([np.ones_like(x), x, bend], axis=1)
    change = t_interval(np.linalg.lstsq(hinge, y.T, rcond=None)[0][2])
    p = _f_test(hinge[:, :2], hinge, y)
    verdict, why = (
        ("knee", f"the loss per doubling grows by more than {margin:g} beyond it") if change.high < -margin else
        ("no knee beyond the margin", f"a loss per doubling that grows by {margin:g} or more beyond it is excluded")
        if change.low > -margin else
        ("inconclusive", f"the interval of the change allows both more and less than {margin:g} per doubling"))
    return Knee(at, change, margin, p, verdict, why)


def difference(a: Sequence[float], b: Sequence[float], confidence: float = 0.90) -> Estimate:
    """Mean of a - b, paired by seed. The 90 % interval is the one that `statistics.equivalence` takes."""
    a, b = np.asarray(list(a), dtype=float), np.asarray(list(b), dtype=float)
    if a.shape != b.shape:
        raise ValueError(f"{a.size} and {b.size} values cannot be paired; give one per seed of each")
    return t_interval(a - b, confidence)


def _f_test(small: np.ndarray, large: np.ndarray, y: np.ndarray) -> float:
    """p of the larger of two nested designs [ratios, terms] by all seeds' points together; nan without freedom."""
    def rest(design):
        every, target = np.tile(design, (len(y), 1)), y.ravel()
        best = np.linalg.lstsq(every, target, rcond=None)[0]
        return float(((target - every @ best) ** 2).sum())
    extra, freedom = large.shape[1] - small.shape[1], y.size - large.shape[1]
    before, after = rest(small), rest(large)
    if freedom < 1 or after <= 0:
        return math.nan
    return float(stats.f.sf((before - after) / extra / (after / freedom), extra, freedom))
