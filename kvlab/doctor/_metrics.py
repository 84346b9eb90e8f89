"""Where each metric comes from on this machine, and what a better source would need."""
from __future__ import annotations

from collections.abc import Iterator

from kvlab.doctor._check import Check
from kvlab.doctor._software import severity, torch_child

# a probe, or a metric that differs from its probe's others -> kind and method of its rows on a CPU and on a GPU, ""
# where there are none: no probe can say it before it has measured. {clock} and {peak}: what it would use here
ROWS = {
    "kernel_error": ("measured: derived, distance from attention in fp64",) * 2,
    "format_error": ("measured: derived, distance from attention in fp64",) * 2,
    "first_call": ("measured: timer:wall",) * 2,
    "ceilings": ("measured: timer",) * 2,
    "timer": ("measured: {clock} for one thread, timer:wall for several", "measured: timer:cuda_events"),
    "prepare_s": ("measured: timer:wall",) * 2,
    "page_faults": ("measured: counter:getrusage", ""), "system_time_share": ("measured: counter:getrusage", ""),
    "memory": ("measured: {peak}", "measured: counter:cuda_allocator"),
    "gradient_bytes": ("measured: counter:saved_tensors",) * 2,
    "roofline": ("modelled: formula",) * 2,
    "torch_profile": ("measured: profiler:torch",) * 2,
    "operator_bytes": ("modelled: formula:recorded shapes",) * 2,
    "profiled_flops": ("modelled: formula:variant.cost",) * 2,
    "nvml": ("", "measured: sensor of NVML"), "sm_utilization": ("", ""),
}
_BYTES = ("measured bytes have no probe yet; they need an NVIDIA GPU of Hopper or newer (GPM counters) or ncu, on a "
          "CPU memory-controller counters, which virtual machines hide")
_FLOPS = "measured flops have no probe yet; they need ncu and the right to read GPU counters"
BETTER = {
    **dict.fromkeys(("hbm_read_bytes", "hbm_write_bytes", "hbm_bytes", "read_amplification", "operator_bytes"), _BYTES),
    **dict.fromkeys(("executed_flops", "profiled_flops"), _FLOPS),
    "sm_utilization": "it has no probe yet; it needs an NVIDIA GPU of Hopper or newer (GPM counters) or ncu",
    **dict.fromkeys(("gpu_busy_fraction", "power"), "it needs an NVIDIA GPU with its driver"),
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
    """One check per metric of `kvlab ls metrics`: a source, or why there is none here."""
    known = torch_child()
    if "metrics" not in known:
        yield Check("metrics", "all metrics", severity(known["ended"]),
                    f"the probes cannot be asked: their process {known['ended']}")
        return
    for metric in known["metrics"]:
        yield _check(metric["name"], metric["origin"], known)


def _check(name: str, origin: str, known: dict) -> Check:
    device, (what, _, of) = known["device"], origin.partition(" ")
    probe = of if what == "probe" else ""
    rows = ROWS.get(name, ROWS.get(probe))
    text = f"see its rows ({origin})"
    if rows is not None:
        text = rows[device == "cuda"] and f"{rows[device == 'cuda'].format(**known)}, on {device}"
    why = known["why"].get(probe)
    if why or not text:
        return Check("metrics", name, "note", f"missing: {why or 'no probe reads it'}", BETTER.get(name, ""))
    return Check("metrics", name, "ok", text, BETTER.get(name, ""))
