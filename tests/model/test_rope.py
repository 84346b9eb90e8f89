"""RoPE's tables and the rotation against transformers, and properties that follow from what it is."""
import math

import pytest
import torch

from kvlab.model.config import DecoderConfig, RopeScaling
from kvlab.model.rope import frequencies, rotate, tables

SIZES = dict(vocab_size=8, hidden_size=64, intermediate_size=8, num_layers=1, num_q_heads=2, num_kv_heads=1,
             head_dim=32, context=1024)
SCALINGS = [
    dict(rope_type="default"),
    dict(rope_type="linear", factor=4.0),
    dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
         original_max_position_embeddings=256),
    dict(rope_type="llama3", factor=32.0, low_freq_factor=2.0, high_freq_factor=3.0,
         original_max_position_embeddings=8192),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=256),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=256, attention_factor=1.25),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096, truncate=False, beta_fast=16.0,
         beta_slow=2.0),
    dict(rope_type="yarn", factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=0.707),
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s["rope_type"])
@pytest.mark.parametrize("theta, head_dim", [(10_000.0, 64), (500_000.0, 128)])
def test_tables_are_transformers(scaling, theta, head_dim):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason="the reference for RoPE")
    from transformers import LlamaConfig
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, head_dim=head_dim, num_hidden_layers=1,
                         max_position_embeddings=1024, rope_parameters=dict(rope_theta=theta, **scaling))
    reference = llama.LlamaRotaryEmbedding(config)
    ours = DecoderConfig.from_config(config.to_dict(), "x")
    assert torch.allclose(frequencies(ours).float(), reference.inv_freq, rtol=1e-6, atol=0)
    cos_1TD, sin_1TD = reference(torch.zeros(1), torch.arange(64)[None])
    cos_TR, sin_TR = tables(ours, 64)
    assert torch.allclose(cos_1TD[0], torch.cat((cos_TR, cos_TR), -1), atol=1e-5)
    assert torch.allclose(sin_1TD[0], torch.cat((sin_TR, sin_TR), -1), atol=1e-5)
    q_THD = torch.randn(64, 2, head_dim, generator=torch.Generator().manual_seed(0))
    theirs, _ = llama.apply_rotary_pos_emb(q_THD[None], q_THD[None], cos_1TD, sin_1TD, unsqueeze_dim=2)
    assert torch.allclose(rotate(q_THD, cos_TR, sin_TR), theirs[0], atol=1e-4)


def test_scores_depend_on_the_distance_alone_and_lengths_are_kept():
    cos_TR, sin_TR = tables(DecoderConfig(**SIZES), 1024)
    q_D, k_D = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
    q_THD, k_THD = (rotate(x.expand(1024, 1, 32), cos_TR, sin_TR) for x in (q_D, k_D))
    scores = (q_THD[100:, 0] * k_THD[:-100, 0]).sum(-1)                # query 100 tokens behind the key
    assert torch.allclose(scores, scores[0].expand_as(scores), atol=1e-4)
    assert torch.allclose(q_THD.norm(dim=-1), q_D.norm().expand(1024, 1), atol=1e-4)
    assert not torch.allclose(scores[0], (q_D * k_D).sum(), atol=1e-2)


def test_angles_are_exact_at_late_positions():
    cos_TR, _ = tables(DecoderConfig(**SIZES), 100_001)
    assert cos_TR[100_000, 0].item() == pytest.approx(math.cos(100_000), abs=1e-7)


def test_a_half_keeps_its_dtype():
    cos_TR, sin_TR = tables(DecoderConfig(**SIZES), 4)
    x_THD = torch.randn(4, 2, 32)
    half = rotate(x_THD.bfloat16(), cos_TR, sin_TR)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, rotate(x_THD.bfloat16().float(), cos_TR, sin_TR).bfloat16())


def test_yarn_without_a_ramp_is_a_step():
    scaling = RopeScaling(kind="yarn", factor=2, original_context=64, beta_fast=4, beta_slow=4, truncate=False)
    plain, scaled = (frequencies(DecoderConfig(**SIZES, rope_scaling=s)) for s in (None, scaling))
    assert set((plain / scaled).round(decimals=6).tolist()) == {1.0, 2.0}
