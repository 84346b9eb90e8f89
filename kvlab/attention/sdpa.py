"""torch's own fused attention, each group's query heads folded into the query tokens of one call."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvlab.attention._math import falls_back, math_cost
from kvlab.attention._oracle import least_cost
from kvlab.attention._sdpa import per_sequence, sdpa_why_not, under_a_mask
from kvlab.attention._variant import Cost
from kvlab.kernels.folded_sdpa import folded_sdpa


@dataclass(frozen=True)
class Sdpa:
    """scaled_dot_product_attention without repeated heads; which operator torch chose is in kernel_error's note.

    Source: torch.nn.functional.scaled_dot_product_attention; each stored byte is read once where it is fused.
    """
    name: ClassVar[str] = "sdpa"

    def why_not(self, trial):
        return sdpa_why_not(trial)

    def prepare(self, trial, inputs):
        return per_sequence(trial, inputs, folded_sdpa)

    def cost(self, trial, cache_bytes=0) -> Cost:
        cost = least_cost(trial, cache_bytes)
        if falls_back(trial):
            return math_cost(cost, trial, cache_bytes)
        return under_a_mask(cost, trial, cache_bytes, trial.workload.shape.group_ratio)
