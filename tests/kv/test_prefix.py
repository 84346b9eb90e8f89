"""Hashes of prefixes against brute force; remembered blocks by hand; any sequence of operations against a model."""
import subprocess
import sys

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvlab.kv.block_pool import BlockPool, BrokenInvariant, OutOfBlocks
from kvlab.kv.prefix import PrefixCache, chain, chain_of_pieces

SHORT = st.lists(st.integers(0, 2), max_size=14)


def common(a, b):
    """How many leading items are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


@given(SHORT, SHORT, st.integers(1, 5))
def test_a_hash_is_equal_exactly_if_all_up_to_its_block_is_equal(a, b, size):
    left, right = chain(a, size), chain(b, size)
    assert (len(left), len(right)) == (len(a) // size, len(b) // size)
    assert [x == y for x, y in zip(left, right)] == [common(a, b) >= (i + 1) * size
                                                     for i in range(min(len(left), len(right)))]
    assert len(set(left)) == len(left) and set(left[common(a, b) // size:]).isdisjoint(right)


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8),
       st.integers(1, 12), st.integers(1, 12))
def test_hashes_of_pieces_agree_with_those_of_the_tokens(a, b, piece, size):
    def tokens(pieces):                                         # pieces that differ have no token in common
        return [(p, i) for p in pieces for i in range(piece)]
    left, right = chain_of_pieces(a, piece, size), chain_of_pieces(b, piece, size)
    assert (len(left), len(right)) == (len(a) * piece // size, len(b) * piece // size)
    same = common(tokens(a), tokens(b))
    assert [x == y for x, y in zip(left, right)] == [same >= (i + 1) * size for i in range(min(len(left), len(right)))]
    assert len(set(left)) == len(left) and set(left[same // size:]).isdisjoint(right)
    assert [chain_of_pieces(a, piece, size, most) for most in range(9)] == [left[:most] for most in range(9)]


def test_extra_keys_and_sizes_keep_prefixes_apart():
    tokens = list(range(16))
    hashes = [chain(tokens, 4, extra) for extra in (None, "lora-a", "lora-b", ["lora-a", "salt"], {"salt": 1}, "")]
    assert len({h for chained in hashes for h in chained}) == 6 * 4
    assert chain(tokens, 4, {"a": 1, "b": 2}) == chain(tokens, 4, {"b": 2, "a": 1})
    assert chain(tokens, 4)[1] != chain(tokens, 8)[0] and chain_of_pieces([1, 2], 4, 4) != chain_of_pieces([1, 2], 8, 8)
    assert chain([1, 2], 1) != chain([2, 1], 1) and chain([], 4) == chain([1], 4) == chain_of_pieces([], 4, 4) == []


def test_hashes_are_the_same_in_every_process():
    code = "from kvlab.kv.prefix import *; print(chain([1, 2, 3], 2, 'x')[0].hex(), chain_of_pieces([7, 8], 512, 384))"
    seen = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                           env={"PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")}
    assert seen == {f"{chain([1, 2, 3], 2, 'x')[0].hex()} {chain_of_pieces([7, 8], 512, 384)}\n"}


@pytest.mark.parametrize("call, message", [
    (lambda: chain([1, 2], 0), "block_size=0 must be"),
    (lambda: chain([1, 2.5], 2), "tokens must be whole numbers"),
    (lambda: chain([1, 2 ** 63], 2), "tokens must be whole numbers of at most 64 bits"),
    (lambda: chain([1, 2], 2, {1, 2}), "extra=.* must be a value that JSON can say"),
    (lambda: chain_of_pieces([1], 0, 16), "piece_tokens=0 must be"),
    (lambda: chain_of_pieces(["a"], 512, 16), "pieces must be whole numbers"),
    (lambda: PrefixCache(BlockPool(4, 4)).allocate([]), "tokens=0 must be"),
])
def test_bad_input_is_refused_in_words(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_freed_block_is_found_until_it_is_handed_out_again():
    pool = BlockPool(num_blocks=6, block_size=4)
    table = pool.take(3)
    for block_id, name in zip(table, "abc"):
        pool.remember(block_id, name)
    pool.free(table)
    assert pool.cached("abc") == [1, 2, 3] and pool.cached("abx") == [1, 2] and pool.cached("bc") == [2, 3]
    assert pool.cached("xab") == [] and pool.free_blocks == 5
    assert pool.take(3) == [4, 5, 3], "blank ones first, then the tail of what was freed"
    assert (pool.cached("abc"), pool.evictions) == ([1, 2], 1)
    pool.share([1, 2])
    assert pool.free_blocks == 0 and pool.take(0) == []
    with pytest.raises(OutOfBlocks, match="1 blocks needed, 0 free"):
        pool.take(1)
    pool.check([[4, 5, 3], [1, 2]])


def test_a_hit_moves_a_block_to_the_end_of_the_queue():
    pool = BlockPool(num_blocks=4, block_size=4)
    for name in "abc":
        (block_id,) = pool.take(1)
        pool.remember(block_id, name)
        pool.share([block_id])                                  # so that nothing is reused on the way
    for block_id in (1, 2, 3, 1, 2, 3):
        pool.release([block_id])
    pool.share(pool.cached("a"))
    pool.release([1])
    assert [pool.take(1)[0] for _ in range(3)] == [2, 3, 1] and pool.evictions == 3


def test_of_two_blocks_with_one_hash_the_first_is_found_and_then_the_next():
    pool = BlockPool(num_blocks=4, block_size=4)
    for block_id in pool.take(3):
        pool.remember(block_id, "a")
    assert pool.cached("a") == [1]
    pool.free([2])
    pool.take(1)                                                # block 2 goes, and is not the one that is found
    assert pool.cached("a") == [1]
    pool.check([[1], [2], [3]])
    pool.free([1])
    assert pool.cached("a") == [1] and pool.take(1) == [1]
    assert pool.cached("a") == [3]
    pool.check([[1], [2], [3]])
    pool.free([3])
    assert pool.take(1) == [3] and pool.cached("a") == [] and pool.evictions == 3


def test_a_block_that_is_written_again_forgets_its_hash_and_a_shared_one_is_copied():
    pool = BlockPool(num_blocks=6, block_size=4)
    table = pool.take(2)
    pool.remember(1, "a")
    pool.remember(2, "b")
    child = pool.fork(table)
    assert pool.append(child, 7) == [(2, 3)] and pool.cached("ab") == [1, 2], "the copy is written, the other kept"
    assert pool.append(table, 7) == [] and pool.cached("ab") == [1]
    assert pool.append(table, 8) == [] and pool.cached("ab") == [1], "block 1 is full and is not written"
    assert pool.evictions == 0
    pool.check([table, child])


@pytest.mark.parametrize("call, message", [
    (lambda pool: pool.take(-1), "count=-1 must be a whole number of at least 0"),
    (lambda pool: pool.share([1, 4]), "block 4 is free: nothing to share"),
    (lambda pool: pool.share([3, 0]), "block 0 is the null block: nothing to share"),
    (lambda pool: pool.share([3, -1]), "block id -1 is out of range"),
    (lambda pool: pool.share([3, 5]), "block id 5 is out of range; allowed: 0 … 4"),
    (lambda pool: pool.remember(0, "z"), "block 0 is the null block: nothing to remember"),
    (lambda pool: pool.remember(3, "z"), "block 3 is free: nothing to remember"),
    (lambda pool: pool.remember(5, "z"), "block id 5 is out of range"),
    (lambda pool: pool.remember(1, "z"), "block 1 remembers 'a' and cannot remember 'z'"),
    (lambda pool: pool.remember(2, None), "cannot remember None"),
])
def test_what_cannot_be_is_refused_and_changes_nothing(call, message):
    pool = BlockPool(num_blocks=5, block_size=4)
    table, other = pool.take(2), pool.take(1)                   # 4 is blank
    pool.remember(1, "a")
    pool.remember(1, "a")                                       # once more is no error
    pool.remember(3, "c")
    pool.free(other)
    before = pool._queue(), list(pool._ref_counts), list(pool._hashes), dict(pool._found), pool.evictions
    with pytest.raises(ValueError, match=message):
        call(pool)
    assert (pool._queue(), pool._ref_counts, pool._hashes, pool._found, pool.evictions) == before
    pool.check([table])


@pytest.mark.parametrize("blocks", [[1, 1], [2], [0]])
def test_release_notices_a_block_that_no_table_holds(blocks):
    pool = BlockPool(num_blocks=3, block_size=4)
    pool.take(1)
    with pytest.raises(BrokenInvariant, match="was given up more often than tables hold it"):
        pool.release(blocks)


def test_a_prompt_found_whole_still_computes_its_last_block():
    cache = PrefixCache(BlockPool(num_blocks=12, block_size=4))
    first, cached = cache.allocate(range(8))
    assert (first, cached) == ([1, 2], 0)
    assert cache.allocate(range(8)) == ([1, 3], 4)
    assert cache.allocate(range(9)) == ([1, 2, 4], 8)
    assert cache.allocate(range(9), extra="lora") == ([5, 6, 7], 0)
    assert (cache.queries, cache.hits) == (34, 12)
    before = cache.pool._queue(), list(cache.pool._ref_counts)
    with pytest.raises(OutOfBlocks, match="5 blocks needed, 4 free"):
        cache.allocate(range(100, 117))
    assert (cache.pool._queue(), cache.pool._ref_counts, cache.queries) == (*before, 34)


def test_an_answer_is_found_by_the_next_turn():
    cache = PrefixCache(BlockPool(num_blocks=9, block_size=4))
    table, _ = cache.allocate([1, 2, 3])
    assert cache.append(table, [1, 2, 3], [4, 5]) == [] and cache.append(table, [1, 2, 3, 4, 5], [6, 7, 8]) == []
    cache.free(table)
    assert cache.allocate([1, 2, 3, 4, 5, 6, 7, 8, 9]) == ([1, 2, 3], 8)


def test_hits_that_are_free_are_not_counted_as_room():
    cache = PrefixCache(BlockPool(num_blocks=4, block_size=4))
    cache.free(cache.allocate(range(8))[0])
    with pytest.raises(OutOfBlocks, match="2 blocks needed, 1 free"):
        cache.allocate(range(13))
    assert cache.allocate(range(12)) == ([1, 2, 3], 8)


class AnySequenceOfOperations(RuleBasedStateMachine):
    """A PrefixCache beside a model: a list of free ids, every live table with its tokens, what each block remembers.

    Tokens are written to a pretended cache, a found prefix is not: reading all tables back shows that nothing was
    found which is not there, also after tables were cut back and written again.
    """
    NUM_BLOCKS, SIZE = 9, 2
    sequences = Bundle("sequences")

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS, self.SIZE)
        self.cache = PrefixCache(self.pool)
        self.free = list(range(1, self.NUM_BLOCKS))
        self.live, self.slots, self.known, self.evicted = [], {}, {}, 0     # known: block -> tokens, oldest first

    def holders(self, block_id):
        return sum(block_id in table for table, _ in self.live)

    def take(self, count):
        taken = [self.free.pop(0) for _ in range(count)]
        self.evicted += sum(self.known.pop(block_id, None) is not None for block_id in taken)
        return taken

    def settle(self, table, tokens):
        for i in range(len(tokens) // self.SIZE):
            self.known.setdefault(table[i], tokens[:(i + 1) * self.SIZE])

    def write(self, table, tokens, first):
        places = self.pool.slot_mapping(table, first, len(tokens) - first)
        self.slots.update(zip(places, tokens[first:], strict=True))

    @rule(target=sequences, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def allocate(self, tokens):
        found = []
        while (end := (len(found) + 1) * self.SIZE) < len(tokens):
            match = [block_id for block_id, prefix in self.known.items() if prefix == tokens[:end]]
            if not match:
                break
            found.append(match[0])
        fresh = -(-len(tokens) // self.SIZE) - len(found)
        room = len(set(self.free) - set(found))
        if fresh > room:
            with pytest.raises(OutOfBlocks, match=f"{fresh} blocks needed, {room} free"):
                self.cache.allocate(tokens)
            return multiple()
        table, cached = self.cache.allocate(tokens)
        self.free = [block_id for block_id in self.free if block_id not in found]
        assert (table, cached) == (found + self.take(fresh), len(found) * self.SIZE)
        self.settle(table, tokens)
        self.write(table, tokens, cached)
        self.live.append((table, tokens))
        return self.live[-1]

    @rule(sequence=sequences, back=st.integers(0, 4), new=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def append(self, sequence, back, new):
        """Cut the sequence back and write on; blocks behind the cut stay in its table."""
        table, tokens = sequence
        held = max(0, len(tokens) - back)
        end = -(-(held + len(new)) // self.SIZE)
        written = range(held // self.SIZE, min(end, len(table)))
        shared = [i for i in written if self.holders(table[i]) > 1]
        assume(len(shared) + max(0, end - len(table)) <= len(self.free))
        before = list(table)
        copies = self.cache.append(table, tokens[:held], new)
        for i in written:
            if i not in shared:
                self.known.pop(before[i], None)
        fresh = self.take(len(shared) + max(0, end - len(before)))
        assert [table[i] for i in shared] + table[len(before):] == fresh
        for source, copy in copies:
            for offset in range(self.SIZE):
                self.slots[copy * self.SIZE + offset] = self.slots.get(source * self.SIZE + offset)
        tokens[held:] = new
        for i in range(held // self.SIZE, len(tokens) // self.SIZE):
            self.known[table[i]] = tokens[:(i + 1) * self.SIZE]
        self.write(table, tokens, held)

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence):
        self.live.append((self.pool.fork(sequence[0]), list(sequence[1])))
        return self.live[-1]

    @rule(sequence=consumes(sequences))
    def free_table(self, sequence):
        self.live = [other for other in self.live if other is not sequence]
        self.cache.free(sequence[0])
        given_up = [block_id for block_id in reversed(sequence[0]) if not self.holders(block_id)]
        self.free = ([block_id for block_id in given_up if block_id not in self.known] + self.free
                     + [block_id for block_id in given_up if block_id in self.known])

    @invariant()
    def holds_together(self):
        self.pool.check([table for table, _ in self.live])
        assert self.pool._queue() == self.free and self.pool.evictions == self.evicted
        assert {i for i, known in enumerate(self.pool._hashes) if known is not None} == set(self.known)
        assert all(chain(tokens, self.SIZE)[-1] == self.pool._hashes[i] for i, tokens in self.known.items())
        for table, tokens in self.live:
            assert [self.slots[slot] for slot in self.pool.slot_mapping(table, 0, len(tokens))] == tokens


TestAnySequenceOfOperations = AnySequenceOfOperations.TestCase
TestAnySequenceOfOperations.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
