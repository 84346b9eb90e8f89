"""Full-precision tails: as if each sequence had been encoded at once, apart from the blocks and from one another."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.kv.cache import STALE, KVCache, Layout
from kvlab.kv.formats import kv_format
from kvlab.shapes import AttentionShape, Workload

PLAIN = AttentionShape(4, 2, 8)
SHAPES = {"plain": PLAIN, "narrow V": AttentionShape(4, 2, 8, v_head_dim=5),
          "MLA": AttentionShape(4, 1, 12, v_head_dim=8, v_in_k=True)}
NAMES = ["kivi4/g16/r24", "kivi2/g8/r5", "kivi4/g4/r1", "kivi2/g16/r16"]


def sequence(shape, kv_len, seed=0):
    """K and V that fp16 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    k_SKD = torch.randn(kv_len, shape.num_kv_heads, shape.head_dim, generator=generator).half().float()
    v_SKE = torch.randn(kv_len, shape.num_kv_heads, shape.v_dim, generator=generator).half().float()
    return k_SKD, None if shape.v_in_k else v_SKE


def part(originals, at, to):
    return [None if x is None else x[at:to] for x in originals]


def same_bits(a, b):
    pairs = list(zip(a.k + a.v, b.k + b.v, strict=True))
    return a.kv_len == b.kv_len and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("order", ["head", "token"])
@pytest.mark.parametrize("chunks", [(1,) * 70, (3,) * 23, (16, 24, 30), (40, 1, 1, 28), (70,), (69, 1)],
                         ids=lambda c: f"{len(c)} of {c[0]}")
@pytest.mark.parametrize("name", NAMES)
def test_appending_equals_encoding_at_once_to_the_bit_after_every_chunk(name, chunks, order, shape):
    """Paged and contiguous: 80 slots in five scattered blocks, or in one."""
    fmt, originals = kv_format(name), sequence(shape, 70)
    paged, contiguous = KVCache(shape, fmt, 7, 16, order=order), KVCache(shape, fmt, 1, 80, order=order)
    for cache, table in ((paged, [5, 1, 6, 0, 3]), (contiguous, [0])):
        at = 0
        for size in chunks:
            cache.append(*part(originals, at, at + size), table, at)
            at += size
            assert same_bits(cache.gather(table, at), fmt.encode(*part(originals, 0, at))), at


def test_what_fp16_does_not_hold_is_rounded_to_it_on_its_way_through_the_tail():
    fmt, table = kv_format("kivi4/g16/r24"), [2, 1, 0, 3]
    originals = [torch.randn(60, 2, 8, generator=torch.Generator().manual_seed(s)) for s in (1, 2)]
    cache = KVCache(PLAIN, fmt, 4, 16)
    for t in range(60):
        cache.append(*part(originals, t, t + 1), table, t)
    assert same_bits(cache.gather(table, 60), fmt.encode(*(x.half().float() for x in originals)))


@pytest.mark.parametrize("order", ["head", "token"])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_the_tail_are_not_in_the_blocks(name, order):
    fmt, table = kv_format(name), [4, 2, 0, 3]
    cache = KVCache(PLAIN, fmt, 5, 16, order=order, sequences=2)
    for at in range(60):
        cache.append(*part(sequence(PLAIN, 60), at, at + 1), table, at, 1)
    encoded = 60 - fmt.tail(60, PLAIN)
    assert 0 < encoded < 60
    for array in cache.by_head(cache.k_arrays[:1] + cache.v_arrays[:1]):               # codes: a row per token
        rows = array[table].transpose(0, 1).flatten(1, 2)
        assert (rows[:, encoded:] == STALE).all() and (array[1] == STALE).all()
        assert not (rows[:, :encoded] == STALE).all((0, 2)).any()
    assert (cache.k_tail[0] == STALE).all() and (cache.v_tail[0] == STALE).all(), "the other sequence's"
    assert torch.equal(cache.k_tail[1, :, :60 - encoded].transpose(0, 1).float(), sequence(PLAIN, 60)[0][encoded:])


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(NAMES), st.sampled_from(["head", "token"]),
       st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20)), min_size=1, max_size=12),
       st.randoms(use_true_random=False))
def test_sequences_that_grow_in_any_turn_do_not_disturb_each_other(name, order, turns, random):
    fmt, lengths = kv_format(name), [0, 0, 0]
    originals = [sequence(PLAIN, 240, seed) for seed in range(3)]
    blocks = random.sample(range(45), 45)
    tables = [blocks[:15], blocks[15:30], blocks[30:]]
    cache = KVCache(PLAIN, fmt, 45, 16, order=order, sequences=3)
    for b, count in turns:
        cache.append(*part(originals[b], lengths[b], lengths[b] + count), tables[b], lengths[b], b)
        lengths[b] += count
        for other, kv_len in enumerate(lengths):
            if kv_len:
                assert same_bits(cache.gather(tables[other], kv_len, other),
                                 fmt.encode(*part(originals[other], 0, kv_len)))


def test_writing_a_sequence_anew_replaces_its_tail_only():
    fmt = kv_format("kivi4/g16/r24")
    cache = KVCache(PLAIN, fmt, 8, 16, sequences=2)
    first, second, third = (fmt.encode(*sequence(PLAIN, n, seed)) for seed, n in enumerate((50, 61, 30)))
    cache.write(first, [0, 1, 2, 3], 0)
    cache.write(second, [4, 5, 6, 7], 1)
    cache.write(third, [0, 1, 2, 3], 0)
    assert same_bits(cache.gather([0, 1, 2, 3], 30, 0), third)
    assert same_bits(cache.gather([4, 5, 6, 7], 61, 1), second)


def test_what_is_read_is_a_copy():
    fmt = kv_format("kivi4/g16/r24")
    cache, packed = KVCache(PLAIN, fmt, 4, 16), fmt.encode(*sequence(PLAIN, 50))
    cache.write(packed, [0, 1, 2, 3])
    read = cache.gather([0, 1, 2, 3], 50)
    for array in read.k + read.v:
        array.zero_()
    assert same_bits(cache.gather([0, 1, 2, 3], 50), packed)


@pytest.mark.parametrize("call", [
    lambda c, p, b: c.write(p, [0, 1, 2], b),
    lambda c, p, b: c.append(*sequence(PLAIN, 30), [0, 1, 2], 0, b),
    lambda c, p, b: c.append(*sequence(PLAIN, 1), [0, 1, 2], 30, b),
    lambda c, p, b: c.gather([0, 1, 2], 30, b)], ids=["write", "append", "append more", "gather"])
@pytest.mark.parametrize("sequence_id", [2, -1])
def test_a_sequence_without_a_tail_is_refused_in_words_and_nothing_is_written(call, sequence_id):
    fmt = kv_format("kivi4/g4/r1")
    cache = KVCache(PLAIN, fmt, 3, 16, sequences=2)
    before = [a.clone() for a in cache.arrays]
    with pytest.raises(IndexError, match=f"sequence {sequence_id} is out of range; this cache keeps the newest tokens "
                                         "of sequences 0 … 1"):
        call(cache, fmt.encode(*sequence(PLAIN, 30)), sequence_id)
    assert all(torch.equal(a, b) for a, b in zip(cache.arrays, before, strict=True))


def test_values_that_fp16_cannot_hold_are_refused_and_nothing_is_written():
    fmt = kv_format("kivi4/g16/r24")
    cache = KVCache(PLAIN, fmt, 3, 16)
    cache.append(*sequence(PLAIN, 30), [0, 1, 2], 0)
    before = [a.clone() for a in cache.arrays]
    with pytest.raises(ValueError, match=r"values up to 7e\+04 do not fit a residual's fp16 \(65504 at most\)"):
        cache.append(*(x * 0 + 7e4 for x in sequence(PLAIN, 1)), [0, 1, 2], 30)
    assert all(torch.equal(a, b) for a, b in zip(cache.arrays, before, strict=True))


def test_arrays_without_a_tail_do_not_fit_a_cache_with_one():
    plain = kv_format("kivi4/g16").encode(*sequence(PLAIN, 32))
    with pytest.raises(ValueError, match="do not fit this cache of kivi4/g16/r24"):
        KVCache(PLAIN, kv_format("kivi4/g16/r24"), 2, 16).write(plain, [0, 1])


def test_no_prefix_is_shared_and_blocks_hold_whole_groups():
    workload = Workload.decode(PLAIN, batch_size=2, kv_len=80, shared_prefix=32)
    fmt = kv_format("kivi4/g16/r24")
    assert Layout(16, share_prefix=True).why_not(workload, fmt) == (
        "kivi4/g16/r24 keeps each sequence's newest tokens apart; kvlab shares no prefix of such a cache")
    assert Layout(16).why_not(workload, fmt) is None and Layout().why_not(workload, fmt) is None
    assert Layout(24).why_not(workload, fmt) == "block_size=24 is not a multiple of kivi4/g16/r24's token group (16)"
    assert Layout(16, share_prefix=True).why_not(workload, kv_format("kivi4/g16")) is None
