"""Quality of KV formats side by side: which rows may be ranked together, and which formats none other beats."""
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

TEXTS = "texts"                         # scope of what is said of all windows that a format was scored on
COMMON = "texts: common windows"        # of those alone that every format of the run was scored on


def comparable(rows: pd.DataFrame) -> pd.DataFrame:
    """One scope per format, so that all are of the same tokens: the common windows of a format that was given more."""
    both = rows[rows["scope"].isin([TEXTS, COMMON])]
    more = both["kv_format"].isin(both["kv_format"][both["scope"] == COMMON].unique())
    return both[(both["scope"] == COMMON) | ~more]


def front(points: pd.DataFrame, size: str, error: str) -> pd.DataFrame:
    """The Pareto front: the points with less error than all that are no larger, by size. size, error: columns."""
    ordered = points.sort_values([size, error])
    return ordered[ordered[error] < ordered[error].cummin().shift(fill_value=float("inf"))]
