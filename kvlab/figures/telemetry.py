"""A GPU over a run: how busy its SMs and its memory were, what power it took and at which clocks, case after case.

Bears on the article's claim that compute utilisation can fall below 10 %: SMs that have work nearly all the time and
memory that is driven to its limit are one state, and this figure shows both. Each point is one case's window, with the
lowest and highest value in it. A panel without points says so, and the footer why.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.lines import Line2D

from kvlab.figures._rows import usable
from kvlab.figures._style import GREY, PALETTE, Look, Style, above, sized

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

STUDY = "counters"
# panel -> metrics in it, the factor to the unit that its axis names
PANELS = {"SMs busy (%)": (("sm_utilization",), 100), "DRAM busy (%)": (("dram_utilization",), 100),
          "power (W)": (("power_instant", "power_average"), 1), "clocks (GHz)": (("sm_clock", "memory_clock"), 1e-9)}
METRICS = tuple(metric for metrics, _ in PANELS.values() for metric in metrics)
LOOKS = dict(zip(METRICS, (Look(PALETTE[0], "o"), Look(PALETTE[2], "o"), Look(PALETTE[3], "o"), Look(PALETTE[5], "s"),
                           Look(PALETTE[0], "^"), Look(PALETTE[2], "v"))))


def select(table: pd.DataFrame) -> pd.DataFrame:
    """Telemetry of every case, GPM's before ncu's; for a metric without any, one row with the commonest reason."""
    rows, shown, absent = usable(table), [], []
    for metric in METRICS:
        own = rows[rows["metric"] == metric]
        own = own.sort_values("source", key=lambda s: s.map(lambda name: name.startswith("ncu")), kind="stable")
        if len(own):
            shown.append(own.drop_duplicates("case_id").sort_index())
            continue
        lacking = table[(table["metric"] == metric) & (table["kind"] == "missing")]
        if len(lacking):
            absent.append(lacking[lacking["note"] == lacking["note"].value_counts().index[0]].head(1))
    if not shown and not absent:
        raise ValueError(f"figure telemetry needs {', '.join(METRICS)}, and the table has no row of them, not even a "
                         "reason for their absence; draw it from a run of `kvlab run counters`")
    import pandas as pd
    return pd.concat([*shown, *absent], ignore_index=True)


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    own = rows[rows["kind"] != "missing"]
    cases = own.drop_duplicates("case_id")
    at = {case: i for i, case in enumerate(cases["case_id"])}
    figure, axes = style.grid(5.2 if at else 3.4, len(PANELS), 1, sharex=True)
    axes = axes[:, 0]
    for ax, (title, (metrics, factor)) in zip(axes, PANELS.items()):
        ax.set_ylabel(title.replace(" (", "\n("), fontsize=sized(7))
        for metric in metrics:
            mine = own[own["metric"] == metric]
            if len(mine):
                scaled = mine.assign(**{end: mine[end] * factor for end in ("value", "low", "high")})
                style.bars(ax, mine["case_id"].map(at), scaled, LOOKS[metric], "measured", ls="none")
        if not len(own[own["metric"].isin(metrics)]):
            _say_so(ax, "stands below" if style.venue is None else "is in the caption")
        elif factor == 100:
            ax.set_ylim(0, 105)
    axes[-1].set_xticks(list(at.values()), [_name(row) for _, row in cases.iterrows()], rotation=90, fontsize=sized(6))
    if at:
        axes[-1].set_xlim(-0.6, len(at) - 0.4)
        axes[-1].set_xlabel("cases in the order of the run")
        there = [metric for metric in METRICS if len(own[own["metric"] == metric])]
        above(figure, [Line2D([], [], ls="none", label=metric.replace("_", " "), **style.marker(
            "measured", LOOKS[metric])) for metric in there], columns=6)
    return figure


def _name(row) -> str:
    about = f"{row['group_ratio']}:1" if row["phase"] == "decode" else row["phase"]
    return f"{row['variant']} {about}".strip()


def _say_so(ax, where: str) -> None:
    """Words in the place of the points: an empty axis would look like a zero."""
    ax.text(0.5, 0.5, f"no source here measures it; the reason {where}", transform=ax.transAxes, ha="center",
            va="center", fontsize=sized(7), color=GREY)
    ax.set_yticks([])
    ax.grid(False)
