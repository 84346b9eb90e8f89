"""A reading is one number that says where it came from; a table of them is the only result format."""
from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from kvlab.registry import no_such

if TYPE_CHECKING:
    import pandas as pd
    import pandera.pandas as pa

SCHEMA_VERSION = 2
KINDS = ("measured", "simulated", "modelled", "quoted", "missing")         # strongest to weakest
STATUSES = ("ok", "skipped", "failed", "oom")
_INTS = ("block_size", "batch_size", "q_len", "kv_len", "num_q_heads", "num_kv_heads", "group_ratio", "head_dim",
         "threads", "seed", "replica", "n")
_FLOATS = ("value", "window_s", "low", "high", "rel_std")


@dataclass(frozen=True, slots=True)
class Reading:
    """One number with its unit, its kind and the hardware it is about; or the reason why there is none.

    kind: one of KINDS. method refines it (counter, sensor, timer, derived, replayed, fitted, formula:<name>,
    cite:<key>). scope: what was looked at ("call", or "comparison" for a row about a whole case). window_s: seconds
    observed; n: samples; low, high: interval in the unit of the value; rel_std: ratio. denominator: what a
    percentage is of. note: why a missing reading is missing. error: why status is not ok.
    Refused (ValueError): an unknown kind or status; a value that is not finite; a missing reading with a value or
    without a note, a value of None that is not missing; a status other than ok with a value or without an error.
    """
    metric: str
    value: float | None
    unit: str
    kind: str
    method: str = ""
    source: str = ""
    hardware: str = ""
    scope: str = "call"
    window_s: float | None = None
    n: int | None = None
    low: float | None = None
    high: float | None = None
    rel_std: float | None = None
    cache_state: str = ""
    denominator: str = ""
    artifact: str = ""
    note: str = ""
    status: str = "ok"
    error: str = ""

    def __post_init__(self):
        for what, got, allowed in (("kind", self.kind, KINDS), ("status", self.status, STATUSES)):
            if got not in allowed:
                raise ValueError(f"{self.metric}: {what} {got!r} is unknown; allowed: {', '.join(allowed)}")
        if not self.metric or not self.unit:
            raise ValueError(f"a reading needs a metric and a unit, got {self.metric!r} and {self.unit!r}; "
                             "a plain number has the unit 'ratio' or 'count'")
        for name in _FLOATS:
            object.__setattr__(self, name, self._number(name))
        if (self.kind == "missing") != (self.value is None):
            raise ValueError(f"{self.metric}: kind {self.kind!r} does not go with value {self.value}; "
                             "a missing reading has value None, every other one a number")
        if self.kind == "missing" and not self.note:
            raise ValueError(f"{self.metric}: a missing reading needs a note that says why it is missing")
        if self.status != "ok" and not (self.kind == "missing" and self.error):
            raise ValueError(f"{self.metric}: status {self.status!r} needs kind 'missing' and an error text, "
                             f"got kind {self.kind!r} and error {self.error!r}")

    def _number(self, name: str) -> float | None:
        """The field as a plain finite float, so that NumPy scalars and zero-dimensional tensors are welcome."""
        got = getattr(self, name)
        if got is None:
            return None
        try:
            number = math.nan if isinstance(got, bool | str) else float(got)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"{self.metric}: {name}={got!r} is not a finite number; "
                             "use missing(metric, unit, why) where there is none")
        return number


def missing(metric: str, unit: str, why: str, **fields: Any) -> Reading:
    """A reading that could not be had, with the reason; never 0, never NaN."""
    return Reading(metric, None, unit, "missing", note=why, **fields)


def failed(metric: str, unit: str, why: str, status: str = "failed", **fields: Any) -> Reading:
    """A reading that was tried and went wrong (status failed, oom or skipped), with what happened."""
    return Reading(metric, None, unit, "missing", note=why, status=status, error=why, **fields)


def weakest(kinds: Iterable[str]) -> str:
    """The kind of a derived number: that of its weakest input."""
    kinds = list(kinds)
    if not kinds or not set(kinds) <= set(KINDS):
        raise ValueError(f"kinds {kinds} need at least one entry, all of: {', '.join(KINDS)}")
    return max(kinds, key=KINDS.index)


def _dtype(name: str) -> str:
    return "Int64" if name in _INTS else "float64" if name in _FLOATS else "string"


CONTEXT = tuple("""run_id comparison_id case_id study variant device worker dtype kv_format format_path block_size
page_order phase batch_size q_len kv_len num_q_heads num_kv_heads group_ratio head_dim model data threads seed replica
case""".split())                                                          # the columns that say what was looked at
READING = tuple(field.name for field in fields(Reading))                   # the columns of one reading
COLUMNS = {name: _dtype(name) for name in CONTEXT + READING}               # the result table, in order
_TYPES = {name: {"string": str, "Int64": int, "float64": float}[dtype] for name, dtype in COLUMNS.items()}
BLANK: dict[str, Any] = {name: "" if dtype == "string" else None for name, dtype in COLUMNS.items()}


def complete(row: dict[str, Any]) -> dict[str, Any]:
    """The row with every column of the result table, in order: absent text is "", an absent number (or NaN) None.

    Refused: a column the table does not have (KeyError), a value of the wrong type, an infinity or a whole number
    beyond 64 bits (ValueError).
    """
    return {**BLANK, **checked(row)}


def checked(row: dict[str, Any]) -> dict[str, Any]:
    """What a row says, as the result table takes it; what is absent is left out.

    Refuses what `complete` refuses.
    """
    said = {}
    for name, value in row.items():
        if name not in COLUMNS:
            raise no_such("result column", name, COLUMNS)
        if value is None or value != value:
            continue
        if type(value) is not _TYPES[name]:
            value = _cast(name, value)
        if type(value) is str and not value.isascii():
            value = value.encode("utf-8", "replace").decode()              # lone surrogates, as in odd file names
        if type(value) is int and not -2**63 <= value < 2**63:
            raise ValueError(f"column {name!r} of metric {row.get('metric')!r} is a whole number beyond 64 bits")
        if type(value) is float and value in (math.inf, -math.inf):
            raise ValueError(f"column {name!r} of metric {row.get('metric')!r} is infinite; it must be finite or "
                             "absent")
        said[name] = value
    return said


def _cast(name: str, value: Any) -> Any:
    wanted = _TYPES[name]
    try:
        if wanted is not str and not isinstance(value, bool | str):
            return float(value) if wanted is float else operator.index(value)
    except (TypeError, ValueError, OverflowError):
        pass
    words = {str: "text", int: "a whole number", float: "a number"}[wanted]
    raise ValueError(f"column {name!r} takes {words}, got {value!r} ({type(value).__name__})")


def table(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """The result table: one line per reading, all COLUMNS in order with their dtypes.

    A row is the context columns plus `dataclasses.asdict(reading)`; columns it leaves out are blank ("" or null).
    """
    import pandas as pd
    rows = [complete(row) for row in rows]
    return pd.DataFrame({name: pd.array([row[name] for row in rows], dtype=dtype)
                         for name, dtype in COLUMNS.items()})


def schema() -> pa.DataFrameSchema:
    """What a stored result table must satisfy.

    Columns, dtypes, allowed kinds, a value unless missing, one unit per metric.
    """
    import pandera.pandas as pa
    allowed = {"kind": KINDS, "status": STATUSES}
    columns = {name: pa.Column(dtype, nullable=dtype != "string",
                               checks=[pa.Check.isin(allowed[name])] if name in allowed else None)
               for name, dtype in COLUMNS.items()}
    rules = {
        "the value is null exactly where kind is missing": lambda t: t["value"].isna() == (t["kind"] == "missing"),
        "a missing reading has a note": lambda t: (t["kind"] != "missing") | (t["note"] != ""),
        "a status other than ok has an error and no value":
            lambda t: (t["status"] == "ok") | ((t["kind"] == "missing") & (t["error"] != "")),
        "each metric has one unit": lambda t: bool((t.groupby("metric")["unit"].nunique() <= 1).all()),
    }
    return pa.DataFrameSchema(columns, strict=True, ordered=True,
                              checks=[pa.Check(rule, name=name, error=name) for name, rule in rules.items()])
