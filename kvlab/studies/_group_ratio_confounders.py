"""What else differs where the ratio does: the width of the cache, the weights, its format, the time to learn."""
from __future__ import annotations

from itertools import combinations

import pandas as pd

from kvlab.accuracy.seeds import difference, t_interval
from kvlab.accuracy.statistics import equivalence
from kvlab.record.recall import LONGER, MATCHED, TASK, TIMES_LONGER, main_cells, recall_rows
from kvlab.studies._group_ratio_grid import MARGIN, Grid, ends, shown
from kvlab.studies._group_ratio_others import none
from kvlab.studies._run import Finding


def widths(table: pd.DataFrame, grid: Grid) -> list[Finding]:
    """Cells that keep the same number of floats per token with different ratios and head_dims."""
    counts = {metric: table[table["metric"] == metric].groupby("case_id")["value"].first()
              for metric in ("kv_floats_per_token", "parameters")}
    rows = grid.rows[(grid.rows["pairs"] == grid.trained) & (grid.rows["metric"] == "recall")]
    rows = rows.assign(**{metric: rows["case_id"].map(values) for metric, values in counts.items()})
    found = []
    for width, same in rows.groupby("kv_floats_per_token"):
        cells = [(key, cell.set_index("seed")["value"].astype(float), cell["parameters"].iloc[0])
                 for key, cell in same.groupby(["head_dim", "group_ratio"])]
        for (a, of_a, weights_a), (b, of_b, weights_b) in combinations(cells, 2):
            seeds = of_a.index.intersection(of_b.index)
            if a[0] == b[0] or not len(seeds):
                continue
            gap = difference(of_b[seeds], of_a[seeds])
            verdict = {"below": f"no difference of {MARGIN:g} or more", "inconclusive": "inconclusive",
                       "above": "width alone does not decide here, but whether heads or weights do is not told"}
            said = " and ".join(f"{of.mean():.3f} at head_dim {d} and ratio {ratio} ({weights:,.0f} parameters)"
                                for (d, ratio), of, weights in ((a, of_a, weights_a), (b, of_b, weights_b)))
            found.append(Finding(
                f"same_width:{width:.0f}:head_dim{a[0]}:head_dim{b[0]}",
                f"With {width:.0f} KV floats per token in each, recall is {said}; the second is higher by "
                f"{shown(gap, True)} (90 % interval, {gap.n} seeds, N = {grid.trained}): "
                f"{verdict[equivalence(gap, MARGIN)]}.", gap.value, "ratio", *ends(gap), "measured"))
    return found


def parameters(table: pd.DataFrame, grid: Grid) -> list[Finding]:
    counts = table[table["metric"] == "parameters"].groupby("case_id")["value"].first()
    own = grid.rows.assign(parameters=grid.rows["case_id"].map(counts))
    matched, n, found = Grid(recall_rows(table, grid.task + MATCHED), grid.task), grid.trained, []
    for head_dim in grid.dims:
        of = own[own["head_dim"] == head_dim].groupby("group_ratio")["parameters"].first()
        said = (f"{grid.label(head_dim)}: few KV heads also mean fewer weights, {of.iloc[0]:,.0f} at ratio "
                f"{of.index[0]} and {of.iloc[-1]:,.0f} at {of.index[-1]}")
        a, b = (side.scores(head_dim, n) for side in (grid, matched))
        ratio = max((r for r in b.columns if r in a.columns), default=None)
        if ratio is None:
            found.append(Finding(grid.name("parameters", head_dim), f"{said}; no arm of this run gives the difference "
                                 "back, so part of any loss may be theirs.", float(of.iloc[0] - of.iloc[-1]), "count",
                                 None, None, "modelled"))
            continue
        seeds = a.index.intersection(b.index)
        gain = t_interval(b[ratio][seeds] - a[ratio][seeds])
        left = ("" if 1 not in a.columns else
                f"; the loss against ratio 1 that is left is {shown(t_interval(a[1][seeds] - b[ratio][seeds]))}")
        found.append(Finding(grid.name("parameters", head_dim), f"{said}. With the MLP widened by the difference, "
                             f"recall at ratio {ratio} changes by {shown(gain, True)} (95 %, {gain.n} seeds, "
                             f"N = {n}){left}.", gain.value, "ratio", *ends(gain), "measured"))
    return found


def formats(table: pd.DataFrame, grid: Grid) -> list[Finding]:
    """Does a coarse cache cost more where heads are shared? Loss by format at the highest ratio against the lowest."""
    found, n = [], grid.trained
    for name in sorted(set(table[table["data"] == grid.task]["kv_format"].unique()) - {"fp32"}):
        coarse = Grid(main_cells(recall_rows(table, grid.task, name)), grid.task)
        for head_dim in coarse.dims:
            lost = {metric: _lost(grid, coarse, head_dim, n, metric) for metric in ("recall", "nll")}
            if lost["recall"].shape[1] < 2 or lost["recall"].empty:
                continue
            first, last = lost["recall"].columns[[0, -1]]
            more, nats = (difference(of[last], of[first]) for of in lost.values())
            exact = float(grid.scores(head_dim, n)[last].mean())
            floor = ("" if exact > 0.5 else f" With {exact:.3f} recalled in fp32 at ratio {last}, little is left to "
                     "lose there: a smaller loss may be a floor.")
            found.append(Finding(
                grid.name(f"format:{name}", head_dim), f"Storing the cache in {name} at {grid.label(head_dim)} costs "
                f"{lost['recall'][first].mean():.3f} of recall at ratio {first} and {lost['recall'][last].mean():.3f} "
                f"at ratio {last}, {shown(more, True)} more: {_interaction(more)}. In NLL it is {shown(nats, True)} "
                f"nat more: {_interaction(nats)} (90 % intervals, margin {MARGIN:g}, {more.n} seeds, N = {n}).{floor}",
                more.value, "ratio", *ends(more), "measured"))
    return found


def _interaction(more) -> str:
    return {"below": "no interaction with the ratio", "inconclusive": "whether the ratio matters is inconclusive",
            "above": "it depends on the ratio"}[equivalence(more, MARGIN)]


def _lost(grid, coarse, head_dim, n, metric) -> pd.DataFrame:
    a, b = grid.scores(head_dim, n, metric), coarse.scores(head_dim, n, metric)
    lost = (a - b).dropna(axis=1, how="all").dropna()
    return lost if metric == "recall" else -lost


def training(table: pd.DataFrame, grid: Grid) -> list[Finding]:
    """How much of what looks like capacity is speed of learning: the same heads with several times the steps."""
    steps = f"{grid.case['steps']:,} steps at one rate (lr {grid.case['lr']:g})"
    long, n, found = Grid(recall_rows(table, grid.task + LONGER), grid.task), grid.trained, []
    for head_dim in grid.dims:
        a, b = grid.scores(head_dim, n), long.scores(head_dim, n)
        seeds, both = a.index.intersection(b.index), [r for r in b.columns if r in a.columns]
        if len(both) < 2 or not len(seeds):
            continue
        first, last = both[0], both[-1]
        before, after = (t_interval(side[first][seeds] - side[last][seeds]) for side in (a, b))
        told = " and ".join(f"from {a[r][seeds].mean():.3f} to {b[r][seeds].mean():.3f} at ratio {r}"
                            for r in (first, last))
        found.append(Finding(
            grid.name("training", head_dim), f"{grid.label(head_dim)}: with {TIMES_LONGER} × the {steps}, recall goes "
            f"{told}; the loss between them goes from {shown(before)} to {shown(after)} (95 %, {len(seeds)} seeds, "
            f"N = {n}). "
            + ("Part of the loss was unfinished learning; what is left may be, too."
               if after.high < before.low else "Longer training did not make it smaller."),
            after.value, "ratio", *ends(after), "measured"))
    name = "training" if grid.task == TASK else "training:two_token"
    return found or [none(name, f"{grid.task}: all models had {steps}. What looks like capacity may be speed of "
                          "learning: this run does not tell them apart; longer training would.")]
