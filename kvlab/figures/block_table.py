"""Who owns which block of a small pool: early, when sequences lie in one piece, and after requests have come and gone.

Bears on the claim that paging ends fragmentation: ids of one request's blocks scatter, and nothing is lost by that,
since any free block serves. Each square is a block, its colour the request; white is free, hatched the null
block, black one that several share.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvlab.figures._serving import question
from kvlab.figures._style import PALETTE, Style, sized
from kvlab.record.asked import with_fields

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["STUDY", "draw", "draw_table", "select"]
STUDY = "paging"
ACROSS = 32


def select(table: pd.DataFrame) -> pd.DataFrame:
    """The block tables of every snapshot."""
    return question(table, "block_table", STUDY, "snapshot", "blocks_held")


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    rows = with_fields(rows)
    steps = sorted(rows["after_steps"].unique())
    figure, axes = style.figure(1.7 if style.wide else 1.1, len(steps))
    for ax, step in zip(axes, steps):
        mine = rows[rows["after_steps"] == step]
        tables = dict(zip(mine["request"], mine["blocks"]))
        draw_table(ax, tables, int(mine["num_blocks"].iloc[0]))
        pieces = np.mean([1 + sum(b != a + 1 for a, b in zip(table, table[1:])) for table in tables.values()])
        ax.set_title(f"after {int(step)} steps: {len(tables)} requests, each in {pieces:.1f} pieces on average",
                     fontsize=sized(7), loc="left")
    return figure


def draw_table(ax: Axes, tables: dict[str, list[int]], num_blocks: int, names: Sequence[str] = ()) -> dict[str, str]:
    """One square per block id, row by row from the top, in the colour of the request that holds it; returns those.

    names: the order in which colours are given, so that a request keeps its own from picture to picture.
    """
    from matplotlib.patches import Rectangle
    across = min(ACROSS, num_blocks)
    down = -(-num_blocks // across)
    owners: dict[int, list[str]] = {}
    for name, blocks in tables.items():
        for block in blocks:
            owners.setdefault(block, []).append(name)
    colors = {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(dict.fromkeys([*names, *tables]))}
    for block in range(num_blocks):
        held = owners.get(block, [])
        color = "white" if block == 0 or not held else colors[held[0]] if len(held) == 1 else "black"
        ax.add_patch(Rectangle((block % across, down - 1 - block // across), 1, 1, facecolor=color,
                               edgecolor="#cccccc", lw=0.4, hatch="////" if block == 0 else None))
    ax.set(xlim=(-0.1, across + 0.1), ylim=(-0.1, down + 0.1), xticks=[], yticks=[], aspect="equal")
    ax.grid(False)
    for spine in ax.spines.values():
        spine.set_visible(False)
    return colors
