"""A decoder's config, weights and vocabulary out of a GGUF file, checked; weights in fp32, some rows at a time.

Shapes: a tensor is [rows, columns] as in Hugging Face's checkpoints; GGUF lists the dimensions the other way round.
"""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from struct import unpack_from

import numpy as np
import torch

from kvlab.catalog import gguf_file
from kvlab.catalog._facts import plain, shown
from kvlab.model import rope
from kvlab.model.config import DecoderConfig, RopeScaling

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
AT_A_TIME = 2**22               # elements dequantised at once: the library takes some five times their bytes
_NEEDED = {"block_count": "num_hidden_layers", "embedding_length": "hidden_size",
           "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
           "context_length": "max_position_embeddings", "attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_READ = {*_NEEDED, "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.causal",
         "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
         "rope.scaling.original_context_length", "rope.scaling.finetuned"}
_CHANGES = ("attention.", "rope.", "expert_", "logit", "residual_scale", "embedding_scale", "pooling")
_PARTS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
          "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
          "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
          "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
_TOPS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer's part of a GGUF file. kinds: per token 1 normal, 3 control, 4 user-defined, 6 byte."""
    model: str
    pre: str
    tokens: list[str]
    merges: list[str]
    kinds: list[int]


class GgufModel:
    """A GGUF file of one of ARCHITECTURES, opened: nothing is dequantised yet.

    hf_config: what its config.json would say; config: the same as the decoder's. ValueError where the file is cut
    short, foreign, of another architecture, or lacks a tensor or has one of another shape.
    """

    def __init__(self, path: Path):
        self.path = path
        self._fields, _, _ = gguf_file.read_header(path)
        self._header = gguf_file.header_class()(path)
        self._tensors = {tensor.name: tensor for tensor in self._header.tensors}
        kind = self._fields.get("general.architecture")
        if not isinstance(kind, str) or kind not in ARCHITECTURES:
            raise self._wrong(f"its architecture is {shown(kind)}, which kvlab's decoder cannot run; supported: "
                              f"{', '.join(ARCHITECTURES)}")
        if self._header.endianess.name != "LITTLE" or (self._fields.get("split.count") or 1) != 1:
            raise self._wrong("it is big-endian, or one of several parts; give one whole little-endian file")
        self.kind = kind
        self.hf_config = self._hf_config()
        self.config = DecoderConfig.from_config(self.hf_config, str(path))
        if "rope_freqs.weight" in self._tensors:
            self._scaled_as_llama3()
        self._check_tensors()

    @property
    def quantisation(self) -> str:
        """How many tensors are stored in which type, as in "Q4_1 210, F32 61, Q8_0 1"."""
        types = Counter(tensor.tensor_type.name for tensor in self._tensors.values())
        return ", ".join(f"{name} {count}" for name, count in types.most_common())

    def rows(self, name: str) -> Iterator[np.ndarray]:
        """A weight's rows under its Hugging Face name in fp32, in order, AT_A_TIME elements at most (or one row).

        Llama's Q and K rows are put back into Hugging Face's order. NaN and infinity are refused.
        """
        from gguf.quants import dequantize
        tensor = self._tensors[_gguf_name(name)]
        data = tensor.data if tensor.data.ndim == 2 else tensor.data[None]
        order = self._order(name, len(tensor.data))
        step = max(1, AT_A_TIME // int(tensor.shape[0]))
        for start in range(0, len(data), step):
            part = data[start:start + step]
            if order is not None:
                part = data[order[start:start + step]] if tensor.data.ndim == 2 else data[:, order]
            try:
                with np.errstate(invalid="ignore", over="ignore"):      # what comes of it is refused below
                    values = dequantize(part, tensor.tensor_type)
            except NotImplementedError:
                raise self._wrong(f"{tensor.name} is stored as {tensor.tensor_type.name}, which the installed package "
                                  "gguf cannot dequantise; a newer one may (pip install -U gguf)") from None
            if not np.isfinite(values).all():
                raise self._wrong(f"{tensor.name} holds NaN or infinity; the file is damaged")
            yield np.ascontiguousarray(values, np.float32).reshape(-1)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer's arrays. ValueError where they are missing or do not fit each other."""
        tokens, merges = self._texts("tokenizer.ggml.tokens"), self._texts("tokenizer.ggml.merges")
        kinds = self._whole_numbers("tokenizer.ggml.token_type", len(tokens))
        model, pre = (self._fields.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
        return Vocabulary(model if isinstance(model, str) else "", pre if isinstance(pre, str) else "", tokens, merges,
                          kinds)

    def _wrong(self, text: str) -> ValueError:
        return ValueError(f"{self.path}: {text}")

    def _own(self, key: str) -> object | None:
        return self._fields.get(f"{self.kind}.{key}")

    def _hf_config(self) -> dict:
        for key in _NEEDED:
            if self._own(key) is None:
                raise self._wrong(f"{self.kind}.{key} is missing, without which the decoder cannot be built")
        for name, value in self._fields.items():
            key = name.removeprefix(f"{self.kind}.")
            if key != name and key not in _READ and key.startswith(_CHANGES) and value not in (0, False, None, ""):
                raise self._wrong(f"{plain(name)} is {shown(value)}, which may change what the model computes and "
                                  "which kvlab's decoder does not know")
        config = {name: self._own(key) for key, name in _NEEDED.items()}
        heads, width = config["num_attention_heads"], config["hidden_size"]
        head_dim = self._own("attention.key_length")
        if head_dim is None and isinstance(heads, int) and isinstance(width, int) and heads > 0:
            head_dim = width // heads
        for key in ("rope.dimension_count", "attention.value_length"):
            if self._own(key) not in (None, head_dim):
                raise self._wrong(f"{self.kind}.{key} is {shown(self._own(key))} and head_dim {shown(head_dim)}; "
                                  "kvlab's decoder rotates the whole head, and V is as wide as K")
        kv_heads = self._own("attention.head_count_kv")
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise self._wrong("the tensor token_embd.weight is missing; the file is incomplete")
        return {"architectures": [ARCHITECTURES[self.kind]], "model_type": self.kind, **config, "head_dim": head_dim,
                "num_key_value_heads": heads if kv_heads is None else kv_heads, "hidden_act": "silu",
                "vocab_size": int(embedding.shape[1]), "rope_parameters": self._rope(),
                "attention_bias": "blk.0.attn_q.bias" in self._tensors, "use_sliding_window": False,
                "tie_word_embeddings": "output.weight" not in self._tensors, "dtype": "float32",
                "bos_token_id": self._fields.get("tokenizer.ggml.bos_token_id"),
                "eos_token_id": self._fields.get("tokenizer.ggml.eos_token_id")}

    def _rope(self) -> dict:
        theta = self._own("rope.freq_base")
        found = {"rope_theta": 10_000.0 if theta is None else theta, "rope_type": "default"}
        kind = self._own("rope.scaling.type") or "none"
        if kind == "none":
            return found
        found |= {"rope_type": kind, "factor": self._own("rope.scaling.factor")}
        original = self._own("rope.scaling.original_context_length")
        return found if original is None else {**found, "original_max_position_embeddings": original}

    def _scaled_as_llama3(self) -> None:
        """GGUF has Llama 3.1's scaling as divisors per pair of channels: found again, or refused.

        Source: the constants of Meta's public configurations: 1 and 4 turns within 8,192 tokens.
        """
        divisors = self._tensors["rope_freqs.weight"].data
        scaling = RopeScaling(kind="llama3", factor=float(divisors.max()), original_context=8192)
        base, scaled = (rope.frequencies(replace(self.config, rope_scaling=s)) for s in (None, scaling))
        if len(divisors) != len(base) or self.config.rope_scaling or not np.allclose((base / scaled).numpy(), divisors,
                                                                                      rtol=1e-4):
            raise self._wrong("rope_freqs.weight is not the RoPE scaling of Llama 3.1, and kvlab knows no other there")
        self.config = replace(self.config, rope_scaling=scaling)
        self.hf_config["rope_parameters"] |= {"rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": 1.0,
                                              "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

    def _check_tensors(self) -> None:
        left = self._tensors.keys() - {"rope_freqs.weight"}
        for name, shape in self.config.tensor_shapes().items():
            tensor = self._tensors.get(_gguf_name(name))
            if tensor is None:
                raise self._wrong(f"the tensor {_gguf_name(name)} is missing; the file is incomplete")
            found = tuple(int(n) for n in reversed(tensor.shape))
            if found != shape:
                raise self._wrong(f"the tensor {tensor.name} is {list(found)}, and its metadata ask for {list(shape)}")
            left -= {tensor.name}
        if left:
            raise self._wrong(f"it has {len(left)} tensors that a {self.kind} decoder does not use "
                              f"({plain(min(left))}); it is another architecture")

    def _order(self, name: str, rows: int) -> np.ndarray | None:
        """For llama, where each of Hugging Face's rows of Q and K lies: a head's two halves are interleaved there."""
        part = re.search(r"\.([qk])_proj\.", name) if self.kind == "llama" else None
        if part is None:
            return None
        heads = self.config.num_q_heads if part[1] == "q" else self.config.num_kv_heads
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)

    def _array(self, key: str, item: str) -> tuple[int, int]:
        """(offset of the first entry, number of entries) of an array whose entries the catalogue's reader skips."""
        field = self._header.fields.get(key)
        if field is None or [kind.name for kind in field.types] != ["ARRAY", item]:
            raise self._wrong(f"{key} is missing or not an array of {item}; the file has no tokenizer that kvlab reads")
        return field.offset + 8 + int(field.parts[0][0]) + 4 + 12, int(field.parts[4][0])

    def _texts(self, key: str) -> list[str]:
        at, count = self._array(key, "STRING")
        view, found = memoryview(self._header.data), []
        for _ in range(count):
            length, = unpack_from("<Q", view, at)
            found.append(bytes(view[at + 8:at + 8 + length]))
            at += 8 + length
        try:
            return [text.decode() for text in found]
        except UnicodeDecodeError:
            raise self._wrong(f"{key} holds text that is not UTF-8") from None

    def _whole_numbers(self, key: str, count: int) -> list[int]:
        at, found = self._array(key, "INT32")
        if found != count:
            raise self._wrong(f"{key} has {found:,} entries for {count:,} tokens")
        return np.frombuffer(self._header.data, "<i4", count, at).tolist()


def filled(shape: tuple[int, ...], parts: Iterator[np.ndarray]) -> torch.Tensor:
    """A weight put together from its parts, in memory."""
    whole, at = np.empty(int(np.prod(shape)), np.float32), 0
    for part in parts:
        whole[at:at + len(part)] = part
        at += len(part)
    return torch.from_numpy(whole).view(shape)


def _gguf_name(name: str) -> str:
    """model.layers.3.self_attn.q_proj.weight -> blk.3.attn_q.weight"""
    inside = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if inside:
        return f"blk.{inside[1]}.{_PARTS[inside[2]]}.{inside[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_TOPS[stem]}.{kind}"
