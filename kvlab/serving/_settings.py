"""How an engine is started: what may be set, vLLM's own defaults for the rest; and how many requests blocks hold."""
from __future__ import annotations

from dataclasses import dataclass, replace

from kvlab.catalog.gpus import GPUSpec
from kvlab.kv.sizing import BLOCK_SIZE
from kvlab.serving._budget import UTIL, device_memory
from kvlab.serving._weights import BITS
from kvlab.serving.block_model import BlockModel, block_model
from kvlab.shapes import ModelSpec, positive
from kvlab.units import GiB

MOST_GIB = 2**30                # of what is given in GiB: an exbibyte

@dataclass(frozen=True, slots=True)
class Settings:
    """How the engine is started.

    None: vLLM 0.32's own default, or for tp the least that fits. weights_gib: of all ranks together. weight_bits: 4,
    8 or 16 instead of it, of every parameter. vram_gib, non_torch_gib, activation_gib, graphs_gib, pool_gib: of one
    GPU, known better. blocks: the pool as a log states it. prefix_share: of every prompt, or of max_len where no
    lengths are given, the leading share that all live requests have in common: it is stored once while any of them
    lives.
    """
    tp: int | None = None
    util: float = UTIL
    max_num_seqs: int | None = None
    max_batched_tokens: int | None = None
    block_size: int = BLOCK_SIZE
    max_len: int | None = None
    kv_format: str = "bf16"
    prefix_share: float = 0.0
    weights_gib: float | None = None
    weight_bits: int | None = None
    vram_gib: float | None = None
    non_torch_gib: float | None = None
    activation_gib: float | None = None
    graphs_gib: float | None = None
    pool_gib: float | None = None
    blocks: int | None = None

    def __post_init__(self):
        positive(block_size=self.block_size)
        counts = ("tp", "max_num_seqs", "max_batched_tokens", "max_len", "blocks")
        positive(**{name: getattr(self, name) for name in counts if getattr(self, name) is not None})
        if not 0 < self.util <= 1:
            raise ValueError(f"util={self.util:g} must lie above 0 and at most at 1: it is a share of the GPU's memory")
        if not 0 <= self.prefix_share <= 1:
            raise ValueError(f"prefix_share={self.prefix_share:g} must lie between 0 and 1")
        for names, most in ((("weights_gib", "vram_gib", "pool_gib"), "above 0"),
                            (("non_torch_gib", "activation_gib", "graphs_gib"), "of at least 0")):
            for name in names:
                value = getattr(self, name)
                if value is not None and not (0 <= value <= MOST_GIB and (value or most != "above 0")):
                    raise ValueError(f"{name}={value:g} must be a number {most} and at most {MOST_GIB:,} GiB")
        if self.blocks is not None and self.pool_gib is not None:
            raise ValueError("blocks and pool_gib say the same; give one of them")
        if self.weight_bits not in (None, *BITS):
            raise ValueError(f"weight_bits={self.weight_bits!r} must be 4, 8 or 16; anything else as weights_gib")
        if self.weight_bits is not None and self.weights_gib is not None:
            raise ValueError("weights_gib and weight_bits say the same; give one of them")

    @property
    def pool_known(self) -> bool:
        return self.blocks is not None or self.pool_gib is not None


def with_defaults(spec: ModelSpec, gpu: GPUSpec, settings: Settings) -> Settings:
    """What is not set, as vLLM 0.32's server sets it by the GPU's memory; max_len is the model's context.

    Source: vLLM 0.32 engine/arg_utils.py (get_batch_defaults): 16,384 tokens and 1,024 sequences from 160 GiB on, 8,192
    and 1,024 from 70 GiB on but for A100, else 2,048 and 256; on what is no GPU 2,048 and 128 for each rank.
    """
    max_len = settings.max_len or spec.context
    if max_len is None:
        raise ValueError(f"the context of {spec.name} is not known; give --max-len")
    if settings.max_num_seqs and settings.max_batched_tokens:
        return replace(settings, max_len=max_len)
    if not gpu.compute_capability:
        ranks = settings.tp or 1
        return replace(settings, max_len=max_len, max_num_seqs=settings.max_num_seqs or 128 * ranks,
                       max_batched_tokens=settings.max_batched_tokens or 2048 * ranks)
    gib = settings.vram_gib or device_memory(gpu).value / GiB
    large = gib >= 160 or (gib >= 70 and "A100" not in gpu.name)
    return replace(settings, max_len=max_len, max_num_seqs=settings.max_num_seqs or (1024 if large else 256),
                   max_batched_tokens=settings.max_batched_tokens or (16384 if gib >= 160 else 8192 if large else 2048))


def blocks_of(spec: ModelSpec, settings: Settings) -> BlockModel:
    """The model's blocks on one rank under settings that are complete."""
    return block_model(spec, kv_format=settings.kv_format, block_size=settings.block_size, tp=settings.tp,
                       max_len=settings.max_len, max_batched_tokens=settings.max_batched_tokens)


def shared_blocks(model: BlockModel, length: int, share: float) -> int:
    """Whole blocks that requests of one length have in common: of layers that keep every token, rounded down.

    A block is shared only if all its tokens are; windows and states keep nothing of a prefix that has passed.
    """
    return sum(int(share * length) // group.block_size for group in model.groups if group.kind in ("full", "mla"))


def requests(blocks: int, per: float, shared: int = 0) -> int:
    """Whole requests of `per` blocks each, `shared` of which are stored once for all that are live.

    vLLM's null block holds nothing, so n requests take shared + n × (per − shared) of blocks − 1.
    """
    usable = max(0, blocks - 1)
    if usable < per:
        return 0
    return int((usable - shared) // (per - shared)) if per > shared else usable


def requests_in(model: BlockModel, pool_bytes: int, share: float) -> int:
    """Whole requests of max_len that a pool of so many bytes holds."""
    return requests(model.blocks(max(0, pool_bytes)), model.blocks_per_request(),
                    shared_blocks(model, model.max_len, share))
