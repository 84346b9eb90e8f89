"""What NVIDIA's management library says while the call is looped: busy fractions, power, energy, clocks, throttling."""
from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle, product
from statistics import fmean
from typing import ClassVar

from kvlab.probes._base import Bench
from kvlab.probes._device import others
from kvlab.probes._loop import Loop, waits
from kvlab.probes._nvml import Gpu, Unavailable, gpu, why_closed
from kvlab.probes._sampler import Sampler
from kvlab.record.export import write_frame
from kvlab.record.reading import Reading, missing

ENERGY = "energy"
BUSY = {"gpu_busy_fraction": ("gpu", "share of the time in which some kernel ran, however few SMs it used; this is not "
                              "SM utilisation, which gpm and ncu read"),
        "memory_busy_fraction": ("memory", "share of the time in which device memory was read or written, however "
                                 "slowly; this is no bandwidth")}
# fields of cumulative nanoseconds in which a clock was held back -> by what
THROTTLES = {74: "power cap", 76: "sync boost", 269: "heat, by software", 270: "heat, by hardware", 271: "power brake"}
SM, MEMORY, MILLI, MEGA = 1, 2, 1e-3, 1e6
UNCORRECTED, SINCE_LOADED = 1, 0


@dataclass(frozen=True)
class Edge:
    """Counters at one edge of a window: a number, or why there is none."""
    at: float
    counters: dict[str, float | Unavailable]


@dataclass(frozen=True)
class Nvml:
    """NVML's sensors over a window of looped calls on rotating inputs, and the GPU's idle power once per comparison.

    window_s: length of the loop; lead_s: calls before it, since power_average is a mean of the last second and the
    busy fractions one of 1/6 to 1 s. Whole-GPU numbers: they hold other processes' work as well (other_processes).
    energy_per_call: its interval is what the counter may lag behind at both edges, one of its updates; how long these
    take is learnt from the samples. Absent library, device or sensor: missing, with the reason. Source: nvml.h.
    """
    window_s: float = 2.0
    lead_s: float = 1.0
    name: ClassVar[str] = "nvml"
    metrics: ClassVar[dict[str, str]] = {
        "gpu_busy_fraction": "ratio", "memory_busy_fraction": "ratio", "power_instant": "W", "power_average": "W",
        "idle_power": "W", "energy_per_call": "J", "sm_clock": "Hz", "memory_clock": "Hz", "temperature": "degC",
        "throttled_share": "ratio", "memory_used": "B", "memory_reserved": "B", "ecc_errors": "count",
        "other_processes": "count"}
    needs: ClassVar[tuple[str, ...]] = ("kernel_error",)
    rotates: ClassVar[bool] = True

    def why_not(self, trial):
        if why := why_closed():
            return why
        return None if trial.device.startswith("cuda") else f"NVML watches NVIDIA GPUs, not the device {trial.device}"

    def measure(self, bench: Bench):
        trials, found, telemetry = list(bench.trials), [], []
        try:
            with gpu(bench.comparison.device) as one:
                watched = _Watched(one, bench.comparison.device)
                found.append((None, self._idle(watched, bench.comparison, telemetry)))
                for trial in trials:
                    with bench.on(trial):
                        loop = Loop(trial.prepare(bench.inputs_of(trial)), trial.device)
                        found += [(trial, reading) for reading in self._window(watched, loop, trial, telemetry)]
        except Unavailable as why:                                   # the library opens, and this GPU is not in it
            for trial, (metric, unit) in product(trials, self.metrics.items()):
                yield trial, missing(metric, unit, str(why), source=self.name)
            return
        artifact = _keep(bench, telemetry)
        yield from ((trial, reading if reading.kind == "missing" else replace(reading, artifact=artifact))
                    for trial, reading in found)

    def _idle(self, watched: _Watched, comparison, telemetry: list) -> Reading:
        name = "power_instant"
        sampler, wait = Sampler({name: watched.sensors[name]}), waits(comparison.device)
        wait()
        with sampler.running():
            time.sleep(self.lead_s)
            sampler.read()
            began = time.perf_counter()
            time.sleep(self.window_s)
            ended = time.perf_counter()
            sampler.read()
        telemetry += _told(comparison.comparison_id, sampler)
        return self._mean("idle_power", sampler, name, began, ended,
                          "no call ran: what energy_per_call holds of this power is not taken off", watched.note)

    def _window(self, watched: _Watched, loop: Loop, trial, telemetry: list):
        sampler, others_seen = Sampler({**watched.sensors, ENERGY: watched.energy}), [others(watched.gpu)]
        opening = cycle((True, False))

        def edge() -> Edge:
            # energy is read right beside the calls: while all else is asked the GPU idles
            if opens := next(opening):
                sampler.read()
            at, counters = time.perf_counter(), watched.counters(energy_last=opens)
            if not opens:
                sampler.read()
            return Edge(at, counters)
        with sampler.running():
            n = loop.lasting(self.lead_s)
            began = time.perf_counter()
            loop.run(n)
            pace = (time.perf_counter() - began) / n                 # as fast as it is once warm
            window = None
            while window is None or window.seconds < self.window_s:  # the lead-in may have been slower
                pace = pace if window is None else window.seconds / window.calls
                window = loop.window(max(2, math.ceil(1.05 * self.window_s / pace)), edge)
        others_seen.append(others(watched.gpu))
        telemetry += _told(trial.case_id, sampler)
        began, ended = window.after.at - window.seconds, window.after.at
        for name in watched.sensors:
            yield self._mean(name, sampler, name, began, ended, watched.notes.get(name, ""), watched.note)
        yield self._energy(watched, window, _update_s(sampler))
        yield self._throttled(watched, window)
        yield self._errors(watched, window)
        yield self._others(others_seen)

    def _mean(self, metric: str, sampler: Sampler, name: str, began: float, ended: float, *notes: str) -> Reading:
        values = sampler.between(name, began, ended)
        if name in sampler.refused or not values:
            return self._none(metric, sampler.refused.get(name, "the window held no sample"))
        return self._reading(metric, fmean(values), ended - began, *notes, n=len(values), low=min(values),
                             high=max(values))

    def _energy(self, watched: _Watched, window, update_s: float | None) -> Reading:
        metric, spent = "energy_per_call", _moved(window, ENERGY)
        if isinstance(spent, Unavailable):
            return self._none(metric, str(spent))
        if spent == 0:
            return self._none(metric, f"the energy counter stood still for {window.seconds:.3g} s: take a longer "
                                      "window_s")
        value, ends, told = spent * MILLI / window.calls, {}, "no interval: its updates were not seen"
        if update_s is not None:
            lag = min(1.0, update_s / window.seconds)
            ends, told = dict(low=value * (1 - lag), high=value * (1 + lag)), f"interval: one update, {update_s:.2g} s"
        return self._reading(metric, value, window.seconds, watched.note, "difference of the energy counter over the "
                             f"window; idle power is part of it; {told}", n=window.calls, **ends)

    def _throttled(self, watched: _Watched, window) -> Reading:
        metric, shares, why = "throttled_share", {}, {}
        for number, name in THROTTLES.items():
            moved = _moved(window, number)
            if isinstance(moved, Unavailable):
                why[name] = str(moved)
            else:
                shares[name] = moved / 1e9 / (window.after.at - window.before.at)
        if not shares:
            return self._none(metric, "; ".join(dict.fromkeys(why.values())))
        most = max(shares.values())
        if most > 1.1:                                               # some drivers have counted in another unit
            return self._none(metric, f"its counters moved {most:.3g} times as fast as time: they are no nanoseconds")
        active = ", ".join(f"{name} {share:.3g}" for name, share in shares.items() if share)
        unread = f"not told: {', '.join(why)}" if why else ""
        return self._reading(metric, min(1, most), window.seconds, f"by reason: {active or 'none'}; several can hold "
                             "at once", unread, watched.note, low=min(1, most), high=min(1, sum(shares.values())))

    def _errors(self, watched: _Watched, window) -> Reading:
        metric, total, new = "ecc_errors", window.after.counters["ecc"], _moved(window, "ecc")
        if isinstance(new, Unavailable):
            return self._none(metric, watched.ecc_off or str(new))
        return self._reading(metric, total, window.seconds, f"uncorrected, since the driver was loaded; {new} of them "
                             "in the window", watched.note)

    def _others(self, seen: list[tuple[int | None, str]]) -> Reading:
        told = [one for one in seen if one[0] is not None]
        if len(told) < len(seen):
            return self._none("other_processes", next(words for count, words in seen if count is None))
        count, words = max(told)
        return self._reading("other_processes", count, None, words)

    def _reading(self, metric: str, value: float, window_s: float | None, *notes: str, **fields) -> Reading:
        return Reading(metric, value, self.metrics[metric], "measured", method="sensor", source=self.name,
                       scope="device", window_s=window_s, note="; ".join(filter(None, notes)), **fields)

    def _none(self, metric: str, why: str) -> Reading:
        return missing(metric, self.metrics[metric], why, source=self.name)


class _Watched:
    """The sensors of one GPU in the units of the rows, with what must be said beside them."""

    def __init__(self, one: Gpu, device: str):
        import pynvml
        self.gpu, whole = one, one.whole
        self.notes = {metric: words for metric, (_, words) in BUSY.items()}
        self.notes["memory_used"] = "by all processes on the GPU, without what the driver keeps (memory_reserved)"
        average, self.notes["power_average"] = _average_power(whole, device)
        self.sensors: dict[str, Callable[[], float]] = {
            **{metric: lambda key=key: one.ask("DeviceGetUtilizationRates")[key] / 100
               for metric, (key, _) in BUSY.items()},
            "power_instant": lambda: whole.field(186) * MILLI,
            "power_average": average,
            "sm_clock": lambda: _clock(whole, SM),
            "memory_clock": lambda: _clock(whole, MEMORY),
            "temperature": lambda: whole.ask("DeviceGetTemperature", 0),
            "memory_used": lambda: one.ask("DeviceGetMemoryInfo", pynvml.nvmlMemory_v2)["used"],
            "memory_reserved": lambda: one.ask("DeviceGetMemoryInfo", pynvml.nvmlMemory_v2)["reserved"],
        }
        self.energy = lambda: whole.ask("DeviceGetTotalEnergyConsumption")
        self._counted = {ENERGY: self.energy,
                         "ecc": lambda: one.ask("DeviceGetTotalEccErrors", UNCORRECTED, SINCE_LOADED),
                         **{number: lambda number=number: whole.field(number) for number in THROTTLES}}
        self.note, self.ecc_off = _mig(one), _ecc_off(one)

    def counters(self, energy_last: bool) -> dict[str, float | Unavailable]:
        names = list(self._counted)
        return {name: _try(self._counted[name]) for name in (reversed(names) if energy_last else names)}


def _try(read: Callable):
    try:
        return read()
    except Unavailable as why:
        return why


def _moved(window, name) -> float | Unavailable:
    """What a counter counted between the edges of a window."""
    before, after = window.before.counters[name], window.after.counters[name]
    for one in (before, after):
        if isinstance(one, Unavailable):
            return one
    if after < before:
        return Unavailable(f"its counter went backwards in the window (from {before:,} to {after:,}): it wrapped or "
                           "was reset")
    return after - before


def _update_s(sampler: Sampler) -> float | None:
    """Seconds between two updates of the energy counter at the most; None where fewer than two were seen.

    A change lies between the sample before it and the one that shows it: so the shortest time from one to the next.
    """
    seen = [(at, value) for at, name, value in sampler.samples if name == ENERGY]
    changes = [(before, at) for (before, old), (at, new) in zip(seen, seen[1:]) if new != old]
    return min((at - before for (before, _), (_, at) in zip(changes, changes[1:])), default=None)


def _clock(whole: Gpu, which: int) -> float:
    """Hz."""
    if not (mhz := whole.ask("DeviceGetClockInfo", which)):
        raise Unavailable("the clock reads 0 MHz: NVML does not know it here, as on some virtual GPUs")
    return mhz * MEGA


def _average_power(whole: Gpu, device: str) -> tuple[Callable[[], float], str]:
    """How the average power is read on this GPU, in W, and what it is."""
    try:
        whole.field(185)
        return lambda: whole.field(185) * MILLI, "field 185, the mean of about the last second at each sample"
    except Unavailable:
        import torch
        of_old = torch.cuda.get_device_capability(device) <= (8, 0)
        return (lambda: whole.ask("DeviceGetPowerUsage") * MILLI,
                "DeviceGetPowerUsage, for this driver has no field 185: on this architecture "
                + ("an instantaneous value, of which this is the mean over the window" if of_old else
                   "the mean of the last second"))


def _mig(one: Gpu) -> str:
    if one.slice_of is not None:
        return ("a MIG slice: power, energy, clocks, temperature and throttling are of the whole GPU and hold its "
                "other slices' work")
    mode = _try(lambda: one.ask("DeviceGetMigMode"))
    return "MIG is on and this is the whole GPU" if not isinstance(mode, Unavailable) and mode[0] else ""


def _ecc_off(one: Gpu) -> str:
    mode = _try(lambda: one.ask("DeviceGetEccMode"))
    return "" if isinstance(mode, Unavailable) or mode[0] else "ECC is switched off on this GPU: nothing is counted"


def _told(case_id: str, sampler: Sampler) -> list[tuple]:
    return [(case_id, at, metric, value) for at, metric, value in sampler.samples]


def _keep(bench: Bench, telemetry: list[tuple]) -> str:
    """The samples as telemetry/<comparison>.parquet, in seconds since the first; the name, "" where nothing is kept."""
    if bench.artifacts is None or not telemetry:
        return ""
    import pandas as pd
    frame = pd.DataFrame(telemetry, columns=["case_id", "seconds", "metric", "value"])
    frame["seconds"] -= frame["seconds"].min()
    name = f"telemetry/{bench.comparison.comparison_id}.parquet"
    (bench.artifacts / "telemetry").mkdir(parents=True, exist_ok=True)
    write_frame(frame, bench.artifacts / name)
    return name
