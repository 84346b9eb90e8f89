"""Rows of a result table by the question that their cases ask."""
from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


def asked(rows: pd.DataFrame, question: str) -> pd.DataFrame:
    """The rows whose `case` is JSON with that `question`; its other fields are columns, but for names a table has."""
    import pandas as pd
    case = rows["case"].map(lambda text: json.loads(text) if text.startswith("{") else {})
    mine = case.map(lambda one: one.get("question") == question).astype(bool)
    fields = pd.DataFrame(list(case[mine]), index=rows.index[mine])
    return rows[mine].join(fields[[name for name in fields if name not in rows]])
