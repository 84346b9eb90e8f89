"""Bytes to and from memory: what each source counted against what the variant's formula says, one panel per source.

Bears on the article's claim that attention over the KV cache is bound by memory traffic: the formula's bytes are the
ground of every roofline, and here they are held against counters and simulators. The formula gets the cache of the
source that counted (a GPU's L2, the simulated one). On the line: equal. In the bands: equal within the tolerance that
the study states. A source that gave nothing is named below, with its reason, and not drawn.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvlab.figures._rows import usable, with_rows
from kvlab.figures._style import GREY, Style, above, log_axis, sized
from kvlab.record.counters import SOURCES, TOLERANCE, counted, group_of, reason_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

STUDY = "counters"


def select(table: pd.DataFrame) -> pd.DataFrame:
    """Counted bytes and their ratio to the formula of every source; one row with the reason for each that has none."""
    rows, shown, absent = usable(table), [], []
    for source in SOURCES:
        total, ratio = (counted(rows, source, metric) for metric in ("hbm_bytes", "traffic_to_model"))
        total = total[total["case_id"].isin(ratio["case_id"])]
        if len(total):
            shown += [total, ratio[ratio["case_id"].isin(total["case_id"])]]
        elif why := reason_of(table, source, "hbm_bytes"):
            absent.append(dict(metric="hbm_bytes", value=None, unit="B", kind="missing", source=source, note=why,
                               study=STUDY, run_id=table["run_id"].iloc[0]))
    if not shown:
        said = "".join(f"; {row['source']}: {row['note']}" for row in absent)
        raise ValueError("figure measured_vs_modelled needs hbm_bytes and traffic_to_model of a source that counts, "
                         f"and the table has none{said}; draw it from a run of `kvlab run counters`")
    import pandas as pd
    return with_rows(pd.concat(shown, ignore_index=True), absent)


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    own = rows[rows["kind"] != "missing"]
    panels = [source for source in SOURCES if len(counted(own, source, "hbm_bytes"))]
    figure, axes = style.figure(3.4, len(panels))
    looks = style.looks(own["variant"])
    bands = []
    for ax, source in zip(axes, panels):
        total = counted(own, source, "hbm_bytes").drop_duplicates("case_id")
        ratio = counted(own, source, "traffic_to_model").drop_duplicates("case_id").set_index("case_id")["value"]
        total = total.assign(modelled=total["value"] / total["case_id"].map(ratio))
        ends = (min(total["modelled"].min(), total["value"].min()) / 1.6,
                max(total["modelled"].max(), total["value"].max()) * 1.6)
        bands += _line(ax, np.array(ends), sorted({TOLERANCE[group_of(v)] for v in total["variant"]}))
        for (variant, kind), mine in total.groupby(["variant", "kind"], sort=False):
            style.bars(ax, mine["modelled"], mine, looks[variant], kind, ls="none", zorder=3)
        log_axis(ax.xaxis, "B", base=2)
        log_axis(ax.yaxis, "B", base=2)
        ax.tick_params(axis="x", labelrotation=90)
        ax.set_title(f"{source} ({', '.join(dict.fromkeys(total['kind']))})", fontsize=sized(8))
        ax.set(xlim=ends, ylim=ends, aspect="equal", xlabel="modelled: the variant's formula",
               ylabel="what the source says, per call" if ax is axes[0] else "")
    kinds = own[own["metric"] == "hbm_bytes"].groupby("variant", sort=False)["kind"].first()
    handles = [Line2D([], [], ls="none", label=name, **style.marker(kinds[name], look)) for name, look in looks.items()]
    above(figure, [*handles, *{band.get_label(): band for band in bands}.values()], columns=5)
    return figure


def _line(ax, ends, tolerances) -> list:
    """The line of equality and a band for each tolerance; what the legend needs of the bands."""
    ax.plot(ends, ends, color="black", lw=0.9, zorder=2)
    made = []
    for tolerance, alpha in zip(sorted(tolerances, reverse=True), (0.14, 0.3)):
        ax.fill_between(ends, ends * (1 - tolerance), ends * (1 + tolerance), color=GREY, alpha=alpha, lw=0, zorder=1)
        groups = [name for name, value in TOLERANCE.items() if value == tolerance]
        made.append(Patch(color=GREY, alpha=alpha, lw=0, label=f"± {100 * tolerance:.0f} %: {', '.join(groups)}"))
    return made
