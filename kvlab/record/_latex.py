"""The wide view of a run as a LaTeX table (booktabs, siunitx): one line per call, kinds and run in the caption."""
from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from kvlab.record._tex import escaped, one_line
from kvlab.record.wide import wide

if TYPE_CHECKING:
    import pandas as pd

ABOUT = {"variant": "variant", "replica": "replica", "phase": "phase", "device": "device", "dtype": "dtype",
         "kv_format": "K/V format", "block_size": "block size", "batch_size": "batch", "group_ratio": "group ratio",
         "kv_len": "KV tokens"}
LONG = 40                       # lines; a longer table breaks over pages


class Column(NamedTuple):
    """A metric's column: its head, and what its values are divided by."""
    head: str
    scale: float = 1.0
    interval: bool = False


METRICS = {"latency_s": Column("latency / ms", 1e-3, interval=True), "ideal_bytes": Column("ideal bytes / MiB", 2**20),
           "peak_extra_bytes": Column("extra memory / MiB", 2**20),
           "kernel_error": Column("kernel error"), "format_error": Column("format error")}


def latex(table: pd.DataFrame) -> str:
    """One call a line: what it is, latency with its interval, bytes and errors; a call without any of them is left out.

    Columns that no line has are left out. What is missing, and why, stands in comments at the end. ValueError where
    the table has no such number.
    """
    import pandas as pd
    calls = table[table["variant"] != ""]
    lines = wide(calls) if len(calls) else calls
    metrics = [name for name in METRICS if name in lines and lines[name].notna().any()]
    if not metrics:
        raise ValueError(f"there is nothing for a LaTeX table: no call has a value of {', '.join(METRICS)}; csv takes "
                         "every reading")
    lines = lines[lines[metrics].notna().any(axis=1)].reset_index(drop=True)
    about = [name for name in ABOUT if lines[name].nunique(dropna=False) > 1 or name in ("variant", "kv_len")]
    columns = {ABOUT[name]: lines[name] if str(lines[name].dtype) == "Int64" else lines[name].map(one_line)
               for name in about}
    for name in metrics:
        column = METRICS[name]
        columns[column.head] = lines[name] / column.scale
        if column.interval and f"{name}_low" in lines:      # one column of text: two more of numbers would be too wide
            columns["interval"] = [f"[{low:.3g}, {high:.3g}]" if low == low and high == high else "--" for low, high in
                                   zip(lines[f"{name}_low"] / column.scale, lines[f"{name}_high"] / column.scale)]
    frame = pd.DataFrame(columns)
    texts = [head for head in frame if not pd.api.types.is_numeric_dtype(frame[head])]
    floats = [head for head in frame if pd.api.types.is_float_dtype(frame[head])]
    runs = ", ".join(lines["run_id"].unique())
    same = [f"{ABOUT[name]} {value}" for name in ABOUT if name not in about
            and pd.notna(value := lines[name].iloc[0]) and value != ""]
    caption = escaped("; ".join([f"Run {runs or '(no id)'}", *same, _kinds(lines, metrics)]))
    label = "tab:kvlab-" + re.sub(r"[^\w-]", "", runs.partition(",")[0], flags=re.ASCII)
    styler = frame.style.hide(axis="index").format(escape="latex", na_rep="{--}").format(
        "{:.3g}", subset=floats, na_rep="{--}")
    text = styler.to_latex(hrules=True, siunitx=True, caption=caption, label=label,
                           column_format="".join("l" if head in texts else "S" for head in frame),
                           environment="longtable" if len(frame) > LONG else "table",
                           position_float=None if len(frame) > LONG else "centering")
    # sixteen columns are wide: small type, which a float takes inside only, a longtable around it only
    text = (f"{{\\footnotesize\n{text.rstrip()}\n}}" if len(frame) > LONG else
            text.replace("\\centering\n", "\\centering\n\\footnotesize\n", 1))
    packages = "booktabs, siunitx" + (", longtable" if len(frame) > LONG else "")
    return "\n".join([f"% kvlab export; needs the packages {packages}", text.rstrip(), *_missing(calls, metrics), ""])


def _kinds(lines: pd.DataFrame, metrics: list[str]) -> str:
    """Which kinds of numbers the columns hold."""
    found = []
    for name in metrics:
        kinds = [kind for kind in lines[f"{name}_kind"].dropna().unique() if kind != "missing"]
        found.append(f"{METRICS[name].head.partition(' /')[0]} {' or '.join(kinds)}")
    return ", ".join(found)


def _missing(calls: pd.DataFrame, metrics: list[str]) -> Iterator[str]:
    absent = calls[(calls["kind"] == "missing") & calls["metric"].isin(metrics)]
    for (metric, status, note), rows in absent.groupby(["metric", "status", "note"], sort=False):
        yield f"% {'missing' if status == 'ok' else status}: {metric} of {rows['case_id'].nunique()} calls: " \
              f"{one_line(note)[:200]}"
