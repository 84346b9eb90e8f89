"""KV formats: sizes equal what is really stored, to the byte; names, refusals, and what every format must keep to."""
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.attention import trial
from kvlab.kv.formats import KVFormat, format_names, kv_format
from kvlab.kv.formats._base import families
from kvlab.kv.formats._scaled import Scaled
from kvlab.kv.sizing import size
from kvlab.registry import LONGEST
from kvlab.shapes import AttentionShape, Workload

SIZED = format_names(sizes_only=True)
ALL = sorted({*format_names(), "int8/block1", "int8/block7", "int8/block64", "int8/channel/g8", "int8/token/g5",
              "fp8_e5m2/channel/g16", "fp8_e4m3/block999999", "int4/channel", "int4/channel/g5", "int4/token/g999999",
              "int2/tensor", "int2/block3", "kivi4/g16", "kivi2/g8/r16", "kivi4/g16/r32", "kivi4/g1/r1",
              "kivi2/g16/r48", "k2v16", "int8/head+kivi2/g16", "fp32+fp16", "bf16+kivi4/g16/r32", "kivi2/g8/r8+fp32",
              "kivi4/g16/r48+kivi2/g8/r32"})
UNSCALED = [name for name in ALL if name in ("fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "fp32+fp16")]
ROUNDING = {"fp32": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8}       # half a step of a mantissa of 10 and of 7 bits
FP16_MAX = 65504.0
WIDE = [AttentionShape(4, 2, 64), AttentionShape(2, 1, 80), AttentionShape(2, 2, 96), AttentionShape(3, 3, 128),
        AttentionShape(8, 1, 256), AttentionShape(4, 2, 192, v_head_dim=128), AttentionShape(4, 2, 64, v_head_dim=256),
        AttentionShape(16, 1, 576, v_head_dim=512, v_in_k=True)]


@st.composite
def shapes(draw):
    kv_heads, head_dim = draw(st.integers(1, 5)), draw(st.integers(1, 24))
    v_in_k = draw(st.booleans())
    v_head_dim = draw(st.none() | st.integers(1, head_dim if v_in_k else 24))
    return AttentionShape(2 * kv_heads, kv_heads, head_dim, v_head_dim, v_in_k)


def sequence(shape, kv_len, seed=0, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    k_SKD = spread * torch.randn(kv_len, shape.num_kv_heads, shape.head_dim, generator=generator)
    v_SKD = spread * torch.randn(kv_len, shape.num_kv_heads, shape.v_dim, generator=generator)
    return k_SKD, None if shape.v_in_k else v_SKD


def settled(codec, kv_len, axis):
    """Tokens of K or V that are encoded, told token by token: K's full tail goes whole, V's loses its oldest."""
    count = tail = 0
    for _ in range(kv_len):
        tail += 1
        if codec.residual and (tail < codec.residual if axis == "k" else tail <= codec.residual):
            continue
        gone = 1 if codec.residual and axis == "v" else tail
        count, tail = count + gone, tail - gone
    return count


# ----------------------------------------------------------------------------------------------------------- storage

def stored_exactly(kv, shape, kv_len, originals):
    kv = kv.calibrate(*originals)
    packed = kv.encode(*originals)
    assert packed.nbytes == kv.nbytes(kv_len, shape), (shape, kv_len)
    assert packed.nbytes == sum(a.untyped_storage().nbytes() for a in packed.k + packed.v), "a view of something larger"
    expected = []
    for axis, (codec, width) in zip("kv", kv.sides(shape), strict=not shape.v_in_k):
        encoded = settled(codec, kv_len, axis)
        expected += [((shape.num_kv_heads, -(-encoded // part.tokens), part.width), part.dtype, part.itemsize)
                     for part in codec.components(width)]
        if codec.residual:
            expected.append(((shape.num_kv_heads, kv_len - encoded, width), "float16", 2))
    assert [(tuple(a.shape), str(a.dtype).removeprefix("torch."), a.itemsize)
            for a in packed.k + packed.v] == expected
    k_back, v_back = kv.decode(packed, shape, torch.float32)
    assert k_back.shape == originals[0].shape and v_back.shape == (kv_len, shape.num_kv_heads, shape.v_dim)
    assert k_back.isfinite().all() and v_back.isfinite().all()
    assert not shape.v_in_k or torch.equal(v_back, k_back[..., :shape.v_dim])


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=25, deadline=None)
@given(shape=shapes(), kv_len=st.integers(1, 200))
def test_nbytes_is_what_is_stored_to_the_byte(name, shape, kv_len):
    stored_exactly(kv_format(name), shape, kv_len, sequence(shape, kv_len))


@pytest.mark.parametrize("name", ALL)
def test_nbytes_is_what_is_stored_for_every_width_that_models_have(name):
    for shape in WIDE:
        k_SKD, v_SKD = sequence(shape, 193)
        for kv_len in (1, 31, 128, 193):
            stored_exactly(kv_format(name), shape, kv_len, (k_SKD[:kv_len], None if v_SKD is None else v_SKD[:kv_len]))


BOTH = 100 * 2 * (64 + 32)                                            # elements of K and V below


@pytest.mark.parametrize("name, expected", [
    ("fp32", BOTH * 4),
    ("bf16", BOTH * 2),
    ("int8/token", BOTH + 100 * 2 * 2 * 4),                           # a fp32 scale per token, KV head, and of K and V
    ("int8/block16", BOTH + 7 * 2 * 2 * 4),                           # 100 tokens touch 7 blocks of 16
    ("int8/tensor", BOTH), ("int8/head", BOTH), ("int8/channel", BOTH),                     # static: of the layer
    ("fp8_e4m3", BOTH), ("fp8_e4m3/tensor", BOTH), ("fp8_e4m3/head", BOTH), ("fp8_e5m2/channel", BOTH),
    ("fp8_e4m3/token", BOTH + 100 * 2 * 2 * 4),
    ("fp8_e5m2/block16", BOTH + 7 * 2 * 2 * 4),
    ("fp8_e4m3/token/g32", BOTH + 100 * 2 * (2 + 1) * 4),             # 64 and 32 channels in groups of 32
    ("fp8_e5m2/channel/g16", BOTH + 7 * 2 * (64 + 32) * 4),
    ("int4/head", BOTH // 2),
    ("int4/token", BOTH // 2 + 100 * 2 * 2 * (2 + 2)),                # scale and zero point, fp16 each
    ("int4/token/g32", BOTH // 2 + 100 * 2 * (2 + 1) * (2 + 2)),
    ("int4/channel/g32", BOTH // 2 + 4 * 2 * (64 + 32) * (2 + 2)),
    ("int4/block16", BOTH // 2 + 7 * 2 * 2 * (2 + 2)),
    ("int2/token/g32", BOTH // 4 + 100 * 2 * (2 + 1) * (2 + 2)),
    ("int2/channel", BOTH // 4),
    ("k16v8", 100 * 2 * 64 * 2 + 100 * 2 * (32 + 4)),
    ("k8v4", 100 * 2 * (64 + 4) + 100 * 2 * (16 + 4)),
    ("k4v2", 100 * 2 * (32 + 2 * 4) + 100 * 2 * (8 + 4)),
    ("bf16+int4/token/g32", 100 * 2 * 64 * 2 + 100 * 2 * (16 + 4)),
    ("fp32+fp8_e4m3", 100 * 2 * 64 * 4 + 100 * 2 * 32),
    ("q8_0", BOTH // 32 * 34), ("q5_1", BOTH // 32 * 24), ("q4_0", BOTH // 32 * 18),
    ("q8_0+q4_0", 100 * 2 * (2 * 34 + 18)),
    ("nvfp4", BOTH // 16 * 9), ("mxfp4", BOTH // 32 * 17), ("mxfp8", BOTH // 32 * 33),
])
def test_nbytes_by_hand(name, expected):
    assert kv_format(name).nbytes(100, AttentionShape(8, 2, 64, v_head_dim=32)) == expected


# (encoded, in fp16) of K and of V as KIVI's reference code has them for a residual of 32. A prompt: K all but its
# remainder, V all but its newest 32. A new token: K's tail of 32 is encoded whole, of V's 33 the oldest.
@pytest.mark.parametrize("name, kv_len, k, v", [
    (name, *rest) for name in ("kivi4/g16/r32", "kivi2/g8/r32", "kivi4/g32/r32") for rest in (
        (1, (0, 1), (0, 1)), (31, (0, 31), (0, 31)), (32, (32, 0), (0, 32)), (33, (32, 1), (1, 32)),
        (63, (32, 31), (31, 32)), (64, (64, 0), (32, 32)), (65, (64, 1), (33, 32)), (95, (64, 31), (63, 32)),
        (96, (96, 0), (64, 32)), (1000, (992, 8), (968, 32)), (1024, (1024, 0), (992, 32)))])
def test_the_schedule_of_kivi_by_hand(name, kv_len, k, v):
    kv, x = kv_format(name), torch.randn(kv_len, 1, 8, generator=torch.Generator().manual_seed(kv_len))
    packed = kv.encode(x, x)
    for codec, arrays, (encoded, tail) in ((kv.k, packed.k, k), (kv.v, packed.v, v)):
        assert codec.settled(kv_len) == encoded and codec.residual == kv.residual == 32
        assert (arrays[0].shape[1], arrays[-1].shape[1]) == (encoded, tail)
        assert arrays[-1].dtype == torch.float16 and torch.equal(arrays[-1][0], x[encoded:, 0].half())


@pytest.mark.parametrize("residual", [1, 2, 8, 32, 128])
def test_the_schedule_of_kivi_around_every_turn_of_its_residual(residual):
    kv = kv_format(f"kivi4/g1/r{residual}")
    for n in {0, *range(1, 5), *(turn * residual + by for turn in (1, 2, 3, 100) for by in (-1, 0, 1))}:
        assert kv.k.settled(n) == n - n % residual == settled(kv.k, n, "k")
        assert kv.v.settled(n) == max(0, n - residual) == settled(kv.v, n, "v")


QWEN2_72B = AttentionShape(64, 8, 128)


@pytest.mark.parametrize("kv_len, k_groups, k_tail, v_tokens, v_tail", [
    (100, 0, 100, 0, 100), (127, 0, 127, 0, 127), (128, 4, 0, 0, 128), (129, 4, 1, 1, 128), (255, 4, 127, 127, 128),
    (256, 8, 0, 128, 128), (1024, 32, 0, 896, 128)])
def test_bytes_of_kivi_with_the_heads_of_qwen2_72b_by_hand(kv_len, k_groups, k_tail, v_tokens, v_tail):
    group = 32 * 128 // 4 + 128 * (2 + 2)                             # of K: 32 tokens' codes, scale and zero a channel
    token = 128 // 4 + 4 * (2 + 2)                                    # of V: codes, scale and zero for 32 channels
    by_hand = 8 * (k_groups * group + v_tokens * token + (k_tail + v_tail) * 128 * 2)
    assert kv_format("kivi2/g32/r128").nbytes(kv_len, QWEN2_72B) == by_hand


def test_bytes_of_kivi_with_the_heads_of_qwen2_72b_in_numbers():
    """Of eight heads: 4 · 1536 + 128 · 256, 8 · 1536 + 128 · 48 + 128 · 256, 32 · 1536 + 896 · 48 + 128 · 256 each."""
    nbytes = kv_format("kivi2/g32/r128").nbytes
    assert [nbytes(n, QWEN2_72B) for n in (128, 256, 1024)] == [311_296, 409_600, 999_424]


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=25, deadline=None)
@given(shape=shapes(), more=st.integers(0, 300))
def test_storage_grows_by_the_same_bytes_in_every_period(name, shape, more):
    kv = kv_format(name)
    period, start = kv.period(shape), kv.residual
    growth = kv.nbytes(start + period, shape) - kv.nbytes(start, shape)
    assert kv.nbytes(start + more + period, shape) - kv.nbytes(start + more, shape) == growth > 0


@pytest.mark.parametrize("name, period", [
    ("bf16", 1), ("int8/block16", 16), ("int4/channel/g32+int8/block48", 96), ("kivi4/g32", 32),
    ("kivi4/g32/r128", 128), ("kivi2/g16/r48", 48), ("bf16+kivi4/g16/r32", 32), ("kivi2/g8/r8+fp32", 8),
    ("kivi4/g16/r48+kivi2/g8/r32", 96), ("int8/block64+kivi4/g16/r32", 64)])
def test_a_period_is_a_turn_of_every_residual_and_whole_groups(name, period):
    assert kv_format(name).period(AttentionShape(4, 2, 64)) == period


def test_a_side_that_is_not_stored_has_no_period():
    assert kv_format("bf16+kivi4/g16/r32").period(AttentionShape(4, 1, 64, v_head_dim=32, v_in_k=True)) == 1


def test_kivi_without_a_residual_is_its_two_grains_apart():
    shape = AttentionShape(4, 2, 64, v_head_dim=48)
    apart = kv_format("int4/channel/g32+int4/token/g32")
    assert [kv_format("kivi4/g32").nbytes(n, shape) for n in (1, 32, 33, 500)] == [
        apart.nbytes(n, shape) for n in (1, 32, 33, 500)]
    assert (kv_format("kivi4/g32").k, kv_format("kivi4/g32").v) == (apart.k, apart.v)


@pytest.mark.parametrize("name", [name for name in SIZED if not name.startswith("mxfp8")])
def test_blocks_of_llama_cpp_are_those_of_the_gguf_package(name):
    gguf = pytest.importorskip("gguf")
    kind = getattr(gguf.GGMLQuantizationType, name.upper(), None)
    if kind is None:
        pytest.skip(f"this gguf knows no {name}")
    elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = AttentionShape(2, 1, elements * 2)
    assert kv_format(name).nbytes(3, shape) == 2 * 3 * 2 * block_bytes


def test_a_view_of_k_stores_no_v():
    latent = AttentionShape(128, 1, 576, v_head_dim=512, v_in_k=True)
    assert kv_format("bf16").nbytes(10, latent) == 10 * 576 * 2
    assert kv_format("int4/token/g32").nbytes(10, latent) == 10 * (288 + 18 * 4)
    assert kv_format("kivi2/g32/r128").nbytes(200, latent) == 128 * 144 + 4 * 576 * 4 + 72 * 576 * 2
    assert kv_format("bf16+kivi2/g32/r128").nbytes(200, latent) == 200 * 576 * 2


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=60, deadline=None)
@given(shape=shapes(), lengths=st.tuples(*[st.integers(0, 250)] * 3).map(sorted))
def test_nbytes_from_first_counts_touched_groups_whole(name, shape, lengths):
    kv = kv_format(name)
    first, middle, kv_len = lengths[0], lengths[1] + 1, lengths[2] + 2
    by_hand = 0
    for axis, (codec, width) in zip("kv", kv.sides(shape), strict=not shape.v_in_k):
        encoded = settled(codec, kv_len, axis)
        by_hand += sum(len({t // part.tokens for t in range(first, encoded)}) * part.width * part.itemsize
                       for part in codec.components(width))
        by_hand += 2 * width * len(range(max(first, encoded), kv_len))
    assert kv.nbytes(kv_len, shape, first) == by_hand * shape.num_kv_heads
    assert kv.nbytes(kv_len, shape) >= kv.nbytes(kv_len, shape, first) >= kv.nbytes(kv_len, shape, middle)
    if any(codec.residual for codec, _ in kv.sides(shape)):       # what is encoded shrinks
        return
    assert kv.nbytes(kv_len + 1, shape, first) > kv.nbytes(kv_len, shape, first)
    split = first + (-first) % kv.token_group(shape)              # the group boundary at or after first
    if first < split < kv_len:
        assert kv.nbytes(kv_len, shape, first) == kv.nbytes(split, shape, first) + kv.nbytes(kv_len, shape, split)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=10, deadline=None)
@given(shape=shapes(), kv_len=st.integers(1, 200), data=st.data())
def test_decoding_from_a_later_token_gives_the_same_tokens(name, shape, kv_len, data):
    originals, first = sequence(shape, kv_len), data.draw(st.integers(0, kv_len - 1))
    kv = kv_format(name).calibrate(*originals)
    packed = kv.encode(*originals)
    whole = kv.decode_heads(packed.k, packed.v, kv_len, shape, torch.float32)
    part = kv.decode_heads(packed.k, packed.v, kv_len, shape, torch.float32, first)
    assert all(torch.equal(a[:, first:], b) for a, b in zip(whole, part, strict=True))


@pytest.mark.parametrize("name, group", [("fp32", 1), ("bf16", 1), ("int8/token", 1), ("int8/block16", 16),
                                         ("int8/head", 1), ("int4/channel/g32", 32), ("int4/token/g32", 1),
                                         ("kivi4/g32/r128", 32), ("bf16+kivi4/g32/r128", 1), ("k8v4", 1),
                                         ("int8/block32+fp8_e4m3/block48", 96), ("q8_0", 1)])
def test_token_group_is_what_a_block_must_be_a_multiple_of(name, group):
    assert kv_format(name).token_group(AttentionShape(8, 2, 64)) == group


def test_the_token_group_of_k_and_v_of_different_groups_is_their_least_common_multiple():
    made_up = kv_format("int8/block32+int8/block48")
    assert made_up.token_group(AttentionShape(8, 2, 64)) == 96
    assert made_up.token_group(AttentionShape(8, 1, 64, v_head_dim=32, v_in_k=True)) == 32
    other = KVFormat("other", kv_format("int8/block48").k, kv_format("bf16").v)
    assert other.token_group(AttentionShape(8, 2, 64)) == 48


# ------------------------------------------------------------------------------------------------------- values

@pytest.mark.parametrize("name", ROUNDING)
@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e3])
def test_floats_are_rounded_to_the_nearest(name, spread):
    shape = AttentionShape(4, 2, 64)
    originals = sequence(shape, 37, spread=spread)
    kv = kv_format(name)
    smallest = 2.0**-25 if name == "fp16" else 0.0                # below 2^-14 fp16 has steps of 2^-24
    for x, back in zip(originals, kv.decode(kv.encode(*originals), shape, torch.float64), strict=True):
        assert ((back - x.double()).abs() <= ROUNDING[name] * x.double().abs() + smallest).all()


@pytest.mark.parametrize("name", ALL)
def test_zeros_come_back_as_zeros(name):
    shape, zeros = AttentionShape(2, 1, 8), torch.zeros(19, 1, 8)
    kv = kv_format(name).calibrate(zeros, zeros)
    for back in kv.decode(kv.encode(zeros, zeros), shape, torch.float32):
        assert torch.equal(back, zeros)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [1.0, -0.5, 2.0**-20 * 127])
def test_constants_come_back_almost_unchanged(name, value):
    shape, x = AttentionShape(2, 1, 8), torch.full((19, 1, 8), value)
    kv = kv_format(name).calibrate(x, x)
    # e4m3 as it is has steps of 2^-9 below 2^-6; e5m2 two bits of mantissa; the rest at least eight bits
    atol = 2.0**-10 if name == "fp8_e4m3" else 2.0**-25
    rtol = 2.0**-3 if name == "fp8_e5m2" else 2.0**-8
    for back in kv.decode(kv.encode(x, x), shape, torch.float32):
        assert torch.allclose(back, x, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", [n for n in ALL if n.startswith(("fp32", "bf16", "int8", "fp8")) and "+" not in n])
def test_huge_values_stay_finite(name):
    shape, x = AttentionShape(2, 1, 2), torch.tensor([3e38, -3e38, 1.0, 0.0]).view(2, 1, 2)
    kv = kv_format(name).calibrate(x, x)
    largest = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}.get(name, 3e38)
    for back in kv.decode(kv.encode(x, x), shape, torch.float32):
        assert torch.allclose(back[0], x[0].clamp(-largest, largest), rtol=2.0**-7) and back.isfinite().all()


@pytest.mark.parametrize("name", [n for n in ALL if n.startswith(("int4", "int2", "kivi", "k2", "k8v4"))])
@pytest.mark.parametrize("value", [3e38, 1e5])
def test_values_beyond_fp16_do_not_fit_where_scales_or_a_tail_are_fp16_and_are_refused(name, value):
    x = torch.tensor([value, -value] * 4).view(2, 1, 4)
    with pytest.raises(ValueError, match=r"values up to .e.\d\d do not fit (the fp16 scales of int|a residual's)"):
        kv_format(name).calibrate(x, x).encode(x, x)


def test_fp16_overflow_becomes_infinite_as_in_hardware():
    shape, kv = AttentionShape(2, 1, 4), kv_format("fp16")
    x = torch.tensor([FP16_MAX, FP16_MAX + 15, 65520.0, -1e5]).view(1, 1, 4)
    back, _ = kv.decode(kv.encode(x, x), shape, torch.float32)
    assert back.flatten().tolist() == [FP16_MAX, FP16_MAX, float("inf"), float("-inf")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ALL)
def test_encoding_keeps_nothing_of_the_original(name, dtype):
    """Also where what comes is of the very dtype that is stored."""
    shape, x = AttentionShape(1, 1, 4), torch.ones(5, 1, 4, dtype=dtype)
    kv = kv_format(name).calibrate(x, x)
    packed = kv.encode(x, x)
    back = kv.decode(packed, shape, torch.float32)[0].clone()
    x.fill_(9.0)
    assert torch.equal(kv.decode(packed, shape, torch.float32)[0], back)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["int8/token", "fp8_e4m3/head", "kivi4/g16/r32", "k8v4"])
def test_k_and_v_of_another_dtype_are_stored_as_the_same_values_in_fp32_are(name, dtype):
    originals = tuple(x.to(torch.bfloat16).half() for x in sequence(AttentionShape(2, 2, 12), 50))
    one, other = (tuple(x.to(kind) for x in originals) for kind in (dtype, torch.float32))
    packed, wanted = (kv_format(name).calibrate(*other).encode(*x) for x in (one, other))
    assert all(torch.equal(a, b) for a, b in zip(packed.k + packed.v, wanted.k + wanted.v, strict=True))


# -------------------------------------------------------------------------------------------------- names, refusals

@pytest.mark.parametrize("name, near", [
    ("fp61", "fp16"), ("bf61", "bf16"), ("int8/tokens", "int8/token"), ("int8/blok16", "int8/block16"),
    ("int8/block0", "int8/block16"), ("int8/token4", "int8/token"), ("int8", "int8/block16"), ("", None),
    ("kivi3/g32", "kivi4/g32/r128"), ("kivi4/g32/r0", "kivi4/g32/r128"), ("kivi4/g0/r128", "kivi4/g32/r128"),
    ("fp8", None), ("FP8_E4M3", "fp8_e4m3"), ("int4/channel/g", "int4/channel/g32"), ("k3v8", "k16v8"),
    ("k16v3", "k16v8"), ("bf16+", "bf16+int4/token/g32"), ("+bf16", "bf16"), ("+", None), ("a+b", None),
    ("bf16+bf16+bf16", None),
    ("int8/block1000000", "int8/block16"), ("int8/block\N{ARABIC-INDIC DIGIT THREE}", "int8/block16"),
    ("int8/block1\N{ARABIC-INDIC DIGIT THREE}", "int8/block16"), ("int8/token\n", "int8/token"),
    (" bf16", "bf16"), ("q8_1", "q8_0"), ("nvfp8", "nvfp4"), (None, None), (8, None), (["bf16"], None),
])
def test_unknown_names_get_a_near_match_and_where_the_list_is(name, near):
    with pytest.raises(KeyError) as caught:
        kv_format(name)
    message = caught.value.args[0]
    assert message.startswith(f"no KV format named {name!r}.")
    assert message.endswith(f"All {len(format_names() + SIZED)} names and aliases are listed by: kvlab ls formats")
    assert near is None or f"Did you mean {near!r}?" in message


@pytest.mark.parametrize("name", ["bf16+kivi4/g32/r128", "kivi4/g32/r128+bf16", "kivi2/g8/r8+kivi4/g16/r48"])
def test_kivi_can_be_taken_apart_each_side_with_a_residual_of_its_own(name):
    kv, (k, v) = kv_format(name), name.split("+")
    assert (kv.k, kv.v) == (kv_format(k).k, kv_format(v).v)
    assert kv.residual == max(kv.k.residual, kv.v.residual) > 0


@pytest.mark.parametrize("name", ["kivi4/g16/r24", "kivi2/g32/r1", "kivi2/g32/r16"])
def test_a_residual_that_is_not_whole_groups_is_refused_also_of_one_side(name):
    group, residual = name.split("/")[1:]
    for asked in (name, f"bf16+{name}", f"{name}+bf16"):
        with pytest.raises(ValueError) as caught:
            kv_format(asked)
        assert str(caught.value) == (f"{name}: KIVI encodes its residual in whole groups; {residual} must be a "
                                     f"multiple of {group}")


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=30) | st.from_regex(r"(bf16|int[248]|fp8_e4m3|kivi[0-9]|k[0-9]+v[0-9]+)"
                                            r"([/+](token|channel|block|head|g|r|)[0-9]*)*", fullmatch=True)
       | st.sampled_from(["+" * 5000, "bf16+" * 500, "int8/block" + "9" * 5000, "k" + "1" * 5000 + "v8",
                          "int4/token/g" * 300, "\ud800", "\0", "__init__", "_base", "../fp8", "kv_format"]))
def test_any_text_is_a_format_or_refused_in_words(name):
    try:
        found = kv_format(name)
    except (KeyError, ValueError) as error:
        told = name if len(name) <= LONGEST else f"{name[:LONGEST]}…"
        assert (error.args[0].startswith(f"no KV format named {told!r}.")
                or isinstance(error, ValueError) and "KIVI encodes its residual in whole groups" in error.args[0])
    else:
        assert found.name == name and found.nbytes(10, AttentionShape(1, 1, 32)) > 0
        assert all(ord(letter) < 128 for letter in name)


@pytest.mark.parametrize("name", SIZED + ["q8_0+bf16", "bf16+nvfp4"])
def test_what_is_only_sized_is_refused_where_it_would_have_to_compute(name):
    kv, x = kv_format(name), torch.ones(3, 1, 64)
    why = f"kvlab knows how large {name} is and does not compute with it; see kvlab ls formats"
    assert kv.sizes_only and kv.why_not(AttentionShape(4, 1, 64)) == why
    with pytest.raises(ValueError, match=re.escape(why)):
        kv.encode(x, x)
    one = trial("naive", Workload.decode(AttentionShape(4, 1, 64), kv_len=9), kv_format=name)
    assert one.why_not() == why
    assert not set(SIZED) & set(format_names())


@pytest.mark.parametrize("name", SIZED)
def test_blocks_of_channels_must_fit_the_width(name):
    with pytest.raises(ValueError, match=rf"{name} stores blocks of \d\d channels, and head_dim 72 is not a multiple"):
        kv_format(name).nbytes(10, AttentionShape(1, 1, 72))
    with pytest.raises(ValueError, match="head_dim 24 is not a multiple"):
        kv_format(name).nbytes(10, AttentionShape(1, 1, 64, v_head_dim=24))


def test_sizing_takes_what_kvlab_does_not_compute_with():
    eight, four = (size_of(name) for name in ("q8_0", "q4_0"))
    assert size_of("bf16") / eight == 64 / 34 and eight / four == 34 / 18


def size_of(name):
    from kvlab.catalog.models import model
    return size(model("Qwen/Qwen2-72B"), 1024, kv_format=name).kv_bytes


@pytest.mark.parametrize("name", ALL)
def test_no_tokens_and_values_that_are_not_finite_are_refused(name):
    x, kv = torch.ones(6, 1, 4), kv_format(name)
    ready = kv.calibrate(x, x)
    for call in (ready.encode, kv.calibrate):
        with pytest.raises(ValueError, match="there are no tokens to store: K has kv_len 0"):
            call(x[:0], x[:0])
        for value in (float("nan"), float("inf"), float("-inf")):
            spoiled = x.clone()
            spoiled[4, 0, 2] = value
            with pytest.raises(ValueError, match="V holds NaN or infinity, first at token 4 of 6; a cache takes"):
                call(x, spoiled)


def test_every_listed_name_can_be_made_and_keeps_its_name():
    assert [kv_format(name).name for name in format_names() + SIZED] == format_names() + SIZED
    assert len(set(format_names() + SIZED)) == len(format_names() + SIZED)
    assert kv_format("int8/block32").k.grain.tokens == 32
    mixed = replace(kv_format("bf16"), v=kv_format("int8/token").v)   # K and V each have their own codec
    assert mixed.nbytes(10, AttentionShape(2, 2, 4)) == 10 * 2 * 4 * 2 + 10 * 2 * (4 + 4)


def test_apart_means_k_in_the_first_and_v_in_the_second():
    assert (kv_format("k16v8").k, kv_format("k16v8").v) == (kv_format("bf16").k, kv_format("int8/token").v)
    mixed = kv_format("fp32+int8/block16")
    assert (mixed.k, mixed.v) == (kv_format("fp32").k, kv_format("int8/block16").v)


@pytest.mark.parametrize("name", format_names() + SIZED)
def test_every_listed_codec_says_in_one_line_what_it_is(name):
    for codec in (kv_format(name).k, kv_format(name).v):
        assert 5 < len(codec.about) < 100 and "\n" not in codec.about
        assert not isinstance(codec, Scaled) or ("static" in codec.about) == (
            codec.grain is not None and codec.grain.tokens is None)


@pytest.mark.parametrize("family", list(families))
def test_a_family_makes_its_own_formats_and_no_others(family):
    own = families[family].EXAMPLES
    made = {name: families[family].kv_format(name) for name in format_names() + SIZED}
    assert {name for name, found in made.items() if found is not None} == set(own)
    assert all(isinstance(made[name], KVFormat) and made[name].name == name for name in own)


def test_sizes_need_no_torch():
    script = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("torch is blocked in this test")
sys.meta_path.insert(0, Blocker())
from kvlab.kv.formats import KVFormat, format_names, kv_format
from kvlab.kv.formats._base import families
from kvlab.kv.formats._scaled import Scaled
from kvlab.shapes import AttentionShape
names = format_names() + format_names(sizes_only=True)
print([kv_format(name).nbytes(32, AttentionShape(8, 2, 64)) for name in names])
try:
    kv_format("fp32").encode(__import__("torch"), None)
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    sizes = [kv_format(name).nbytes(32, AttentionShape(8, 2, 64)) for name in format_names() + SIZED]
    assert done.stdout.splitlines() == [str(sizes), "torch is blocked in this test"]
