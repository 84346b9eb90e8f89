"""The bytes of the cache: what is written through a block table comes back, to the bit, and nothing else is touched."""
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.kv.block_pool import BlockPool
from kvlab.kv.cache import STALE, KVCache, Layout, block_tables, slot_mapping
from kvlab.kv.formats import Packed, format_names, kv_format
from kvlab.shapes import AttentionShape, Workload

PLAIN = AttentionShape(4, 2, 8)
SHAPES = {"plain": PLAIN, "narrow V": AttentionShape(4, 2, 8, v_head_dim=5),
          "MLA": AttentionShape(4, 1, 12, v_head_dim=8, v_in_k=True)}
LAYOUTS = [Layout(), Layout(order="token"), Layout(16), Layout(16, "random"), Layout(48, "random", "token"),
           Layout(16, "random", share_prefix=True)]
PER_TOKEN = ["fp32", "fp16", "bf16", "int8/token", "int8/head", "fp8_e4m3", "fp8_e5m2/token", "int4/token",
             "int4/token/g3", "int2/channel", "k16v8", "k4v2", "fp8_e4m3/tensor+fp32"]
CALIBRATION = 4 * torch.randn(64, 2, 12, generator=torch.Generator().manual_seed(77))


def ready(name, shape=PLAIN):
    """The format, with static scales (if it has any) that no sequence of these tests exceeds by much."""
    k_SKD = CALIBRATION[:, :shape.num_kv_heads, :shape.head_dim]
    return kv_format(name).calibrate(k_SKD, None if shape.v_in_k else k_SKD[..., :shape.v_dim])


def blocks_of(name, size):
    """size, or the next multiple of the format's token group."""
    group = kv_format(name).token_group(PLAIN)
    return -(-size // group) * group


def sequence(shape, kv_len, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    k_SKD = torch.randn(kv_len, shape.num_kv_heads, shape.head_dim, generator=generator).to(dtype)
    v_SKE = torch.randn(kv_len, shape.num_kv_heads, shape.v_dim, generator=generator).to(dtype)
    return k_SKD, None if shape.v_in_k else v_SKE


def same_bits(a: Packed, b: Packed):
    pairs = list(zip(a.k + a.v, b.k + b.v, strict=True))
    return a.kv_len == b.kv_len and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


def everything(cache):
    return [a.clone() for a in cache.arrays]


def unchanged(cache, before):
    return all(torch.equal(a, b) for a, b in zip(cache.arrays, before, strict=True))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", format_names())
def test_what_is_written_comes_back_to_the_bit(name, layout, shape):
    fmt, kv_lens = ready(name, shape), (100, 33, 48, 64)
    if layout.block_size:
        layout = replace(layout, block_size=blocks_of(name, layout.block_size))
    workload = Workload(shape, (1,) * 4, kv_lens, shared_prefix=32)
    if fmt.residual and layout.share_prefix:
        assert "shares no prefix of such a cache" in layout.why_not(workload, fmt)
        return
    assert layout.why_not(workload, fmt) is None
    tables, num_blocks = block_tables(workload, layout, seed=1)
    cache = KVCache(shape, fmt, num_blocks, layout.block_size or blocks_of(name, 112), order=layout.order, sequences=4)
    prefix, written = sequence(shape, 32, seed=9), []
    for b, (table, kv_len) in enumerate(zip(tables, kv_lens, strict=True)):
        k_SKD, v_SKD = sequence(shape, kv_len, seed=b)
        k_SKD[:32] = prefix[0]
        if v_SKD is not None:
            v_SKD[:32] = prefix[1]
        written.append(fmt.encode(k_SKD, v_SKD))
        cache.write(written[-1], table, b)
    for b, (table, packed) in enumerate(zip(tables, written, strict=True)):
        assert same_bits(cache.gather(table, packed.kv_len, b), packed)
        if not fmt.residual:
            shorter = cache.gather(table, 20)
            assert all(torch.equal(x, y[:, :x.shape[1]]) for x, y in zip(shorter.k, packed.k, strict=True))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([*format_names(), "int8/block4", "kivi4/g4/r8", "kivi4/g16/r48+bf16", "fp16+kivi2/g8/r8"]),
       st.sampled_from(["head", "token"]), st.integers(1, 60), st.sampled_from([16, 32]),
       st.randoms(use_true_random=False))
def test_any_block_table_is_followed(name, order, kv_len, block_size, random):
    fmt, num_blocks, block_size = ready(name), 9, blocks_of(name, block_size)
    table = random.sample(range(num_blocks), -(-kv_len // block_size))
    cache = KVCache(PLAIN, fmt, num_blocks, block_size, order=order, sequences=2)
    packed = fmt.encode(*sequence(PLAIN, kv_len))
    cache.write(packed, table, 1)
    assert same_bits(cache.gather(table, kv_len, 1), packed)
    assert all((tail[0] == STALE).all() for tail in (cache.k_tail, cache.v_tail) if tail is not None), "not its own"
    for codec, arrays, stored in ((fmt.k, cache.k_arrays, packed.k), (fmt.v, cache.v_arrays, packed.v)):
        encoded = codec.settled(kv_len)
        others = [i for i in range(num_blocks) if i not in table[:-(-encoded // block_size)]]
        assert all((a[others] == STALE).all() for a in arrays), "a block of somebody else changed"
        values, array = stored[0], cache.by_head(arrays)[0]
        for token, slot in enumerate(slot_mapping(table, block_size, 0, encoded)):
            assert torch.equal(array[slot // block_size, :, slot % block_size], values[:, token])


def test_where_a_token_lies_in_either_order():
    k_SKD, v_SKD = sequence(PLAIN, 7)
    by_order = {order: KVCache(PLAIN, kv_format("fp32"), 4, 4, order=order) for order in ("head", "token")}
    for cache in by_order.values():
        cache.write(kv_format("fp32").encode(k_SKD, v_SKD), [3, 1])
    head, token = (by_order[order].v_arrays[0] for order in ("head", "token"))
    assert head.shape == (4, 2, 4, 8) and token.shape == (4, 4, 2, 8)
    assert torch.equal(head[1, :, 2], v_SKD[6]) and torch.equal(token[1, 2], v_SKD[6])      # token 6: block 1, slot 2
    assert (head[1, :, 3] == STALE).all() and (head[2] == STALE).all() and (token[0] == STALE).all()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("order", ["head", "token"])
@pytest.mark.parametrize("name", PER_TOKEN)
def test_appending_token_by_token_equals_writing_at_once(name, order, shape):
    fmt, table = ready(name, shape), [4, 1, 3]
    k_SKD, v_SKD = sequence(shape, 40)
    cache = KVCache(shape, fmt, 5, 16, order=order)
    for t in range(40):
        cache.append(k_SKD[t:t + 1], None if v_SKD is None else v_SKD[t:t + 1], table[:t // 16 + 1], t)
    assert same_bits(cache.gather(table, 40), fmt.encode(k_SKD, v_SKD))
    assert (cache.by_head(cache.k_arrays)[0][3, :, 8:] == STALE).all(), "a slot beyond the last token was written"


@pytest.mark.parametrize("order", ["head", "token"])
@pytest.mark.parametrize("chunks", [(16, 32, 16), (48, 16), (16,) * 3 + (7,), (32, 25)], ids=str)
@pytest.mark.parametrize("name", ["int8/block16", "fp8_e4m3/block8", "int4/channel/g16", "int2/block4", "kivi4/g16"])
def test_appending_whole_groups_equals_writing_at_once(name, chunks, order):
    fmt, kv_len, table, at = kv_format(name), sum(chunks), [2, 0], 0
    k_SKD, v_SKD = sequence(PLAIN, kv_len)
    cache = KVCache(PLAIN, fmt, 3, 32, order=order)
    for size in chunks:
        cache.append(k_SKD[at:at + size], v_SKD[at:at + size], table, at)
        at += size
    assert same_bits(cache.gather(table, kv_len), fmt.encode(k_SKD, v_SKD))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size, table", [(16, [1, 2]), (48, [2])])
@pytest.mark.parametrize("chunk", [1, 3, 5])
def test_appending_into_a_group_errs_by_half_a_step_for_every_time_the_scale_grew(chunk, block_size, table, dtype):
    """A new largest element of the group makes the old codes round again, by half a step of the new scale at most."""
    fmt, kv_len = kv_format("int8/block16"), 30
    originals = sequence(PLAIN, kv_len, dtype=dtype)
    cache = KVCache(PLAIN, fmt, 3, block_size)
    for at in range(0, kv_len, chunk):
        cache.append(*(x[at:at + chunk] for x in originals), table, at)
    for x, back in zip(originals, fmt.decode(cache.gather(table, kv_len), PLAIN, torch.float32), strict=True):
        for group in (slice(0, 16), slice(16, 30)):
            for head in range(2):
                part = x[group, head].float()
                peaks = part.abs().amax(1).cummax(0).values           # the scale after each token, times 127
                grew = 1 + int((peaks[1:] > peaks[:-1]).sum())
                error = (back[group, head] - part).abs().max()
                assert 0 < error <= grew * (peaks[-1] / 127) / 2 * (1 + 1e-4)


@pytest.mark.parametrize("name", ["int4/block16", "int2/block16", "int4/channel/g16", "fp8_e4m3/block16",
                                  "fp8_e5m2/channel/g16"])
@pytest.mark.parametrize("chunk", [1, 3, 5])
def test_appending_into_a_group_of_any_kind_errs_by_half_a_step_for_every_time_its_range_grew(name, chunk):
    fmt, table, kv_len = kv_format(name), [1, 2], 30
    originals = sequence(PLAIN, kv_len)
    cache = KVCache(PLAIN, fmt, 3, 16)
    for at in range(0, kv_len, chunk):
        cache.append(*(x[at:at + chunk] for x in originals), table, at)
    # the widest step between codes: of e4m3 from 256 to 448, of e5m2 from 32768 to 57344
    steps = {"int4": 1 / 15, "int2": 1 / 3, "fp8_e4m3": 32 / 448, "fp8_e5m2": 8192 / 57344}[name.partition("/")[0]]
    for x, back in zip(originals, fmt.decode(cache.gather(table, kv_len), PLAIN, torch.float32), strict=True):
        x, back = (y.flatten(2) if "channel" in name else y.unsqueeze(2) for y in (x, back))     # [S, K, tiles(, D)]
        x, back = (y.unsqueeze(-1) if "channel" in name else y for y in (x, back))
        for group in (slice(0, 16), slice(16, 30)):
            high, low = x[group].amax(-1).cummax(0).values, x[group].amin(-1).cummin(0).values
            grew = 1 + ((high[1:] > high[:-1]) | (low[1:] < low[:-1])).sum(0)
            peak = torch.maximum(high[-1].abs(), low[-1].abs())
            span = peak if name.startswith("fp8") else high[-1] - low[-1]
            bound = grew * (span * steps / 2 * (1 + 1e-3) + 2.0**-10 * peak)      # scales and zero points are fp16
            error = (back[group] - x[group]).abs().amax((0, -1))
            assert (error <= bound).all() and (error > 0).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_new_token_of_a_narrower_dtype_does_not_round_the_old_ones(dtype):
    fmt = kv_format("int8/block16")
    k_SKD, v_SKD = (1e5 * x for x in sequence(PLAIN, 10))              # beyond the range of fp16
    cache = KVCache(PLAIN, fmt, 2, 16)
    cache.write(fmt.encode(k_SKD, v_SKD), [1])
    old = cache.gather([1], 10)
    cache.append(*sequence(PLAIN, 1, dtype=dtype), [1], 10)
    new = cache.gather([1], 11)
    assert torch.equal(new.k[0][:, :10], old.k[0]) and torch.allclose(new.k[1], old.k[1], rtol=1e-6, atol=0)
    assert torch.equal(new.v[0][:, :10], old.v[0]) and torch.allclose(new.v[1], old.v[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_do_not_drift_while_the_scale_stays(dtype):
    """The group's largest element came first, so every later token only joins: as if all were written at once."""
    fmt = kv_format("int8/block16")
    k_SKD, v_SKD = sequence(PLAIN, 16, dtype=dtype)
    k_SKD[0] = v_SKD[0] = 6.0
    cache = KVCache(PLAIN, fmt, 2, 16)
    for t in range(16):
        cache.append(k_SKD[t:t + 1], v_SKD[t:t + 1], [1], t)
    appended, at_once = cache.gather([1], 16), fmt.encode(k_SKD, v_SKD)
    for got, wanted in ((appended.k, at_once.k), (appended.v, at_once.v)):
        assert torch.equal(got[0], wanted[0]) and torch.allclose(got[1], wanted[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["int4/block16", "int2/block16", "int4/channel/g16", "fp8_e4m3/block16"])
def test_no_codes_of_any_kind_drift_while_the_range_stays(name):
    fmt = kv_format(name)
    k_SKD, v_SKD = sequence(PLAIN, 16)
    k_SKD[0] = v_SKD[0] = 6.0
    k_SKD[1] = v_SKD[1] = -6.0
    cache = KVCache(PLAIN, fmt, 2, 16)
    for t in range(16):
        cache.append(k_SKD[t:t + 1], v_SKD[t:t + 1], [1], t)
    appended, at_once = cache.gather([1], 16), fmt.encode(k_SKD, v_SKD)
    for got, wanted in ((appended.k, at_once.k), (appended.v, at_once.v)):
        assert torch.equal(got[0], wanted[0])
        assert all(torch.allclose(a, b, rtol=1e-6, atol=0) for a, b in zip(got[1:], wanted[1:], strict=True))


def test_appending_behind_a_written_sequence_leaves_it_alone():
    fmt = kv_format("int8/token")
    k_SKD, v_SKD = sequence(PLAIN, 21)
    cache = KVCache(PLAIN, fmt, 4, 16)
    cache.write(fmt.encode(k_SKD[:18], v_SKD[:18]), [2, 3])
    cache.append(k_SKD[18:], v_SKD[18:], [2, 3], 18)
    assert same_bits(cache.gather([2, 3], 21), fmt.encode(k_SKD, v_SKD))


@pytest.mark.parametrize("name", ["fp32", "int8/block16"])
def test_copy_on_write_keeps_both_sequences_right(name):
    """Fork at 20 tokens, then both grow: the pool says which block to copy, the cache's bytes follow it."""
    fmt, pool = kv_format(name), BlockPool(8, 16)
    cache = KVCache(PLAIN, fmt, pool.num_blocks, pool.block_size)
    past, own = sequence(PLAIN, 20), [sequence(PLAIN, 15, seed=s) for s in (1, 2)]
    parent = pool.allocate(20)
    cache.write(fmt.encode(*past), parent)
    tables, copied = [parent, pool.fork(parent)], []
    for step in range(15):
        for table, (k_SKD, v_SKD) in zip(tables, own, strict=True):
            for source, copy in pool.append(table, 20 + step):
                copied.append((source, copy))
                for array in cache.k_arrays + cache.v_arrays:
                    array[copy] = array[source]
            cache.append(k_SKD[step:step + 1], v_SKD[step:step + 1], table, 20 + step)
    pool.check(tables)
    assert len(copied) == 1 and tables[0][0] == tables[1][0] and not set(tables[0][1:]) & set(tables[1][1:])
    for table, sides in zip(tables, own, strict=True):
        whole = [torch.cat(pair) for pair in zip(past, sides, strict=True)]
        back = fmt.decode(cache.gather(table, 35), PLAIN, torch.float32)
        for x, y in zip(whole, back, strict=True):
            assert torch.equal(x, y) if name == "fp32" else (x - y).abs().max() < 0.15
        assert same_bits(cache.gather(table, 16), fmt.encode(*(x[:16] for x in past)))


@pytest.mark.parametrize("call, sentence", [
    (lambda c, p: c.write(p, [1]), "block table of 1 blocks of 16 holds 16 tokens, 20 needed; allocate more"),
    (lambda c, p: c.write(p, []), "block table of 0 blocks of 16 holds 0 tokens, 20 needed"),
    (lambda c, p: c.write(p, [1, 4]), "block id 4 in the block table is out of range; this cache has blocks 0 … 3"),
    (lambda c, p: c.write(p, [1, -1]), "block id -1 in the block table is out of range"),
    (lambda c, p: c.gather([1], 17), "block table of 1 blocks of 16 holds 16 tokens, 17 needed"),
    (lambda c, p: c.gather([9], 3), "block id 9 in the block table is out of range"),
    (lambda c, p: c.append(*sequence(PLAIN, 2), [1], 15), "holds 16 tokens, 17 needed"),
    (lambda c, p: c.append(*sequence(PLAIN, 1), [1], 16), "holds 16 tokens, 17 needed"),
    (lambda c, p: c.append(*sequence(PLAIN, 1), [1, 7], 16), "block id 7 in the block table is out of range"),
    (lambda c, p: c.append(*sequence(PLAIN, 1), [7, 1], 16), "block id 7 in the block table is out of range"),
])
@pytest.mark.parametrize("name", ["fp32", "int8/token", "int8/block16"])
def test_a_wrong_block_table_is_refused_in_words_and_nothing_is_written(name, call, sentence):
    cache = KVCache(PLAIN, kv_format(name), 4, 16)
    before = everything(cache)
    with pytest.raises(IndexError) as caught:
        call(cache, kv_format(name).encode(*sequence(PLAIN, 20)))
    assert sentence in str(caught.value) and unchanged(cache, before)


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8/token", "int8/block16", "int8/head", "fp8_e4m3", "k8v4",
                                  "kivi4/g16/r32", "bf16+kivi4/g16/r32", "kivi4/g16/r32+int8/token"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("side", ["K", "V"])
def test_nan_and_infinity_are_refused_in_one_sentence_and_nothing_is_written(name, value, side):
    fmt, cache = ready(name), KVCache(PLAIN, ready(name), 2, 16)
    k_SKD, v_SKD = sequence(PLAIN, 10)
    (k_SKD if side == "K" else v_SKD)[6:8, 1, 3] = value
    before = everything(cache)
    for store in (lambda: cache.write(fmt.encode(k_SKD, v_SKD), [1]), lambda: cache.append(k_SKD, v_SKD, [1], 0)):
        with pytest.raises(ValueError) as caught:
            store()
        assert str(caught.value) == (f"{side} holds NaN or infinity, first at token 6 of 10; "
                                     "a cache takes finite values only")
    assert unchanged(cache, before)


@pytest.mark.parametrize("wrong", [
    pytest.param(lambda: kv_format("bf16").encode(*sequence(PLAIN, 5)), id="another format"),
    pytest.param(lambda: kv_format("int8/token").encode(*sequence(PLAIN, 5)), id="more arrays"),
    pytest.param(lambda: kv_format("fp32").encode(*sequence(AttentionShape(4, 1, 8), 5)), id="one head for two"),
    pytest.param(lambda: kv_format("fp32").encode(*sequence(AttentionShape(4, 2, 1), 5)), id="one element for eight"),
    pytest.param(lambda: kv_format("fp32").encode(sequence(PLAIN, 5)[0], None), id="no V"),
])
def test_arrays_of_another_format_or_shape_are_refused_not_cast_or_repeated(wrong):
    cache = KVCache(PLAIN, kv_format("fp32"), 2, 16)
    before = everything(cache)
    with pytest.raises(ValueError, match="do not fit this cache of fp32, whose arrays are"):
        cache.write(wrong(), [1])
    assert unchanged(cache, before)


@pytest.mark.parametrize("name", ["fp32", "int8/block16", "kivi4/g16/r16", "bf16+kivi4/g16/r16"])
@pytest.mark.parametrize("shape, wrong", [
    (PLAIN, lambda: sequence(AttentionShape(4, 1, 8), 1)), (PLAIN, lambda: sequence(AttentionShape(4, 2, 1), 1)),
    (PLAIN, lambda: (sequence(PLAIN, 1)[0], None)), (PLAIN, lambda: (sequence(PLAIN, 2)[0], sequence(PLAIN, 1)[1])),
    (SHAPES["MLA"], lambda: 2 * sequence(SHAPES["MLA"], 1)[:1])],
    ids=["one head for two", "one element for eight", "no V", "fewer of V", "V where it is a view"])
@pytest.mark.parametrize("kv_len", [0, 5])
def test_new_tokens_of_another_shape_are_refused_not_repeated_or_dropped(name, shape, wrong, kv_len):
    cache = KVCache(shape, kv_format(name), 2, 16)
    if kv_len:
        cache.append(*sequence(shape, kv_len), [1], 0)
    before = everything(cache)
    with pytest.raises(ValueError, match="do not fit this cache, which takes .*: tokens, KV heads, width"):
        cache.append(*wrong(), [1], kv_len)
    assert unchanged(cache, before)


@pytest.mark.parametrize("k_only", [False, True])
def test_a_group_that_is_not_full_errs_more_appended_token_by_token_than_encoded_at_once(k_only):
    """It is decoded and rounded again with every token; a residual, which keeps it in fp16, spares KIVI that."""
    shape = AttentionShape(4, 2, 64)
    k_SKD, v_SKD = sequence(shape, 150)
    name = "int4/channel/g32" + "+bf16" * k_only
    errors = {}
    for one in (name, "kivi4/g32/r32"):
        fmt, cache = kv_format(one), KVCache(shape, kv_format(one), 5, 32)
        for t in range(150):
            cache.append(k_SKD[t:t + 1], v_SKD[t:t + 1], [4, 0, 3, 1, 2], t)
        for how, packed in (("appended", cache.gather([4, 0, 3, 1, 2], 150)), ("at once", fmt.encode(k_SKD, v_SKD))):
            back, _ = fmt.decode(packed, shape, torch.float32)
            errors[one, how] = float((back - k_SKD).norm() / k_SKD.norm())
    assert 1.1 * errors[name, "at once"] < errors[name, "appended"] < 2 * errors[name, "at once"]
    assert errors["kivi4/g32/r32", "appended"] < errors[name, "at once"]


@pytest.mark.parametrize("block_size", [0, -16, 8, 24])
def test_blocks_that_cut_a_group_are_refused(block_size):
    with pytest.raises(ValueError, match=f"block_size={block_size} must be a multiple of int8/block16's token group"):
        KVCache(PLAIN, kv_format("int8/block16"), 4, block_size)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("order", ["head", "token"])
@pytest.mark.parametrize("name", [*format_names(), "bf16+kivi4/g16/r48", "kivi2/g16/r16+fp32",
                                  "kivi4/g16/r48+kivi2/g8/r8"])
def test_nbytes_is_what_the_arrays_take(name, order, shape):
    fmt, size = kv_format(name), blocks_of(name, 32)
    cache = KVCache(shape, fmt, 5, size, order=order, sequences=3)
    if not any(codec.residual for codec, _ in fmt.sides(shape)):
        assert cache.nbytes == 5 * fmt.nbytes(size, shape)
    tail = shape.num_kv_heads * 2 * sum(codec.residual * width for codec, width in fmt.sides(shape))
    blocks = sum(a.untyped_storage().nbytes() for a in cache.k_arrays + cache.v_arrays)
    assert cache.nbytes == fmt.allocated(5, size, 3, shape) == blocks + 3 * tail
    assert cache.nbytes == sum(a.untyped_storage().nbytes() for a in cache.arrays)


# ------------------------------------------------------------------------------------------------- tables and slots

def test_slot_mapping_by_hand():
    assert slot_mapping([3, 0, 2], 4, 2, 7) == [14, 15, 0, 1, 2, 3, 8]
    assert slot_mapping([5], 16, 0, 0) == []


@pytest.mark.parametrize("first, count", [(-1, 2), (7, 2), (8, 1), (0, 9)])
def test_slots_outside_the_table_are_refused(first, count):
    with pytest.raises(IndexError, match=f"tokens {first} … {first + count - 1} lie outside a block table of 2 blocks"):
        slot_mapping([1, 2], 4, first, count)


RAGGED = Workload(PLAIN, (1, 1, 1), (40, 16, 50), shared_prefix=16)


def test_contiguous_is_one_block_per_sequence():
    assert block_tables(RAGGED, Layout(), 0) == ([[0], [1], [2]], 3)


def test_paged_tables_follow_one_another_and_leave_the_null_block_out():
    assert block_tables(RAGGED, Layout(16), 0) == ([[1, 2, 3], [4], [5, 6, 7, 8]], 9)


def test_a_shared_prefix_is_the_same_blocks():
    assert block_tables(RAGGED, Layout(16, share_prefix=True), 0) == ([[1, 2, 3], [1], [1, 4, 5, 6]], 7)


@pytest.mark.parametrize("share", [False, True])
def test_random_order_moves_whole_blocks_and_depends_on_the_seed_only(share):
    ordered, num_blocks = block_tables(RAGGED, Layout(16, share_prefix=share), 0)
    random, same_number = block_tables(RAGGED, Layout(16, "random", share_prefix=share), 0)
    renamed = {a: b for x, y in zip(ordered, random, strict=True) for a, b in zip(x, y, strict=True)}
    assert same_number == num_blocks and sorted(renamed.values()) == list(range(1, num_blocks))
    assert [[renamed[i] for i in table] for table in ordered] == random != ordered
    assert block_tables(RAGGED, Layout(16, "random", share_prefix=share), 0)[0] == random
    assert block_tables(RAGGED, Layout(16, "random", share_prefix=share), 1)[0] != random
