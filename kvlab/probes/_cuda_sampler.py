"""Seconds of a call on a GPU: CUDA events around calls on rotating inputs, the L2 flushed before each."""
from __future__ import annotations

import time
from statistics import median, quantiles

from kvlab.kernels.flush import Flush
from kvlab.probes._base import Bench, Broken
from kvlab.probes._clock import Summary, summarise
from kvlab.probes._cuda_graph import NotCaptured, captured
from kvlab.probes._sm_clock import SmClock
from kvlab.record.reading import Reading, missing

SHORT = 50e-6           # seconds of a call below which its launches by the host would be timed as well
BATCH = 20              # calls behind one blocking kernel: CUDA queues about a thousand launches
LONGEST_BLOCK = 0.02    # seconds
APART = 0.05            # share by which two ways of timing may differ before it is said


class CudaSampler:
    """Seconds per call on a GPU from CUDA events, cold: inputs rotate, and a read of twice the L2 precedes each call.

    The flush comes before the start event, so that it evicts and is not timed. Calls below 50 µs are queued behind a
    blocking kernel, so that no launch lies between the events. Between the rounds NVML is asked for the SM clock and
    for what slows it down.
    """
    method = "timer:cuda_events"
    cap_s, target = 15.0, 0.005         # the timer's defaults on this device
    steady_samples, steady_s = 30, 0.1  # that must be there before a narrow interval ends the rounds
    spin_up_s = 0.2                     # of calls before the first sample: clocks rise with work

    def __init__(self, bench: Bench):
        import torch
        self.cuda, self.bench, self.turn = torch.cuda, bench, {key: 0 for key in bench.inputs}
        self.flush, self.clock = Flush(bench.comparison.device), SmClock(bench.comparison.device)
        self.l2 = torch.cuda.get_device_properties(bench.comparison.device).L2_cache_size
        self._cycles_per_s: float | None = None

    def sample(self, runner, calls: int) -> float:
        key = (runner.trial.kv_format, runner.trial.layout)
        turn, todo = self.turn[key], runner.calls
        chosen = [todo[(turn + i) % len(todo)] for i in range(calls)]
        self.turn[key] = turn + calls
        return sum(self._batch(runner, chosen[at:at + BATCH]) for at in range(0, calls, BATCH)) / calls

    def _batch(self, runner, chosen: list) -> float:
        """Seconds of these calls. The first batch of a trial tells how long launches take, the second whether they
        have to be queued beforehand."""
        events = [[self.cuda.Event(enable_timing=True) for _ in range(2)] for _ in chosen]
        queued = runner.launch_s is not None and runner.short is not False
        if queued:
            self._block(2 * runner.launch_s * len(chosen))
        began = time.perf_counter()
        for call, (start, end) in zip(chosen, events):
            if runner.cold:
                self.flush()
            start.record()
            output = call()
            end.record()
            output.fill_(float("nan"))                  # a variant that hands out a kept answer hands out NaN next time
        launched = (time.perf_counter() - began) / len(chosen)
        events[-1][1].synchronize()
        total = sum(start.elapsed_time(end) for start, end in events) / 1e3
        runner.launch_s = launched if runner.launch_s is None else min(launched, runner.launch_s)
        if queued and runner.short is None:
            runner.short = total / len(chosen) < SHORT
        return total

    def _block(self, seconds: float) -> None:
        """Keep the GPU busy, so that what is asked of it meanwhile waits in its queue."""
        if self._cycles_per_s is None:
            start, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
            for cycles in (10**4, 10**6):                            # the first loads the kernel
                start.record()
                self.cuda._sleep(cycles)
                end.record()
                end.synchronize()
            self._cycles_per_s = 1e3 * cycles / max(start.elapsed_time(end), 1e-3)
        self.cuda._sleep(int(min(seconds, LONGEST_BLOCK) * self._cycles_per_s))

    def awake(self, runner) -> None:
        """Forget what was learnt before the clocks had risen: cycles of a second, and whether a call is short."""
        self._cycles_per_s = runner.short = None

    def look(self, runner, round_: int) -> None:
        """The SM clock right after a round's samples."""
        runner.looks[round_] = self.clock.look()

    def flags(self, runner) -> list[bool | None]:
        """For each sample, whether the GPU was slowed down in its round; None where NVML does not tell."""
        slowed = {round_: look.slowed(self.clock.fastest) for round_, look in runner.looks.items()}
        return [slowed.get(round_) for round_ in runner.rounds]

    def after(self, runner, cap_s: float) -> None:
        """Work that nobody waits for is found, and the calls are timed as one CUDA graph."""
        if runner.slow:
            runner.graph = "one call takes longer than the time cap"
            return
        self._awaited(runner)
        copies, touched = len(runner.calls), self._touched(runner.trial)
        if copies * touched < 5 * self.l2:
            runner.graph = (f"{copies} input copies of {touched:,} bytes are less than five times the L2 "
                            f"({self.l2:,} bytes): a graph of as many calls would find them there")
            return
        try:
            runner.graph = self._graph(captured(runner.calls), copies, cap_s)
        except NotCaptured as why:
            runner.graph = str(why)

    def _awaited(self, runner) -> None:
        """Fails a trial that leaves work on another stream: the events saw the current one only.

        After its end event nothing is left to be done, so that waiting for the whole GPU takes what it takes after no
        call at all. Quartiles, so that a busy host is not taken for it.
        """
        seen = median(runner.used)
        tries = 20 if seen < 1e-3 else 5
        _, _, idle = quantiles(self._left([lambda: None] * tries))
        after, _, _ = quantiles(self._left([runner.calls[i % len(runner.calls)] for i in range(tries)]))
        left = after - idle
        if left > max(1e-5, seen / 10):
            raise Broken(f"it leaves work on a stream that the current one does not wait for: events see {seen:.2g} s, "
                         f"and then the GPU works on for {left:.2g} s; let the current stream wait for the other "
                         "(torch.cuda.current_stream().wait_stream) before the call returns")

    def _left(self, calls: list) -> list[float]:
        """Seconds for which the GPU works on after each call's end event."""
        end, left = self.cuda.Event(enable_timing=True), []
        for call in calls:
            self.cuda.synchronize()
            call()
            end.record()
            end.synchronize()
            began = time.perf_counter()
            self.cuda.synchronize()
            left.append(time.perf_counter() - began)
        return left

    def _graph(self, graph, copies: int, cap_s: float) -> list[float]:
        """Seconds per call of one graph of a call on each input copy, replayed."""
        start, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
        seconds, launch_s, began = [], None, time.perf_counter()
        while not seconds or time.perf_counter() - began < cap_s / 4:
            if launch_s is not None:
                self._block(2 * launch_s)                            # the launch of the graph is not timed either
            start.record()
            asked = time.perf_counter()
            graph.replay()
            launch_s = min(time.perf_counter() - asked, launch_s or 1.0)
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3 / copies)
            if len(seconds) > self.steady_samples and sum(seconds) * copies >= self.steady_s:
                break
        return seconds[1:] or seconds                                # the first loads the graph onto the GPU

    def close(self) -> None:
        self.clock.close()

    def _touched(self, trial) -> int:
        return self.bench.comparison.touched_bytes()[trial.kv_format, trial.layout]

    def cache_state(self, trial) -> str:
        return "cold (unverified)"

    def warm_state(self, trial) -> str:
        return "warm" if self._touched(trial) <= self.l2 else "warm (larger than the cache)"

    def note(self, load, steal, window) -> str:
        return "CUDA events around each call; L2 flushed before by a read of twice its size"

    def said(self, runner) -> str:
        """What is to be said of one trial's latency alone."""
        queue = ("queued behind a blocking kernel: no launch by the host is timed" if runner.short else
                 "not queued beforehand: launches that the GPU had to wait for are in the time")
        return "; ".join(filter(None, (queue, self._apart(runner))))

    def _apart(self, runner) -> str:
        if not isinstance(runner.graph, list):
            return ""
        ratio = median(runner.graph) / max(median(runner.used), 1e-12)
        return "" if abs(ratio - 1) <= APART else f"as a CUDA graph a call takes {ratio:.2f} of that"

    def rows(self, runner, latency: Summary, common: dict):
        """Time by graph, cycles, and how many samples were taken while something slowed the GPU down."""
        source = common["source"]
        for metric, unit in (("page_faults", "count"), ("system_time_share", "ratio")):
            yield missing(metric, unit, "only counted for one thread of a CPU under Linux", source=source)
        if isinstance(runner.graph, str):
            yield missing("latency_graph_s", "s", runner.graph, source=source)
        else:
            s, apart = summarise(runner.graph), self._apart(runner)
            yield Reading("latency_graph_s", s.median, "s", "measured", method="timer:cuda_graph", source=source, n=s.n,
                          low=s.low, high=s.high, rel_std=s.rel_std, cache_state="cold (by rotation, unverified)",
                          note=f"one graph of {len(runner.calls)} calls, each on its own input copy" + (
                              f"; more than {100 * APART:.0f} % from latency_s: {apart}" if apart else ""))
        yield self._cycles(runner, latency, common)
        flags = [flag for flag in self.flags(runner) if flag is not None]
        if flags:
            yield Reading("throttled_samples", sum(flags) / len(flags), "ratio", "measured", method="sensor",
                          source=source, scope="device", n=len(flags), denominator="samples", note=(
                              "a reason to slow down, or an SM clock below 75 % of the fastest seen, after the round"))
        else:
            yield missing("throttled_samples", "ratio", self._silent(), source=source)

    def _cycles(self, runner, latency: Summary, common: dict) -> Reading:
        looks = [runner.looks[r] for r in dict.fromkeys(runner.used_rounds) if r in runner.looks]
        told = [look.hz for look in looks if look.hz is not None]
        if not any(told):
            why = "NVML says that the SM clock is 0: time is known, cycles are not" if told else self._silent()
            return missing("cycles", "count", why, source=common["source"])
        clock = summarise([hz for hz in told if hz])
        ends = {} if None in (latency.low, clock.low) else dict(low=latency.low * clock.low,
                                                                high=latency.high * clock.high)
        return Reading("cycles", latency.median * clock.median, "count", "measured", note=(
            f"time × median SM clock of {clock.n} rounds ({clock.median / 1e6:.0f} MHz)"), **ends,
            **{**common, "method": "derived"})

    def _silent(self) -> str:
        return self.clock.why or "NVML was not asked: no round was finished"
