"""Which blocks of a paged KV cache belong to whom: ids and reference counts only, never bytes.

A block table is a plain list of block ids, one for every block_size tokens of a sequence, owned by the caller.
Block 0 is the null block: a place that padded table entries may point to; it is never handed out and never freed.
"""
from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

NULL_BLOCK = 0


class OutOfBlocks(RuntimeError):
    """A request needs more blocks than are free; the pool is as it was. Blocks are counted in `needed` and `free`."""

    def __init__(self, needed: int, free: int):
        super().__init__(needed, free)
        self.needed, self.free = needed, free

    def __str__(self) -> str:
        return f"{self.needed} blocks needed, {self.free} free; free a sequence, or use a pool with more blocks"


class BrokenInvariant(AssertionError):
    """The pool's bookkeeping contradicts itself: a bug in kvlab or in a caller that changed a table by hand."""


def _whole(least: int, **values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")


class BlockPool:
    """A pool of num_blocks blocks of block_size tokens each, the null block included: one less can be handed out.

    Every call either does all it was asked for or raises and changes nothing: OutOfBlocks where blocks run short,
    ValueError for arguments that cannot be right (a block freed twice, the null block, an id out of range).

    Source: free queue in least-recently-used order, freed blocks joining it tail of the sequence first, so that the
    head, the part most likely to be a prefix of another request, is reused last: vLLM, vllm/v1/core/block_pool.py.
    """

    def __init__(self, num_blocks: int, block_size: int):
        _whole(2, num_blocks=num_blocks)
        _whole(1, block_size=block_size)
        self.num_blocks, self.block_size = num_blocks, block_size
        self._ref_counts = [0] * num_blocks
        # Keys only, next to be reused first. Ordered, so that a later hit on a free block can take it from the middle.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(NULL_BLOCK + 1, num_blocks))

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Blocks in at least one table, each counted once."""
        return self.num_blocks - 1 - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens tokens, the last one counted whole."""
        return -(-num_tokens // self.block_size)

    def ref_count(self, block_id: int) -> int:
        """How many tables hold the block; 0 for a free block and for the null block."""
        self._in_range(block_id)
        return self._ref_counts[block_id]

    def allocate(self, num_tokens: int) -> list[int]:
        """A block table for a new sequence of num_tokens tokens. All or nothing: raises OutOfBlocks."""
        _whole(1, num_tokens=num_tokens)
        self._require(self.blocks_for(num_tokens))
        return [self._take() for _ in range(self.blocks_for(num_tokens))]

    def append(self, block_table: list[int], num_tokens: int, new_tokens: int = 1) -> list[tuple[int, int]]:
        """Make room for new_tokens after the num_tokens a sequence holds; grows and changes block_table in place.

        Copy-on-write: a block to be written that other tables share is replaced by a fresh one. Returns the
        (source, copy) pairs whose bytes the caller must copy before anything else is written or freed.
        All or nothing: raises OutOfBlocks and leaves the table as it was.
        """
        _whole(0, num_tokens=num_tokens)
        _whole(1, new_tokens=new_tokens)
        self._owned(block_table)
        if self.blocks_for(num_tokens) > len(block_table):
            raise ValueError(f"num_tokens={num_tokens} do not fit in a table of {len(block_table)} blocks of "
                             f"{self.block_size} tokens; give the tokens held before this append")
        last = self.blocks_for(num_tokens + new_tokens)
        written = range(num_tokens // self.block_size, min(last, len(block_table)))
        shared = [i for i in written if self._ref_counts[block_table[i]] > 1]
        fresh = max(0, last - len(block_table))
        self._require(len(shared) + fresh)
        copies = []
        for i in shared:
            source, block_table[i] = block_table[i], self._take()
            self._ref_counts[source] -= 1                       # stays above 0: other tables still hold it
            if i * self.block_size < num_tokens:                # a block reserved ahead holds nothing to copy
                copies.append((source, block_table[i]))
        block_table.extend(self._take() for _ in range(fresh))
        return copies

    def fork(self, block_table: Sequence[int]) -> list[int]:
        """A second table over the same blocks, whose counts go up; nothing is copied until one of the two writes."""
        self._owned(block_table)
        for block_id in block_table:
            self._ref_counts[block_id] += 1
        return list(block_table)

    def free(self, block_table: Sequence[int]) -> None:
        """Give a table's blocks up; those that no other table holds join the free queue, the last one first."""
        self._owned(block_table)
        for block_id in reversed(block_table):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None

    def slot_mapping(self, block_table: Sequence[int], first: int, count: int) -> list[int]:
        """Where tokens first … first + count - 1 of a sequence lie: block id * block_size + offset, in tokens."""
        _whole(0, first=first, count=count)
        if first + count > len(block_table) * self.block_size:
            raise ValueError(f"tokens {first} … {first + count - 1} lie outside a table of {len(block_table)} blocks "
                             f"of {self.block_size} tokens; append makes room for more")
        self._owned(block_table)
        return [block_table[t // self.block_size] * self.block_size + t % self.block_size
                for t in range(first, first + count)]

    def check(self, block_tables: Iterable[Sequence[int]] | None = None) -> None:
        """Raise BrokenInvariant unless the bookkeeping holds together.

        block_tables: all live tables, where the caller has them; then each count must equal the tables that hold
        the block, which also finds blocks that leaked.
        """
        def must(holds: bool, what: str) -> None:
            if not holds:
                raise BrokenInvariant(what)

        counts = self._ref_counts
        used = sum(count > 0 for count in counts)
        must(len(counts) == self.num_blocks, f"{len(counts)} counts for {self.num_blocks} blocks")
        must(min(counts) >= 0, f"block {counts.index(min(counts))} has the negative count {min(counts)}")
        must(NULL_BLOCK not in self._free and counts[NULL_BLOCK] == 0, "the null block was handed out or freed")
        must(len(self._free) + used == self.num_blocks - 1,
             f"{len(self._free)} free + {used} used blocks are not {self.num_blocks - 1}")
        for block_id in range(NULL_BLOCK + 1, self.num_blocks):
            must((block_id in self._free) == (counts[block_id] == 0),
                 f"block {block_id} has count {counts[block_id]} and is {'' if block_id in self._free else 'not '}free")
        if block_tables is not None:
            held = Counter(block_id for table in block_tables for block_id in table)
            for block_id in range(self.num_blocks):
                must(held[block_id] == counts[block_id],
                     f"block {block_id} has count {counts[block_id]} and is in {held[block_id]} tables")

    def _require(self, needed: int) -> None:
        if needed > len(self._free):
            raise OutOfBlocks(needed, len(self._free))

    def _take(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        self._ref_counts[block_id] = 1
        return block_id

    def _in_range(self, block_id: int) -> None:
        if isinstance(block_id, bool) or not isinstance(block_id, int) or not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block id {block_id!r} is out of range; allowed: 0 … {self.num_blocks - 1}")

    def _owned(self, block_table: Sequence[int]) -> None:
        """Refuse a table that cannot be live, before anything is changed."""
        for block_id, times in Counter(block_table).items():
            self._in_range(block_id)
            if block_id == NULL_BLOCK:
                raise ValueError("block 0 is the null block, which no sequence owns; allowed: ids from allocate")
            if times > self._ref_counts[block_id]:
                raise ValueError(f"block {block_id} is {times} times in the table, but {self._ref_counts[block_id]} "
                                 "tables hold it; was it freed already?")
