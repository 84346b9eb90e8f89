"""Bytes to and from memory against the size of the simulated cache in front of it, one panel per kernel of kvlab's own.

Bears on the article's claim that attention over the KV cache is bound by memory traffic: how much traffic there is
depends on what stays in a cache. Points: simulated. Line: the variant's formula behind the same caches, straight from
one size to the next. A point on the line says that the formula knows what stays; shapes and sizes of the sweep were
fixed before anything was simulated.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.lines import Line2D

from kvlab.figures._rows import usable
from kvlab.figures._style import GREY, MARKERS, PALETTE, Look, Style, above, log_axis
from kvlab.record.counters import counted, swept

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

STUDY = "counters"


def select(table: pd.DataFrame) -> pd.DataFrame:
    """Bytes, their ratio to the formula and the size of the cache, of every trial that was swept."""
    rows = usable(table)
    cases = swept(rows)["case_id"]
    if not len(cases):
        raise ValueError("figure traffic_by_cache needs callgrind's bytes of a trial behind three sizes of cache, and "
                         "the table has none; draw it from a run of `kvlab run counters --size small` with valgrind")
    own = rows[rows["case_id"].isin(cases) & (rows["source"].str.startswith("callgrind"))]
    return own[own["metric"].isin(["hbm_bytes", "traffic_to_model", "last_level_bytes"])]


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    points = swept(rows)
    total = counted(rows, "callgrind", "hbm_bytes").drop_duplicates("case_id").set_index("case_id")["value"]
    points = points.assign(ratio=points["value"], value=points["case_id"].map(total)).sort_values("cache_bytes")
    names = list(dict.fromkeys(points["variant"]))
    figure, axes = style.figure(2.6, len(names), sharey=True)
    ratios = sorted(points["group_ratio"].unique())
    looks = {ratio: Look(PALETTE[i % len(PALETTE)], MARKERS[i % len(MARKERS)]) for i, ratio in enumerate(ratios)}
    for ax, name in zip(axes, names):
        for ratio, own in points[points["variant"] == name].groupby("group_ratio"):
            ax.plot(own["cache_bytes"], own["value"] / own["ratio"], color=looks[ratio].color, lw=0.9, zorder=2)
            style.bars(ax, own["cache_bytes"], own, looks[ratio], own["kind"].iloc[0], ls="none", zorder=3)
        log_axis(ax.xaxis, "B", base=2)
        log_axis(ax.yaxis, "B", base=2)
        ax.xaxis.set_ticks(np.sort(points["cache_bytes"].unique()))
        ax.tick_params(axis="x", labelrotation=90)
        ax.set_title(name, fontsize=8)
        ax.set(xlabel="simulated last-level cache", ylabel="to and from memory, per call" if ax is axes[0] else "")
    handles = [Line2D([], [], ls="none", label=f"group ratio {ratio}: simulated",
                      **style.marker(points["kind"].iloc[0], look)) for ratio, look in looks.items()]
    above(figure, [*handles, Line2D([], [], color=GREY, lw=0.9, label="the variant's formula (modelled)")], columns=4)
    return figure
