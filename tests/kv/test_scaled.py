"""Codes with scales: every grain against loops over its tiles, derived error bounds, KIVI, calibration."""
import itertools
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.kv.formats import kv_format
from kvlab.kv.formats._scaled import pack, unpack
from kvlab.shapes import AttentionShape

# (tokens, channels, whether all heads share) of a tile; None = all of them
GRAINS = {"tensor": (None, None, True), "head": (None, None, False), "channel": (None, 1, False),
          "token": (1, None, False), "block1": (1, None, False), "block7": (7, None, False),
          "block16": (16, None, False), "block999": (999, None, False), "channel/g5": (5, 1, False),
          "channel/g32": (32, 1, False), "token/g3": (1, 3, False), "token/g32": (1, 32, False)}
STATIC = [grain for grain, (tokens, _, _) in GRAINS.items() if tokens is None]
LARGEST = {"int8": 127, "int4": 15, "int2": 3, "fp8_e4m3": 448, "fp8_e5m2": 57344}
HALF_ULP = {"fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3}                 # relative, of 3 and of 2 bits of mantissa
LEAST_HALF_STEP = {"fp8_e4m3": 2.0**-10, "fp8_e5m2": 2.0**-17}        # below the normal range: half of 2^-9, of 2^-16
SHAPE = AttentionShape(6, 3, 8, v_head_dim=5)


def sequence(shape, kv_len, seed=0, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(spread * torch.randn(kv_len, shape.num_kv_heads, width, generator=generator)
                 for width in (shape.head_dim, shape.v_dim))


def tiles(shape_KSD, grain):
    """The slices of [K, S, D] that share a scale, with its place in the scale's array."""
    K, S, D = shape_KSD
    tokens, channels, heads = GRAINS[grain]
    for k in [slice(None)] if heads else range(K):
        for r, s in enumerate(range(0, S, tokens or S)):
            for c, d in enumerate(range(0, D, channels or D)):
                yield ((slice(None) if heads else slice(k, k + 1), slice(s, s + (tokens or S)),
                        slice(d, d + (channels or D))), (0 if heads else k, r, c))


def error_bound(kind, tile, scale, zero):
    """Largest distance of decode(encode(tile)) from the tile, in fp64, element by element."""
    fp32 = 2.0**-22                                                   # division, product, sum: 2^-24 each, of the codes
    if kind in HALF_ULP:
        return (HALF_ULP[kind] * tile.abs()).clamp_min(LEAST_HALF_STEP[kind] * scale) * (1 + fp32) + 2.0**-149
    if kind == "int8":
        return scale * (0.5 + 127 * fp32)
    # the range that codes reach is not quite the tile's own: scale and zero point are rounded to fp16
    off = LARGEST[kind] * abs(scale - float(tile.max() - tile.min()) / LARGEST[kind]) + abs(zero - float(tile.min()))
    return max(scale / 2, off) * (1 + fp32) + fp32 * (LARGEST[kind] * scale + abs(zero)) + 2.0**-149


@pytest.mark.parametrize("grain", GRAINS)
@pytest.mark.parametrize("kind", LARGEST)
@settings(max_examples=8, deadline=None)
@given(kv_len=st.integers(1, 70), exponent=st.integers(-30, 37), seed=st.integers(0, 999))
def test_every_tile_has_the_scale_of_its_own_range_and_errs_by_half_a_step_of_it(kind, grain, kv_len, exponent, seed):
    if kind in ("int4", "int2"):
        exponent = exponent % 12 - 8                                  # scales in fp16; below 1e-7 denormal, or 0
    originals = sequence(SHAPE, kv_len, seed, spread=10.0**exponent)
    name = f"{kind}/{grain}"
    kv = kv_format(name).calibrate(*originals)
    packed = kv.encode(*originals)
    backs = kv.decode(packed, SHAPE, torch.float64)
    for x, back, arrays, codec in zip(originals, backs, (packed.k, packed.v), (kv.k, kv.v), strict=True):
        x_KSD, back_KSD = x.permute(1, 0, 2).double(), back.permute(1, 0, 2)
        scales = [a.double() for a in (codec.scales if grain in STATIC else arrays[1:])]
        places = list(tiles(x_KSD.shape, grain))
        assert len(places) == scales[0].numel() and not (grain in STATIC and arrays[1:])
        for where, place in places:
            tile, (scale, zero) = x_KSD[where], (*[float(a[place]) for a in scales], 0.0)[:2]
            reach = float(tile.max() - tile.min()) if kind in ("int4", "int2") else float(tile.abs().max())
            if kind in ("int4", "int2"):
                assert abs(zero - float(tile.min())) <= max(2.0**-11 * abs(float(tile.min())), 2.0**-25)
                assert abs(scale - reach / LARGEST[kind]) <= max(2.0**-10 * scale, 2.0**-24)
            else:
                assert math.isclose(scale, reach / LARGEST[kind], rel_tol=1e-6)
            assert ((back_KSD[where] - tile).abs() <= error_bound(kind, tile, scale, zero)).all(), (where, scale, zero)


@pytest.mark.parametrize("kind", ["int8", "int4", "int2"])
@pytest.mark.parametrize("grain", ["token", "channel/g5", "head"])
def test_the_whole_range_of_codes_is_used(kind, grain):
    originals = sequence(SHAPE, 60)
    kv = kv_format(f"{kind}/{grain}").calibrate(*originals)
    codes = kv.encode(*originals).k[0]
    low, high = ((-127, 127) if kind == "int8" else (0, LARGEST[kind]))
    codes = codes if kind == "int8" else unpack(codes, int(kind[3:]))
    assert int(codes.min()) == low or kind == "int8" and int(codes.abs().max()) == 127
    assert int(codes.max()) == high


@pytest.mark.parametrize("kind", HALF_ULP)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), exponent=st.integers(-12, 38))
def test_fp8_without_a_scale_rounds_to_the_nearest_and_clips_at_its_largest_value(kind, seed, exponent):
    originals = sequence(SHAPE, 20, seed, spread=min(10.0**exponent, 5e37))
    kv, largest = kv_format(kind), LARGEST[kind]
    for x, back in zip(originals, kv.decode(kv.encode(*originals), SHAPE, torch.float64), strict=True):
        x, inside = x.double(), x.abs() <= largest
        assert not back.isnan().any()
        assert torch.equal(back[~inside], x[~inside].sign() * largest)
        assert ((back - x).abs() <= error_bound(kind, x, 1.0, 0.0))[inside].all()


@pytest.mark.parametrize("kind, values", [
    ("fp8_e4m3", {448.0: 448.0, 449.0: 448.0, 1e30: 448.0, -3e38: -448.0, 432.0: 448.0, 400.0: 384.0, 1.0625: 1.0,
                  17.0: 16.0, 2.0**-9: 2.0**-9, 2.0**-11: 0.0}),
    ("fp8_e5m2", {57344.0: 57344.0, 60000.0: 57344.0, 65536.0: 57344.0, -1e38: -57344.0, 1.1: 1.0, 9.0: 8.0,
                  11.0: 12.0, 2.0**-16: 2.0**-16, 2.0**-18: 0.0}),
])
def test_fp8_by_hand(kind, values):
    x = torch.tensor(list(values)).view(1, 1, -1)
    back, _ = kv_format(kind).decode(kv_format(kind).encode(x, x), AttentionShape(1, 1, x.shape[-1]), torch.float32)
    assert back.flatten().tolist() == list(values.values())


def test_one_outlier_costs_its_whole_block_but_only_its_own_token():
    shape = AttentionShape(2, 1, 8)
    x = torch.linspace(0.5, 1.0, 16 * 8).view(16, 1, 8)
    x[0, 0, 0] = 1000.0
    coarse, fine = (kv_format(name).decode(kv_format(name).encode(x, x), shape, torch.float32)[0][1:]
                    for name in ("int8/block16", "int8/token"))
    assert (coarse == 0).all() and torch.allclose(fine, x[1:], atol=1 / 254)


def test_int4_by_hand():
    x = torch.tensor([[1.0, 2.5, 16.0, 7.4, 7.6], [-3.0, -3.0, -3.0, -3.0, -3.0]]).view(2, 1, 5)
    kv, shape = kv_format("int4/token"), AttentionShape(1, 1, 5)
    packed = kv.encode(x, x)
    assert packed.k[0].tolist() == [[[0 + 16 * 2, 15 + 16 * 6, 7], [0, 0, 0]]]        # 1.5 rounds to 2: to even
    assert [a.flatten().tolist() for a in packed.k[1:]] == [[1.0, 0.0], [1.0, -3.0]]
    back, _ = kv.decode(packed, shape, torch.float32)
    assert back.view(2, 5).tolist() == [[1.0, 3.0, 16.0, 7.0, 8.0], [-3.0] * 5]


# ----------------------------------------------------------------------------------------------------------- packing

@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 8])
def test_packing_gives_every_code_back(bits, width):
    each = 8 // bits
    rows = torch.tensor(list(itertools.product(range(2**bits), repeat=each)), dtype=torch.uint8)     # all 256 bytes
    codes = rows.repeat(1, -(-width // each))[:, :width].view(2, -1, width)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (2, 128, -(-width * bits // 8))
    assert torch.equal(unpack(packed, bits)[..., :width], codes)
    assert not unpack(packed, bits)[..., width:].any(), "the last byte is filled up with zeros"


def test_the_first_code_lies_in_the_lowest_bits():
    assert pack(torch.tensor([[[1, 2, 3]]], dtype=torch.uint8), 4).tolist() == [[[0x21, 0x03]]]
    assert pack(torch.tensor([[[3, 0, 1, 2, 1]]], dtype=torch.uint8), 2).tolist() == [[[0b10_01_00_11, 1]]]


# -------------------------------------------------------------------------------------------------------------- KIVI

def relative_error(name, k_SKD, v_SKD):
    kv = kv_format(name)
    backs = kv.decode(kv.encode(k_SKD, v_SKD), AttentionShape(4, 2, 64), torch.float32)
    return [float((back - x).norm() / x.norm()) for x, back in zip((k_SKD, v_SKD), backs, strict=True)]


def test_channels_of_k_that_stand_out_are_why_kivi_scales_k_per_channel_and_v_per_token():
    k_SKD, v_SKD = sequence(AttentionShape(4, 2, 64), 256)
    k_SKD[..., [3, 40]] = k_SKD[..., [3, 40]] * 2 + 30                # as real models have them: large, of one sign
    v_SKD[::37] *= 20                                                 # and tokens of V
    channels, tokens = [c for c in range(64) if c not in (3, 40)], [t for t in range(256) if t % 37]

    def errors(name):
        """Of K's and V's ordinary channels and tokens: what shares a scale with a large value pays for it."""
        kv = kv_format(name)
        k_back, v_back = kv.decode(kv.encode(k_SKD, v_SKD), AttentionShape(4, 2, 64), torch.float32)
        return [float((back - x).norm() / x.norm()) for back, x in
                ((k_back[..., channels], k_SKD[..., channels]), (v_back[tokens], v_SKD[tokens]))]
    for bits in (4, 2):
        (k_channel, v_channel), (k_token, v_token) = errors(f"int{bits}/channel/g32"), errors(f"int{bits}/token/g32")
        assert 4 * k_channel < k_token and 2 * v_token < v_channel
        assert errors(f"kivi{bits}/g32") == [k_channel, v_token]


@pytest.mark.parametrize("kv_len, k_old, v_old", [(1, 0, 0), (31, 0, 0), (32, 32, 0), (33, 32, 1), (63, 32, 31),
                                                 (64, 64, 32), (100, 96, 68)])
@pytest.mark.parametrize("name", ["kivi4/g16/r32", "kivi2/g16/r32"])
def test_the_newest_tokens_of_kivi_are_exact_to_fp16_and_the_others_as_without_a_residual(name, kv_len, k_old, v_old):
    shape = AttentionShape(4, 2, 24, v_head_dim=10)
    originals, kv = sequence(shape, kv_len), kv_format(name)
    backs = kv.decode(kv.encode(*originals), shape, torch.float32)
    plain = kv_format(name.partition("/r")[0])
    for side, (x, back, old) in enumerate(zip(originals, backs, (k_old, v_old), strict=True)):
        assert torch.equal(back[old:], x[old:].half().float())
        if old:
            wanted = plain.decode(plain.encode(*(x[:old] for x in originals)), shape, torch.float32)[side]
            assert torch.equal(back[:old], wanted) and (back[:old] != x[:old]).flatten(1).any(1).all()


def test_fewer_bits_err_more_on_every_grain():
    k_SKD, v_SKD = sequence(AttentionShape(4, 2, 64), 128)
    for grain in ("token", "token/g32", "channel/g32", "block16"):
        eight, four, two = (relative_error(f"int{bits}/{grain}", k_SKD, v_SKD)[0] for bits in (8, 4, 2))
        assert 0 < 5 * eight < four and 3 * four < two < 1


# ------------------------------------------------------------------------------------------------------ static scales

STATIC_NAMES = [f"{kind}/{grain}" for kind in LARGEST for grain in STATIC]


@pytest.mark.parametrize("name", STATIC_NAMES)
def test_static_scales_must_be_found_first_and_the_refusal_says_how(name):
    x = torch.ones(4, 3, 8)
    kv = kv_format(name)
    ready = kv.calibrate(x, x)
    sentence = re.escape(f"{name} has static scales: find them first, fmt = kv_format({name!r}).calibrate(k, v)")
    packed = ready.encode(x, x)
    assert kv.static and not ready.static
    for call in (lambda: kv.encode(x, x), lambda: kv.decode(packed, AttentionShape(3, 3, 8), torch.float32)):
        with pytest.raises(ValueError, match=sentence):
            call()
    bits = int(name[3]) if name.startswith("int") else 8
    codes = 100 * 3 * sum(-(-width * bits // 8) for width in (8, 5))
    assert ready.nbytes(100, SHAPE) == kv.nbytes(100, SHAPE) == codes, "static scales are not counted"


@pytest.mark.parametrize("grain, shape", [("tensor", (1, 1, 1)), ("head", (3, 1, 1)), ("channel", (3, 1, 8))])
@pytest.mark.parametrize("kind", ["int8", "fp8_e4m3", "int4"])
def test_what_shares_a_static_scale(kind, grain, shape):
    k_SKD, v_SKD = sequence(SHAPE, 50)
    kv = kv_format(f"{kind}/{grain}").calibrate(k_SKD, v_SKD)
    axes = {"tensor": (0, 1, 2), "head": (0, 2), "channel": (0,)}[grain]
    assert [tuple(a.shape) for a in kv.k.scales] == [shape] * (2 if kind == "int4" else 1)
    assert tuple(kv.v.scales[0].shape) == tuple(5 if n == 8 else n for n in shape), "V has scales of its own"
    if kind == "int4":
        low, high = k_SKD.amin(axes).flatten(), k_SKD.amax(axes).flatten()
        assert torch.equal(kv.k.scales[1].flatten(), low.half())
        assert torch.equal(kv.k.scales[0].flatten(), ((high - low) / 15).half())
    else:
        for codec, x in ((kv.k, k_SKD), (kv.v, v_SKD)):
            assert torch.allclose(codec.scales[0].flatten(), x.abs().amax(axes).flatten() / LARGEST[kind], rtol=1e-6)


@pytest.mark.parametrize("name", STATIC_NAMES)
def test_values_outside_the_calibrated_range_are_clipped_to_it(name):
    seen = torch.linspace(-2, 2, 33).view(33, 1, 1).expand(33, 2, 4)
    kv = kv_format(name).calibrate(seen, seen)
    later = torch.tensor([-1e4, -2.5, 2.5, 1e4]).view(4, 1, 1).expand(4, 2, 4)
    for back in kv.decode(kv.encode(later, later), AttentionShape(2, 2, 4), torch.float32):
        assert torch.allclose(back, later.clamp(-2, 2), rtol=2.0**-9)


def test_calibrating_anew_takes_the_new_tokens_and_leaves_the_first_format_alone():
    x = torch.ones(4, 1, 4)
    first = kv_format("int8/head").calibrate(x, x)
    second = first.calibrate(10 * x, 100 * x)
    assert [round(float(c.scales[0]) * 127, 4) for c in (first.k, first.v, second.k, second.v)] == [1, 1, 10, 100]
    assert first == second == kv_format("int8/head"), "a name says what is stored; scales are the layer's"


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8/token", "fp8_e4m3", "kivi4/g32/r128", "k16v8"])
def test_a_format_without_static_scales_is_the_same_after_calibration(name):
    x = torch.ones(4, 1, 4)
    assert kv_format(name).calibrate(x, x) == kv_format(name) and not kv_format(name).static
    packed, wanted = (kv.encode(2 * x, 3 * x) for kv in (kv_format(name).calibrate(x, x), kv_format(name)))
    assert all(torch.equal(a, b) for a, b in zip(packed.k + packed.v, wanted.k + wanted.v, strict=True))


def test_only_the_side_with_static_scales_is_calibrated_and_a_view_of_k_needs_none():
    k_SKD, v_SKD = sequence(SHAPE, 20)
    mixed = kv_format("bf16+int8/head").calibrate(k_SKD, v_SKD)
    assert mixed.k == kv_format("bf16").k and mixed.v.scales and not mixed.static
    latent = AttentionShape(3, 3, 8, v_head_dim=5, v_in_k=True)
    view = kv_format("int8/head").calibrate(k_SKD, None)
    k_back, v_back = view.decode(view.encode(k_SKD, None), latent, torch.float32)
    assert torch.equal(v_back, k_back[..., :5]) and (k_back - k_SKD).abs().max() < 0.05


def test_fp16_scales_that_overflow_are_refused_at_calibration():
    x = torch.tensor([1e6, -1e6]).view(1, 1, 2)
    with pytest.raises(ValueError, match=r"values up to 1e\+06 do not fit the fp16 scales of int4/head"):
        kv_format("int4/head").calibrate(x, x)
