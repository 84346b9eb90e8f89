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

from kvlab.record.statistics import Estimate, t_interval

ALONE = 3.0                     # so many times the bend anywhere else is a bend of its own


class Trend(NamedTuple):
    """Page's test that values fall from column to column: statistic L, p of that order by chance, rows, columns."""
    statistic: float
    p: float
    rows: int
    columns: int


class Bend(NamedTuple):
    """How the slope over log2(ratio) changes at one ratio: slope beyond it minus slope before it, per doubling."""
    at: float
    change: Estimate


class Knee(NamedTuple):
    """Is there a knee at ratio `at`?

    change: of the slope there, per doubling. bends: the same at every inner ratio. p: of the F test, hinge at `at`
    against straight line (curvature of any kind; nan where the points do not allow one). verdict: "knee", "knee
    elsewhere", "no knee" or "inconclusive"; why: in words.
    """
    at: float
    change: Estimate
    bends: tuple[Bend, ...]
    margin: float
    p: float
    verdict: str
    why: str


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

    A loss per doubling that grows is a bend; a smooth curve bends everywhere. A knee is a bend at one place alone:
    the change of slope there is beyond -margin, it is more than ALONE times that at every other inner ratio (paired
    over seeds; every interval excludes the opposite), and a hinge there fits the means better than a quadratic.
    ALONE = 3 lets every logistic curve pass as smooth whose width is a doubling or more, since its bends grow by a
    factor e at most from one doubling to the next.
    "no knee": the interval of the change excludes a bend beyond the margin, or another ratio surely has more than a
    third of it. Inconclusive where none of these holds, or where the ratios and seeds are too few.
    """
    if not margin > 0:
        raise ValueError(f"margin={margin!r} must be above 0: how much of a change of slope would matter")
    x, y = np.log2(np.asarray(ratios, dtype=float)), np.asarray(values, dtype=float)
    if y.ndim != 2 or y.shape[1] != len(x):
        raise ValueError(f"values of shape {y.shape} do not fit {len(x)} ratios; rows are seeds, columns ratios")
    if (np.diff(x) <= 0).any():
        raise ValueError(f"ratios={list(ratios)} must rise")
    inner = [float(r) for r in ratios[1:-1]]
    lacks = (f"no ratio beyond {at:g} was tried" if at >= max(ratios) else
             f"no ratio below {at:g} was tried" if at <= min(ratios) else
             f"ratio {at:g} was not tried" if at not in inner else
             "one seed tells no spread" if len(y) < 2 else
             f"with {len(x)} ratios a knee cannot be told from a smooth curve" if len(x) < 5 else "")
    if lacks:
        return Knee(at, Estimate(math.nan, math.nan, math.nan, len(y)), (), margin, math.nan, "inconclusive", lacks)
    bend_ZR = np.diff(np.diff(y) / np.diff(x))                       # of each seed at each inner ratio
    bends = tuple(Bend(r, t_interval(bend_ZR[:, i])) for i, r in enumerate(inner))
    here = inner.index(at)
    p = _f_test(_design(x), _design(x, at), y)
    return Knee(at, bends[here].change, bends, margin, p, *_place(x, y, inner, bend_ZR, bends, here, margin))


def _place(x, y, inner, bend_ZR, bends, here, margin) -> tuple[str, str]:
    """(verdict, why): where the bends of the curve stand."""
    def share(i, j):
        """Below 0: the bend at i is more than ALONE times the one at j, whichever way that bends."""
        return t_interval(bend_ZR[:, i] + ALONE * np.abs(bend_ZR[:, j]))

    def is_knee(i):
        others = [j for j in range(len(inner)) if j != i]
        return (bends[i].change.high < -margin and all(share(i, j).high < 0 for j in others)
                and _rest(_design(x, inner[i]), y.mean(0)) < _rest(_design(x, power=2), y.mean(0)))
    at, strongest = inner[here], min(bends, key=lambda bend: bend.change.value)
    if is_knee(here):
        return "knee", f"the loss per doubling grows by more than {margin:g} there and nowhere else nearly as much"
    if places := [inner[i] for i in range(len(inner)) if is_knee(i)]:
        return "knee elsewhere", f"the curve has its knee at {places[0]:g}, not at {at:g}"
    if bends[here].change.low > -margin:
        return "no knee", f"a loss per doubling that grows by {margin:g} or more there is excluded"
    sure = 1 - 0.05 / (len(inner) - 1)                              # of several rivals one would win by chance
    rivals = [f"{inner[j]:g}" for j in range(len(inner)) if j != here
              and t_interval(ALONE * bend_ZR[:, j] - bend_ZR[:, here], sure).high < 0]
    if rivals:
        return "no knee", (f"the curve bends at {' and '.join(rivals)} as well, by more than a third of what it does "
                           f"at {at:g}, and most at {strongest.at:g}")
    return "inconclusive", f"the seeds allow a knee there as well as none; the curve bends most at {strongest.at:g}"


def difference(a: Sequence[float], b: Sequence[float], confidence: float = 0.90) -> Estimate:
    """Mean of a - b, paired by seed.

    The 90 % interval is the one that `statistics.equivalence` takes.
    """
    a, b = np.asarray(list(a), dtype=float), np.asarray(list(b), dtype=float)
    if a.shape != b.shape:
        raise ValueError(f"{a.size} and {b.size} values cannot be paired; give one per seed of each")
    return t_interval(a - b, confidence)


def _design(x: np.ndarray, at: float | None = None, power: int = 1) -> np.ndarray:
    """Terms [ratios, …] of a polynomial in x = log2(ratio), with a hinge at ratio `at` where one is given."""
    terms = [x**i for i in range(power + 1)]
    return np.stack(terms if at is None else [*terms, np.maximum(0, x - math.log2(at))], axis=1)


def _rest(design: np.ndarray, y: np.ndarray) -> float:
    """Sum of squares that a design leaves of y."""
    best = np.linalg.lstsq(design, y, rcond=None)[0]
    return float(((y - design @ best) ** 2).sum())


def _f_test(small: np.ndarray, large: np.ndarray, y: np.ndarray) -> float:
    """p of the larger of two nested designs [ratios, terms] by all seeds' points together; nan without freedom."""
    before, after = (_rest(np.tile(design, (len(y), 1)), y.ravel()) for design in (small, large))
    extra, freedom = large.shape[1] - small.shape[1], y.size - large.shape[1]
    if freedom < 1 or after <= 0:
        return math.nan
    return float(stats.f.sf((before - after) / extra / (after / freedom), extra, freedom))
