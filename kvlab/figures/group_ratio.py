"""Recall against the group ratio and against the width of the KV cache, beside the time of a decode call per ratio.

Bears on the article's claims that group_ratio must not exceed 16 and that 8 is safer beyond 8K tokens; they are drawn
as hypotheses, dashed and dotted. Small dots are seeds, bars Student's t-intervals over them. Time and quality share
the ratio axis, so that what a ratio saves stands beside what it costs.
"""
from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.lines import Line2D
from scipy import stats

from kvlab.figures._rows import points, usable
from kvlab.figures._style import GREY, PALETTE, Look, Style, above, log_axis, ticks_at

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

STUDY = "group_ratio"
TASK, MATCHED = "recall:pair", "recall:pair, parameters matched"
KERNEL = ("latency_s", "ideal_bytes", "read_ceiling")
LIMIT, SAFE = 16, 8


def select(table: pd.DataFrame) -> pd.DataFrame:
    """Recall of the pair task with an fp32 cache, KV floats per token, time, bytes and ceilings of the same heads."""
    rows = usable(table)
    recall = rows[rows["data"].isin([TASK, MATCHED]) & (rows["kv_format"] == "fp32")]
    recall = recall[recall["metric"].isin(["recall", "kv_floats_per_token"])]
    if not (recall["metric"] == "recall").any():
        raise ValueError("figure group_ratio needs recall of trained models, and the table has no such reading; draw "
                         "it from a run of `kvlab run group_ratio`")
    keys = recall["case"].map(lambda case: json.loads(case)["num_keys"])
    recall = recall[keys == keys.min()]             # cells of more keys are of another width and rate
    decode = rows[(rows["phase"] == "decode") & rows["metric"].isin(KERNEL)
                  & (rows["num_q_heads"] == recall["num_q_heads"].iloc[0])]
    timed = decode[decode["metric"] == "latency_s"]["variant"]
    if len(timed):
        best = "sdpa" if (timed == "sdpa").any() else timed.iloc[0]
        decode = decode[decode["variant"].isin([best, ""])]
    import pandas as pd
    return pd.concat([recall, decode], ignore_index=True)


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    recall, kv_len = _at_trained_length(rows)
    times = points(rows[rows["phase"] == "decode"], "latency_s", ideal="ideal_bytes")
    figure, axes = style.figure(3.3, 3 if len(times) else 2, width_ratios=[5, 4, 4][:3 if len(times) else 2])
    dims = sorted(int(d) for d in recall["head_dim"].unique())
    looks = {d: Look(PALETTE[i], marker) for i, (d, marker) in enumerate(zip(dims, "osv^P<>X*"))}
    handles = []
    for head_dim, look in looks.items():
        mine = recall[recall["head_dim"] == head_dim]
        for data, filled in ((TASK, {}), (MATCHED, dict(marker="P"))):
            some = mine[mine["data"] == data]
            look_of = Look(look.color, filled.get("marker", look.marker))
            _seeds(axes[0], some, "group_ratio", look_of, style, line=data == TASK)
            if data == TASK:
                _seeds(axes[1], some, "floats", look_of, style, line=True)
        handles.append(Line2D([], [], label=f"head_dim {head_dim}", **style.marker("measured", look)))
    if (recall["data"] == MATCHED).any():
        handles.append(Line2D([], [], ls="none", label="parameters matched to ratio 1",
                              **style.marker("measured", Look("black", "P"))))
    _other_lengths(axes[0], rows, dims[0], kv_len, looks[dims[0]])
    chance = 1 / json.loads(recall["case"].iloc[0])["num_values"]
    handles += _hypotheses(axes[0]) + [Line2D([], [], color=GREY, ls=(0, (1, 3)), lw=0.8, label="chance")]
    ratios = sorted(int(r) for r in rows["group_ratio"].dropna().unique())
    for ax in axes[:2]:
        ax.axhline(chance, color=GREY, ls=(0, (1, 3)), lw=0.8)
        ax.set_ylim(-0.02, 1.04)
        ax.set_xscale("log", base=2)
    ticks_at(axes[0].xaxis, ratios, [str(r) for r in ratios])
    floats = [4**i for i in range(12) if recall["floats"].min() / 2 <= 4**i <= 2 * recall["floats"].max()]
    ticks_at(axes[1].xaxis, floats, [str(n) if n < 1024 else f"{n // 1024}K" for n in floats])
    axes[1].tick_params(labelleft=False)
    axes[0].set(xlabel="group ratio (query heads per KV head)", ylabel=f"recall at N = {kv_len} pairs")
    axes[1].set_xlabel("KV floats per token (K and V)")
    if len(times):
        handles += _kernel(axes[2], times, rows, looks, style)
    above(figure, handles, columns=4)
    return figure


def _at_trained_length(rows):
    """(recall at the longest N that was trained and scored, with the floats of each case beside it; that N)."""
    recall = rows[rows["metric"] == "recall"]
    floats = rows[rows["metric"] == "kv_floats_per_token"].groupby("case_id")["value"].first()
    recall = recall.assign(floats=recall["case_id"].map(floats))
    most, lengths = max(json.loads(recall["case"].iloc[0])["pairs"]), recall["kv_len"].unique()
    kv_len = max((int(n) for n in lengths if n <= most), default=int(min(lengths)))
    return recall[recall["kv_len"] == kv_len], kv_len


def _seeds(ax, rows, x, look, style, line) -> None:
    """A small dot per seed, the mean with its 95 % t-interval over seeds, joined where asked."""
    if rows.empty:
        return
    ax.plot(rows[x].astype(float) * 2**-0.22, rows["value"].astype(float), ls="none", marker=".", ms=2.5,
            color=look.color, alpha=0.7, zorder=3)                  # left of the mean, which would cover them
    groups = rows.groupby(x)["value"]
    mean, n = groups.mean().astype(float), groups.count()
    half = groups.std().astype(float) / np.sqrt(n) * stats.t.ppf(0.975, (n - 1).clip(lower=1))
    at = mean.index.astype(float) * (1 if line else 2**0.25)                # beside the unmatched mean
    ax.errorbar(at, mean, yerr=half.fillna(0), capsize=1.5, elinewidth=0.8,
                ls="-" if line else "none", **style.marker("measured", look))


def _other_lengths(ax, rows, head_dim, kv_len, look) -> None:
    """Means of the narrowest heads at the other N, as thin lines with N at their left end."""
    some = rows[(rows["metric"] == "recall") & (rows["data"] == TASK) & (rows["head_dim"] == head_dim)]
    for n, group in some[some["kv_len"] != kv_len].groupby("kv_len"):
        mean = group.groupby("group_ratio")["value"].mean()
        ax.plot(mean.index.astype(float), mean.astype(float), color=look.color, lw=0.6, alpha=0.55, zorder=1)
        ax.annotate(f"N = {n}", (mean.index[-1], mean.iloc[-1]), (3, 0), textcoords="offset points", fontsize=5.5,
                    color=look.color, va="center", annotation_clip=False)


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
