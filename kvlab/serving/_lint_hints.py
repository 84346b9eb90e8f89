"""What somebody meant by a name that an engine does not have: another kind of name, or another engine's word for it.

A hint is a name that the release has, or there is none.
Source: the engines' own documentation of these names, as the tables in data/engine_names have them.
"""
from __future__ import annotations

import re
from collections.abc import Iterator

from kvlab.serving.names import Table

# One line per thing that engines name differently: the word of each that has one.
FLAGS = (
    {"vllm": "--gpu-memory-utilization", "sglang": "--mem-fraction-static", "tgi": "--cuda-memory-fraction"},
    {"vllm": "--max-num-seqs", "sglang": "--max-running-requests", "llama.cpp": "--parallel"},
    {"vllm": "--block-size", "sglang": "--page-size"},
    {"vllm": "--max-model-len", "sglang": "--context-length", "llama.cpp": "--ctx-size", "tgi": "--max-total-tokens"},
    {"vllm": "--model", "sglang": "--model-path", "llama.cpp": "--model", "tgi": "--model-id"},
    {"vllm": "--tensor-parallel-size", "sglang": "--tp-size", "tgi": "--num-shard"},
    {"vllm": "--kv-cache-dtype", "sglang": "--kv-cache-dtype", "tgi": "--kv-cache-dtype",
     "llama.cpp": "--cache-type-k"},
    {"vllm": "--max-num-batched-tokens", "sglang": "--chunked-prefill-size", "tgi": "--max-batch-prefill-tokens"},
    {"vllm": "--served-model-name", "sglang": "--served-model-name", "llama.cpp": "--alias"})
NICKNAMES = {"--n-slots": "--parallel", "--slots-count": "--parallel", "--n-parallel": "--parallel",       # flags
             "--context-size": "--ctx-size", "--max-context-length": "--max-model-len"}
KWARGS = {"temp": "temperature", "max_new_tokens": "max_tokens", "repeat_penalty": "repetition_penalty",
          "num_return_sequences": "n", "stop_sequences": "stop"}                            # of SamplingParams


def meant(table: Table, kind: str, name: str, version: str, scopes: tuple[str, ...]) -> str:
    """The name of the engine that is meant, or "" where nothing tells."""
    def has(kind: str, name: str, scopes: tuple[str, ...]) -> bool:
        return any(row.exists(version) and not row.replaced_by for row in table.find(kind, name, scopes))
    if kind == "env" and (match := re.match(r"(?:VLLM|SGLANG|SGL|LLAMA_ARG|LLAMA)_(\w+)", name)):
        flag = f"--{match[1].lower().replace('_', '-')}"
        return next((one for one in (flag, *_words(table.engine, flag)) if has("flag", one, ("serve",))), "")
    if kind == "flag":
        return next((one for one in _words(table.engine, name.replace("_", "-")) if has("flag", one, scopes)), "")
    if kind == "kwarg":
        words = [word[2:].replace("-", "_") for word in _words(table.engine, f"--{name.replace('_', '-')}")]
        words += [KWARGS[name]] if name in KWARGS and scopes == ("SamplingParams",) else []
        return next((one for one in words if has("kwarg", one, scopes)), "")
    return ""


def _words(engine: str, flag: str) -> Iterator[str]:
    """An engine's own words for a flag of another engine, or for a nickname."""
    if flag in NICKNAMES:
        yield NICKNAMES[flag]
    for words in FLAGS:
        if engine in words and flag in words.values() and words[engine] != flag:
            yield words[engine]
