"""A run as a LaTeX table (booktabs, siunitx): one line per call, or per reading where a run has no calls.

A value carries its uncertainty as siunitx writes it, 1.234(25): the larger side of its interval in the last digits.
"""
from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from kvlab.record._tex import escaped, one_line
from kvlab.record.asked import with_fields
from kvlab.record.wide import wide

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["escaped", "latex", "uncertain"]
ABOUT = {"variant": "variant", "replica": "replica", "phase": "phase", "device": "device", "dtype": "dtype",
         "kv_format": "K/V format", "block_size": "block size", "batch_size": "batch", "group_ratio": "group ratio",
         "kv_len": "KV tokens"}
APART = {"page_order": "page order", "format_path": "format path", "q_len": "query tokens",
         "num_q_heads": "query heads", "head_dim": "head dim", "data": "data", "threads": "threads", "seed": "seed"}
MORE = {"model": "model", "data": "data", "question": "question", "label": "case", "x": "x", "scope": "scope"}
LONG = 40                       # lines; a longer table breaks over pages
UNITS = {"s": r"\second", "B": r"\byte", "B/s": r"\byte\per\second", "W": r"\watt", "J": r"\joule", "Hz": r"\hertz",
         "1/s": r"\per\second", "C": r"\celsius"}


class Column(NamedTuple):
    """A metric's column: its head, the unit as siunitx has it, and what its values are divided by."""
    head: str
    unit: str = ""
    scale: float = 1.0

    @property
    def latex(self) -> str:
        return f"{self.head} / \\unit{{{self.unit}}}" if self.unit else self.head


METRICS = {"latency_s": Column("latency", r"\milli\second", 1e-3),
           "ideal_bytes": Column("ideal bytes", r"\mebi\byte", 2**20),
           "peak_extra_bytes": Column("extra memory", r"\mebi\byte", 2**20),
           "kernel_error": Column("kernel error"), "format_error": Column("format error")}


def latex(table: pd.DataFrame) -> str:
    """One call a line: what it is, latency, bytes and errors, with uncertainties; a call without any is left out.

    Of a run without such calls, one reading a line: what it is about, its value, unit and kind. Columns that no line
    has are left out. What is missing, and why, stands in comments at the end. ValueError for a table without a number.
    """
    import pandas as pd
    calls = table[table["variant"] != ""]
    lines = wide(calls) if len(calls) else calls
    metrics = [name for name in METRICS if name in lines and lines[name].notna().any()]
    if not metrics:
        return _readings(table)
    lines = lines[lines[metrics].notna().any(axis=1)].reset_index(drop=True)
    about = [name for name in ABOUT if lines[name].nunique(dropna=False) > 1 or name in ("variant", "kv_len")]
    for name in APART:                                  # no two calls without what tells them apart
        if lines.duplicated([*about, name]).sum() < lines.duplicated(about).sum():
            about.append(name)
    heads = ABOUT | APART
    columns = {heads[name]: _cells(lines[name]) for name in about}
    for name in metrics:
        scaled = (lines.get(end, pd.Series(math.nan, lines.index)) / METRICS[name].scale
                  for end in (name, f"{name}_low", f"{name}_high"))
        columns[METRICS[name].latex] = [uncertain(*one) for one in zip(*scaled)]
    same = [f"{ABOUT[name]} {value}" for name in ABOUT if name not in about
            and pd.notna(value := lines[name].iloc[0]) and value != ""]
    texts = [heads[name] for name in about if str(lines[name].dtype) != "Int64"]
    frame = pd.DataFrame(columns)
    return _written(frame, texts, lines, [*same, _kinds(lines, metrics)],
                    [*_missing(calls, metrics), *_others(table, calls, metrics)])


def _readings(table: pd.DataFrame) -> str:
    """One reading a line, for runs that have no calls."""
    import pandas as pd
    lines = with_fields(table[table["value"].notna()].reset_index(drop=True))
    if lines.empty:
        raise ValueError("there is nothing for a LaTeX table: no reading has a value; csv takes every row, with the "
                         "reasons for what is missing")
    known = {**ABOUT, **MORE}
    about = [name for name in known if name in lines and lines[name].astype("string").nunique(dropna=False) > 1]
    columns = {"metric": _cells(lines["metric"]), **{known[name]: _cells(lines[name]) for name in about}}
    columns["value"] = [uncertain(*one) for one in zip(lines["value"], lines["low"], lines["high"])]
    columns |= {"unit": lines["unit"].map(unit), "kind": _cells(lines["kind"])}
    texts = [head for head in columns if head != "value"]
    absent = table[table["kind"] == "missing"]["metric"].unique().tolist()
    return _written(pd.DataFrame(columns), texts, lines, [], [*_missing(table, absent)])


def _written(frame: pd.DataFrame, texts: list[str], lines: pd.DataFrame, says: list[str],
             comments: list[str]) -> str:
    """The table with its caption and label, and comments at its end. texts: the columns that hold text."""
    runs = ", ".join(dict.fromkeys(lines["run_id"]))
    says = [f"Run {runs or '(no id)'}", *says]
    if frame.map(lambda cell: "(" in str(cell)).drop(columns=texts).any(axis=None):
        says.append("in parentheses: the larger side of the interval, in units of the last digits")
    long = len(frame) > LONG
    text = frame.style.hide(axis="index").format(na_rep="{--}").to_latex(
        hrules=True, siunitx=True, caption=escaped("; ".join(says)), environment="longtable" if long else "table",
        label="tab:kvlab-" + re.sub(r"[^\w-]", "", runs.partition(",")[0], flags=re.ASCII),
        column_format="".join("l" if head in texts else "S" for head in frame),
        position_float=None if long else "centering").rstrip()
    # sixteen columns are wide: small type, which a float takes inside only, a longtable around it only
    text = (f"{{\\footnotesize\n{text}\n}}" if long else
            text.replace("\\centering\n", "\\centering\n\\footnotesize\n", 1))
    packages = "booktabs, siunitx" + (", longtable" if long else "")
    return "\n".join([f"% kvlab export; needs the packages {packages}",
                      "\\providecommand{\\unit}[1]{\\si{#1}}% kvlab: siunitx before version 3", text, *comments, ""])


def uncertain(value: float, low: float = math.nan, high: float = math.nan) -> str:
    """The number as siunitx reads it, with the larger side of its interval: 1.234(25), 1.2(3)e-7; "{--}" for none."""
    if not math.isfinite(value):
        return "{--}"
    side = max(value - low, high - value)
    if not (math.isfinite(side) and side > 0):
        return f"{value:.4g}"
    power = math.floor(math.log10(max(abs(value), side)))
    power = power if power < -3 or power > 5 else 0
    value, side = value / 10**power, side / 10**power
    digits = max(0, 1 - math.floor(math.log10(side)))
    return f"{value:.{digits}f}({round(side * 10**digits)})" + (f"e{power}" if power else "")


def unit(name: str) -> str:
    """The unit as siunitx sets it; what it has no command for as text, nothing for a plain number."""
    return f"\\unit{{{UNITS[name]}}}" if name in UNITS else "" if name in ("ratio", "count") else escaped(name)


def _cells(values: pd.Series) -> pd.Series:
    whole = str(values.dtype) == "Int64"
    return values if whole else values.map(lambda one: "" if one is None or one != one else escaped(one))


def _kinds(lines: pd.DataFrame, metrics: list[str]) -> str:
    """Which kinds of numbers the columns hold."""
    found = []
    for name in metrics:
        kinds = [kind for kind in lines[f"{name}_kind"].dropna().unique() if kind != "missing"]
        found.append(f"{METRICS[name].head} {' or '.join(kinds)}")
    return ", ".join(found)


def _others(table: pd.DataFrame, calls: pd.DataFrame, metrics: list[str]) -> Iterator[str]:
    left = table[~table.index.isin(calls.index) | ~table["metric"].isin(metrics)]
    left = left[left["value"].notna()]
    if len(left):
        names = one_line(", ".join(left["metric"].unique()))             # a line's end would end the comment
        yield f"% not in this table: {len(left)} readings: {names}; csv has them all"


def _missing(calls: pd.DataFrame, metrics: list[str]) -> Iterator[str]:
    absent = calls[(calls["kind"] == "missing") & calls["metric"].isin(metrics)]
    for (metric, status, note), rows in absent.groupby(["metric", "status", "note"], sort=False):
        what = one_line(f"{'missing' if status == 'ok' else status}: {metric}")
        yield f"% {what} of {rows['case_id'].nunique()} calls: {one_line(note)[:200]}"
