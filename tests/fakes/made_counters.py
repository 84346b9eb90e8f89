"""Rows of a run of the study counters whose every number is known beforehand. Tests only; never a result file."""
import json
from dataclasses import asdict

from kvlab.record.reading import Reading, missing, table

RUN = "20261129T181422Z-c0c0c0"
NO_GPU = "LibraryNotFound: no NVML here"
TELEMETRY = {"sm_utilization": "ratio", "dram_utilization": "ratio", "power_instant": "W", "power_average": "W",
             "sm_clock": "Hz", "memory_clock": "Hz"}


def context(variant, phase="decode", ratio=8, kv_len=4096, comparison=None, replica=0):
    if phase == "":
        return dict(variant=variant, phase="", comparison_id=variant, case_id=variant, replica=0)
    comparison = comparison or f"{phase}-{ratio}-{kv_len}"
    return dict(variant=variant, phase=phase, group_ratio=ratio, kv_len=kv_len, replica=replica, batch_size=1,
                q_len=1 if phase == "decode" else 64, comparison_id=comparison,
                case_id=f"{comparison}-{variant}-{replica}")


def row(reading, **about):
    return {"run_id": RUN, "study": "counters", "device": "cpu", "dtype": "fp32", **about, **asdict(reading)}


def bytes_of(about, source, ratio, *, formula=8e6, kind="simulated", rel=0.0, reads=0.75, amplification=None):
    """Rows of TRAFFIC as a source gives them: `ratio` × the formula's bytes, with ± rel where that is not 0."""
    total = ratio * formula
    ends = (lambda v: dict(low=v * (1 - rel), high=v * (1 + rel))) if rel else (lambda v: {})
    common = dict(source=source, hardware="A CPU, 2 logical cores")
    found = [Reading("hbm_bytes", total, "B", kind, **ends(total), **common),
             Reading("traffic_to_model", ratio, "ratio", kind, **ends(ratio), **common)]
    if reads is not None:
        found += [Reading("hbm_read_bytes", reads * total, "B", kind, **common),
                  Reading("hbm_write_bytes", (1 - reads) * total, "B", kind, **common)]
    if amplification is not None:
        found.append(Reading("read_amplification", amplification, "ratio", kind, **common))
    return [row(one, **about) for one in found]


def absent(about, source, why, *metrics):
    units = {**TELEMETRY, "hbm_bytes": "B", "traffic_to_model": "ratio", "cold_share": "ratio"}
    return [row(missing(metric, units[metric], why, source=source), **about) for metric in metrics]


def timed(about, share, *, label="cold (unverified)", rel=0.05):
    return [row(Reading("latency_s", 1e-3, "s", "measured", source="timer", low=0.9e-3, high=1.1e-3, n=9,
                        cache_state=label, hardware="A CPU, 2 logical cores"), **about),
            row(Reading("flops_share", share, "ratio", "modelled", source="roofline", low=share * (1 - rel),
                        high=share * (1 + rel)), **about)]


def on_cpu():
    """A CPU's run: callgrind counts, nothing of NVIDIA is there, perf sees no counter."""
    rows = []
    for ratio, found in ((1, 1.0), (4, 1.01), (8, 1.04)):
        about = context("c_decode", ratio=ratio)
        rows += bytes_of(about, "callgrind 3.19", found) + timed(about, 0.01 * ratio)
    for variant, found, amplified in (("naive", 1.1, 1.05), ("naive_repeat", 1.42, 9.2)):
        about = context(variant, comparison="torch")
        rows += bytes_of(about, "callgrind 3.19", found, amplification=amplified) + timed(about, 0.05)
    rows += bytes_of(context("read", ""), "callgrind 3.19", 1.0)
    for about in (context("c_decode", ratio=1), context("c_decode", ratio=4)):
        rows += absent(about, "gpm", NO_GPU, "hbm_bytes", "sm_utilization", "dram_utilization")
        rows += absent(about, "ncu", "ncu is not installed", "hbm_bytes", "sm_utilization", "cold_share")
        rows += absent(about, "perf", "no PMU", "hbm_bytes")
        rows += absent(about, "nvml", NO_GPU, "power_instant", "power_average", "sm_clock", "memory_clock")
    return rows


def behind(variant, ratios, *, ratio=4, trial=None):
    """A trial's bytes behind caches of 64 KiB, 128 KiB and so on: `ratios` × the formula's."""
    rows = []
    for i, found in enumerate(ratios):
        size = 65536 << i
        about = dict(context(variant, "prefill", ratio, 1408), case=json.dumps(asdict(trial), sort_keys=True) if trial
                     else f"{variant} {ratio}")
        about["case_id"] = about["comparison_id"] = f"{variant}-{ratio}-{size}"
        rows += bytes_of(about, "callgrind", found, formula=8e6 / (i + 1))
        rows.append(row(Reading("last_level_bytes", size, "B", "simulated", source="callgrind"), **about))
    return rows


def on_gpu(*, gpm=1.05, sm=0.97, share=0.02, label="cold (verified: ncu read 101 % of the ideal reads)"):
    """A GPU's run: ncu and GPM count, NVML watches."""
    rows = []
    for i, (variant, ratio) in enumerate((("sdpa", 1), ("sdpa", 8), ("naive_repeat", 8))):
        about = dict(context(variant, ratio=ratio), device="cuda", dtype="bf16")
        amplified = 8.1 if variant == "naive_repeat" else 1.01
        rows += bytes_of(about, "ncu", 1.01, kind="measured", rel=0.002, amplification=amplified)
        rows += bytes_of(about, "gpm", 1.01 * gpm, kind="measured", rel=0.02, reads=None)
        rows += timed(about, share, label=label)
        values = dict(sm_utilization=sm - 0.01 * i, dram_utilization=0.9, power_instant=600.0 + i, power_average=580.0,
                      sm_clock=1.98e9, memory_clock=3.2e9)
        rows += [row(Reading(metric, value, TELEMETRY[metric], "measured", low=0.98 * value, high=1.01 * value, n=20,
                             source="gpm" if metric.endswith("utilization") else "nvml", hardware="FAKE"), **about)
                 for metric, value in values.items()]
        rows.append(row(Reading("cold_share", 1.0 + 0.01 * i, "ratio", "measured", source="ncu"), **about))
    for op in ("copy", "read", "matmul"):
        rows += bytes_of(dict(context(op, ""), device="cuda"), "gpm", 1.3 if op == "matmul" else 1.0, kind="measured",
                         rel=0.01, reads=None)
    return rows


def made(rows):
    return table(rows)
