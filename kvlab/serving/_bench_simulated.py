"""What `kvlab simulate --out` writes, one row per request, as a case: everything in it is simulated."""
from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.record.tables import read_csv
from kvlab.serving._bench_case import MOST_SAMPLES, Case

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("id", "arrival_s", "prompt_tokens", "output_tokens", "queue_s", "ttft_s", "tpot_s", "e2e_s", "preemptions",
           "cached_tokens", "rejected")
_TIMES = ("ttft", "tpot", "e2e", "queue")


def is_table(names: Iterable[str]) -> bool:
    """Whether these are the columns of such a file."""
    return tuple(names) == COLUMNS


def columns_of(path: Path) -> list[str]:
    """The columns of a .parquet; none where it cannot be read."""
    import pyarrow
    import pyarrow.parquet
    try:
        return pyarrow.parquet.read_schema(path).names
    except (pyarrow.ArrowException, OSError):
        return []


def requests(content: bytes, parquet: bool) -> tuple[Case, list[str]]:
    """(case, remarks) of a file's content: requests in order of arrival, rejected ones left out.

    ValueError: no such table, too many rows, a time that is no finite number of at least 0.
    """
    import pandas as pd
    import pyarrow
    try:
        table = pd.read_parquet(io.BytesIO(content)) if parquet else read_csv(io.BytesIO(content))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, ValueError) as error:  # pandas' own are ValueErrors
        raise ValueError(f"it cannot be read ({str(error)[:100]})") from None
    if not is_table(table.columns) or len(table) > MOST_SAMPLES:
        raise ValueError(f"it is no table of up to {MOST_SAMPLES:,} requests with {', '.join(COLUMNS)}")
    rejected = table["rejected"].notna() & (table["rejected"] != "")
    said = [f"{rejected.sum():,} requests were rejected and are not counted"] if rejected.any() else []
    return _case(table[~rejected]), said


def _case(served: pd.DataFrame) -> Case:
    import pandas as pd
    names = ["arrival_s", "output_tokens", *(f"{time}_s" for time in _TIMES)]
    try:
        numbers = served[names].apply(pd.to_numeric).astype(float)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"a time or length in it is no number ({str(error)[:100]})") from None
    if ((numbers < 0) | (numbers > 1e15)).any(axis=None):
        raise ValueError("a time or length in it is not finite, or below 0")
    ended = numbers[numbers["e2e_s"].notna()]
    span = float((ended["arrival_s"] + ended["e2e_s"]).max() - ended["arrival_s"].min()) if len(ended) else 0.0
    rates = {"requests_per_s": len(ended) / span, "tokens_per_s": float(ended["output_tokens"].sum()) / span} \
        if span > 0 else {}
    samples = {time: numbers[f"{time}_s"].dropna().tolist() for time in _TIMES}
    return Case(samples={time: values for time, values in samples.items() if values},
                rates=rates, kind="simulated", method="simulation")
