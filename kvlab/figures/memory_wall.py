"""Decode attention under the roofline: share of the matmul ceiling that each call reaches, against its intensity.

Bears on the article's claims that attention over the KV cache is bound by memory traffic and that compute utilisation
can fall below 10 %. A point's time and ceilings are measured, so it is filled (its share divides a flop count from the
shapes by them, which is why its row's kind is modelled); the roof itself is hollow; what others state is a diamond.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.lines import Line2D

from kvlab.catalog.gpus import gpu
from kvlab.figures._rows import need, points, usable, with_rows
from kvlab.figures._style import GREY, Style, above, log_axis, sized, ticks_at

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

STUDY = "memory_wall"
GPUS = ("A100 SXM4 80GB", "H100 SXM5 80GB", "H200 SXM 141GB")
ARTICLE = "the article: “GPU compute utilisation can fall below 10 %”"


def select(table: pd.DataFrame) -> pd.DataFrame:
    """Intensity, share and roof of every decode case with the time that makes it measured, and the quoted rows."""
    rows = need(usable(table), "memory_wall", "decode", "intensity", "flops_share", "attainable_flops_share", "ridge",
                "latency_s")
    sheets = [dict(metric="ridge", value=gpu(name).ridge("bf16"), unit="flop/B", dtype="bf16", hardware=name,
                   source=gpu(name).source, note="data sheet: dense bf16 flop/s ÷ memory bandwidth") for name in GPUS]
    article = dict(metric="flops_share", value=0.1, unit="ratio", hardware="unspecified GPU", source=ARTICLE)
    return with_rows(rows, [dict(kind="quoted", method="cite:data_sheet", scope="device", study=STUDY, **row)
                            for row in sheets] + [dict(kind="quoted", method="cite:article", study=STUDY, **article)])


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    figure, (ax,) = style.figure(3.9 if style.wide else 3.2, full=True)
    own, quoted = rows[rows["kind"] != "quoted"], rows[rows["kind"] == "quoted"]
    reached = points(own, "flops_share", x="intensity")
    sheets = quoted[quoted["metric"] == "ridge"]
    left, right = reached["x"].min() / 2, max(reached["x"].max(), sheets["value"].max()) * 2
    roof = _roof(ax, own, left, right, style)
    looks = style.looks(reached["variant"])
    timed = set(own[(own["metric"] == "latency_s") & (own["kind"] == "measured")]["case_id"])
    step = min(0.04, 0.2 / len(looks))                        # decades; the variants share their intensities
    for i, (variant, look) in enumerate(looks.items()):
        mine = reached[reached["variant"] == variant].sort_values("x")
        for kind, some in (("measured", mine[mine["case_id"].isin(timed)]),
                           ("modelled", mine[~mine["case_id"].isin(timed)])):
            style.bars(ax, some["x"] * 10**(step * (i - (len(looks) - 1) / 2)), some, look, kind, ls="none")
    diamonds = _quoted(ax, sheets, quoted[quoted["metric"] == "flops_share"], right, style)
    log_axis(ax.xaxis, "count")
    log_axis(ax.yaxis, "ratio")
    ax.set(xlim=(left, right), ylim=(reached["value"].min() / 2, 1.5 * max(1, reached["value"].max())),
           xlabel="intensity: useful flop per ideal byte (flop/B)\nat one intensity: variants side by side, "
                  "contexts and batch sizes one above the other", ylabel="share of the matmul ceiling (%)")
    _ratios(ax, reached)
    above(figure, [*(Line2D([], [], ls="none", label=name, **style.marker("measured", look))
                     for name, look in looks.items()), roof, diamonds], columns=4)
    return figure


def _roof(ax, own, left, right, style):
    """min(1, intensity ÷ ridge): the median ridge as a line, all comparisons' ridges as a band, each call's roof."""
    ridges = own[own["metric"] == "ridge"].drop_duplicates("comparison_id")["value"]
    x = np.geomspace(left, right, 200)
    lowest, highest = np.minimum(1, x / ridges.max()), np.minimum(1, x / ridges.min())
    ax.fill_between(x, lowest, highest, color="black", alpha=0.15, lw=0)
    ax.plot(x, np.minimum(1, x / ridges.median()), color="black", lw=1)
    allowed = points(own, "attainable_flops_share", x="intensity").drop_duplicates("comparison_id")
    ax.plot(allowed["x"], allowed["value"], ls="none", ms=4, **style.marker("modelled"))
    return Line2D([], [], ms=4, lw=1, label=f"roofline, ridge {ridges.median():.1f} [{ridges.min():.1f}, "
                                            f"{ridges.max():.1f}] flop/B", **style.marker("modelled"))


def _quoted(ax, sheets, claims, right, style):
    mark = {**style.marker("quoted"), "ls": "none", "ms": 4.5, "zorder": 4}
    ax.plot(sheets["value"], [1.0] * len(sheets), **mark)
    for _, row in sheets.iterrows():
        ax.annotate(f"{row['hardware'].split()[0]}: {row['value']:.0f}", (row["value"], 1), (0, -6),
                    textcoords="offset points", rotation=90, ha="center", va="top", fontsize=sized(6.5), color=GREY)
    for _, row in claims.iterrows():
        ax.axhline(row["value"], color=GREY, lw=0.8, ls=":", zorder=1)
        ax.plot([right / 1.12], [row["value"]], **mark)
        ax.annotate("the article: “can fall below 10 %”", (right / 1.25, row["value"]), (0, -3),
                    textcoords="offset points", ha="right", va="top", fontsize=sized(6.5), color=GREY)
    return Line2D([], [], label="quoted: data-sheet ridge (bf16), article", **mark)


def _ratios(ax, reached) -> None:
    """Which group ratio each intensity stands for, on an axis of its own above."""
    at = reached.groupby("group_ratio")["x"].median()
    top = ax.secondary_xaxis("top")
    ticks_at(top.xaxis, at, [str(ratio) for ratio in at.index])
    top.set_xlabel("group ratio (query heads per KV head)", fontsize=sized(7))
