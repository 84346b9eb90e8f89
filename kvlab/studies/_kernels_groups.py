"""Rows of a run of kernels by the question that their comparison asks, and how a row is named in a sentence."""
from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kvlab.studies._kernels_ratios import PEERS

if TYPE_CHECKING:
    import pandas as pd


def grouped(rows: pd.DataFrame, every: pd.DataFrame) -> dict[tuple[str, str], list[pd.DataFrame]]:
    """(phase, question) -> rows of each timed comparison: what do its trials differ in, variant, layout or format?

    every: all rows of the run, since a trial that was refused also says what was asked.
    """
    asked = dict(iter(every[every["variant"] != ""].groupby("comparison_id", sort=False)))
    timed = set(rows[rows["metric"] == "latency_s"]["comparison_id"])
    own, found = rows[(rows["variant"] != "") & rows["comparison_id"].isin(timed)], {}
    for name, group in own.groupby("comparison_id", sort=False):
        found.setdefault((group["phase"].iloc[0], _question(asked[name])), []).append(group)
    return found


def _question(rows) -> str:
    """layout: three or more of one variant."""
    trials = rows.drop_duplicates("case_id")
    if trials["kv_format"].nunique() > 1:
        return "format"
    layouts: dict[str, set] = {}
    for variant, case in zip(trials["variant"], trials["case"]):
        layouts.setdefault(variant, set()).add(json.dumps(json.loads(case)["layout"]))
    return "layout" if max(map(len, layouts.values())) > 2 else "variant"


def by_case(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Rows of one metric by case; an end that is not there is the value."""
    chosen = rows[rows["metric"] == metric].drop_duplicates("case_id").set_index("case_id")
    return chosen.assign(low=chosen["low"].fillna(chosen["value"]), high=chosen["high"].fillna(chosen["value"]))


def is_library(variant: str) -> bool:
    """Whether a variant, with or without knobs, is torch's own or a library's."""
    return variant.partition("(")[0] in PEERS


def layout_of(row) -> dict:
    return json.loads(row["case"])["layout"]


def shape_of(row) -> str:
    """The shape of a comparison."""
    batch = f", batch {row['batch_size']}" if row["batch_size"] > 1 else ""
    return f"{row['num_q_heads']}/{row['num_kv_heads']} heads, {row['kv_len']:,} tokens{batch}, {row['dtype']}"


def named(row) -> str:
    """The variant, and its pages if it has any."""
    block_size = layout_of(row)["block_size"]
    gathered = ", gathered" if row.get("format_path") == "gathered" else ""
    return f"{row['variant']} (blocks of {block_size}{gathered})" if block_size else row["variant"]


def percent(row) -> str:
    return f"{100 * row['value']:.0f} % [{100 * row['low']:.0f}, {100 * row['high']:.0f}]"


def factor(row) -> str:
    return f"{row['value']:.2f} × [{row['low']:.2f}, {row['high']:.2f}]"


def untold(row) -> str:
    """What an interval that holds 1 means."""
    return ", which is no difference that can be told" if row["low"] <= 1 <= row["high"] else ""
