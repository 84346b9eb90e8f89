"""What a run of group_ratio says, in words: each claim with its n, interval and margin; "no effect found" included."""
from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd

from kvlab.accuracy.seeds import difference, knee, t_interval, trend
from kvlab.accuracy.statistics import equivalence
from kvlab.studies._group_ratio_joined import main_cells, recall_rows, trained_length
from kvlab.studies._group_ratio_others import conversions, kernels, lost, none, resolution
from kvlab.studies._run import Finding

# named before any run: what would matter
MARGIN = 0.01                   # recall: one question in a hundred
KNEE_MARGIN = 0.02              # recall per doubling of the ratio, beyond what each doubling cost before
LIMIT, SAFE, LONG = 16, 8, 8192          # the article's: ratio not above 16, 8 safer beyond 8K tokens


def findings(table: pd.DataFrame) -> list[Finding]:
    """Verdicts on the article's two claims, what recall loses by ratio and head_dim, confounders, kernels, damage."""
    rows = recall_rows(table)
    grid = main_cells(rows)
    found = [*_knees(grid), *_long(rows), *_trends(grid), *_controls(grid), *_width(table, grid),
             *_parameters(table, grid), *_formats(table), *conversions(table), *kernels(table), *resolution(table),
             *lost(table)]
    return found or [Finding("none", "no finding: the run holds no successful reading of this study", None, "ratio",
                             None, None, "missing")]


def by_ratio(rows: pd.DataFrame, head_dim: int, kv_len: int, metric: str = "recall") -> pd.DataFrame:
    """Scores as a frame [seeds, ratios] of one head_dim at one length; seeds that failed anywhere are left out."""
    chosen = rows[(rows["metric"] == metric) & (rows["head_dim"] == head_dim) & (rows["kv_len"] == kv_len)]
    return chosen.pivot_table(index="seed", columns="group_ratio", values="value").dropna().astype(float)


def _dims(rows):
    return sorted(int(d) for d in rows["head_dim"].unique())


def _ends(estimate):
    """low and high of a Finding: None where one value tells no spread."""
    return [None if math.isnan(x) else float(x) for x in (estimate.low, estimate.high)]


def _shown(estimate, sign: bool = False) -> str:
    form = "{:+.3f}" if sign else "{:.3f}"
    ends = "no interval" if math.isnan(estimate.low) else f"{form}, {form}".format(estimate.low, estimate.high)
    return f"{form.format(estimate.value)} [{ends}]"


def _knees(grid) -> list[Finding]:
    """The article: group_ratio must not exceed 16. A limit would show as losses that grow beyond it."""
    found, kv_len = [], trained_length(grid)
    for head_dim in _dims(grid):
        scores = by_ratio(grid, head_dim, kv_len)
        if scores.empty:
            continue
        about = f"“group_ratio must not exceed {LIMIT}”, head_dim {head_dim}"
        tried = f"N = {kv_len}, ratios {_listed(scores.columns)}, {len(scores)} seeds"
        got = knee(list(scores.columns), scores.to_numpy(), at=LIMIT, margin=KNEE_MARGIN)
        if (why := _unlearned(grid, scores)) or math.isnan(got.change.value):
            found.append(none(f"knee:head_dim{head_dim}", f"{about}: inconclusive: {why or got.why} ({tried})."))
            continue
        p = "" if math.isnan(got.p) else f", F test of a bend of either sign p = {got.p:.2g}"
        found.append(Finding(
            f"knee:head_dim{head_dim}", f"{about}: {got.verdict}: {got.why}; the slope of recall over log2(ratio) "
            f"changes there by {_shown(got.change, True)} per doubling; a doubling costs most between "
            "{} and {}, {:.3f}".format(*_steepest(scores)) + f" ({tried}{p}){_ceiling(scores)}.",
            got.change.value, "ratio", *_ends(got.change), "measured"))
        found += _by_length(grid, head_dim)
    return found


def _by_length(grid, head_dim) -> list[Finding]:
    """The same test at every N. A limit of the ratio would stand at one place; the end of a ceiling moves with N."""
    told, knees = [], 0
    for n in sorted(int(n) for n in grid["kv_len"].unique()):
        scores = by_ratio(grid, head_dim, n)
        got = knee(list(scores.columns), scores.to_numpy(), at=LIMIT, margin=KNEE_MARGIN)
        knees += got.verdict == "knee"
        told.append((n, got.verdict.removesuffix(" beyond the margin"), *_steepest(scores)[:2]))
    moves = len({(a, b) for *_, a, b in told}) > 1
    if not knees:
        return []
    said = "; ".join(f"N = {n}: {verdict} at {LIMIT}, steepest {a} to {b}" for n, verdict, a, b in told)
    why = (" The steepest doubling moves with N: recall stays near its ceiling until a cache is too narrow for that "
           f"many pairs, and {LIMIT} is no place of its own." if moves else "")
    return [Finding(f"knee_by_n:head_dim{head_dim}", f"The same at every N, head_dim {head_dim}: {said}.{why}", knees,
                    "count", None, None, "measured")]


def _steepest(scores) -> tuple[int, int, float]:
    """Between which two ratios a doubling costs most, and how much."""
    mean = scores.mean()
    per_doubling = -np.diff(mean.to_numpy()) / np.diff(np.log2(mean.index.to_numpy(float)))
    at = int(per_doubling.argmax())
    return int(mean.index[at]), int(mean.index[at + 1]), float(per_doubling[at])


def _unlearned(rows, scores) -> str:
    """Why models that hardly beat a guess can show neither a loss nor that there is none; "" where they can."""
    chance, best = 1 / json.loads(rows["case"].iloc[0])["num_values"], float(scores.mean().max())
    return "" if best >= 10 * chance or best >= 0.5 else (
        f"the best of these models recalls {best:.3f}, near the chance of {chance:.3f}: they were trained too shortly "
        "to show anything")


def _ceiling(scores) -> str:
    """What must be said where every cell is near 1: this task asks too little of such heads."""
    return "" if float(scores.mean().min()) < 0.99 else "; all are at this task's ceiling, and a harder one may differ"


def _long(rows) -> list[Finding]:
    """The article: 8 is safer beyond 8K tokens. What ratio 16 loses against 8 there, more than in short contexts."""
    name = f"“{SAFE} is safer beyond 8K tokens”"
    long = rows[rows["kv_len"] > LONG]
    if long.empty:
        return [none("beyond_8k", f"{name}: inconclusive: no cell of this run holds more than {LONG:,} tokens (size "
                      "large has them); nothing here speaks for or against it.")]
    found = []
    for head_dim in _dims(long):
        own = rows[(rows["head_dim"] == head_dim) & (rows["num_keys"] == long["num_keys"].max())]
        lengths = sorted(int(n) for n in own["kv_len"].unique())
        short, far = (by_ratio(own, head_dim, n) for n in (lengths[0], lengths[-1]))
        both = short.index.intersection(far.index)
        if not {SAFE, LIMIT} <= set(far.columns) & set(short.columns) or not len(both):
            found.append(none(f"beyond_8k:head_dim{head_dim}", f"{name}, head_dim {head_dim}: inconclusive: ratios "
                               f"{SAFE} and {LIMIT} were not both scored."))
            continue
        if why := _unlearned(own, far):
            found.append(none(f"beyond_8k:head_dim{head_dim}", f"{name}, head_dim {head_dim}: inconclusive: {why}."))
            continue
        more = difference((far[SAFE] - far[LIMIT])[both], (short[SAFE] - short[LIMIT])[both])
        verdict = {"below": f"no such effect beyond {MARGIN:g}", "inconclusive": "inconclusive",
                   "above": "supported" if more.value > 0 else "the opposite"}[equivalence(more, MARGIN)]
        found.append(Finding(
            f"beyond_8k:head_dim{head_dim}", f"{name}, head_dim {head_dim}: {verdict}: ratio {LIMIT} loses "
            f"{_shown(more, True)} more recall against {SAFE} at {lengths[-1]:,} tokens than at {lengths[0]:,} (90 % "
            f"interval, {more.n} seeds; recall {far[SAFE].mean():.3f} and {far[LIMIT].mean():.3f} there).",
            more.value, "ratio", *_ends(more), "measured"))
    return found


def _trends(grid) -> list[Finding]:
    """Does recall fall with the ratio at every N? All of the tests must say so, so that the largest p counts."""
    found, at = [], trained_length(grid)
    for head_dim in _dims(grid):
        lengths = sorted(int(n) for n in grid["kv_len"].unique())
        tables = {n: by_ratio(grid, head_dim, n) for n in lengths}
        scores = tables[at]
        if len(scores) < 2 or len(scores.columns) < 3:
            continue
        worst = max(trend(t.to_numpy()).p for t in tables.values() if len(t) > 1)
        first, last = scores.columns[0], scores.columns[-1]
        lost = t_interval(scores[first] - scores[last])
        steps = all((np.diff(t.mean().to_numpy()) < 0).all() for t in tables.values())
        said = (f"recall falls with the group ratio at every N from {lengths[0]} to {lengths[-1]}"
                + (", from each ratio to the next" if steps else "") if worst < 0.05 else
                "no falling trend found at every N, which is no proof that there is none")
        found.append(Finding(
            f"trend:head_dim{head_dim}", f"head_dim {head_dim}: {said} (Page's test per N, largest p = {worst:.2g}, "
            f"{len(scores)} seeds, {len(scores.columns)} ratios); from ratio {first} to {last} it loses {_shown(lost)} "
            f"at N = {at}.", lost.value, "ratio", *_ends(lost), "measured"))
    return found


def _controls(grid) -> list[Finding]:
    """No loss at a high ratio is an equivalence test against ratio 1, at the longest trained N."""
    found, kv_len = [], trained_length(grid)
    for head_dim in _dims(grid):
        scores = by_ratio(grid, head_dim, kv_len)
        for ratio in (r for r in scores.columns if r >= LIMIT and 1 in scores.columns):
            if why := _unlearned(grid, scores):
                found.append(none(f"ratio{ratio}:head_dim{head_dim}",
                                   f"Ratio {ratio} against 1 at head_dim {head_dim}: inconclusive: {why}."))
                continue
            less, nll = difference(scores[1], scores[ratio]), by_ratio(grid, head_dim, kv_len, "nll")
            verdict = {"below": f"no loss of {MARGIN:g} or more", "above": "a loss" if less.value > 0 else "a gain",
                       "inconclusive": "inconclusive"}[equivalence(less, MARGIN)]
            found.append(Finding(
                f"ratio{ratio}:head_dim{head_dim}",
                f"Ratio {ratio} against 1 at head_dim {head_dim}: {verdict}: recall is "
                f"lower by {_shown(less, True)} (90 % interval, margin {MARGIN:g}, {less.n} seeds, N = {kv_len}; "
                f"recall {scores[ratio].mean():.3f}){_ceiling(scores[[1, ratio]])}. NLL is higher by "
                f"{_shown(t_interval(nll[ratio] - nll[1]), True)} nat (95 %).",
                less.value, "ratio", *_ends(less), "measured"))
    return found


def _width(table, grid) -> list[Finding]:
    """Cells that keep the same number of floats per token with different ratios and head_dims."""
    kv_len = trained_length(grid)
    floats = table[table["metric"] == "kv_floats_per_token"].groupby("case_id")["value"].first()
    some = grid[(grid["kv_len"] == kv_len) & (grid["metric"] == "recall")]
    some = some.assign(floats=some["case_id"].map(floats))
    means = some.groupby(["floats", "head_dim", "group_ratio"])["value"].mean().reset_index()
    shared = [(width, g.sort_values("head_dim")) for width, g in means.groupby("floats") if g["head_dim"].nunique() > 1]
    if not shared:
        return []
    width, cells = max(shared, key=lambda pair: pair[1]["value"].max() - pair[1]["value"].min())
    said = ", ".join(f"{c.value:.3f} at head_dim {c.head_dim} and ratio {c.group_ratio}" for c in cells.itertuples())
    gap = float(cells["value"].max() - cells["value"].min())
    return [Finding("same_width", f"With {width:.0f} KV floats per token in each, recall is {said} (means over seeds, "
                    f"N = {kv_len}): width alone does not decide.", gap, "ratio", None, None, "measured")]


def _parameters(table, grid) -> list[Finding]:
    counts = table[table["metric"] == "parameters"].groupby("case_id")["value"].first()
    own = grid.assign(parameters=grid["case_id"].map(counts))
    kv_len, found = trained_length(grid), []
    if kv_len is None:
        return []
    matched = recall_rows(table, "recall:pair, parameters matched")
    for head_dim in _dims(own):
        of = own[own["head_dim"] == head_dim].groupby("group_ratio")["parameters"].first()
        said = (f"head_dim {head_dim}: few KV heads also mean fewer weights, {of.iloc[0]:,.0f} at ratio {of.index[0]} "
                f"and {of.iloc[-1]:,.0f} at {of.index[-1]}")
        a, b = by_ratio(own, head_dim, kv_len), by_ratio(matched, head_dim, kv_len)
        ratio = max((r for r in b.columns if r in a.columns), default=None)
        if ratio is None:
            found.append(Finding(f"parameters:head_dim{head_dim}", f"{said}; no arm of this run gives the difference "
                                 "back, so part of any loss may be theirs.", float(of.iloc[0] - of.iloc[-1]), "count",
                                 None, None, "modelled"))
            continue
        seeds = a.index.intersection(b.index)
        gain = t_interval(b[ratio][seeds] - a[ratio][seeds])
        lost = t_interval(a[1][seeds] - b[ratio][seeds]) if 1 in a.columns else None
        left = "" if lost is None else f"; the loss against ratio 1 that is left is {_shown(lost)}"
        found.append(Finding(f"parameters:head_dim{head_dim}", f"{said}. With the MLP widened by the difference, "
                             f"recall at ratio {ratio} changes by {_shown(gain, True)} ({gain.n} seeds, "
                             f"N = {kv_len}){left}.", gain.value, "ratio", *_ends(gain), "measured"))
    return found


def _formats(table) -> list[Finding]:
    """Does a coarse cache cost more where heads are shared? Loss by format at the highest ratio against ratio 1."""
    found, exact = [], main_cells(recall_rows(table))
    kv_len = trained_length(exact)
    names = table[table["data"] == "recall:pair"]["kv_format"].unique()
    for name in sorted(set(names) - {"fp32"}):
        coarse = main_cells(recall_rows(table, kv_format=name))
        for head_dim in _dims(coarse):
            a, b = by_ratio(exact, head_dim, kv_len), by_ratio(coarse, head_dim, kv_len)
            ratios = [r for r in b.columns if r in a.columns]
            seeds = a.index.intersection(b.index)
            if len(ratios) < 2 or not len(seeds):
                continue
            lost = {r: a[r][seeds] - b[r][seeds] for r in (ratios[0], ratios[-1])}
            more = difference(lost[ratios[-1]], lost[ratios[0]])
            verdict = {"below": "no interaction with the ratio", "above": "it depends on the ratio",
                       "inconclusive": "whether the ratio matters is inconclusive"}[equivalence(more, MARGIN)]
            costs = " and ".join(f"{_shown(t_interval(v))} at ratio {r}" for r, v in lost.items())
            found.append(Finding(f"format:{name}:head_dim{head_dim}", f"Storing the cache in {name} at head_dim "
                                 f"{head_dim} costs {costs}: {verdict} (margin {MARGIN:g}, {more.n} seeds, "
                                 f"N = {kv_len}).", more.value, "ratio", *_ends(more), "measured"))
    return found


def _listed(ratios) -> str:
    return ", ".join(str(int(r)) for r in ratios)
