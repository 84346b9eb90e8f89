"""The cache that scores a text: each token attends to what an engine would hold when that token is the newest.

Legend: T = token, S = kv token, Q = query head, K = kv head, D = head_dim, E = v_head_dim, M = block of a sequence,
R = residual.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvlab.attention import Inputs, VariantRef
from kvlab.kv.cache import KVCache, Layout
from kvlab.kv.formats import KVFormat
from kvlab.kv.formats._base import Codec
from kvlab.model.cache import Attention, alone
from kvlab.shapes import AttentionShape

if TYPE_CHECKING:
    from torch import Tensor


class TeacherCache(Attention):
    """For scoring a text: every token attends to the cache as it stands when that token is the newest.

    Where a token's stored bytes depend on it alone, the whole text is one call. Where tokens share a scale, or the
    newest stay in full precision, each token is a sequence of its own, over blocks that are shared as far as they no
    longer change: the same as decoding the text token by token, and no token sees what later ones do to its group.
    variant None: sdpa, and paged for those formats.
    """

    def __init__(self, shapes: Sequence[AttentionShape], formats, variant: VariantRef | None, *, dtype, device: str):
        super().__init__(shapes, formats, dtype, device)
        self.kv_lens = [0]
        self.variants = tuple(variant or VariantRef("paged" if self.depends_on_later(layer) else "sdpa")
                              for layer in range(len(self.shapes)))

    def begin(self, q_lens: Sequence[int], sequences: Sequence[int]) -> None:
        if len(q_lens) != 1 or self.kv_lens[0]:
            raise ValueError("a teacher's cache takes one whole text, once; make another for the next")
        self._scratch.clear()
        self._tokens = q_lens[0]

    def commit(self) -> None:
        self.kv_lens = [self._tokens]

    def attend(self, layer: int, q_TQD: Tensor, k_TKD: Tensor, v_TKE: Tensor) -> Tensor:
        """Causal attention of all tokens, each over the stored K and V as they were at its time; [T, Q, E]."""
        shape, fmt, variant, T = self.shapes[layer], self.formats[layer], self.variants[layer], self._tokens
        v_TKE = None if shape.v_in_k else v_TKE
        if self.depends_on_later(layer):
            cache, tables = snapshots(shape, fmt, k_TKD, v_TKE, self.device)
            layout = Layout(cache.block_size)
            inputs = Inputs(q_TQD, (1,) * T, tuple(range(1, T + 1)), cache, tables, seed=0)
        else:
            layout = variant.default_layout
            inputs = alone(shape, fmt, layout, q_TQD, k_TKD, v_TKE)
        return self._attend(layer, variant, layout, inputs)


def snapshots(shape: AttentionShape, fmt: KVFormat, k_TKD: Tensor, v_TKE: Tensor | None,
              device: str) -> tuple[KVCache, Tensor]:
    """A text's cache at every length: T sequences, the t-th holding the first t + 1 tokens; (cache, block tables).

    Where every group of tokens waits in a residual until it is full, what has been encoded never changes: all share the
    same blocks, and each has its own tail. Else a group is rounded anew with each token that joins it, as
    KVCache.append does: each has its own last block.
    """
    T, group = k_TKD.shape[0], fmt.token_group(shape)
    size = -(-16 // group) * group
    if all(codec.residual or codec.token_group(width) == 1 for codec, width in fmt.sides(shape)):
        cache = KVCache(shape, fmt, 1 + -(-T // size), size, device=device, sequences=T)
        shared = list(range(1, cache.num_blocks))
        sides = [(codec, tail, x_TKD) for (codec, _), tail, x_TKD in
                 zip(fmt.sides(shape), (cache.k_tail, cache.v_tail), (k_TKD, v_TKE))]
        encoded = [x_TKD if tail is None else _once_encoded(codec, tail, x_TKD) for codec, tail, x_TKD in sides]
        cache.write(fmt.encode(*encoded, *[None] * shape.v_in_k), shared)
        for codec, tail, x_TKD in sides:
            if tail is not None:
                _fill(tail, codec, x_TKD)
        return cache, torch.tensor(shared, device=device).expand(T, -1)
    tails = any(codec.residual for codec, _ in fmt.sides(shape))
    cache, tables = KVCache(shape, fmt, 1 + T, size, device=device, sequences=T if tails else 1), []
    for t in range(T):
        own, full = 1 + t, [1 + end for end in range(size - 1, t, size)]    # full: those before, as they were when full
        if t % size:
            for array in (*cache.k_arrays, *cache.v_arrays):
                array[own] = array[own - 1]
        for tail in (cache.k_tail, cache.v_tail):
            if tail is not None and t:
                tail[t] = tail[t - 1]
        cache.append(k_TKD[t:t + 1], None if v_TKE is None else v_TKE[t:t + 1], [*full, own], t, t if tails else 0)
        tables.append([*full, own] + [0] * (-(-T // size) - len(full) - 1))
    return cache, torch.tensor(tables, device=device)


def _once_encoded(codec: Codec, tail_TKRD: Tensor, x_TKD: Tensor) -> Tensor:
    """The tokens as they are encoded: rounded to the tail's dtype, but for those that are settled as they come."""
    waited_T = torch.tensor([codec.settled(t + 1) <= t for t in range(len(x_TKD))], device=x_TKD.device)
    return torch.where(waited_T[:, None, None], x_TKD.to(tail_TKRD.dtype).to(x_TKD.dtype), x_TKD)


def _fill(tail_TKRD: Tensor, codec: Codec, x_TKD: Tensor) -> None:
    """The tail of every length: the tokens that are not settled then."""
    T, device = len(x_TKD), x_TKD.device
    settled_T1 = torch.tensor([[codec.settled(t + 1)] for t in range(T)], device=device)
    token_TR = settled_T1 + torch.arange(tail_TKRD.shape[2], device=device)
    tail_TKRD[:] = x_TKD[token_TR.minimum(torch.arange(T, device=device)[:, None])].transpose(1, 2)
