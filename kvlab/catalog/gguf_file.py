"""A ModelSpec from a GGUF file: its metadata, read as a config, and its tensors' shapes and types. Nothing is loaded.

The library's reader takes every entry of the tokenizer's arrays apart, which is most of its time, and follows whatever
length a file states. `_Header` skips those arrays and refuses lengths beyond the file's end.
"""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from struct import Struct
from typing import Literal

from kvlab.catalog._facts import plain
from kvlab.catalog._files import opened
from kvlab.catalog.config import spec_of
from kvlab.shapes import ModelSpec

WHAT = "a GGUF file"
MAX_KEYS, MAX_TENSORS = 10_000, 20_000          # real files have some 60 keys and 1,200 tensors
# What may be read of one file: a byte of text counts 1, an entry of an array of text 16, a number that is kept 64. That
# is 3 M words, where the largest tokenizers have 0.3 M and as many merges, and keeps a lying file below a second.
READ_LIMIT = 48 * 2**20

# {architecture}.key of the file -> the config's name for it
_KEYS = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.value_length": "v_head_dim",
    "attention.key_length_swa": "swa_head_dim", "attention.value_length_swa": "swa_v_head_dim",
    "attention.sliding_window": "sliding_window", "attention.sliding_window_pattern": "sliding_window_pattern",
    "attention.shared_kv_layers": "num_kv_shared_layers", "attention.chunk_size": "attention_chunk_size",
    "attention.kv_lora_rank": "kv_lora_rank", "attention.indexer.key_length": "index_head_dim",
    "ssm.inner_size": "ssm_inner_size", "ssm.state_size": "ssm_state_size",
    "full_attention_interval": "full_attention_interval",
}
# Architectures that the two worlds spell differently.
_ARCHITECTURES = {"gemma3": "gemma3_text", "gpt-oss": "gpt_oss", "deepseek2": "deepseek_v3", "command-r": "cohere",
                  "qwen2vl": "qwen2_vl_text", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "llama4": "llama4_text",
                  "starcoder": "gpt_bigcode", "gptneox": "gpt_neox", "glm4moe": "glm4_moe", "falcon-h1": "falcon_h1"}


def read_gguf(path: Path) -> ModelSpec:
    """The model of a GGUF file, with its parameter count and the bytes of its weights as they are stored.

    Refuses what is cut short, foreign or states lengths that it does not have, and what spec_of refuses.
    Source: the file's metadata and tensor list, through the package gguf.
    """
    fields, params, nbytes = read_header(path)
    kind = fields.get("general.architecture")
    if not isinstance(kind, str) or fields.get("general.type", "model") != "model":
        raise ValueError(f"{path} holds no language model (general.architecture {kind!r:.40}, general.type "
                         f"{fields.get('general.type', 'missing')!r:.40}); give a model's GGUF file")
    if fields.get(f"{kind}.attention.causal") is False:
        raise ValueError(f"{path} holds an encoder (attention.causal is false), which keeps no KV cache; give a "
                         "decoder's GGUF file")
    spec = spec_of(_config(kind, fields), str(path))
    files = fields.get("split.count") or 1
    if not isinstance(files, int):
        raise ValueError(f"{path}: split.count is {files!r:.40}, and must be a whole number of files")
    if files > 1:
        return replace(spec, assumed=(*spec.assumed, f"parameters unknown: the file is one of {files}"))
    if not nbytes:
        return replace(spec, assumed=(*spec.assumed, "parameters and weights unknown: the file has no tensors"))
    return replace(spec, params=params, weight_bytes=nbytes, source=f"{path}, architecture {plain(kind)}")


def _config(kind: str, fields: dict) -> dict:
    """The metadata under a config's names. Numbers per layer stay lists."""
    own = {key.removeprefix(f"{kind}."): value for key, value in fields.items() if key.startswith(f"{kind}.")}
    config = {name: own[key] for key, name in _KEYS.items() if key in own}
    config["model_type"] = _ARCHITECTURES.get(kind, kind)
    unknown = {key.replace(".", "_"): value for key, value in own.items()
               if key not in _KEYS and key.startswith(("attention.", "ssm.", "wkv.", "kda.", "shortconv."))
               and not key.endswith(("epsilon", "eps", "group_norm_groups", "causal", "scale", "q_lora_rank", "_mla",
                                     "max_alibi_bias", "clamp_kqv", "temperature_length", "conv_kernel", "group_count",
                                     "time_step_rank", "dt_b_c_rms", "indexer.head_count", "indexer.top_k"))}
    if config.get("kv_lora_rank"):
        config["qk_rope_head_dim"] = own.get("rope.dimension_count")
        for key in ("head_dim", "v_head_dim", "num_key_value_heads"):       # of the latent, or of its expansion
            config.pop(key, None)
    elif isinstance(own.get("attention.head_count"), int):                  # what the format says of missing keys
        heads, width = own["attention.head_count"], own.get("embedding_length")
        config.setdefault("num_key_value_heads", heads)
        if heads and isinstance(width, int) and width % heads == 0:
            config.setdefault("head_dim", width // heads)
    if kind == "gemma3n" or kind == "gemma4":                               # the full layers' widths stand plain
        config |= {"global_head_dim": config.get("head_dim"), "attention_k_eq_v": None,
                   "num_global_key_value_heads": None}
    for name in ("num_attention_heads", "num_key_value_heads"):             # the format wants one where nothing attends
        if config.get(name) == 0:
            del config[name]
    return {**unknown, **config}


def read_header(path: Path) -> tuple[dict, int, int]:
    """(metadata without arrays of text, parameters, stored bytes)."""
    with opened(path, WHAT) as file:
        start = file.read(24)
    if start[:4] != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file (it does not begin with GGUF)")
    order: Literal["big", "little"] = "big" if start[4:6] == b"\0\0" else "little"
    version, tensors, keys = (int.from_bytes(start[at:to], order) for at, to in ((4, 8), (8, 16), (16, 24)))
    if len(start) < 24 or version not in (2, 3) or tensors > MAX_TENSORS or keys > MAX_KEYS:
        raise ValueError(f"{path} is cut short or not a GGUF file that kvlab can read (version {version}, {tensors:,} "
                         f"tensors, {keys:,} keys; it takes versions 2 and 3, {MAX_TENSORS:,} and {MAX_KEYS:,})")
    reader = header_class()
    try:
        header = reader(path)
        fields = {name: field.contents() for name, field in header.fields.items() if field.data}
    except Exception as error:              # of many types, all of which say that the file is not what it claims
        raise ValueError(f"{path} is cut short or damaged ({plain(str(error).strip(chr(39)) or type(error).__name__)})"
                         ) from error
    return fields, sum(int(t.n_elements) for t in header.tensors), sum(int(t.n_bytes) for t in header.tensors)


def header_class() -> type:
    """The reader of GGUF headers, a class made late since the package gguf may not be installed (ValueError)."""
    try:
        from gguf import GGUFEndian, GGUFReader, GGUFValueType
        from numpy import frombuffer
    except ImportError as error:
        raise ValueError("GGUF files are read by the package gguf, which is not installed; pip install 'kvlab[models]'"
                         ) from error

    class _Header(GGUFReader):
        """The library's reader without the entries of text arrays, and with every length checked."""

        left = READ_LIMIT

        def _spend(self, cost: int) -> None:
            self.left -= cost
            if self.left < 0:
                raise ValueError("it holds more text than any model's file")

        def _get_str(self, offset):
            found = super()._get_str(offset)
            self._spend(len(found[1]))
            return found

        def _get(self, offset, dtype, count=1, override_order=None):
            try:                                        # unlike slices of a memmap, quick, and never short
                found = frombuffer(self.data, dtype, int(count), int(offset))
            except (ValueError, OverflowError):
                raise ValueError("it ends before the values that it says it has") from None
            return found.view(found.dtype.newbyteorder(override_order or self.byte_order))

        def _get_field_parts(self, orig_offs, raw_type):
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            item, count = self._get(orig_offs, "uint32"), self._get(orig_offs + 4, "uint64")
            kind, offset, parts = GGUFValueType(item[0]), orig_offs + 12, [item, count]
            if kind == GGUFValueType.ARRAY:
                raise ValueError("it has arrays of arrays")
            if kind in self.gguf_scalar_to_np:
                values = self._get(offset, self.gguf_scalar_to_np[kind], count[0])
                short = len(values) <= 10_000                               # a number per layer, not per token
                self._spend(64 * len(values) if short else 0)
                parts += list(values[:, None]) if short else []
                return 12 + values.nbytes, parts, list(range(2, len(parts))), [GGUFValueType.ARRAY, kind]
            view = memoryview(self.data.data)
            length_at = Struct(">Q" if self.endianess == GGUFEndian.BIG else "<Q").unpack_from
            if count[0] <= (len(view) - offset) // 8:
                self._spend(16 * int(count[0]))
                for _ in range(int(count[0])):
                    if offset + 8 > len(view):
                        break
                    offset += 8 + length_at(view, offset)[0]
                else:
                    if offset <= len(view):
                        return offset - orig_offs, parts, [], [GGUFValueType.ARRAY, kind]
            raise ValueError("it ends before the values that it says it has")

    return _Header
