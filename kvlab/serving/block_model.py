"""The blocks of a paged KV cache, as an engine counts them: groups of layers that draw from one pool.

One block is `layers of a group` pages of one size. Layers of one kind (full, sliding, …) form groups of g layers, g
being the count of the rarest kind; every group has its own block table, and all tables draw block ids from one pool. A
page holds block_size tokens of one layer, or the whole recurrent state of one linear layer, padded to that size. All
lengths are tokens, all sizes bytes of ONE tensor-parallel rank.

Source: vLLM 0.32 v1/kv_cache_interface.py, v1/core/kv_cache_utils.py (groups, pages, admission, capacity) and
platforms/interface.py (block size of hybrids). The null block is in the pool: vLLM counts it in its log line, too.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil

from kvlab.catalog import rows
from kvlab.kv.sizing import BLOCK_SIZE, MAX_BATCHED_TOKENS, layer_bytes
from kvlab.shapes import LayerSpec, ModelSpec, positive

WORDINGS = ("blocks", "grouped", "concurrency")
# One latent of sparse MLA in fp8 (512 fp8 + 4 fp32 scales + 64 bf16), and the indexer's key beside it (128 fp8 + a
# fp32 scale). Source: vLLM 0.32 v1/attention/backends/mla/flashmla_sparse.py; SGLang's DSA pool stores the same.
DS_MLA_BYTES, INDEXER_BYTES = 656, 132


@dataclass(frozen=True, slots=True)
class Group:
    """Layers with one block table. page_bytes: one block of one layer (the largest where layers differ in width)."""
    kind: str
    layers: int
    block_size: int
    page_bytes: int
    window: int | None = None

    def blocks(self, length: int, in_flight: int, states: int) -> int:
        """Blocks that one sequence of that length holds at most in this group."""
        if self.kind == "linear":
            return states
        if self.kind == "sliding" and self.window is not None:
            return ceil(min(self.window - 1 + in_flight, length) / self.block_size) + 1
        if self.kind == "chunked" and self.window is not None:
            return ceil(min(self.window + in_flight, length) / self.block_size)
        return ceil(length / self.block_size)


@dataclass(frozen=True, slots=True)
class BlockModel:
    """Groups, bytes of one block over a whole rank, and what follows for a pool.

    block_size: tokens per block of the engine's setting, after it was enlarged to hold a linear layer's state.
    stage_block_bytes: bytes of one block on each pipeline stage; block_bytes is the largest of them.
    states: blocks that each linear group holds per sequence.
    """
    model: str
    groups: tuple[Group, ...]
    block_size: int
    block_bytes: int
    stage_block_bytes: tuple[int, ...]
    max_len: int
    in_flight: int
    states: int
    note: str = ""

    def blocks_per_request(self, length: int | None = None) -> int:
        """Blocks that one sequence of `length` tokens (None: max_len) holds at most, over all groups."""
        length = self.max_len if length is None else length
        positive(length=length)
        return sum(group.blocks(length, self.in_flight, self.states) for group in self.groups)

    def blocks(self, pool_bytes: float | Sequence[float]) -> int:
        """Blocks that fit a pool, the null block included; of several ranks' pools, the fewest.

        With pipeline stages, one pool for all of them or one per stage, in order.
        """
        stages = self.stage_block_bytes
        pools = list(pool_bytes) if isinstance(pool_bytes, Sequence) else [pool_bytes] * len(stages)
        if len(stages) == 1:
            stages = stages * len(pools)
        if len(pools) != len(stages):
            raise ValueError(f"{len(pools)} pools for {len(stages)} pipeline stages; give one for all, or one each")
        return max(0, min(int(pool // size) for pool, size in zip(pools, stages)))

    def concurrency(self, blocks: int) -> float:
        """Sequences of max_len tokens that so many blocks hold."""
        return blocks / self.blocks_per_request()

    def tokens(self, blocks: int, wording: str = "concurrency") -> int:
        """What an engine's line "KV cache size: N tokens" says of so many blocks.

        blocks: blocks × block_size (vLLM's words until hybrids had groups). grouped: blocks ÷ groups × block_size, each
        rounded down (vLLM 0.9 to 0.20). concurrency: concurrency × max_len, rounded down (since 0.21).
        """
        if wording == "blocks":
            return blocks * self.block_size
        if wording == "grouped":
            return blocks // len(self.groups) * self.block_size
        if wording == "concurrency":
            return int(self.concurrency(blocks) * self.max_len)
        raise ValueError(f"wording {wording!r} is unknown; allowed: {', '.join(WORDINGS)}")


@dataclass(frozen=True, slots=True)
class _Pages:
    """Layers of one kind before they are split into groups: bytes of one block of one layer, or of one state."""
    kind: str
    layers: int
    unit_bytes: int
    window: int | None = None


def block_model(spec: ModelSpec, *, kv_format: str = "bf16", block_size: int = BLOCK_SIZE, tp: int = 1,
                pp: int | Sequence[int] = 1, max_len: int, max_batched_tokens: int = MAX_BATCHED_TOKENS,
                in_flight_batches: int = 1, speculative_tokens: int = 0, draft_layers: int = 0,
                prefix_caching: bool = True, state_dtype_bytes: int | None = None, hybrid: bool = True) -> BlockModel:
    """The blocks of a model's cache on one rank.

    kv_format: a KV format's name ("bf16", "fp8_e4m3", "int8/token", "k16v8" …; scales per token are counted), or
    "fp8_ds_mla". pp: pipeline stages, or the layers of each. in_flight_batches: steps whose tokens a window must keep
    (2 where scheduling is asynchronous). speculative_tokens: of MTP or a draft, which lengthen the convolution state
    and take a state block each; draft_layers: layers it adds to the model's own full ones. prefix_caching: linear
    groups keep one state more. state_dtype_bytes: of the recurrent state (None: the model's own). hybrid=False:
    windows are stored whole, in one group, as an engine without groups does.
    ValueError for lengths, a tp that does not fit the heads, a block size that splits a scale group, no layers that
    cache. Source: this module's head.
    """
    positive(block_size=block_size, max_len=max_len, max_batched_tokens=max_batched_tokens, tp=tp,
             in_flight_batches=in_flight_batches)
    if speculative_tokens < 0 or draft_layers < 0:
        raise ValueError("speculative_tokens and draft_layers must be at least 0")
    attention = [_pages(spec, layer, kv_format, block_size, tp) for layer in spec.layers if layer.kind != "linear"]
    if draft_layers:
        attention = _with_draft(attention, draft_layers)
    linear, state_note = _states(spec, tp, speculative_tokens, state_dtype_bytes)
    if not hybrid:
        attention = [replace(pages, kind="full", window=None) for pages in attention]
    if not attention and not linear:
        raise ValueError(f"{spec.name} has no layer that caches anything: there are no blocks to count")
    own_block = block_size
    if linear and attention:
        block_size = _block_of_states(attention, linear, block_size)
    groups, block_bytes = _grouped(attention, linear, block_size, own_block)
    stages = _stages(groups, block_bytes, spec.num_layers + draft_layers, pp)
    return BlockModel(spec.name, tuple(groups), block_size, max(stages), stages, max_len,
                      in_flight=max_batched_tokens * in_flight_batches,
                      states=(2 if prefix_caching else 1) + speculative_tokens,
                      note="; ".join(filter(None, (spec.approximate, state_note))))


def token_bytes(spec: ModelSpec, kv_format: str = "bf16", tp: int = 1, block_size: int = BLOCK_SIZE) -> float:
    """Bytes that one token takes over all layers of a rank, windows stored whole, states left out."""
    attention = [_pages(spec, layer, kv_format, block_size, tp) for layer in spec.layers if layer.kind != "linear"]
    return sum(pages.layers * pages.unit_bytes for pages in attention) / block_size


def _pages(spec: ModelSpec, layer: LayerSpec, kv_format: str, block_size: int, tp: int) -> _Pages:
    """Bytes of one block of block_size tokens, so that scales shared by several tokens are whole."""
    indexer = INDEXER_BYTES if layer.kind == "mla" and spec.attention_type == "MLA + sparse" else 0
    if kv_format == "fp8_ds_mla":
        if layer.kind != "mla":
            raise ValueError(f"fp8_ds_mla stores a latent; {spec.name} has {layer.kind} layers")
        return _Pages("mla", layer.count, (DS_MLA_BYTES + indexer) * block_size)
    whole = replace(layer, kind="full", window=None) if layer.window else layer
    stored = layer_bytes(whole, block_size, kv_format, tp, block_size)
    return _Pages(layer.kind, layer.count, stored + indexer * block_size, layer.window)


def _with_draft(attention: list[_Pages], draft_layers: int) -> list[_Pages]:
    """A draft's (MTP's) layers attend to everything: they join the model's full layers, of the same width."""
    at = next((i for i, pages in enumerate(attention) if pages.kind in ("full", "mla")), None)
    if at is None:
        raise ValueError("draft_layers needs a model with full layers, whose width they take")
    attention[at] = replace(attention[at], layers=attention[at].layers + draft_layers)
    return attention


@cache
def _linear_rows() -> dict[str, dict[str, str]]:
    return {row["model"]: row for row in rows("linear_states.csv")}


def _states(spec: ModelSpec, tp: int, speculative: int, itemsize: int | None) -> tuple[list[_Pages], str]:
    """State pages of one rank: recurrent state and convolution state (16 bit), each shared among the ranks.

    Source: data/linear_states.csv; elsewhere the spec's recurrent bytes alone, which the note says.
    """
    row, found, note = _linear_rows().get(spec.name), [], ""
    for layer in spec.layers:
        if layer.kind != "linear" or not (layer.state_bytes or row):
            continue
        if row is None:
            found.append(_Pages("linear", layer.count, layer.state_bytes // tp * (itemsize or 4) // 4))
            note = "the convolution states of the linear layers are not counted"
            continue
        if not layer.state_bytes and any(other.state_bytes for other in spec.layers):
            continue                                        # an MLP block of a hybrid: it caches nothing
        width = int(row["state_itemsize"]) if itemsize is None else itemsize
        taps = int(row["conv_kernel"]) - 1 + speculative
        found.append(_Pages("linear", layer.count, int(row["state_elements"]) // tp * width
                            + int(row["conv_channels"]) // tp * taps * 2))
    return found, note


def _block_of_states(attention: list[_Pages], linear: list[_Pages], block_size: int) -> int:
    """Tokens of a block whose attention page holds a whole state: the next multiple of the block size."""
    step = max(block_size, 128) if any(pages.kind == "mla" for pages in attention) else block_size
    widest = max(pages.unit_bytes for pages in attention)
    state = max(pages.unit_bytes for pages in linear)
    return max(block_size, step * ceil(state / (widest * step // block_size)))


def _grouped(attention: list[_Pages], linear: list[_Pages], block_size: int, own_block: int) -> tuple[list[Group], int]:
    """Groups, and bytes of one block. own_block: the block size that the pages of attention were counted with."""
    grown = [replace(pages, unit_bytes=pages.unit_bytes * block_size // own_block) for pages in attention]
    kinds = {("full" if pages.kind == "mla" else pages.kind, pages.window) for pages in grown}
    if not linear and len(kinds) == 1:                      # one group, also where layers differ in width
        page = max(pages.unit_bytes for pages in grown)
        only = Group(grown[0].kind, sum(pages.layers for pages in grown), block_size, page, grown[0].window)
        return [only], sum(pages.layers * pages.unit_bytes for pages in grown)
    page = max(pages.unit_bytes for pages in grown + linear)
    alike: dict[tuple, int] = {}
    for pages in grown + linear:
        # A narrower page grows to the widest one's bytes by holding more tokens, or is padded if that is no multiple.
        more = 1 if pages.kind == "linear" or page % pages.unit_bytes else page // pages.unit_bytes
        key = (pages.kind, pages.window, block_size * more)
        alike[key] = alike.get(key, 0) + pages.layers
    fewest, most = min(alike.values()), max(alike.values())
    size = most if most < 1.5 * fewest else fewest
    groups = [Group(kind, size, tokens, page, window)
              for (kind, window, tokens), layers in alike.items() for _ in range(ceil(layers / size))]
    return groups, size * page


def _stages(groups: Sequence[Group], block_bytes: int, layers: int, pp: int | Sequence[int]) -> tuple[int, ...]:
    """Bytes of one block on each pipeline stage: its share of every group's layers, rounded up to whole layers.

    A number of stages: equal parts, what is left over goes to the last stages but one (vLLM's get_pp_indices).
    """
    if isinstance(pp, int):
        positive(pp=pp)
        if pp == 1:
            return (block_bytes,)
        if pp > layers:
            raise ValueError(f"pp={pp} stages for {layers} layers; allowed: 1 to {layers}")
        parts = [layers // pp] * pp
        for back in range(2, layers % pp + 2):
            parts[-back] += 1
    else:
        parts = list(pp)
        positive(**{f"layers of stage {i}": part for i, part in enumerate(parts)})
        if sum(parts) != layers:
            raise ValueError(f"the stages hold {sum(parts)} layers, and the model has {layers}")
    per_layer, size = groups[0].page_bytes, groups[0].layers
    if len(groups) == 1:
        return tuple(-(-block_bytes * part // layers) for part in parts)
    return tuple(per_layer * ceil(size * part / layers) for part in parts)
