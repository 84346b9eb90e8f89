"""Attention as many model files write it: K and V are repeated to one copy per query head before the product."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvlab.attention._variant import Cost
from kvlab.attention.naive import Naive


@dataclass(frozen=True)
class NaiveRepeat(Naive):
    """Naive attention on repeat_interleave'd K and V: the traffic of MHA, whatever the group ratio."""
    name: ClassVar[str] = "naive_repeat"

    def attend(self, q_TQD, k_KSD, v_KSE, mask_TS, softcap):
        group_ratio = q_TQD.shape[1] // k_KSD.shape[0]
        k_QSD, v_QSE = k_KSD.repeat_interleave(group_ratio, 0), v_KSE.repeat_interleave(group_ratio, 0)
        return super().attend(q_TQD, k_QSD, v_QSE, mask_TS, softcap)

    def cost(self, trial, cache_bytes=0) -> Cost:
        w, s = trial.workload, trial.workload.shape
        visible = sum(n - w.first_visible(b) for b, n in enumerate(w.kv_lens))
        repeated = visible * s.num_q_heads * (s.head_dim + s.v_dim) * trial.itemsize
        moved = repeated if repeated > cache_bytes else 0
        return super().cost(trial, cache_bytes).plus(moved, moved)
