"""Decoding over a prefix that the batch shares: attended once for all, each sequence's own tokens apart, and merged.

Legend: B = sequence, Q = query head, K = kv head, G = query heads per kv head, D = head_dim, E = v_head_dim,
M = block of a sequence.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvlab.attention._oracle import least_cost, not_found
from kvlab.attention._stored import checked_table, kind_of, slots_per_block, stored_sides
from kvlab.attention._variant import Cost
from kvlab.attention.paged import Paged
from kvlab.attention.triton_paged import TritonPaged
from kvlab.kernels import cpu_decode
from kvlab.kernels.decode_tiles import candidates, multiprocessors, splits
from kvlab.kv.cache import Layout


@dataclass(frozen=True)
class Cascade:
    """A shared prefix is read once per batch, not once per sequence: more than sharing its blocks, which saves room.

    The prefix meets the query heads of all sequences as if they were one sequence's, batch · group_ratio rows to a KV
    head. The two results of a query head are merged by their log-sum-exp (LSE): sigmoid(LSE - LSE') weighs them.
    Both parts are computed by kvlab's decode kernel of the device, as in paged and triton_paged.
    Source: arXiv 2402.05099 (Hydragen), section 3; blocks as in arXiv 2309.06180.
    """
    name: ClassVar[str] = "cascade"
    default_layout: ClassVar[Layout] = Layout(block_size=16, page_order="random", share_prefix=True)

    def why_not(self, trial):
        w = trial.workload
        if w.phase != "decode":
            return "cascade computes decode steps only, one query token per sequence; use paged"
        if not trial.layout.share_prefix:
            return ("cascade attends once to a prefix that is stored once: give --shared-prefix, a multiple of the "
                    "block size (in Python shared_prefix and Layout(…, share_prefix=True)), or use paged")
        if len({min(w.shared_prefix, w.first_visible(b)) for b in range(w.batch_size)}) > 1:
            return ("cascade attends to the prefix once for all, and here the window hides more of it from one "
                    "sequence than from another; give equal kv_lens, or use paged")
        if _on_gpu(trial):
            return TritonPaged().why_not(trial)
        why = Paged().not_in_place(trial)
        return why and f"cascade runs on kvlab's kernel for CPUs: {why}; use paged"

    def format_path(self, trial) -> str:
        return "native"

    def ran(self, trial) -> str:
        once = f"{trial.workload.shared_prefix:,} tokens attended once for {trial.workload.batch_size} sequences"
        return once if _on_gpu(trial) else f"kvlab's {cpu_decode.built()}; {once}"

    def prepare(self, trial, inputs):
        import torch
        w, s, cache = trial.workload, trial.workload.shape, inputs.cache
        B, K, G, D, E = w.batch_size, s.num_kv_heads, s.group_ratio, s.head_dim, s.v_dim
        (begin, *firsts), (prefix, *kv_lens) = zip(*_ranges(w))
        table_BM = checked_table(inputs)
        prefix_table_1M = table_BM[:1, :prefix // cache.block_size].contiguous()
        decode, options = _kernel(trial)
        k, v = stored_sides(cache)
        packed = inputs.workspace("packed queries", 1, K * B * G, D, dtype=trial.torch_dtype)
        shared = inputs.workspace("prefix results", 1, K * B * G, E, dtype=torch.float32)
        shared_lse = inputs.workspace("prefix lse", 1, K * B * G, dtype=torch.float32)
        own_lse = inputs.workspace("own lse", B, K * G, dtype=torch.float32)
        options = dict(options, softcap=s.softcap, workspace=inputs.workspace)

        def by_sequence(x):
            """What lies as [K, B, G, …], as [B, K, G, …]."""
            return x.view(K, B, G, *x.shape[2:]).transpose(0, 1)

        def call():
            q_BQD = inputs.q_TQD
            by_sequence(packed).copy_(q_BQD.view(B, K, G, D))
            decode(packed, k, v, prefix_table_1M, (begin,), (prefix,), out_BQE=shared, lse_BQ=shared_lse, **options)
            out_BQE = torch.empty(B, K * G, E, dtype=torch.float32, device=trial.device)
            decode(q_BQD, k, v, table_BM, tuple(firsts), tuple(kv_lens), out_BQE=out_BQE, lse_BQ=own_lse, **options)
            # an empty part has LSE -inf and so weight 0; both are never empty, since a query sees itself
            weight_BKG = torch.sigmoid(by_sequence(shared_lse) - own_lse.view(B, K, G))
            out_BQE.view(B, K, G, E).lerp_(by_sequence(shared), weight_BKG[..., None])
            return out_BQE.to(trial.torch_dtype)
        return call

    def cost(self, trial, cache_bytes=0) -> Cost:
        """Beside the ideal: q packed, two results and LSE per query head, what the kernel keeps, block tables.

        All of it is written and read again; so are the weights of the merge, and what is rounded to 16 bits at last.
        """
        w, s, fmt, size = trial.workload, trial.workload.shape, trial.format, trial.layout.block_size
        ranges = _ranges(w)
        prefix_bytes, *own_bytes = (fmt.nbytes(end, s, first=first) for first, end in ranges)
        blocks = sum(-(-end // size) - first // size if size else 1 for first, end in ranges)
        rows = sum(w.q_lens) * s.num_q_heads
        q, part, lse = rows * s.head_dim * trial.itemsize, rows * s.v_dim * 4, rows * 4
        rounded = part if trial.itemsize < 4 else 0
        kept = [_kept(trial, w.batch_size * s.group_ratio, ranges[:1]), _kept(trial, s.group_ratio, ranges[1:])]
        read = (not_found(q, q, cache_bytes) + not_found(q, q + prefix_bytes, cache_bytes)       # packed; by the second
                + not_found(kept[0], prefix_bytes, cache_bytes) + not_found(kept[1], sum(own_bytes), cache_bytes)
                + not_found(part + lse, sum(own_bytes) + q + part, cache_bytes)
                + not_found(part + lse, part, cache_bytes)
                + 2 * not_found(lse, 2 * lse, cache_bytes) + not_found(rounded, 0, cache_bytes))
        cost = least_cost(trial, cache_bytes).plus(read=read + 4 * blocks, write=q + sum(kept) + 2 * part + 4 * lse
                                                   + rounded)
        if _on_gpu(trial):                              # tiles of 16 query heads at least, whether filled or not
            tokens = [end - first for first, end in ranges]
            tiles = -(-w.batch_size * s.group_ratio // 16) * tokens[0] + -(-s.group_ratio // 16) * sum(tokens[1:])
            cost = cost._replace(executed_flops=2 * 16 * s.num_kv_heads * (s.head_dim + s.v_dim) * tiles)
        return cost


def _on_gpu(trial) -> bool:
    return trial.device.startswith("cuda")


def _ranges(w) -> list[tuple[int, int]]:
    """(first, end) of the tokens of the prefix, then of each sequence's own; a window may leave nothing of the prefix.

    What every sequence sees of the prefix is the same, or why_not refuses.
    """
    prefix = w.shared_prefix
    return [(min(prefix, w.first_visible(0)), prefix), *((max(prefix, w.first_visible(b)), n)
                                                         for b, n in enumerate(w.kv_lens))]


def _kernel(trial):
    """The device's decode kernel and the options of its own."""
    if _on_gpu(trial):
        from kvlab.kernels import triton_decode
        return triton_decode.decode, {}
    return cpu_decode.decode, dict(threads=trial.threads)


def _kept(trial, group: int, ranges) -> int:
    """Bytes that the kernel writes for itself and reads again: results of parts of the tokens, on a CPU q in fp32."""
    s, lengths = trial.workload.shape, tuple(end - first for first, end in ranges)
    rows = len(ranges) * s.num_kv_heads * group
    if not _on_gpu(trial):
        count = cpu_decode.plan(slots_per_block(trial), s.num_kv_heads, lengths, trial.threads)[1]
        return 4 * rows * (s.head_dim + count * (s.v_dim + 2))
    config = candidates(group, [(kind_of(c), width) for c, width in trial.format.sides(s)], trial.itemsize)[0]
    programs = len(ranges) * s.num_kv_heads * -(-group // config.rows)
    count = splits(programs, max(lengths), config.tokens, multiprocessors(trial.device))
    return 4 * rows * count * (s.v_dim + 1) if count > 1 else 0
