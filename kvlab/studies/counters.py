"""Do the sources agree? Bytes to and from memory, and how busy a GPU is, from every source at once, case by case.

Bears on the article's claims that attention over the KV cache is bound by memory traffic and that compute utilisation
falls below 10 %: nobody's bytes are believed before another source, or arithmetic nobody disputes, gives the same.
Operations of known traffic, decode with MHA, GQA and MQA, prefill with and without the score matrix, repeated heads:
each is held against the variant's own formula, behind the cache of the source that counted.

On a CPU the cache is simulated, and its size is a choice, so it is swept. kvlab's C kernels, one shape each, stand
behind every power of two from 64 KiB to 4 MiB. A formula steps where a working set equals the cache, and a cache slides
there. So the shapes were chosen such that no working set lies within 1.2 × of a swept size. (c_naive: 94 KiB for one
head's K and a row of scores, 666 KiB with the score matrix, 754 KiB with V. c_flash: 167 to 208 KiB for K, V and two
tiles of queries.) Two more shapes of c_naive are within 1.05 × of 512 KiB on purpose, to show the slide. torch's
comparisons stand behind 256 KiB, 1 MiB and 4 MiB: its tiles and masks are not all in the formulas. Findings name each
case that is off, and whether a step is near.
"""
from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import ClassVar

from kvlab.attention import Comparison, VariantRef, trial
from kvlab.attention._base import digest
from kvlab.attention.c_flash import CFlash
from kvlab.probes import measure
from kvlab.probes._base import Probe, Watch, hardware
from kvlab.probes._known import Operation
from kvlab.probes.callgrind import Callgrind
from kvlab.probes.ceilings import Ceilings
from kvlab.probes.gpm import Gpm
from kvlab.probes.kernel_error import KernelError
from kvlab.probes.ncu import Ncu
from kvlab.probes.nvml import Nvml
from kvlab.probes.perf import Perf
from kvlab.probes.roofline import Roofline
from kvlab.probes.timer import Timer
from kvlab.record.reading import Reading, failed, missing
from kvlab.shapes import AttentionShape, Workload
from kvlab.studies._counters_findings import findings
from kvlab.studies._run import Case
from kvlab.units import KiB, MiB

__all__ = ["SIZES", "cases", "findings", "run"]
SIZES = ("smoke", "small", "large")
RATIOS = (1, 4, 8)
SWEPT = tuple(2**n * KiB for n in range(6, 13))                      # simulated caches: 64 KiB to 4 MiB
NEAR, NEAR_SWEPT = (76, 80), tuple(n * KiB for n in (256, 512, 1024))    # q_len: K and scores take 506 and 528 KiB
# what gives bytes; each runs or says why not
COUNTERS = (Gpm(), Ncu(), Callgrind(cache_bytes=1 * MiB), Perf())
GPU_DECODE = ("naive", "naive_repeat", "sdpa", "paged_gather", "triton_paged", "flash_attn")
GPU_PREFILL = ("naive", "sdpa", "triton_flash", "flash_attn")


@dataclass(frozen=True)
class Behind:
    """The bytes of a comparison behind a simulated cache of one size, and nothing else of it."""
    timed: ClassVar[bool] = False
    comparison: Comparison
    cache_bytes: int

    @cached_property
    def comparison_id(self) -> str:
        return digest(asdict(self))

    def columns(self) -> dict:
        return {**self.comparison.columns(), "case": json.dumps(asdict(self), sort_keys=True)}

    def rows(self, watch: Watch) -> Iterator[dict]:
        """Rows of the comparison under this case's own ids: the same trial has others behind another cache."""
        probes = [KernelError(), Callgrind(self.cache_bytes)]
        for row in measure(self.comparison, probes, watch=watch):
            yield {**row, "comparison_id": self.comparison_id, "case_id": digest([row["case_id"], self.cache_bytes])}


def cases(size: str, *, device: str = "cpu", variants: tuple[VariantRef, ...] | None = None,
          model: str | None = None) -> Iterator[Case]:
    """Operations, decode over group ratios, prefill. A GPU: torch's variants. A CPU: kvlab's C kernels, then torch's.

    Decode reads at least twice the cache (a GPU's L2; the simulated one of 1 MiB), or reuse inside it would decide.
    """
    if model is not None:
        raise ValueError("counters asks about sources, not about models: leave --model out")
    yield from _on_gpu(size, device, variants) if device.startswith("cuda") else _on_cpu(size, device, variants)


def _compared(workload, names, device, variants=None) -> Comparison:
    return Comparison(tuple(trial(one, workload, device=device) for one in variants or names))


def _on_gpu(size, device, variants) -> Iterator[Case]:
    yield from (Operation(name, nbytes, "bf16", device) for name, nbytes in
                (("copy", 1024 * MiB), ("read", 1024 * MiB), ("matmul", 256 * MiB)))
    batch = 8 if size == "large" else 4                  # few sequences: torch's naive has kernels for each of them
    for ratio in ((1, 8) if size == "smoke" else (*RATIOS, 32)):
        workload = Workload.decode(AttentionShape(32, 32 // ratio, 128), batch_size=batch, kv_len=65536)
        yield _compared(workload, GPU_DECODE, device, variants)
    # many sequences: what they write is so much that what L2 still holds of it at the end does not decide
    prompt = Workload.prefill(AttentionShape(16, 4, 128), batch_size=32, q_len=4096)
    yield _compared(prompt, GPU_PREFILL, device, variants)


def _on_cpu(size, device, variants) -> Iterator[Case]:
    """C kernels in seconds; torch under a simulator and the sweep take minutes, so `smoke` leaves them out."""
    ratios = (1, 2, 4, 8) if size == "large" else RATIOS
    for ratio in ((1, 8) if size == "smoke" else ratios):
        yield _compared(_decode(ratio), ("c_decode",), device, variants)
    if variants is not None:
        return
    for ratio in ((4,) if size == "smoke" else ratios):
        workload = Workload.prefill(AttentionShape(ratio, 1, 32), q_len=32, kv_len=6144)
        yield _compared(workload, ("c_naive", "c_flash"), device)
    if size == "smoke":
        return
    for ratio in ratios:
        swept = Workload.prefill(AttentionShape(ratio, 1, 16), q_len=104, kv_len=1408)
        for case in (_compared(_decode(ratio), ("c_decode",), device),
                     _compared(swept, ("c_naive", VariantRef.of(CFlash(q_tile=16))), device)):
            yield from (Behind(case, cache_bytes) for cache_bytes in SWEPT)
    yield from (Operation(name, nbytes) for name, nbytes in
                (("copy", 8 * MiB), ("read", 8 * MiB), ("matmul", 256 * KiB)))    # three matrices that fit
    for q_len in NEAR:
        near = _compared(Workload.prefill(AttentionShape(4, 1, 16), q_len=q_len, kv_len=1408), ("c_naive",), device)
        yield from (Behind(near, cache_bytes) for cache_bytes in NEAR_SWEPT)
    step = Workload.decode(AttentionShape(8, 1, 64), kv_len=16384)
    prompt = Workload.prefill(AttentionShape(4, 1, 64), q_len=32, kv_len=4096)
    for case in (_compared(step, ("naive", "naive_repeat", "sdpa", "paged", "paged_gather"), device),
                 _compared(prompt, ("naive", "sdpa"), device)):
        yield case                                                   # behind 1 MiB, as COUNTERS say
        yield from (Behind(case, cache_bytes) for cache_bytes in (256 * KiB, 4 * MiB))
    longer = _compared(Workload.prefill(AttentionShape(4, 1, 32), q_len=64, kv_len=2048), ("naive", "sdpa"), device)
    yield Behind(longer, 1 * MiB)


def _decode(ratio: int) -> Workload:
    """A decode step in C: 16 MiB of K and V over the group ratio."""
    return Workload.decode(AttentionShape(8, 8 // ratio, 64), kv_len=4096)


def run(case: Case, *, artifacts=None, watch: Watch | None = None) -> list[dict]:
    """Attention: correctness, ceilings, time, roofline and every counter. An operation: every counter of bytes.

    Behind one simulated cache: that simulation alone.
    """
    watch = watch or Watch()
    if isinstance(case, Operation):
        return list(_counted(case, watch))
    if isinstance(case, Behind):
        return list(case.rows(watch))
    chosen: list[Probe] = [KernelError(), Ceilings(), Timer(cap_s=None if case.device.startswith("cuda") else 0.3),
                           Roofline(), Nvml(), *COUNTERS]
    return measure(case, chosen, artifacts=artifacts, watch=watch)


def _counted(op: Operation, watch: Watch) -> Iterator[dict]:
    """Rows of an operation: what it must move, then each counter's readings or the reason for none."""
    def row(reading):
        return {"comparison_id": op.comparison_id, "case_id": op.case_id, **op.columns(), **asdict(reading),
                "hardware": reading.hardware or hardware(op.device)}
    cost = op.cost()
    yield row(Reading("ideal_bytes", cost.read_bytes + cost.write_bytes, "B", "modelled", source="operation",
                      method=f"formula:operands of a {op.name}, once"))
    for probe in COUNTERS:
        watch.at("", probe.name)
        try:
            why = probe.why_not(op)
            found = [missing(metric, unit, why, source=probe.name) for metric, unit in probe.metrics.items()
                     ] if why else list(probe.operation(op))
        except Exception as error:                           # the counter's own; the other counters go on
            broke = f"the probe {probe.name} broke: {type(error).__name__}: {error}"
            found = [failed(metric, unit, broke, source=probe.name) for metric, unit in probe.metrics.items()]
        yield from map(row, found)
