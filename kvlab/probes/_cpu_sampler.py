"""Seconds of a call on a CPU, on the clock that suits its threads, and what the operating system counts beside it."""
from __future__ import annotations

import os
import time

from kvlab.probes._base import Bench
from kvlab.probes._clock import Summary, clock
from kvlab.record.environment import cpu_steal_seconds, last_level_cache
from kvlab.record.reading import Reading, missing


def usage():
    """What the operating system counts of this thread; None where it does not count threads (only Linux does)."""
    try:
        import resource
        return resource.getrusage(resource.RUSAGE_THREAD)
    except (ImportError, AttributeError):
        return None


class CpuSampler:
    """Seconds per call on a CPU. Every call takes the next input copy, whichever trial ran before it."""
    cap_s, target = 1.0, 0.03           # the timer's defaults on this device
    steady_samples, steady_s = 0, 0.0   # that must be there before a narrow interval ends the rounds
    spin_up_s = 0.0

    def __init__(self, bench: Bench):
        self.bench, self.clock = bench, clock(bench.comparison.trials[0].threads)
        self.method, self.turn = self.clock.method, {key: 0 for key in bench.inputs}

    def sample(self, runner, calls: int) -> float:
        key = (runner.trial.kv_format, runner.trial.layout)
        turn, todo = self.turn[key], runner.calls
        chosen = [todo[(turn + i) % len(todo)] for i in range(calls)]
        self.turn[key] = turn + calls
        now, outputs = self.clock.now, []
        used, all_threads, wall = usage(), time.process_time(), time.perf_counter()
        began = now()
        for call in chosen:
            outputs.append(call())
        seconds = now() - began
        if self.method == "timer:thread_cpu":
            runner.wall += time.perf_counter() - wall
            runner.elsewhere += time.process_time() - all_threads - seconds
            if used is not None:
                after = usage()
                runner.waits += after.ru_nvcsw - used.ru_nvcsw
                runner.faults += after.ru_minflt - used.ru_minflt
                runner.system += after.ru_stime - used.ru_stime
        for output in outputs:
            output.fill_(float("nan"))                  # a variant that hands out a kept answer hands out NaN next time
        return seconds / calls

    def awake(self, runner) -> None:
        """Nothing was learnt that a later clock would change."""

    def look(self, runner, round_: int) -> None:
        """Nothing to look at between the rounds."""

    def flags(self, runner) -> list[None]:
        """For each sample, whether the processor was slowed down: not known of a CPU."""
        return [None] * len(runner.seconds)

    def after(self, runner, cap_s: float) -> None:
        """Nothing more to measure after the rounds."""

    def close(self) -> None:
        pass

    def _touched(self, trial) -> int:
        return self.bench.comparison.touched_bytes()[trial.kv_format, trial.layout]

    def cache_state(self, trial) -> str:
        held = len(self.bench.inputs_of(trial)) * self._touched(trial)
        return ("cold (unverified)" if held >= 5 * last_level_cache()[0] else
                "warm (too few input copies: memory short or inputs tiny)")

    def warm_state(self, trial) -> str:
        return "warm" if self._touched(trial) <= last_level_cache()[0] else "warm (larger than the cache)"

    def note(self, load, steal, window) -> str:
        after = cpu_steal_seconds()
        share = None if steal is None or after is None else (after - steal) / window / (os.cpu_count() or 1)
        stolen = "" if share is None else f", steal {100 * share:.1f} %"
        return "" if load is None else f"load {load:.1f}{stolen}"

    def said(self, runner) -> str:
        """What is to be said of one trial's latency alone."""
        return ""

    def rows(self, runner, latency: Summary, common: dict):
        """Page faults and system time: what a call pays for memory that it takes anew each time."""
        source = common["source"]
        yield missing("latency_graph_s", "s", "CUDA graphs are of GPUs", source=source)
        yield missing("cycles", "count", "a CPU's cycles need its performance counters, which the timer does not read",
                      source=source)
        yield missing("throttled_samples", "ratio", "a CPU does not say why it slows down; thread CPU time and the "
                      "spread of rounds show that it did", source=source)
        if usage() is None or self.method != "timer:thread_cpu":
            why = "only counted for one thread of a CPU under Linux"
            yield missing("page_faults", "count", why, source=source)
            yield missing("system_time_share", "ratio", why, source=source)
            return
        calls = len(runner.seconds) * runner.inner
        common = {**common, "method": "counter:getrusage"}
        yield Reading("page_faults", runner.faults / calls, "count", "measured", note="per call", **common)
        yield Reading("system_time_share", min(1.0, runner.system / (sum(runner.seconds) * runner.inner)), "ratio",
                      "measured", denominator="CPU time of the call", **common)
