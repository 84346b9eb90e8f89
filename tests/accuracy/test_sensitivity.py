"""One layer's K or V at a time is what a whole pass with such a cache gives; a mix keeps to its budget."""
import math

import pandas as pd
import pytest
import torch

from kvlab.accuracy.scoring import compare, score_windows, windows
from kvlab.accuracy.sensitivity import mix, one_side, sensitivity, side_bytes
from kvlab.kv.formats import kv_format
from kvlab.model.config import DecoderConfig
from kvlab.model.decoder import Decoder

CONFIG = DecoderConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=3, num_q_heads=4, num_kv_heads=2,
                       head_dim=32, context=512)
TOKENS = torch.randint(0, 97, (300,), generator=torch.Generator().manual_seed(1))
OTHER = torch.randint(0, 97, (128,), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def decoder():
    return Decoder.random(CONFIG)


@pytest.fixture(scope="module")
def chosen():
    return windows("a", TOKENS, window=70, count=2)


@pytest.mark.parametrize("fmt", ["int4/token/g32", "kivi4/g32/r32", "int8/channel"])
def test_each_line_is_what_a_whole_pass_with_that_cache_gives(decoder, chosen, fmt):
    from kvlab.accuracy.scoring import with_scales
    found = sensitivity(decoder, chosen, fmt, layers=[0, 2], calibration_ids=OTHER).set_index(["layer", "side"])
    assert list(found.index) == [(0, "K"), (0, "V"), (2, "K"), (2, "V")]
    for layer, side in found.index:
        formats = ["fp32"] * 3
        formats[layer] = one_side(with_scales(decoder, [fmt] * 3, OTHER)[layer], side)
        whole = compare(score_windows(decoder, chosen, formats)).kl
        line = found.loc[layer, side]
        assert line["kl"] == pytest.approx(whole.value, rel=1e-3) and line["kl"] > 0 and line["n"] == 140
        assert line["low"] <= line["kl"] <= line["high"]


def test_one_side_leaves_the_other_in_fp32():
    k, v = one_side("int8/token+int4/token/g32", "K"), one_side("int8/token+int4/token/g32", "V")
    assert (k.name, v.name) == ("int8/token+fp32", "fp32+int4/token/g32")
    assert k.k == kv_format("int8/token").k and k.v == kv_format("fp32").v and v.v == kv_format("int4/token/g32").v
    assert kv_format(one_side("kivi4/g32/r32", "V").name) == one_side("kivi4/g32/r32", "V")


def test_bytes_are_those_of_one_side(decoder):
    assert side_bytes(decoder, 0, "K", "int8/token") == 2 * (32 + 4) and side_bytes(decoder, 0, "V", "fp16") == 2 * 64
    both = kv_format("kivi4/g32/r32").nbytes(4096, CONFIG.shape(0)) / 4096
    assert sum(side_bytes(decoder, 0, side, "kivi4/g32/r32") for side in "KV") == pytest.approx(both)


def lines(*values):
    """(layer, side, format, KL, bytes)."""
    return pd.DataFrame(values, columns=["layer", "side", "kv_format", "kl", "bytes_per_token"])


def table(k_kl=(0.5, 0.1), v_kl=(0.2, 0.05)):
    return lines(*[(layer, side, fmt, kl, size) for layer in (0, 1) for side, pair in (("K", k_kl), ("V", v_kl))
                   for fmt, kl, size in (("int4/token/g32", pair[0] / (layer + 1), 40.0),
                                         ("int8/token", pair[1] / (layer + 1), 72.0))])


def test_a_budget_goes_where_a_byte_saves_most():
    low = mix(table(), 160)
    assert low.formats == ("int4/token/g32+int4/token/g32",) * 2 and low.bytes_per_token == 160
    assert low.predicted_kl == pytest.approx(0.5 + 0.2 + 0.25 + 0.1)
    one = mix(table(), 160 + 32)
    assert one.formats == ("int8/token+int4/token/g32", "int4/token/g32+int4/token/g32")
    assert one.predicted_kl == pytest.approx(low.predicted_kl - 0.4) and one.bytes_per_token == 192
    two = mix(table(), 160 + 95)                                 # room for two of 32 bytes, not for a third
    assert two.formats == ("int8/token+int4/token/g32",) * 2
    assert mix(table(), 1e9).formats == ("int8/token+int8/token",) * 2


def test_a_larger_format_that_is_no_better_is_not_bought():
    assert mix(table(k_kl=(0.1, 0.1), v_kl=(0.1, 0.2)), 1e9).bytes_per_token == 160


def test_a_mix_can_be_scored_and_additivity_holds_roughly(decoder, chosen):
    measured = pd.concat([sensitivity(decoder, chosen, fmt) for fmt in ("int4/token/g32", "int8/token")])
    small, more = mix(measured, 240), mix(measured, 300)
    scored = [compare(score_windows(decoder, chosen, one.formats)).kl.value for one in (small, more)]
    assert scored[1] < scored[0] and 0.3 < scored[0] / small.predicted_kl < 3


def test_what_cannot_be_mixed_or_measured_is_refused(decoder, chosen):
    with pytest.raises(ValueError, match="below the 160"):
        mix(table(), 159)
    with pytest.raises(ValueError, match="two formats or more"):
        mix(table().query("kv_format == 'int8/token'"), 1e9)
    with pytest.raises(ValueError, match="layer 3 is out of range.*0 … 2"):
        sensitivity(decoder, chosen, "int8/token", layers=[3])
    with pytest.raises(ValueError, match="no windows"):
        sensitivity(decoder, [], "int8/token")
    with pytest.raises(ValueError, match="calibration text is empty"):
        sensitivity(decoder, chosen, "int8/tensor")


@pytest.mark.parametrize("name, value, said", [
    ("model.layers.1.mlp.down_proj.weight", math.nan, "a, window 0: layer 1 of broken .*token 0 of 70"),
    ("lm_head.weight", math.inf, "a, window 0: the output layer of broken .*token")])
def test_nan_stops_with_window_layer_and_token(decoder, chosen, name, value, said):
    weights = dict(decoder.weights)
    weights[name] = weights[name].clone()
    weights[name][3, 3] = value
    with pytest.raises(ValueError, match=said):
        sensitivity(Decoder(CONFIG, weights, name="broken"), chosen, "int8/token")


def test_nan_that_a_format_makes_names_that_format(decoder, chosen, monkeypatch):
    """Of the cell that is resumed in the middle of the model, not of the pass that all share."""
    whole, block = [], type(decoder).block

    def broken(self, layer, x_TH, *rest, **more):
        x_TH = block(self, layer, x_TH, *rest, **more)
        whole.append(layer)
        return x_TH * math.nan if len(whole) == 4 else x_TH           # the first layer after the shared pass of three
    monkeypatch.setattr(type(decoder), "block", broken)
    with pytest.raises(ValueError, match="a, window 0, K of layer 0 in int8/token: layer 0 .*token 0 of 70"):
        sensitivity(decoder, chosen, "int8/token")
