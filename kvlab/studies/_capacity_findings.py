"""What a run of capacity says, in words."""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvlab.record.asked import asked
from kvlab.studies._run import Finding

if TYPE_CHECKING:
    import pandas as pd

RULE = (1.3, 1.5)               # the article, section 7: what to divide by
VERDICTS = ("agreed", "explained", "unexplained", "unmatched")


def findings(table: pd.DataFrame) -> list[Finding]:
    """The four counts, the budget's error, the factor that each log needed."""
    found = [*_logs(asked(table, "log")), *_budget(asked(table, "budget")), *_factor(asked(table, "budget"))]
    return found or [Finding("none", "no finding: the run holds no reading of this study", None, "ratio", None, None,
                             "missing")]


def _logs(rows) -> Iterator[Finding]:
    if rows.empty:
        return
    counts = {verdict: int((rows["verdict"] == verdict).sum()) for verdict in VERDICTS}
    judged = len(rows) - counts["unmatched"]
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    agreed = counts["agreed"] / judged if judged else 0.0
    yield Finding("logs", f"Of {len(rows)} start-up logs {said}: of the {judged} that print something to compare, "
                  f"{agreed:.0%} follow from the block model as they stand.", agreed, "ratio", None, None, "modelled")


def _pools(rows) -> pd.DataFrame:
    pools = rows[rows["metric"] == "pool_gib"]
    logged, modelled = (pools[pools["kind"] == kind].set_index("id") for kind in ("quoted", "modelled"))
    return logged[["value", "vram_gib", "weights_gib", "fitted", "inside"]].join(modelled["value"].rename("model"))


def _budget(rows) -> Iterator[Finding]:
    if rows.empty:
        return
    pools = _pools(rows)
    unseen = pools[~pools["fitted"].astype(bool)]
    if unseen.empty:
        return
    off = ((unseen["model"] - unseen["value"]).abs() / unseen["vram_gib"])
    inside = int(unseen["inside"].astype(bool).sum())
    yield Finding("budget", f"On the {len(unseen)} logs that no constant was read off, the modelled pool is off by "
                  f"{off.median():.1%} of the VRAM (median) and {off.max():.1%} at most; {inside} lie inside its "
                  "interval.", float(off.median()), "ratio", None, None, "modelled")


def _factor(rows) -> Iterator[Finding]:
    factors = rows[rows["metric"] == "safety_factor"]
    had = factors[factors["kind"] != "missing"]
    if had.empty:
        return
    low, high = RULE
    within = int(had["value"].between(low, high).sum())
    none = len(factors) - len(had)
    verdict = "refuted" if within < len(had) / 2 else "conditional"
    yield Finding("safety factor", "The factor that (VRAM − weights) had to be divided by lay between "
                  f"{had['value'].min():.2f} and {had['value'].max():.2f}; {low} to {high} covers {within} of "
                  f"{len(had)} servers, and {none} could not start at all: {verdict}.", float(had["value"].median()),
                  "ratio", float(had["value"].min()), float(had["value"].max()), "quoted")
