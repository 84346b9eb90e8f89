"""Textbook attention: the whole score matrix is written to memory, then its softmax, then the weighted sum."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvlab.attention._oracle import contiguous_only, least_cost, score_matrix_bytes
from kvlab.attention._variant import Cost
from kvlab.kernels.folded_sdpa import visible_mask


@dataclass(frozen=True)
class Naive:
    """Grouped query heads against their KV head; writes the score matrix, O(q_len · kv_len) extra memory."""
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

        def call():
            out = []
            for b, q_TQD in enumerate(inputs.q_BTQD):
                k_KSD, v_KSE = inputs.decode(*inputs.stored(b), w.kv_lens[b], firsts[b])
                out.append(self.attend(q_TQD, k_KSD, v_KSE, masks[b], shape.softcap))
            return out[0] if len(out) == 1 else torch.cat(out)
        return call

    def attend(self, q_TQD, k_KSD, v_KSE, mask_TS, softcap):
        T, Q, D = q_TQD.shape
        K = k_KSD.shape[0]
        q_KXD = q_TQD.view(T, K, Q // K, D).permute(1, 2, 0, 3).reshape(K, -1, D)        # X = (group, query token)
        score_KXS = (q_KXD @ k_KSD.transpose(1, 2)).mul_(D**-0.5)
        if softcap is not None:
            score_KXS = score_KXS.div_(softcap).tanh_().mul_(softcap)
        if mask_TS is not None:
            score_KXS.view(K, Q // K, T, -1).masked_fill_(~mask_TS, float("-inf"))
        out_KXE = score_KXS.softmax(-1) @ v_KSE
        return out_KXE.view(K, Q // K, T, -1).permute(2, 0, 1, 3).reshape(T, Q, -1)

    def cost(self, trial, cache_bytes=0) -> Cost:
        # scores are written, read and written by the scaling, read and written by the softmax, read by the sum
        scores = score_matrix_bytes(trial)
        moved = 3 * scores if scores > cache_bytes else 0
        s = trial.workload.shape
        flops = 2 * (s.head_dim + s.v_dim) * scores // trial.itemsize                  # the masked half is computed too
        return least_cost(trial, cache_bytes)._replace(executed_flops=flops).plus(moved, moved)
