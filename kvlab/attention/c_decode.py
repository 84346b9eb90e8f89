"""A decode step in C: one pass over K and V, in which each token meets all query heads of its group."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvlab.attention._c_kernel import c_call, c_why_not
from kvlab.attention._oracle import least_cost
from kvlab.attention._variant import Cost


@dataclass(frozen=True)
class CDecode:
    """What grouped heads are for: K and V are read once per KV head, not once per query head.

    fp32 on a CPU.
    Source: grouped heads, Ainslie et al. (2023), arXiv 2305.13245; bytes and flops as the C file moves them.
    """
    name: ClassVar[str] = "c_decode"

    def why_not(self, trial):
        if max(trial.workload.q_lens) > 1:
            return "c_decode computes decode steps only, one query token per sequence; use c_flash"
        return c_why_not(trial)

    def prepare(self, trial, inputs):
        return c_call(self.name, trial, inputs)

    def cost(self, trial, cache_bytes=0) -> Cost:
        return least_cost(trial, cache_bytes)
