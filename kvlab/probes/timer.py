"""Time of one call: trials interleaved over rounds, inputs rotating, outputs poisoned and checked again."""
from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import ClassVar

from kvlab.probes._base import Bench, Broken
from kvlab.probes._clock import Summary, summarise
from kvlab.probes._cpu_sampler import CpuSampler
from kvlab.probes._cuda_sampler import CudaSampler
from kvlab.probes._expected import Expected, overwrite
from kvlab.probes._sm_clock import Look
from kvlab.record.environment import cpu_steal_seconds, load_average
from kvlab.record.export import write_frame
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
    cold: bool = True                           # the cache is flushed before each call, on a GPU
    launch_s: float | None = None               # wall seconds in which the host launches one call, on a GPU
    short: bool | None = None                   # so short that calls are queued beforehand; None: not known yet
    looks: dict[int, Look] = field(default_factory=dict)            # of the SM clock, by round
    warm: list[float] = field(default_factory=list)                 # seconds of calls on the same input copy
    graph: list[float] | str = ""               # seconds of calls in a CUDA graph, or why there are none
    used: list[float] = field(default_factory=list)                 # samples behind latency_s, and their rounds
    used_rounds: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Timer:
    """Median seconds of one call with its 95 % interval, cold, as a decode step would find the cache.

    cap_s: seconds of measuring a trial may take; target: relative half width of the interval at which it stops
    before. Both default by device (CPU 1 s and 3 %; CUDA 15 s and 0.5 %, and 30 samples of 0.1 s). At least `rounds`
    rounds and min_samples samples are taken even where that exceeds the cap, unless one call alone takes ten times the
    cap. Beside it, in up to a quarter of the cap each: latency_warm_s (the same input again and again, no flush) and,
    on CUDA, latency_graph_s (one CUDA graph of a call on each input copy). cycles: time × SM clock. Samples taken while
    the GPU was slowed down (throttled_samples) do not count, if min_samples others are left.
    Failed: a trial that is wrong on changed inputs afterwards, whose thread is timed while others do its work, or that
    leaves work on a stream which nobody waits for.
    """
    cap_s: float | None = None
    target: float | None = None
    rounds: int = 3
    min_samples: int = 5
    name: ClassVar[str] = "timer"
    metrics: ClassVar[dict[str, str]] = {
        "latency_s": "s", "latency_p5": "s", "latency_p95": "s", "latency_warm_s": "s", "latency_graph_s": "s",
        "cycles": "count", "throttled_samples": "ratio", "prepare_s": "s", "page_faults": "count",
        "system_time_share": "ratio"}
    needs: ClassVar[tuple[str, ...]] = ("kernel_error",)
    rotates: ClassVar[bool] = True

    def why_not(self, trial):
        return None

    def measure(self, bench: Bench):
        sampler = (CudaSampler if bench.comparison.device.startswith("cuda") else CpuSampler)(bench)
        try:
            yield from self._measured(bench, sampler, self.cap_s or sampler.cap_s, self.target or sampler.target)
        finally:
            sampler.close()

    def _measured(self, bench, sampler, cap_s, target):
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
                self._stop(runner, sampler, round_, cap_s, target)
        for runner in runners:                                       # after all rounds: it leaves the cache warm
            if runner.trial in bench.trials:
                with bench.on(runner.trial):
                    self._again(runner, sampler, cap_s, target)
                    sampler.after(runner, cap_s)
        self._recheck(bench, runners)
        window = time.perf_counter() - began
        note = sampler.note(load, steal, window)
        artifact = self._keep_samples(bench, runners, sampler)
        for runner in runners:
            if runner.trial in bench.trials:
                yield from ((runner.trial, found) for found in self._readings(runner, sampler, cap_s, common=dict(
                    source=self.name, window_s=window, artifact=artifact), note=note))

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
                runners.append(Runner(trial, calls, runner.prepare_s, runner.inner, launch_s=runner.launch_s,
                                      short=runner.short))
        began = time.perf_counter()
        while bench.trials and time.perf_counter() - began < sampler.spin_up_s:
            for runner in runners:
                if runner.trial in bench.trials:
                    with bench.on(runner.trial):
                        sampler.sample(runner, runner.inner)
        for runner in runners:
            sampler.awake(runner)
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
        sampler.look(runner, round_)

    def _stop(self, runner, sampler, rounds, cap_s, target) -> None:
        runner.slow = runner.spent > 10 * cap_s * len(runner.seconds)
        self._choose(runner, sampler)
        enough = rounds >= self.rounds and len(runner.seconds) >= self.min_samples
        steady = (len(runner.used) >= sampler.steady_samples
                  and sum(runner.used) * runner.inner >= sampler.steady_s)
        if runner.slow or enough and (runner.spent >= cap_s
                                      or steady and summarise(runner.used, 200).rel_half_width <= target):
            runner.done = True

    def _choose(self, runner, sampler) -> None:
        """The samples that count: those taken while nothing slowed the GPU down, if there are enough of them."""
        flags = sampler.flags(runner)
        kept = [i for i, flag in enumerate(flags) if not flag]
        if len(kept) < self.min_samples:
            kept = range(len(flags))
        runner.used, runner.used_rounds = ([all_of[i] for i in kept] for all_of in (runner.seconds, runner.rounds))

    def _again(self, runner, sampler, cap_s, target) -> None:
        """Calls on the first input copy again and again, for a quarter of the cap; none where two take longer."""
        if runner.slow or 8 * runner.spent > cap_s * len(runner.seconds):
            return
        warm = Runner(runner.trial, runner.calls[:1], 0.0, runner.inner, cold=False)
        sampler.sample(warm, warm.inner)
        began = time.perf_counter()
        while True:
            runner.warm.append(sampler.sample(warm, warm.inner))
            if time.perf_counter() - began >= cap_s / 4 or (
                    len(runner.warm) >= max(self.min_samples, sampler.steady_samples)
                    and summarise(runner.warm, 200).rel_half_width <= target):
                break

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

    def _keep_samples(self, bench, runners, sampler) -> str:
        """Raw samples beside the run; the path relative to it, or "" where the run keeps no files."""
        standing = [r for r in runners if r.trial in bench.trials]
        if bench.artifacts is None or not standing:
            return ""
        import pandas as pd
        name = f"samples/{bench.comparison.comparison_id}.parquet"
        frames = [pd.DataFrame(dict(case_id=r.trial.case_id, round=r.rounds, calls=r.inner, seconds=r.seconds,
                                    throttled=pd.array(sampler.flags(r), dtype="boolean"))) for r in standing]
        (bench.artifacts / "samples").mkdir(parents=True, exist_ok=True)
        write_frame(pd.concat(frames), bench.artifacts / name)
        return name

    def _readings(self, runner, sampler, cap_s, common, note):
        s: Summary = summarise(runner.used)
        cold = dict(common, method=sampler.method, n=s.n, cache_state=sampler.cache_state(runner.trial))
        notes = [note, runner.trial.ran, sampler.said(runner), self._left_out(runner, sampler),
                 "slow: fewer samples than the protocol asks" if s.n < self.min_samples else ""]
        yield Reading("latency_s", s.median, "s", "measured", low=s.low, high=s.high, rel_std=s.rel_std,
                      note="; ".join(filter(None, notes)), **cold)
        yield Reading("latency_p5", s.p5, "s", "measured", **cold)
        yield Reading("latency_p95", s.p95, "s", "measured", **cold)
        if runner.warm:
            w = summarise(runner.warm)
            yield Reading("latency_warm_s", w.median, "s", "measured", method=sampler.method, source=self.name, n=w.n,
                          low=w.low, high=w.high, rel_std=w.rel_std, cache_state=sampler.warm_state(runner.trial),
                          note="the same input copy again and again, nothing flushed")
        else:
            yield missing("latency_warm_s", "s", f"two calls take longer than a quarter of the time cap of {cap_s:g} s",
                          source=self.name)
        yield from sampler.rows(runner, s, cold)
        yield Reading("prepare_s", runner.prepare_s, "s", "measured", method="timer:wall", n=1, source=self.name,
                      note="planning of one call, outside the clock")

    def _left_out(self, runner, sampler) -> str:
        slowed = sum(map(bool, sampler.flags(runner)))
        if not slowed:
            return ""
        if len(runner.used) < len(runner.seconds):
            return f"{slowed} samples left out: the GPU was slowed down"
        return (f"the GPU was slowed down in {slowed} of {len(runner.seconds)} samples, and too few others are left to "
                "do without them")
