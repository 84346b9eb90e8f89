"""What outputs must be: the oracle on what the cache holds, a tolerance from data, inputs that find small faults."""
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from kvlab.attention import reference
from kvlab.probes._base import Bench, Broken, worst_row

SAMPLED_ROWS = 256          # query tokens checked of a long prefill, spread over its sequences, ends included
MULTIPLE = 4                # of the error that plain attention makes in the same dtype
# rounding units that are always allowed; in fp32 more, since a score of ten rounds by ten of them before its exp, and
# a lost token that decides still stands out a thousand times
LEAST = {"fp32": 32, "fp16": 8, "bf16": 8}


class Expected:
    """What the outputs of a bench's trials must be: one oracle per format, from one input copy as it is now."""

    def __init__(self, bench: Bench, original: bool = False, copy: int = 0):
        self.bench, self.original, self.copy, self.known = bench, original, copy, {}

    def rows(self, device):
        """Per sequence, the query tokens to check (None: all of them)."""
        import torch
        q_lens = self.bench.comparison.workload.q_lens
        if sum(q_lens) <= SAMPLED_ROWS:
            return None
        each = max(2, SAMPLED_ROWS // len(q_lens))
        return [torch.linspace(0, n - 1, min(n, each), device=device).round().long() for n in q_lens]

    def of(self, trial):
        """(fp64 output of the checked rows, their places in the packed output or None, tolerance) for the trial."""
        import torch
        if trial.kv_format not in self.known:
            inputs, w = self.bench.inputs_of(trial)[self.copy], self.bench.comparison.workload
            rows = self.rows(inputs.q_TQD.device)
            # the truth takes what is stored in fp32, or the variant that does not round it first would be charged
            k, v = (inputs.k, inputs.v) if self.original else _stored(inputs, torch.float32)
            exact = reference(w, inputs.q_BTQD, k, v, rows)
            plain = _head_by_head(w, inputs.q_BTQD, *_stored(inputs, trial.torch_dtype), rows, trial.torch_dtype)
            tolerance = max(MULTIPLE * worst_row(plain, exact), LEAST[trial.dtype] * torch.finfo(trial.torch_dtype).eps)
            places = None if rows is None else torch.cat(
                [r + sum(w.q_lens[:b]) for b, r in enumerate(rows)])
            self.known[trial.kv_format] = exact, places, tolerance
        return self.known[trial.kv_format]

    def judge(self, trial, output) -> tuple[float, float]:
        """(relative L2 error, tolerance of the worst row); raises Broken where the output is wrong."""
        exact, places, tolerance = self.of(trial)
        return self.bench.check(trial, output, exact, tolerance, places), tolerance


def _head_by_head(workload, q_BTQD, k, v, rows, dtype):
    """Plain attention in a low precision, one query head of each group at a time.

    A single query row is summed token after token, which errs most: an honest variant may do so, and must pass.
    """
    import torch
    shape = workload.shape
    one_of_each = replace(workload, shape=replace(shape, num_q_heads=shape.num_kv_heads))
    heads = [reference(one_of_each, [q[:, g::shape.group_ratio] for q in q_BTQD], k, v, rows, dtype)
             for g in range(shape.group_ratio)]
    return torch.stack(heads, dim=2).flatten(1, 2).double()


def _stored(inputs, dtype):
    """K and V of each sequence as the cache holds them, decoded to that dtype."""
    cache = inputs.cache
    pairs = [cache.format.decode(cache.gather(blocks, kv_len, b), cache.shape, dtype)
             for b, (blocks, kv_len) in enumerate(zip(_tables(inputs), inputs.kv_lens))]
    return [k for k, _ in pairs], [v for _, v in pairs]


def _tables(inputs) -> list[list[int]]:
    """The block table of each sequence, without what fills it up."""
    return [table[:-(-kv_len // inputs.cache.block_size)]
            for table, kv_len in zip(inputs.block_table.tolist(), inputs.kv_lens)]


def overwrite(inputs, k: Iterable, v: Iterable) -> None:
    """Put other K and V, one per sequence, in the place of those that the cache holds."""
    for b, (blocks, k_SKD, v_SKD) in enumerate(zip(_tables(inputs), k, v)):
        inputs.cache.write(inputs.cache.format.encode(k_SKD, v_SKD), blocks, b)


def decisive(inputs, workload, block_sizes: Iterable[int]) -> tuple[list, list]:
    """K and V, one per sequence, in which single tokens decide: first visible, middle, last of a block, newest.

    Their K points along the last query, so that each takes a good part of its weight. Over Gaussian K and V a token
    of a long context weighs less than bf16 rounds, and a kernel that loses one could not be told from a right one.
    """
    shape, prefix, planted = workload.shape, workload.shared_prefix, []
    for b, (q_TQD, k_SKD) in enumerate(zip(inputs.q_BTQD, inputs.k)):
        S, K = k_SKD.shape[0], shape.num_kv_heads
        toward_KD = q_TQD[-1].float().view(K, shape.group_ratio, -1).mean(1)
        scores = (toward_KD * toward_KD).sum(-1, keepdim=True) / shape.head_dim**0.5
        strong_KD = toward_KD * ((math.log(S) + 2) / scores.clamp_min(1e-3))
        first = workload.first_visible(b)
        edges = {max(first, (S - 1) // size * size - 1) for size in block_sizes}     # of the block before the newest
        own = sorted(t for t in {first, (first + S) // 2, S - 1} | edges if t >= prefix)
        k_SKD = k_SKD.clone()
        k_SKD[own] = strong_KD.to(k_SKD.dtype)
        if prefix:                                                   # what is shared must stay the same for all
            k_SKD[prefix // 2] = planted[0][prefix // 2] if planted else strong_KD.to(k_SKD.dtype)
        planted.append(k_SKD)
    return planted, inputs.v


@contextmanager
def read_only(inputs) -> Iterator[None]:
    """Copy 0 for the length of a trial's own code: Broken if that writes into it, and put right for the others.

    q is compared; K and V, which may be large, are known by torch's own count of writes.
    """
    import torch
    kept, arrays = inputs.q_TQD.clone(), inputs.cache.arrays
    writes = [a._version for a in arrays]
    written = []
    try:
        yield
    finally:
        if not torch.equal(inputs.q_TQD, kept):
            written.append("q")
            inputs.q_TQD.copy_(kept)
        if writes != [a._version for a in arrays]:
            written.append("the cache")
            overwrite(inputs, inputs.k, inputs.v)
    if written:
        raise Broken(f"the call writes into its inputs ({' and '.join(written)}), which the other trials share")
