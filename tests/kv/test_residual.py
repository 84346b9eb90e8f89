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
NAMES = ["kivi4/g16/r32", "kivi2/g8/r8", "kivi4/g4/r4", "kivi2/g16/r48"]
MIXED = ["bf16+kivi4/g16/r32", "kivi2/g8/r24+fp32", "kivi4/g16/r48+kivi2/g8/r8", "kivi4/g4/r4+int8/token"]


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
@pytest.mark.parametrize("chunks", [(1,) * 70, (3,) * 23, (16, 16, 1, 31, 6), (40, 1, 1, 28), (69, 1)],
                         ids=lambda c: f"{len(c)} of {c[0]}")
@pytest.mark.parametrize("name", NAMES + MIXED)
def test_appending_equals_encoding_at_once_to_the_bit_after_every_chunk(name, chunks, shape):
    """Paged, in blocks that do and that do not divide a residual, and contiguous."""
    fmt, originals = kv_format(name), sequence(shape, 70)
    for size, order, table in ((16, "head", [5, 1, 6, 0, 3]), (48, "token", [3, 1]), (80, "head", [0])):
        cache, at = KVCache(shape, fmt, 7, size, order=order), 0
        for count in chunks:
            cache.append(*part(originals, at, at + count), table, at)
            at += count
            assert same_bits(cache.gather(table, at), fmt.encode(*part(originals, 0, at))), at


@pytest.mark.parametrize("chunks", [(128,) * 3, (127, 1, 1, 127, 128), (300, 84)], ids=str)
def test_a_residual_of_128_fills_whole_blocks_and_leaves_none_half_done(chunks):
    shape, fmt, table, at = AttentionShape(4, 2, 32), kv_format("kivi2/g32/r128"), [2, 5, 0, 4, 1], 0
    originals = sequence(shape, 384)
    cache = KVCache(shape, fmt, 6, 96)
    for count in chunks:
        cache.append(*part(originals, at, at + count), table, at)
        at += count
        assert same_bits(cache.gather(table, at), fmt.encode(*part(originals, 0, at)))
    assert [cache.gather(table, at).k[i].shape[1] for i in (0, -1)] == [384, 0]
    assert [cache.gather(table, at).v[i].shape[1] for i in (0, -1)] == [256, 128]


@pytest.mark.parametrize("chunk", [1, 5, 32, 50])
def test_what_fp16_does_not_hold_is_rounded_to_it_on_its_way_through_the_tail_and_nowhere_else(chunk):
    """Tokens that are encoded as they come, such as the one that fills K's tail, keep the dtype they come in."""
    fmt, table = kv_format("kivi4/g16/r32"), [2, 1, 0, 3, 4]
    originals = [torch.randn(70, 2, 8, generator=torch.Generator().manual_seed(s)) for s in (1, 2)]
    cache, seen = KVCache(PLAIN, fmt, 5, 16), [x.half().float() for x in originals]
    for at in range(0, 70, chunk):
        cache.append(*part(originals, at, at + chunk), table, at)
        for codec, x, y in zip((fmt.k, fmt.v), originals, seen, strict=True):
            y[at:codec.settled(min(70, at + chunk))] = x[at:codec.settled(min(70, at + chunk))]
    assert same_bits(cache.gather(table, 70), fmt.encode(*seen))


@pytest.mark.parametrize("order", ["head", "token"])
@pytest.mark.parametrize("name, k_settled, v_settled", [
    ("kivi4/g16/r32", 32, 28), ("kivi2/g8/r8", 56, 52), ("kivi4/g4/r4", 60, 56), ("kivi2/g16/r48", 48, 12),
    ("bf16+kivi4/g16/r32", 60, 28), ("kivi2/g8/r24+fp32", 48, 60), ("kivi4/g16/r48+kivi2/g8/r8", 48, 52)])
def test_tokens_of_the_tail_are_not_in_the_blocks(name, k_settled, v_settled, order):
    fmt, table, originals = kv_format(name), [4, 2, 0, 3], sequence(PLAIN, 60)
    cache = KVCache(PLAIN, fmt, 5, 16, order=order, sequences=2)
    for at in range(60):
        cache.append(*part(originals, at, at + 1), table, at, 1)
    for x, arrays, tail, settled in zip(originals, (cache.k_arrays, cache.v_arrays), (cache.k_tail, cache.v_tail),
                                        (k_settled, v_settled), strict=True):
        array = cache.by_head(arrays)[0]                                               # codes: a row per token
        rows = array[table].transpose(0, 1).flatten(1, 2)
        assert (rows[:, settled:] == STALE).all() and (array[1] == STALE).all()
        assert not (rows[:, :settled] == STALE).all((0, 2)).any()
        if tail is not None:
            assert (tail[0] == STALE).all(), "the other sequence's"
            assert torch.equal(tail[1, :, :60 - settled].transpose(0, 1).float(), x[settled:])
        else:
            assert settled == 60


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(NAMES + MIXED), st.sampled_from(["head", "token"]),
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
    fmt = kv_format("kivi4/g16/r32")
    cache = KVCache(PLAIN, fmt, 8, 16, sequences=2)
    first, second, third = (fmt.encode(*sequence(PLAIN, n, seed)) for seed, n in enumerate((50, 61, 30)))
    cache.write(first, [0, 1, 2, 3], 0)
    cache.write(second, [4, 5, 6, 7], 1)
    cache.write(third, [0, 1, 2, 3], 0)
    assert same_bits(cache.gather([0, 1, 2, 3], 30, 0), third)
    assert same_bits(cache.gather([4, 5, 6, 7], 61, 1), second)


def test_what_is_read_is_a_copy():
    fmt = kv_format("kivi4/g16/r32")
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
@pytest.mark.parametrize("name", ["kivi4/g4/r4", *MIXED])
def test_a_sequence_without_a_tail_is_refused_in_words_and_nothing_is_written(name, call, sequence_id):
    fmt = kv_format(name)
    cache = KVCache(PLAIN, fmt, 3, 16, sequences=2)
    before = [a.clone() for a in cache.arrays]
    with pytest.raises(IndexError, match=f"sequence {sequence_id} is out of range; this cache keeps the newest tokens "
                                         "of sequences 0 … 1"):
        call(cache, fmt.encode(*sequence(PLAIN, 30)), sequence_id)
    assert all(torch.equal(a, b) for a, b in zip(cache.arrays, before, strict=True))


@pytest.mark.parametrize("name", MIXED)
def test_only_a_side_with_a_residual_has_a_tail_and_each_its_own_length(name):
    fmt = kv_format(name)
    cache = KVCache(SHAPES["narrow V"], fmt, 3, 16, sequences=4)
    for tail, codec, width in ((cache.k_tail, fmt.k, 8), (cache.v_tail, fmt.v, 5)):
        assert (tail is None) == (not codec.residual)
        assert tail is None or tail.shape == (4, 2, codec.residual, width) and tail.dtype == torch.float16
    latent = KVCache(SHAPES["MLA"], fmt, 3, 16)
    assert latent.v_tail is None and not latent.v_arrays and (latent.k_tail is None) == (not fmt.k.residual)


@pytest.mark.parametrize("side", ["K", "V"])
def test_values_that_fp16_cannot_hold_are_refused_and_nothing_is_written(side):
    fmt = kv_format("kivi4/g16/r32")
    cache = KVCache(PLAIN, fmt, 3, 16)
    cache.append(*sequence(PLAIN, 30), [0, 1, 2], 0)
    before = [a.clone() for a in cache.arrays]
    with pytest.raises(ValueError, match=r"values up to 7e\+04 do not fit a residual's fp16 \(65504 at most\)"):
        cache.append(*(x * 0 + 7e4 * (side == name) for name, x in zip("KV", sequence(PLAIN, 1))), [0, 1, 2], 30)
    assert all(torch.equal(a, b) for a, b in zip(cache.arrays, before, strict=True))


def test_arrays_without_a_tail_do_not_fit_a_cache_with_one():
    plain = kv_format("kivi4/g16").encode(*sequence(PLAIN, 32))
    with pytest.raises(ValueError, match="do not fit this cache of kivi4/g16/r32"):
        KVCache(PLAIN, kv_format("kivi4/g16/r32"), 2, 16).write(plain, [0, 1])


def test_no_prefix_is_shared_and_blocks_hold_whole_groups():
    workload = Workload.decode(PLAIN, batch_size=2, kv_len=80, shared_prefix=32)
    fmt = kv_format("kivi4/g16/r32")
    assert Layout(16, share_prefix=True).why_not(workload, fmt) == (
        "kivi4/g16/r32 keeps each sequence's newest tokens apart; kvlab shares no prefix of such a cache")
    assert Layout(16).why_not(workload, fmt) is None and Layout().why_not(workload, fmt) is None
    assert Layout(48).why_not(workload, fmt) is None, "a block need not hold a whole residual"
    assert "block_size=24 is not a multiple of kivi4/g16/r32's token group (16)" in Layout(24).why_not(workload, fmt)
    assert Layout(16, share_prefix=True).why_not(workload, kv_format("kivi4/g16")) is None
    for name in MIXED:
        assert "newest tokens apart" in Layout(16, share_prefix=True).why_not(workload, kv_format(name))
