"""Bytes that a prefill call takes beyond its inputs, against the prompt's length, with the fitted exponents.

Bears on the article's claim that flash attention needs O(n) memory where naive attention needs O(n²).
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.lines import Line2D

from kvlab.figures._rows import need, points, usable
from kvlab.figures._style import GREY, Style, above, log_axis, sized, ticks_at
from kvlab.record.statistics import fit

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

STUDY = "memory_wall"


def select(table: pd.DataFrame) -> pd.DataFrame:
    """Peak extra bytes of the prefill cases; a value whose whole interval is 0 has no place on a logarithmic axis."""
    rows = need(usable(table), "attention_memory", "prefill", "peak_extra_bytes")
    rows = rows[(rows["value"] > 0) | (rows["high"] > 0)].drop_duplicates("case_id").reset_index(drop=True)
    if rows.empty:
        raise ValueError("figure attention_memory needs peak_extra_bytes above 0, and every value in the table is 0; "
                         "run longer prompts: `kvlab run memory_wall --size large`")
    return rows


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    figure, (ax,) = style.figure(3.6)
    rows = points(rows, "peak_extra_bytes")
    looks = style.looks(rows["variant"])
    for variant, look in looks.items():
        mine = rows[rows["variant"] == variant].sort_values("q_len")
        style.bars_or_limits(ax, "q_len", mine, look)
    _guides(ax, rows)
    log_axis(ax.yaxis, "B", base=2)
    ax.set_xscale("log", base=2)
    lengths = sorted(rows["q_len"].unique())
    ticks_at(ax.xaxis, lengths, [f"{n:,}" for n in lengths])
    case = rows.iloc[0]
    ax.set(xlabel=f"prompt length n (tokens); {case['num_q_heads']} query heads, group ratio {case['group_ratio']}, "
                  f"head_dim {case['head_dim']}" + ("; arrow: upper limit" if (rows["low"] <= 0).any() else ""),
           ylabel="peak memory beyond the inputs (B)")
    above(figure, [Line2D([], [], label=_label(name, rows), **style.marker("measured", look))
                   for name, look in looks.items()], columns=3)
    return figure


def _guides(ax, rows) -> None:
    """Lines of slope 2 above the points and of slope 1 below them, to compare directions with."""
    n = np.array(sorted(rows["q_len"].unique()), dtype=float)
    last = rows[rows["q_len"] == rows["q_len"].max()]["high"]
    for power, text, end in ((1, "∝ n", last.min() / 2), (2, "∝ n²", last.max() * 2)):
        y = end * (n / n[-1])**power
        ax.plot(n, y, color=GREY, lw=0.8, ls=":", zorder=1)
        ax.annotate(text, (n[-1], y[-1]), (4, 0), textcoords="offset points", va="center", fontsize=sized(7),
                    color=GREY)


def _label(variant: str, rows: pd.DataFrame) -> str:
    """The variant with its exponent, where three lengths or more tell one."""
    mine = rows[(rows["variant"] == variant) & (rows["value"] > 0)].sort_values("q_len")
    if len(mine) < 3:
        return variant
    exponent, low, high = fit(mine["q_len"], mine["value"], mine["low"].clip(lower=1), mine["high"], power=True)
    return f"{variant}: n^{exponent:.2f} [{low:.2f}, {high:.2f}]"
