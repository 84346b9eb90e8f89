"""Continuous against static batches over the rate of arrivals; what each policy does to the mean and to the slowest.

Bears on the claims that static batches waste the GPU and that short requests should go first. On the right both axes
are ratios to first come, first served on the same requests: left of 1 the mean falls, above 1 the slowest pay for it.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.lines import Line2D

from kvlab.figures._serving import line, question
from kvlab.figures._style import Style, above, log_axis, ticks_at

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["STUDY", "draw", "select"]
STUDY = "batching"
RATIOS = ("ttft_mean_s_ratio", "ttft_p99_s_ratio")


def select(table: pd.DataFrame) -> pd.DataFrame:
    """Tokens per second over rates, and the TTFT ratios of every policy."""
    import pandas as pd
    return pd.concat([question(table, "batching", STUDY, "static", "tokens_per_s", "ttft_mean_s"),
                      question(table, "batching", STUDY, "policy", *RATIOS)], ignore_index=True)


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    figure, (rate, first, policy) = style.figure(3.2, 3)
    swept = rows[rows["question"] == "static"]
    ratios = rows[rows["question"] == "policy"]
    names = [name for name in ratios["label"].unique() if name != "fcfs"]
    every = style.looks({*swept["label"], *names})
    looks = {name: every[name] for name in sorted(swept["label"].unique())}
    handles = [Line2D([], [], label=name, **style.marker("simulated", look)) for name, look in looks.items()]
    for ax, metric in ((rate, "tokens_per_s"), (first, "ttft_mean_s")):
        for name, look in looks.items():
            mine = swept[(swept["metric"] == metric) & (swept["label"] == name)].sort_values("x")
            line(style, ax, mine["x"], mine, look)
    rate.set(ylabel="output tokens per second", xlabel="arrivals ÷ what the\nengine can serve", ylim=(0, None))
    first.set(ylabel="mean time to first token (s, log)", xlabel="arrivals ÷ what the\nengine can serve", yscale="log")
    log_axis(first.yaxis, "s")
    for name in names:
        look = every[name]
        mean, tail = (ratios[(ratios["metric"] == metric) & (ratios["label"] == name)].iloc[0] for metric in RATIOS)
        spread = [[[row["value"] - row["low"]], [row["high"] - row["value"]]] for row in (mean, tail)]
        policy.errorbar([mean["value"]], [tail["value"]], xerr=spread[0], yerr=spread[1], ls="", elinewidth=0.8,
                        **style.marker("simulated", look))
        handles.append(Line2D([], [], label=name, ls="", **style.marker("simulated", look)))
    policy.set(xlabel="mean TTFT ÷ fcfs (log)", ylabel="p99 TTFT ÷ fcfs (log)", xscale="log", yscale="log")
    for ax in (policy.axvline, policy.axhline):
        ax(1, color="black", lw=0.7, zorder=1)
    for axis in (policy.xaxis, policy.yaxis):
        low, high = axis.get_view_interval()
        shown = [one for one in (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10) if low <= one <= high]
        ticks_at(axis, shown, [f"{one:g} ×" for one in shown])
    above(figure, handles, columns=4)
    return figure
