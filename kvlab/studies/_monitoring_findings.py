"""What a run of monitoring says, in words."""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvlab.record.asked import asked
from kvlab.studies._run import Finding

if TYPE_CHECKING:
    import pandas as pd

FALSE = 0.05                    # share of the calm time up to which an alarm may be on and still tell something


def findings(table: pd.DataFrame) -> list[Finding]:
    """Each alarm: how soon after the burst it fires, how long after it, and how often without a reason."""
    rows = asked(table, "alarm")
    found = [] if rows.empty else list(_alarms(rows))
    return found or [Finding("none", "no finding: the run holds no reading of this study", None, "ratio", None, None,
                             "missing")]


def _alarms(rows) -> Iterator[Finding]:
    for alarm, mine in rows.groupby("alarm", sort=False):
        one = {row["metric"]: row for _, row in mine.iterrows()}
        false, soon, clear = one["false_share"], one["detected_after_s"], one["cleared_after_s"]
        if false["kind"] == "missing":
            continue
        if false["value"] > FALSE:
            verdict = "useless: it is on without a reason"
        elif soon["kind"] == "missing":
            verdict = f"silent: {soon['note']}"
        else:
            verdict = "it tells the incident"
        then = []
        if soon["kind"] != "missing" and false["value"] <= FALSE:
            then.append(f"fires {soon['value']:.0f} s after the burst began")
        then.append(clear["note"] if clear["kind"] == "missing" else
                    f"goes out {clear['value']:.0f} s after the burst's end")
        yield Finding(f"alarm: {alarm}", f"“{alarm}” ({false['method']}): on for {false['value']:.0%} of the calm time"
                      f", {', '.join(then)}; {verdict}.", float(false["value"]), "ratio",
                      _end(false, "low"), _end(false, "high"), false["kind"])


def _end(row: pd.Series, end: str) -> float | None:
    return None if row[end] != row[end] else float(row[end])
