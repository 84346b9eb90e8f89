"""torch's unfused attention: what scaled_dot_product_attention falls back to where no fused kernel can run."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvlab.attention._math import math_cost
from kvlab.attention._oracle import least_cost
from kvlab.attention._sdpa import backend_why_not, on_backend
from kvlab.attention._variant import Cost
from kvlab.attention.naive import Naive
from kvlab.attention.sdpa import Sdpa


@dataclass(frozen=True)
class SdpaMath(Sdpa):
    """sdpa held to the math back end, which writes the score matrix (about 11 µs of each call are the switch).

    Source: the operators of torch's math back end one by one; torch.nn.attention.sdpa_kernel holds it there.
    """
    name: ClassVar[str] = "sdpa_math"

    def why_not(self, trial):
        return super().why_not(trial) or Naive().too_large(trial) or backend_why_not(trial, "MATH")

    def prepare(self, trial, inputs):
        return on_backend("MATH", super().prepare(trial, inputs))

    def cost(self, trial, cache_bytes=0) -> Cost:
        return math_cost(least_cost(trial, cache_bytes), trial, cache_bytes)
