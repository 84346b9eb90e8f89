"""Which blocks of a paged KV cache belong to whom, and which prefix each still holds: ids and counts, never bytes.

A block table is a plain list of block ids, one for every block_size tokens of a sequence, owned by the caller.
Block 0 is the null block: a place that padded table entries may point to; it is never handed out and never freed.
A full block may be remembered under the hash of all tokens up to its end (kvlab.kv.prefix makes such hashes). It is
found by that hash as long as it lives in a table, and after that until the pool hands it out again.
"""
from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import NoReturn

NULL_BLOCK = 0


class OutOfBlocks(RuntimeError):
    """A request needs more blocks than are free; the pool is as it was.

    Blocks are counted in `needed` and `free`.
    """

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
    `take`, `share`, `release`, `remember` and `cached` are for callers that keep many tables, thousands of times a
    second; the others check whole tables.

    Free blocks are reused in this order: those that remember nothing, last freed first (they may still lie in a
    processor's cache); then remembered ones, least recently used first and a table's tail before its head, the part
    most likely to be a prefix of another request. Handing out a remembered block is the only way it is evicted.
    Several blocks may be remembered under one hash, since tables only grow; the oldest is found, and the next once
    that one is evicted.

    Source: vLLM 0.32.0, vllm/v1/core/block_pool.py (get_new_blocks, touch, free_blocks, BlockHashToBlockMap).
    """

    def __init__(self, num_blocks: int, block_size: int):
        _whole(2, num_blocks=num_blocks)
        _whole(1, block_size=block_size)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.evictions = 0                                      # remembered blocks that were handed out again
        self._ref_counts = [0] * num_blocks
        # The free queue in two parts: its head is the end of _blank; _lru follows, keys only, oldest first, ordered so
        # that a hit can take a block from the middle. A free block is in _lru exactly if it has a hash.
        self._blank = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._lru: OrderedDict[int, None] = OrderedDict()
        self._hashes: list[Hashable | None] = [None] * num_blocks
        self._found: dict[Hashable, int] = {}
        self._twins: dict[Hashable, list[int]] = {}             # further blocks of a hash, the oldest first

    @property
    def free_blocks(self) -> int:
        """Blocks in no table, remembered or not: as many can be handed out."""
        return len(self._blank) + len(self._lru)

    @property
    def used_blocks(self) -> int:
        """Blocks in at least one table, each counted once."""
        return self.num_blocks - 1 - self.free_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens tokens, the last one counted whole."""
        return -(-num_tokens // self.block_size)

    def ref_count(self, block_id: int) -> int:
        """How many tables hold the block; 0 for a free block and for the null block."""
        self._in_range(block_id)
        return self._ref_counts[block_id]

    def allocate(self, num_tokens: int) -> list[int]:
        """A block table for a new sequence of num_tokens tokens.

        All or nothing: raises OutOfBlocks.
        """
        _whole(1, num_tokens=num_tokens)
        return self.take(self.blocks_for(num_tokens))

    def take(self, count: int) -> list[int]:
        """count blocks from the head of the free queue, evicting what they remembered.

        Raises OutOfBlocks.
        """
        blank, counts = self._blank, self._ref_counts
        if count == 1 and blank:                                # an append: the most frequent call
            block_id = blank.pop()
            counts[block_id] = 1
            return [block_id]
        if count < 1:
            _whole(0, count=count)
            return []
        if count > len(blank):
            self._evict(count - len(blank))
        taken = blank[:-count - 1:-1]
        del blank[-count:]
        for block_id in taken:
            counts[block_id] = 1
        return taken

    def share(self, block_ids: Sequence[int]) -> None:
        """One table more holds each of the blocks; free ones leave the free queue.

        To be done before `take` evicts. Refuses a block that is free and remembers nothing: what it held is of no use
        to anybody.
        """
        counts, lru, end = self._ref_counts, self._lru, self.num_blocks
        for block_id in block_ids:
            if not NULL_BLOCK < block_id < end or not counts[block_id] and block_id not in lru:
                self._refuse(block_id, "nothing to share")
        for block_id in block_ids:
            if not counts[block_id]:
                del lru[block_id]
            counts[block_id] += 1

    def remember(self, block_id: int, block_hash: Hashable) -> None:
        """The block, held by a table, is full, and block_hash names all tokens up to its end."""
        if not NULL_BLOCK < block_id < self.num_blocks or not self._ref_counts[block_id]:
            self._refuse(block_id, "nothing to remember")
        known = self._hashes[block_id]
        if known is not None or block_hash is None:
            if block_hash is None or known != block_hash:
                raise ValueError(f"block {block_id} remembers {known!r} and cannot remember {block_hash!r}; "
                                 "a block has one hash, from when it is full until it is handed out again")
            return
        self._hashes[block_id] = block_hash
        if self._found.setdefault(block_hash, block_id) != block_id:
            self._twins.setdefault(block_hash, []).append(block_id)

    def cached(self, hashes: Iterable[Hashable]) -> list[int]:
        """The blocks of the longest run of hashes, from the first on, that are remembered.

        Changes nothing.
        """
        found, blocks = self._found, []
        try:
            for block_hash in hashes:
                blocks.append(found[block_hash])
        except KeyError:
            pass
        return blocks

    def append(self, block_table: list[int], num_tokens: int, new_tokens: int = 1) -> list[tuple[int, int]]:
        """Make room for new_tokens after the num_tokens a sequence holds; grows and changes block_table in place.

        Copy-on-write: a block to be written that other tables share is replaced by a fresh one. Returns the
        (source, copy) pairs whose bytes the caller must copy before anything else is written or freed.
        A block that is written and not shared forgets its hash, which no longer names what it holds.
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
        fresh = self.take(len(shared) + max(0, last - len(block_table)))
        for i in written:
            if self._ref_counts[block_table[i]] == 1:
                self._forget(block_table[i])
        copies = []
        for i, copy in zip(shared, fresh, strict=False):
            source, block_table[i] = block_table[i], copy
            self._ref_counts[source] -= 1                       # stays above 0: other tables still hold it
            if i * self.block_size < num_tokens:                # a block reserved ahead holds nothing to copy
                copies.append((source, copy))
        block_table.extend(fresh[len(shared):])
        return copies

    def fork(self, block_table: Sequence[int]) -> list[int]:
        """A second table over the same blocks, whose counts go up; nothing is copied until one of the two writes."""
        self._owned(block_table)
        for block_id in block_table:
            self._ref_counts[block_id] += 1
        return list(block_table)

    def free(self, block_table: Sequence[int]) -> None:
        """Give a table's blocks up; those that no other table holds join the free queue."""
        self._owned(block_table)
        self.release(block_table)

    def release(self, block_ids: Sequence[int]) -> None:
        """`free` for a caller that is sure of its table: the last block first, and nothing is checked beforehand.

        Raises BrokenInvariant on a block that no table holds; the pool is then of no further use.
        """
        counts, hashes, lru, blank = self._ref_counts, self._hashes, self._lru, []
        for block_id in reversed(block_ids):
            counts[block_id] = left = counts[block_id] - 1
            if left:
                if left < 0:
                    raise BrokenInvariant(f"block {block_id} was given up more often than tables hold it")
            elif hashes[block_id] is None:
                blank.append(block_id)
            else:
                lru[block_id] = None
        blank.reverse()
        self._blank += blank

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

        counts, hashes, free = self._ref_counts, self._hashes, self._queue()
        is_free = set(free)
        used = sum(count > 0 for count in counts)
        must(len(counts) == self.num_blocks, f"{len(counts)} counts for {self.num_blocks} blocks")
        must(min(counts) >= 0, f"block {counts.index(min(counts))} has the negative count {min(counts)}")
        must(NULL_BLOCK not in is_free and counts[NULL_BLOCK] == 0, "the null block was handed out or freed")
        must(len(free) == len(is_free), "a block is twice in the free queue")
        must(len(free) + used == self.num_blocks - 1,
             f"{len(free)} free + {used} used blocks are not {self.num_blocks - 1}")
        for block_id in range(NULL_BLOCK + 1, self.num_blocks):
            must((block_id in is_free) == (counts[block_id] == 0),
                 f"block {block_id} has count {counts[block_id]} and is {'' if block_id in is_free else 'not '}free")
        must(all(hashes[block_id] is None for block_id in self._blank), "a block waits as blank and has a hash")
        must(all(hashes[block_id] is not None for block_id in self._lru), "a block waits as remembered without a hash")
        listed = [(block_id, block_hash) for block_hash, block_id in self._found.items()]
        listed += [(block_id, block_hash) for block_hash, twins in self._twins.items() for block_id in twins]
        must(sorted(block_id for block_id, _ in listed) == [i for i, known in enumerate(hashes) if known is not None]
             and all(hashes[block_id] == block_hash for block_id, block_hash in listed),
             "the blocks found by hash are not those that have one")
        must(all(twins and block_hash in self._found for block_hash, twins in self._twins.items()),
             "a hash has further blocks and no first one")
        if block_tables is not None:
            held = Counter(block_id for table in block_tables for block_id in table)
            for block_id in range(self.num_blocks):
                must(held[block_id] == counts[block_id],
                     f"block {block_id} has count {counts[block_id]} and is in {held[block_id]} tables")

    def _queue(self) -> list[int]:
        """The free blocks, next to be handed out first."""
        return [*reversed(self._blank), *self._lru]

    def _evict(self, count: int) -> None:
        """Make blank the count least recently used remembered blocks, behind all that are blank already."""
        if count > len(self._lru):
            raise OutOfBlocks(count + len(self._blank), self.free_blocks)
        hashes, found, twins, oldest, evicted = self._hashes, self._found, self._twins, self._lru.popitem, []
        for _ in range(count):
            block_id, _ = oldest(False)
            evicted.append(block_id)
            if hashes[block_id] in twins:
                self._forget(block_id)
            else:                                               # _forget without a call: this loop is hot
                del found[hashes[block_id]]
                hashes[block_id] = None
        self._blank[:0] = reversed(evicted)
        self.evictions += count

    def _forget(self, block_id: int) -> None:
        """Drop the block's hash, if it has one; a further block of that hash is found from now on."""
        block_hash = self._hashes[block_id]
        if block_hash is None:
            return
        self._hashes[block_id] = None
        twins = self._twins.get(block_hash)
        if twins is None:
            del self._found[block_hash]
            return
        if self._found[block_hash] == block_id:
            self._found[block_hash] = twins.pop(0)
        else:
            twins.remove(block_id)
        if not twins:
            del self._twins[block_hash]

    def _refuse(self, block_id: int, what: str) -> NoReturn:
        self._in_range(block_id)
        raise ValueError(f"block {block_id} is {'free' if block_id else 'the null block'}: {what}; allowed: blocks "
                         "that a table holds, and to share also what `cached` finds")

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
