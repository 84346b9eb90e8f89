"""Does a long run hold out: cases answered over time, and what the workers held in units of the second tenth's.

Bears on no claim of the article, but on all that is measured here: a run that slows down, or whose workers keep memory
and files of each case, does not last for days. Grey dashes are an even pace. A point is the worst of 1/200 of a
worker's cases; with more than eight workers all lines look alike.
"""
from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, PercentFormatter

from kvlab.figures._rows import usable
from kvlab.figures._style import GREY, PALETTE, Style, above
from kvlab.record.asked import with_fields

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

STUDY = "soak"
HELD: dict[str, tuple[str, dict[str, Any]]] = {
    "worker_memory": ("memory", dict(ls="-", lw=3.5, alpha=0.4)), "worker_files": ("open files", dict(ls=":"))}
POINTS = 200            # of a worker, at most, whatever the number of its cases; the tenths begin at such points
NAMED = 8               # workers that have colours of their own
FLAT = 0.1              # changes below this look small: the axis is not made to fit noise


def select(table: pd.DataFrame) -> pd.DataFrame:
    """Of each 1/200 of a worker's cases: when the last was answered, and the most memory and files; and a row with
    the reason for what a system did not tell. `case` says how many were answered by then, and of how many."""
    import pandas as pd
    rows = usable(table)
    rows = rows[(rows["study"] == STUDY) & rows["metric"].isin(["finished_s", *HELD])]
    ended = rows[rows["metric"] == "finished_s"].drop_duplicates("case_id").set_index("case_id")
    if len(ended) < 2:
        raise ValueError("figure soak needs finished_s of two cases at least, and the table has none; draw it from a "
                         "run of `kvlab run soak`")
    rows = rows[rows["case_id"].isin(ended.index)]
    place = ended.groupby("worker")["value"].rank(method="first").astype(int)
    of = ended.groupby("worker")["value"].transform("size")
    rows = rows.assign(answered=rows["case_id"].map(place), of=rows["case_id"].map(of))
    rows["point"] = (rows["answered"] - 1) * POINTS // rows["of"]
    rows = rows.sort_values(["worker", "metric", "answered"], ignore_index=True)
    last = rows["metric"] == "finished_s"
    shown = pd.concat([rows[last].groupby(["worker", "point"])["answered"].idxmax(),
                       rows[~last].groupby(["worker", "metric", "point"])["value"].idxmax()])
    first = rows.index[last & (rows["answered"] == 1)]
    chosen = rows.loc[sorted({*shown, *first})]
    chosen["case"] = [json.dumps(dict(answered=at, of=n)) for at, n in zip(chosen["answered"], chosen["of"])]
    absent = table[(table["kind"] == "missing") & table["metric"].isin(list(HELD)) & (table["status"] == "ok")]
    return pd.concat([chosen[list(table)], absent.drop_duplicates("metric")], ignore_index=True)


def draw(rows: pd.DataFrame, style: Style) -> Figure:
    rows = with_fields(rows[rows["kind"] != "missing"])
    workers = sorted(rows["worker"].unique())
    figure, (answered, held) = style.figure(2.8, 2)
    for i, worker in enumerate(workers):
        color = PALETTE[i if len(workers) <= NAMED else 0]
        mine = rows[rows["worker"] == worker].sort_values("answered")
        ended = mine[mine["metric"] == "finished_s"]
        since = ended["value"] - ended["value"].min()
        answered.plot(since.iloc[[0, -1]], ended["answered"].iloc[[0, -1]], color=GREY, ls="--", lw=0.8, zorder=1)
        answered.plot(since, ended["answered"], color=color)
        for metric, (_, look) in HELD.items():
            part = mine[mine["metric"] == metric]
            at = part["answered"] / part["of"]
            before = part["value"][(at > 0.1) & (at <= 0.2)].max()
            if before > 0:
                held.plot(at, part["value"] / before, color=color, **look)
    answered.set(xlabel="seconds since the first answer", ylabel="cases answered", ylim=(0, None), xlim=(0, None))
    answered.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    low, high = held.get_ylim() if held.lines else (1, 1)
    held.axvspan(0.1, 0.2, color=GREY, alpha=0.18, lw=0, zorder=0)
    held.set(xlabel="share of the cases", ylabel="most that a worker held,\nsecond tenth = 1", xlim=(0, 1),
             ylim=(min(low, 1 - FLAT), max(high, 1 + FLAT)))
    held.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    n = {worker: mine["of"].max() for worker, mine in rows.groupby("worker")}
    named = [(f"{worker or 'this machine'} ({n[worker]:,} cases)", color) for worker, color in zip(workers, PALETTE)]
    if len(workers) > NAMED:
        named = [(f"{len(workers):,} workers, a line each ({sum(n.values()):,} cases)", PALETTE[0])]
    above(figure, [*(Line2D([], [], label=label, color=color) for label, color in named),
                   *(Line2D([], [], label=label, color="black", **look) for label, look in HELD.values()),
                   Line2D([], [], label="an even pace", color=GREY, ls="--", lw=0.8)], columns=6)
    return figure
