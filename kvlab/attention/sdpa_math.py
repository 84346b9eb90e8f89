"""torch's unfused attention: what scaled_dot_product_attention falls back to where no fused kernel can run."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvlab.attention._oracle import least_cost, not_found, score_matrix_bytes
from kvlab.attention._sdpa import backend_why_not, on_backend
from kvlab.attention._variant import Cost
from kvlab.attention.naive import Naive
from kvlab.attention.sdpa import Sdpa


@dataclass(frozen=True)
class SdpaMath(Sdpa):
    """sdpa held to the math back end, which writes the score matrix (about 11 µs of each call are the switch)."""
    name: ClassVar[str] = "sdpa_math"

    def why_not(self, trial):
        return super().why_not(trial) or Naive().too_large(trial) or backend_why_not(trial, "MATH")

    def prepare(self, trial, inputs):
        return on_backend("MATH", super().prepare(trial, inputs))

    def cost(self, trial, cache_bytes=0) -> Cost:
        """The product writes the scores, the softmax a second matrix; K passes before the one is read, V the other.

        What torch scales (q and a copy of K) and how it hides cells is its own and not in it.
        """
        w, scores, s = trial.workload, score_matrix_bytes(trial), trial.workload.shape
        tokens = sum(kv_len - w.first_visible(b) for b, kv_len in enumerate(w.kv_lens))
        k, v = (tokens * s.num_kv_heads * width * trial.itemsize for width in (s.head_dim, s.v_dim))
        flops = 2 * (s.head_dim + s.v_dim) * scores // trial.itemsize                  # the masked half is computed too
        return least_cost(trial, cache_bytes)._replace(executed_flops=flops).plus(
            read=sum(not_found(scores, max(scores, side), cache_bytes) for side in (k, v)), write=2 * scores)
