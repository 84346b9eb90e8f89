"""Time of one call: trials interleaved over rounds, inputs rotating, outputs poisoned and checked again."""
from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, field
from typing import ClassVar

from kvlab.probes._base import Bench, Broken
from kvlab.probes._clock import Summary, clock, summarise
from kvlab.probes._expected import Expected, overwrite
from kvlab.record.environment import cpu_steal_seconds, last_level_cache, load_average
from kvlab.record.reading import Reading, missing


@dataclass
class Runner:
    """One trial's calls and samples."""
    trial: object
    calls: list
    prepare_s: float
    inner: int = 1                              # calls of one sample, so that a sample is long against the clock
    seconds: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    spent: float = 0.0                          # wall seconds of the rounds
    wall: float = 0.0                           # wall seconds inside the samples
    elsewhere: float = 0.0                      # CPU seconds of other threads of the process during the samples
    waits: int = 0                              # times that the thread gave the processor away of its own accord
    faults: int = 0                             # pages of memory that were touched for the first time
    system: float = 0.0                         # CPU seconds inside the operating system
    done: bool = False
    slow: bool = False                          # one call takes ten times the cap: a single sample, and no more


@dataclass(frozen=True)
class Timer:
    """Median seconds of one call with its 95 % interval, cold, as a decode step would find the cache.

    cap_s: seconds of measuring a trial may take; target: relative half width of the interval at which it stops
    before. Both default by device (CPU 1 s and 3 %, CUDA 15 s and 0.5 %). At least `rounds` rounds and
    min_samples samples are taken even where that exceeds the cap, unless one call alone takes ten times the cap.
    Failed: a trial that is wrong on changed inputs afterwards, or whose thread is timed while others do its work.
    """
    cap_s: float | None = None
    target: float | None = None
    rounds: int = 3
    min_samples: int = 5
    name: ClassVar[str] = "timer"
    metrics: ClassVar[dict[str, str]] = {"latency_s": "s", "latency_p5": "s", "latency_p95": "s", "prepare_s": "s",
                                            "page_faults": "count", "system_time_share": "ratio"}
    needs: ClassVar[tuple[str, ...]] = ("kernel_error",)
    rotates: ClassVar[bool] = True

    def why_not(self, trial):
        return None

    def measure(self, bench: Bench):
        cuda = bench.comparison.device.startswith("cuda")
        cap_s = self.cap_s or (15.0 if cuda else 1.0)
        target = self.target or (0.005 if cuda else 0.03)
        sampler = CudaSampler(bench) if cuda else CpuSampler(bench)
        load, steal, began = load_average(), cpu_steal_seconds(), time.perf_counter()
        runners = self._warmed(bench, sampler)
        order, round_ = random.Random(bench.comparison.trials[0].seed), 0
        while any(not r.done and r.trial in bench.trials for r in runners):
            # a trial that has enough goes on while others have not, or their medians would be of different minutes
            standing = [r for r in runners if r.trial in bench.trials and not r.slow]
            order.shuffle(standing)
            for runner in standing:
                with bench.on(runner.trial):
                    self._round(runner, sampler, round_, cap_s)
            round_ += 1
            for runner in standing:
                self._stop(runner, round_, cap_s, target)
        self._recheck(bench, runners)
        window = time.perf_counter() - began
        note = sampler.note(load, steal, window)
        artifact = self._keep_samples(bench, runners)
        for runner in runners:
            if runner.trial in bench.trials:
                yield from self._readings(runner, sampler, window, note, artifact)

    def _warmed(self, bench, sampler) -> list[Runner]:
        """Prepared calls, run for 25 ms or 10 times (once where a call takes longer) on the same rotating inputs."""
        runners = []
        for trial in list(bench.trials):
            with bench.on(trial):
                began = time.perf_counter()
                calls = trial.prepare(bench.inputs_of(trial))
                runner = Runner(trial, calls, (time.perf_counter() - began) / len(calls))
                seconds = []                                         # wall: a call that waits takes no CPU time
                while sum(seconds) < 0.025 and len(seconds) < 10 or len(seconds) == 1 and seconds[0] < 1:
                    began = time.perf_counter()
                    sampler.sample(runner, 1)
                    seconds.append(time.perf_counter() - began)
                runner.inner = max(1, min(100, int(1e-3 / min(seconds))))
                runners.append(Runner(trial, calls, runner.prepare_s, runner.inner))
        return runners

    def _round(self, runner, sampler, round_, cap_s) -> None:
        """One trial's share of a round: a sixth of its time, 0.3 s at most, at least one sample."""
        began = time.perf_counter()
        while True:
            runner.seconds.append(sampler.sample(runner, runner.inner))
            runner.rounds.append(round_)
            if time.perf_counter() - began >= min(0.3, cap_s / self.rounds / 2):
                break
        runner.spent += time.perf_counter() - began

    def _stop(self, runner, rounds, cap_s, target) -> None:
        runner.slow = runner.spent > 10 * cap_s * len(runner.seconds)
        enough = rounds >= self.rounds and len(runner.seconds) >= self.min_samples
        if runner.slow or enough and (runner.spent >= cap_s
                                      or summarise(runner.seconds, 200).rel_half_width <= target):
            runner.done = True

    def _recheck(self, bench, runners) -> None:
        """After the clock: the last copy is overwritten in place, K and V by their negatives; outputs must follow.

        The last one, since copy 0 is what kernel_error judged: a variant that planned for that one alone is found out.
        """
        import torch
        copies = next(iter(bench.inputs.values()))
        first, last = copies[0], copies[-1]
        kept = last.q_TQD.clone()
        generator = torch.Generator(kept.device).manual_seed(last.seed + 10**6)
        changed = torch.randn(kept.shape, generator=generator, device=kept.device).to(kept.dtype)
        for others in bench.inputs.values():
            overwrite(others[-1], (-k for k in first.k), (None if v is None else -v for v in first.v))
        expected = Expected(bench, copy=-1)
        for runner in runners:
            last.q_TQD.copy_(changed)
            if runner.trial in bench.trials:
                with bench.on(runner.trial):
                    self._judge(runner, expected)
        last.q_TQD.copy_(kept)
        if len(copies) == 1:                                         # it is copy 0, which others work on as well
            for (only,) in bench.inputs.values():
                overwrite(only, only.k, only.v)

    def _judge(self, runner, expected) -> None:
        if runner.elsewhere > max(0.005, sum(runner.seconds) * runner.inner / 10):
            raise Broken("other threads did its work, and only the calling thread is timed; keep to one thread, or "
                         "measure with threads=2 or more")
        total = sum(runner.seconds) * runner.inner
        if runner.waits >= len(runner.seconds) / 2 and runner.wall - total > max(0.005, runner.wall / 10):
            raise Broken("it waits (sleeps, reads or lets others work), and only its own CPU time is measured; measure "
                         "with threads=2 or more, which takes wall time")
        runner.calls[-1]().fill_(float("nan"))
        try:
            expected.judge(runner.trial, runner.calls[-1]())
        except Broken as wrong:
            raise Broken(f"wrong when checked again after timing, on changed q, K and V: {wrong}") from None

    def _keep_samples(self, bench, runners) -> str:
        """Raw samples beside the run; the path relative to it, or "" where the run keeps no files."""
        standing = [r for r in runners if r.trial in bench.trials]
        if bench.artifacts is None or not standing:
            return ""
        import pandas as pd
        name = f"samples/{bench.comparison.comparison_id}.parquet"
        frames = [pd.DataFrame(dict(case_id=r.trial.case_id, round=r.rounds, calls=r.inner, seconds=r.seconds))
                  for r in standing]
        (bench.artifacts / "samples").mkdir(parents=True, exist_ok=True)
        pd.concat(frames).to_parquet(bench.artifacts / name, index=False)
        return name

    def _kernel_side(self, runner, sampler, common):
        """Page faults and system time: what a call pays for memory that it takes anew each time."""
        if usage() is None or sampler.method != "timer:thread_cpu":
            why = "only counted for one thread of a CPU under Linux"
            yield runner.trial, missing("page_faults", "count", why, source=self.name)
            yield runner.trial, missing("system_time_share", "ratio", why, source=self.name)
            return
        calls = len(runner.seconds) * runner.inner
        common = {**common, "method": "counter:getrusage"}
        yield runner.trial, Reading("page_faults", runner.faults / calls, "count", "measured", note="per call",
                                    **common)
        yield runner.trial, Reading("system_time_share", min(1.0, runner.system / (sum(runner.seconds) * runner.inner)),
                                    "ratio", "measured", denominator="CPU time of the call", **common)

    def _readings(self, runner, sampler, window, note, artifact):
        s: Summary = summarise(runner.seconds)
        common = dict(method=sampler.method, source=self.name, n=s.n, window_s=window, artifact=artifact,
                      cache_state=sampler.cache_state(runner.trial))
        slow = "; slow: fewer samples than the protocol asks" if s.n < self.min_samples else ""
        yield runner.trial, Reading("latency_s", s.median, "s", "measured", low=s.low, high=s.high, rel_std=s.rel_std,
                                    note=note + slow, **common)
        yield runner.trial, Reading("latency_p5", s.p5, "s", "measured", **common)
        yield runner.trial, Reading("latency_p95", s.p95, "s", "measured", **common)
        yield from self._kernel_side(runner, sampler, common)
        yield runner.trial, Reading("prepare_s", runner.prepare_s, "s", "measured", method="timer:wall", n=1,
                                    source=self.name, note="planning of one call, outside the clock")


def usage():
    """What the operating system counts of this thread; None where it does not count threads (only Linux does)."""
    try:
        import resource
        return resource.getrusage(resource.RUSAGE_THREAD)
    except (ImportError, AttributeError):
        return None


class CpuSampler:
    """Seconds per call on a CPU. Every call takes the next input copy, whichever trial ran before it."""

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

    def cache_state(self, trial) -> str:
        copies, cache = len(self.bench.inputs_of(trial)), last_level_cache()[0]
        held = copies * self.bench.comparison.touched_bytes()[trial.kv_format, trial.layout]
        return "cold (unverified)" if held >= 5 * cache else "warm (too few input copies: memory short or inputs tiny)"

    def note(self, load, steal, window) -> str:
        after = cpu_steal_seconds()
        share = None if steal is None or after is None else (after - steal) / window / (os.cpu_count() or 1)
        stolen = "" if share is None else f", steal {100 * share:.1f} %"
        return "" if load is None else f"load {load:.1f}{stolen}"


class CudaSampler:
    """Seconds per call on a GPU from CUDA events, the L2 cache flushed before each by reading a resident buffer.

    The flush is a read of 2 × L2 bytes, ordered before the start event, so that it evicts and is not timed.
    """
    method = "timer:cuda_events"

    def __init__(self, bench: Bench):
        import torch
        self.torch, self.device = torch, torch.device(bench.comparison.device)
        l2 = torch.cuda.get_device_properties(self.device).L2_cache_size
        self.flush = torch.ones(2 * l2 // 4, dtype=torch.int32, device=self.device)
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def sample(self, runner, calls: int) -> float:
        start, end = self.events
        total = 0.0
        for _ in range(calls):
            self.flush.sum()
            start.record()
            output = runner.calls[0]()
            end.record()
            end.synchronize()
            total += start.elapsed_time(end) / 1e3
            output.fill_(float("nan"))
        return total / calls

    def cache_state(self, trial) -> str:
        return "cold (unverified)"

    def note(self, load, steal, window) -> str:
        return ("CUDA events around each call, launch overhead included; L2 flushed by a read of twice its size; "
                "clocks and throttling not watched")
