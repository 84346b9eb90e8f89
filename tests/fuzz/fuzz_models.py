"""Readers of models' files as targets: config.json, safetensors and their index, GGUF headers."""
from __future__ import annotations

import contextlib
import json
import struct
import zlib
from pathlib import Path
from random import Random

from fuzz_targets import Target, shown


def _config(path: Path) -> None:
    from kvlab.catalog.resolve import model
    from kvlab.kv.sizing import size
    from kvlab.show import print_size
    spec = model(str(path))
    shown(spec, print_size, spec, size(spec, 4096, 2))


def _decoder(path: Path) -> None:
    from kvlab.catalog._files import read_json
    from kvlab.model.config import DecoderConfig
    DecoderConfig.from_config(read_json(path), str(path))


def _configs() -> list[bytes]:
    from catalog.test_config import KINDS
    return [json.dumps(config).encode() for _, config in KINDS.values()]


def _decoders() -> list[bytes]:
    base = dict(architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=100, hidden_size=64,
                intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                max_position_embeddings=2048, rms_norm_eps=1e-5, hidden_act="silu", tie_word_embeddings=True,
                attention_bias=False, rope_theta=10000.0)
    return [json.dumps({**base, **more}).encode() for more in (
        {}, dict(model_type="qwen2", use_sliding_window=False, sliding_window=4096, max_window_layers=2),
        dict(model_type="mistral", sliding_window=512), dict(model_type="qwen3", layer_types=["full_attention"] * 2),
        dict(rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                               original_max_position_embeddings=8192)),
        dict(rope_parameters=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=512, beta_fast=32,
                                  beta_slow=1, rope_theta=1e6)))]


def _safetensors(path: Path) -> None:
    from kvlab.catalog.safetensors_file import read_weights
    read_weights(path)


def _headers() -> list[bytes]:
    def tensor(dtype, shape, begin, end):
        return dict(dtype=dtype, shape=shape, data_offsets=[begin, end])
    return [json.dumps(one).encode() for one in (
        {"a": tensor("F16", [3, 5], 0, 30), "b.weight": tensor("F32", [7], 30, 58), "__metadata__": {"format": "pt"}},
        {"q": tensor("U8", [16], 0, 16), "s": tensor("F8_E4M3", [4, 4], 16, 32), "x": tensor("BF16", [16], 32, 64)},
        {})]


def _with_length(chance: Random, body: bytes) -> bytes:
    length = len(body) if chance.random() < 0.9 else chance.choice((0, 1, 2**31, 2**63, len(body) + 1, 2 * len(body)))
    return struct.pack("<Q", length) + body + bytes(chance.choice((64, 64, 58, 0)))


def _shards(path: Path) -> None:
    from kvlab.catalog.safetensors_file import read_weights, stated_bytes
    for number in (1, 2):
        shard = path.with_name(f"model-0000{number}-of-00002.safetensors")
        if not shard.exists():
            shard.write_bytes(struct.pack("<Q", len(header := _headers()[1])) + header + bytes(64))
    stated_bytes(path.parent)
    read_weights(path)


def _indices() -> list[bytes]:
    return [json.dumps(dict(metadata=dict(total_size=123456), weight_map={
        f"model.layers.{n}.weight": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)})).encode()]


def _gguf(path: Path) -> None:
    from kvlab.catalog.gguf_file import read_gguf
    from kvlab.kv.sizing import size
    size(read_gguf(path), 4096)


_TYPES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def _ggufs() -> list[bytes]:
    def keys(kind, **more):
        base = dict(block_count=4, context_length=2048, embedding_length=128, attention__head_count=8)
        base |= dict(attention__head_count_kv=2) | more
        return [["general.architecture", 8, kind],
                *([f"{kind}.{name.replace('__', '.')}", 4 if type(value) is int else 9, value]
                  for name, value in base.items()),
                ["tokenizer.ggml.tokens", 9, ["<s>", "a", "b"]], ["tokenizer.ggml.scores", 9, [0.5, 1.5]]]
    tensors = [["token_embd.weight", [4, 32], 1, 0], ["output_norm.weight", [5], 0, 256]]
    return [json.dumps(one).encode() for one in (
        {"keys": keys("llama"), "tensors": tensors},
        {"keys": keys("gemma3", attention__sliding_window=512), "tensors": []},
        {"keys": keys("deepseek2", attention__kv_lora_rank=64, rope__dimension_count=16), "tensors": tensors},
        {"keys": keys("falcon-h1", attention__head_count_kv=[2, 2, 0, 0], ssm__inner_size=64, ssm__state_size=16,
                      attention__sliding_window_pattern=[True, False, True, False]), "tensors": tensors},
        {"keys": [*keys("llama"), ["split.count", 2, 3], ["general.type", 8, "model"]], "tensors": tensors})]


def _as_gguf(chance: Random, body: bytes) -> bytes:
    """The file of what JSON describes, as far as it can be; counts are those of what is there, or lie."""
    try:
        data = json.loads(body)
        keys, tensors = list(data["keys"]), list(data["tensors"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return b"GGUF" + struct.pack("<IQQ", 3, 1, 3) + body
    out, order = bytearray(), "<" if chance.random() < 0.95 else ">"
    lying = chance.random() < 0.1

    def text(word) -> bytes:
        raw = (word if isinstance(word, str) else repr(word)).encode("utf-8", "replace")
        length = len(raw) if not lying or chance.random() < 0.9 else 2**chance.randrange(64)
        return struct.pack(order + "Q", length) + raw

    def scalar(kind, value) -> bytes:
        for form in (_TYPES.get(kind, "I"), "Q"):
            with contextlib.suppress(struct.error, OverflowError, TypeError, ValueError):
                return struct.pack(order + form, value if form != "f" else float(value))
        return struct.pack(order + "I", zlib.crc32(repr(value).encode("utf-8", "replace")))
    for one in keys:
        name, kind, content = one if isinstance(one, list) and len(one) == 3 else (one, 4, 0)
        kind = kind % 14 if type(kind) is int else 8
        out += text(name) + struct.pack(order + "I", kind)
        if kind == 8:
            out += text(content)
        elif kind == 9:
            items = content if isinstance(content, list) else [content]
            item = 8 if items and isinstance(items[0], str) else 6 if items and isinstance(items[0], float) else (
                7 if items and isinstance(items[0], bool) else chance.choice((4, 4, 4, 5, 10, 9, 13)))
            count = len(items) if not lying else chance.choice((0, len(items) + 1, 2**40, 2**63))
            out += struct.pack(order + "IQ", item, count)
            out += b"".join(text(entry) if item == 8 else scalar(item, entry) for entry in items)
        else:
            out += scalar(kind, content)
    for one in tensors:
        name, dims, kind, offset = one if isinstance(one, list) and len(one) == 4 else (one, [1], 0, 0)
        dims = dims if isinstance(dims, list) else [dims]
        out += text(name) + struct.pack(order + "I", len(dims)) + b"".join(scalar(10, n) for n in dims)
        out += scalar(4, kind) + scalar(10, offset)
    counts = len(tensors), len(keys)
    if lying and chance.random() < 0.3:
        counts = chance.choice((0, 1, 2**40)), 10_000
    head = b"GGUF" + struct.pack(order + "IQQ", chance.choice((3, 3, 3, 2, 1)), *counts) + bytes(out)
    return head + bytes(-len(head) % 32) + bytes(chance.choice((512, 512, 0)))


MODEL_TARGETS = (
    Target("config", "config.json", _config, _configs), Target("decoder", "config.json", _decoder, _decoders),
    Target("gguf", "a.gguf", _gguf, _ggufs, _as_gguf),
    Target("safetensors", "a.safetensors", _safetensors, _headers, _with_length),
    Target("shards", "model.safetensors.index.json", _shards, _indices))
