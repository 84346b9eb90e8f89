"""Flash attention computes no less than it must and moves far fewer bytes: flops and bytes of one prompt, by variant.

Bears on the claim that flash attention is faster because it computes less. Left: each variant's flops over the useful
ones, which are the same for all (masked-out halves add to some), and its bytes to and from memory over the ideal ones;
both modelled, so hollow, with the measured time under each name, and counted bytes as points where a counter ran.
Right: memory of a call beyond its inputs against the prompt's length, measured, with the fitted exponents.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvlab.figures._kernels import STUDY, lacking, question
from kvlab.figures._rows import points, usable
from kvlab.figures._style import GREY, PALETTE, Look, Style, above, log_axis, sized, ticks_at
from kvlab.record.statistics import fit
from kvlab.units import display

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

__all__ = ["STUDY", "draw", "select"]
NEEDED = ("useful_flops", "executed_flops", "ideal_bytes", "hbm_bytes")
BYTES = Look(PALETTE[4], "o")                                  # no colour of a variant that the right panel shows
BARS = (("executed_flops", "useful_flops", "#333333", "///", "flops executed ÷ useful"),
        ("hbm_bytes", "ideal_bytes", BYTES.color, "", "bytes moved ÷ ideal"))


def select(table: pd.DataFrame) -> pd.DataFrame:
    """Flops, bytes and time of the longest prompt that variants were compared on; memory over the prompt's length."""
    rows = usable(table)
    asked = question(rows)
    prompts = rows[(asked == "prefill") & rows["metric"].isin([*NEEDED, "latency_s"])]
    if not set(NEEDED) <= set(prompts["metric"]):
        raise lacking("flash_flops", f"{', '.join(NEEDED)} of a prompt")
    longest = prompts["q_len"].max()
    memory = (asked == "memory") & (rows["metric"] == "peak_extra_bytes") & (rows["value"] > 0)
    return rows[rows.index.isin(prompts[prompts["q_len"] == longest].index) | memory].reset_index(drop=True)


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    memory = rows[rows["metric"] == "peak_extra_bytes"]
    figure, axes = style.figure(3.2, 2 if len(memory) else 1, width_ratios=[1.15, 1][:1 + bool(len(memory))])
    handles = _bars(axes[0], rows[rows["metric"] != "peak_extra_bytes"], style)
    if len(memory):
        handles += _memory(axes[1], points(memory, "peak_extra_bytes"), style)
    above(figure, handles, columns=3)
    return figure


def _bars(ax, rows, style) -> list:
    """Two hollow bars a variant, from 1 upward, and bytes that a counter saw."""
    modelled = rows[rows["source"].isin(["roofline"])]
    value = {metric: points(modelled, metric).drop_duplicates("variant").set_index("variant")["value"]
             for metric in NEEDED}
    names = list(value["executed_flops"].index)
    for i, (above_, below, color, hatch, _) in enumerate(BARS):
        ratio = value[above_].reindex(names) / value[below].reindex(names)
        at = np.arange(len(names)) + (i - 0.5) * 0.38
        ax.bar(at, ratio - 0.7, 0.34, bottom=0.7, facecolor="white", edgecolor=color, hatch=hatch, lw=1.1, zorder=2)
        for x, r in zip(at, ratio):
            ax.annotate(f"{r:.3g}", (x, r), (0, 2), textcoords="offset points", ha="center", fontsize=sized(7),
                        color=color)
    counted = rows[(rows["metric"] == "hbm_bytes") & (rows["kind"] == "measured")].drop_duplicates("variant")
    if len(counted):
        counted = counted.assign(**{end: counted[end] / counted["variant"].map(value["ideal_bytes"])
                                    for end in ("value", "low", "high")})
        style.bars(ax, [names.index(name) + 0.19 for name in counted["variant"]], counted, BYTES, ls="none", zorder=4)
    log_axis(ax.yaxis, "count", base=2)
    ax.set_ylim(0.7, 2 * max((value[a] / value[b]).max() for a, b, *_ in BARS))
    took = points(rows, "latency_s").drop_duplicates("variant").set_index("variant")["value"]
    ticks_at(ax.xaxis, range(len(names)), [f"{name}\n{display(took[name], 's') if name in took else 'no time'}"
                                           for name in names])
    case = rows.iloc[0]
    ax.axhline(1, color="black", lw=0.9, zorder=1)
    ax.grid(axis="x", visible=False)
    useful, ideal = value["useful_flops"].iloc[0], value["ideal_bytes"].iloc[0]
    ax.set(ylabel="times what every variant must", xlabel=f"a prompt of {case['q_len']:,} tokens: "
           f"{display(useful, 'flop')} useful, {display(ideal, 'B')} ideal")
    handles: list[Artist] = [Patch(facecolor="white", edgecolor=color, hatch=hatch, label=f"{text} (modelled)")
               for *_, color, hatch, text in BARS]
    if len(counted):
        handles.append(Line2D([], [], ls="none", label="bytes counted ÷ ideal", **style.marker("measured", BYTES)))
    return handles


def _memory(ax, rows, style) -> list[Line2D]:
    """Bytes beyond the inputs over the prompt's length, one line a variant, its exponent in the legend."""
    looked, handles = style.looks(rows["variant"]), []
    for name, look in looked.items():
        mine = rows[rows["variant"] == name].sort_values("q_len")
        style.bars_or_limits(ax, "q_len", mine, look)
        text = name
        if len(mine) >= 3:
            exponent, low, high = fit(mine["q_len"], mine["value"], mine["low"].clip(lower=1), mine["high"], power=True)
            text += f": n^{exponent:.2f} [{low:.2f}, {high:.2f}]"
        handles.append(Line2D([], [], label=text, **style.marker("measured", look)))
    lengths = sorted(rows["q_len"].unique())
    n = np.array(lengths, dtype=float)
    for power, end in ((1, rows["value"].min() / 2), (2, rows[rows["q_len"] == lengths[-1]]["value"].max() * 2)):
        ax.plot(n, end * (n / (n[0] if power == 1 else n[-1]))**power, color=GREY, lw=0.8, ls=":", zorder=1)
    log_axis(ax.yaxis, "B", base=2)
    ax.set_xscale("log", base=2)
    ticks_at(ax.xaxis, lengths, [f"{n // 1024}K" if n % 1024 == 0 else f"{n}" for n in lengths])
    case = rows.iloc[0]
    heads = f"{case['num_q_heads']} query head{'s' if case['num_q_heads'] > 1 else ''}"
    ax.set(xlabel=f"prompt (tokens), {heads}\ndotted: ∝ n and ∝ n²"
           + ("; arrow: upper limit" if (rows["low"] <= 0).any() else ""), ylabel="peak memory beyond the inputs")
    return handles
