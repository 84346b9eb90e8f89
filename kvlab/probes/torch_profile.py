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
from kvlab.record.environment import portable
from kvlab.record.export import atomic_write
from kvlab.record.reading import Reading, missing
from kvlab.record.trace import CALL, load, trace_of
from kvlab.record.trace_summary import Summary, summary

LARGE = 200 * 10**6             # bytes of JSON from which viewers become slow; they stop at 1 to 2 GB
_KEPT = ("schemaVersion", "deviceProperties", "record_shapes", "displayTimeUnit", "baseTimeNanoseconds")
CLASSES = ("attention", "matmul", "softmax", "copy")


@dataclass(frozen=True)
class TorchProfile:
    """Operators of a few calls by torch's profiler, and their Chrome trace in traces/ of the run.

    Shares are of the profiled call, which is slower than the timed one by profiler_overhead; on CUDA they are of the
    time of its kernels. calls: how many; one where a call takes longer than a second. FLOPs are by formula, because the
    profiler counts none for a CPU's scaled_dot_product_attention.
    """
    calls: int = 3
    name: ClassVar[str] = "torch_profile"
    on_request: ClassVar[bool] = True
    metrics: ClassVar[dict[str, str]] = {
        "operators_per_call": "count", "largest_operator_share": "ratio", "operator_gap_share": "ratio",
        **{f"{kind}_time_share": "ratio" for kind in CLASSES}, "profiler_overhead": "ratio", "operator_bytes": "B",
        "profiled_flops": "flop"}
    needs: ClassVar[tuple[str, ...]] = ("timer",)
    rotates: ClassVar[bool] = False

    def why_not(self, trial):
        return None

    def measure(self, bench: Bench):
        for trial in list(bench.trials):
            profiled = None
            with bench.on(trial):
                profiled = self._profiled(bench, trial)
            if trial in bench.trials and profiled is not None:
                with tempfile.TemporaryDirectory() as folder:
                    raw = Path(folder) / "trace.json"
                    profiled.export_chrome_trace(str(raw))
                    data, problems = load(raw, most=2**31)
                artifact, note = _store(bench, trial, _cleaned(data, trial))
                yield from self._readings(bench, trial, summary(trace_of(data, problems)), artifact, note)

    def _profiled(self, bench, trial):
        """The profiler after one warm-up and the calls, each in a range of its own, on input copies in turn."""
        import torch
        from torch.profiler import ProfilerActivity, profile, record_function
        cuda = trial.device.startswith("cuda")
        wait = torch.cuda.synchronize if cuda else lambda: None
        inputs = bench.inputs_of(trial)[:self.calls + 1]
        calls = trial.prepare(inputs)
        calls[0]()                                                   # what libraries make on first use is made
        wait()
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")              # else it prints a line at each start and stop
        with profile(activities=activities, record_shapes=True, with_stack=False, acc_events=True) as profiled:
            began = time.perf_counter()
            with record_function("kvlab:warm-up"):                   # the profiler's own first call takes far longer
                calls[0]()
                wait()
            count = 1 if time.perf_counter() - began > 1 else self.calls
            for i in range(count):
                with record_function(f"{CALL} {trial.variant.label}"):
                    calls[(i + 1) % len(calls)]()
                    wait()                                           # so that its kernels end inside the range
        return profiled

    def _readings(self, bench, trial, found: Summary, artifact: str, note: str):
        if not found.operators:
            why = "torch's profiler recorded no operator in the call: it runs none of torch's"
            for metric, unit in self.metrics.items():
                if metric not in ("profiler_overhead", "profiled_flops"):
                    yield trial, missing(metric, unit, why, source=self.name, artifact=artifact)
        else:
            yield from ((trial, reading) for reading in self._shares(found, artifact, note))
            partly = "operators whose output is not counted: " + ", ".join(
                row["name"] for row in found.operators if row["bytes_of"] == "inputs")
            left_out = "not counted at all: " + ", ".join(found.not_counted)
            yield trial, Reading("operator_bytes", found.bytes / found.calls, "B", "modelled",
                                 method="formula:recorded shapes", source=self.name, artifact=artifact, note="; ".join(
                                     ["per call, inputs and outputs of the innermost operators, views free",
                                      *(text for text in (partly, left_out) if not text.endswith(": "))]))
        yield trial, self._overhead(bench, trial, found, artifact)
        yield trial, Reading("profiled_flops", trial.variant.load().cost(trial).executed_flops, "flop", "modelled",
                             method="formula:variant.cost", source=self.name, artifact=artifact,
                             note="of one call; torch's profiler counts 0 for scaled_dot_product_attention on a CPU")

    def _shares(self, found: Summary, artifact: str, note: str):
        gpu = found.kernel_s > 0
        of, spent, clock = ("kernel time of the call", found.kernel_s, "CUDA kernels") if gpu else (
            "wall time of the profiled call", found.seconds, "self time")
        key = "kernel_s" if gpu else "self_s"
        common = dict(method=f"profiler:torch, {clock}", source=self.name, n=found.calls, window_s=found.seconds,
                      artifact=artifact)
        yield Reading("operators_per_call", sum(row["calls"] for row in found.operators) / found.calls, "count",
                      "measured", note=note, **{**common, "method": "profiler:torch"})
        largest = max(found.operators, key=lambda row: row[key])
        yield Reading("largest_operator_share", largest[key] / spent, "ratio", "measured", denominator=of,
                      note=largest["name"], **common)
        threads = [lane for lane in found.lanes if lane["kind"] == ("stream" if gpu else "thread")]
        busiest = max(threads, key=lambda lane: lane["busy_s"])
        yield Reading("operator_gap_share", busiest["gap_share"], "ratio", "measured", **common,
                      denominator="time between the first and last kernel" if gpu else of,
                      note=f"no {'kernel' if gpu else 'operator'} ran; the largest gap is {busiest['largest_gap']}")
        for kind in CLASSES:
            names = [row["name"] for row in found.operators if row["class"] == kind and row[key] > 0]
            own = sum(row[key] for row in found.operators if row["class"] == kind)
            yield Reading(f"{kind}_time_share", own / spent, "ratio", "measured", denominator=of,
                          note=", ".join(names)[:300], **common)

    def _overhead(self, bench, trial, found: Summary, artifact: str):
        took = bench.reading(trial, "latency_s")
        if took is None or not found.calls:
            return missing("profiler_overhead", "ratio", "no time was measured; add the probe timer", source=self.name)
        ends = {} if took.low is None else dict(low=min(found.call_seconds) / took.high,
                                                high=max(found.call_seconds) / took.low)
        return Reading("profiler_overhead", median(found.call_seconds) / took.value, "ratio", "measured",
                       method="profiler:torch, call range ÷ timer", source=self.name, n=found.calls, artifact=artifact,
                       denominator="latency_s", note="wall time under the profiler; latency_s is by the timer's clock",
                       **ends)


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
