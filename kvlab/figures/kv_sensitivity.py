"""Which layer's K or V suffers: KL to the fp32 cache with one of them at a time in a format, layer by side.

Bears on the article's claims about FP8 and INT8, which give K and V of all layers one format: where rows differ by
orders of magnitude, bytes are better spent on the few that need them.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.ticker import FuncFormatter

from kvlab.figures._formats import STUDY, quality, told
from kvlab.figures._style import GREY, Style, sized

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["STUDY", "draw", "select"]


def select(table: pd.DataFrame) -> pd.DataFrame:
    """KL of every layer and side in every format that was tried so."""
    return quality(table, "kv_sensitivity", "layer ", "kl")


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    place = rows["scope"].str.split(" ", expand=True)
    grid = rows.assign(layer=place[1].astype(int), side=place[2]).pivot_table(
        index=["kv_format", "side"], columns="layer", values="value", sort=False)
    formats = list(dict.fromkeys(grid.index.get_level_values(0)))
    grid = grid.reindex([(fmt, side) for fmt in formats for side in "KV"])
    values = grid.to_numpy(float)
    floor = np.nanmin(values[values > 0])
    figure, (ax,) = style.figure(0.9 + 0.32 * len(grid))
    image = ax.imshow(np.maximum(values, floor), aspect="auto", cmap="viridis",
                      norm=LogNorm(floor, max(np.nanmax(values), 10 * floor)))
    ax.grid(False)
    for border in range(2, len(grid), 2):
        ax.axhline(border - 0.5, color="white", lw=2)
    ax.set_yticks(range(len(grid)), [f"{fmt}  {side}" for fmt, side in grid.index])
    layers = list(grid.columns)
    shown = range(0, len(layers), max(1, len(layers) // 15))
    ax.set_xticks(list(shown), [str(layers[i]) for i in shown])
    ax.set(xlabel="layer whose K or V is in the format, all others in fp32")
    ax.set_title(f"{told(rows)}; shown without intervals", fontsize=sized(6.5), color=GREY, loc="left")
    bar = figure.colorbar(image, ax=ax, pad=0.01, format=FuncFormatter(lambda v, _: f"{v:.0e}".replace("e-0", "e-")))
    bar.set_label("KL (nat, log)")
    return figure
