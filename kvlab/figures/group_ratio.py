"""NLL against the group ratio and against the width of the KV cache, beside the time of a decode call per ratio.

NLL of the right answer on a logarithmic axis tells models apart that all recall everything, and those near a guess;
mean recall stands at the ends of each line. Bears on the article's claims that group_ratio must not exceed 16 and that
8 is safer beyond 8K tokens; they are drawn as hypotheses, dashed and dotted. Time and quality share the ratio axis, so
that what a ratio saves stands beside what it costs.
"""
from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from matplotlib.lines import Line2D

from kvlab.figures._rows import points, usable
from kvlab.figures._style import GREY, PALETTE, Look, Style, above, log_axis, sized, ticks_at
from kvlab.record.recall import LONGER, MATCHED, TASK, TIMES_LONGER, TWO_TOKEN, main_cells, recall_rows, trained_length
from kvlab.record.statistics import t_interval

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

STUDY = "group_ratio"
KERNEL = ("latency_s", "ideal_bytes", "read_ceiling")
LIMIT, SAFE = 16, 8
# task -> (what the legend adds, line, marker in place of that of the head_dim)
TASKS = {TASK: ("", "-", None), TWO_TOKEN: (", two-token task", (0, (4, 2)), "p"),
         TASK + MATCHED: ("parameters matched to ratio 1", "none", "P"),
         TASK + LONGER: (f"trained {TIMES_LONGER} × as long", "none", "X")}
APART = (TASK + MATCHED, TASK + LONGER)                             # single cells, beside the first panel's lines


def select(table: pd.DataFrame) -> pd.DataFrame:
    """Scores with an fp32 cache, KV floats per token, time, bytes and ceilings of the same heads."""
    rows = usable(table)
    tasks = [main_cells(recall_rows(rows, task)) for task in TASKS]     # cells of more keys differ in width and rate
    if not (tasks[0]["metric"] == "nll").any():
        raise ValueError("figure group_ratio needs recall and nll of trained models, and the table has no such "
                         "reading; draw it from a run of `kvlab run group_ratio`")
    import pandas as pd
    scores = pd.concat(tasks, ignore_index=True)
    floats = rows[(rows["metric"] == "kv_floats_per_token") & rows["case_id"].isin(scores["case_id"])]
    decode = rows[(rows["phase"] == "decode") & rows["metric"].isin(KERNEL)
                  & (rows["num_q_heads"] == scores["num_q_heads"].iloc[0])]
    timed = decode[decode["metric"] == "latency_s"]["variant"]
    if len(timed):
        best = "sdpa" if (timed == "sdpa").any() else timed.iloc[0]
        decode = decode[decode["variant"].isin([best, ""])]
    return pd.concat([scores[rows.columns], floats, decode], ignore_index=True)


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    scores, n = _at_trained_length(rows)
    times = points(rows[rows["phase"] == "decode"], "latency_s", ideal="ideal_bytes")
    figure, axes = style.figure(3.3, 3 if len(times) else 2, width_ratios=[5, 4, 4][:3 if len(times) else 2])
    dims = sorted(int(d) for d in scores["head_dim"].unique())
    looks = {d: Look(PALETTE[i], marker) for i, (d, marker) in enumerate(zip(dims, "osv^<>*phH8"))}
    handles = _series(axes, scores, looks, style)
    pair = scores[scores["data"] == TASK]
    narrow = int(pair["head_dim"].min())
    _other_lengths(axes[0], rows, narrow, n, looks[narrow])
    case = json.loads(pair["case"].iloc[0])
    handles += _hypotheses(axes[0])
    handles.append(Line2D([], [], color=GREY, ls=(0, (1, 3)), lw=0.8, label="a guess"))
    ratios = sorted(int(r) for r in rows["group_ratio"].dropna().unique())
    for ax in axes[:2]:
        ax.axhline(math.log(case["num_values"]), color=GREY, ls=(0, (1, 3)), lw=0.8)
        ax.set_xscale("log", base=2)
        log_axis(ax.yaxis, "count")
        ax.set_ylim(scores[scores["metric"] == "nll"]["value"].astype(float).min() / 1.8,
                    2.2 * math.log(case["num_values"]))
    ticks_at(axes[0].xaxis, ratios, [str(r) for r in ratios])
    least, most = int(scores["floats"].min()), int(scores["floats"].max())
    floats = [least * 4**i for i in range(12) if least * 4**i <= most]
    ticks_at(axes[1].xaxis, floats, [str(f) if f < 1024 else f"{f / 1024:.3g}K" for f in floats])
    axes[0].set_xlim(0.4 * ratios[0], 1.9 * ratios[-1])                 # room for the names of lines
    axes[1].tick_params(labelleft=not style.wide)
    axes[0].set(xlabel="group ratio (query heads per KV head)\nnumbers at points: mean recall",
                ylabel=f"NLL of the answer (nat) at N = {n} pairs")
    axes[1].set_xlabel("KV floats per token (K and V)")
    if len(times):
        handles += _kernel(axes[2], times, rows, looks, style)
    above(figure, handles, columns=3)
    return figure


def _at_trained_length(rows):
    """(scores of each task at its longest N that was trained and scored, with the floats of each case; N of the pair
    task)."""
    floats = rows[rows["metric"] == "kv_floats_per_token"].groupby("case_id")["value"].first()
    parts = [part[part["kv_len"] == trained_length(part)] for _, part in _scores(rows).groupby("data", sort=False)]
    import pandas as pd
    scores = pd.concat(parts)
    return scores.assign(floats=scores["case_id"].map(floats).astype(float)), trained_length(
        scores[scores["data"] == TASK])


def _scores(rows):
    return rows[rows["metric"].isin(["recall", "nll"])]


def _series(axes, scores, looks, style) -> list[Line2D]:
    """All lines of both panels, and the legend's handles for them."""
    handles, counts = [], set()
    for task, (label, line, marker) in TASKS.items():
        for head_dim, look in looks.items():
            mine = scores[(scores["data"] == task) & (scores["head_dim"] == head_dim)]
            if mine.empty:
                continue
            own = Look(look.color, marker or look.marker)
            counts |= _means(axes[0], mine, "group_ratio", own, style, line, task == TASK)
            if task not in APART:
                _means(axes[1], mine, "floats", own, style, line, False)
                handles.append(Line2D([], [], ls=line, label=f"head_dim {head_dim}{label}",
                                      **style.marker("measured", own)))
    for task in APART:
        if (scores["data"] == task).any():
            label, _, marker = TASKS[task]
            own = Look("black", marker or "o")
            handles.append(Line2D([], [], ls="none", label=label, **style.marker("measured", own)))
    seeds = "–".join(str(n) for n in sorted({min(counts), max(counts)}))
    handles.append(Line2D([], [], ls="none", marker=".", ms=2.5, color="black",
                          label="one seed (drawn left of the mean)"))
    handles.append(Line2D([], [], ls="none", marker="|", ms=7, color="black",
                          label=f"95 % t-interval over {seeds} seeds"))
    return handles


def _means(ax, rows, x, look, style, line, recall: bool) -> set[int]:
    """A small dot per seed, the mean with its 95 % t-interval over seeds, joined by `line`; how many seeds there are.

    recall: write the mean recall at the first and the last point.
    """
    nll = rows[rows["metric"] == "nll"]
    ax.plot(nll[x].astype(float) * 2**-0.22, nll["value"].astype(float), ls="none", marker=".", ms=2.5,
            color=look.color, alpha=0.7, zorder=3)                  # left of the mean, which would cover them
    means = {float(at): t_interval(of["value"]) for at, of in nll.groupby(x)}
    half = [0 if math.isnan(mean.high) else mean.high - mean.value for mean in means.values()]
    beside = 2**0.25 if line == "none" else 1                       # the matched means stand beside the unmatched
    ax.errorbar([at * beside for at in means], [mean.value for mean in means.values()], yerr=half, capsize=1.5,
                elinewidth=0.8, ls=line, **style.marker("measured", look))
    if recall:
        shown = rows[rows["metric"] == "recall"].groupby(x)["value"].mean().astype(float)
        for at, place, align in ((min(means), (-8, 0), ("right", "center")),
                                 (max(means), (5, -8), ("left", "baseline"))):
            ax.annotate(f"{shown[at]:.3f}".removeprefix("0"), (at, means[at].value), place, fontsize=sized(5.5),
                        textcoords="offset points", color=look.color, ha=align[0], va=align[1])
    return {mean.n for mean in means.values()}


def _other_lengths(ax, rows, head_dim, n, look) -> None:
    """Means of the narrowest heads at the other N, as thin lines with N at their left end."""
    some = rows[(rows["metric"] == "nll") & (rows["data"] == TASK) & (rows["head_dim"] == head_dim)]
    for other, group in some[some["kv_len"] != n].groupby("kv_len"):
        mean = group.groupby("group_ratio")["value"].mean()
        ax.plot(mean.index.astype(float), mean.astype(float), color=look.color, lw=0.6, alpha=0.55, zorder=1)
        ax.annotate(f"N = {other}", (mean.index[0], mean.iloc[0]), (-8, 0), textcoords="offset points",
                    fontsize=sized(5.5), color=look.color, va="center", ha="right", annotation_clip=False)


def _hypotheses(ax) -> list[Line2D]:
    ax.axvline(LIMIT, color="black", ls="--", lw=0.9, zorder=0)
    ax.axvline(SAFE, color="black", ls=":", lw=0.9, zorder=0)
    return [Line2D([], [], color="black", ls="--", lw=0.9, label=f"the article's limit, {LIMIT}"),
            Line2D([], [], color="black", ls=":", lw=0.9, label=f"the article's “safer beyond 8K”, {SAFE}")]


def _kernel(ax, times, rows, looks, style) -> list[Line2D]:
    """Seconds of a decode call per ratio, and what its ideal bytes take at the read ceiling."""
    ceilings = rows[rows["metric"] == "read_ceiling"]["value"]
    for head_dim, look in looks.items():
        mine = times[times["head_dim"] == head_dim].sort_values("group_ratio")
        if len(mine):
            style.bars(ax, mine["group_ratio"], mine, look)
            if len(ceilings):
                ax.plot(mine["group_ratio"].astype(float), mine["ideal"].astype(float) / ceilings.median(),
                        color=look.color, ls="--", lw=0.9, zorder=1)
    ratios = sorted(int(r) for r in times["group_ratio"].unique())
    log_axis(ax.yaxis, "s")
    ax.set_xscale("log", base=2)
    ticks_at(ax.xaxis, ratios, [str(r) for r in ratios])
    ax.set(xlabel=f"group ratio; decode, {times['variant'].iloc[0]},\nkv_len {times['kv_len'].iloc[0]:,}",
           ylabel="time of a decode call (s)")
    label = "ideal bytes at the read ceiling"
    return [Line2D([], [], color=GREY, ls="--", lw=0.9, label=label)] if len(ceilings) else []
