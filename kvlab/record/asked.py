"""Rows of a result table by the question that their cases ask."""
from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


def asked(rows: pd.DataFrame, question: str) -> pd.DataFrame:
    """The rows whose `case` is JSON with that `question`; its other fields are columns, but for names a table has."""
    mine = rows["case"].map(lambda text: _fields(text).get("question") == question).astype(bool)
    return with_fields(rows[mine])


def with_fields(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with the fields of their `case` as columns, but for names that a table has."""
    import pandas as pd
    fields = pd.DataFrame([_fields(text) for text in rows["case"]])
    return rows.assign(**{name: fields[name].array for name in fields if name not in rows})


def _fields(case: str) -> dict:
    return json.loads(case) if case.startswith("{") else {}
