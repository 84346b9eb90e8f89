"""Decoders out of GGUF files: the same logits as transformers, the library's values, and what is refused."""
import json

import numpy as np
import pytest
import torch
from tiny_models import TOKENS, gguf, gguf_tensors, logits, same, tiny, write_gguf

from kvlab.model.load import load_decoder
from kvlab.model.tokenizer import encode


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.mark.parametrize("kind, changes", [
    ("llama", {}), ("llama", dict(tie_word_embeddings=True)), ("llama", dict(attention_bias=True)),
    ("qwen2", {}), ("qwen3", dict(head_dim=32, tie_word_embeddings=True)), ("llama", dict(num_key_value_heads=1)),
])
def test_a_gguf_computes_what_transformers_does(tmp_path, kind, changes):
    model = tiny(kind, **changes)
    decoder = load_decoder(write_gguf(tmp_path / "tiny.gguf", model))
    same(decoder, model)
    assert torch.equal(logits(load_decoder(tmp_path)), logits(decoder))         # the only model in its folder
    assert decoder.name == "tiny" and len(decoder.sha256) == 64
    assert encode(decoder.tokenizer, "lo lo<|end|>").tolist() == [256, 257, 258]
    second = load_decoder(tmp_path / "tiny.gguf")                   # from the converted copy
    assert torch.equal(logits(second), logits(decoder)) and second.sha256 == decoder.sha256
    assert encode(second.tokenizer, "lo lo<|end|>").tolist() == [256, 257, 258]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "BF16", "F16"])
def test_quantised_weights_are_the_librarys(tmp_path, kind, own_cache):
    model, stored = tiny("llama"), gguf.GGMLQuantizationType[kind]
    decoder = load_decoder(write_gguf(tmp_path / "tiny.gguf", model, quantised=stored))
    for name, values in gguf_tensors(model).items():
        if values.ndim == 2 and not any(part in name for part in ("attn_q", "attn_k")):
            ours = decoder.weights[_named(decoder, name)]
            assert torch.equal(ours, torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values, stored),
                                                                             stored)))
    q = model.model.layers[1].self_attn.q_proj.weight
    assert (decoder.weights["model.layers.1.self_attn.q_proj.weight"] - q).norm() < 0.2 * q.norm()
    about = json.loads(_header(next(own_cache.iterdir()) / "model.safetensors"))["__metadata__"]
    assert about["source"] == "tiny.gguf" and about["source_sha256"] == decoder.sha256 and about["kvlab"]
    assert f"{kind} 16" in about["quantisation"]


def _named(decoder, gguf_name):
    from kvlab.model._gguf_weights import _gguf_name
    return next(name for name in decoder.weights if _gguf_name(name) == gguf_name)


def _header(path):
    with open(path, "rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))


def test_rows_do_not_depend_on_how_many_are_taken_at_a_time(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf", tiny("llama", attention_bias=True),
                      quantised=gguf.GGMLQuantizationType.Q8_0)
    whole = load_decoder(path)
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr("kvlab.model._gguf_weights.AT_A_TIME", 150)         # two rows
    parts = load_decoder(path)
    assert all(torch.equal(parts.weights[name], weight) for name, weight in whole.weights.items())


def test_linear_and_llama3_scaling_of_a_gguf(tmp_path):
    linear = tiny("llama", rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0))
    keys = {"{arch}.rope.scaling.type": "linear", "{arch}.rope.scaling.factor": 4.0}
    same(load_decoder(write_gguf(tmp_path / "linear.gguf", linear, metadata=keys)), linear)
    scaling = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=8192)
    llama3 = tiny("llama", head_dim=32, rope_parameters=scaling)
    divisors = (5e5 ** (-torch.arange(0, 32, 2) / 32) / llama3.model.rotary_emb.inv_freq).numpy()
    assert divisors.max() == pytest.approx(8, rel=1e-4)
    path = write_gguf(tmp_path / "llama3.gguf", llama3, tensors={"rope_freqs.weight": divisors})
    same(load_decoder(path), llama3)
    assert load_decoder(path).config.rope_scaling.kind == "llama3"                  # from the converted copy too
    wrong = write_gguf(tmp_path / "wrong.gguf", llama3, tensors={"rope_freqs.weight": divisors[::-1].copy()})
    with pytest.raises(ValueError, match="not the RoPE scaling of Llama 3.1"):
        load_decoder(wrong)


EXTRA = np.zeros((4, 64), np.float32)


@pytest.mark.parametrize("changes, words", [
    (dict(kind="gpt2"), "its architecture is 'gpt2', .* supported: llama, qwen2, qwen3"),
    (dict(drop=["blk.1.attn_v.weight"]), "the tensor blk.1.attn_v.weight is missing"),
    (dict(drop=["token_embd.weight"]), "token_embd.weight is missing"),
    (dict(tensors={"blk.1.attn_v.weight": EXTRA}), r"blk.1.attn_v.weight is \[4, 64\], .* ask for \[32, 64\]"),
    (dict(tensors={"blk.0.ffn_gate_inp.weight": EXTRA}), "1 tensors that a llama decoder does not use"),
    (dict(tensors={"output_norm.weight": np.full(64, np.nan, np.float32)}), "output_norm.weight holds NaN"),
    (dict(metadata={"{arch}.expert_count": 8}), "llama.expert_count is 8, which may change"),
    (dict(metadata={"{arch}.rope.dimension_count": 8}), "rope.dimension_count is 8 and head_dim 16"),
    (dict(metadata={"{arch}.rope.scaling.type": "longrope"}), "longrope is not supported"),
    (dict(metadata={"split.count": 2}), "one of several parts"),
    (dict(endian=gguf.GGUFEndian.BIG), "it is big-endian"),
    (dict(pre="tekken"), "splits text as 'tekken'"), (dict(tokenizer="llama"), "of the kind 'llama'.*gpt2"),
    (dict(tokens=[*TOKENS, "more"]), "token 260, and the model a vocabulary of 260"),
])
def test_a_gguf_that_cannot_be_run(tmp_path, own_cache, changes, words):
    path = write_gguf(tmp_path / "tiny.gguf", tiny("llama"), **changes)
    with pytest.raises(ValueError, match=words):
        load_decoder(path)
    assert not own_cache.exists() or not list(own_cache.iterdir())          # nothing half is left


def test_a_gguf_that_is_cut_short_or_foreign(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tiny("llama"))
    data = path.read_bytes()
    for length in (0, 10, 2_000, len(data) // 2, len(data) - 5_000):
        (tmp_path / "cut.gguf").write_bytes(data[:length])
        with pytest.raises(ValueError, match="cut short|not a GGUF"):
            load_decoder(tmp_path / "cut.gguf")
    (tmp_path / "text.gguf").write_text("a text")
    with pytest.raises(ValueError, match="does not begin with GGUF"):
        load_decoder(tmp_path / "text.gguf")


def test_an_unknown_tokenizer_can_be_left_out(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tiny("llama"), pre="tekken")
    decoder = load_decoder(path, tokenizer=False)
    assert decoder.tokenizer is None
    with pytest.raises(ValueError, match="splits text as 'tekken'"):        # asked for later, although converted
        load_decoder(path)
