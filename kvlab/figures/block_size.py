"""What pages cost: time of a decode step on a paged cache over that of the same variant on a contiguous one.

Bears on the claim that paging is nearly free: the ratio is shown for each block size, with pages in order and in random
order, and where pages hold tokens first instead of heads. On the line: no cost. In the band: not to be told from none,
since the same contiguous trial measured twice differs by as much.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvlab.figures._kernels import STUDY, lacking, looks, order_of, question
from kvlab.figures._rows import usable
from kvlab.figures._style import GREY, Style, above, ticks_at
from kvlab.record.statistics import aa_resolution

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

__all__ = ["STUDY", "draw", "select"]


def select(table: pd.DataFrame) -> pd.DataFrame:
    """Paged ÷ contiguous of every layout, and the contiguous trial that was measured twice."""
    usable(table)                                               # refuses several runs
    asked = table[(question(table) == "paging") & (table["status"] == "ok") & (table["kind"] != "missing")]
    ratios = asked[(asked["metric"] == "to_contiguous") & (asked["replica"].fillna(0) == 0)]
    if ratios.empty:
        raise lacking("block_size", "to_contiguous of a variant over block sizes")
    plain = asked[(asked["metric"] == "latency_s") & asked["block_size"].isna()]
    return asked[asked.index.isin(ratios.index) | asked.index.isin(plain.index)].reset_index(drop=True)


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    ratios = rows[rows["metric"] == "to_contiguous"]
    ratios = ratios.assign(label=_called(ratios))
    sizes = sorted(ratios["block_size"].unique())
    looked = looks(dict.fromkeys(ratios["label"]))
    figure, (ax,) = style.figure(3.2)
    for i, (name, look) in enumerate(looked.items()):
        mine = ratios[ratios["label"] == name].sort_values("block_size")
        beside = (i - (len(looked) - 1) / 2) * 0.08
        style.bars(ax, [sizes.index(n) + beside for n in mine["block_size"]], mine, look,
                   ls="--" if "random" in name else "-")
    ax.axhline(1, color="black", lw=0.9, zorder=1)
    handles: list[Artist] = [
        Line2D([], [], label=name, ls="--" if "random" in name else "-", **style.marker("measured", look))
        for name, look in looked.items()]
    pair = aa_resolution(rows[rows["block_size"].isna()])
    if pair is not None:
        ax.axhspan(pair[1], pair[2], color=GREY, alpha=0.2, lw=0, zorder=0)
        handles.append(Patch(color=GREY, alpha=0.2, lw=0, label="contiguous ÷ contiguous, measured twice (A/A)"))
    ticks_at(ax.xaxis, range(len(sizes)), [f"{n}" for n in sizes])
    low, high = ax.get_ylim()
    case = ratios.iloc[0]
    batch = f", batch {case['batch_size']}" if case["batch_size"] > 1 else ""
    ax.set(xlim=(-0.4, len(sizes) - 0.6), ylim=(min(0.9, low), max(1.2, high)),
           xlabel=f"tokens of a block; decode at {case['kv_len']:,} tokens{batch}, {case['num_q_heads']} query heads, "
                  f"group ratio {case['group_ratio']}, {case['kv_format']}",
           ylabel="paged ÷ contiguous (time)")
    above(figure, handles, columns=3)
    return figure


def _called(rows: pd.DataFrame) -> pd.Series:
    """The order of pages, of tokens and heads where it is not the usual one, and the variant if there are several."""
    text = "pages " + rows["page_order"].replace({"in_order": "in order", "random": "in random order"})
    text += order_of(rows).map({"token": ", tokens first"}).fillna("")
    return rows["variant"] + ", " + text if rows["variant"].nunique() > 1 else text
