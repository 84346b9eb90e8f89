"""How near each variant comes to its own roof: decode to a read of as many bytes, prefill to a matrix product.

Bears on the claim that attention over a KV cache is bound by memory traffic: a kernel that reaches the read ceiling
cannot be made faster, and one that does not leaves the rest to a better one. A point's time and ceilings are measured,
so it is filled. The upright stroke is what the roofline allows that shape: where a group of query heads shares little
memory, arithmetic ends it below 100 % of the read ceiling. What could not run is named below, with its reason.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from kvlab.figures._kernels import STUDY, called, lacking, question
from kvlab.figures._rows import points, usable, with_rows
from kvlab.figures._style import GREY, Style, above, sized, ticks_at
from kvlab.units import display

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["STUDY", "draw", "select"]
PANELS = {"decode": ("bandwidth_share", "read_ceiling", "decode: share of the read ceiling"),
          "prefill": ("flops_share", "matmul_ceiling", "prefill: share of the matmul ceiling")}
BESIDE = ("intensity", "ridge", "latency_s")


def select(table: pd.DataFrame) -> pd.DataFrame:
    """Shares of the roofs where variants stand side by side, and a row with the reason for each that could not run."""
    asked = question(table)
    shown = usable(table[asked.isin(PANELS)])
    shown = shown[shown["metric"].isin([*BESIDE, *(name for panel in PANELS.values() for name in panel[:2])])]
    absent = table[asked.isin(PANELS) & (table["metric"] == "latency_s") & (table["kind"] == "missing")]
    if not shown["metric"].isin(["bandwidth_share", "flops_share"]).any():
        raise lacking("kernels", "bandwidth_share or flops_share of variants side by side")
    absent = absent[~absent["variant"].isin(shown["variant"])].drop_duplicates("variant")
    return with_rows(shown, [dict(metric="latency_s", value=None, unit="s", kind="missing", source=row["variant"],
                                  variant=row["variant"], note=row["note"], study=STUDY, run_id=row["run_id"])
                             for _, row in absent.iterrows()])


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    rows = rows[rows["kind"] != "missing"]
    rows = rows.assign(asks=question(rows), label=called(rows), shape=_shape(rows))
    trials = rows[rows["variant"] != ""]
    panels = [asks for asks, panel in PANELS.items() if panel[0] in set(trials[trials["asks"] == asks]["metric"])]
    given = style.looks(trials["label"])
    looked = {name: given[name] for name in dict.fromkeys(trials["label"])}
    heights = [_height(trials[trials["asks"] == asks]) for asks in panels]
    figure, axes = style.grid(sum(heights) + 0.55 * len(panels) + 0.4, len(panels), 1, height_ratios=heights)
    axes = axes[:, 0]
    for ax, asks in zip(axes, panels):
        metric, ceiling, text = PANELS[asks]
        _panel(ax, trials[trials["asks"] == asks], metric, looked, style)
        ax.set_xlabel(text + _range(rows[(rows["asks"] == asks) & (rows["metric"] == ceiling)]))
    axes[0].set_title(_common(trials), loc="left", fontsize=sized(7), color=GREY)
    handles = [Line2D([], [], ls="none", label=name, **style.marker("measured", look)) for name, look in looked.items()]
    if {"intensity", "ridge"} <= set(rows["metric"]):
        handles.append(Line2D([], [], color="black", lw=1.2, label="roofline: what this shape allows (modelled)"))
    above(figure, handles, columns=4)
    return figure


def _range(ceilings: pd.DataFrame) -> str:
    """What 100 % is, measured beside each shape."""
    if ceilings.empty:
        return ""
    ends = [display(ceilings["value"].agg(end), ceilings["unit"].iloc[0]) for end in ("min", "max")]
    return f" (100 %: {' to '.join(dict.fromkeys(ends))})"


def _usual(rows: pd.DataFrame) -> dict[str, Any]:
    """The dtype and, on a CPU, the number of threads of most rows."""
    columns = ("dtype", "threads") if (rows["device"] == "cpu").any() else ("dtype",)
    return {column: rows[column].mode().iloc[0] for column in columns if rows[column].notna().any()}


def _common(rows: pd.DataFrame) -> str:
    usual = _usual(rows)
    threads = usual.get("threads")
    counted = f", {threads} thread{'s' if threads > 1 else ''}" if threads is not None else ""
    unless = " unless said" if any(rows[column].nunique() > 1 for column in usual) else ""
    return f"query heads:KV heads, tokens; {usual.get('dtype', '')}{counted}{unless}"


def _shape(rows: pd.DataFrame) -> pd.Series:
    """Heads, and what else is unusual, above tokens."""
    usual = _usual(rows[rows["variant"] != ""])
    text = rows["num_q_heads"].astype("string") + ":" + rows["num_kv_heads"].astype("string") + " heads"
    text += (", " + rows["dtype"]).where(rows["dtype"] != usual.get("dtype"), "")
    if "threads" in usual:
        threads = rows["threads"].astype("string") + " threads"
        text += (", " + threads.str.replace("1 threads", "1 thread")).where(rows["threads"] != usual["threads"], "")
    text += rows["kv_len"].map(lambda n: f"\n{int(n):,} tokens")
    return text + (" × " + rows["batch_size"].astype("string")).where(rows["batch_size"] > 1, "")


def _height(rows: pd.DataFrame) -> float:
    """Inches for a line per variant of each shape, and space between the shapes."""
    return sum(0.115 * group["label"].nunique() + 0.16 for _, group in rows.groupby("shape"))


def _panel(ax, rows, metric, looked, style) -> None:
    """Shapes from above, and under each its variants, a line apart."""
    place, centers = 0.0, {}
    for shape, own in rows.groupby("shape", sort=False):
        reached = points(own, metric)
        names = [name for name in looked if name in set(reached["label"])]
        for i, name in enumerate(names):
            mine = reached[reached["label"] == name].iloc[0]
            ends = [[max(0.0, mine["value"] - mine["low"])], [max(0.0, mine["high"] - mine["value"])]]
            timed = (own["case_id"] == mine["case_id"]) & (own["metric"] == "latency_s") & (own["kind"] == "measured")
            ax.errorbar([mine["value"]], [place + i], xerr=ends, capsize=1.5, elinewidth=0.8, ls="none",
                        **style.marker("measured" if timed.any() else "modelled", looked[name]))
        bounds = place - 0.7, place + len(names) - 0.3
        if (allowed := _allowed(own, metric)) is not None:
            ax.plot([allowed] * 2, bounds, color="black", lw=1.2, zorder=1)
        centers[shape] = sum(bounds) / 2
        place += len(names) + 1.4
        ax.axhline(place - 1.2, color="#e6e6e6", lw=0.6)
    ticks_at(ax.yaxis, centers.values(), list(centers))
    ax.set(ylim=(place - 1.2, -0.9), xlim=(0, max(1.05, 1.05 * rows[rows["metric"] == metric]["high"].max())))
    ax.axvline(1, color=GREY, lw=0.8, ls=":", zorder=1)
    ax.grid(axis="y", visible=False)
    ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))


def _allowed(own: pd.DataFrame, metric: str) -> float | None:
    """What the roofline allows of that ceiling: min(1, intensity ÷ ridge) of the matmul, of the read its inverse."""
    found = points(own, "intensity", ridge="ridge") if "ridge" in set(own["metric"]) else own[:0]
    if found.empty:
        return None
    share = found["value"].iloc[0] / found["ridge"].iloc[0]
    return float(min(1, share if metric == "flops_share" else 1 / share))
