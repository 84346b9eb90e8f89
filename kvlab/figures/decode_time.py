"""Seconds of a decode call against the bytes it must move, and against the group ratio at one context length.

Bears on the article's claim that decoding is limited by reading the KV cache: time grows in proportion to the ideal
bytes (left; the fitted slope is a bandwidth), so fewer KV heads make a call faster unless it repeats them (right).
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.lines import Line2D

from kvlab.figures._rows import context_sweep, need, points, ratio_sweep, usable
from kvlab.figures._style import Style, above, log_axis, sized, ticks_at
from kvlab.record.statistics import fit
from kvlab.units import display

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

STUDY = "memory_wall"


def select(table: pd.DataFrame) -> pd.DataFrame:
    """Time and ideal bytes of the context sweep and the ratio sweep at batch 1, and all read ceilings of decode."""
    rows = need(usable(table), "decode_time", "decode", "latency_s", "ideal_bytes", "read_ceiling")
    times = rows[rows["metric"] == "latency_s"]
    if not (times["batch_size"] == 1).any():
        raise ValueError("figure decode_time needs latency_s of decode cases at batch size 1, and the table has none; "
                         "draw it from a run of `kvlab run memory_wall`")
    shown = set(context_sweep(times)["comparison_id"]) | set(ratio_sweep(times)["comparison_id"])
    shown = rows["comparison_id"].isin(shown) | (rows["metric"] == "read_ceiling")
    return rows[shown].reset_index(drop=True)


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    times = points(rows, "latency_s", ideal="ideal_bytes")
    ceiling = rows[rows["metric"] == "read_ceiling"]["value"].median()
    by_context, by_ratio = context_sweep(times), ratio_sweep(times)
    ratios = sorted(by_ratio["group_ratio"].unique())
    looks = style.looks(times["variant"])
    figure, axes = style.figure(3.4, 2 if len(ratios) > 1 else 1, sharey=True, width_ratios=[3, 2][:len(ratios)])
    _sweep(axes[0], by_context, "ideal", looks, ceiling, style)
    log_axis(axes[0].xaxis, "B", base=2)
    log_axis(axes[0].yaxis, "s")
    axes[0].set(xlabel="ideal bytes per call (B):\nq, K, V and output, each once", ylabel="time of a decode call (s)")
    at = by_context.groupby("kv_len")["ideal"].median()
    top = axes[0].secondary_xaxis("top")
    ticks_at(top.xaxis, at, [f"{kv_len:,}" for kv_len in at.index])
    top.set_xlabel(f"kv_len (tokens) at group ratio {by_context['group_ratio'].iloc[0]}", fontsize=sized(7))
    if len(ratios) > 1:
        _sweep(axes[1], by_ratio, "group_ratio", looks, ceiling, style)
        axes[1].set_xscale("log", base=2)
        ticks_at(axes[1].xaxis, ratios, [str(ratio) for ratio in ratios])
        axes[1].set_xlabel(f"group ratio (query heads per KV head)\nat kv_len {by_ratio['kv_len'].iloc[0]:,}")
    handles = [Line2D([], [], label=_label(name, by_context, ceiling), **style.marker("measured", look))
               for name, look in looks.items()]
    above(figure, [*handles, Line2D([], [], color="black", ls="--", lw=1, label=f"ideal bytes at the read ceiling, "
                                    f"{display(ceiling, 'B/s')} = 100 %")], columns=2)
    return figure


def _sweep(ax, times, x, looks, ceiling, style) -> None:
    for variant, look in reversed(looks.items()):              # the first of the legend is on top
        mine = times[times["variant"] == variant].sort_values(x)
        if len(mine):
            style.bars(ax, mine[x], mine, look)
    least = times.groupby(x)["ideal"].median() / ceiling
    ax.plot(least.index.astype(float), least, color="black", ls="--", lw=1, zorder=1)


def _label(variant: str, times: pd.DataFrame, ceiling: float) -> str:
    """The variant with the bandwidth that its slope means, where three context lengths or more tell one."""
    mine = times[times["variant"] == variant].sort_values("kv_len")
    if len(mine) < 3:
        return variant
    slope, low, high = fit(mine["ideal"], mine["value"], mine["low"], mine["high"])
    if low <= 0:
        return f"{variant}: no slope can be told"
    least, most = display(1 / high, "B/s"), display(1 / low, "B/s")
    return f"{variant}: {display(1 / slope, 'B/s')} [{least}, {most}], {100 / slope / ceiling:.0f} %"
