"""Bytes against quality: what each KV format takes per token, and how far predictions move from the fp32 cache.

Bears on the article's claims that FP8 and INT8 caches lose next to nothing: a format above the line loses more than one
that is no larger. Bytes hold scales and zero points.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from kvlab.figures._formats import FAMILIES, STUDY, family, handles, quality, short, told
from kvlab.figures._rows import points
from kvlab.figures._style import GREY, Style, above, log_axis, ticks_at
from kvlab.units import KiB

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["STUDY", "draw", "select"]


def select(table: pd.DataFrame) -> pd.DataFrame:
    """KL and bytes per token of every format on all texts together."""
    rows = quality(table, "kv_pareto", "texts", "kl", "kv_bytes_per_token")
    return rows[rows["kv_format"] != "fp32"]


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    figure, (ax,) = style.figure(4.0)
    all_of = points(rows, "kl", bytes="kv_bytes_per_token").sort_values(["bytes", "value"])
    best = all_of[all_of["value"] < all_of["value"].cummin().shift(fill_value=np.inf)]
    ax.step(best["bytes"].astype(float) / KiB, best["value"].astype(float), where="post", color=GREY, lw=0.8, ls="--",
            zorder=1)
    for name, row in all_of.set_index("kv_format", drop=False).iterrows():
        style.bars(ax, [row["bytes"] / KiB], row.to_frame().T, FAMILIES[family(name)])
    ax.set_xscale("log", base=2)
    log_axis(ax.yaxis, "count")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}".replace("e-0", "e-")))
    least, most = all_of["bytes"].min() / KiB, all_of["bytes"].max() / KiB
    ticks = [n * 2**i for i in range(-4, 16) for n in (1, 1.5) if least / 1.15 <= n * 2**i <= 1.15 * most]
    ticks_at(ax.xaxis, ticks, [f"{n:.3g}" for n in ticks])
    ax.set(xlabel="KV cache per token, all layers (KiB, log)", ylabel="KL to the fp32 cache (nat per token, log)")
    ax.set_xlim(least / 1.15, 1.15 * most)
    ax.set_title(told(rows), fontsize=6.5, color=GREY, loc="left")
    line = Line2D([], [], color=GREY, lw=0.8, ls="--", label="least KL for the bytes")
    above(figure, [*handles(all_of["kv_format"], style), line], columns=4)
    _named(ax, all_of)
    return figure


def _named(ax, all_of) -> None:
    """Names in a column beside the axes, each near the height of its point and a line's height from the next."""
    ordered = all_of.sort_values("value")
    height = np.log10(ordered["value"].to_numpy(float))
    bottom, top = np.log10(ax.get_ylim())
    line = (top - bottom) / 34                                  # of text, in decades
    for i in range(1, len(height)):
        height[i] = max(height[i], height[i - 1] + line)
    height -= max(0.0, height[-1] - top)
    for i in range(len(height) - 1, 0, -1):
        height[i - 1] = min(height[i - 1], height[i] - line)
    for (_, row), at in zip(ordered.iterrows(), height):
        ax.annotate(short(row["kv_format"]), (row["bytes"] / KiB, row["value"]), (1.02, 10**at), fontsize=6,
                    va="center", textcoords=ax.get_yaxis_transform(), color="#333333", annotation_clip=False,
                    arrowprops=dict(arrowstyle="-", lw=0.4, color="#bbbbbb", shrinkA=0, shrinkB=3, relpos=(0, 0.5)))
