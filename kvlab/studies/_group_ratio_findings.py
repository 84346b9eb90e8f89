"""What a run of group_ratio says, in words: each claim with its n, interval and margin; "no effect found" included."""
from __future__ import annotations

import math

import pandas as pd

from kvlab.accuracy.seeds import difference, t_interval, trend
from kvlab.studies._group_ratio_confounders import formats, parameters, training, widths
from kvlab.studies._group_ratio_grid import LIMIT, MARGIN, Grid, ends, grids, listed, loss, shown
from kvlab.studies._group_ratio_knees import beyond_8k, knees
from kvlab.studies._group_ratio_others import conversions, kernels, lost, none, resolution
from kvlab.studies._run import Finding


def findings(table: pd.DataFrame) -> list[Finding]:
    """Verdicts on the article's two claims, what recall loses by ratio and head_dim, confounders, kernels, damage."""
    found = [*beyond_8k(table)] if grids(table) else []
    for grid in grids(table):
        found += [*knees(grid), *_trends(grid), *_controls(grid), *widths(table, grid), *parameters(table, grid),
                  *formats(table, grid), *training(table, grid)]
    found += [*conversions(table), *kernels(table), *resolution(table), *lost(table)]
    return found or [Finding("none", "no finding: the run holds no successful reading of this study", None, "ratio",
                             None, None, "missing")]


def _trends(grid: Grid) -> list[Finding]:
    """Does NLL rise with the ratio, N by N? It still tells models apart that all recall everything."""
    found = []
    for head_dim in grid.dims:
        tables = {n: grid.scores(head_dim, n, "nll") for n in grid.lengths}
        tables = {n: scores for n, scores in tables.items() if min(scores.shape[0] - 1, scores.shape[1] - 2) > 0}
        if not tables:
            continue
        p = {n: trend(-scores).p for n, scores in tables.items()}
        at = grid.trained if grid.trained in tables else max(tables)
        nll, recall = tables[at], grid.scores(head_dim, at)
        first, last = nll.columns[[0, -1]]
        rise, fall = t_interval(nll[last] - nll[first]), t_interval(recall[first] - recall[last])
        least = math.factorial(nll.shape[1]) ** -nll.shape[0]
        found.append(Finding(
            grid.name("trend", head_dim), f"{grid.label(head_dim)}: {_rising(p)} (Page's test per N, p at "
            f"most {max(p.values()):.2g}; {nll.shape[0]} seeds and {nll.shape[1]} ratios allow "
            f"{least:.2g} at least).{_monotone(grid, head_dim)} From ratio {first} to {last}, NLL goes from "
            f"{nll[first].mean():.3f} to {nll[last].mean():.3f} nat, {shown(rise, True)}, and recall loses "
            f"{shown(fall)} (95 %, N = {at}).{grid.edges(recall)}", rise.value, "nat", *ends(rise), "measured"))
    return found


def _rising(p: dict[int, float]) -> str:
    """At which N a rise was found at the 5 % level."""
    yes, no = [n for n in p if p[n] < 0.05], [n for n in p if p[n] >= 0.05]
    if not no:
        return f"NLL rises with the group ratio at every N from {min(yes)} to {max(yes)}"
    nothing = f"no rise was found at N = {listed(no)}, which is no proof that there is none"
    return (f"NLL rises with the group ratio at N = {listed(yes)}; {nothing}" if yes else
            f"whether NLL rises with the group ratio is open: {nothing}")


def _monotone(grid: Grid, head_dim: int) -> str:
    mean = pd.DataFrame({n: grid.scores(head_dim, n).mean() for n in grid.lengths})     # [ratios, N]
    steps = {"from each ratio to the next at every N": mean.diff().iloc[1:],
             "from each N to the next at every ratio": mean.diff(axis=1).iloc[:, 1:]}
    said = [text for text, step in steps.items() if step.size and (step < 0).all(axis=None)]
    return f" Mean recall falls {' and '.join(said)}." if said else ""


def _controls(grid: Grid) -> list[Finding]:
    """No loss at a high ratio is an equivalence test against ratio 1, in recall and, N by N, in NLL."""
    found, n = [], grid.trained
    for head_dim in grid.dims:
        recall = grid.scores(head_dim, n)
        for ratio in (r for r in recall.columns if r >= LIMIT and 1 in recall.columns):
            name, about = grid.name(f"ratio{ratio}", head_dim), f"Ratio {ratio} against 1 at {grid.label(head_dim)}"
            if why := grid.unlearned(recall):
                found.append(none(name, f"{about}: inconclusive: {why}."))
                continue
            less, more = difference(recall[1], recall[ratio]), _nats(grid, head_dim, n, ratio)
            others = _elsewhere({m: _nats(grid, head_dim, m, ratio) for m in grid.lengths if m != n})
            found.append(Finding(
                name, f"{about}, N = {n}: {loss(less)} in recall, which is lower by {shown(less, True)} (it is "
                f"{recall[ratio].mean():.3f}); {loss(more, ' nat')} in NLL, which is higher by {shown(more, True)} nat "
                f"(90 % intervals, margin {MARGIN:g}, {less.n} seeds).{grid.edges(recall[[1, ratio]])}{others}",
                less.value, "ratio", *ends(less), "measured"))
    return found


def _elsewhere(more: dict) -> str:
    """The verdicts on NLL at the other N, those of one kind together."""
    verdicts: dict[str, list[int]] = {}
    for n, estimate in more.items():
        verdicts.setdefault(loss(estimate, " nat"), []).append(n)
    said = "; ".join(f"{verdict} at N = {listed(at)}" for verdict, at in verdicts.items())
    return f" The same in NLL: {said}." if said else ""


def _nats(grid: Grid, head_dim: int, n: int, ratio: int):
    """By how much NLL is higher at a ratio than at 1, with its 90 % interval."""
    nll = grid.scores(head_dim, n, "nll")
    return difference(nll[ratio], nll[1])
