"""Bytes of one layer's KV cache: block storage reached through a block_table. Contiguous = one block per sequence.

Legend: N = block, K = kv head, P = slot in block, R = stored row in block (P over the tokens a row covers),
W = width of a row, S = kv token, T = new token, D = head_dim.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlab.kv.block_pool import BlockPool
from kvlab.kv.formats import KVFormat, Packed, torch_dtype
from kvlab.kv.formats._base import TAIL_DTYPE, check_finite, decode_side, encode_side
from kvlab.shapes import AttentionShape, Workload

if TYPE_CHECKING:
    from torch import Tensor

# What an unused slot holds. Real caches hold stale tokens there: a kernel that forgets to mask must be found out.
STALE = 7


@dataclass(frozen=True)
class Layout:
    """Where tokens lie: block_size slots per block (None = one block per sequence), in which order, shared or not.

    order: "head" keeps a block's tokens of one KV head together [N, K, P, D]; "token" a token's heads [N, P, K, D].
    page_order: whether a sequence's blocks follow one another in memory. share_prefix: sequences of a batch point
    to the same blocks for their shared prefix.
    """
    block_size: int | None = None
    page_order: str = "in_order"
    order: str = "head"
    share_prefix: bool = False

    def __post_init__(self):
        if self.block_size is not None and (type(self.block_size) is not int or self.block_size < 1):
            raise ValueError(f"block_size={self.block_size!r} must be a whole number of at least 1, or None")
        if self.page_order not in ("in_order", "random"):
            raise ValueError(f"page_order={self.page_order!r}; allowed: in_order, random")
        if self.order not in ("head", "token"):
            raise ValueError(f"order={self.order!r}; allowed: head, token")
        if self.share_prefix and self.block_size is None:
            raise ValueError("share_prefix needs blocks: give a block_size that divides the shared prefix")

    def why_not(self, workload: Workload, fmt: KVFormat) -> str | None:
        """Why this layout cannot hold that workload in that format, in one sentence."""
        if self.block_size is None:
            return None
        group = fmt.token_group(workload.shape)
        if self.share_prefix and any(codec.residual for codec, _ in fmt.sides(workload.shape)):
            return f"{fmt.name} keeps each sequence's newest tokens apart; kvlab shares no prefix of such a cache"
        if self.block_size % group:
            return (f"block_size={self.block_size} is not a multiple of {fmt.name}'s token group ({group}); "
                    f"take {-(-self.block_size // group) * group}")
        if self.share_prefix and (workload.shared_prefix == 0 or workload.shared_prefix % self.block_size):
            return (f"share_prefix needs a shared_prefix above 0 that block_size={self.block_size} divides, "
                    f"got {workload.shared_prefix}")
        return None


def block_tables(workload: Workload, layout: Layout, seed: int) -> tuple[list[list[int]], int]:
    """(one block table per sequence, number of blocks).

    Paged tables come from a BlockPool, whose block 0 is null.
    """
    if layout.block_size is None:
        return [[b] for b in range(workload.batch_size)], workload.batch_size
    size = layout.block_size
    shared = workload.shared_prefix // size if layout.share_prefix else 0
    own = [-(-n // size) - shared for n in workload.kv_lens]
    pool = BlockPool(1 + shared + sum(own), size)
    prefix = pool.allocate(shared * size) if shared else []
    tables = [pool.fork(prefix) + (pool.allocate(n * size) if n else []) for n in own]
    pool.check()
    if layout.page_order == "random":
        import torch
        shuffled = 1 + torch.randperm(pool.num_blocks - 1, generator=torch.Generator().manual_seed(seed))
        tables = [[int(shuffled[i - 1]) for i in table] for table in tables]
    return tables, pool.num_blocks


class KVCache:
    """Block storage of K and V of one layer in one format.

    Arrays of K and V: [N, K, R, W] in head order, [N, R, K, W] in token order. One array per component of the
    codec (codes, scales). Raises IndexError for block ids outside the storage.
    sequences: how many tails of full-precision tokens there are, where the format has a residual: k_tail, v_tail
    [sequences, K, residual, D], one per sequence whatever its blocks.
    """

    def __init__(self, shape: AttentionShape, fmt: KVFormat, num_blocks: int, block_size: int, *,
                 order: str = "head", device: str = "cpu", sequences: int = 1):
        import torch
        group = fmt.token_group(shape)
        if block_size < 1 or block_size % group:
            raise ValueError(f"block_size={block_size} must be a multiple of {fmt.name}'s token group ({group})")
        self.shape, self.format, self.order = shape, fmt, order
        self.num_blocks, self.block_size = num_blocks, block_size

        def storage(component):
            rows = -(-block_size // component.tokens)
            inner = (shape.num_kv_heads, rows) if order == "head" else (rows, shape.num_kv_heads)
            return torch.full((num_blocks, *inner, component.width), STALE, device=device,
                              dtype=torch_dtype(component.dtype))

        k_parts, v_parts = fmt.components(shape)
        self.k_arrays = tuple(storage(c) for c in k_parts)
        self.v_arrays = tuple(storage(c) for c in v_parts)
        self.k_tail, self.v_tail = [
            torch.full((sequences, shape.num_kv_heads, codec.residual, width), STALE, device=device,
                       dtype=torch_dtype(TAIL_DTYPE)) if codec.residual else None
            for codec, width in fmt.sides(shape)] + [None] * shape.v_in_k

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        """Everything that is stored."""
        return (*self.k_arrays, *self.v_arrays, *(t for t in (self.k_tail, self.v_tail) if t is not None))

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)

    def with_tails(self, k: tuple[Tensor, ...], v: tuple[Tensor, ...], sequences) -> tuple[tuple, tuple]:
        """Arrays that were read through a block table, and behind them the tails of those sequences, if there are any.

        k, v: each stored array, [K, rows, width] behind any other axes. sequences: an index, or a slice or list of
        indices where the arrays have a batch axis.
        """
        def behind(side: tuple[Tensor, ...], tail: Tensor | None) -> tuple[Tensor, ...]:
            return side if tail is None else (*side, tail[sequences])
        return behind(k, self.k_tail), behind(v, self.v_tail)

    def by_head(self, arrays: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The arrays as [N, K, R, W] views, whatever the order in memory."""
        return arrays if self.order == "head" else tuple(a.transpose(1, 2) for a in arrays)

    def _sides(self):
        """(codec, width, arrays, tail) of K, and of V unless it is a view of K."""
        stored = ((self.k_arrays, self.k_tail), (self.v_arrays, self.v_tail))
        return [(codec, width, *kept) for (codec, width), kept in zip(self.format.sides(self.shape), stored)]

    def write(self, packed: Packed, block_table: list[int], sequence: int = 0) -> None:
        """Put a whole encoded sequence into its blocks, in order, and its tail (if any) into that of `sequence`."""
        self._check(block_table, packed.kv_len, sequence)
        self._fits(packed)
        import torch
        for (_, _, arrays, tail), stored in zip(self._sides(), (packed.k, packed.v)):
            for target_NKRW, part_KSW in zip(self.by_head(arrays), stored):
                K, S, W = part_KSW.shape
                rows = target_NKRW.shape[2]
                whole = S // rows                                    # blocks that are full, in one go; then the rest
                blocks = torch.tensor(block_table[:whole], device=target_NKRW.device, dtype=torch.long)
                target_NKRW[blocks] = part_KSW[:, :whole * rows].view(K, whole, rows, W).transpose(0, 1)
                if S % rows:
                    target_NKRW[block_table[whole], :, :S % rows] = part_KSW[:, whole * rows:]
            if tail is not None:
                tail[sequence, :, :stored[-1].shape[1]] = stored[-1]

    def append(self, k_TKD: Tensor, v_TKD: Tensor | None, block_table: list[int], kv_len: int,
               sequence: int = 0) -> None:
        """Store new tokens behind the kv_len that are there; the block table must already hold room for them.

        Where a scale covers several tokens and nothing is kept in full precision, the partly filled group is decoded
        and stored anew with each new token: it is rounded up to that many times, and errs more than `encode` of the
        whole sequence (int4/channel/g32, token by token: 0.105 against 0.078 of K's length).
        """
        import torch
        total, stored = kv_len + k_TKD.shape[0], []
        self._check(block_table, total, sequence)
        given = [tuple(x.shape) for x in (k_TKD, v_TKD) if x is not None]
        ours = [(k_TKD.shape[0], self.shape.num_kv_heads, width) for _, width in self.format.sides(self.shape)]
        if given != ours:
            raise ValueError(f"new tokens {given} do not fit this cache, which takes {ours}: tokens, KV heads, width")
        check_finite(k_TKD, v_TKD)
        for (codec, width, arrays, tail), x_TKD in zip(self._sides(), (k_TKD, v_TKD)):
            start = codec.settled(kv_len) if codec.residual else kv_len - kv_len % codec.token_group(width)
            x_KTD = x_TKD.permute(1, 0, 2)
            if start < kv_len:
                # in fp32, whatever the dtype of the new tokens: a narrower one would round, or overflow, what is stored
                base = start // self.block_size * self.block_size
                rows = tuple(a[block_table[start // self.block_size:]].transpose(0, 1).flatten(1, 2)
                             for a in self.by_head(arrays)) + (() if tail is None else (tail[sequence],))
                old_KTD = decode_side(codec, rows, kv_len, width, torch.float32, start, base)
                x_KTD = torch.cat([old_KTD, x_KTD], dim=1)
            stored.append((start, encode_side(codec, x_KTD)))
        for (codec, width, arrays, tail), (start, parts) in zip(self._sides(), stored):
            count = codec.settled(total) - start
            for target_NKRW, part_KSW, component in zip(self.by_head(arrays), parts, codec.components(width)):
                slots = slot_mapping(block_table, self.block_size, start, count)[::component.tokens]
                blocks = torch.tensor([s // self.block_size for s in slots], dtype=torch.long)
                rows = torch.tensor([s % self.block_size // component.tokens for s in slots], dtype=torch.long)
                target_NKRW[blocks, :, rows] = part_KSW.transpose(0, 1)
            if tail is not None:
                tail[sequence, :, :parts[-1].shape[1]] = parts[-1]

    def gather(self, block_table: list[int], kv_len: int, sequence: int = 0) -> Packed:
        """One sequence read back through its block table (a copy)."""
        self._check(block_table, kv_len, sequence)
        sides = []
        for codec, width, arrays, tail in self._sides():
            settled = codec.settled(kv_len)
            side = tuple(a[block_table].transpose(0, 1).flatten(1, 2)[:, :c.rows(settled)].contiguous()
                         for a, c in zip(self.by_head(arrays), codec.components(width)))
            sides.append(side if tail is None else (*side, tail[sequence, :, :kv_len - settled].clone()))
        return Packed(sides[0], sides[1] if len(sides) > 1 else (), kv_len)

    def _fits(self, packed: Packed) -> None:
        """Refuse arrays of another format or shape, which assignment would cast or spread over the heads unasked."""
        K, ours = self.shape.num_kv_heads, []
        for codec, width, _, tail in self._sides():
            settled = codec.settled(packed.kv_len)
            ours += [(K, c.rows(settled), c.width, torch_dtype(c.dtype)) for c in codec.components(width)]
            ours += [] if tail is None else [(K, packed.kv_len - settled, width, tail.dtype)]
        given = [(*array.shape, array.dtype) for array in packed.k + packed.v]
        if given != ours:
            raise ValueError(f"arrays {given} do not fit this cache of {self.format.name}, whose arrays are {ours}; "
                             "encode with the cache's own format and shape")

    def _check(self, block_table: list[int], tokens: int, sequence: int) -> None:
        if len(block_table) * self.block_size < tokens:
            room = len(block_table) * self.block_size
            raise IndexError(f"block table of {len(block_table)} blocks of {self.block_size} holds {room} tokens, "
                             f"{tokens} needed; allocate more blocks first")
        wrong = [i for i in block_table if not 0 <= i < self.num_blocks]
        if wrong:
            raise IndexError(f"block id {wrong[0]} in the block table is out of range; this cache has blocks "
                             f"0 … {self.num_blocks - 1}")
        tails = [len(tail) for tail in (self.k_tail, self.v_tail) if tail is not None]
        if tails and not 0 <= sequence < tails[0]:
            raise IndexError(f"sequence {sequence} is out of range; this cache keeps the newest tokens of sequences "
                             f"0 … {tails[0] - 1}")


def slot_mapping(block_table: list[int], block_size: int, first: int, count: int) -> list[int]:
    """Slot (block id * block_size + offset) of each of the tokens first … first + count - 1."""
    if first < 0 or first + count > len(block_table) * block_size:
        raise IndexError(f"tokens {first} … {first + count - 1} lie outside a block table of {len(block_table)} blocks "
                         f"of {block_size}; allocate more blocks first")
    return [block_table[t // block_size] * block_size + t % block_size for t in range(first, first + count)]
