"""Which alarm tells an overloaded engine from a healthy one?

Tests the article's claims that cache evictions above 0 mean too little memory and truncated answers, and that a share
of 5 % calls for an alarm. An incident is simulated: calm, a burst, calm. kvlab's alerts read the engine's metrics as
they would read a live one's (`kvlab watch`), beside the article's rule, which counts blocks that a prefix cache let go.
"""
from __future__ import annotations

from collections.abc import Iterator

from kvlab.studies._monitoring_case import METRICS, Incident
from kvlab.studies._monitoring_findings import findings
from kvlab.studies._run import Case
from kvlab.studies._serving import Load, capacity_of

__all__ = ["METRICS", "SIZES", "cases", "findings", "run"]
SIZES = ("smoke", "small", "large")
WORKLOAD = "azure_2023_conv"


def cases(size: str, *, device: str = "cpu", variants=None, model: str | None = None) -> Iterator[Case]:
    """One incident, over seeds."""
    if variants or model:
        raise ValueError("monitoring simulates one recorded engine: it takes neither --variants nor --model; "
                         "`kvlab watch URL` looks at a live one")
    served, _ = capacity_of(Load(WORKLOAD, 600))
    seeds = {"smoke": 2, "small": 5, "large": 20}[size]
    yield Incident(WORKLOAD, round(served, 4), seeds=tuple(range(seeds)))


def run(case: Case, *, artifacts=None, watch=None) -> list[dict]:
    """Simulate the incident and let the alarms look at it."""
    return case.rows()
