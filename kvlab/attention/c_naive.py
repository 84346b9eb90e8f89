"""Textbook attention in C: the score matrix of one query head at a time is written to memory, whole."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvlab.attention._c_kernel import c_call, c_why_not
from kvlab.attention._oracle import least_cost, score_matrix_bytes
from kvlab.attention._variant import Cost


@dataclass(frozen=True)
class CNaive:
    """Scores, softmax and weighted sum in three passes over a [q_len, kv_len] matrix, per query head. fp32 on a CPU.

    Written to be checked: a cache simulator runs the same C file, so that the formula below has a judge.
    """
    name: ClassVar[str] = "c_naive"

    def why_not(self, trial):
        return c_why_not(trial)

    def prepare(self, trial, inputs):
        return c_call(self.name, trial, inputs)

    def cost(self, trial, cache_bytes=0) -> Cost:
        """A matrix larger than the cache is written and read twice; then a group's K and V are read per query head.

        The queries and the output of one head are taken to stay in the cache.
        """
        w, s = trial.workload, trial.workload.shape
        cost, width = least_cost(trial, cache_bytes), (s.head_dim + (0 if s.v_in_k else s.v_dim)) * trial.itemsize
        for b, (q_len, kv_len) in enumerate(zip(w.q_lens, w.kv_lens)):
            tokens = kv_len - w.first_visible(b)
            scores, kv = q_len * tokens * trial.itemsize, tokens * width
            if scores > cache_bytes:
                cost = cost.plus(read=2 * s.num_q_heads * scores, write=2 * s.num_q_heads * scores)
            if scores + kv > cache_bytes:
                cost = cost.plus(read=(s.num_q_heads - s.num_kv_heads) * kv)
        return cost._replace(executed_flops=2 * (s.head_dim + s.v_dim) * score_matrix_bytes(trial) // trial.itemsize)
