"""Attention over a paged cache: blocks are gathered through the block table into a workspace that is kept."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvlab.attention._math import falls_back, math_cost
from kvlab.attention._oracle import least_cost, not_found
from kvlab.attention._sdpa import NO_SOFTCAP, under_a_mask
from kvlab.attention._variant import Cost
from kvlab.kernels.folded_sdpa import folded_sdpa, visible_rule
from kvlab.kv.cache import Layout


@dataclass(frozen=True)
class PagedGather:
    """Gather into a reused workspace, then fused attention on it: K and V cross memory three times, not once.

    Source: the block table is that of arXiv 2309.06180; gathering first is the simplest correct way to read it.
    """
    name: ClassVar[str] = "paged_gather"
    default_layout: ClassVar[Layout] = Layout(block_size=16, page_order="random")

    def why_not(self, trial):
        return NO_SOFTCAP if trial.workload.shape.softcap is not None else None

    def format_path(self, trial) -> str:
        return "gathered" if trial.kv_format == trial.dtype else "decoded"

    def prepare(self, trial, inputs):
        import torch
        w, shape, cache = trial.workload, trial.workload.shape, inputs.cache
        K, out_of = shape.num_kv_heads, cache.k_arrays + cache.v_arrays
        # sequences of one length are gathered and attended together, others one by one through the same workspace
        batches = [list(range(w.batch_size))] if w.uniform else [[b] for b in range(w.batch_size)]
        plans = []
        for sequences in batches:
            q_len, kv_len, first = w.q_lens[sequences[0]], w.kv_lens[sequences[0]], w.first_visible(sequences[0])
            # whole blocks before the window are not read, nor those of tokens that are in the tail (one at least)
            settled = [codec.settled(kv_len) for codec, _ in cache.format.sides(shape)]
            skip = min(first, *settled) // cache.block_size
            where = (slice(sequences[0], sequences[-1] + 1),
                     slice(skip, max(skip + 1, -(-max(settled) // cache.block_size))))
            index = _rows(inputs, where, K if cache.order == "head" else None)
            plans.append((sequences, index, kv_len, first, skip * cache.block_size,
                          visible_rule(q_len, kv_len, shape.window, trial.device, first)))
        flat = [a.flatten(0, 1).flatten(1) if cache.order == "head" else a.flatten(1) for a in out_of]
        most = max(len(plan[1]) for plan in plans)
        workspace = [inputs.workspace(f"gathered {i}", most, f.shape[1], dtype=f.dtype) for i, f in enumerate(flat)]

        def gathered(array, rows, space, index, count):
            torch.index_select(array, 0, index, out=space[:len(index)])
            taken = space[:len(index)]
            if cache.order == "head":
                return taken.view(count, K, -1, rows.shape[-1])
            return taken.view(count, -1, K, rows.shape[-1]).transpose(1, 2)

        def call():
            q_all, out = inputs.q_BTQD, []
            for sequences, index, kv_len, first, base, rule in plans:
                parts = [gathered(f, a, s, index, len(sequences)) for f, a, s in zip(flat, out_of, workspace)]
                n = len(cache.k_arrays)
                k_BKSD, v_BKSE = inputs.decode(*cache.with_tails(tuple(parts[:n]), tuple(parts[n:]), sequences), kv_len,
                                               first, base)
                q_BTQD = (inputs.q_TQD.view(w.batch_size, -1, *inputs.q_TQD.shape[1:]) if len(sequences) > 1
                          else q_all[sequences[0]][None])
                out.append(folded_sdpa(q_BTQD, k_BKSD, v_BKSE, rule).flatten(0, 1))
            return out[0] if len(out) == 1 else torch.cat(out)
        return call

    def cost(self, trial, cache_bytes=0) -> Cost:
        w, s, fmt = trial.workload, trial.workload.shape, trial.format
        stored = sum(fmt.nbytes(n, s, first=w.first_visible(b)) for b, n in enumerate(w.kv_lens))
        tables = 8 * sum(-(-n // (trial.layout.block_size or n)) for n in w.kv_lens)
        # K and V are both gathered before either is used: what is stored passes once while they are written
        cost = least_cost(trial, cache_bytes).plus(read=not_found(stored, stored, cache_bytes) + tables, write=stored)
        if falls_back(trial):
            return math_cost(cost, trial, cache_bytes)
        return under_a_mask(cost, trial, cache_bytes, s.group_ratio)


def _rows(inputs, where, kv_heads: int | None):
    """Stored rows of the blocks in that part of the block table: one per (block, KV head), or per block.

    Kept in the workspace with the table that they are of, which the layers of a model share.
    """
    import torch
    of, rows = inputs.scratch.get(("rows",), (None, {}))
    if of is not inputs.block_table:
        rows = {}
        inputs.scratch["rows",] = inputs.block_table, rows
    key = *((part.start, part.stop) for part in where), kv_heads
    if key not in rows:
        table_BM = inputs.block_table[where]
        if kv_heads is not None:
            table_BM = table_BM[:, None, :] * kv_heads + torch.arange(kv_heads, device=table_BM.device)[:, None]
        rows[key] = table_BM.flatten()
    return rows[key]
