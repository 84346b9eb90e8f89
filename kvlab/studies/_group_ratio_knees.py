"""The article's two limits on the group ratio, put to trained models: a knee at 16, and more loss beyond 8K tokens."""
from __future__ import annotations

import math

import numpy as np
import pandas as pd

from kvlab.accuracy.seeds import Knee, difference, knee
from kvlab.accuracy.statistics import equivalence
from kvlab.record.recall import recall_rows
from kvlab.studies._group_ratio_grid import CEILING, KNEE_MARGIN, LIMIT, LONG, MARGIN, SAFE, Grid, ends, listed, shown
from kvlab.studies._group_ratio_others import none
from kvlab.studies._run import Finding

METRICS = {"recall": ("recall", "ratio"), "nll": ("NLL", "nat")}


def knees(grid: Grid) -> list[Finding]:
    """group_ratio must not exceed 16: a limit would show as losses that begin to grow there, and nowhere else."""
    found = []
    for head_dim in grid.dims:
        recall = grid.scores(head_dim, grid.trained)
        if recall.empty:
            continue
        about = f"“group_ratio must not exceed {LIMIT}”, {grid.label(head_dim)}"
        tried = f"ratios {listed(recall.columns)}, {len(recall)} seeds"
        first = _knee(grid, head_dim, grid.trained, "recall")
        if (why := grid.unlearned(recall)) or math.isnan(first.change.value):
            found.append(none(grid.name("knee", head_dim), f"{about}: inconclusive: {why or first.why} ({tried})."
                              + grid.edges(recall)))
            continue
        for metric, (label, unit) in METRICS.items():
            got = _knee(grid, head_dim, grid.trained, metric)
            p = "" if math.isnan(got.p) else f"; hinge against straight line p = {got.p:.2g}"
            cost = "{2:.3f} between {0} and {1}".format(*_steepest(grid.scores(head_dim, grid.trained, metric)))
            found.append(Finding(
                grid.name("knee" if metric == "recall" else "knee_nll", head_dim),
                f"{about}, by {label} at N = {grid.trained}: {_said(got)}: {got.why}. The loss of a doubling changes "
                f"at {LIMIT} by {shown(_loss(got), True)} (95 %, margin {got.margin:g}, {tried}{p}). A doubling costs "
                f"most, {cost}." + (grid.edges(recall) if metric == "recall" else ""),
                _loss(got).value, unit, *ends(_loss(got)), "measured"))
        found.append(_by_length(grid, head_dim))
    return found


def _knee(grid: Grid, head_dim: int, n: int, metric: str) -> Knee:
    scores = grid.scores(head_dim, n, metric) * (1 if metric == "recall" else -1)       # NLL rises with a loss
    return knee(list(scores.columns), scores.to_numpy(), at=LIMIT, margin=KNEE_MARGIN[metric])


def _loss(got: Knee):
    """The change of the slope as a loss: above 0 where a doubling costs more beyond than before."""
    return type(got.change)(-got.change.value, -got.change.high, -got.change.low, got.change.n)


def _said(got: Knee) -> str:
    return {"knee": f"a knee at {LIMIT}", "no knee": f"no knee at {LIMIT}",
            "knee elsewhere": f"no knee at {LIMIT}"}.get(got.verdict, got.verdict)


def _by_length(grid: Grid, head_dim: int) -> Finding:
    """The same test at every N, told without a conclusion: the steepest doubling has no interval here."""
    told, count = [], 0
    for n in grid.lengths:
        got = [_knee(grid, head_dim, n, metric) for metric in METRICS]
        count += any(one.verdict == "knee" for one in got)
        by = " and ".join(f"{_said(one)} by {label}" for one, (label, _) in zip(got, METRICS.values()))
        told.append(f"N = {n}: {by}, NLL steepest from {{0}} to {{1}}".format(*_steepest(
            grid.scores(head_dim, n, "nll"))))
    return Finding(grid.name("knee_by_n", head_dim), f"The same at every N, {grid.label(head_dim)}: "
                   f"{'; '.join(told)}.", count, "count", None, None, "measured")


def _steepest(scores: pd.DataFrame) -> tuple[int, int, float]:
    """Between which two ratios the mean moves most per doubling, and how much."""
    mean = scores.mean()
    per_doubling = np.abs(np.diff(mean.to_numpy()) / np.diff(np.log2(mean.index.to_numpy(float))))
    at = int(per_doubling.argmax())
    return int(mean.index[at]), int(mean.index[at + 1]), float(per_doubling[at])


def beyond_8k(table: pd.DataFrame) -> list[Finding]:
    """8 is safer beyond 8K tokens: what ratio 16 loses against 8 there, more than in short contexts."""
    name = f"“{SAFE} is safer beyond 8K tokens”"
    rows = recall_rows(table)
    long = rows[rows["kv_len"] > LONG]
    if long.empty:
        return [none("beyond_8k", f"{name}: inconclusive: no cell of this run holds more than {LONG:,} tokens (size "
                      "large has them); nothing here speaks for or against it.")]
    found, grid = [], Grid(rows[rows["num_keys"] == long["num_keys"].max()])
    for head_dim in sorted(int(d) for d in long["head_dim"].unique()):
        about, far = f"{name}, head_dim {head_dim}", grid.lengths[-1]
        recall = grid.scores(head_dim, far)
        if {SAFE, LIMIT} <= set(recall.columns) and not (why := grid.unlearned(recall)):
            found.append(_longer(grid, head_dim, about))
            continue
        why = why if {SAFE, LIMIT} <= set(recall.columns) else f"ratios {SAFE} and {LIMIT} were not both scored"
        found.append(none(f"beyond_8k:head_dim{head_dim}", f"{about}: inconclusive: {why}."))
    return found


def _longer(grid: Grid, head_dim: int, about: str) -> Finding:
    """By recall, or by NLL where recall is at its ceiling."""
    near, far = grid.lengths[0], grid.lengths[-1]
    two = grid.scores(head_dim, far)[[SAFE, LIMIT]]
    metric = "nll" if float(two.mean().min()) >= CEILING else "recall"
    label, unit = METRICS[metric]
    short, long = (grid.scores(head_dim, n, metric) * (1 if metric == "recall" else -1) for n in (near, far))
    both = short.index.intersection(long.index)
    if not len(both):
        return none(f"beyond_8k:head_dim{head_dim}", f"{about}: inconclusive: no seed was scored at both lengths.")
    more = difference((long[SAFE] - long[LIMIT])[both], (short[SAFE] - short[LIMIT])[both])
    verdict = {"below": f"no such effect beyond {MARGIN:g}", "inconclusive": "inconclusive",
               "above": "supported" if more.value > 0 else "the opposite"}[equivalence(more, MARGIN)]
    return Finding(
        f"beyond_8k:head_dim{head_dim}", f"{about}, by {label}: {verdict}: ratio {LIMIT} loses {shown(more, True)} "
        f"more against {SAFE} at {far:,} tokens than at {near:,} (90 % interval, margin {MARGIN:g}, {more.n} seeds; "
        f"recall {two[SAFE].mean():.3f} and {two[LIMIT].mean():.3f} there).{grid.edges(two)}",
        more.value, unit, *ends(more), "measured")
