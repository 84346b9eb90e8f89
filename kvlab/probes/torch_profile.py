"""Calls under torch's profiler: which operators take the time. In a pass of its own, never the timing one."""
from __future__ import annotations

import gzip
import json
import os
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import ClassVar

from kvlab.probes._base import Bench
from kvlab.probes._target import under_ncu
from kvlab.record.environment import portable
from kvlab.record.export import atomic_write
from kvlab.record.reading import Reading, missing
from kvlab.record.trace import CALL, load, trace_of
from kvlab.record.trace_summary import NO_OPERATOR, Summary, summary

LARGE = 200 * 10**6             # bytes of JSON from which viewers become slow; they stop at 1 to 2 GB
_KEPT = ("schemaVersion", "deviceProperties", "record_shapes", "displayTimeUnit", "baseTimeNanoseconds")
CLASSES = ("attention", "matmul", "softmax", "copy")
SHARES = ("largest_operator_share", "operator_gap_share", *(f"{kind}_time_share" for kind in CLASSES))


@dataclass(frozen=True)
class TorchProfile:
    """Operators of a few calls by torch's profiler, and their Chrome trace in traces/ of the run.

    Shares are of the profiled call, which the profiler makes slower by profiler_overhead; on CUDA they are of the time
    of its kernels, and missing where none was recorded. calls: how many; one where a call takes longer than a second.
    FLOPs are by formula, because the profiler counts none for a CPU's scaled_dot_product_attention. modelled_occupancy
    is what the profiler works out from each kernel's grid, blocks and registers: no tail, no imbalance, and wrong for
    persistent kernels. Never under ncu: a GPU takes one profiler at a time.
    Source: Kineto's computeOccupancyMetrics.
    """
    calls: int = 3
    name: ClassVar[str] = "torch_profile"
    on_request: ClassVar[bool] = True
    metrics: ClassVar[dict[str, str]] = {
        "operators_per_call": "count", **{share: "ratio" for share in SHARES}, "kernel_launches": "count",
        "modelled_occupancy": "ratio", "profiler_overhead": "ratio", "operator_bytes": "B", "profiled_flops": "flop"}
    needs: ClassVar[tuple[str, ...]] = ("kernel_error", "timer")        # so that it comes after the clock
    rotates: ClassVar[bool] = False

    def why_not(self, trial):
        return under_ncu() if trial.device.startswith("cuda") else None

    def measure(self, bench: Bench):
        for trial in list(bench.trials):
            profiled = None
            with bench.on(trial):
                profiled, plain = self._profiled(bench, trial)
            if trial in bench.trials and profiled is not None:
                with tempfile.TemporaryDirectory() as folder:
                    raw = Path(folder) / "trace.json"
                    profiled.export_chrome_trace(str(raw))
                    data, problems = load(raw, most=2**31)
                artifact, note = _store(bench, trial, _cleaned(data, trial))
                yield from self._readings(trial, summary(trace_of(data, problems)), plain, artifact, note)

    def _profiled(self, bench, trial):
        """(the profiler after one warm-up and the calls, each in a range of its own, on input copies in turn; wall
        seconds of the same calls just before, without it)."""
        import torch
        from torch.profiler import ProfilerActivity, profile, record_function
        cuda = trial.device.startswith("cuda")
        wait = torch.cuda.synchronize if cuda else lambda: None
        inputs = bench.inputs_of(trial)[:self.calls + 1]
        calls = trial.prepare(inputs)
        plain = []
        for i in range(self.calls + 1):
            began = time.perf_counter()
            calls[i % len(calls)]()
            wait()
            plain.append(time.perf_counter() - began)
            if sum(plain) > 1:
                break
        count = max(1, len(plain) - 1)                               # the first makes what libraries make on first use
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")              # else it prints a line at each start and stop
        with profile(activities=activities, record_shapes=True, with_stack=False, acc_events=True) as profiled:
            with record_function("kvlab:warm-up"):                   # the profiler's own first call takes far longer
                calls[0]()
                wait()
            for i in range(count):
                with record_function(f"{CALL} {trial.variant.label}"):
                    calls[(i + 1) % len(calls)]()
                    wait()                                           # so that its kernels end inside the range
        return profiled, plain[-count:]

    def _readings(self, trial, found: Summary, plain: list[float], artifact: str, note: str):
        at = dict(source=self.name, artifact=artifact)
        named = [row for row in found.operators if row["name"] != NO_OPERATOR]
        why = "" if named else "torch's profiler recorded no operator in the call: it runs none of torch's"
        yield trial, missing("operators_per_call", "count", why, **at) if why else Reading(
            "operators_per_call", sum(row["calls"] for row in named) / found.calls, "count", "measured",
            method="profiler:torch", n=found.calls, window_s=found.seconds, note=note, **at)
        yield trial, self._bytes(found, why, at)
        gpu, said = trial.device.startswith("cuda"), "; ".join(found.problems)
        if gpu:                                                      # the CPU's times never stand in for the GPU's
            why = "" if found.kernel_s else "torch's profiler recorded no kernel that the call launched on the GPU" + (
                said and f": {said}")
        if why:
            yield from ((trial, missing(metric, "ratio", why, **at)) for metric in SHARES)
        else:
            yield from ((trial, reading) for reading in self._shares(found, gpu, said, at))
        yield from ((trial, reading) for reading in self._kernels(found, gpu, why, said, at))
        yield trial, self._overhead(found, plain, at)
        yield trial, Reading("profiled_flops", trial.variant.load().cost(trial).executed_flops, "flop", "modelled",
                             method="formula:variant.cost", **at,
                             note="of one call; torch's profiler counts 0 for scaled_dot_product_attention on a CPU")

    def _bytes(self, found: Summary, why: str, at: dict):
        if not any(row["bytes_of"] for row in found.operators):
            return missing("operator_bytes", "B", why or "no operator in the call has shapes to count bytes by", **at)
        inputs_only = [row["name"] for row in found.operators if row["bytes_of"] == "inputs"]
        left_out = [*found.not_counted, *["kernels of no operator" for row in found.operators
                                          if row["name"] == NO_OPERATOR]]
        note = ["per call, inputs and outputs of the innermost operators, views free",
                inputs_only and "operators whose output is not counted: " + ", ".join(inputs_only),
                left_out and "not counted at all: " + ", ".join(left_out)]
        return Reading("operator_bytes", found.bytes / found.calls, "B", "modelled", method="formula:recorded shapes",
                       note="; ".join(filter(None, note)), **at)

    def _shares(self, found: Summary, gpu: bool, said: str, at: dict):
        rows, key, own, of, spent, clock, lane = (
            (found.kernels, "total_s", "kernel_s", "kernel time of the call", found.kernel_s, "CUDA kernels", "stream")
            if gpu else (found.operators, "self_s", "self_s", "wall time of the profiled call", found.seconds,
                         "self time", "thread"))

        def share(metric, value, note, denominator=of):
            return Reading(metric, value, "ratio", "measured", method=f"profiler:torch, {clock}", n=found.calls,
                           window_s=found.seconds, denominator=denominator, note="; ".join(filter(None, (note, said))),
                           **at)
        largest = max(found.operators, key=lambda row: row[own])
        yield share("largest_operator_share", largest[own] / spent, largest["name"])
        busiest = max((one for one in found.lanes if one["kind"] == lane), key=lambda one: one["busy_s"])
        yield share("operator_gap_share", busiest["gap_share"],
                    f"no {'kernel' if gpu else 'operator'} ran; the largest gap is {busiest['largest_gap']}",
                    "time between the first and last kernel" if gpu else of)
        for kind in CLASSES:
            of_kind = [row for row in rows if row["class"] == kind and row[key] > 0]
            yield share(f"{kind}_time_share", sum(row[key] for row in of_kind) / spent,
                        ", ".join(dict.fromkeys(_named(row) for row in of_kind))[:300])

    def _kernels(self, found: Summary, gpu: bool, why: str, said: str, at: dict):
        why = why if gpu else "a call on a CPU launches no kernels"
        yield missing("kernel_launches", "count", why, **at) if why else Reading(
            "kernel_launches", found.launches / found.calls, "count", "measured", n=found.calls,
            method="profiler:torch, CUDA kernels", note="; ".join(filter(None, ("per call", said))), **at)
        if why or found.occupancy is None:
            yield missing("modelled_occupancy", "ratio", why or "torch's profiler estimated the occupancy of no kernel",
                          **at)
            return
        mean, known = found.occupancy
        yield Reading("modelled_occupancy", mean, "ratio", "modelled", method="formula:launch geometry, by Kineto",
                      denominator="warps that an SM can hold", note=(
                          f"mean by kernel time, of {100 * known:.0f} % of it; from grid, blocks and registers of each "
                          "launch, not counted"), **at)

    def _overhead(self, found: Summary, plain: list[float], at: dict):
        under = found.call_seconds
        return Reading("profiler_overhead", median(under) / median(plain), "ratio", "measured",
                       method="profiler:torch, call range ÷ wall time", n=len(under), low=min(under) / max(plain),
                       high=max(under) / min(plain), denominator="wall time of the same calls without the profiler",
                       note="from a few calls: the interval is their whole range", **at)


def _named(row: dict) -> str:
    """The operator of a row, or the kernel that none launched."""
    name = row.get("operator", row.get("name"))
    return row["kernel"][:60] if name == NO_OPERATOR else name


def _cleaned(data: dict, trial) -> dict:
    """The trace with what it is of, and without what names this machine: host, own path, process, absolute paths.

    Changes `data` in place, events included.
    """
    for name in [name for name in data if name not in (*_KEPT, "traceEvents")]:
        del data[name]
    for event in data["traceEvents"]:
        args = event.get("args") or {}
        if event.get("ph") == "M" and event.get("name") == "process_name":
            args["name"] = f"kvlab {trial.variant.label}"
        elif event.get("ph") == "M" and event.get("name") == "thread_name":
            args["name"] = str(args.get("name", "")).partition(" (")[0]
        elif event.get("ph") == "X":
            event["args"] = _portable(args)
    data["kvlab"] = dict(version=_version(), case_id=trial.case_id, variant=trial.variant.label,
                         format_path=trial.format_path, trial=_portable(asdict(trial)))
    return data


def _version() -> str | None:
    try:
        return metadata.version("kvlab")
    except metadata.PackageNotFoundError:
        return None                                                  # run from a checkout that is not installed


def _portable(value):
    if isinstance(value, str):
        return portable(value) if "/" in value or "\\" in value else value
    if isinstance(value, list | tuple):
        return [_portable(one) for one in value]
    if isinstance(value, dict):
        return {name: _portable(one) for name, one in value.items()}
    return value


def _store(bench: Bench, trial, data: dict) -> tuple[str, str]:
    """The trace's path relative to the run ("" where the run keeps no files), and a note where it is large."""
    if bench.artifacts is None:
        return "", ""
    text = json.dumps(data, separators=(",", ":")).encode()
    note = ""
    if len(text) > LARGE:
        note = f"the trace holds {len(text):,} bytes of JSON: viewers become slow from {LARGE:,}"
        warnings.warn(f"{trial.variant.label}: {note}; profile fewer calls or a shorter kv_len", stacklevel=2)
    (bench.artifacts / "traces").mkdir(parents=True, exist_ok=True)
    artifact = f"traces/{trial.case_id}.json.gz"
    atomic_write(bench.artifacts / artifact, gzip.compress(text, 6, mtime=0))
    return artifact, note
