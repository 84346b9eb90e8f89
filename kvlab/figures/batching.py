"""Continuous against static batches over the rate of arrivals: tokens per second, and the wait for the first one.

Bears on the claim that static batches waste the GPU: who has finished stays in the batch until the last one has, and
who arrives waits for it. Policies are another figure, batching_policies.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from kvlab.figures._serving import line, question
from kvlab.figures._style import PALETTE, Look, Style, above, log_axis
from kvlab.record.asked import with_fields

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["STUDY", "draw", "select"]
STUDY = "batching"
SHOWN = {"tokens_per_s": "output tokens per second", "ttft_mean_s": "mean time to first token (log)",
         "kv_usage_mean": "blocks in use, or set aside"}
LOOKS = {"continuous": Look(PALETTE[0], "o"), "static": Look(PALETTE[3], "s")}


def select(table: pd.DataFrame) -> pd.DataFrame:
    """Tokens per second, mean TTFT and use of the blocks over rates."""
    return question(table, "batching", STUDY, "static", *SHOWN)


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    rows = with_fields(rows)
    figure, axes = style.figure(2.5, len(SHOWN))
    for ax, (metric, says) in zip(axes, SHOWN.items()):
        for name, look in LOOKS.items():
            mine = rows[(rows["metric"] == metric) & (rows["label"] == name)].sort_values("x")
            line(style, ax, mine["x"], mine, look)
        ax.axvline(1, color="black", lw=0.7, ls=":", zorder=1)
        ax.set(ylabel=says, xlabel="arrivals ÷ what the engine\ncan serve, continuously")
        if metric == "ttft_mean_s":
            log_axis(ax.yaxis, "s")
        else:
            ax.set_ylim(bottom=0)
    axes[2].yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    above(figure, [Line2D([], [], label=name, **style.marker("simulated", look)) for name, look in LOOKS.items()],
          columns=4)
    return figure
