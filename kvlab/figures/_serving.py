"""What the figures of serving share: the rows of a question, refused where they are lacking, and lines over x."""
from __future__ import annotations

from typing import TYPE_CHECKING

from kvlab.figures._rows import usable
from kvlab.figures._style import Look, Style
from kvlab.record.asked import asked

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


def question(table: pd.DataFrame, figure: str, study: str, name: str, *metrics: str) -> pd.DataFrame:
    """The rows of a question and of those metrics. Refused: a table that lacks one of them (ValueError)."""
    rows = asked(usable(table), name)
    lacking = [metric for metric in metrics if metric not in set(rows["metric"])]
    if lacking:
        raise ValueError(f"figure {figure} needs {', '.join(lacking)} of the question {name!r}, and the table has no "
                         f"such reading; draw it from a run of `kvlab run {study}`")
    return rows.loc[rows["metric"].isin(metrics), list(table)]


def line(style: Style, ax: Axes, x, rows: pd.DataFrame, look: Look, **more) -> None:
    """The rows' values over x, joined, as what their kind is."""
    style.bars(ax, x, rows, look, kind=rows["kind"].iloc[0], ls="-", **more)
