"""How near to the machine's own limits do attention kernels come, and what do pages and small formats cost or save?

Decode is held against a read of as many bytes, prefill against a matrix product. Bears on the article's claims that
flash and paged attention optimise compute, that flash takes O(n) memory, and that an FP8 KV cache gives +8 % and an
INT8 one +5 % of speed. Six questions, a kind of case each: variants side by side, pages against one contiguous cache
by block size and order, KV formats over context (time saved beside bytes saved), flops and bytes of one prompt, memory
against the prompt's length, and the bytes of whole decode steps beside the article's two numbers.
"""
from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from kvlab.attention import Comparison, VariantRef, trial
from kvlab.catalog.models import model as catalogued
from kvlab.kv.cache import Layout
from kvlab.probes import measure
from kvlab.probes._base import Watch
from kvlab.probes.ceilings import Ceilings
from kvlab.probes.gpm import Gpm
from kvlab.probes.kernel_error import KernelError
from kvlab.probes.memory import Memory
from kvlab.probes.roofline import Roofline
from kvlab.probes.timer import Timer
from kvlab.shapes import AttentionShape, Workload
from kvlab.studies import _kernels_ratios, _kernels_steps
from kvlab.studies._kernels_findings import findings
from kvlab.studies._kernels_ratios import with_ratios
from kvlab.studies._kernels_steps import QUOTED, Steps
from kvlab.studies._run import Case

__all__ = ["METRICS", "SIZES", "cases", "findings", "paging_comparison", "run"]
SIZES = ("smoke", "small", "large")
METRICS = {**_kernels_ratios.METRICS, **_kernels_steps.METRICS}
MODEL = "Qwen/Qwen2-72B"                                     # the article's
GQA = AttentionShape(32, 8, 128)
CONTIGUOUS, TOKENS, RANDOM = Layout(), Layout(order="token"), Layout(block_size=16, page_order="random")
# what is timed side by side: (variant, layout), None = the variant's own
DECODE = {"cpu": (("naive", None), ("sdpa", None), ("sdpa_enable_gqa", None), ("c_decode", None),
                  ("paged", CONTIGUOUS), ("paged", RANDOM), ("paged_gather", RANDOM), ("triton_paged", RANDOM),
                  ("flash_attn", None), ("flashinfer", None)),
          "cuda": (("naive", None), ("sdpa", None), ("sdpa_flash", None), ("paged_gather", RANDOM),
                   ("triton_paged", CONTIGUOUS), ("triton_paged", RANDOM), ("flash_attn", None),
                   ("flashinfer", TOKENS), ("flashinfer", None))}
PREFILL = ("naive", "flash", "sdpa", "triton_flash", "flash_attn")
MEMORY = {"cpu": ("naive", "flash", "sdpa"), "cuda": ("naive", "flash", "sdpa", "triton_flash")}
OWN = {"cpu": "paged", "cuda": "triton_paged"}               # kvlab's kernel that reads pages where they lie
BESIDE = {"cpu": (("sdpa", None),), "cuda": (("sdpa", None), ("flash_attn", None), ("flashinfer", TOKENS))}
BLOCKS = (1, 16, 64, 128, 256)
FORMATS = {"cpu": ("fp32", "bf16", "int8/token", "fp8_e4m3/token", "int4/token/g32"),
           "cuda": ("bf16", "int8/token", "fp8_e4m3/token", "int4/token/g32")}
# trials that two questions share draw other inputs in each, so that every case has one answer
PAGING_SEED, FORMATS_SEED = 1, 2
CUDA_CAP_S = 1.5                                             # so that `large` ends within eight minutes


@dataclass(frozen=True)
class SideBySide(Comparison):
    """Variants of one shape: where a GPU's counters of bytes are worth their seconds."""


@dataclass(frozen=True)
class Prompt(Comparison):
    """A prompt of one head that is asked for memory, not for time."""


def cases(size: str, *, device: str = "cpu", variants: tuple[VariantRef, ...] | None = None,
          model: str | None = None) -> Iterator[Case]:
    """Variants side by side, pages, formats, memory of prompts, whole steps.

    variants: take the place of all of the study's, in their own layout where they stand side by side. model: of whole
    steps; the other cases keep their heads.
    """
    spec = catalogued(model or MODEL)                        # refuses an unknown name before anything is measured
    kind = "cuda" if device.startswith("cuda") else "cpu"
    common = dict(device=device, threads=1 if kind == "cuda" or size == "smoke" else os.cpu_count() or 1)
    own = None if variants is None else [(one, None) for one in variants]
    for workload, options in _side_by_side(size, kind):
        chosen = DECODE[kind] if workload.phase == "decode" else [(name, None) for name in PREFILL]
        yield _compared(SideBySide, workload, own or chosen, **{**common, **options})
    peers, batch = () if own else BESIDE[kind], 16 if kind == "cuda" and size != "smoke" else 1
    for variant in variants or (OWN[kind],):
        workload = Workload.decode(GQA, batch_size=batch, kv_len=512 if size == "smoke" else
                                   32768 if kind == "cuda" else 8192)
        yield paging_comparison(workload, variant, peers, size, **common)
        for kv_len in _contexts(size, kind):
            formats = FORMATS[kind][:2] if size == "smoke" else FORMATS[kind]
            chosen = [*((variant, RANDOM, name) for name in formats), *((*peer, None) for peer in peers)]
            yield _compared(Comparison, Workload.decode(GQA, batch_size=batch, kv_len=kv_len), chosen,
                            seed=FORMATS_SEED, **common)
    longest = 1024 if size == "smoke" else 16384             # of one head: scores and softmax take 2 GiB in fp32
    for n in (longest >> 3, longest >> 2, longest >> 1, longest):
        yield _compared(Prompt, Workload.prefill(AttentionShape(1, 1, 128), q_len=n),
                        own or [(name, None) for name in MEMORY[kind]], **common)
    yield from (Steps(spec.name, kv_format) for kv_format in QUOTED)


def _compared(kind, workload, chosen, **common) -> Comparison:
    """chosen: (variant, layout) or (variant, layout, kv_format); None is the trial's own choice."""
    return kind(tuple(trial(one, workload, layout=layout, kv_format=next(iter(kv_format), None), **common)
                      for one, layout, *kv_format in chosen))


def _side_by_side(size: str, kind: str) -> Iterator[tuple[Workload, dict]]:
    """Decode from MHA to MQA and, on a CPU, with K and V in bf16 and MQA on one thread too: does one KV head use all
    cores? Then a prompt."""
    def step(kv_heads, kv_len, batch_size=1):
        return Workload.decode(AttentionShape(32, kv_heads, 128), batch_size=batch_size, kv_len=kv_len)

    def prompt(heads, kv_heads, n):
        return Workload.prefill(AttentionShape(heads, kv_heads, 128), q_len=n)
    if size == "smoke":
        yield step(8, 512), {}
        yield prompt(8, 2, 256), {}
    elif kind == "cuda":
        yield step(8, 32768, 16), {}
        if size == "large":
            yield step(32, 8192, 16), {}
        yield prompt(32, 8, 8192), {}
    else:
        yield step(32, 4096), {}
        yield step(8, 8192), {}
        yield step(1, 65536), {}
        if (os.cpu_count() or 1) > 1:
            yield step(1, 65536), dict(threads=1)
        yield step(8, 16384), dict(dtype="bf16")
        yield prompt(8, 2, 2048 if size == "small" else 4096), {}


def paging_comparison(workload, variant, peers, size, **common) -> Comparison:
    """One variant over block sizes and page orders, token order at 16, the contiguous cache twice: an A/A pair."""
    sizes = (16,) if size == "smoke" else BLOCKS
    layouts = [CONTIGUOUS, *(Layout(n, order) for n in sizes for order in ("in_order", "random")),
               Layout(16, "random", "token")]
    first = _compared(Comparison, workload, [*((variant, layout) for layout in layouts), *peers], seed=PAGING_SEED,
                      **common)
    again = trial(variant, workload, layout=CONTIGUOUS, seed=PAGING_SEED, replica=1, **common)
    return Comparison((*first.trials, again))


def _contexts(size: str, kind: str) -> tuple[int, ...]:
    if size == "smoke":
        return (1024,)
    if kind == "cuda":
        return (4096, 32768) if size == "small" else (1024, 8192, 32768)
    return (1024, 4096, 16384) if size == "small" else tuple(1024 << n for n in range(6))


def run(case: Case, *, artifacts=None, watch: Watch | None = None) -> list[dict]:
    """Attention: correctness, ceilings, time, roofline, ratios; side by side on a GPU, counters of bytes too.

    A prompt of one head: its memory. Whole steps: arithmetic.
    """
    if isinstance(case, Steps):
        return case.rows()
    if isinstance(case, Prompt):
        return measure(case, (KernelError(), Memory()), artifacts=artifacts, watch=watch)
    counters = [Gpm()] if isinstance(case, SideBySide) and case.device.startswith("cuda") else []
    chosen = (KernelError(), Ceilings(), Timer(cap_s=_cap_s(case)), Roofline(), *counters)
    return with_ratios(measure(case, chosen, artifacts=artifacts, watch=watch))


def _cap_s(case: Comparison) -> float:
    """Seconds of samples that a trial may take."""
    if case.device.startswith("cuda"):
        return CUDA_CAP_S
    return 0.05 if max(case.workload.kv_lens) <= 1024 else 0.5
