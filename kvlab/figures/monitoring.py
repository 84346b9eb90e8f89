"""An incident as an engine's metrics show it, and which alarm tells it: requests, KV usage, and when each alarm was on.

Bears on the claim that cache evictions above 0 call for an alarm: a prefix cache lets blocks go all the time, in the
calm too. Grey is the burst, in which more requests arrive than the engine can serve.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from kvlab.figures._serving import question
from kvlab.figures._style import GREY, PALETTE, Style, above, ticks_at
from kvlab.record.asked import with_fields

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["STUDY", "draw", "select"]
STUDY = "monitoring"
STATE = ("running", "waiting", "kv_usage", "cache_evictions")


def select(table: pd.DataFrame) -> pd.DataFrame:
    """The engine's state over time, and whether each alarm was on."""
    import pandas as pd
    return pd.concat([question(table, "monitoring", STUDY, "curve", *STATE),
                      question(table, "monitoring", STUDY, "strip", "firing")], ignore_index=True)


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    rows = with_fields(rows)
    figure, (requests, blocks, alarms) = style.figure(2.8, 3)
    curves = {metric: mine.sort_values("t") for metric, mine in rows[rows["question"] == "curve"].groupby("metric")}
    began = float(rows["calm_s"].iloc[0])
    ended = began + float(rows["burst_s"].iloc[0])
    for ax in (requests, blocks, alarms):
        ax.axvspan(began / 60, ended / 60, color=GREY, alpha=0.18, lw=0, zorder=0)
        ax.set_xlabel("minutes (simulated)")
    for i, metric in enumerate(("running", "waiting")):
        requests.plot(curves[metric]["t"] / 60, curves[metric]["value"], color=PALETTE[i])
    requests.set(ylabel="requests", ylim=(0, None))
    blocks.plot(curves["kv_usage"]["t"] / 60, curves["kv_usage"]["value"], color=PALETTE[2])
    blocks.set(ylabel="KV usage", ylim=(0, 1.02))
    blocks.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    evicted, rate = curves["cache_evictions"], blocks.twinx()
    per_s = evicted["value"].diff() / evicted["t"].diff()
    rate.plot(evicted["t"] / 60, per_s, color=PALETTE[3])
    rate.set(ylabel="blocks evicted per second", ylim=(0, None))
    rate.grid(False)
    strips = rows[rows["question"] == "strip"]
    names = list(dict.fromkeys(strips["alarm"]))[::-1]
    for at, name in enumerate(names):
        mine = strips[strips["alarm"] == name].sort_values("t")
        t, on = mine["t"].to_numpy(), mine["value"].to_numpy() > 0
        step = t[1] - t[0]
        alarms.broken_barh([((moment - step) / 60, step / 60) for moment in t[on]], (at - 0.3, 0.6),
                           facecolors=PALETTE[3])
    ticks_at(alarms.yaxis, range(len(names)), names)
    alarms.set(ylim=(-0.6, len(names) - 0.4), xlim=requests.get_xlim())
    above(figure, [*(Line2D([], [], label=name, color=PALETTE[i]) for i, name in enumerate(
        ("running", "waiting", "KV usage", "blocks that the prefix cache let go"))),
        Patch(color=PALETTE[3], label="alarm on"), Patch(color=GREY, alpha=0.18, lw=0, label="burst")], columns=6)
    return figure
