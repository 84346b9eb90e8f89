"""Real servers' logs against the capacity model, and the safety factor that each server would have needed.

Bears on the claim that concurrency is (VRAM − weights) ÷ (KV × 1.3 to 1.5), the band on the right: what a server cannot
use of its memory depends on its utilization, activation peak and graphs, not on a factor.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvlab.figures._serving import question
from kvlab.figures._style import GREY, PALETTE, Look, Style, above, log_axis, ticks_at
from kvlab.record.asked import with_fields

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["STUDY", "draw", "select"]
STUDY = "capacity"
RULE = (1.3, 1.5)               # the article, section 7
_VERDICTS = {"agreed": Look(PALETTE[2], "o"), "explained": Look(PALETTE[0], "s"), "unexplained": Look(PALETTE[3], "v")}


def select(table: pd.DataFrame) -> pd.DataFrame:
    """predicted ÷ logged of every judged log, pools as logged and modelled, the factors."""
    import pandas as pd
    return pd.concat([question(table, "capacity", STUDY, "log", "predicted_to_logged"),
                      question(table, "capacity", STUDY, "budget", "pool_gib", "safety_factor")], ignore_index=True)


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    rows = with_fields(rows)
    figure, (logs, pools, factors) = style.figure(3.3, 3)
    ratios = rows[rows["question"] == "log"].sort_values("value", ignore_index=True)
    for verdict, look in _VERDICTS.items():
        mine = ratios[ratios["verdict"] == verdict]
        style.bars(logs, mine.index, mine, look, kind="modelled", ls="", markersize=3.5)
    logs.axhline(1, color="black", lw=0.8, zorder=1)
    logs.set(yscale="log", xticks=[], xlabel=f"{len(ratios)} logs that print something\nto compare",
             ylabel="predicted ÷ logged (log)")
    shown = [one for one in (0.5, 0.9, 1, 1.1, 1.25, 1.5, 2) if logs.get_ylim()[0] <= one <= logs.get_ylim()[1]]
    ticks_at(logs.yaxis, shown, [f"{one:g} ×" for one in shown])
    budget = rows[rows["metric"] == "pool_gib"]
    logged, modelled = (budget[budget["kind"] == kind].set_index("id") for kind in ("quoted", "modelled"))
    both = modelled.join(logged["value"].rename("logged"))
    both = both[both["logged"] > 0]
    style.bars(pools, both["logged"], both, Look(PALETTE[0], "o"), kind="modelled", ls="")
    ends = [both["logged"].min() * 0.8, both["logged"].max() * 1.25]
    pools.plot(ends, ends, color="black", lw=0.8)
    pools.set(xscale="log", yscale="log", xlabel="KV pool as logged\n(GiB, log)",
              ylabel="KV pool as modelled (GiB, log)")
    for axis in (pools.xaxis, pools.yaxis):
        log_axis(axis, "count")
    needed = rows[(rows["metric"] == "safety_factor")].sort_values("value", ignore_index=True)
    for at, row in needed.iterrows():
        factors.plot([row["value"]], [at], ls="", **style.marker("quoted", Look("black")))
    factors.axvspan(*RULE, color=GREY, alpha=0.18, lw=0, zorder=0)
    ticks_at(factors.yaxis, range(len(needed)), list(needed["id"]))
    factors.set(xlabel="(VRAM − weights) ÷ pool,\nfrom the logs", ylim=(-0.6, len(needed) - 0.4))
    above(figure, [*(Line2D([], [], label=name, ls="", **style.marker("modelled", look))
                     for name, look in _VERDICTS.items()),
                   Line2D([], [], label="from a log", ls="", **style.marker("quoted", Look("black"))),
                   Patch(color=GREY, alpha=0.18, lw=0, label="the article's factor, 1.3 to 1.5")], columns=5)
    return figure
