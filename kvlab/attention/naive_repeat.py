"""Attention as many model files write it: K and V are repeated to one copy per query head before the product."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvlab.attention._variant import Cost
from kvlab.attention.naive import Naive


@dataclass(frozen=True)
class NaiveRepeat(Naive):
    """Naive attention on repeat_interleave'd K and V: the traffic of MHA, whatever the group ratio.

    Source: naive, with K and V written and read once per query head.
    """
    name: ClassVar[str] = "naive_repeat"

    def attend(self, q_TQD, k_KSD, v_KSE, hidden_TS, softcap):
        group_ratio = q_TQD.shape[1] // k_KSD.shape[0]
        k_QSD, v_QSE = k_KSD.repeat_interleave(group_ratio, 0), v_KSE.repeat_interleave(group_ratio, 0)
        return super().attend(q_TQD, k_QSD, v_QSE, hidden_TS, softcap)

    def cost(self, trial, cache_bytes=0) -> Cost:
        """naive over the copies, which are written first, K's and then V's, and read after all of them.

        Each copy of a head reads the head: again, unless it and a copy of it fit.
        """
        w, s, cost = trial.workload, trial.workload.shape, super().cost(trial, cache_bytes)
        for b, kv_len in enumerate(w.kv_lens):
            head_k, head_v = ((kv_len - w.first_visible(b)) * n * trial.itemsize for n in (s.head_dim, s.v_dim))
            copies = s.num_q_heads * (head_k + head_v)
            again = sum(n for n in (head_k, head_v) if 2 * n > cache_bytes) * (s.num_q_heads - s.num_kv_heads)
            cost = cost.plus(read=again + (copies if copies > cache_bytes else 0), write=copies)
        return cost

    def heads_read(self, shape) -> int:
        return shape.num_q_heads
