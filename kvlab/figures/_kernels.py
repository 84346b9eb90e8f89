"""Rows of the study kernels: which question a comparison answers, and how its trials are called in a legend."""
from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kvlab.figures._style import MARKERS, PALETTE, Look

if TYPE_CHECKING:
    import pandas as pd

STUDY = "kernels"


def question(rows: pd.DataFrame) -> pd.Series:
    """Per row what its comparison asks: paging, formats, memory, prefill, step, or decode (variants side by side)."""
    metrics = rows.groupby("comparison_id")["metric"].agg(set)
    timed = rows[rows["metric"].isin(["latency_s", "to_contiguous"])]
    layouts = timed[timed["block_size"].notna()].groupby("comparison_id")[["block_size"]].nunique()["block_size"]
    phase = rows.groupby("comparison_id")["phase"].max()
    # of refused trials too: they also say what was asked
    formats = rows[rows["variant"] != ""].groupby("comparison_id")["kv_format"].nunique()

    def asks(comparison):
        found = metrics[comparison]
        if "step_speedup" in found:
            return "step"
        if phase[comparison] == "prefill":
            return "memory" if "peak_extra_bytes" in found else "prefill"
        if "to_head_order" in found or layouts.get(comparison, 0) > 1:
            return "paging"
        return "formats" if "format_speedup" in found or formats.get(comparison, 0) > 1 else "decode"
    return rows["comparison_id"].map({comparison: asks(comparison) for comparison in metrics.index})


def order_of(rows: pd.DataFrame) -> pd.Series:
    """head or token: in which order a trial's pages hold them; only the case's JSON says it."""
    return rows["case"].map(lambda case: json.loads(case or "{}").get("layout", {}).get("order", "head"))


def layout_of(rows: pd.DataFrame) -> pd.Series:
    """A trial's layout in words: contiguous, or pages of 16 in random order, in token order."""
    pages = "pages of " + rows["block_size"].astype("string") + " " + rows["page_order"].str.replace("_", " ")
    tokens = order_of(rows).map({"token": ", tokens first"}).fillna("")
    return pages.where(rows["block_size"].notna(), "contiguous") + tokens


def called(rows: pd.DataFrame) -> pd.Series:
    """A trial's variant, with its layout where the variant stands there in several."""
    several = rows.assign(layout=layout_of(rows)).groupby("variant")["layout"].transform("nunique") > 1
    return rows["variant"].where(~several, rows["variant"] + ", " + layout_of(rows))


def looks(names) -> dict[str, Look]:
    """Name -> look, in the order given; colours and markers repeat at different lengths, so pairs do not."""
    return {name: Look(PALETTE[i % len(PALETTE)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(names)}


def lacking(figure: str, what: str) -> ValueError:
    """The refusal of a table without the rows that a figure shows."""
    return ValueError(f"figure {figure} needs {what}, and the table has none; draw it from a run of "
                      f"`kvlab run {STUDY}`")
