"""Bytes per layer kind: golden values of the research ledger, hand-computed cases, and laws that must hold."""
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.catalog.models import model, models
from kvlab.kv.formats import kv_format
from kvlab.kv.sizing import (
    article_formula_bytes,
    crossover_tokens,
    engine_bytes,
    first_kept,
    kv_bytes,
    kv_bytes_per_token,
    layer_bytes,
    size,
    state_bytes,
    weight_bytes,
)
from kvlab.shapes import LayerSpec, ModelSpec

GiB = 2**30
QWEN = model("Qwen/Qwen2-72B")
K3 = model("moonshotai/Kimi-K3")
MHA64 = replace(QWEN, layers=(replace(QWEN.layers[0], num_kv_heads=64),))
FORMATS = ("fp32", "fp16", "bf16", "int8/token", "int8/block16")

lengths = st.integers(1, 5000)
formats = st.sampled_from(FORMATS)
heads = st.sampled_from([(8, 8), (8, 4), (8, 1), (12, 4), (64, 8)])
widths = st.sampled_from([(64, None), (128, None), (192, 128)])


def layer(kind="full", heads=(64, 8), width=(128, None), window=None, count=1):
    return LayerSpec(kind, count, *heads, *width, window=window)


# --- golden values -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kv_len, gib", [(2048, 0.625), (4096, 1.25), (32768, 10), (131072, 40)])
def test_qwen2_72b(kv_len, gib):
    assert kv_bytes(QWEN, kv_len, "bf16") == gib * GiB
    assert kv_bytes_per_token(QWEN, kv_len, "bf16") == 327_680


def test_the_articles_point():
    assert kv_bytes(QWEN, 4096, "bf16") == article_formula_bytes(QWEN, 4096) == 1_342_177_280


def test_qwen_72b_v1_is_mha():
    assert kv_bytes(model("Qwen/Qwen-72B"), 2048, "bf16") == 5 * GiB


def test_weights_and_cache_cross_where_the_ledger_says():
    assert crossover_tokens(QWEN) == 443_763
    assert crossover_tokens(MHA64) == 55_470
    weights = QWEN.params * 2
    assert kv_bytes(QWEN, 443_763, "bf16") <= weights < kv_bytes(QWEN, 443_764, "bf16")


@pytest.mark.parametrize("name", ["deepseek-ai/DeepSeek-V3", "moonshotai/Kimi-K2-Instruct"])
def test_mla_is_one_latent_per_layer(name):
    assert kv_bytes_per_token(model(name), 131072, "bf16") == 61 * 576 * 2 == 70_272


def test_kimi_k3():
    assert kv_bytes_per_token(K3, 131072, "bf16") == 27_648
    assert kv_bytes(K3, 131072, "bf16") == 3.375 * GiB
    assert kv_bytes(K3, 1_048_576, "bf16") == 27 * GiB
    assert state_bytes(K3) == 69 * 96 * 128 * 128 * 4 == 434_110_464


@pytest.mark.parametrize("name, ratio", [
    ("deepseek-ai/DeepSeek-V3", 56.89), ("moonshotai/Kimi-K2-Instruct", 28.44), ("google/gemma-3-27b-it", 5.96),
    ("openai/gpt-oss-120b", 2.00), ("moonshotai/Kimi-K3", 147.65)])
def test_formula_over_truth(name, ratio):
    spec = model(name)
    truth = kv_bytes(spec, 131072, "bf16") + state_bytes(spec)
    assert round(article_formula_bytes(spec, 131072) / truth, 2) == ratio


def test_the_formula_is_far_off_for_41_of_119_configs():
    ratios = [article_formula_bytes(spec, 131072) / (kv_bytes(spec, 131072, "bf16") + state_bytes(spec))
              for spec in models().values()]
    assert sum(ratio > 1.5 for ratio in ratios) == 41


@pytest.mark.parametrize("num_kv_heads, copies", [(8, [1, 1, 1, 1, 2, 4]), (1, [1, 2, 4, 8, 16, 32])])
def test_heads_are_copied_over_more_ranks_than_there_are(num_kv_heads, copies):
    spec = replace(QWEN, layers=(replace(QWEN.layers[0], num_kv_heads=num_kv_heads),))
    whole = kv_bytes(spec, 4096, "bf16")
    for tp, expected in zip((1, 2, 4, 8, 16, 32), copies, strict=True):
        assert tp * kv_bytes(spec, 4096, "bf16", tp) == expected * whole


def test_blocks_of_16_waste_seven_and_a_half_tokens():
    waste = [kv_bytes(QWEN, n, "bf16", block_size=16) - kv_bytes(QWEN, n, "bf16") for n in range(1, 17)]
    assert sum(waste) / len(waste) == 7.5 * 327_680


def test_scales_of_int8_per_token_cost_3_percent():
    codes = kv_bytes(QWEN, 4096, "bf16") // 2
    assert (kv_bytes(QWEN, 4096, "int8/token") - codes) / codes == 0.03125


def test_llama4_scout_keeps_one_chunk():
    scout = model("meta-llama/Llama-4-Scout-17B-16E-Instruct")
    assert kv_bytes(scout, 131072, "bf16") == 7.125 * GiB
    assert kv_bytes_per_token(scout, 131072, "bf16") == 49_152
    assert "largest just before a chunk ends" in size(scout, 100).note and "chunk" not in size(QWEN, 100).note
    chunked = next(group for group in scout.layers if group.kind == "chunked")
    assert layer_bytes(chunked, 131073, "bf16") == layer_bytes(chunked, 1, "bf16") == 2 * 8 * 128 * 2


# --- hand-computed cases -------------------------------------------------------------------------------------------

def test_k_and_v_of_different_width():
    assert layer_bytes(layer(heads=(64, 4), width=(192, 128)), 10, "bf16") == 10 * 4 * (192 + 128) * 2


def test_window_counts_every_scale_group_it_touches():
    sliding = layer("sliding", window=16, heads=(8, 2), width=(64, None))
    assert first_kept(sliding, 40) == 24
    # tokens 24 … 40 lie in blocks 1 and 2 of 16 tokens: two scales per KV head, for K and for V
    assert layer_bytes(sliding, 40, "int8/block16") == 2 * 2 * (16 * 64 + 2 * 4)
    assert layer_bytes(sliding, 10, "bf16") == layer_bytes(replace(sliding, kind="full"), 10, "bf16")


def test_block_rounding_counts_whole_blocks_at_both_ends():
    sliding = layer("sliding", window=16, heads=(8, 2), width=(64, None))
    per_token = 2 * 2 * 64 * 2
    assert layer_bytes(sliding, 40, "bf16", block_size=16) == 32 * per_token
    assert layer_bytes(sliding, 48, "bf16", block_size=16) == 16 * per_token
    assert layer_bytes(layer(), 17, "bf16", block_size=16) == layer_bytes(layer(), 32, "bf16")


def test_mla_latent_is_whole_on_every_rank():
    deepseek = model("deepseek-ai/DeepSeek-V3")
    sized = size(deepseek, 4096, tp=8)
    assert sized.kv_bytes_per_rank == sized.kv_bytes == 4096 * 70_272


def test_marginal_token_past_the_window_is_free():
    mistral = model("mistralai/Mistral-7B-v0.1")
    assert kv_bytes_per_token(mistral, 4096, "bf16") == 131_072
    assert kv_bytes_per_token(mistral, 4097, "bf16") == 0


def test_growth_is_the_average_over_the_cycle_of_scales_and_tails():
    spec = ModelSpec("toy", (layer(heads=(2, 1), width=(64, None)),), 2, 1, 64)
    # 64 codes of K and of V, and a scale of 4 bytes each that 16 tokens share
    assert {kv_bytes_per_token(spec, n, "int8/block16") for n in (1, 2, 16, 17)} == {128 + 8 / 16}
    # KIVI: what stays is 2 bits an element, and an fp16 scale and zero per 32 of them; the tail has no part in it
    stays = 2 * (64 * 2 / 8 + 2 * 4)
    assert {kv_bytes_per_token(spec, n, "kivi2/g32/r128") for n in (128, 129, 255, 256, 1000)} == {stays}


@pytest.mark.parametrize("fmt, ends", [("bf16", 1), ("int8/block16", 16), ("kivi2/g32/r128", 128)])
def test_growth_is_what_a_long_sequence_gains(fmt, ends):
    """Over one chunk, window or turn of the tail the cache grows by growth × tokens, and its note says so."""
    for name in ("Qwen/Qwen2-72B", "meta-llama/Llama-4-Scout-17B-16E-Instruct", "google/gemma-3-27b-it"):
        spec, kv_len = model(name), 9000
        gained = kv_bytes(spec, kv_len + 8192, fmt) - kv_bytes(spec, kv_len, fmt)
        assert kv_bytes_per_token(spec, kv_len, fmt) * 8192 == gained
        note = size(spec, kv_len, kv_format=fmt).growth_note
        assert (f"average over {ends} tokens" in note) == (ends > 1)
        assert ("window or first chunk is full" in note) == (name != "Qwen/Qwen2-72B")


def test_crossover_is_none_where_it_is_unknown_or_never_comes():
    assert crossover_tokens(replace(QWEN, params=None)) is None
    assert crossover_tokens(model("mistralai/Mistral-7B-v0.1")) is None
    assert crossover_tokens(QWEN, dtype_bytes=1) == 443_763 // 2
    assert crossover_tokens(replace(QWEN, params=1)) == 0


def test_size_reports_the_whole_batch():
    sized = size(K3, 131072, batch_size=4, tp=8)
    assert sized.kv_bytes == 4 * 131072 * 27_648 and sized.state_bytes == 4 * 434_110_464
    assert sized.kv_bytes_per_token == 27_648 and sized.weight_bytes is None
    assert (sized.kind, sized.method) == ("modelled", "formula:layer_bytes") and sized.note.startswith("exact")
    assert list(asdict(sized))[:10] == ["model", "kv_len", "batch_size", "kv_format", "tp", "kv_bytes",
                                        "kv_bytes_per_token", "state_bytes", "weight_bytes", "article_formula_bytes"]


def test_approximate_models_are_never_called_exact():
    sized = size(model("deepseek-ai/DeepSeek-V4-Flash"), 131072)
    assert sized.kind == "modelled" and sized.note.startswith("approximate: ") and "indexer" in sized.note


def test_an_engines_blocks_of_gemma_4_are_what_vllm_logged():
    """A public vLLM log: 64.68 GiB of cache, 626,949 tokens at the model's maximum of 262,144 (108.2 KiB a token)."""
    gemma = model("nvidia/Gemma-4-31B-IT-NVFP4")
    one = engine_bytes(gemma, 262_144, "bf16")
    assert one == 10 * 4 * 1024 * 2 * 262_144 + 50 * 16 * 512 * 2 * 16 * (-(-(1024 - 1 + 8192) // 16) + 1)
    assert round(one / 262_144 / 1024, 1) == 108.2
    assert abs(64.68 * GiB / one * 262_144 - 626_949) < 0.005 * GiB / one * 262_144      # the log rounds the GiB
    assert one > 1.02 * kv_bytes(gemma, 262_144, "bf16")


def test_an_engine_adds_what_the_rule_says():
    def of(group, kv_len, fmt="bf16", **more):
        return engine_bytes(ModelSpec("toy", (group,), 8, 2, 64), kv_len, fmt, **more)
    per_token = 2 * 2 * 64 * 2
    assert of(layer(heads=(8, 2), width=(64, None)), 17) == 32 * per_token
    assert of(layer(heads=(8, 2), width=(64, None), count=3), 17, block_size=64) == 3 * 64 * per_token
    sliding = layer("sliding", window=100, heads=(8, 2), width=(64, None))
    assert of(sliding, 50) == (4 + 1) * 16 * per_token
    assert of(sliding, 5000, max_batched_tokens=205) == (19 + 1) * 16 * per_token        # 99 + 205 tokens: 19 blocks
    assert of(replace(sliding, kind="chunked"), 5000, max_batched_tokens=205) == 20 * 16 * per_token
    assert of(LayerSpec("linear", 4, state_bytes=1024), 5000) == 0
    # blocks of 16 would split scales of 24 tokens: both fit into 48
    assert of(layer(heads=(8, 2), width=(64, None)), 17, "int8/block24") == 2 * 2 * (48 * 64 + 2 * 4)
    with pytest.raises(ValueError, match="max_batched_tokens=0"):
        of(sliding, 50, max_batched_tokens=0)


def test_weights_are_what_a_file_stores():
    stored = replace(QWEN, weight_bytes=40 * GiB)
    assert weight_bytes(stored) == 40 * GiB and weight_bytes(stored, 2) == weight_bytes(QWEN) == 2 * QWEN.params
    assert crossover_tokens(stored) == 40 * GiB // 327_680
    assert crossover_tokens(replace(stored, params=None)) == crossover_tokens(stored)
    assert (size(stored, 16).weights_are, size(QWEN, 16).weights_are) == ("as stored", "16 bit")


def test_size_says_what_was_assumed_and_what_an_engine_adds():
    spec = replace(QWEN, assumed=("head_dim = 128",), approximate="a model of it")
    sized = size(spec, 17, batch_size=3)
    assert sized.assumed == ("head_dim = 128",) and sized.approximate == "a model of it"
    assert sized.engine_bytes == 3 * 32 * 327_680 and sized.engine_note == "at most, in blocks of 16 tokens"
    assert size(spec, 17, kv_format="int8/block24").engine_note == "at most, in blocks of 48 tokens"
    windowed = size(model("mistralai/Mistral-7B-v0.1"), 17)
    assert "8,192 batched tokens in flight" in windowed.engine_note and windowed.max_batched_tokens == 8192


# --- refusals ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("bad", [0, -1, 1.5, True])
@pytest.mark.parametrize("field", ["kv_len", "batch_size", "tp"])
def test_lengths_must_be_positive_whole_numbers(field, bad):
    with pytest.raises(ValueError, match=f"{field}={bad!r} must be a whole number of at least 1"):
        size(QWEN, **{"kv_len": 16, field: bad})


@pytest.mark.parametrize("function", [kv_bytes, kv_bytes_per_token])
def test_zero_length_is_refused_everywhere(function):
    with pytest.raises(ValueError, match="kv_len=0"):
        function(QWEN, 0, "bf16")
    with pytest.raises(ValueError, match="kv_len=0"):
        article_formula_bytes(QWEN, 0)


def test_tp_that_does_not_fit_lists_what_does():
    with pytest.raises(ValueError, match="tp=3 .*allowed tp: 1, 2, 4, 8, 16, 32, 64$"):
        size(QWEN, 16, tp=3)
    with pytest.raises(ValueError, match="allowed tp: 1, 71$"):
        size(model("tiiuae/falcon-7b"), 16, tp=2)
    with pytest.raises(ValueError, match="allowed tp: 1, 2, 5, 10, 20, 40$"):      # 4 divides 40 heads, but not 10
        size(model("microsoft/phi-4"), 16, tp=4)


def test_unknown_format_names_a_near_one():
    with pytest.raises(KeyError, match="Did you mean 'bf16'"):
        size(QWEN, 16, kv_format="bf61")


def test_a_block_may_not_split_a_scale_group():
    with pytest.raises(ValueError, match="block_size=8 splits .* multiple of 16"):
        layer_bytes(layer(), 16, "int8/block16", block_size=8)


# --- laws ----------------------------------------------------------------------------------------------------------

@given(st.sampled_from(list(models().values())), lengths, st.integers(1, 64), formats)
def test_size_is_linear_in_the_batch(spec, kv_len, batch_size, fmt):
    one, many = size(spec, kv_len, 1, fmt), size(spec, kv_len, batch_size, fmt)
    for name in ("kv_bytes", "state_bytes", "article_formula_bytes", "kv_bytes_per_rank"):
        assert getattr(many, name) == batch_size * getattr(one, name)
    assert many.kv_bytes_per_token == one.kv_bytes_per_token


@given(st.sampled_from(["full", "mla"]), lengths, st.integers(1, 500), formats)
def test_growing_layers_grow(kind, kv_len, more, fmt):
    group = layer(kind, heads=(8, 1), width=(576, 512))
    assert layer_bytes(group, kv_len, fmt) < layer_bytes(group, kv_len + more, fmt)


@given(lengths, st.integers(0, 500), st.integers(1, 1000), st.sampled_from(FORMATS[:4]))
def test_a_window_grows_and_then_stays(kv_len, more, window, fmt):
    group = layer("sliding", window=window)
    assert layer_bytes(group, kv_len, fmt) <= layer_bytes(group, kv_len + more, fmt)
    assert layer_bytes(group, kv_len, fmt) == layer_bytes(layer(), min(kv_len, window), fmt)


@given(st.sampled_from(["sliding", "chunked"]), lengths, st.integers(1, 1000), formats, heads, widths)
def test_windows_and_chunks_never_exceed_full(kind, kv_len, window, fmt, heads, widths):
    group = layer(kind, heads, widths, window)
    assert 0 < layer_bytes(group, kv_len, fmt) <= layer_bytes(replace(group, kind="full"), kv_len, fmt)


@given(lengths, formats, st.sampled_from([1, 2, 4, 8, 16, 32, 64]), widths)
def test_gqa_is_mha_divided_by_the_group_ratio(kv_len, fmt, ratio, width):
    mha, gqa = layer(heads=(64, 64), width=width), layer(heads=(64, 64 // ratio), width=width)
    assert layer_bytes(gqa, kv_len, fmt) * ratio == layer_bytes(mha, kv_len, fmt)


@given(lengths, formats, st.sampled_from([1, 2, 4, 8, 16, 32, 64]), st.sampled_from([1, 2, 4, 8, 16, 32, 64]))
def test_ranks_together_hold_every_copy(kv_len, fmt, tp, num_kv_heads):
    group = layer(heads=(64, num_kv_heads))
    whole, rank = layer_bytes(group, kv_len, fmt), layer_bytes(group, kv_len, fmt, tp)
    assert rank * tp == whole * max(1, tp // num_kv_heads)


@given(lengths, formats, st.sampled_from([16, 32, 128]), st.sampled_from(["full", "sliding", "chunked"]))
def test_whole_blocks_cost_less_than_two_blocks_more(kv_len, fmt, block_size, kind):
    group = layer(kind, window=None if kind == "full" else 100)
    own, allocated = layer_bytes(group, kv_len, fmt), layer_bytes(group, kv_len, fmt, block_size=block_size)
    assert own <= allocated < own + 2 * layer_bytes(layer(), block_size, fmt)


@given(st.sampled_from(list(models().values())), lengths, st.sampled_from([*FORMATS, "kivi4/g32/r64", "q8_0"]))
def test_growth_adds_up_over_a_cycle_and_is_never_negative(spec, kv_len, fmt):
    spec = replace(spec, layers=tuple(g for g in spec.layers if g.window is None) or QWEN.layers)
    growth = kv_bytes_per_token(spec, kv_len, fmt)
    assert growth * 64 == kv_bytes(spec, kv_len + 64, fmt) - kv_bytes(spec, kv_len, fmt) and growth >= 0


@given(st.sampled_from(list(models().values())), lengths, formats)
def test_an_engine_never_holds_less_than_the_sequence(spec, kv_len, fmt):
    assert engine_bytes(spec, kv_len, fmt) >= kv_bytes(spec, kv_len, fmt)
    if all(group.window is None for group in spec.layers) and fmt == "bf16":
        whole = -(-kv_len // 16) * 16
        assert engine_bytes(spec, kv_len, fmt) == kv_bytes(spec, whole, fmt)


@given(lengths, formats, heads, widths)
def test_a_full_layer_is_exactly_what_the_format_stores(kv_len, fmt, heads, widths):
    group = layer("full", heads, widths)
    assert layer_bytes(group, kv_len, fmt) == kv_format(fmt).nbytes(kv_len, group.shape)


@pytest.mark.parametrize("fmt", ["int8/block16", "kivi2/g32/r128", "kivi4/g32/r128"])
@pytest.mark.parametrize("params", [100, 16_500, 18_123, 20_000])
def test_the_crossover_is_the_last_length_that_still_fits(params, fmt):
    """Also where bytes fall when a tail is encoded, so that lengths which fit do not stand in one run."""
    spec = ModelSpec("toy", (layer(heads=(2, 1), width=(64, None)),), 2, 1, 64, params=params)
    most = 2 * params // 32 + 200                       # a token takes 32 bytes at least
    assert crossover_tokens(spec, fmt) == max((n for n in range(1, most) if kv_bytes(spec, n, fmt) <= 2 * params),
                                              default=0)
