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
    Source: softmax(QKᵀ ÷ √d)·V, Vaswani et al. (2017), arXiv 1706.03762; bytes as counted in that C file.
    """
    name: ClassVar[str] = "c_naive"

    def why_not(self, trial):
        return c_why_not(trial)

    def prepare(self, trial, inputs):
        return c_call(self.name, trial, inputs)

    def cost(self, trial, cache_bytes=0) -> Cost:
        """Bytes behind a cache that forgets what was used longest ago (LRU), one query head after the other.

        What is walked again in the same order is found again only if it and everything touched in between fits; else
        each part is gone just before its turn, and nothing of it is found. K and V: between two rows lie they
        themselves and a row of scores; between two heads of a group K, V and the matrix. The matrix: between product
        and softmax lie it and K, between softmax and sum it and V, between a head and the next, which writes over it,
        it, K and V. What is written is written back once in any case. A row of scores and of q are taken to fit.
        """
        w, s, size = trial.workload, trial.workload.shape, trial.itemsize
        cost, heads, group = least_cost(trial, cache_bytes), s.num_q_heads, s.group_ratio
        last = 0                                             # what is left of the matrix at the end
        for b, (q_len, kv_len) in enumerate(zip(w.q_lens, w.kv_lens)):
            tokens = kv_len - w.first_visible(b)
            row, k = tokens * size, tokens * s.head_dim * size
            v, scores = tokens * s.v_dim * size, q_len * row
            both = k if s.v_in_k else k + v
            for side in (k, v):
                walks = q_len if side + row > cache_bytes else 1 if both + scores > cache_bytes else 0
                cost = cost.plus(read=heads * walks * side)
            if both + scores > cache_bytes:                          # else only what least_cost has is read
                cost = cost.plus(read=-heads * both // group)
            gone = [scores + between > cache_bytes for between in (k, v, both)]
            cost = cost.plus(read=heads * scores * (gone[0] + gone[1]), write=heads * scores * (gone[0] + gone[2]))
            last = max(last, 0 if gone[2] else scores)
        cost = cost.plus(write=last)
        return cost._replace(executed_flops=2 * (s.head_dim + s.v_dim) * score_matrix_bytes(trial) // size)
