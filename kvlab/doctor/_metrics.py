"""Where each metric comes from on this machine, and what a better source would need. The one table of that."""
from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from kvlab.doctor._check import Check, python
from kvlab.doctor._software import torch_facts

_FP64 = "measured: derived, distance from attention in fp64"
_BYTES = ("measured bytes have no probe yet; they need an NVIDIA GPU of Hopper or newer (GPM counters) or ncu, on a "
          "CPU memory-controller counters, which virtual machines hide")
_FLOPS = "measured flops have no probe yet; they need ncu and the right to read GPU counters"
_SHARE = "modelled: formula over measured time and ceilings"


@dataclass(frozen=True)
class Source:
    """Kind and method of a metric on a CPU and on a GPU, and what a stronger one would need.

    {clock} and {peak} are filled in by what the probe would use here. "" : it has none there.
    """
    cpu: str
    cuda: str
    better: str = ""


def _both(text: str, better: str = "") -> Source:
    return Source(text, text, better)


_TIME = Source("measured: {clock} for one thread, timer:wall for several", "measured: timer:cuda_events")
_SYSTEM = Source("measured: counter:getrusage", "")
SOURCES = {
    "kernel_error": _both(_FP64), "format_error": _both(_FP64),
    "read_ceiling": _both("measured: timer"), "copy_ceiling": _both("measured: timer"),
    "matmul_ceiling": _both("measured: timer"),
    "latency_s": _TIME, "latency_p5": _TIME, "latency_p95": _TIME, "prepare_s": _both("measured: timer:wall"),
    "first_call_s": _both("measured: timer:wall"),
    "page_faults": _SYSTEM, "system_time_share": _SYSTEM,
    "peak_extra_bytes": Source("measured: {peak}", "measured: counter:cuda_allocator"),
    "gradient_bytes": _both("measured: counter:saved_tensors"),
    "ideal_bytes": _both("modelled: formula"), "useful_flops": _both("modelled: formula"),
    "intensity": _both("modelled: formula"),
    "executed_flops": _both("modelled: formula:variant.cost", _FLOPS),
    **dict.fromkeys(("hbm_read_bytes", "hbm_write_bytes", "hbm_bytes", "read_amplification"),
                    _both("modelled: formula:variant.cost", _BYTES)),
    **dict.fromkeys(("roof_latency", "ridge", "attainable_flops_share", "effective_bandwidth", "bandwidth_share",
                     "useful_flops_rate", "flops_share"), _both(_SHARE)),
    **dict.fromkeys(("operators_per_call", "largest_operator_share", "operator_gap_share", "attention_time_share",
                     "matmul_time_share", "softmax_time_share", "copy_time_share", "profiler_overhead"),
                    _both("measured: profiler:torch")),
    "operator_bytes": _both("modelled: formula:recorded shapes", _BYTES),
    "profiled_flops": _both("modelled: formula:variant.cost", _FLOPS),
    "sm_utilization": _both("", "it has no probe yet; it needs an NVIDIA GPU of Hopper or newer (GPM counters) or ncu"),
    "gpu_busy_fraction": Source("", "measured: sensor of NVML", "it needs an NVIDIA GPU with its driver"),
    "power": Source("", "measured: sensor of NVML", "it needs an NVIDIA GPU with its driver"),
}


def main() -> None:
    """In a child process: print what each probe and study says of its metrics on this machine, as JSON."""
    import sys

    from kvlab.attention import trial
    from kvlab.listing import metrics
    from kvlab.probes import memory, probes
    from kvlab.probes._clock import clock
    from kvlab.shapes import AttentionShape, Workload
    workload = Workload.decode(AttentionShape(8, 2, 64), kv_len=64)
    why = {name: {device: probes[name]().why_not(trial("naive", workload, device=device)) for device in
                  ("cpu", "cuda")} for name in probes}
    linux = sys.platform == "linux" and memory._trim() and memory._reset_high_water()
    json.dump(dict(metrics=list(metrics()), why=why, clock=clock(1).method,
                   peak="counter:VmHWM" if linux else "sensor:psutil_rss"), sys.stdout)


def metrics() -> Iterator[Check]:
    """One check per metric of `kvlab ls metrics`: a source, or why there is none here."""
    printed, ended = python("from kvlab.doctor._metrics import main; main()")
    try:
        known = json.loads(printed)
    except ValueError:
        yield Check("metrics", "all metrics", "problem", f"the probes cannot be asked: {ended or 'no answer'}")
        return
    device = "cuda" if torch_facts().get("available") else "cpu"
    for metric in known["metrics"]:
        what, _, origin = metric["origin"].partition(" ")
        why = known["why"].get(origin, {}).get(device) if what == "probe" else None
        yield _check(metric["name"], metric["origin"], why, device, known)


def _check(name: str, origin: str, why: str | None, device: str, known: dict) -> Check:
    source = SOURCES.get(name, Source(*("modelled: formula",) * 2) if origin.startswith("study") else
                         _both(f"see its rows ({origin})"))
    text = getattr(source, device).format(clock=known["clock"], peak=known["peak"])
    if why or not text:
        return Check("metrics", name, "note", f"missing: {why or 'no probe reads it'}", source.better)
    return Check("metrics", name, "ok", f"{text}, on {device}", source.better)
