"""Where each metric comes from on this machine, and what a better source would need."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from kvlab.doctor._check import Check
from kvlab.doctor._software import severity, torch_child

# a probe, or a metric that differs from its probe's others (`probe.metric` where several probes read it) -> kind and
# method of its rows on a CPU and on a GPU, "" where there are none: no probe can say it before it has measured. {clock}
# and {peak}: what it would use here
_UNSPLIT = ("", "missing: the counter does not tell reads from writes")
ROWS = {
    "kernel_error": ("measured: derived, distance from attention in fp64",) * 2,
    "format_error": ("measured: derived, distance from attention in fp64",) * 2,
    "first_call": ("measured: timer:wall",) * 2,
    "ceilings": ("measured: timer",) * 2,
    "timer": ("measured: {clock} for one thread, timer:wall for several", "measured: timer:cuda_events"),
    "prepare_s": ("measured: timer:wall",) * 2,
    "latency_graph_s": ("missing: CUDA graphs are of GPUs", "measured: timer:cuda_graph"),
    "cycles": ("missing: the timer reads no cycle counter of a CPU", "measured: derived, time × SM clock"),
    "throttled_samples": ("missing: a CPU does not say why it slows down", "measured: sensor of NVML"),
    "page_faults": ("measured: counter:getrusage", ""), "system_time_share": ("measured: counter:getrusage", ""),
    "memory": ("measured: {peak}", "measured: counter:cuda_allocator"),
    "gradient_bytes": ("measured: counter:saved_tensors",) * 2,
    "roofline": ("modelled: formula",) * 2,
    "torch_profile": ("measured: profiler:torch",) * 2,
    "operator_bytes": ("modelled: formula:recorded shapes",) * 2,
    "profiled_flops": ("modelled: formula:variant.cost",) * 2,
    "kernel_launches": ("", "measured: profiler:torch"),
    "modelled_occupancy": ("", "modelled: Kineto's occupancy, from launch sizes"),
    "nvml": ("", "measured: sensor of NVML"),
    "gpm": ("", "measured: derived from the counter's share of the bus, calibrated by a copy and a read"),
    "gpm.hbm_read_bytes": _UNSPLIT, "gpm.hbm_write_bytes": _UNSPLIT, "gpm.read_amplification": _UNSPLIT,
    **dict.fromkeys(("gpm.sm_utilization", "gpm.sm_occupancy", "gpm.tensor_utilization", "gpm.dram_utilization"),
                    ("", "measured: counter of NVML (GPM)")),
    "ncu": ("", "measured: counter of Nsight Compute, on request"),
    "callgrind": ("simulated: cache simulator (valgrind), on request", ""),
    "perf": ("measured: counter of the memory controllers, of the whole system, on request", ""),
}
_GPM_OR_NCU = "an NVIDIA GPU: of Hopper or newer for gpm, any with the right to read its counters for ncu"
_COUNTED = (f"a count of bytes needs {_GPM_OR_NCU}; on a CPU callgrind simulates bytes, and perf counts them where the "
            "machine shows its memory controllers")
_FLOPS = "measured flops have no probe yet; they need ncu and the right to read GPU counters"
_NVIDIA = "it needs an NVIDIA GPU with its driver"
BETTER = {
    **dict.fromkeys(("hbm_read_bytes", "hbm_write_bytes", "hbm_bytes", "read_amplification", "traffic_amplification",
                     "traffic_to_model", "operator_bytes"), _COUNTED),
    **dict.fromkeys(("executed_flops", "profiled_flops"), _FLOPS),
    **dict.fromkeys(("sm_utilization", "sm_occupancy", "tensor_utilization"),
                    f"it needs {_GPM_OR_NCU}"),
    **dict.fromkeys(("dram_utilization", "gpm_kappa"), "it needs an NVIDIA GPU of Hopper or newer (GPM)"),
    **dict.fromkeys(("cold_share", "kernel_cold_read_bytes", "kernel_cold_write_bytes", "l2_hit_rate",
                     "kernels_per_call"), "it needs an NVIDIA GPU, ncu, and the right to read GPU counters"),
    **dict.fromkeys(("gpu_busy_fraction", "memory_busy_fraction", "power_instant", "power_average", "idle_power",
                     "energy_per_call", "sm_clock", "memory_clock", "temperature", "throttled_share", "memory_used",
                     "memory_reserved", "ecc_errors", "other_processes", "latency_graph_s", "cycles",
                     "throttled_samples", "kernel_launches", "modelled_occupancy"), _NVIDIA),
}


def ask(device: str) -> dict:
    """In a child process, with torch: the metrics, why a probe cannot run on this device, and what they would use."""
    import sys

    from kvlab.attention import trial
    from kvlab.listing import metrics as all_metrics
    from kvlab.probes import memory, probes
    from kvlab.probes._clock import clock
    from kvlab.shapes import AttentionShape, Workload
    one = trial("naive", Workload.decode(AttentionShape(8, 2, 64), kv_len=64), device=device)
    linux = sys.platform == "linux" and memory._trim() and memory._reset_high_water()
    return dict(metrics=list(all_metrics()), why={name: probes[name]().why_not(one) for name in probes},
                device=device, clock=clock(1).method, peak="counter:VmHWM" if linux else "sensor:psutil_rss")


def metrics() -> Iterator[Check]:
    """One check per metric and source of `kvlab ls metrics`: what its rows are, or why there are none here."""
    known = torch_child()
    if "metrics" not in known:
        yield Check("metrics", "all metrics", severity(known["ended"]),
                    f"the probes cannot be asked: their process {known['ended']}",
                    "run kvlab doctor again: torch loads slowly the first time, and on a busy machine")
        return
    sources, said = Counter(metric["name"] for metric in known["metrics"]), set()
    for metric in known["metrics"]:
        found = _check(metric["name"], metric["origin"], known, shared=sources[metric["name"]] > 1)
        yield replace(found, next_step="") if found.name in said else found      # said once of each metric
        said.add(found.name)


def _check(name: str, origin: str, known: dict, shared: bool = False) -> Check:
    """shared: several probes read the metric, so that the line says which of them it is about."""
    device, (what, _, of) = known["device"], origin.partition(" ")
    probe = of if what == "probe" else ""
    rows = ROWS.get(f"{probe}.{name}", ROWS.get(name, ROWS.get(probe)))
    text = f"see its rows ({origin})"
    if rows is not None:
        text = rows[device == "cuda"] and f"{rows[device == 'cuda'].format(**known)}, on {device}"
    why, by = known["why"].get(probe), f"from {probe}: " if shared else ""
    if why or not text:
        return Check("metrics", name, "note", f"{by}missing: {why or 'no probe reads it'}", BETTER.get(name, ""))
    return Check("metrics", name, "note" if text.startswith("missing") else "ok", by + text, BETTER.get(name, ""))
