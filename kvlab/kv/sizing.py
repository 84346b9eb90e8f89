"""Exact bytes of a model's KV cache, layer kind by layer kind, never one product. No torch.

All lengths are tokens and all results bytes. `fmt` is a KVFormat or its name ("bf16", "int8/token", …). One rule for
every layer: tokens kept × what the format stores for them, scales included, whole scale groups.
"""
from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvlab.kv.formats import KVFormat, kv_format
from kvlab.shapes import LayerSpec, ModelSpec, positive

BLOCK_SIZE = 16                 # tokens per block: vLLM's default on GPUs
# Tokens of one step: vLLM's server default on GPUs of at least 70 GiB other than A100 (H100, H200, MI300X); 2,048 on
# the others, A100 included. Its offline LLM() takes 16,384 and 8,192.
MAX_BATCHED_TOKENS = 8192


def first_kept(layer: LayerSpec, kv_len: int) -> int:
    """Index of the oldest token that the layer still stores when a sequence holds kv_len tokens.

    full, mla: 0. sliding: the last `window` tokens stay. chunked: the tokens of the last token's own chunk stay.
    Source: Mistral 7B (arXiv 2310.06825) for windows; Llama 4's attention_chunk_size for chunks.
    """
    if layer.kind == "sliding":
        return max(0, kv_len - layer.span)
    if layer.kind == "chunked":
        return (kv_len - 1) // layer.span * layer.span
    return 0


def layer_bytes(layer: LayerSpec, kv_len: int, fmt: KVFormat | str, tp: int = 1, block_size: int | None = None) -> int:
    """KV bytes of one sequence in ONE layer of the group (not × count), as one tensor-parallel rank holds them.

    kv_len in tokens. A linear layer holds no KV: 0. tp: a rank keeps max(1, num_kv_heads ÷ tp) heads; an MLA latent
    is whole on every rank. block_size: count the whole blocks that a paged cache allocates (None: own bytes only).
    Refuses kv_len or tp below 1, a tp that does not fit the heads, a block_size that splits a scale group.
    Source: tokens kept × (num_kv_heads × (head_dim + v_head_dim) × itemsize + scales), per KVFormat.nbytes.
    """
    positive(kv_len=kv_len)
    _check_tp([layer], tp)
    if layer.kind == "linear":
        return 0
    fmt = _format(fmt)
    shape = replace(layer.heads, num_q_heads=layer.num_q_heads // tp, num_kv_heads=max(1, layer.num_kv_heads // tp))
    first = first_kept(layer, kv_len)
    if block_size is not None:
        positive(block_size=block_size)
        group = fmt.token_group(shape)
        if block_size % group:
            raise ValueError(f"block_size={block_size} splits the scale groups of {fmt.name}; "
                             f"choose a multiple of {group}, or a format with one scale per token")
        first, kv_len = first // block_size * block_size, -(-kv_len // block_size) * block_size
    return fmt.nbytes(kv_len, shape, first)


def kv_bytes(model: ModelSpec, kv_len: int, fmt: KVFormat | str, tp: int = 1, block_size: int | None = None) -> int:
    """KV bytes of one sequence over all layers, as one tensor-parallel rank holds them; recurrent state not counted.

    With tp=1 that is the sequence's own bytes; tp × the per-rank bytes is what all ranks hold together, copies
    included. Refuses what layer_bytes refuses.
    Source: sum over the layer groups of count × layer_bytes.
    """
    fmt = _format(fmt)
    _check_tp(model.layers, tp)
    return sum(layer.count * layer_bytes(layer, kv_len, fmt, tp, block_size) for layer in model.layers)


def kv_bytes_per_token(model: ModelSpec, kv_len: int, fmt: KVFormat | str) -> int | float:
    """Growth per token: what each token after kv_len adds to one sequence's cache, on average over one whole cycle.

    The cycle is the format's: tokens until scales, groups and a full-precision tail stand alike again; one token for
    plain formats. A layer that has filled its window replaces tokens, one with chunks begins a new chunk, and over time
    both add 0; while the first window or chunk fills (kv_len up to it) they count as the layers without one. Never
    negative. Refuses kv_len below 1.
    Source: (layer_bytes(kv_len + cycle) − layer_bytes(kv_len)) ÷ cycle without windows, over the layers that grow.
    """
    positive(kv_len=kv_len)
    fmt = _format(fmt)
    growing = [replace(layer, kind="full") if layer.window else layer for layer in model.layers
               if layer.window is None or kv_len <= layer.window]
    cycle = _cycle(growing, fmt)
    added = sum(layer.count * (layer_bytes(layer, kv_len + cycle, fmt) - layer_bytes(layer, kv_len, fmt))
                for layer in growing)
    return added / cycle if added % cycle else added // cycle


def state_bytes(model: ModelSpec) -> int:
    """Constant recurrent (linear attention, SSM) state of one sequence, over all layers and all ranks once.

    It does not grow with kv_len and is not part of kv_bytes. Convolution states are not counted.
    Source: sum over the layer groups of count × LayerSpec.state_bytes.
    """
    return sum(layer.count * layer.state_bytes for layer in model.layers)


def engine_bytes(model: ModelSpec, kv_len: int, fmt: KVFormat | str, block_size: int = BLOCK_SIZE,
                 max_batched_tokens: int = MAX_BATCHED_TOKENS) -> int:
    """KV bytes that a paged engine sets aside at most for one sequence of kv_len tokens, over all ranks once.

    What it adds to kv_bytes: the last block is a whole one; a layer with a window keeps the tokens in flight beside it
    (up to max_batched_tokens in one step), since each of them still sees its own window, and one block more, since a
    window need not begin with a block; a layer with chunks likewise keeps the chunk and the tokens in flight. Where a
    format's scales span more tokens than a block, blocks are as long as both allow. Recurrent state, shared prefixes,
    the pool's own null block and CUDA graphs are not counted.
    Source: full and latent ceil(n ÷ B) blocks; sliding ceil(min(window − 1 + batched, n) ÷ B) + 1; chunked
    ceil(min(window + batched, n) ÷ B): the admission rule of vLLM 0.32 (kv_cache_interface.py).
    """
    positive(kv_len=kv_len, block_size=block_size, max_batched_tokens=max_batched_tokens)
    fmt, total = _format(fmt), 0
    for layer in model.layers:
        if layer.kind == "linear":
            continue
        held, extra = kv_len, 0
        if layer.kind == "sliding":
            held, extra = min(layer.span - 1 + max_batched_tokens, kv_len), 1
        elif layer.kind == "chunked":
            held = min(layer.span + max_batched_tokens, kv_len)
        block = _block(layer, fmt, block_size)
        total += layer.count * fmt.allocated(-(-held // block) + extra, block, 1, layer.heads)
    return total


def weight_bytes(model: ModelSpec, dtype_bytes: int | None = None) -> int | None:
    """Bytes of the weights: as a file stores them where one was read, else 2 (bf16) for every parameter.

    dtype_bytes: count that many per parameter instead. None where the parameter count is unknown.
    Source: model.weight_bytes, or parameters × dtype_bytes; the count's own source is in data/models.csv.
    """
    if dtype_bytes is None and model.weight_bytes is not None:
        return model.weight_bytes
    dtype_bytes = 2 if dtype_bytes is None else dtype_bytes
    positive(dtype_bytes=dtype_bytes)
    return None if model.params is None else model.params * dtype_bytes


def article_formula_bytes(model: ModelSpec, kv_len: int, batch_size: int = 1) -> int:
    """What the common one-line formula gives with the config's own numbers, right or wrong for this model.

    Right for uniform full attention in 16 bits only: it knows neither windows, latents, states, scales nor copies.
    Source: 2 × layers × num_kv_heads × head_dim × 2 bytes × kv_len × batch_size.
    """
    positive(kv_len=kv_len, batch_size=batch_size)
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * 2 * kv_len * batch_size


def crossover_tokens(model: ModelSpec, fmt: KVFormat | str = "bf16", dtype_bytes: int | None = None) -> int | None:
    """Cached tokens up to which the KV bytes do not exceed the weight bytes: the largest such kv_len (rounded down).

    For uniform full attention the tokens may be spread over any number of sequences. A layer with a window or chunks
    counts min(kv_len, window) tokens. None where the weights are unknown or the cache stops growing below them; 0 if
    the first token already exceeds them.
    Source: largest n with kv_bytes(n) ≤ weight_bytes.
    """
    weights, fmt = weight_bytes(model, dtype_bytes), _format(fmt)
    if weights is None or not any(layer.kind in ("full", "mla") for layer in model.layers):
        return None
    layers = [(replace(layer, kind="full") if layer.window else layer, layer.window) for layer in model.layers]

    def over(kv_len: int) -> int:
        lengths = ((layer, min(kv_len, most or kv_len)) for layer, most in layers)
        return sum(layer.count * layer_bytes(layer, held, fmt) for layer, held in lengths) if kv_len else 0
    # Bytes fall where a tail is encoded, which happens as a cycle ends: search among the ends, then inside the cycle.
    cycle = _cycle(model.layers, fmt)
    start = cycle * (bisect_right(range(weights + 1), weights, key=lambda n: over(n * cycle)) - 1)
    return start - 1 + bisect_right(range(start, start + cycle), weights, key=over)


@dataclass(frozen=True, slots=True)
class Size:
    """How large the cache of a batch of equally long sequences is.

    Bytes; None = unknown. kv_bytes and state_bytes: all sequences, over all ranks once. kv_bytes_per_token: growth
    per token of one sequence, on average over one cycle of the format (growth_note says what that means here).
    kv_bytes_per_rank: what each of tp ranks holds. weight_bytes: over all ranks once, weights_are says how counted.
    engine_bytes: all sequences in a paged engine's blocks, at most, with max_batched_tokens in flight beside windows
    and chunks. approximate: why not exact, "" = exact.
    """
    model: str
    kv_len: int
    batch_size: int
    kv_format: str
    tp: int
    kv_bytes: int
    kv_bytes_per_token: int | float
    state_bytes: int
    weight_bytes: int | None
    article_formula_bytes: int
    kv_bytes_per_rank: int
    kind: str
    method: str
    note: str
    engine_bytes: int
    engine_note: str
    max_batched_tokens: int
    growth_note: str
    weights_are: str
    approximate: str
    assumed: tuple[str, ...]


def size(model: ModelSpec, kv_len: int, batch_size: int = 1, kv_format: KVFormat | str = "bf16", tp: int = 1) -> Size:
    """KV cache of batch_size sequences of kv_len tokens each, with weights and the article's formula beside it.

    Refuses lengths, batch sizes and tp below 1, a tp that does not fit the heads, an unknown format.
    Source: kv_bytes, state_bytes, weight_bytes and article_formula_bytes of this module.
    """
    positive(kv_len=kv_len, batch_size=batch_size)
    fmt = _format(kv_format)
    note = f"approximate: {model.approximate}" if model.approximate else (
        "exact arithmetic on the configuration's layer kinds; nothing was allocated or measured")
    if any(layer.kind == "chunked" for layer in model.layers):
        note += "; chunked layers hold the current chunk only, so the cache is largest just before a chunk ends"
    if any(layer.kind == "mla" for layer in model.layers) and fmt.k != fmt.v:
        note += "; of an MLA layer the format of K alone counts, since V is a view of K"
    return Size(model.name, kv_len, batch_size, fmt.name, tp,
                kv_bytes=batch_size * kv_bytes(model, kv_len, fmt),
                kv_bytes_per_token=kv_bytes_per_token(model, kv_len, fmt),
                state_bytes=batch_size * state_bytes(model), weight_bytes=weight_bytes(model),
                article_formula_bytes=article_formula_bytes(model, kv_len, batch_size),
                kv_bytes_per_rank=batch_size * kv_bytes(model, kv_len, fmt, tp),
                kind="modelled", method="formula:layer_bytes", note=note,
                engine_bytes=batch_size * engine_bytes(model, kv_len, fmt), engine_note=_engine_note(model, fmt),
                max_batched_tokens=MAX_BATCHED_TOKENS, growth_note=_growth_note(model, kv_len, fmt),
                weights_are="16 bit" if model.weight_bytes is None else "as stored",
                approximate=model.approximate, assumed=model.assumed)


def _cycle(layers: Sequence[LayerSpec], fmt: KVFormat) -> int:
    """Tokens after which every layer has grown by the same bytes again."""
    return math.lcm(*(fmt.period(layer.shape) for layer in layers if layer.shape))


def _block(layer: LayerSpec, fmt: KVFormat, block_size: int) -> int:
    return math.lcm(block_size, fmt.token_group(layer.heads))


def _engine_note(model: ModelSpec, fmt: KVFormat) -> str:
    blocks = sorted({_block(layer, fmt, BLOCK_SIZE) for layer in model.layers if layer.kind != "linear"})
    note = f"at most, in blocks of {' and '.join(map(str, blocks)) or BLOCK_SIZE} tokens"
    if any(layer.window for layer in model.layers):
        note += (f"; windows with {MAX_BATCHED_TOKENS:,} batched tokens in flight, the default of vLLM's server on "
                 "H100-class GPUs")
    return note


def _growth_note(model: ModelSpec, kv_len: int, fmt: KVFormat) -> str:
    cycle = _cycle(model.layers, fmt)
    notes = [f"on average over {cycle:,} tokens"] if cycle > 1 else []
    if any(layer.window and kv_len > layer.window for layer in model.layers):
        notes.append("layers whose window or first chunk is full add nothing over time")
    return "; ".join(notes)


def _format(fmt: KVFormat | str) -> KVFormat:
    return kv_format(fmt) if isinstance(fmt, str) else fmt


def _fits(layer: LayerSpec, tp: int) -> bool:
    return layer.kind == "linear" or layer.num_q_heads % tp == 0 and (
        layer.num_kv_heads % tp == 0 or tp % layer.num_kv_heads == 0)


def _check_tp(layers: Sequence[LayerSpec], tp: int) -> None:
    positive(tp=tp)
    if not all(_fits(layer, tp) for layer in layers):
        most = max(layer.num_q_heads for layer in layers)
        allowed = [n for n in range(1, most + 1) if all(_fits(layer, n) for layer in layers)]
        raise ValueError(f"tp={tp} does not fit the heads: it must divide the query heads, and divide or be a multiple "
                         f"of the KV heads; allowed tp: {', '.join(map(str, allowed))}")
