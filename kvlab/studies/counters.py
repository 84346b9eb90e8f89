"""Do the sources agree? Bytes to and from memory, and how busy a GPU is, from every source at once, case by case.

Bears on the article's claims that attention over the KV cache is bound by memory traffic and that compute utilisation
falls below 10 %: nobody's bytes are believed before another source, or arithmetic nobody disputes, gives the same.
Operations of known traffic, decode with MHA, GQA and MQA, prefill with and without the score matrix, repeated heads:
each is held against the variant's own formula, behind the cache of the source that counted.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from kvlab.attention import Comparison, VariantRef, trial
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
# what gives bytes; each runs or says why not. The simulated cache is small, so that seconds of simulation exceed it
COUNTERS = (Gpm(), Ncu(), Callgrind(cache_bytes=128 * KiB), Perf())
GPU_DECODE = ("naive", "naive_repeat", "sdpa", "paged", "flash_attn")
GPU_PREFILL = ("naive", "sdpa", "flash_attn")


def cases(size: str, *, device: str = "cpu", variants: tuple[VariantRef, ...] | None = None,
          model: str | None = None) -> Iterator[Case]:
    """Operations, decode over group ratios, prefill. A GPU: torch's variants. A CPU: kvlab's C kernels, then torch's.

    Decode reads at least twice the cache (a GPU's L2; the simulated one of 128 KiB), or reuse inside it would decide.
    """
    if model is not None:
        raise ValueError("counters asks about sources, not about models: leave --model out")
    yield from _on_gpu(size, device, variants) if device.startswith("cuda") else _on_cpu(size, device, variants)


def _compared(workload, names, device, variants=None) -> Comparison:
    return Comparison(tuple(trial(one, workload, device=device) for one in variants or names))


def _on_gpu(size, device, variants) -> Iterator[Case]:
    yield from (Operation(name, nbytes, "bf16", device) for name, nbytes in
                (("copy", 1024 * MiB), ("read", 1024 * MiB), ("matmul", 128 * MiB)))
    batch = 64 if size == "large" else 32
    for ratio in ((1, 8) if size == "smoke" else (*RATIOS, 32)):
        workload = Workload.decode(AttentionShape(32, 32 // ratio, 128), batch_size=batch, kv_len=8192)
        yield _compared(workload, GPU_DECODE, device, variants)
    prompt = Workload.prefill(AttentionShape(16, 4, 128), batch_size=8, q_len=4096)
    yield _compared(prompt, GPU_PREFILL, device, variants)


def _on_cpu(size, device, variants) -> Iterator[Case]:
    """C kernels in seconds; torch under a simulator takes minutes, so `smoke` leaves it out."""
    ratios = (1, 2, 4, 8) if size == "large" else RATIOS
    for ratio in ((1, 8) if size == "smoke" else ratios):
        workload = Workload.decode(AttentionShape(8, 8 // ratio, 64), kv_len=4096)
        yield _compared(workload, ("c_decode",), device, variants)
    if variants is not None:
        return
    for ratio in ((4,) if size == "smoke" else ratios):              # one head's scores are three times the cache
        workload = Workload.prefill(AttentionShape(8, 8 // ratio, 32), q_len=32, kv_len=3072)
        yield _compared(workload, ("c_naive", "c_flash"), device)
    if size == "smoke":
        return
    yield from (Operation(name, nbytes) for name, nbytes in
                (("copy", 8 * MiB), ("read", 8 * MiB), ("matmul", 32 * KiB)))     # three matrices that fit
    yield _compared(Workload.decode(AttentionShape(8, 1, 64), kv_len=16384), ("naive", "naive_repeat", "sdpa", "paged"),
                    device)
    yield _compared(Workload.prefill(AttentionShape(4, 1, 32), q_len=64, kv_len=2048), ("naive", "sdpa"), device)


def run(case: Case, *, artifacts=None, watch: Watch | None = None) -> list[dict]:
    """Attention: correctness, ceilings, time, roofline and every counter. An operation: every counter of bytes."""
    watch = watch or Watch()
    if isinstance(case, Operation):
        return list(_counted(case, watch))
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
