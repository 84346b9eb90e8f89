"""Bytes, activity and hits of a call's kernels, counted by Nsight Compute; what verifies the timer's cold label."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvlab.attention import Comparison
from kvlab.probes._base import Bench, room_on
from kvlab.probes._ncu_csv import Kernel, Unreadable, summed, weighted
from kvlab.probes._ncu_run import REPLAYS, counted, program
from kvlab.probes._traffic import TRAFFIC, ideal_of, model_of, traffic
from kvlab.record.reading import Reading, missing

READ, WRITE, TIME = "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"
EMPTIED = "cold (ncu empties the caches before each kernel)"
COLD = 0.9                              # of the ideal reads: the share from which a call counts as cold
SHARES = {                              # metric -> (ncu's metric, what that is divided by, denominator)
    "sm_utilization": ("sm__cycles_active.avg", "sm__cycles_elapsed.max", "SM cycles while the kernels ran"),
    "sm_occupancy": ("sm__warps_active.avg.pct_of_peak_sustained_active", None,
                     "warps that fit on an SM, over its active cycles only"),
    "tensor_utilization": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", None,
                           "what the tensor pipes of all SMs can do, while the kernels ran"),
    "l2_hit_rate": ("lts__t_sector_hit_rate.pct", None, "sectors asked of L2")}
GIVES = {                               # pass -> the metrics that come of it
    "traffic": {**TRAFFIC, "cold_share": "ratio", "kernels_per_call": "count"},
    "cold": {"kernel_cold_read_bytes": "B", "kernel_cold_write_bytes": "B"},
    "activity": dict.fromkeys(SHARES, "ratio")}


@dataclass(frozen=True)
class Ncu:
    """What one call moves to and from a GPU's memory, counted kernel by kernel in a process of its own under ncu.

    hbm_… and amplifications: the call as the timer makes it, after the same flush. cold_share: its reads ÷ the ideal
    reads; from 0.9 on, and where next to nothing of what the formula reads is lacking, the timer's rows are labelled
    verified. The interval of the bytes reaches from what was counted to that and what L2 may still hold to write: the
    lesser of its size and of what the formula writes. kernel_cold_…: with empty caches before every kernel, so
    that what one kernel leaves for the next is read again. sm_utilization, sm_occupancy, tensor_utilization,
    l2_hit_rate: means over the kernels by their time, also with empty caches. No time is taken from these runs.
    timeout_s: for each of the three passes. Copies and fills by the driver (memcpy, memset) are no kernels and are not
    counted; clone() of a contiguous tensor is one. Needs NVIDIA Nsight Compute 2022.4 or newer and leave to read
    counters. Source: Nsight Compute, Kernel Profiling Guide, metrics dram__, sm__ and lts__.
    """
    timeout_s: float = 120.0
    name: ClassVar[str] = "ncu"
    on_request: ClassVar[bool] = True
    metrics: ClassVar[dict[str, str]] = {metric: unit for gives in GIVES.values() for metric, unit in gives.items()}
    needs: ClassVar[tuple[str, ...]] = ("kernel_error", "timer", "roofline")        # whose labels it verifies
    rotates: ClassVar[bool] = False

    def why_not(self, trial):
        if not trial.device.startswith("cuda"):
            return f"ncu counts on NVIDIA GPUs, not on the device {trial.device}"
        if getattr(getattr(trial, "variant", None), "in_process", False):
            return ("this variant's class exists in this process only, and ncu needs a process of its own; put it into "
                    "a .py file")
        try:
            program()
        except Unreadable as why:
            return str(why)
        return None

    def measure(self, bench: Bench):
        cache_bytes = room_on(bench.comparison.device)[1]            # it also hands back what torch only keeps
        found = counted(Comparison(tuple(bench.trials)), timeout_s=self.timeout_s,
                        alive=lambda: bench.watch.at("", self.name))
        for trial in list(bench.trials):
            of_trial = readings(trial, {name: of[trial.case_id] for name, of in found.items()}, cache_bytes)
            state = next((r.cache_state for r in of_trial if r.metric == "cold_share"), "")
            if state:
                for source in ("timer", "roofline"):
                    bench.relabel(trial, source, state)
            yield from ((trial, reading) for reading in of_trial)

    def operation(self, op) -> list[Reading]:
        """The same of a copy, a read or a matrix product."""
        if why := self.why_not(op):
            return [missing(metric, unit, why, source=self.name) for metric, unit in self.metrics.items()]
        found = counted(op, timeout_s=self.timeout_s)
        return readings(op, {name: of[op.case_id] for name, of in found.items()}, room_on(op.device)[1])


def readings(case, found: dict[str, list[Kernel] | str], cache_bytes: int) -> list[Reading]:
    """All metrics of a Trial or an Operation from the kernels that each pass counted, or the reason in their place."""
    made = []
    for name, of in (("traffic", _traffic), ("cold", _cold), ("activity", _activity)):
        kernels = found.get(name, f"the pass {name} was not run")
        try:
            if isinstance(kernels, str):
                raise Unreadable(kernels)
            made += of(case, kernels, cache_bytes)
        except Unreadable as why:
            made += [missing(metric, unit, str(why), source=Ncu.name) for metric, unit in GIVES[name].items()]
    return made


def label(case, read: float, cache_bytes: int, replays: int = 1) -> str:
    """What the caches held when the call began, from the bytes that it read.

    Unverified where it read the ideal, and of what its own formula asks so much less that it may be K and V: then
    intermediate arrays may have taken their place. And where ncu ran a kernel several times: then a later run found
    what the first had left.
    """
    if replays != 1:
        return f"cold (unverified: ncu ran each kernel {replays} times)" if replays else (
            "cold (unverified: ncu did not say how often it ran each kernel)")
    ideal, formula = ideal_of(case).read_bytes, model_of(case, cache_bytes).read_bytes
    share = f"{100 * read / ideal:.3g} % of the ideal"
    if read < COLD * ideal:
        return f"warm (ncu read only {share})"
    if formula - read > (1 - COLD) * ideal:              # not 0.9 of the formula: K and V are 1/64 of repeated heads
        return f"cold (unverified: ncu read {share}, and {100 * read / formula:.3g} % of what its formula reads)"
    return f"cold (verified: ncu read {share})"


def _traffic(case, kernels, cache_bytes):
    read, write = summed(kernels, READ), summed(kernels, WRITE)
    replays = max((int(kernel.get(REPLAYS, 0)) for kernel in kernels), default=0)
    again = "" if replays == 1 else ("; a kernel that ncu runs more than once, or of which it does not say that it ran "
                                     "once, finds what its first run left in the caches: the label is not verified")
    common = dict(source=Ncu.name, n=1, cache_state=label(case, read, cache_bytes, replays))
    unwritten = min(model_of(case, cache_bytes).write_bytes, cache_bytes)
    yield from traffic(case, total=read + write, low=read + write, high=read + write + unwritten, read=read,
                       write=write, cache_bytes=cache_bytes, kind="measured", method="counter", **common,
                       note="dram__bytes of every kernel; copies and fills by the driver (memcpy, memset; clone() of a "
                            "contiguous tensor) are not counted, nor what L2 still holds to write: at the most "
                            f"{unwritten:,} bytes, up to which the interval goes{again}")
    yield Reading("cold_share", read / ideal_of(case).read_bytes, "ratio", "measured", method="derived",
                  denominator="ideal read bytes", note=again.removeprefix("; "), **common)
    yield Reading("kernels_per_call", len(kernels), "count", "measured", method="counter", **common)


def _cold(case, kernels, cache_bytes):
    for metric, name in (("kernel_cold_read_bytes", READ), ("kernel_cold_write_bytes", WRITE)):
        yield Reading(metric, summed(kernels, name), "B", "measured", method="counter", source=Ncu.name, n=1,
                      cache_state=EMPTIED)


def _activity(case, kernels, cache_bytes):
    for metric, (name, over, denominator) in SHARES.items():
        try:
            value = weighted(kernels, name, TIME, over)
            if not 0 <= value <= 1.05:
                raise Unreadable(f"ncu gave {name} as {value:.4g} of 1, which cannot be")
            yield Reading(metric, value, "ratio", "measured", method="counter", source=Ncu.name, n=1,
                          cache_state=EMPTIED, denominator=denominator, note="mean over the kernels by their time")
        except Unreadable as why:
            yield missing(metric, "ratio", str(why), source=Ncu.name)
