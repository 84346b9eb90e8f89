"""Bytes of one layer's KV cache: block storage reached through a block_table. Contiguous = one block per sequence.

Legend: N = block, K = kv head, P = slot in block, R = stored row in block (P over the tokens a row covers),
W = width of a row, S = kv token, T = new token, D = head_dim.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlab.kv.block_pool import BlockPool
from kvlab.kv.formats import KVFormat, Packed, torch_dtype
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
        if self.block_size % group:
            return f"block_size={self.block_size} is not a multiple of {fmt.name}'s token group ({group})"
        if self.share_prefix and (workload.shared_prefix == 0 or workload.shared_prefix % self.block_size):
            return (f"share_prefix needs a shared_prefix above 0 that block_size={self.block_size} divides, "
                    f"got {workload.shared_prefix}")
        return None


def block_tables(workload: Workload, layout: Layout, seed: int) -> tuple[list[list[int]], int]:
    """(one block table per sequence, number of blocks). Paged tables come from a BlockPool, whose block 0 is null."""
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
    """

    def __init__(self, shape: AttentionShape, fmt: KVFormat, num_blocks: int, block_size: int, *,
                 order: str = "head", device: str = "cpu"):
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

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.k_arrays + self.v_arrays)

    def by_head(self, arrays: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The arrays as [N, K, R, W] views, whatever the order in memory."""
        return arrays if self.order == "head" else tuple(a.transpose(1, 2) for a in arrays)

    def write(self, packed: Packed, block_table: list[int]) -> None:
        """Put a whole encoded sequence into its blocks; the block table's blocks are filled in order."""
        self._check(block_table, packed.kv_len)
        self._fits(packed)
        import torch
        for arrays, parts in ((self.k_arrays, packed.k), (self.v_arrays, packed.v)):
            for target_NKRW, part_KSW in zip(self.by_head(arrays), parts):
                K, S, W = part_KSW.shape
                rows = target_NKRW.shape[2]
                whole = S // rows                                    # blocks that are full, in one go; then the rest
                blocks = torch.tensor(block_table[:whole], device=target_NKRW.device, dtype=torch.long)
                target_NKRW[blocks] = part_KSW[:, :whole * rows].view(K, whole, rows, W).transpose(0, 1)
                if S % rows:
                    target_NKRW[block_table[whole], :, :S % rows] = part_KSW[:, whole * rows:]

    def append(self, k_TKD: Tensor, v_TKD: Tensor | None, block_table: list[int], kv_len: int) -> None:
        """Store new tokens behind the kv_len that are there; the block table must already hold room for them.

        Where a scale covers several tokens, the partly filled group is decoded and stored anew with the new ones.
        """
        import torch
        group = self.format.token_group(self.shape)
        start = kv_len - kv_len % group
        if start < kv_len:
            # in fp32, whatever the dtype of the new tokens: a narrower one would round, or overflow, what is stored
            block = start // self.block_size                           # the only one that the open group lies in
            base = block * self.block_size
            stored = self.gather(block_table[block:block + 1], kv_len - base)
            old_k, old_v = self.format.decode(stored, self.shape, torch.float32)
            k_TKD = torch.cat([old_k[start - base:], k_TKD])
            v_TKD = None if v_TKD is None else torch.cat([old_v[start - base:], v_TKD])
        packed = self.format.encode(k_TKD, v_TKD)
        self._check(block_table, start + packed.kv_len)
        self._fits(packed)
        k_parts, v_parts = self.format.components(self.shape)
        for arrays, parts, components in ((self.k_arrays, packed.k, k_parts), (self.v_arrays, packed.v, v_parts)):
            for target_NKRW, part_KSW, component in zip(self.by_head(arrays), parts, components):
                slots = slot_mapping(block_table, self.block_size, start, packed.kv_len)[::component.tokens]
                blocks = torch.tensor([s // self.block_size for s in slots])
                rows = torch.tensor([s % self.block_size // component.tokens for s in slots])
                target_NKRW[blocks, :, rows] = part_KSW.transpose(0, 1)

    def gather(self, block_table: list[int], kv_len: int) -> Packed:
        """One sequence read back through its block table (a copy)."""
        self._check(block_table, kv_len)
        k_parts, v_parts = self.format.components(self.shape)
        sides = []
        for arrays, components in ((self.k_arrays, k_parts), (self.v_arrays, v_parts)):
            sides.append(tuple(
                a[block_table].transpose(0, 1).flatten(1, 2)[:, :c.rows(kv_len)].contiguous()
                for a, c in zip(self.by_head(arrays), components)))
        return Packed(sides[0], sides[1], kv_len)

    def _fits(self, packed: Packed) -> None:
        """Refuse arrays of another format or shape, which assignment would cast or spread over the heads unasked."""
        ours = [(self.shape.num_kv_heads, c.rows(packed.kv_len), c.width, torch_dtype(c.dtype))
                for side in self.format.components(self.shape) for c in side]
        given = [(*array.shape, array.dtype) for array in packed.k + packed.v]
        if given != ours:
            raise ValueError(f"arrays {given} do not fit this cache of {self.format.name}, whose arrays are {ours}; "
                             "encode with the cache's own format and shape")

    def _check(self, block_table: list[int], tokens: int) -> None:
        if len(block_table) * self.block_size < tokens:
            room = len(block_table) * self.block_size
            raise IndexError(f"block table of {len(block_table)} blocks of {self.block_size} holds {room} tokens, "
                             f"{tokens} needed; allocate more blocks first")
        wrong = [i for i in block_table if not 0 <= i < self.num_blocks]
        if wrong:
            raise IndexError(f"block id {wrong[0]} in the block table is out of range; this cache has blocks "
                             f"0 … {self.num_blocks - 1}")


def slot_mapping(block_table: list[int], block_size: int, first: int, count: int) -> list[int]:
    """Slot (block id * block_size + offset) of each of the tokens first … first + count - 1."""
    if first < 0 or first + count > len(block_table) * block_size:
        raise IndexError(f"tokens {first} … {first + count - 1} lie outside a block table of {len(block_table)} blocks "
                         f"of {block_size}; allocate more blocks first")
    return [block_table[t // block_size] * block_size + t % block_size for t in range(first, first + count)]
