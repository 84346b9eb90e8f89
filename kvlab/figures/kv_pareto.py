"""Bytes against quality: what each KV format takes per token, and how far predictions move from the fp32 cache.

Bears on the article's claims that FP8 and INT8 caches lose next to nothing: a format above the line loses more than one
that is no larger. Bytes hold scales, zero points and what a format keeps in full precision, at the length that was
scored. Formats of 16 bits, twice as large and orders of magnitude nearer, are said in words.
"""
from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from kvlab.figures._formats import FAMILIES, STUDY, family, handles, quality, short, told
from kvlab.figures._rows import points
from kvlab.figures._style import GREY, Style, above, log_axis, sized
from kvlab.record.quality import TEXTS, comparable, front
from kvlab.units import KiB

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["STUDY", "draw", "select"]
APART = 1.0                             # KiB between two columns of points whose names are set apart


def select(table: pd.DataFrame) -> pd.DataFrame:
    """KL and bytes per token of every format on the windows that all were scored on."""
    rows = comparable(quality(table, "kv_pareto", TEXTS, "kl", "kv_bytes_per_token"))
    return rows[rows["kv_format"] != "fp32"]


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    figure, (ax,) = style.figure(4.0, full=True)
    every = points(rows, "kl", bytes="kv_bytes_per_token")
    every = every.assign(kib=every["bytes"].astype(float) / KiB, value=every["value"].astype(float))
    large = every["kv_format"].map(family) == "16 bits"
    shown = every[~large] if (~large).any() else every
    best = front(shown, "kib", "value")
    ax.step(best["kib"], best["value"], where="post", color=GREY, lw=0.8, ls="--", zorder=1)
    for name, row in shown.set_index("kv_format", drop=False).iterrows():
        style.bars(ax, [row["kib"]], row.to_frame().T, FAMILIES[family(name)])
    log_axis(ax.yaxis, "count")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}".replace("e-0", "e-")))
    ax.set(xlabel=f"KV cache per token, all layers, in a cache of {rows['kv_len'].iloc[0]} tokens (KiB)",
           ylabel="KL to the fp32 cache\n(nat per token, log; bar: 95 %)")
    left, right = (0.6, 3.6) if style.wide else (2.2, 8)                       # room for the names
    ax.set_xlim(shown["kib"].min() - left, shown["kib"].max() + right)
    ax.set_ylim(shown["value"].min() / 1.8, shown["value"].max() * 2)
    ax.set_title(told(rows), fontsize=sized(6.5), color=GREY, loc="left")
    line = Line2D([], [], color=GREY, lw=0.8, ls="--", label="least KL for the bytes")
    above(figure, [*handles(shown["kv_format"], style), line], columns=6)
    figure.squeezed = False                                                 # the names need their lines
    _named(ax, shown)
    if len(shown) < len(every):
        said = [f"{row['kv_format']} ({row['kib']:.3g} KiB, KL {row['value']:.1g})"
                for _, row in every[large].iterrows()]
        words = "beyond these axes: " + ", ".join(said)
        ax.text(0.01, 0.02, words if style.wide else "\n".join(textwrap.wrap(words, 44)), transform=ax.transAxes,
                fontsize=sized(6), color=GREY)
    return figure


def _named(ax, shown) -> None:
    """Names in the colour of their family beside the points, a line's height apart.

    Points close in bytes share a column of names: the largest formats' on their right, those of others on their left,
    where the next ones are not in the way; the smallest formats' on the right again.
    """
    column = (shown["kib"].sort_values().diff() > APART).cumsum().reindex(shown.index)
    bottom, top = np.log10(ax.get_ylim())
    line = (top - bottom) / 31                                              # of text, in decades
    for number, own in shown.groupby(column):
        right = number in (0, column.max())
        x = own["kib"].max() + 0.2 if right else own["kib"].min() - 0.2
        own = own.sort_values("value")
        lift = 0 if number and right else 1.1 * line if right else 0.6 * line   # off the line of least KL
        height = lift + _spread(np.log10(own["value"].to_numpy(float)), line)
        for (_, row), at in zip(own.iterrows(), height):
            color = FAMILIES[family(row["kv_format"])].color
            ax.annotate(short(row["kv_format"]), (row["kib"], row["value"]), (x, 10**at), va="center",
                        fontsize=sized(6), ha="left" if right else "right", color=color, zorder=4,
                        bbox=dict(facecolor="white", edgecolor="none", alpha=0.8, pad=0.4),
                        arrowprops=dict(arrowstyle="-", lw=0.4, color=color, alpha=0.5, shrinkA=0, shrinkB=2,
                                        relpos=(0 if right else 1, 0.5)))


def _spread(height: np.ndarray, line: float) -> np.ndarray:
    """Ascending heights moved as little as keeps them a line apart: crowded ones stand about their mean."""
    groups = [[float(h)] for h in height]
    i = 1
    while i < len(groups):
        below, here = groups[i - 1], groups[i]
        gap = (np.mean(here) - line * (len(here) - 1) / 2) - (np.mean(below) + line * (len(below) - 1) / 2)
        if gap < line:
            groups[i - 1:i + 1] = [below + here]
            i = max(1, i - 1)
        else:
            i += 1
    return np.concatenate([np.mean(g) + line * (np.arange(len(g)) - (len(g) - 1) / 2) for g in groups])
