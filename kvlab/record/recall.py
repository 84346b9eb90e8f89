"""Which rows of trained recall models belong together: one task's grid, and the length at which it is judged."""
from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

TASK, TWO_TOKEN = "recall:pair", "recall:two_token"             # values of the column data, and what may stand behind
MATCHED, TIMES_LONGER = ", parameters matched", 3
LONGER = f", {TIMES_LONGER} × the steps"


def recall_rows(table: pd.DataFrame, data: str = TASK, kv_format: str = "fp32") -> pd.DataFrame:
    """The scores of one task's cells with a value, by default of the pair task with an fp32 cache.

    Columns added: num_keys, and pairs, the N at which a row was evaluated.
    """
    chosen = table[(table["data"] == data) & (table["kv_format"] == kv_format) & (table["kind"] != "missing")
                   & table["metric"].isin(["recall", "nll"])]
    cases = [json.loads(case) for case in chosen["case"]]
    return chosen.assign(num_keys=[case["num_keys"] for case in cases],
                         pairs=[int(n) // tokens_per_pair(case) for n, case in zip(chosen["kv_len"], cases)])


def main_cells(rows: pd.DataFrame) -> pd.DataFrame:
    """Those over the smallest set of keys: the grid, without the long cells, whose widths and rates differ."""
    return rows[rows["num_keys"] == rows["num_keys"].min()] if len(rows) else rows


def trained_length(rows: pd.DataFrame) -> int | None:
    """The longest context in tokens that was both trained and evaluated."""
    if rows.empty:
        return None
    case = json.loads(rows["case"].iloc[0])
    most = max(case["pairs"]) * tokens_per_pair(case)
    lengths = [int(n) for n in rows["kv_len"].unique()]
    return max((n for n in lengths if n <= most), default=min(lengths))


def tokens_per_pair(case: dict) -> int:
    """Tokens that a pair takes in the task of a cell."""
    return 2 if case["task"] == "two_token" else 1
