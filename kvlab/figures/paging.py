"""What pages waste and what they cost: unused room by block size, by kind of reservation, and a kernel's time.

Bears on the claims that reserving the longest sequence wastes most of the memory and that 16 tokens are a block. The
line on the left is the rule of half a block per sequence; the diamond what the PagedAttention paper reports.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from kvlab.figures._kernels import order_of
from kvlab.figures._rows import usable, with_rows
from kvlab.figures._serving import question
from kvlab.figures._style import PALETTE, Look, Style, above, ticks_at
from kvlab.record.asked import with_fields

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["STUDY", "draw", "select"]
STUDY = "paging"
# Source: Kwon et al., SOSP 2023 (arXiv 2309.06180), section 1 and figure 2: KV memory that holds tokens
QUOTED = {"low": 0.204, "high": 0.382}
_PAGES, _RULE, _KERNEL = Look(PALETTE[0], "o"), Look("black", "o"), Look(PALETTE[2], "s")


def select(table: pd.DataFrame) -> pd.DataFrame:
    """Waste and used share of pages and reservations, the kernel's ratios, what the paper says."""
    import pandas as pd
    waste = question(table, "paging", STUDY, "waste", "waste_of_tokens", "used_share")
    ok = usable(table)
    kernel = ok[(ok["metric"] == "to_contiguous") & (ok["page_order"] == "random") & (ok["block_size"] > 0)]
    kernel = kernel[order_of(kernel) == "head"]
    if kernel.empty:
        raise ValueError("figure paging needs to_contiguous of a kernel on pages, and the table has no such reading; "
                         "draw it from a run of `kvlab run paging`")
    paper = with_rows(table.head(0), [dict(metric="used_share", unit="ratio", kind="quoted",
                                           value=sum(QUOTED.values()) / 2, source="Kwon et al., SOSP 2023",
                                           method="cite:arXiv 2309.06180", note="other engines and traces", **QUOTED)])
    return pd.concat([waste, kernel, paper], ignore_index=True)


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    rows = with_fields(rows)
    figure, (pages, kept, kernel) = style.figure(2.9, 3)
    waste = rows[(rows["metric"] == "waste_of_tokens") & (rows["reserved"] == "")].sort_values("block_size")
    sizes = sorted(waste["block_size"].unique())
    for kind, look in (("simulated", _PAGES), ("modelled", _RULE)):
        mine = waste[(waste["kind"] == kind) & (waste["value"] > 0)]
        style.bars(pages, mine["block_size"], mine, look, kind=kind, ls="" if kind == "simulated" else "-",
                   **({} if kind == "simulated" else dict(marker="", lw=0.9)))
    pages.set(xscale="log", yscale="log", xlabel="tokens of a block", ylabel="unused room ÷ tokens held (log)")
    pages.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    used = rows[rows["metric"] == "used_share"]
    names = ["max_model_len", "next power of two", "true length", "pages of 16", "the paper, before it"]
    chosen = [used[used["reserved"] == name] for name in names[:3]]
    chosen += [used[(used["reserved"] == "") & (used["block_size"] == 16)], used[used["kind"] == "quoted"]]
    for at, mine in enumerate(chosen):
        if len(mine):
            style.bars(kept, [at], mine, _PAGES, kind=mine["kind"].iloc[0])
    ticks_at(kept.xaxis, range(len(names)), names)
    kept.tick_params(axis="x", rotation=35)
    for label in kept.get_xticklabels():
        label.set_horizontalalignment("right")
    kept.set(ylim=(0, 1.05), xlim=(-0.5, len(names) - 0.5), ylabel="room that holds tokens")
    kept.yaxis.set_major_formatter(PercentFormatter(1))
    timed = rows[rows["metric"] == "to_contiguous"].sort_values("block_size")
    looks = style.looks(timed["variant"])
    for name, look in looks.items():
        mine = timed[timed["variant"] == name]
        style.bars(kernel, mine["block_size"], mine, look, ls="-")
    kernel.axhline(1, color="black", lw=0.9, zorder=1)
    kernel.set(xscale="log", xlabel="tokens of a block", ylabel="time ÷ one contiguous piece",
               ylim=(min(0.95, 0.98 * timed["low"].fillna(timed["value"]).min()), None))
    for ax in (pages, kernel):                                  # 128 would run into its neighbours
        ticks_at(ax.xaxis, sizes, [f"{int(n)}" if n in (1, 8, 16, 64, 256) else "" for n in sizes])
    above(figure, [Line2D([], [], label="counted over drawn lengths", ls="", **style.marker("simulated", _PAGES)),
                   Line2D([], [], label="half a block per sequence", color="black", lw=0.9),
                   *(Line2D([], [], label=f"{name}, blocks in random order", **style.marker("measured", look))
                     for name, look in looks.items())], columns=3)
    return figure
