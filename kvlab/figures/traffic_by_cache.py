"""Bytes to and from memory against the size of the simulated cache in front of it, one panel per variant and phase.

Bears on the article's claim that attention over the KV cache is bound by memory traffic: how much traffic there is
depends on what stays in a cache. Points: simulated. Line: the variant's formula behind the same caches, straight from
one size to the next. A point on the line says that the formula knows what stays. The C kernels' shapes were chosen so
that no working set lies near a swept size, but for two: 76 and 80 query tokens, whose working sets lie within 1.05 × of
512 KiB, show how a cache slides where the formula steps.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.lines import Line2D

from kvlab.figures._rows import usable
from kvlab.figures._style import GREY, MARKERS, PALETTE, Look, Style, above, log_axis, sized
from kvlab.record.counters import GROUPS, counted, group_of, swept

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
    points = points.assign(ratio=points["value"], value=points["case_id"].map(total), label=_labels(points))
    points = points.sort_values("cache_bytes", kind="stable")
    panels = list(dict.fromkeys(zip(points["variant"], points["phase"])))
    panels.sort(key=lambda panel: GROUPS.index(group_of(panel[0])))
    columns = min(3 if style.wide else 2, len(panels))
    down = -(-len(panels) // columns)
    figure, axes = style.grid(0.4 + 2.2 * down, down, columns, sharex=True)
    axes = axes.ravel()
    looks = {label: Look(PALETTE[i % len(PALETTE)], MARKERS[i % len(MARKERS)])
             for i, label in enumerate(sorted(points["label"].unique()))}
    for ax, (name, phase) in zip(axes, panels):
        for label, own in points[(points["variant"] == name) & (points["phase"] == phase)].groupby("label"):
            ax.plot(own["cache_bytes"], own["value"] / own["ratio"], color=looks[label].color, lw=0.9, zorder=2)
            style.bars(ax, own["cache_bytes"], own, looks[label], own["kind"].iloc[0], ls="none", zorder=3)
        low, high = ax.get_ylim()
        if high < 4 * low:                                           # else a few per cent would look like a gulf
            middle = (low * high)**0.5
            ax.set_ylim(middle / 2.2, middle * 2.2)
        log_axis(ax.xaxis, "B", base=2)
        log_axis(ax.yaxis, "B", base=2)
        ax.xaxis.set_ticks(np.sort(points["cache_bytes"].unique()))
        ax.tick_params(axis="x", labelrotation=90)
        ax.set_title(f"{name}, {phase}", fontsize=sized(8))
    for ax in axes[len(panels):]:
        ax.remove()
    figure.supylabel("to and from memory, per call", fontsize=sized(8))
    for ax in axes[max(0, len(panels) - columns):len(panels)]:
        ax.set_xlabel("simulated last-level cache")
        ax.tick_params(labelbottom=True)
    handles = [Line2D([], [], ls="none", label=f"{label}: simulated", **style.marker(points["kind"].iloc[0], look))
               for label, look in looks.items()]
    formula = Line2D([], [], color=GREY, lw=0.9, label="the variant's formula at these sizes (modelled)")
    above(figure, [*handles, formula], columns=3)
    return figure


def _labels(points: pd.DataFrame) -> pd.Series:
    """Group ratio of each point; where a panel has other numbers of queries besides its commonest, those too."""
    common = points.groupby(["variant", "phase"])["q_len"].transform(lambda found: found.mode().iloc[0])
    return ("group ratio " + points["group_ratio"].astype(str)).where(
        points["q_len"] == common, "group ratio " + points["group_ratio"].astype(str) + ", "
        + points["q_len"].astype(str) + " query tokens")
