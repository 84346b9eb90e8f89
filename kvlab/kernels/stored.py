"""One side (K or V) of a block-stored cache as a kernel reads it: codes, and the scales beside them.

Legend: B = sequence, N = block, K = kv head, P = slot in block, W = width of a stored row, R = row of scales,
C = scale in a row, M = block of a sequence.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

CODES = ("fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "int2")


class Stored(NamedTuple):
    """Codes of K or of V and what turns them into numbers: (code · scale) + zero.

    codes: [N, K, P, W] view with any strides but a last one of 1; W bytes hold head_dim codes of `kind` (int4: the
    even channel in the low half of a byte; fp8 lies in uint8). width: head_dim of this side. scale, zero: [N, K, R, C]
    views, None for 1 and 0; slot p and channel d use scale[…, p // tokens, d // channels]. Static scales are views
    whose stride over blocks is 0 and that have one row.
    """
    codes: Tensor
    kind: str
    width: int
    scale: Tensor | None = None
    zero: Tensor | None = None
    tokens: int = 1
    channels: int = 1


def check_blocks(block_table_BM: Tensor, kv_lens, block_size: int, num_blocks: int) -> None:
    """Raise IndexError where a sequence's tokens would be looked for outside the cache's blocks."""
    for b, (row_M, kv_len) in enumerate(zip(block_table_BM.tolist(), kv_lens)):
        needed = -(-kv_len // block_size)
        if needed > len(row_M):
            raise IndexError(f"the block table gives sequence {b} {len(row_M)} blocks of {block_size}, and its "
                             f"{kv_len} tokens need {needed}; allocate more blocks first")
        wrong = [i for i in row_M[:needed] if not 0 <= i < num_blocks]
        if wrong:
            raise IndexError(f"block id {wrong[0]} in the block table of sequence {b} is out of range; this cache has "
                             f"blocks 0 … {num_blocks - 1}")
