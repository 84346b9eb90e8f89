"""FlashAttention's algorithm in C: tiles of K and V meet tiles of queries of a whole group, with an online softmax."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvlab.attention._c_kernel import c_call, c_why_not
from kvlab.attention._oracle import least_cost
from kvlab.attention._variant import Cost
from kvlab.shapes import positive


@dataclass(frozen=True)
class CFlash:
    """K and V are read once per tile of query tokens, whatever the group ratio; no score matrix. fp32 on a CPU.

    q_tile, kv_tile: query and KV tokens of a tile. Source: arXiv 2205.14135, Algorithm 1.
    """
    q_tile: int = 64
    kv_tile: int = 64
    name: ClassVar[str] = "c_flash"

    def __post_init__(self):
        positive(q_tile=self.q_tile, kv_tile=self.kv_tile)

    def why_not(self, trial):
        return c_why_not(trial)

    def prepare(self, trial, inputs):
        return c_call(self.name, trial, inputs, (self.q_tile, self.kv_tile))

    def cost(self, trial, cache_bytes=0) -> Cost:
        """Bytes behind a cache that forgets what was used longest ago (LRU), one KV head after the other.

        A tile of queries finds what it shares with the tile before only if all of K and V that this one walked fits
        beside the queries and outputs of both. These are walked again for each tile of K and V, and moved again
        (q read, outputs read and written) unless they fit beside it.
        """
        w, s, size = trial.workload, trial.workload.shape, trial.itemsize
        cost, width = least_cost(trial, cache_bytes), (s.head_dim + (0 if s.v_in_k else s.v_dim)) * size
        for q_len, kv_len in zip(w.q_lens, w.kv_lens):
            for start in range(0, q_len, self.q_tile):
                rows = min(self.q_tile, q_len - start) * s.group_ratio
                queries, outputs = rows * s.head_dim * size, rows * s.v_dim * size
                position = kv_len - q_len + start                    # of the tile's first query token
                first = max(0, position + 1 - s.window) if s.window else 0
                if queries + outputs + min(self.kv_tile, kv_len) * width > cache_bytes:
                    end = position + rows // s.group_ratio
                    again = s.num_kv_heads * (-(-(end - first) // self.kv_tile) - 1)
                    cost = cost.plus(read=again * (queries + outputs), write=again * outputs)
                if start == 0:
                    continue
                seen = position - (max(0, position - self.q_tile + 1 - s.window) if s.window else 0)
                if seen * width + 2 * (queries + outputs) > cache_bytes:
                    cost = cost.plus(read=(position - first) * width * s.num_kv_heads)
        return cost
