"""SM utilisation and memory traffic of a looped call by NVIDIA's GPU performance monitoring (Hopper and newer)."""
from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from kvlab.probes._base import Bench, room_on
from kvlab.probes._gpm import REFRESH_S, UTILISATION, Calibration, Counted, Meter, copies_of, per_call
from kvlab.probes._known import Operation
from kvlab.probes._loop import Loop
from kvlab.probes._nvml import Gpu, Unavailable, gpu, why_closed
from kvlab.probes._traffic import TRAFFIC, traffic
from kvlab.record.reading import Reading, missing

NOT_SUPPORTED = 3               # NVML's code
UNSPLIT = "GPM counts reads and writes together; the probe ncu tells them apart"
# what the time of a window is multiplied by. Not what ncu divides by: it leaves out what lies between kernels
OF = {"sm_utilization": "SMs", "sm_occupancy": "warps that fit", "tensor_utilization": "tensor pipes",
      "dram_utilization": "DRAM at its peak"}
# (device, buffer bytes) -> once per process, a failure too: it took as long, and the next case would find the same
_calibrated: dict[tuple[str, int], Calibration | Unavailable] = {}


@dataclass(frozen=True)
class Gpm:
    """Share of SMs at work, occupancy, tensor pipes and memory traffic per call, over windows of calls back to back.

    bytes = (DRAM utilisation − idle) × 2 · memory clock (Hz) · bus width (bits) ÷ 8 × κ × seconds; per call the slope
    between windows of n and 2n calls on rotating inputs. κ is calibrated in the same process by a copy and a read of
    known size, and refused (bytes missing, with the numbers) where these differ by over 5 % or it is over 10 % from 1.
    window_s: of n calls; NVIDIA allows 0.1 s at least. buffer_bytes: of what calibrates. heard: where given, NVML's
    answers are appended to it, to be replayed. Counts the whole GPU (or MIG slice), other processes included.
    Source: NVML API reference, GPM (nvmlGpmMetricsGet); NVIDIA/DCGM#310 on the shortest window.
    """
    window_s: float = 1.0
    buffer_bytes: int = 2**30
    heard: list | None = field(default=None, compare=False, repr=False)
    name: ClassVar[str] = "gpm"
    metrics: ClassVar[dict[str, str]] = {**TRAFFIC, **dict.fromkeys(UTILISATION, "ratio"), "gpm_kappa": "ratio"}
    needs: ClassVar[tuple[str, ...]] = ("kernel_error", "timer", "roofline")
    rotates: ClassVar[bool] = True

    def why_not(self, trial):
        if why := why_closed():
            return why
        if not trial.device.startswith("cuda"):
            return f"GPM counts on NVIDIA GPUs, not on the device {trial.device}"
        try:
            with gpu(trial.device) as one:
                return _unsupported(one)
        except Unavailable as why:
            return str(why)

    def measure(self, bench: Bench):
        device = bench.comparison.device
        try:
            with gpu(device, self.heard) as one:
                yield from self._bench(bench, Meter(one, device, self.window_s))
        except Unavailable as why:                                   # the library closed between why_not and now
            for trial in bench.trials:
                yield from ((trial, reading) for reading in self._missing(self.metrics, why))

    def operation(self, op: Operation) -> list[Reading]:
        """The same readings of a copy, a read or a matrix product; missing with the reason where there are none."""
        if why := self.why_not(op):
            return self._missing(self.metrics, why)
        try:
            with gpu(op.device, self.heard) as one:
                meter = Meter(one, op.device, self.window_s)
                known, about = self.calibration(meter)
                loop = Loop(op.calls(copies_of(op)), op.device)
                return [about, *self._readings(op, meter, loop, known, "cold (unverified)", [])]
        except Unavailable as why:
            return self._missing(self.metrics, why)

    def _bench(self, bench, meter):
        known, about = self.calibration(meter)
        yield None, about
        cache, touched = room_on(meter.device)[1], bench.comparison.touched_bytes()
        for trial in list(bench.trials):
            with bench.on(trial):
                inputs = bench.inputs_of(trial)
                cold = len(inputs) * touched[trial.kv_format, trial.layout] >= 5 * cache
                state = "cold (unverified)" if cold else "warm (too few input copies: memory short or inputs tiny)"
                loop = Loop(trial.prepare(inputs), meter.device)
                try:
                    found = self._readings(trial, meter, loop, known, state, _beside(bench, trial))
                except Unavailable as why:                           # NVML's fault, not the trial's
                    found = self._missing([m for m in self.metrics if m != "gpm_kappa"], why)
                for reading in found:
                    yield trial, reading

    def calibration(self, meter: Meter) -> tuple[Calibration | Unavailable, Reading]:
        """What turns utilisation into bytes here, or why nothing does; and the row about it."""
        key = meter.device, self.buffer_bytes
        known, again = _calibrated.get(key), " at the first try in this process"
        if known is None:
            room, again = _or_why(meter.room_for, self.buffer_bytes), ""        # not kept: a smaller case leaves more
            known = room
            if not isinstance(room, Unavailable):
                known = _calibrated[key] = _or_why(meter.calibrate, room)
        if isinstance(known, Unavailable):
            note = f"κ could not be calibrated{again}: {known}"
            return _afresh(known), missing("gpm_kappa", "ratio", note, source=self.name)
        floor = known.idle.shares["dram_utilization"]
        note = f"copy {known.copy:.4f}, read {known.read:.4f}; memory of the idle GPU busy {floor:.2%}"
        if why := known.why_refused:
            return Unavailable(why), missing("gpm_kappa", "ratio", f"refused: {why}", source=self.name)
        return known, Reading("gpm_kappa", known.kappa, "ratio", "measured", method="derived", source=self.name, n=2,
                              scope="device", low=min(known.copy, known.read), high=max(known.copy, known.read),
                              denominator="2 × memory clock × bus width", note=note)

    def _readings(self, case, meter, loop, known, cache_state, beside) -> list[Reading]:
        first, second = meter.pair(loop)
        where = "a slice of the GPU (MIG); clock and bus width are the whole GPU's" if meter.gpu.slice_of else ""
        common = dict(source=self.name, scope="device", n=2, window_s=first.seconds + second.seconds,
                      cache_state=cache_state)
        windows = f"windows of {first.calls:,} and {second.calls:,} calls"
        found = [self._share(metric, first, second, {
            **common, "note": "; ".join(filter(None, [*_said(metric, second, beside), windows, where]))})
            for metric in UTILISATION]
        try:
            if isinstance(known, Unavailable):
                raise known
            total, low, high = bounded(first, second, known)
            note = (f"slope between {windows}; interval: slope and longer window, widened by {REFRESH_S:g} s (GPM's "
                    "refresh) ÷ the seconds by which they differ, and by half the difference of the κ of copy and read")
            found += traffic(case, total=total, unsplit=UNSPLIT, cache_bytes=room_on(meter.device)[1], kind="measured",
                             low=low, high=high, method="derived",
                             note="; ".join(filter(None, [note, where])), **common)
        except Unavailable as why:
            found += self._missing(TRAFFIC, why)
        return found

    def _share(self, metric, first, second, common) -> Reading:
        a, b = first.shares[metric], second.shares[metric]
        for value in (b, a):
            if isinstance(value, Unavailable):
                return missing(metric, "ratio", str(value), source=self.name)
        return Reading(metric, b, "ratio", "measured", method="counter", low=min(a, b), high=max(a, b),
                       denominator=f"{OF[metric]}, over the whole window", **common)

    def _missing(self, metrics, why) -> list[Reading]:
        return [missing(metric, self.metrics[metric], str(why), source=self.name) for metric in metrics]


def bounded(first: Counted, second: Counted, known: Calibration) -> tuple[float, float, float]:
    """Bytes per call with their interval (bytes).

    The interval holds the slope and the longer window by itself, widened by one refresh of GPM against the seconds by
    which the windows differ and by half the disagreement of the two κ, which are independent: root of the squares.
    """
    slope, more = per_call(first, second, known.idle, known.kappa), second.seconds - first.seconds
    if more <= 0:
        raise Unavailable(f"{second.calls:,} calls took no longer than {first.calls:,}: the GPU was disturbed; measure "
                          "again")
    whole = second.bytes(known.idle, known.kappa) / second.calls
    wide = math.hypot(REFRESH_S / more, known.apart / 2)
    return slope, max(0.0, min(slope, whole) * (1 - wide)), max(slope, whole) * (1 + wide)


def _or_why(of, *arguments):
    try:
        return of(*arguments)
    except Unavailable as why:
        return _afresh(why)


def _afresh(why: Unavailable) -> Unavailable:
    """The reason without its traceback, whose frames would keep buffers on the GPU as long as it is kept."""
    return Unavailable(str(why), why.code)


def _unsupported(one: Gpu) -> str | None:
    """Why this GPU has no GPM, in one sentence. A sample decides: GpmQueryDeviceSupport is only what NVML thinks."""
    try:
        one.free(one.gpm_sample())
        return None
    except Unavailable as why:
        if why.code != NOT_SUPPORTED:
            return str(why)
    return ("this GPU has no performance monitoring through NVML (GPM): it needs Hopper or newer; use the probe ncu")


def _beside(bench, trial) -> list[Reading | None]:
    """What other probes found that says how to read the utilisation: share of the matmul ceiling, and time per call.

    The time is that of a CUDA graph: others hold gaps between launches, which calls back to back do not have.
    """
    return [bench.reading(trial, "latency_graph_s"), bench.reading(trial, "flops_share", "modelled")]


def _said(metric: str, window: Counted, beside) -> list[str]:
    """Utilisation is not usefulness: what the same call does of useful work, and how much of the window calls fill."""
    busy = window.shares[metric]
    if metric != "sm_utilization" or not beside or isinstance(busy, Unavailable):
        return []
    took, useful = beside
    said = [] if useful is None else [f"SM utilisation {100 * busy:.3g} %, useful flops {100 * useful.value:.3g} % of "
                                      "the matmul ceiling"]
    if took is not None:
        said.append(f"calls fill {took.value * window.calls / window.seconds:.0%} of the window by the timer's graph")
    return said
