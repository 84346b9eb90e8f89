"""What a step of a model costs a rank: against numbers from configurations, counted by hand."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.catalog.models import model
from kvlab.serving.model_work import is_mixture, ranked
from kvlab.serving.step_time import Batch
from kvlab.shapes import LayerSpec, ModelSpec


def test_llama_3_1_8b_by_hand():
    """hidden 4096, FFN 14336, vocabulary 128256, untied: layers 6,979,588,096 (norms too), a table of 525,336,576."""
    work = ranked(model("meta-llama/Llama-3.1-8B"))
    table = 128256 * 4096
    layers = 8_030_261_248 - 2 * table
    assert layers == 32 * (4096 * 128 * 2 * (32 + 8) + 3 * 4096 * 14336 + 2 * 4096) + 4096
    assert work.weight_bytes == 2 * (layers + table) and work.flops_per_token == 2 * layers
    assert work.flops_per_sequence == 2 * table
    assert work.kv_bytes_per_token == 131_072 and work.kv_bytes_per_sequence == 0
    assert work.flops_per_pair == 32 * 4 * 32 * 128
    assert (work.experts, work.reductions, work.exchanges) == (0, 0, 0)


def test_a_tied_head_is_counted_once():
    """SmolLM2-135M: 576 × 49152 serves as embedding and as head."""
    spec, work = model("HuggingFaceTB/SmolLM2-135M"), ranked(model("HuggingFaceTB/SmolLM2-135M"))
    assert work.weight_bytes == 2 * spec.params and work.flops_per_sequence == 2 * 576 * 49152
    assert work.flops_per_token == 2 * (spec.params - 576 * 49152)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_ranks_share_everything_but_what_is_replicated(tp):
    one, part = ranked(model("Qwen3-32B")), ranked(model("Qwen3-32B"), tp=tp)
    for name in ("weight_bytes", "flops_per_token", "flops_per_sequence", "kv_bytes_per_token", "flops_per_pair"):
        assert getattr(part, name) == pytest.approx(getattr(one, name) / tp)
    assert part.reductions == 2 * 64 and part.reduced_bytes_per_token == 2 * 5120 and one.reductions == 0
    narrow = ranked(model("Qwen3-30B-A3B"), tp=8)                   # 4 KV heads: each rank keeps one
    assert narrow.kv_bytes_per_token == ranked(model("Qwen3-30B-A3B"), tp=4).kv_bytes_per_token


def test_a_mixture_by_hand():
    """Qwen3-30B-A3B: 48 layers of 128 experts of 3 × 2048 × 768; a token takes 8; two replicas share them."""
    spec = model("Qwen/Qwen3-30B-A3B-Instruct-2507")
    alone, shared = ranked(spec), ranked(spec, dp=2)
    expert = 48 * 3 * 2048 * 768
    assert alone.expert_bytes == 2 * expert and alone.expert_flops_per_token == 2 * 8 * expert
    assert alone.weight_bytes + 128 * alone.expert_bytes == 2 * (spec.params - 151936 * 2048)
    assert shared.expert_bytes == expert and shared.weight_bytes == alone.weight_bytes
    assert (alone.exchanges, shared.exchanges, shared.exchanged_bytes_per_token) == (0, 96, 4096)
    active = (alone.flops_per_token + alone.expert_flops_per_token + alone.flops_per_sequence) / 2
    assert 2.8e9 < active < 3.4e9                                   # "A3B"
    one, step = Batch(decode_seqs=1, sequences=1), Batch(decode_seqs=1, sequences=1, peer_tokens=255)
    assert alone.read_expert_bytes(one) == pytest.approx(8 * alone.expert_bytes)
    assert shared.read_expert_bytes(step) == pytest.approx(128 * shared.expert_bytes, rel=1e-4)
    assert shared.expert_flops(step) == 256 * shared.expert_flops_per_token


@given(st.integers(1, 5000))
def test_touched_experts_grow_to_all_of_them(tokens):
    work = ranked(model("Qwen3-30B-A3B"))
    assert 8 <= work.touched_experts(tokens) + 1e-9 and work.touched_experts(tokens) <= 128
    assert work.touched_experts(tokens) <= work.touched_experts(tokens + 1) <= 8 * (tokens + 1)


def test_windows_and_states_are_read_per_sequence():
    layers = (LayerSpec("full", 2, 8, 2, 64), LayerSpec("sliding", 4, 8, 2, 64, window=128),
              LayerSpec("linear", 3, state_bytes=1000))
    work = ranked(ModelSpec("made", layers, 8, 2, 64, params=10**8))
    assert work.kv_bytes_per_token == 2 * 2 * 2 * 64 * 2
    assert work.kv_bytes_per_sequence == 4 * 128 * 2 * 2 * 64 * 2 + 3000
    assert work.flops_per_token == 2e8 and work.flops_per_sequence == 0        # no widths: head and table not apart


def test_a_latent_is_whole_on_every_rank():
    spec = model("deepseek-ai/DeepSeek-V3")
    assert ranked(spec, tp=8).kv_bytes_per_token == ranked(spec).kv_bytes_per_token == 61 * 576 * 2
    assert ranked(spec, itemsize=1.0).weight_bytes == ranked(spec).weight_bytes / 2


def test_formats_of_the_cache_and_of_weights():
    spec = model("meta-llama/Llama-3.1-8B")
    assert ranked(spec, kv_format="fp8_e4m3").kv_bytes_per_token == 65_536
    assert ranked(spec, itemsize=0.5).weight_bytes == ranked(spec).weight_bytes / 4


def test_what_is_not_known_is_refused():
    layers = (LayerSpec("full", 2, 8, 2, 64),)
    with pytest.raises(ValueError, match="number of parameters of made is not known"):
        ranked(ModelSpec("made", layers, 8, 2, 64))
    with pytest.raises(ValueError, match="mixture of experts, and data/model_experts.csv has no line on it"):
        ranked(ModelSpec("made-12B-A3B", layers, 8, 2, 64, params=12 * 10**9))
    with pytest.raises(ValueError, match="tp=3"):
        ranked(model("meta-llama/Llama-3.1-8B"), tp=3)
    assert is_mixture(model("Qwen3-30B-A3B")) and not is_mixture(model("Qwen3-32B"))
