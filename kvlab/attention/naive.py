"""Textbook attention: the whole score matrix is written to memory, then its softmax, then the weighted sum."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvlab.attention._oracle import contiguous_only, least_cost, not_found, score_matrix_bytes
from kvlab.attention._variant import Cost
from kvlab.kernels.folded_sdpa import visible_mask
from kvlab.shapes import Workload


@dataclass(frozen=True)
class Naive:
    """Grouped query heads against their KV head; writes the score matrix, O(q_len · kv_len) extra memory.

    Source: softmax(QKᵀ ÷ √d)·V, Vaswani et al. (2017), arXiv 1706.03762; each array that torch writes
    counted once out and once in.
    """
    name: ClassVar[str] = "naive"

    def why_not(self, trial):
        return contiguous_only(trial) or self.too_large(trial)

    def too_large(self, trial) -> str | None:
        """Refused before it is allocated: scores and their softmax are alive at once."""
        import psutil
        import torch
        needed = 2 * score_matrix_bytes(trial)
        free = (torch.cuda.mem_get_info(trial.device)[0] if trial.device.startswith("cuda")
                else psutil.virtual_memory().available)
        return None if needed <= free else f"its score matrix needs {needed:,} bytes and {free:,} are free; use flash"

    def prepare(self, trial, inputs):
        import torch
        w, shape, device = trial.workload, trial.workload.shape, trial.device
        firsts = [w.first_visible(b) for b in range(w.batch_size)]
        masks = [visible_mask(q_len, kv_len, shape.window, device, first)
                 for q_len, kv_len, first in zip(w.q_lens, w.kv_lens, firsts)]
        hidden = [None if mask_TS is None else ~mask_TS for mask_TS in masks]

        def call():
            out = []
            for b, q_TQD in enumerate(inputs.q_BTQD):
                k_KSD, v_KSE = inputs.decode(*inputs.stored(b), w.kv_lens[b], firsts[b])
                out.append(self.attend(q_TQD, k_KSD, v_KSE, hidden[b], shape.softcap))
            return out[0] if len(out) == 1 else torch.cat(out)
        return call

    def attend(self, q_TQD, k_KSD, v_KSE, hidden_TS, softcap):
        T, Q, D = q_TQD.shape
        K = k_KSD.shape[0]
        q_KXD = q_TQD.view(T, K, Q // K, D).permute(1, 2, 0, 3).reshape(K, -1, D)        # X = (group, query token)
        score_KXS = (q_KXD @ k_KSD.transpose(1, 2)).mul_(D**-0.5)
        if softcap is not None:
            score_KXS = score_KXS.div_(softcap).tanh_().mul_(softcap)
        if hidden_TS is not None:
            score_KXS.view(K, Q // K, T, -1).masked_fill_(hidden_TS, float("-inf"))
        out_KXE = score_KXS.softmax(-1) @ v_KSE
        return out_KXE.view(K, Q // K, T, -1).permute(2, 0, 1, 3).reshape(T, Q, -1)

    def cost(self, trial, cache_bytes=0) -> Cost:
        """The product writes the scores, steps in place read and write them, the softmax writes a second matrix.

        Between the product's write and the next step's read K passes, between softmax and sum V: a matrix that fits
        the cache by itself does not survive them. A prompt's queries and output are put in order by a copy each.
        """
        w, s, size, cost = trial.workload, trial.workload.shape, trial.itemsize, least_cost(trial, cache_bytes)
        heads = self.heads_read(s)
        for b, (q_len, kv_len) in enumerate(zip(w.q_lens, w.kv_lens)):
            tokens = kv_len - w.first_visible(b)
            scores, k, v = (n * tokens * size for n in (s.num_q_heads * q_len, heads * s.head_dim, heads * s.v_dim))
            steps = 1 + 3 * (s.softcap is not None)                      # scaling; capping
            moved = not_found(scores, k, cache_bytes) + (steps - 1) * not_found(scores, 0, cache_bytes)
            cost = cost.plus(read=moved, write=moved + 2 * scores)
            cost = cost.plus(read=not_found(scores, scores, cache_bytes)
                             + not_found(scores, max(scores, v), cache_bytes))
            if s.v_in_k and heads == s.num_kv_heads:                     # walked as K, and again as V
                latent = not_found(k, 2 * scores, cache_bytes)
                cost = cost.plus(read=latent * s.v_dim // s.head_dim)
            if q_len > 1:                                                # what is hidden is overwritten
                mask = q_len * tokens                                    # of a byte each
                cells = mask - Workload(s, (q_len,), (kv_len,)).visible_pairs()      # that a CPU stores; CUDA all
                hidden = (mask if trial.device.startswith("cuda") else cells) * size                # of one head
                touched = not_found(s.num_q_heads * hidden, scores - s.num_q_heads * hidden, cache_bytes)
                cost = cost.plus(read=mask * (1 if mask + hidden <= cache_bytes else s.num_q_heads) + touched,
                                 write=touched)
            if q_len > 1 and s.num_q_heads > 1:
                q, out = (q_len * s.num_q_heads * n * size for n in (s.head_dim, s.v_dim))
                cost = cost.plus(read=not_found(q, k + scores, cache_bytes) + not_found(out, v + scores, cache_bytes),
                                 write=q + out)
        flops = 2 * (s.head_dim + s.v_dim) * score_matrix_bytes(trial) // size        # the masked half is computed too
        return cost._replace(executed_flops=flops)

    def heads_read(self, shape) -> int:
        """Heads of K and V that the products read."""
        return shape.num_kv_heads
