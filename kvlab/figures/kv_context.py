"""Does the error of a quantised KV cache grow with context? KL to the fp32 cache by position in one long window.

Bears on the article's claim that contexts beyond 8K tokens need more care. One text: position and subject are not told
apart, so a trend must show in all formats alike or beyond the intervals.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from kvlab.figures._formats import FAMILIES, STUDY, family, quality
from kvlab.figures._style import Style, above, log_axis, ticks_at

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["STUDY", "draw", "select"]


def select(table: pd.DataFrame) -> pd.DataFrame:
    """KL of every format in every bucket of positions."""
    rows = quality(table, "kv_context", "tokens ", "kl")
    if rows["kv_len"].nunique() < 2:
        raise ValueError("figure kv_context shows how KL changes with position, and the table has one stretch of "
                         "positions only; run kv_quant at size small or large")
    return rows


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    figure, (ax,) = style.figure(3.0)
    formats = list(rows.groupby("kv_format")["value"].mean().sort_values(ascending=False).index)
    ends = sorted(rows["kv_len"].unique())
    handles = []
    for name in formats:
        own, look = rows[rows["kv_format"] == name].sort_values("kv_len"), FAMILIES[family(name)]
        style.bars(ax, own["kv_len"], own, look, ls="-")
        handles.append(Line2D([], [], label=name, **style.marker("measured", look)))
    ax.set_xscale("log", base=2)
    within = {end: scope.removeprefix("tokens ").split(" … ") for scope, end in zip(rows["scope"], rows["kv_len"])}
    ticks_at(ax.xaxis, ends, ["–".join(f"{int(place):,}" for place in within[end]) for end in ends])
    log_axis(ax.yaxis, "count")
    for format_of in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
        format_of(FuncFormatter(lambda value, _: f"{value:.0e}".replace("e-0", "e-")))
    ax.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
    model, text = rows["model"].iloc[0], rows["data"].iloc[0]
    ax.set(xlabel=f"position in the window (tokens), {model} on {text}",
           ylabel="KL to the fp32 cache\n(nat per token, log; bar: 95 %)")
    above(figure, handles, columns=4)
    return figure
