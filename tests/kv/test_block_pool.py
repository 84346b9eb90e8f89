"""The block pool against hand-worked examples, and any sequence of its operations against a naive model."""
import pickle

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvlab.kv.block_pool import NULL_BLOCK, BlockPool, BrokenInvariant, OutOfBlocks


def snapshot(pool: BlockPool):
    return pool._queue(), list(pool._ref_counts)


def test_allocate_rounds_up_and_skips_the_null_block():
    pool = BlockPool(num_blocks=6, block_size=4)
    assert pool.allocate(1) == [1]
    assert pool.allocate(4) == [2]
    assert pool.allocate(5) == [3, 4]
    assert (pool.free_blocks, pool.used_blocks) == (1, 4)
    assert [pool.ref_count(i) for i in range(6)] == [0, 1, 1, 1, 1, 0]


def test_blank_blocks_are_reused_last_freed_first_and_a_table_tail_first():
    pool = BlockPool(num_blocks=8, block_size=4)
    a, b = pool.allocate(12), pool.allocate(8)                  # 1 2 3 and 4 5; 6 and 7 were never used
    pool.free(a)
    pool.free(b)
    assert pool.allocate(7 * 4) == [5, 4, 3, 2, 1, 6, 7]


def test_append_grows_only_past_a_block_boundary():
    pool = BlockPool(num_blocks=5, block_size=4)
    table = pool.allocate(3)
    assert pool.append(table, 3) == [] and table == [1]
    assert pool.append(table, 4) == [] and table == [1, 2]
    assert pool.append(table, 5, new_tokens=8) == [] and table == [1, 2, 3, 4]


def test_append_copies_a_shared_last_block_once():
    pool = BlockPool(num_blocks=6, block_size=4)
    parent = pool.allocate(6)
    child = pool.fork(parent)
    assert child == [1, 2] and child is not parent
    assert pool.append(child, 6) == [(2, 3)] and child == [1, 3] and parent == [1, 2]
    assert [pool.ref_count(i) for i in (1, 2, 3)] == [2, 1, 1]
    assert pool.append(parent, 6) == [], "the parent is alone on block 2 now and writes in place"


def test_a_shared_full_block_is_not_copied():
    pool = BlockPool(num_blocks=6, block_size=4)
    parent = pool.allocate(8)
    child = pool.fork(parent)
    assert pool.append(child, 8) == [] and child == [1, 2, 3]


def test_a_shared_block_reserved_ahead_is_replaced_without_a_copy():
    pool = BlockPool(num_blocks=6, block_size=4)
    parent = pool.allocate(8)                                   # holds 4 tokens so far: block 2 is still empty
    child = pool.fork(parent)
    assert pool.append(child, 4) == [] and child == [1, 3] and parent == [1, 2]
    pool.check([parent, child])


def test_shared_blocks_outlive_the_first_owner():
    pool = BlockPool(num_blocks=4, block_size=4)
    parent = pool.allocate(8)
    child = pool.fork(parent)
    pool.free(parent)
    assert (pool.used_blocks, pool.free_blocks) == (2, 1)
    pool.free(child)
    assert (pool.used_blocks, pool.free_blocks) == (0, 3)


def test_slot_mapping_by_hand():
    pool = BlockPool(num_blocks=8, block_size=4)
    pool.free(pool.allocate(12))                                # the queue is now 3 2 1 4 5 6 7
    table = pool.allocate(10)
    assert table == [3, 2, 1]
    assert pool.slot_mapping(table, 2, 5) == [14, 15, 8, 9, 10]
    assert pool.slot_mapping(table, 12, 0) == []
    with pytest.raises(ValueError, match="tokens 11 … 12 lie outside a table of 3 blocks of 4 tokens"):
        pool.slot_mapping(table, 11, 2)


def test_out_of_blocks_says_how_many_and_changes_nothing():
    pool = BlockPool(num_blocks=4, block_size=4)
    table = pool.allocate(6)
    child = pool.fork(table)
    pool.allocate(1)
    before = snapshot(pool)
    for call, needed in [(lambda: pool.allocate(1), 1), (lambda: pool.allocate(9), 3),
                         (lambda: pool.append(child, 6), 1), (lambda: pool.append(child, 6, new_tokens=7), 3)]:
        with pytest.raises(OutOfBlocks, match=f"{needed} blocks needed, 0 free") as caught:
            call()
        assert (caught.value.needed, caught.value.free) == (needed, 0)
        assert snapshot(pool) == before and table == child == [1, 2]
    again = pickle.loads(pickle.dumps(caught.value))            # workers send their errors to the parent
    assert (again.needed, again.free, str(again)) == (3, 0, str(caught.value))


@pytest.mark.parametrize("call, message", [
    (lambda pool, table: BlockPool(1, 4), "num_blocks=1 must be a whole number of at least 2"),
    (lambda pool, table: BlockPool(4, 0), "block_size=0 must be"),
    (lambda pool, table: BlockPool(4, 2.5), "block_size=2.5 must be"),
    (lambda pool, table: pool.allocate(0), "num_tokens=0 must be"),
    (lambda pool, table: pool.allocate(-3), "num_tokens=-3 must be"),
    (lambda pool, table: pool.allocate(True), "num_tokens=True must be"),
    (lambda pool, table: pool.append(table, 6, 0), "new_tokens=0 must be"),
    (lambda pool, table: pool.append(table, -1), "num_tokens=-1 must be"),
    (lambda pool, table: pool.append(table, 9), "num_tokens=9 do not fit in a table of 2 blocks of 4 tokens"),
    (lambda pool, table: pool.append([1, 7], 6), "block id 7 is out of range; allowed: 0 … 4"),
    (lambda pool, table: pool.fork([0]), "block 0 is the null block"),
    (lambda pool, table: pool.fork([4]), "block 4 is 1 times in the table, but 0 tables hold it; was it freed"),
    (lambda pool, table: pool.free([1, 0]), "block 0 is the null block"),
    (lambda pool, table: pool.free([1, -1]), "block id -1 is out of range"),
    (lambda pool, table: pool.free([1, 5]), "block id 5 is out of range; allowed: 0 … 4"),
    (lambda pool, table: pool.free([1, 1]), "block 1 is 2 times in the table, but 1 tables hold it"),
    (lambda pool, table: pool.free([1, 3]), "block 3 is 1 times in the table, but 0 tables hold it"),
    (lambda pool, table: pool.slot_mapping([1, 9], 0, 8), "block id 9 is out of range"),
    (lambda pool, table: pool.slot_mapping(table, -1, 2), "first=-1 must be"),
    (lambda pool, table: pool.ref_count(5), "block id 5 is out of range"),
])
def test_impossible_arguments_are_refused_in_words_and_change_nothing(call, message):
    pool = BlockPool(num_blocks=5, block_size=4)
    table = pool.allocate(6)
    before = snapshot(pool)
    with pytest.raises(ValueError, match=message):
        call(pool, table)
    assert snapshot(pool) == before and table == [1, 2]
    pool.check([table])


def test_a_table_freed_twice_is_refused():
    pool = BlockPool(num_blocks=5, block_size=4)
    table = pool.allocate(6)
    pool.free(table)
    with pytest.raises(ValueError, match="was it freed already"):
        pool.free(table)
    pool.check([])


@pytest.mark.parametrize("damage, message", [
    (lambda pool: pool._ref_counts.__setitem__(1, -1), "negative count"),
    (lambda pool: pool._ref_counts.__setitem__(1, 0), "free"),
    (lambda pool: pool._ref_counts.append(0), "6 counts for 5 blocks"),
    (lambda pool: pool._ref_counts.__setitem__(NULL_BLOCK, 1), "null block"),
    (lambda pool: pool._blank.append(NULL_BLOCK), "null block"),
    (lambda pool: pool._blank.append(1), "free"),
    (lambda pool: pool._blank.append(4), "twice in the free queue"),
    (lambda pool: pool._blank.pop(), "free"),
    (lambda pool: pool._blank.__setitem__(0, 1), "block 1 has count 1 and is free"),
    (lambda pool: pool._ref_counts.__setitem__(1, 2), "block 1 has count 2 and is in 1 tables"),
    (lambda pool: pool._hashes.__setitem__(4, "d"), "waits as blank and has a hash"),
    (lambda pool: pool._hashes.__setitem__(3, None), "waits as remembered without a hash"),
    (lambda pool: pool._hashes.__setitem__(2, "b"), "found by hash are not those that have one"),
    (lambda pool: pool._hashes.__setitem__(1, None), "found by hash are not those that have one"),
    (lambda pool: pool._hashes.__setitem__(1, "b"), "found by hash are not those that have one"),
    (lambda pool: pool._found.pop("a"), "found by hash are not those that have one"),
    (lambda pool: pool._twins.__setitem__("a", []), "a hash has further blocks and no first one"),
])
def test_check_finds_each_kind_of_damage(damage, message):
    pool = BlockPool(num_blocks=5, block_size=4)
    table, other = pool.allocate(6), pool.allocate(4)           # 1 2 and 3; 4 was never used
    pool.remember(1, "a")
    pool.remember(3, "c")
    pool.free(other)
    pool.check([table])
    damage(pool)
    with pytest.raises(BrokenInvariant, match=message):
        pool.check([table])


class AnySequenceOfOperations(RuleBasedStateMachine):
    """The pool beside a model that keeps a list of free ids, every live table, and the tokens each sequence wrote.

    Tokens are written to a pretended cache through slot_mapping; reading them back unharmed shows that no block is
    written by two sequences and that copy-on-write names the right pairs.
    """
    NUM_BLOCKS, BLOCK_SIZE = 9, 3
    sequences = Bundle("sequences")

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS, self.BLOCK_SIZE)
        self.free = list(range(1, self.NUM_BLOCKS))
        self.live, self.cache, self.written = [], {}, 0

    def holders(self, block_id):
        return sum(block_id in table for table, _ in self.live)

    def write(self, sequence, count):
        table, tokens = sequence
        values = range(self.written, self.written + count)
        self.written += count
        self.cache.update(zip(self.pool.slot_mapping(table, len(tokens), count), values, strict=True))
        tokens.extend(values)

    def refused(self, needed, call):
        """Whether the pool must refuse; if so, that it does and leaves everything alone."""
        if needed <= len(self.free):
            return False
        before = snapshot(self.pool), [list(table) for table, _ in self.live]
        with pytest.raises(OutOfBlocks) as caught:
            call()
        assert (caught.value.needed, caught.value.free) == (needed, len(self.free))
        assert (snapshot(self.pool), [list(table) for table, _ in self.live]) == before
        return True

    @rule(target=sequences, num_tokens=st.integers(1, 14))
    def allocate(self, num_tokens):
        needed = -(-num_tokens // self.BLOCK_SIZE)
        if self.refused(needed, lambda: self.pool.allocate(num_tokens)):
            return multiple()
        sequence = self.pool.allocate(num_tokens), []
        assert sequence[0] == [self.free.pop(0) for _ in range(needed)]
        self.live.append(sequence)
        self.write(sequence, num_tokens)
        return sequence

    @rule(target=sequences, num_tokens=st.integers(1, 8), reserved=st.integers(1, 8))
    def allocate_with_room(self, num_tokens, reserved):
        if -(-(num_tokens + reserved) // self.BLOCK_SIZE) > len(self.free):
            return multiple()
        sequence = self.pool.allocate(num_tokens + reserved), []
        del self.free[:len(sequence[0])]
        self.live.append(sequence)
        self.write(sequence, num_tokens)
        return sequence

    @rule(sequence=sequences, new_tokens=st.integers(1, 7))
    def append(self, sequence, new_tokens):
        table, tokens = sequence
        before, held, size = list(table), len(tokens), self.BLOCK_SIZE
        touched = sorted({t // size for t in range(held, held + new_tokens)})
        shared = [i for i in touched if i < len(table) and self.holders(table[i]) > 1]
        fresh = [i for i in touched if i >= len(table)]
        if self.refused(len(shared) + len(fresh), lambda: self.pool.append(table, held, new_tokens)):
            return
        copies = self.pool.append(table, held, new_tokens)
        assert [table[i] for i in shared + fresh] == [self.free.pop(0) for _ in shared + fresh]
        assert copies == [(before[i], table[i]) for i in shared if i * size < held]
        for source, copy in copies:
            for offset in range(size):
                self.cache[copy * size + offset] = self.cache.get(source * size + offset)
        self.write(sequence, new_tokens)

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence):
        twin = self.pool.fork(sequence[0]), list(sequence[1])
        self.live.append(twin)
        return twin

    @rule(sequence=consumes(sequences))
    def free_table(self, sequence):
        self.live = [other for other in self.live if other is not sequence]
        self.pool.free(sequence[0])
        self.free[:0] = [block_id for block_id in reversed(sequence[0]) if not self.holders(block_id)]

    @invariant()
    def holds_together(self):
        self.pool.check([table for table, _ in self.live])
        assert self.pool._queue() == self.free
        assert self.pool.free_blocks == len(self.free)
        assert self.pool.used_blocks == len({block_id for table, _ in self.live for block_id in table})
        for table, tokens in self.live:
            assert [self.cache[slot] for slot in self.pool.slot_mapping(table, 0, len(tokens))] == tokens


TestAnySequenceOfOperations = AnySequenceOfOperations.TestCase
TestAnySequenceOfOperations.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
