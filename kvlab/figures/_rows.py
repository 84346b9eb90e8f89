"""Choosing rows of a result table for a figure; what is lacking is said in one sentence."""
from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def usable(table: pd.DataFrame) -> pd.DataFrame:
    """The rows with a value, of one run, without the second half of an A/A pair.

    Refused: rows of several runs, whose ceilings and clocks differ (ValueError).
    """
    runs = sorted(table["run_id"].unique())
    if len(runs) > 1:
        raise ValueError(f"the table holds {len(runs)} runs ({', '.join(runs)}), and this figure shows one; choose it: "
                         f"table[table.run_id == {runs[-1]!r}]")
    return table[(table["status"] == "ok") & (table["kind"] != "missing") & (table["replica"].fillna(0) == 0)]


def need(rows: pd.DataFrame, figure: str, phase: str, *metrics: str) -> pd.DataFrame:
    """The rows of that phase and those metrics.

    Refused: a table that lacks one of the metrics in that phase (ValueError: which, and what to run).
    """
    chosen = rows[(rows["phase"] == phase) & rows["metric"].isin(metrics)]
    lacking = [metric for metric in metrics if metric not in set(chosen["metric"])]
    if lacking:
        raise ValueError(f"figure {figure} needs {', '.join(lacking)} of {phase} cases, and the table has no such "
                         "reading; draw it from a run of `kvlab run memory_wall`")
    return chosen


def context_sweep(rows: pd.DataFrame) -> pd.DataFrame:
    """The decode rows at batch 1 and the group ratio that was measured at most context lengths."""
    single = rows[rows["batch_size"] == 1]
    ratio = single.groupby("group_ratio")["kv_len"].nunique().idxmax()
    return single[single["group_ratio"] == ratio]


def ratio_sweep(rows: pd.DataFrame) -> pd.DataFrame:
    """The decode rows at batch 1 and the context length that was measured at most group ratios."""
    single = rows[rows["batch_size"] == 1]
    kv_len = single.groupby("kv_len")["group_ratio"].nunique().idxmax()
    return single[single["kv_len"] == kv_len]


def points(rows: pd.DataFrame, y: str, **beside: str) -> pd.DataFrame:
    """The rows of metric `y`, one per case, with the value of another metric of the same case in each named column.

    A value without an interval gets one of no width.
    """
    chosen = rows[rows["metric"] == y].drop_duplicates("case_id")
    chosen = chosen.assign(low=chosen["low"].fillna(chosen["value"]), high=chosen["high"].fillna(chosen["value"]))
    for column, metric in beside.items():
        values = rows[rows["metric"] == metric].groupby("case_id")["value"].first()
        chosen = chosen.assign(**{column: chosen["case_id"].map(values)})
    return chosen.dropna(subset=list(beside))


def with_rows(rows: pd.DataFrame, added: list[dict[str, Any]]) -> pd.DataFrame:
    """The rows followed by more: the fields of a Reading, and columns that say what it is about."""
    import pandas as pd

    from kvlab.record.reading import READING, Reading, table
    whole = [{**row, **asdict(Reading(**{name: row[name] for name in READING if name in row}))} for row in added]
    return pd.concat([rows, table(whole)], ignore_index=True)
