"""A decode step in Triton: kvlab's own kernel over paged and contiguous caches, in whatever format they are stored."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvlab.attention._native import capability, triton_why_not
from kvlab.attention._oracle import least_cost, not_found
from kvlab.attention._stored import checked_table, kind_of, not_stored, stored_sides
from kvlab.attention._variant import Cost
from kvlab.kernels.decode_tiles import MOST_PARTS, candidates, multiprocessors, splits
from kvlab.kernels.stored import CODES
from kvlab.kernels.triton_tuning import pick, power, told
from kvlab.kv.cache import Layout
from kvlab.libraries import library

WIDEST = 576                            # a wider tile's q, K and sums would not fit a multiprocessor's registers
LARGEST_GRID = 2**31 - 1                # programs that CUDA launches at once along one axis


@dataclass(frozen=True)
class TritonPaged:
    """Split-K decoding: each sequence's tokens in several parts at once, merged by their log-sum-exp.

    K and V are read once per KV head through the block table, as they are stored; int8, fp8, int4 and int2 become
    numbers in registers. A window, soft-capping and absorbed MLA (V a view of K) are shapes of it. tune: configurations
    are measured while planning, and the fastest is kept; without it the default one runs.
    Source: arXiv 2309.06180 (blocks), pytorch.org/blog/flash-decoding (splitting over tokens).
    """
    tune: bool = True
    name: ClassVar[str] = "triton_paged"
    default_layout: ClassVar[Layout] = Layout(block_size=16, page_order="random")

    def why_not(self, trial):
        w, s = trial.workload, trial.workload.shape
        if why := triton_why_not(self.name, capability(trial.device), library, "paged or sdpa"):
            return why
        if w.phase != "decode":
            return "triton_paged computes decode steps only, one query token per sequence; use triton_flash or sdpa"
        if max(s.head_dim, s.v_dim) > WIDEST:
            return (f"triton_paged takes heads of up to {WIDEST} channels, got head_dim={s.head_dim} with v_head_dim="
                    f"{s.v_dim}; use sdpa")
        if w.batch_size * s.num_kv_heads * -(-s.group_ratio // 16) * MOST_PARTS > LARGEST_GRID:
            return f"{w.batch_size} sequences of {s.num_kv_heads} KV heads are more programs than CUDA launches at once"
        return not_stored(trial, CODES)

    def format_path(self, trial) -> str:
        return "native"

    def prepare(self, trial, inputs):
        import torch

        from kvlab.kernels import triton_decode as kernel
        w, s = trial.workload, trial.workload.shape
        (k, v), block_table = stored_sides(inputs.cache), checked_table(inputs)
        firsts = tuple(w.first_visible(b) for b in range(w.batch_size))

        def launch(config):
            q_BQD = inputs.q_TQD
            out_BQE = torch.empty(*q_BQD.shape[:2], s.v_dim, dtype=q_BQD.dtype, device=q_BQD.device)
            kernel.decode(q_BQD, k, v, block_table, firsts, w.kv_lens, softcap=s.softcap, out_BQE=out_BQE,
                          workspace=inputs.workspace, config=config)
            return out_BQE

        with torch.cuda.device_of(inputs.q_TQD):
            config = pick(self._key(trial), self._candidates(trial), launch, self.tune)
        return lambda: launch(config)

    def ran(self, trial) -> str:
        return told(self._key(trial))

    def _key(self, trial):
        w = trial.workload
        return (self, trial.device, trial.dtype, trial.kv_format, w.shape, trial.layout, w.batch_size, power(w.kv_lens))

    def _candidates(self, trial):
        s = trial.workload.shape
        return candidates(s.group_ratio, [(kind_of(c), width) for c, width in trial.format.sides(s)], trial.itemsize)

    def cost(self, trial, cache_bytes=0) -> Cost:
        """K and V are read once per KV head, block tables and lengths beside them; parts are written and read again.

        Query heads of a group that fill no tile of 16 are computed as if they did, which is what matrix units do. The
        parts are those of the default configuration; one that was tuned may have others.
        """
        w, s, block, config = trial.workload, trial.workload.shape, trial.layout.block_size, self._candidates(trial)[0]
        firsts = [w.first_visible(b) for b in range(w.batch_size)]
        visible = [n - first for first, n in zip(firsts, w.kv_lens)]
        blocks = sum(-(-n // block) - first // block if block else 1 for first, n in zip(firsts, w.kv_lens))
        cost = least_cost(trial, cache_bytes).plus(read=4 * blocks + 8 * w.batch_size)
        programs = w.batch_size * s.num_kv_heads * -(-s.group_ratio // config.rows)
        count = splits(programs, max(visible), config.tokens, multiprocessors(trial.device))
        if count > 1:                                   # fp32, and an LSE each; the others' K and V pass in between
            partial = 4 * w.batch_size * s.num_q_heads * count * (s.v_dim + 1)
            cost = cost.plus(read=not_found(partial, cost.read_bytes, cache_bytes), write=partial)
        rows = -(-s.group_ratio // 16) * 16 * s.num_kv_heads
        return cost._replace(executed_flops=2 * rows * (s.head_dim + s.v_dim) * sum(visible))
