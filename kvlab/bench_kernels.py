"""Benchmark gates on kvlab's own CPU kernel, against reading the same bytes and against torch's best.

fp32 (where no format is named), 32 query heads, head_dim 128, two threads on the wall clock, call by call in turn on
rotating cold inputs. torch's best is fused attention with the group folded into the query tokens, which is `sdpa`.
"""
from __future__ import annotations

from functools import partial

from kvlab.bench_models import NotRun
from kvlab.kv.cache import Layout

PAIRS = 24
THREADS = 2
CONTIGUOUS, RANDOM = Layout(), Layout(16, "random")
SWEEP = (2048, 4096, 8192, 16384)           # prompts of the memory exponent


def gates() -> list[tuple]:
    """(name, goal, measure) of every gate; all are ratios, exponents among them."""
    contiguous = partial(_calls, "paged")
    torchs = partial(_calls, "sdpa")
    return [
        ("read of as many bytes ÷ paged, MHA 4096", ">= 0.75",
         lambda: _in_turn(_read, contiguous, 32, 4096)),
        ("sdpa ÷ paged, MHA 4096", ">= 1.2", lambda: _in_turn(torchs, contiguous, 32, 4096)),
        ("sdpa ÷ paged, ratio 8, kv_len 8192", ">= 1", lambda: _in_turn(torchs, contiguous, 4, 8192)),
        ("paged, MQA 65536, one thread ÷ two", ">= 1.5",
         lambda: _in_turn(partial(contiguous, threads=1), contiguous, 1, 65536)),
        ("sdpa ÷ paged, bf16, 32/8 heads, kv_len 16384", ">= 2",
         lambda: _in_turn(partial(torchs, dtype="bf16"), partial(contiguous, dtype="bf16"), 8, 16384)),
        ("paged, block 16 in random order ÷ contiguous, 32/8 heads, 8192", "<= 1.3",
         lambda: _in_turn(partial(contiguous, layout=RANDOM), contiguous, 8, 8192)),
        ("paged int8/token ÷ sdpa fp32, 32/8 heads, 8192", "<= 0.5",
         lambda: _in_turn(partial(contiguous, layout=RANDOM, kv_format="int8/token"), torchs, 8, 8192)),
        ("paged fp8_e4m3/token ÷ sdpa fp32, 32/8 heads, 8192", "<= 0.6",
         lambda: _in_turn(partial(contiguous, layout=RANDOM, kv_format="fp8_e4m3/token"), torchs, 8, 8192)),
        ("exponent of extra memory over the prompt, naive", ">= 1.8", partial(_exponent, "naive")),
        ("exponent of extra memory over the prompt, flash", "<= 1.2", partial(_exponent, "flash")),
    ]


def _calls(variant: str, kv_heads: int, kv_len: int, copies: int, *, threads: int = THREADS,
           layout: Layout = CONTIGUOUS, kv_format: str | None = None, dtype: str = "fp32") -> tuple[int, list]:
    """(threads, one call per input copy)."""
    import os

    from kvlab.attention import Comparison, trial
    from kvlab.kernels import cpu_decode
    from kvlab.shapes import AttentionShape, Workload
    if (cores := os.cpu_count() or 1) < threads:
        raise NotRun(f"it needs {threads} cores, and there are {cores}")
    if variant == "paged" and (why := cpu_decode.why_not()):
        raise NotRun(why)
    one = trial(variant, Workload.decode(AttentionShape(32, kv_heads, 128), kv_len=kv_len), layout=layout,
                kv_format=kv_format, dtype=dtype, threads=threads)
    inputs = Comparison((one,)).inputs(copies)[one.kv_format, one.layout]
    return threads, one.prepare(inputs)


def _read(kv_heads: int, kv_len: int, copies: int) -> tuple[int, list]:
    """As many bytes as K and V of that shape hold, once, by torch's fastest reduction."""
    import torch
    pairs = [torch.randn(2, kv_heads, kv_len, 128) for _ in range(copies)]

    def took(work):
        return min(_seconds(partial(work, pairs[i % copies]), THREADS) for i in range(9))
    best = min((torch.sum, torch.linalg.vector_norm, torch.amax), key=took)
    return THREADS, [partial(best, pair) for pair in pairs]


def _seconds(call, threads: int) -> float:
    import time

    import torch
    torch.set_num_threads(threads)
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _in_turn(first, second, kv_heads: int, kv_len: int) -> tuple[float, float, float]:
    """Time of the first over time of the second, with its 95 % interval; each goes first every other time."""
    import torch

    from kvlab.probes._base import rotation
    from kvlab.probes._clock import paired_ratio
    from kvlab.record.environment import free_memory, last_level_cache
    nbytes = kv_heads * kv_len * 2 * 128                         # of the smallest format
    copies = rotation(nbytes, 4 * nbytes, last_level_cache()[0], free_memory() // 4)
    pairs, threads = [], torch.get_num_threads()
    with torch.no_grad():
        made = [make(kv_heads, kv_len, copies) for make in (first, second)]
        for n, calls in made:
            for call in calls[:2]:
                _seconds(call, n)
        for i in range(PAIRS):
            took = {}
            for which in ((0, 1) if i % 2 else (1, 0)):
                n, calls = made[which]
                took[which] = _seconds(calls[i % copies], n)
            pairs.append((took[0], took[1]))
    torch.set_num_threads(threads)
    return paired_ratio([a for a, _ in pairs], [b for _, b in pairs])


def _exponent(variant: str) -> tuple[float, float, float]:
    """Exponent of the memory a call takes beyond its inputs over prompts up to 16,384 tokens, two query heads."""
    from kvlab.attention import Comparison, trial
    from kvlab.probes import measure
    from kvlab.probes.kernel_error import KernelError
    from kvlab.probes.memory import Memory
    from kvlab.record.statistics import fit
    from kvlab.shapes import AttentionShape, Workload
    found = []
    for n in SWEEP:
        workload = Workload.prefill(AttentionShape(2, 1, 64), q_len=n)
        rows = measure(Comparison((trial(variant, workload),)), [KernelError(), Memory()])
        row = next(r for r in rows if r["metric"] == "peak_extra_bytes")
        if row["value"] is None:
            raise RuntimeError(row["error"] or row["note"])
        found.append(row)
    return fit(SWEEP, *([r[end] for r in found] for end in ("value", "low", "high")), power=True)
