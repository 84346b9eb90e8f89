"""The block model against start-up logs to the token, and its arithmetic for every layer kind against hand counts."""
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.catalog.models import model, models
from kvlab.serving.block_model import WORDINGS, block_model, token_bytes
from kvlab.shapes import LayerSpec, ModelSpec

GiB = 2**30


def spec(*layers, attention_type=""):
    return ModelSpec("made", tuple(layers), 8, 4, 64, attention_type=attention_type)


FULL = LayerSpec("full", 4, 8, 4, 64)
SLIDING = LayerSpec("sliding", 12, 8, 4, 64, window=128)


# tokens as printed, from the GiB as printed. Source of each: the thread, see data/server_logs.csv.
@pytest.mark.parametrize("name, gib, length, settings, wording, tokens, concurrency", [
    ("Qwen/Qwen3.6-35B-A3B", 6.01, 131072, dict(kv_format="fp8_e4m3"), "concurrency", 569_878, 4.35),
    ("Qwen/Qwen3.6-35B-A3B", 5.98, 131072, dict(kv_format="fp8_e4m3"), "concurrency", 567_978, 4.33),
    ("Qwen/Qwen3.8-27B", 4.99, 131072, dict(kv_format="fp8_e4m3", tp=2), "concurrency", 302_921, 2.31),
    ("Qwen/Qwen3.6-27B", 9.84, 262144, dict(kv_format="fp8_e4m3", tp=2), "concurrency", 619_202, 2.36),
    ("Qwen/Qwen3.8-27B", 19.54, 262144, {}, "concurrency", 313_650, 1.20),
    ("google/gemma-4-31B-it", 64.68, 262144, {}, "concurrency", 626_949, 2.39),
    ("Qwen/Qwen3.5-122B-A10B", 21.43, 131072, dict(kv_format="fp8_e4m3"), "grouped", 467_712, 11.79),
    ("Qwen/Qwen3.5-122B-A10B", 24.05, 262144, dict(kv_format="fp8_e4m3", draft_layers=1, speculative_tokens=1),
     "grouped", 482_080, 6.42),
    ("HuggingFaceTB/SmolLM2-135M", 1.0, 2048, dict(block_size=128), "blocks", 46_592, 22.75),
])
def test_logged_tokens_follow_from_the_logged_gib(name, gib, length, settings, wording, tokens, concurrency):
    blocks = block_model(model(name), max_len=length, **settings)
    n = blocks.blocks(gib * GiB)
    assert blocks.tokens(n, wording) == tokens
    assert round(blocks.concurrency(n), 2) == concurrency


def test_block_sizes_that_hybrids_print():
    """Qwen3.8-27B prints 784 (bf16) and 1568 (fp8); Nemotron-Cascade-2-30B-A3B with fp8 4176; Qwen3.5-0.8B 544."""
    assert block_model(model("Qwen/Qwen3.8-27B"), max_len=4096).block_size == 784
    assert block_model(model("Qwen/Qwen3.8-27B"), max_len=4096, kv_format="fp8_e4m3").block_size == 1568
    nemotron = model("nvidia/Nemotron-Cascade-2-30B-A3B")
    assert block_model(nemotron, max_len=4096, kv_format="fp8_e4m3").block_size == 4176
    assert block_model(model("Qwen/Qwen3.5-0.8B"), max_len=4096).block_size == 544


def test_a_hybrid_that_no_catalogue_names():
    """69 linear and 23 full layers, bf16 state, no prefix caching: a public GB300 log prints 1056, 394,633, 38.54x."""
    state = 128 * 128 * 128 * 2 + (2 * 16 * 128 + 128 * 128) * 3 * 2
    made = spec(LayerSpec("full", 23, 64, 4, 256), LayerSpec("linear", 69, state_bytes=2 * state))
    blocks = block_model(made, max_len=10_240, prefix_caching=False, state_dtype_bytes=2)
    n = blocks.blocks(46.50 * GiB)
    assert (blocks.block_size, blocks.tokens(n), round(blocks.concurrency(n), 2)) == (1056, 394_633, 38.54)


def test_one_uniform_group_is_the_plain_formula():
    blocks = block_model(spec(FULL), max_len=1000)
    assert blocks.block_bytes == 16 * 4 * 2 * 4 * 64 * 2
    assert [(g.kind, g.layers, g.block_size) for g in blocks.groups] == [("full", 4, 16)]
    assert [blocks.blocks_per_request(length) for length in (1000, 16, 17)] == [63, 1, 2]
    assert blocks.blocks(10 * blocks.block_bytes) == 10 == blocks.blocks(11 * blocks.block_bytes - 1)
    assert blocks.blocks(-5.0) == 0


def test_full_and_sliding_layers_share_one_pool():
    blocks = block_model(spec(FULL, SLIDING), max_len=100_000, max_batched_tokens=1000)
    assert [(g.kind, g.layers) for g in blocks.groups] == [("full", 4)] + [("sliding", 4)] * 3
    assert blocks.block_bytes == 16 * 4 * 2 * 4 * 64 * 2, "a block is one group's pages, not all layers'"
    assert blocks.blocks_per_request() == 6250 + 3 * (math.ceil(1127 / 16) + 1)
    assert blocks.tokens(1000, "grouped") == 250 * 16 and blocks.tokens(1000, "blocks") == 16_000
    assert blocks.tokens(6466, "concurrency") == 100_000
    twice = block_model(spec(FULL, SLIDING), max_len=100_000, max_batched_tokens=1000, in_flight_batches=2)
    assert twice.blocks_per_request() == 6250 + 3 * (math.ceil(2127 / 16) + 1)
    whole = block_model(spec(FULL, SLIDING), max_len=100_000, hybrid=False)
    assert len(whole.groups) == 1 and whole.block_bytes == 4 * blocks.block_bytes and whole.blocks_per_request() == 6250


def test_a_window_keeps_one_token_less_than_its_length_of_what_was_computed():
    window = LayerSpec("sliding", 4, 8, 4, 64, window=129)
    blocks = block_model(spec(window), max_len=100_000, max_batched_tokens=1024)
    assert blocks.blocks_per_request() == (129 - 1 + 1024) // 16 + 1
    assert blocks.blocks_per_request(100) == 7 + 1, "never more than the sequence, and one for a window inside a block"


def test_a_chunked_layer_keeps_its_chunk_and_the_tokens_in_flight():
    chunked = LayerSpec("chunked", 4, 8, 4, 64, window=128)
    blocks = block_model(spec(FULL, chunked), max_len=100_000, max_batched_tokens=1000)
    assert blocks.blocks_per_request() == 6250 + math.ceil(1128 / 16)
    assert blocks.blocks_per_request(64) == 4 + 4


def test_a_narrower_page_holds_more_tokens_and_one_that_does_not_divide_is_padded():
    wide = LayerSpec("sliding", 4, 8, 8, 64, window=128)
    groups = block_model(spec(FULL, wide), max_len=4096).groups
    assert [(g.kind, g.block_size, g.page_bytes) for g in groups] == [("full", 32, 32768), ("sliding", 16, 32768)]
    odd = LayerSpec("sliding", 4, 12, 6, 64, window=128)
    groups = block_model(spec(FULL, odd), max_len=4096).groups
    assert [(g.kind, g.block_size, g.page_bytes) for g in groups] == [("full", 16, 24576), ("sliding", 16, 24576)]


def test_groups_of_nearly_equal_counts_take_the_larger():
    """gpt-oss-20b with a draft layer: 13 full and 12 sliding layers make two groups of 13, not three of 12."""
    groups = block_model(model("openai/gpt-oss-20b"), max_len=4096, draft_layers=1).groups
    assert [(g.kind, g.layers) for g in groups] == [("full", 13), ("sliding", 13)]


def test_a_latent_is_whole_on_every_rank_and_heads_are_not_split_below_one():
    latent = model("deepseek-ai/DeepSeek-V3")
    assert {token_bytes(latent, tp=tp) for tp in (1, 2, 8, 16)} == {61 * 576 * 2}
    four = model("Qwen/Qwen3-235B-A22B")
    assert token_bytes(four, tp=4) == token_bytes(four, tp=8) == 48_128 == token_bytes(four) / 4


def test_sparse_mla_stores_an_indexer_beside_the_latent():
    glm = model("zai-org/GLM-5")
    assert token_bytes(glm, "fp8_ds_mla") == 78 * (656 + 132)
    assert token_bytes(glm) == 78 * (576 * 2 + 132)
    with pytest.raises(ValueError, match="stores a latent"):
        block_model(model("Qwen/Qwen3-8B"), max_len=4096, kv_format="fp8_ds_mla")


def test_scales_per_token_count():
    plain, scaled = (block_model(spec(FULL), max_len=64, kv_format=name).block_bytes
                     for name in ("fp8_e4m3", "int8/token"))
    assert scaled - plain == 16 * 4 * 4 * 2 * 4, "a fp32 scale per token, head and side"
    with pytest.raises(ValueError, match="splits the scale groups"):
        block_model(spec(FULL), max_len=64, kv_format="int4/channel/g32", block_size=16)


def test_states_are_padded_to_the_attention_page():
    linear = LayerSpec("linear", 12, state_bytes=1_000_000)
    blocks = block_model(spec(FULL, linear), max_len=10_000)
    per_token = 2 * 4 * 64 * 2
    assert blocks.block_size == 16 * math.ceil(1_000_000 / (16 * per_token))
    assert blocks.block_bytes == 4 * blocks.block_size * per_token
    assert blocks.blocks_per_request() == math.ceil(10_000 / blocks.block_size) + 3 * 2
    assert "convolution" in blocks.note
    assert block_model(spec(FULL, linear), max_len=10_000, prefix_caching=False).blocks_per_request() == (
        math.ceil(10_000 / blocks.block_size) + 3)
    half = block_model(spec(FULL, linear), max_len=10_000, state_dtype_bytes=2)
    assert half.block_size == 16 * math.ceil(500_000 / (16 * per_token))
    spec_3 = block_model(spec(FULL, linear), max_len=10_000, speculative_tokens=3)
    assert spec_3.blocks_per_request() == math.ceil(10_000 / spec_3.block_size) + 3 * 5


def test_pipeline_stages_take_the_least_memory_per_layer():
    deep = spec(LayerSpec("full", 10, 8, 4, 64))
    page = 16 * 2 * 4 * 64 * 2
    two = block_model(deep, max_len=4096, pp=2)
    assert two.stage_block_bytes == (5 * page, 5 * page)
    three = block_model(deep, max_len=4096, pp=3)
    assert three.stage_block_bytes == (3 * page, 4 * page, 3 * page), "what is left over goes to the last but one"
    uneven = block_model(deep, max_len=4096, pp=(7, 3))
    assert uneven.stage_block_bytes == (7 * page, 3 * page) and uneven.block_bytes == 7 * page
    assert uneven.blocks(70 * page) == 10
    assert uneven.blocks([70 * page, 15 * page]) == 5, "of unequal stages the one with the least memory per layer"
    assert block_model(deep, max_len=4096).blocks([100 * page, 90 * page]) == 9, "unequal ranks: the fewest"
    with pytest.raises(ValueError, match="the stages hold 8 layers, and the model has 10"):
        block_model(deep, max_len=4096, pp=(4, 4))
    with pytest.raises(ValueError, match="3 pools for 2 pipeline stages"):
        uneven.blocks([1, 2, 3])
    with pytest.raises(ValueError, match="allowed: 1 to 10"):
        block_model(deep, max_len=4096, pp=11)


def test_wrong_use_is_refused():
    with pytest.raises(ValueError, match="max_len"):
        block_model(spec(FULL), max_len=0)
    with pytest.raises(ValueError, match="wording"):
        block_model(spec(FULL), max_len=8).tokens(1, "tokens")
    with pytest.raises(ValueError, match="allowed tp"):
        block_model(spec(FULL), max_len=8, tp=3)
    with pytest.raises(ValueError, match="no layer that caches"):
        block_model(spec(LayerSpec("linear", 3)), max_len=8)
    with pytest.raises(ValueError, match="needs a model with full layers"):
        block_model(spec(SLIDING), max_len=8, draft_layers=1)


@given(st.sampled_from(list(models().values())), st.integers(1, 300_000), st.floats(0.1, 500),
       st.sampled_from(WORDINGS))
def test_more_pool_never_holds_less_and_blocks_fit_the_pool(model_spec, length, gib, wording):
    try:
        blocks = block_model(model_spec, max_len=length)
    except ValueError as error:                             # a block of 16 that no row of the catalogue refuses
        pytest.fail(str(error))
    n, more = blocks.blocks(gib * GiB), blocks.blocks(gib * GiB + blocks.block_bytes)
    assert more == n + 1 and n * blocks.block_bytes <= gib * GiB
    assert blocks.tokens(n, wording) <= blocks.tokens(more, wording)
    assert blocks.blocks_per_request(length) <= blocks.blocks_per_request(length + 1)
    assert sum(g.layers for g in blocks.groups) >= sum(x.count for x in model_spec.layers if x.kind != "linear")
