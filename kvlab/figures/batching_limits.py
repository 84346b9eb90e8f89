"""What a batch's limits do: the token budget to the gap between tokens, max_num_seqs to throughput and preemptions.

Bears on the claims that 65,536 tokens is a budget to set and that max_num_seqs belongs at 80 % of what memory bears.
On the right, what relieves memory: preemptions per request and tokens per second against the engine as it is.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from kvlab.figures._serving import line, question
from kvlab.figures._style import GREY, PALETTE, Look, Style, above, log_axis, ticks_at
from kvlab.record.asked import with_fields

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["STUDY", "draw", "select"]
STUDY = "batching"
BUDGET, SEQS = ("itl_p99_s", "tpot_mean_s"), ("tokens_per_s", "preemption_ratio")
LEVERS = ("preemption_ratio", "tokens_per_s")
_LOOKS = (Look(PALETTE[0], "o"), Look(PALETTE[1], "s"))
_BOTH = (Look(PALETTE[2], "v"), Look(PALETTE[3], "^"))


def select(table: pd.DataFrame) -> pd.DataFrame:
    """Gaps over budgets; throughput and preemptions over max_num_seqs and over what relieves memory."""
    import pandas as pd
    return pd.concat([question(table, "batching_limits", STUDY, name, *metrics) for name, metrics in (
        ("budget", BUDGET), ("max_num_seqs", SEQS), ("lever", LEVERS))], ignore_index=True)


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    rows = with_fields(rows)
    figure, (budget, seqs, lever) = style.figure(3.0, 3)
    words = {"itl_p99_s": "p99 gap between tokens", "tpot_mean_s": "mean time per output token",
             "tokens_per_s": "tokens per second", "preemption_ratio": "preemptions per request"}
    mine = rows[rows["question"] == "budget"]
    for metric, look in zip(BUDGET, _LOOKS):
        one = mine[mine["metric"] == metric].sort_values("x")
        line(style, budget, one["x"], one.assign(**{end: one[end] * 1e3 for end in ("value", "low", "high")}), look)
    budget.set(xscale="log", ylim=(0, None), xlabel="token budget of a step", ylabel="milliseconds")
    log_axis(budget.xaxis, "count")
    _two_axes(style, seqs, rows[rows["question"] == "max_num_seqs"], "x")
    seqs.axvline(0.8, color=GREY, lw=0.8, ls=":")
    seqs.set(xscale="log", xlabel="max_num_seqs ÷ requests of mean\nlength that blocks bear (dotted: 80 %)")
    ticks_at(seqs.xaxis, (0.2, 0.4, 0.8, 2, 4), ("20 %", "40 %", "80 %", "200 %", "400 %"))
    levers = rows[rows["question"] == "lever"]
    names = list(dict.fromkeys(levers["label"]))
    _two_axes(style, lever, levers.assign(at=levers["label"].map(names.index)), "at", joined=False)
    ticks_at(lever.xaxis, range(len(names)), names)
    lever.tick_params(axis="x", rotation=40)
    for label in lever.get_xticklabels():
        label.set_horizontalalignment("right")
    lever.set(xlim=(-0.5, len(names) - 0.5))
    above(figure, [Line2D([], [], label=words[metric], **style.marker("simulated", look))
                   for metric, look in (*zip(BUDGET, _LOOKS), *zip(SEQS, _BOTH))], columns=4)
    return figure


def _two_axes(style: Style, ax, rows: pd.DataFrame, x: str, joined: bool = True) -> None:
    """Tokens per second on the left axis, preemptions per request on the right one."""
    for metric, look, side in zip(SEQS, _BOTH, (ax, ax.twinx())):
        mine = rows[rows["metric"] == metric].sort_values(x)
        style.bars(side, mine[x], mine, look, kind="simulated", ls="-" if joined else "")
        side.set_ylim(bottom=0)
        side.tick_params(axis="y", colors=look.color)
        if metric == "preemption_ratio":
            side.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
            side.grid(False)
