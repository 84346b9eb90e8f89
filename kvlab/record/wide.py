"""The wide view of the result table: one line per case, one column per metric."""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvlab.record.counters import SOURCES, source_name
from kvlab.record.reading import CONTEXT, KINDS

if TYPE_CHECKING:
    import pandas as pd

METHODS = ("counter", "sensor", "timer", "derived")     # of one kind, strongest to weakest; all others come after them


def strength(kind: str, method: str, source: str = "") -> tuple[int, int, int]:
    """How far a number is to be believed, the strongest first: by its kind, then its method, then its source.

    The source decides between numbers derived from several counters, so that bytes and what is made of them are of one.
    """
    plain, name = method.partition(":")[0], source_name(source)
    return (KINDS.index(kind), METHODS.index(plain) if plain in METHODS else len(METHODS),
            SOURCES.index(name) if name in SOURCES else len(SOURCES))


def wide(table: pd.DataFrame, on: Sequence[str] = ("run_id", "case_id")) -> pd.DataFrame:
    """One line per case: its context, then per metric `<metric>`, `<metric>_kind`, `<metric>_low`, `<metric>_high`.

    Where a case has one metric several times, the strongest takes `<metric>`: by kind, then by method (counter, sensor,
    timer, derived, others), then by source (ncu, gpm, callgrind, perf, others), then in the order they were written.
    The others get `<metric>_<kind>` (latency_s measured, latency_s_modelled beside it), or `<metric>_<source>` where
    several sources gave that kind (hbm_bytes by ncu, hbm_bytes_gpm beside it); more of one name are numbered:
    `<metric>_<kind>`, `<metric>_<kind>_2`, … A missing reading is shown only where there is nothing stronger: value
    null, `<metric>_kind` "missing". `<metric>_source` says where `<metric>` is from, where some case has it from
    several sources; interval columns exist where some line has one. A row about a whole comparison (ceilings) is a line
    of its own, with an empty variant, and is not copied to the other lines. A context column that varies within a case
    is blank there.
    """
    import pandas as pd
    on = list(on)
    rows = table.reset_index(drop=True)
    lines = _context(rows, on)
    told = list(zip(rows["kind"], rows["method"], rows["source"]))
    ranks = {one: strength(*one) for one in set(told)}
    order = {rank: place for place, rank in enumerate(sorted(set(ranks.values())))}
    rows = rows.assign(_strength=pd.Series([order[ranks[one]] for one in told], dtype=int), _order=range(len(rows)))
    rows = rows.sort_values("_strength", kind="stable")
    rows["_rank"] = rows.groupby([*on, "metric"]).cumcount()
    rows = rows[(rows["_rank"] == 0) | (rows["kind"] != "missing")].copy()
    sources = rows.groupby([*on, "metric", "kind"])["source"].transform("nunique") > 1
    suffix = rows["source"].where(sources & (rows["source"] != ""), rows["kind"])
    rows["_slot"] = rows["metric"].where(rows["_rank"] == 0, rows["metric"] + "_" + suffix)
    again = rows.groupby([*on, "_slot"]).cumcount()
    rows["_slot"] = rows["_slot"].where(again == 0, rows["_slot"] + "_" + (again + 1).astype("string"))
    several = set(rows["metric"][sources])

    columns = {}
    for slot, group in rows.sort_values("_order").groupby("_slot", sort=False):
        group = group.set_index(on)
        columns[slot] = group["value"]
        if (group["_rank"] == 0).any():
            columns[f"{slot}_kind"] = group["kind"]
            if slot in several:
                columns[f"{slot}_source"] = group["source"]
        for end in ("low", "high"):
            if group[end].notna().any():
                columns[f"{slot}_{end}"] = group[end]
    metrics = pd.DataFrame({name: column.reindex(lines.index) for name, column in columns.items()}, index=lines.index)
    ordered = [name for name in CONTEXT if name in lines or name in on]
    return pd.concat([lines, metrics], axis=1).reset_index()[[*ordered, *columns]]


def _context(rows: pd.DataFrame, on: list[str]) -> pd.DataFrame:
    """Context columns by case, in order of first appearance: the one value found in the case, else blank."""
    names = [name for name in CONTEXT if name not in on]
    context = rows[[*on, *names]]
    text = [name for name in names if context[name].dtype == "string"]
    cases = context.assign(**{name: context[name].replace("", None) for name in text}).groupby(on, sort=False)
    lines = cases.first().where(cases.nunique() <= 1)
    lines[text] = lines[text].fillna("")
    return lines
