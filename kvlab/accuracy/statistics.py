"""Intervals of means over tokens of running text, and what they allow to be said.

Neighbouring tokens are alike, so that the interval of independent samples would be too narrow: blocks of tokens are
drawn instead. A claim of "no loss" is an equivalence test; that a difference is not significant supports nothing.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvlab.record.statistics import Estimate

BLOCK, DRAWS = 32, 2000
VERDICTS = ("below", "above", "inconclusive")


def block_bootstrap(values: Sequence[float], document: Sequence | None = None, window: Sequence | None = None, *,
                    block: int = BLOCK, draws: int = DRAWS, confidence: float = 0.95, seed: int = 0) -> Estimate:
    """Mean of per-token values with a moving-block bootstrap interval, stratified by document.

    values: one per token, in order; for a paired comparison the difference of the two on each token. document, window:
    a label per token; blocks never cross a border of either, and each document keeps its share of the tokens. A window
    shorter than `block` is one block. The draws are centred on the mean (blocks hold inner tokens more often than
    those at the ends), and stretched by Student's t for the few blocks there are.
    Of values as skewed as a KL can be, the interval ends too early above. Mean of log-normal values (sigma 1.5,
    correlation of neighbours 0.5, 2 × 512 tokens): covered in 90.8 % of 1,000 runs instead of 95; in 7.8 % the truth
    lay above, in 1.4 % below. Bias-corrected (BCa) 92.1 %, studentised 92.5 %: no cure, so the plain form stays.
    Gaussian values: 94.8 %.
    Refused (ValueError): no values, values that are not finite, labels of another length, knobs out of range.
    Source: Künsch (1989), The jackknife and the bootstrap for general stationary observations, Ann. Statist. 17.
    """
    values = np.asarray(values, float)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"a bootstrap needs a row of at least one value, got the shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError(f"value {int(np.flatnonzero(~np.isfinite(values))[0])} of {len(values)} is not finite")
    if block < 1 or draws < 100 or not 0 < confidence < 1:
        raise ValueError(f"block={block}, draws={draws}, confidence={confidence}; allowed: block of at least 1, draws "
                         "of at least 100, confidence between 0 and 1")
    from scipy.stats import norm, t
    rng = np.random.default_rng(seed)
    total, blocks, strata = np.zeros(draws), 0, _strata(len(values), document, window)
    for own in strata:
        sums, lengths = _blocks(values, own, block)
        tokens = sum(map(len, own))
        count = max(1, round(tokens / lengths.mean()))
        drawn = rng.integers(0, len(sums), (draws, count))
        total += tokens * sums[drawn].sum(1) / lengths[drawn].sum(1)
        blocks += count
    value, drawn = float(values.mean()), total / len(values)
    freedom = blocks - len(strata)                          # each document's own mean is taken out of its blocks
    if freedom < 1:
        raise ValueError(f"{len(values)} tokens of {len(strata)} documents are no more than one block of {block} each; "
                         "an interval needs several")
    tail = (1 - confidence) / 2
    stretch = t.isf(tail, freedom) / norm.isf(tail) * math.sqrt(blocks / freedom)
    low, high = np.quantile(drawn - drawn.mean(), [tail, 1 - tail]) * stretch
    return Estimate(value, value + float(low), value + float(high), len(values))


def equivalence(interval: Estimate, margin: float) -> str:
    """Two one-sided tests at 5 %, from the 90 % interval: is the difference smaller than the margin in size?

    "below": the whole interval lies inside ±margin. "above": the whole interval lies outside, on one side.
    "inconclusive": neither; there are too few tokens (see n_needed), or the difference is about as large as the margin.
    Source: Schuirmann (1987), the two one-sided tests procedure, J. Pharmacokinet. Biopharm. 15.
    """
    _positive(margin=margin)
    if -margin < interval.low and interval.high < margin:
        return "below"
    return "above" if interval.low >= margin or interval.high <= -margin else "inconclusive"


def below(interval: Estimate, margin: float) -> str:
    """One one-sided test at 5 %, from the 90 % interval: is the loss smaller than the margin?

    A gain is no loss.
    "below": the whole interval lies below the margin, "above": all of it lies above, else "inconclusive".
    Source: one of Schuirmann's (1987) two tests, J. Pharmacokinet. Biopharm. 15.
    """
    _positive(margin=margin)
    return "below" if interval.high < margin else "above" if interval.low >= margin else "inconclusive"


def inside(interval: Estimate, low: float, high: float) -> str:
    """The same for a claimed range: "inside" or "outside" where the whole 90 % interval is, else "inconclusive".

    Source: Schuirmann (1987), the two one-sided tests procedure, J. Pharmacokinet. Biopharm. 15.
    """
    if not low < high:
        raise ValueError(f"a range needs low < high, got {low} and {high}")
    if low < interval.low and interval.high < high:
        return "inside"
    return "outside" if interval.low >= high or interval.high <= low else "inconclusive"


def n_needed(interval: Estimate, margin: float) -> int:
    """Tokens of the same kind of text that would bring the interval's half-width down to half the margin.

    Half-widths shrink with 1/√n. Since the interval is that of a block bootstrap, it holds how alike neighbouring
    tokens are. It is a width and no promise of a verdict: a difference near the margin needs more, one that is far from
    it fewer.
    Source: n × (half-width ÷ half the margin)², as the standard error of a mean shrinks.
    """
    _positive(margin=margin)
    half = (interval.high - interval.low) / 2
    return max(1, math.ceil(interval.n * (half / (margin / 2))**2))


def _positive(margin: float) -> None:
    if not 0 < margin < math.inf:
        raise ValueError(f"margin={margin!r} must be a number above 0, such as 0.001")


def _strata(n: int, document, window) -> list[list[np.ndarray]]:
    """Per document the positions of each of its windows, as runs in order."""
    labels = [np.zeros(n, int) if given is None else np.asarray(given) for given in (document, window)]
    for name, given in zip(("document", "window"), labels):
        if len(given) != n:
            raise ValueError(f"{len(given)} labels of {name} for {n} values; give one per token")
    strata: dict = {}
    for position, key in enumerate(zip(*(given.tolist() for given in labels))):
        strata.setdefault(key[0], {}).setdefault(key[1], []).append(position)
    return [[np.asarray(run) for run in windows.values()] for windows in strata.values()]


def _blocks(values: np.ndarray, runs: list[np.ndarray], block: int) -> tuple[np.ndarray, np.ndarray]:
    """(sum, length) of every block of a document: all starts inside each window."""
    sums, lengths = [], []
    for run in runs:
        length = min(block, len(run))
        upto = np.concatenate([[0.0], np.cumsum(values[run])])
        sums.append(upto[length:] - upto[:-length])
        lengths.append(np.full(len(sums[-1]), length))
    return np.concatenate(sums), np.concatenate(lengths)
