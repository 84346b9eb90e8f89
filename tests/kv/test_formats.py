"""KV formats: sizes equal what is really stored, to the byte; what decoding gives back lies within derived bounds."""
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.kv.formats import KVFormat, format_names, kv_format
from kvlab.kv.formats._base import families
from kvlab.kv.formats.int8 import Int8
from kvlab.shapes import AttentionShape

ALL = sorted({*format_names(), "int8/block1", "int8/block7", "int8/block64"})
INT8 = [name for name in ALL if name.startswith("int8")]
ROUNDING = {"fp32": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8}       # half a step of a mantissa of 10 and of 7 bits
FP16_MAX = 65504.0


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


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=40, deadline=None)
@given(shape=shapes(), kv_len=st.integers(1, 150))
def test_nbytes_is_what_is_stored_to_the_byte(name, shape, kv_len):
    kv, (k_SKD, v_SKD) = kv_format(name), sequence(shape, kv_len)
    packed = kv.encode(k_SKD, v_SKD)
    assert packed.nbytes == kv.nbytes(kv_len, shape)
    assert packed.nbytes == sum(a.untyped_storage().nbytes() for a in packed.k + packed.v), "a view of something larger"
    sides = zip((packed.k, packed.v), kv.components(shape), strict=True)
    for array, part in [pair for arrays, parts in sides for pair in zip(arrays, parts, strict=True)]:
        assert array.shape == (shape.num_kv_heads, part.rows(kv_len), part.width), part.name
        assert array.dtype == getattr(torch, part.dtype) and array.itemsize == part.itemsize, part.name
    k_back, v_back = kv.decode(packed, shape, torch.float32)
    assert k_back.shape == k_SKD.shape and v_back.shape == (kv_len, shape.num_kv_heads, shape.v_dim)


@pytest.mark.parametrize("name, expected", [
    ("fp32", 100 * 2 * (64 + 32) * 4),
    ("bf16", 100 * 2 * (64 + 32) * 2),
    ("int8/token", 100 * 2 * (64 + 32) + 100 * 2 * 2 * 4),        # one fp32 scale per token, KV head, and each of K, V
    ("int8/block16", 100 * 2 * (64 + 32) + 7 * 2 * 2 * 4),        # 100 tokens touch 7 blocks of 16
])
def test_nbytes_by_hand(name, expected):
    assert kv_format(name).nbytes(100, AttentionShape(8, 2, 64, v_head_dim=32)) == expected


def test_a_view_of_k_stores_no_v():
    latent = AttentionShape(128, 1, 576, v_head_dim=512, v_in_k=True)
    assert kv_format("bf16").nbytes(10, latent) == 10 * 576 * 2


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=60, deadline=None)
@given(shape=shapes(), lengths=st.tuples(*[st.integers(0, 200)] * 3).map(sorted))
def test_nbytes_from_first_counts_touched_groups_whole(name, shape, lengths):
    kv = kv_format(name)
    first, middle, kv_len = lengths[0], lengths[1] + 1, lengths[2] + 2
    parts = [part for side in kv.components(shape) for part in side]
    by_hand = sum(len({t // part.tokens for t in range(first, kv_len)}) * part.width * part.itemsize for part in parts)
    assert kv.nbytes(kv_len, shape, first) == by_hand * shape.num_kv_heads
    assert kv.nbytes(kv_len, shape) >= kv.nbytes(kv_len, shape, first) >= kv.nbytes(kv_len, shape, middle)
    assert kv.nbytes(kv_len + 1, shape, first) > kv.nbytes(kv_len, shape, first)
    split = first + (-first) % kv.token_group(shape)              # the group boundary at or after first
    if first < split < kv_len:
        assert kv.nbytes(kv_len, shape, first) == kv.nbytes(split, shape, first) + kv.nbytes(kv_len, shape, split)


@pytest.mark.parametrize("name, group", [("fp32", 1), ("bf16", 1), ("int8/token", 1), ("int8/block16", 16)])
def test_token_group_is_what_a_block_must_be_a_multiple_of(name, group):
    assert kv_format(name).token_group(AttentionShape(8, 2, 64)) == group


def test_the_token_group_of_k_and_v_of_different_groups_is_their_least_common_multiple():
    made_up = KVFormat("made-up", Int8("k", 32), Int8("v", 48))
    assert made_up.token_group(AttentionShape(8, 2, 64)) == 96
    assert made_up.token_group(AttentionShape(8, 1, 64, v_head_dim=32, v_in_k=True)) == 32
    assert KVFormat("other", Int8("k", 48), kv_format("bf16").v).token_group(AttentionShape(8, 2, 64)) == 48


@pytest.mark.parametrize("name", ROUNDING)
@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e3])
def test_floats_are_rounded_to_the_nearest(name, spread):
    shape = AttentionShape(4, 2, 64)
    originals = sequence(shape, 37, spread=spread)
    kv = kv_format(name)
    smallest = 2.0**-25 if name == "fp16" else 0.0                # below 2^-14 fp16 has steps of 2^-24
    for x, back in zip(originals, kv.decode(kv.encode(*originals), shape, torch.float64), strict=True):
        assert ((back - x.double()).abs() <= ROUNDING[name] * x.double().abs() + smallest).all()


@pytest.mark.parametrize("name", INT8)
@settings(max_examples=40, deadline=None)
@given(kv_len=st.integers(1, 70), exponent=st.integers(-30, 37), seed=st.integers(0, 999))
def test_int8_errs_by_at_most_half_a_scale(name, kv_len, exponent, seed):
    shape, kv = AttentionShape(6, 3, 8, v_head_dim=5), kv_format(name)
    originals = sequence(shape, kv_len, seed, spread=10.0**exponent)
    packed, tokens = kv.encode(*originals), kv.token_group(shape)
    backs = kv.decode(packed, shape, torch.float64)
    for x, back, (codes, scale) in zip(originals, backs, (packed.k, packed.v), strict=True):
        x_KSD = x.permute(1, 0, 2).double()
        for g in range(scale.shape[1]):
            group = x_KSD[:, g * tokens:(g + 1) * tokens]
            step = scale[:, g].double()                           # [K, 1]
            assert torch.allclose(step[:, 0], group.abs().amax((1, 2)) / 127, rtol=1e-6, atol=0), "absmax / 127"
            error = (back.permute(1, 0, 2)[:, g * tokens:(g + 1) * tokens] - group).abs().amax((1, 2))
            assert (error <= step[:, 0] * (0.5 + 127 * 2.0**-22)).all()       # fp32 division and product: 2^-24 each
        assert codes.abs().amax() == 127, "the largest element of some group uses the whole range"


@pytest.mark.parametrize("name", ALL)
def test_zeros_come_back_as_zeros(name):
    shape, kv = AttentionShape(2, 1, 8), kv_format(name)
    zeros = torch.zeros(19, 1, 8)
    for back in kv.decode(kv.encode(zeros, zeros), shape, torch.float32):
        assert torch.equal(back, zeros)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [1.0, -0.5, 2.0**-20 * 127])
def test_constants_come_back_almost_unchanged(name, value):
    shape, kv = AttentionShape(2, 1, 8), kv_format(name)
    x = torch.full((19, 1, 8), value)
    for back in kv.decode(kv.encode(x, x), shape, torch.float32):
        assert torch.allclose(back, x, rtol=2.0**-8, atol=0)


@pytest.mark.parametrize("name", [n for n in ALL if n != "fp16"])
def test_huge_values_stay_finite(name):
    shape, kv = AttentionShape(2, 1, 2), kv_format(name)
    x = torch.tensor([3e38, -3e38, 1.0, 0.0]).view(2, 1, 2)
    for back in kv.decode(kv.encode(x, x), shape, torch.float32):
        assert torch.allclose(back[0], x[0], rtol=2.0**-7) and back.isfinite().all()


def test_fp16_overflow_becomes_infinite_as_in_hardware():
    shape, kv = AttentionShape(2, 1, 4), kv_format("fp16")
    x = torch.tensor([FP16_MAX, FP16_MAX + 15, 65520.0, -1e5]).view(1, 1, 4)
    back, _ = kv.decode(kv.encode(x, x), shape, torch.float32)
    assert back.flatten().tolist() == [FP16_MAX, FP16_MAX, float("inf"), float("-inf")]


def test_one_outlier_costs_its_whole_block_but_only_its_own_token():
    shape = AttentionShape(2, 1, 8)
    x = torch.linspace(0.5, 1.0, 16 * 8).view(16, 1, 8)
    x[0, 0, 0] = 1000.0
    coarse, fine = (kv_format(name).decode(kv_format(name).encode(x, x), shape, torch.float32)[0][1:]
                    for name in ("int8/block16", "int8/token"))
    assert (coarse == 0).all() and torch.allclose(fine, x[1:], atol=1 / 254)


@pytest.mark.parametrize("name", ALL)
def test_encoding_keeps_nothing_of_the_original(name):
    x = torch.ones(5, 1, 4)
    packed = kv_format(name).encode(x, x)
    back = kv_format(name).decode(packed, AttentionShape(1, 1, 4), torch.float32)[0].clone()
    x.fill_(9.0)
    assert torch.equal(kv_format(name).decode(packed, AttentionShape(1, 1, 4), torch.float32)[0], back)


@pytest.mark.parametrize("name, near", [
    ("fp61", "fp16"), ("bf61", "bf16"), ("int8/tokens", "int8/token"), ("int8/blok16", "int8/block16"),
    ("int8/block0", "int8/block16"), ("int8/token4", "int8/token"), ("int8", None), ("", None),
])
def test_unknown_names_get_a_near_match_and_the_list(name, near):
    with pytest.raises(KeyError) as caught:
        kv_format(name)
    message = caught.value.args[0]
    assert message.startswith(f"no KV format named {name!r}.")
    assert message.endswith("Known: " + ", ".join(sorted(format_names())))
    assert near is None or f"Did you mean {near!r}?" in message


def test_every_listed_name_can_be_made_and_keeps_its_name():
    assert [kv_format(name).name for name in format_names()] == format_names()
    assert kv_format("int8/block32").k.tokens == 32
    mixed = replace(kv_format("bf16"), v=kv_format("int8/token").v)   # K and V each have their own codec
    assert mixed.nbytes(10, AttentionShape(2, 2, 4)) == 10 * 2 * 4 * 2 + 10 * 2 * (4 + 4)


@pytest.mark.parametrize("family", list(families))
def test_a_family_makes_its_own_formats_and_no_others(family):
    own = families[family].EXAMPLES
    made = {name: families[family].kv_format(name) for name in format_names()}
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
from kvlab.kv.formats.int8 import Int8
from kvlab.shapes import AttentionShape
print([kv_format(name).nbytes(32, AttentionShape(8, 2, 64)) for name in format_names()])
try:
    kv_format("fp32").encode(__import__("torch"), None)
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    sizes = [kv_format(name).nbytes(32, AttentionShape(8, 2, 64)) for name in format_names()]
    assert done.stdout.splitlines() == [str(sizes), "torch is blocked in this test"]
