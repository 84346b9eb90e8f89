"""Rows of the sources that count bytes: which source a row is of, what counts as agreement, why one gave nothing."""
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

SOURCES = ("ncu", "gpm", "callgrind", "perf")                # of bytes, in order of trust
GROUPS = ("operations", "C kernels", "torch variants")
# |counted ÷ formula − 1| that counts as agreement. C kernels move what their source says; torch's move more
TOLERANCE = {"operations": 0.15, "C kernels": 0.05, "torch variants": 0.15}
EDGE = 1.25                     # a formula steps where a working set equals the cache, a cache slides around it


def source_name(source: str) -> str:
    """The probe's name in a row's source, which may go on with a version."""
    return source.split(" ")[0]


def group_of(variant: str) -> str:
    """Which of GROUPS a variant or an operation belongs to."""
    if variant in ("copy", "read", "matmul"):
        return "operations"
    return "C kernels" if variant.startswith("c_") else "torch variants"


def counted(table: pd.DataFrame, source: str, metric: str) -> pd.DataFrame:
    """That source's rows of a metric with a value, without the second half of an A/A pair."""
    rows = table[(table["metric"] == metric) & (table["kind"] != "missing") & (table["replica"].fillna(0) == 0)]
    return rows[rows["source"].map(source_name) == source]


def swept(table: pd.DataFrame) -> pd.DataFrame:
    """callgrind's ratios to the formula of trials that were simulated behind several caches, with `cache_bytes`."""
    sizes = counted(table, "callgrind", "last_level_bytes").drop_duplicates("case_id").set_index("case_id")["value"]
    rows = counted(table, "callgrind", "traffic_to_model").drop_duplicates("case_id")
    rows = rows[rows["case_id"].isin(sizes.index) & (rows["case"].fillna("") != "")]
    rows = rows.assign(cache_bytes=rows["case_id"].map(sizes)).drop_duplicates(["case", "cache_bytes"])
    return rows[rows.groupby("case")["cache_bytes"].transform("nunique") > 2]


def reason_of(table: pd.DataFrame, source: str, metric: str) -> str:
    """Why that source gave no value of the metric: the commonest reason, or "" where it was never asked."""
    rows = table[(table["metric"] == metric) & (table["kind"] == "missing")]
    notes = rows[rows["source"].map(source_name) == source]["note"]
    return "" if notes.empty else str(notes.value_counts(sort=True).index[0])
