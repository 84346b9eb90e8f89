"""What each policy does to the mean, to the slowest and to long prompts; and how long the unluckiest long one waits.

Bears on the claim that short requests should go first. On the left everything is a ratio to first come, first served on
the same requests: left of 1 it falls, right of 1 somebody pays. On the right short prompts keep coming faster than the
engine serves: who starves, and what aging does about it.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.lines import Line2D

from kvlab.figures._serving import question
from kvlab.figures._style import PALETTE, Look, Style, above, log_axis, sized, ticks_at
from kvlab.record.asked import with_fields

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["STUDY", "draw", "select"]
STUDY = "batching"
RATIOS = {"ttft_mean_s_ratio": ("mean TTFT", Look(PALETTE[0], "o")),
          "ttft_p99_s_ratio": ("p99 TTFT", Look(PALETTE[3], "s")),
          "ttft_long_mean_s_ratio": ("mean TTFT of prompts from 512 tokens on", Look(PALETTE[2], "v"))}
WAITS = {"ttft_short_mean_s": ("mean TTFT of shorter prompts", Look(PALETTE[1], "^")),
         "ttft_long_max_s": ("longest TTFT of a prompt from 512 tokens on", Look("black", "P"))}
LINE = 0.3                      # inches a policy takes


def select(table: pd.DataFrame) -> pd.DataFrame:
    """The TTFT ratios of every policy but the baseline, and the waits where long prompts starve."""
    import pandas as pd
    ratios = question(table, "batching_policies", STUDY, "policy", *RATIOS)
    waits = question(table, "batching_policies", STUDY, "starvation", *WAITS)
    return pd.concat([ratios[with_fields(ratios)["label"] != "fcfs"], waits], ignore_index=True)


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    rows = with_fields(rows)
    policies, starving = (rows[rows["question"] == name] for name in ("policy", "starvation"))
    names = list(policies[["data", "label"]].drop_duplicates().itertuples(index=False, name=None))
    if style.wide:
        figure, (ratio, wait) = style.figure(0.8 + LINE * len(names), 2, full=True, width_ratios=(1.25, 1))
    else:
        lines = len(names), starving["label"].nunique()
        figure, axes = style.grid(1.6 + LINE * sum(lines), 2, 1, height_ratios=lines)
        ratio, wait = axes[:, 0]
    _lines(style, ratio, [(label, policies[(policies["data"] == data) & (policies["label"] == label)])
                          for data, label in names], RATIOS)
    ratio.axvline(1, color="black", lw=0.7, zorder=1)
    low, high = ratio.get_xlim()
    ratio.set(xscale="log", xlabel="÷ fcfs on the same requests (log)", xlim=(max(low, 0.08), min(high, 12)))
    shown = [one for one in (0.1, 0.2, 0.5, 1, 2, 5, 10) if max(low, 0.1) <= one <= high]
    ticks_at(ratio.xaxis, shown, [f"{one:g} ×" for one in shown])
    began = 0
    for data in dict.fromkeys(data for data, _ in names):
        ratio.annotate(data.removeprefix("workload:"), (0, began - 0.5), (2, 2), xycoords=ratio.get_yaxis_transform(),
                       textcoords="offset points", fontsize=sized(7), fontweight="bold", va="bottom")
        began += sum(other == data for other, _ in names)
        if began < len(names):
            ratio.axhline(began - 0.5, color="black", lw=0.5)
    _lines(style, wait, [(label, mine) for label, mine in starving.groupby("label", sort=False)], WAITS)
    log_axis(wait.xaxis, "s")
    wait.set(xlabel="seconds (log) where short\nprompts keep coming")
    above(figure, [Line2D([], [], label=says, ls="", **style.marker("simulated", look))
                   for says, look in (*RATIOS.values(), *WAITS.values())], columns=3)
    return figure


def _lines(style: Style, ax: Axes, lines, metrics) -> None:
    """One line per policy, from the top, with a marker per metric."""
    for at, (_, mine) in enumerate(lines):
        for row in mine.to_dict("records"):
            _, look = metrics[row["metric"]]
            ends = (row["low"], row["high"]) if row["low"] == row["low"] else (row["value"], row["value"])
            ax.errorbar([row["value"]], [at], xerr=[[max(row["value"] - ends[0], 0)], [max(ends[1] - row["value"], 0)]],
                        ls="", elinewidth=0.8, **style.marker("simulated", look))
    ticks_at(ax.yaxis, range(len(lines)), [label for label, _ in lines])
    ax.set_ylim(len(lines) - 0.5, -0.5)
