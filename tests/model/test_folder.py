"""Decoders out of Hugging Face folders: the same logits as transformers, and what is refused."""
import json
import os

import pytest
import torch
from tiny_models import same, tiny

from kvlab.model.load import load_decoder


@pytest.mark.parametrize("kind, changes", [
    ("llama", {}), ("mistral", dict(sliding_window=4)), ("qwen2", {}), ("qwen3", {}),
    ("qwen3", dict(use_sliding_window=True, sliding_window=4, max_window_layers=1)),
    ("llama", dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0,
                                        original_max_position_embeddings=32))),
])
def test_a_folder_computes_what_transformers_does(tmp_path, kind, changes):
    model = tiny(kind, **changes)
    model.save_pretrained(tmp_path / "own-model")
    decoder = load_decoder(tmp_path / "own-model")
    same(decoder, model)
    assert decoder.name == "own-model" and len(decoder.sha256) == 64 and decoder.tokenizer is None


def test_shards_and_halves(tmp_path):
    model = tiny("llama")
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    whole, shards = load_decoder(tmp_path / "whole"), load_decoder(tmp_path / "shards")
    assert all(torch.equal(shards.weights[name], weight) for name, weight in whole.weights.items())
    model.bfloat16().save_pretrained(tmp_path / "half")
    half = load_decoder(tmp_path / "half")
    assert all(torch.equal(half.weights[name], weight.bfloat16().float()) for name, weight in whole.weights.items())
    next((tmp_path / "shards").glob("*00002-of*")).unlink()
    with pytest.raises(ValueError, match="00002-of.*cannot be read"):
        load_decoder(tmp_path / "shards")


def edited(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("change, words", [
    (lambda f: (f / "config.json").unlink(), "has no config.json"),
    (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
    (lambda f: os.truncate(f / "model.safetensors", 9_000), "cut short"),
    (lambda f: edited(f, num_hidden_layers=3), "lacks 9 of 30 weights"),
    (lambda f: edited(f, num_hidden_layers=1), "has a tensor model.layers.1"),
    (lambda f: edited(f, intermediate_size=95), r"\[64, 96\], and config.json asks for \[64, 95\]"),
    (lambda f: edited(f, model_type="gemma3_text"), "supported: llama, mistral, qwen2, qwen3"),
    (lambda f: (f / "tokenizer.json").write_text("{}"), "not a tokenizer.json"),
])
def test_a_folder_that_cannot_be_run(tmp_path, change, words):
    tiny("llama").save_pretrained(tmp_path)
    change(tmp_path)
    with pytest.raises(ValueError, match=words):
        load_decoder(tmp_path)


def test_whole_numbers_are_no_weights(tmp_path):
    from safetensors.torch import load_file, save_file
    tiny("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: w.to(torch.int8) for name, w in weights.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="stored as I8; kvlab reads F32, BF16, F16"):
        load_decoder(tmp_path)
