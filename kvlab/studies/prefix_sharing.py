"""What does prefix caching save: memory, or computing?

Tests the article's claim that a shared system prompt saves 30 to 50 % of the memory. Memory is saved only among
requests that are alive together: f · (R − 1)/R of it, counted in a block pool. Computing is saved whenever the blocks
are still there, so the hit rate depends on the size of the pool; what finding a prefix saves of a prompt's time is
measured on a small real model. And both in one engine, simulated, over the rate of arrivals. Size large counts hit
rates over the recorded traces where the environment variable KVLAB_TRACES names their folder.
"""
from __future__ import annotations

from collections.abc import Iterator

from kvlab.studies import _prefix_cases
from kvlab.studies._prefix_cases import METRICS
from kvlab.studies._prefix_findings import findings
from kvlab.studies._run import Case

__all__ = ["METRICS", "SIZES", "cases", "findings", "run"]
SIZES = ("smoke", "small", "large")


def cases(size: str, *, device: str = "cpu", variants=None, model: str | None = None) -> Iterator[Case]:
    """Requests that share, real prompts, pools of some size, an engine over rates."""
    if variants or model:
        raise ValueError("prefix_sharing counts blocks, measures one small model and simulates one recorded engine: "
                         "it takes neither --variants nor --model; `kvlab simulate MODEL --gpu …` serves any other")
    return _prefix_cases.cases(size, device)


def run(case: Case, *, artifacts=None, watch=None) -> list[dict]:
    """Count the blocks, time the prompts, or simulate."""
    return case.rows()
