"""What a prefix cache saves: memory among those alive together, computing while the blocks are still there.

Bears on the claim that prefix caching saves 30 to 50 % of the memory (the band): that is a share of the prompt times
the number of live sharers, and what is spared for sure is computing. Filled: blocks of a real model's cache.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from kvlab.figures._rows import usable
from kvlab.figures._serving import line, question
from kvlab.figures._style import GREY, PALETTE, Look, Style, above, log_axis, ticks_at
from kvlab.record.asked import asked, with_fields

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

__all__ = ["STUDY", "draw", "select"]
STUDY = "prefix_sharing"
CLAIM = (0.3, 0.5)              # the article, section 5
_SAVED = {"prefill_saved": ("prompt tokens not computed", Look(PALETTE[4], "P")),
          "live_memory_saved": ("memory not held per running request", Look(PALETTE[5], "X"))}


def select(table: pd.DataFrame) -> pd.DataFrame:
    """Memory saved by sharers, hit rates over pools, both in an engine; of a real model's cache, where it was there."""
    import pandas as pd
    shown = [question(table, "prefix_sharing", STUDY, name, *metrics) for name, metrics in (
        ("sharers", ("memory_saved",)), ("pool", ("hit_rate",)), ("engine", tuple(_SAVED)))]
    real = asked(usable(table), "prefill")
    return pd.concat([*shown, real.loc[real["metric"] == "memory_saved", list(table)]], ignore_index=True)


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    rows = with_fields(rows)
    figure, (sharers, pool, engine) = style.figure(2.9, 3)
    handles: list[Artist] = []
    mine = rows[rows["question"] == "sharers"].sort_values("sharers")
    for i, (shared, one) in enumerate(mine.groupby("shared")):
        look = Look(PALETTE[i], "osv"[i % 3])
        counted, formula = (one[one["kind"] == kind] for kind in ("simulated", "modelled"))
        sharers.plot(formula["sharers"], formula["value"], color=look.color, lw=0.9)
        style.bars(sharers, counted["sharers"], counted, look, kind="simulated", ls="")
        handles.append(Line2D([], [], label=f"{shared:.0%} of the prompt in common", lw=0.9,
                              **style.marker("simulated", look)))
        real = rows[(rows["question"] == "prefill") & (rows["shared"] == shared)]
        if len(real):
            style.bars(sharers, real["sharers"], real, look, ls="", zorder=3)
    if (rows["question"] == "prefill").any():
        handles.append(Line2D([], [], label="filled: blocks of a real model's cache", ls="",
                              **style.marker("measured", Look(GREY, "o"))))
    sharers.set(xscale="log", xlabel="live requests that share", ylabel="memory saved (line: f(R − 1)/R)")
    ticks = sorted(mine["sharers"].unique())
    ticks_at(sharers.xaxis, ticks, [f"{int(n)}" for n in ticks])
    pools = rows[(rows["question"] == "pool") & ~rows["endless"].fillna(False).astype(bool)]
    for i, (data, one) in enumerate(rows[rows["question"] == "pool"].groupby("data")):
        look, sized = Look(PALETTE[(7, 9)[i % 2]], "<>"[i % 2]), pools[pools["data"] == data].sort_values("num_blocks")
        line(style, pool, sized["num_blocks"], sized, look)
        for value in one[one["endless"].astype(bool)]["value"]:
            pool.axhline(value, color=look.color, lw=0.8, ls=":")
        handles.append(Line2D([], [], label=f"{data.removeprefix('workload:')} (dotted: endless pool)",
                              **style.marker("simulated", look)))
    pool.set(xscale="log", ylim=(0, None), xlabel="blocks of the pool (512 tokens each)", ylabel="prompt blocks found")
    log_axis(pool.xaxis, "count")
    both = rows[rows["question"] == "engine"]
    for metric, (name, look) in _SAVED.items():
        one = both[both["metric"] == metric].sort_values("rate")
        line(style, engine, one["rate"], one, look)
        handles.append(Line2D([], [], label=name, **style.marker("simulated", look)))
    engine.axhspan(*CLAIM, color=GREY, alpha=0.18, lw=0, zorder=0)
    handles.append(Patch(color=GREY, alpha=0.18, lw=0, label="the article: 30 to 50 % of the memory"))
    engine.set(ylim=(0, 1), xlabel="requests per second", ylabel="saved by the prefix cache")
    for ax in (sharers, pool, engine):
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    above(figure, handles, columns=3)
    return figure
