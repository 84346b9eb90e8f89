"""What kvlab's own kernels share: a trial's cache as they read it, through its block table, whatever its format."""
from __future__ import annotations

from typing import TYPE_CHECKING

from kvlab.attention._base import longest_block
from kvlab.kernels.stored import Stored, check_blocks
from kvlab.kv.formats._scaled import Scaled

if TYPE_CHECKING:
    from torch import Tensor

    from kvlab.attention._base import Inputs, Trial
    from kvlab.kv.cache import KVCache


def kind_of(codec) -> str:
    """The kind of code that a codec stores, as kernels name them: fp32, bf16, fp8_e4m3, int8, int4, …"""
    return codec.name.partition("/")[0]


def not_stored(trial: Trial, kinds: tuple[str, ...]) -> str | None:
    """Why a kernel that decodes these kinds of codes in registers cannot read this trial's format."""
    for codec, _ in trial.format.sides(trial.workload.shape):
        if codec.residual:
            return f"{trial.kv_format} keeps its newest tokens apart in fp16, which the kernel does not read"
        if kind_of(codec) not in kinds:
            return f"the kernel reads {', '.join(kinds)}, and {trial.kv_format} stores {kind_of(codec)}"
    return None


def stored_sides(cache: KVCache) -> tuple[Stored, Stored]:
    """K and V of a cache as a kernel reads them; where V is a view of K, its first v_head_dim channels."""
    shape = cache.shape
    sides = [_stored(codec, width, arrays, cache) for (codec, width), arrays in
             zip(cache.format.sides(shape), (cache.k_arrays, cache.v_arrays))]
    return sides[0], sides[1] if len(sides) > 1 else sides[0]._replace(width=shape.v_dim)


def _stored(codec, width: int, arrays: tuple[Tensor, ...], cache: KVCache) -> Stored:
    codes, *scales = cache.by_head(arrays)
    if not isinstance(codec, Scaled) or codec.grain is None:
        return Stored(codes, kind_of(codec), width)
    grain = codec.grain
    if grain.static:                                     # of the layer, not of a block: a view that repeats itself
        if codec.static:
            raise ValueError(f"{codec.name} has static scales, and this cache was not calibrated: find them first with "
                             "fmt.calibrate(k, v)")
        every = codes.shape[:2]
        scales = [s.to(codes.device).expand(*every, *s.shape[1:]) for s in codec.scales]
    scale, zero = (*scales, None)[:2]
    return Stored(codes, kind_of(codec), width, scale, zero, tokens=grain.tokens or cache.block_size,
                  channels=grain.channels or width)


def slots_per_block(trial: Trial) -> int:
    """Tokens for which a block of the trial's cache has room, a contiguous one's included."""
    return trial.layout.block_size or longest_block(trial.workload, trial.format)


def checked_table(inputs: Inputs) -> Tensor:
    """The block table in int32, row after row, checked: a kernel never looks outside the cache."""
    import torch
    cache = inputs.cache
    check_blocks(inputs.block_table, inputs.kv_lens, cache.block_size, len(cache.k_arrays[0]))
    return inputs.block_table.to(torch.int32).contiguous()
