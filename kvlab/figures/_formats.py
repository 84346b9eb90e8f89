"""Looks of KV formats in figures: one colour and marker per family of storage, and how a missing run is said."""
from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.lines import Line2D

from kvlab.figures._style import PALETTE, Look

if TYPE_CHECKING:
    import pandas as pd

STUDY = "kv_quant"
FAMILIES = {"16 bits": Look("#333333", "o"), "FP8": Look(PALETTE[0], "s"), "INT8": Look(PALETTE[1], "^"),
            "INT4": Look(PALETTE[2], "v"), "INT2": Look(PALETTE[3], "P"), "K, V or layers mixed": Look(PALETTE[4], "X")}


def family(kv_format: str) -> str:
    """Which family a format's name belongs to."""
    if "+" in kv_format:
        return "K, V or layers mixed"
    kinds = {"fp8": "FP8", "int8": "INT8", "int4": "INT4", "kivi4": "INT4", "int2": "INT2", "kivi2": "INT2"}
    return next((name for kind, name in kinds.items() if kv_format.startswith(kind)), "16 bits")


def handles(formats, style) -> list[Line2D]:
    """Legend entries of the families that these formats belong to."""
    there = {family(one) for one in formats}
    return [Line2D([], [], ls="none", label=name, **style.marker("measured", look))
            for name, look in FAMILIES.items() if name in there]


def quality(table: pd.DataFrame, figure: str, scope: str, *metrics: str) -> pd.DataFrame:
    """The rows of those metrics whose scope begins so, of one run.

    Refused: a table that lacks one of the metrics there (ValueError: which, why if the run says so, and what to run).
    """
    from kvlab.figures._rows import usable
    rows = usable(table)
    chosen = rows[rows["scope"].str.startswith(scope) & rows["metric"].isin(metrics) & (rows["source"] == STUDY)]
    lacking = [metric for metric in metrics if metric not in set(chosen["metric"])]
    if lacking:
        absent = table[(table["kind"] == "missing") & (table["source"] == STUDY)]
        why = absent["note"].iloc[0] if len(absent) else f"draw it from a run of `kvlab run {STUDY}`"
        raise ValueError(f"figure {figure} needs {', '.join(lacking)} of {scope.strip()}, and the table has no such "
                         f"reading: {why}")
    return chosen


def told(rows: pd.DataFrame) -> str:
    """What was scored: model, texts and the length of a window."""
    texts = rows["data"].iloc[0].split(" + ")
    named = " and ".join(texts) if len(texts) < 4 else f"{len(texts)} texts"
    return f"{rows['model'].iloc[0]} on {named}, windows of {rows['kv_len'].iloc[0]} tokens"


def short(kv_format: str) -> str:
    """A format's name as a label: of a mix without the bytes that it was held to."""
    return kv_format.partition(", bytes")[0]
