"""torch's own fused attention with enable_gqa=True: the documented way to ask for grouped heads."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvlab.attention._math import falls_back, math_cost
from kvlab.attention._oracle import least_cost, read_again
from kvlab.attention._sdpa import per_sequence, sdpa_why_not, under_a_mask
from kvlab.attention._variant import Cost


@dataclass(frozen=True)
class SdpaEnableGqa:
    """scaled_dot_product_attention(enable_gqa=True).

    On a CPU its time grows as if K and V were read per query head.
    Source: torch.nn.functional.scaled_dot_product_attention; on a CPU K and V are read again per query head.
    """
    name: ClassVar[str] = "sdpa_enable_gqa"

    def why_not(self, trial):
        return sdpa_why_not(trial)

    def prepare(self, trial, inputs):
        from torch.nn.functional import scaled_dot_product_attention as sdpa

        def attend(q_BTQD, k_BKSD, v_BKSE, rule):
            return sdpa(q_BTQD.transpose(1, 2), k_BKSD, v_BKSE, enable_gqa=True, **rule).transpose(1, 2)
        return per_sequence(trial, inputs, attend)

    def cost(self, trial, cache_bytes=0) -> Cost:
        if trial.device.startswith("cuda"):
            return least_cost(trial, cache_bytes)
        if falls_back(trial):
            return math_cost(least_cost(trial, cache_bytes), trial, cache_bytes, repeated=True)
        return under_a_mask(read_again(trial, trial.workload.shape.group_ratio - 1, cache_bytes), trial, cache_bytes)
