"""FlashAttention's algorithm in readable torch: tiles of K and V, an online softmax, no score matrix in memory."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvlab.attention._oracle import contiguous_only, least_cost
from kvlab.attention._variant import Cost


@dataclass(frozen=True)
class Flash:
    """Tiled attention with an online softmax: extra memory O(q_len), not O(q_len · kv_len).

    q_tile, kv_tile: query and KV tokens of a tile. Source: arXiv 2205.14135, Algorithm 1; arXiv 1805.02867.
    """
    q_tile: int = 256
    kv_tile: int = 512
    name: ClassVar[str] = "flash"

    def why_not(self, trial):
        return contiguous_only(trial)

    def prepare(self, trial, inputs):
        import torch
        w, shape = trial.workload, trial.workload.shape

        def call():
            out_TQE = torch.empty(sum(w.q_lens), shape.num_q_heads, shape.v_dim, dtype=trial.torch_dtype,
                                  device=trial.device)
            for b, (q_TQD, out) in enumerate(zip(inputs.q_BTQD, out_TQE.split(w.q_lens))):
                first = w.first_visible(b)
                k_KSD, v_KSE = inputs.decode(*inputs.stored(b), w.kv_lens[b], first)
                before = w.kv_lens[b] - w.q_lens[b] - first          # visible tokens before the first query
                for start in range(0, w.q_lens[b], self.q_tile):
                    tile = slice(start, start + self.q_tile)
                    out[tile] = self.attend(q_TQD[tile], k_KSD, v_KSE, before + start, shape)
            return out_TQE
        return call

    def attend(self, q_TQD, k_KSD, v_KSE, position, shape):
        """One tile of queries, the first standing at KV token `position`; the tiles it cannot see are skipped."""
        import torch
        T, Q, D = q_TQD.shape
        K, G = shape.num_kv_heads, shape.group_ratio
        q_KXD = (q_TQD.view(T, K, G, D).permute(1, 2, 0, 3) * D**-0.5).reshape(K, G * T, D)    # X = (group, query)
        row_T1 = torch.arange(position, position + T, device=q_TQD.device)[:, None]
        highest = q_TQD.new_full((K, G * T, 1), float("-inf"), dtype=torch.float32)     # running maximum of the scores
        total = torch.zeros_like(highest)                                                # running sum of exp(score)
        acc_KXE = torch.zeros(K, G * T, shape.v_dim, device=q_TQD.device)                # running weighted sum of V
        begin = 0 if shape.window is None else max(0, position + 1 - shape.window)
        end = position + T
        for low in range(begin, end, self.kv_tile):
            high = min(low + self.kv_tile, end)
            score_KXS = (q_KXD @ k_KSD[:, low:high].transpose(1, 2)).float()
            if shape.softcap is not None:
                score_KXS = shape.softcap * torch.tanh(score_KXS / shape.softcap)
            token_S = torch.arange(low, high, device=q_TQD.device)
            hidden_TS = token_S > row_T1
            if shape.window is not None:
                hidden_TS |= token_S <= row_T1 - shape.window
            score_KXS.view(K, G, T, -1).masked_fill_(hidden_TS, float("-inf"))
            peak = torch.maximum(highest, score_KXS.amax(-1, keepdim=True))
            # a row that has seen nothing yet keeps peak = -inf; subtracting 0 instead leaves its weights at 0
            base = torch.where(peak.isinf(), 0.0, peak)
            weight_KXS = torch.exp(score_KXS - base)
            shrink = torch.exp(highest - base)
            total = total * shrink + weight_KXS.sum(-1, keepdim=True)
            acc_KXE = acc_KXE * shrink + (weight_KXS.to(v_KSE.dtype) @ v_KSE[:, low:high])
            highest = peak
        return (acc_KXE / total).view(K, G, T, -1).permute(2, 0, 1, 3).reshape(T, Q, -1)

    def cost(self, trial, cache_bytes=0) -> Cost:
        """K and V are read once per tile of queries; of the masked cells only those in a diagonal tile are computed."""
        w, s = trial.workload, trial.workload.shape
        cost, flops = least_cost(trial, cache_bytes), 0
        for b, (q_len, kv_len) in enumerate(zip(w.q_lens, w.kv_lens)):
            per_token = s.num_kv_heads * (s.head_dim + (0 if s.v_in_k else s.v_dim)) * trial.itemsize
            seen = 0
            for start in range(0, q_len, self.q_tile):
                rows = min(self.q_tile, q_len - start)
                end = kv_len - q_len + start + rows
                begin = 0 if s.window is None else max(0, kv_len - q_len + start + 1 - s.window)
                seen += end - begin
                flops += 2 * s.num_q_heads * (s.head_dim + s.v_dim) * rows * (end - begin)
            visible = kv_len - w.first_visible(b)
            again = (seen - visible) * per_token
            if again > 0 and visible * per_token > cache_bytes:
                cost = cost.plus(read=again)
        return cost._replace(executed_flops=flops)
