"""The KV cache of a whole decoder: one kv.cache.KVCache per layer, block tables for its sequences, one Variant to read.

Legend: T = query token, S = kv token, Q = query head, K = kv head, D = head_dim, E = v_head_dim, R = residual.
"""
from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvlab.attention import Inputs, VariantRef, trial
from kvlab.kv.block_pool import BlockPool
from kvlab.kv.cache import KVCache, Layout
from kvlab.kv.formats import KVFormat, kv_format
from kvlab.shapes import AttentionShape, Workload

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def formats_of(given, num_layers: int) -> tuple[KVFormat, ...]:
    """One format per layer, with its scales, from a name, a KVFormat, or a sequence of either."""
    formats = _per_layer(given, num_layers)
    if uncalibrated := [fmt.name for fmt in formats if fmt.static]:
        raise ValueError(f"{uncalibrated[0]} has static scales: find them first, formats = calibrated(decoder, "
                         f"{uncalibrated[0]!r}, token ids of another text)")
    return tuple(formats)


def _per_layer(given, num_layers: int) -> list[KVFormat]:
    if isinstance(given, str | KVFormat):
        given = [given] * num_layers
    if len(given) != num_layers:
        raise ValueError(f"{len(given)} KV formats for {num_layers} layers; give one for all, or one per layer")
    return [kv_format(one) if isinstance(one, str) else one for one in given]


class Attention:
    """Calls a Variant on a layer's cache: the same code that kvlab measures, one Trial per layer and step."""

    def __init__(self, shapes: Sequence[AttentionShape], formats, dtype, device: str):
        self.shapes, self.formats = tuple(shapes), formats_of(formats, len(shapes))
        self.dtype, self.device = DTYPES[dtype], str(device)
        for layer, (shape, fmt) in enumerate(zip(self.shapes, self.formats)):
            if why := fmt.why_not(shape):
                raise ValueError(f"layer {layer} cannot keep its K and V as {fmt.name}: {why}")
        self._runnable: set = set()
        self._scratch: dict = {}

    def depends_on_later(self, layer: int) -> bool:
        """Whether what a layer stores of a token changes with the tokens after it."""
        return self.formats[layer].depends_on_later(self.shapes[layer])

    def _attend(self, layer: int, variant: VariantRef, layout: Layout, inputs: Inputs) -> Tensor:
        import torch
        shape, fmt = self.shapes[layer], inputs.cache.format
        one = trial(variant, Workload(shape, inputs.q_lens, inputs.kv_lens), kv_format=fmt.name, layout=layout,
                    dtype=self.dtype, device=self.device, threads=torch.get_num_threads())
        kind = (shape, fmt.name, variant, frozenset((q == 1, q == n, n > (shape.window or n))
                                                    for q, n in zip(inputs.q_lens, inputs.kv_lens)))
        if kind not in self._runnable:                  # once for every kind of call, not for every length
            if why := one.why_not():
                raise ValueError(f"layer {layer}: {variant.label} cannot compute this call: {why}")
            self._runnable.add(kind)
        inputs.scratch = self._scratch                                      # one workspace for all layers
        return variant.load().prepare(one, inputs)()


class DecoderCache(Attention):
    """K and V of a batch of sequences in all layers; kv_lens are the tokens that each holds.

    Contiguous (layout without block_size): each sequence has room for `tokens` tokens. Paged: blocks come from a
    BlockPool of num_blocks blocks, by default as many as all sequences can fill. Made by Decoder.cache.
    Where what is stored of a token changes with those behind it (groups of tokens, a residual), a step of several
    tokens attends to its own in full precision and to earlier ones as stored, as KIVI's code does with a prompt.
    """

    def __init__(self, shapes: Sequence[AttentionShape], formats, variant: VariantRef, layout: Layout, *, tokens: int,
                 sequences: int, num_blocks: int | None, dtype, device: str):
        super().__init__(shapes, formats, dtype, device)
        self.variant, self.layout, self.tokens = variant, layout, tokens
        self.kv_lens = [0] * sequences
        self._half_done: set[int] = set()                # sequences of a step that was begun and not committed
        self.pool: BlockPool | None = None
        whole = Workload(shapes[0], (1,), (tokens,))
        for layer, fmt in enumerate(self.formats):
            if why := layout.why_not(whole, fmt):
                raise ValueError(f"layer {layer}: {why}")
        if layout.block_size is None:
            if num_blocks is not None:
                raise ValueError("num_blocks needs a paged layout: give a block_size, or the variant paged")
            self.tables = [[b] for b in range(sequences)]
        else:
            room = 1 + sequences * -(-tokens // layout.block_size)
            self.pool = BlockPool(room if num_blocks is None else num_blocks, layout.block_size)
            self.tables = [[] for _ in range(sequences)]
            order = torch.arange(1, self.pool.num_blocks)
            if layout.page_order == "random":
                order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(0))]
            self._places = [0, *order.tolist()]          # where in the storage each of the pool's blocks lies
        self.layers = []
        for shape, fmt in zip(self.shapes, self.formats):
            group = fmt.token_group(shape)
            blocks, size = ((self.pool.num_blocks, layout.block_size) if self.pool else
                            (sequences, -(-tokens // group) * group))
            self.layers.append(KVCache(shape, fmt, blocks, size, order=layout.order, device=self.device,
                                       sequences=sequences))

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated, in all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def stored_bytes(self) -> int:
        """Bytes that hold the sequences' own tokens, in all layers, scales included."""
        return sum(fmt.nbytes(n, shape) for shape, fmt in zip(self.shapes, self.formats) for n in self.kv_lens if n)

    def begin(self, q_lens: Sequence[int], sequences: Sequence[int]) -> None:
        """Make room for q_lens new tokens of those sequences.

        Raises OutOfBlocks where the pool runs dry; the sequences then hold what they held, and may keep blocks that
        were made ready for this step, which serve the next. A sequence whose last step failed half way is refused.
        """
        self._scratch.clear()
        for n, b in zip(q_lens, sequences):
            if b in self._half_done:
                raise ValueError(f"the last step of sequence {b} failed half way, so that its layers hold different "
                                 f"tokens; free({b}) and give it its tokens anew")
            if self.kv_lens[b] + n > self.tokens:
                raise ValueError(f"sequence {b} would hold {self.kv_lens[b] + n} tokens, and this cache was made for "
                                 f"{self.tokens}; make one with room for more")
            if self.pool:
                self.pool.append(self.tables[b], self.kv_lens[b], n)
        self._q_lens, self._sequences = tuple(q_lens), list(sequences)
        self._half_done.update(sequences)
        self._placed = {b: [self._places[i] for i in self.tables[b]] if self.pool else self.tables[b]
                        for b in sequences}
        self._tables_BM: dict[tuple, Tensor] = {}                    # of the step, the same for every layer

    def attend(self, layer: int, q_TQD: Tensor, k_TKD: Tensor, v_TKE: Tensor) -> Tensor:
        """Store the step's new K and V of a layer, then attend over all its tokens; returns [T, Q, E]."""
        cache, q_lens = self.layers[layer], self._q_lens
        k = k_TKD.split(q_lens)
        v = [None] * len(k) if self.shapes[layer].v_in_k else v_TKE.split(q_lens)
        several = [i for i, n in enumerate(q_lens) if n > 1 and self.depends_on_later(layer)]
        whole = [self._with_earlier(layer, self._sequences[i], k[i], v[i]) for i in several]
        for b, k_own, v_own in zip(self._sequences, k, v):
            if self.kv_lens[b]:
                cache.append(k_own, v_own, self._placed[b], self.kv_lens[b], b)
            else:
                cache.write(cache.format.encode(k_own, v_own), self._placed[b], b)
        if not several:
            return self._over(layer, q_TQD, list(range(len(q_lens))))
        out, q = [None] * len(q_lens), q_TQD.split(q_lens)
        for i, (k_SKD, v_SKE) in zip(several, whole):
            out[i] = self._attend(layer, self.variant, self.layout,
                                  alone(self.shapes[layer], kv_format(self.dtype), self.layout, q[i], k_SKD, v_SKE))
        if single := [i for i in range(len(q_lens)) if i not in several]:
            outs = self._over(layer, torch.cat([q[i] for i in single]), single).split([q_lens[i] for i in single])
            for i, one in zip(single, outs):
                out[i] = one
        return torch.cat(out)

    def _over(self, layer: int, q_TQD: Tensor, chosen: list[int]) -> Tensor:
        """Attention of some of the step's sequences over what is stored."""
        sequences = [self._sequences[i] for i in chosen]
        q_lens = tuple(self._q_lens[i] for i in chosen)
        kv_lens = tuple(self.kv_lens[b] + n for n, b in zip(q_lens, sequences))
        return self._attend(layer, self.variant, self.layout, Inputs(
            q_TQD, q_lens, kv_lens, self._of(self.layers[layer], sequences), self._block_table(sequences), seed=0))

    def _with_earlier(self, layer: int, sequence: int, k_TKD: Tensor, v_TKE: Tensor | None):
        """A sequence's K and V: earlier tokens as they are stored, the new ones as they come."""
        n, cache = self.kv_lens[sequence], self.layers[layer]
        if not n:
            return k_TKD, v_TKE
        k_SKD, v_SKE = cache.format.decode(cache.gather(self._placed[sequence], n, sequence), cache.shape, k_TKD.dtype)
        return torch.cat([k_SKD, k_TKD]), None if v_TKE is None else torch.cat([v_SKE, v_TKE])

    def commit(self) -> None:
        """The step is done: its tokens count."""
        for n, b in zip(self._q_lens, self._sequences):
            self.kv_lens[b] += n
        self._half_done.difference_update(self._sequences)

    def free(self, sequence: int) -> None:
        """Forget a sequence and give its blocks back."""
        self.kv_lens[sequence] = 0
        self._half_done.discard(sequence)
        if self.pool:
            self.pool.free(self.tables[sequence])
            self.tables[sequence] = []

    def _block_table(self, sequences: list[int]) -> Tensor:
        if (chosen := tuple(sequences)) not in self._tables_BM:
            # of a contiguous cache `_of` chooses the blocks themselves, one each
            tables = [self._placed[b] for b in sequences] if self.pool else [[i] for i in range(len(sequences))]
            longest = max(map(len, tables))
            self._tables_BM[chosen] = torch.tensor([t + [0] * (longest - len(t)) for t in tables], device=self.device)
        return self._tables_BM[chosen]

    def _of(self, cache: KVCache, chosen: list[int]) -> KVCache:
        """The cache as a batch of those sequences alone: what belongs to one sequence each is chosen."""
        if chosen == list(range(len(self.kv_lens))):
            return cache
        if chosen == list(range(chosen[0], chosen[-1] + 1)):
            chosen = slice(chosen[0], chosen[-1] + 1)                # a view; anything else is copied
        part = copy.copy(cache)
        if not self.pool:
            part.k_arrays, part.v_arrays = (tuple(a[chosen] for a in side) for side in (cache.k_arrays, cache.v_arrays))
        part.k_tail, part.v_tail = (None if tail is None else tail[chosen] for tail in (cache.k_tail, cache.v_tail))
        return part


def alone(shape: AttentionShape, fmt: KVFormat, layout: Layout, q_TQD: Tensor, k_SKD: Tensor,
           v_SKE: Tensor | None) -> Inputs:
    """The newest tokens of one sequence over its whole K and V, stored for this one call."""
    S, device = len(k_SKD), str(q_TQD.device)
    size = layout.block_size or S
    blocks = list(range(-(-S // size)))
    cache = KVCache(shape, fmt, len(blocks), size, order=layout.order, device=device)
    cache.write(fmt.encode(k_SKD, v_SKE), blocks)
    return Inputs(q_TQD, (len(q_TQD),), (S,), cache, torch.tensor([blocks], device=device), seed=0)


def calibrated(decoder, given, ids: Tensor) -> tuple[KVFormat, ...]:
    """One format per layer with the static scales that a pass over a calibration text finds, in full precision.

    ids: token ids of a text that is not evaluated. Formats without static scales are returned as they are.
    """
    if len(ids) == 0:
        raise ValueError("the calibration text is empty; give token ids of a text of some hundred tokens")
    found = _per_layer(given, decoder.config.num_layers)

    def observe(layer, q_TQD, k_TKD, v_TKE):
        found[layer] = found[layer].calibrate(k_TKD, None if decoder.config.shape(layer).v_in_k else v_TKE)
    decoder.hidden([ids], decoder.teacher(), observe=observe)
    return tuple(found)
