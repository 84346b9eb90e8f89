"""An engine on a simulated clock: requests arrive, steps are put together by the scheduler and take a modelled time.

Block ids, hits, preemptions and their order come from the same pool that kvlab's paged cache uses; only the seconds are
a model's. Deterministic: the same requests, configuration and step time give the same result.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvlab.kv.block_pool import BlockPool
from kvlab.serving.live import Live, Step
from kvlab.serving.request import Request, Served
from kvlab.serving.scheduler import Scheduler
from kvlab.serving.scheduler_config import SchedulerConfig
from kvlab.serving.step_time import StepTime
from kvlab.shapes import positive

if TYPE_CHECKING:
    import pandas as pd

TIMELINE = ("t", "running", "waiting", "blocks_used", "kv_usage", "preemptions", "finished", "prompt_tokens",
            "generated_tokens", "queried_tokens", "cached_tokens")
MOST_SAMPLES = 5_000_000        # lines of a timeline, about 1.5 GB


@dataclass(slots=True)
class Simulation:
    """What became of a trace on a simulated engine.

    All times are simulated seconds since the trace began. served: requests in the order in which they ended or were
    rejected; empty where a sink took them. samples: the engine's state every every_s, of all replicas together, as
    TIMELINE names it; counts since the start are cumulative. step_time: its source, kind and device. num_blocks: of
    one replica, the null block included.
    """
    config: SchedulerConfig
    num_blocks: int
    block_size: int
    replicas: int
    step_time: StepTime
    served: list[Served] = field(default_factory=list)
    samples: list[tuple] = field(default_factory=list)
    steps: int = 0
    finished: int = 0
    rejected: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0                  # computed or found, each once per request
    generated_tokens: int = 0
    queried_tokens: int = 0
    cached_tokens: int = 0
    makespan_s: float = 0.0
    began_s: float = 0.0                    # first arrival

    def requests(self) -> pd.DataFrame:
        """One line per request, in order of arrival; times in seconds, absent where it did not come so far."""
        import pandas as pd
        columns = ("queue_s", "ttft_s", "tpot_s", "e2e_s")
        rows = [(one.request.id, one.request.arrival_s, one.request.prompt_tokens, one.generated,
                 *(getattr(one, name) for name in columns), one.preemptions, one.cached_tokens, one.rejected)
                for one in self.served]
        table = pd.DataFrame(rows, columns=["id", "arrival_s", "prompt_tokens", "output_tokens", *columns,
                                            "preemptions", "cached_tokens", "rejected"])
        return table.astype({name: "float64" for name in columns}).sort_values(
            "arrival_s", kind="stable", ignore_index=True)

    def timeline(self) -> pd.DataFrame:
        """The engine's state over time, one line every every_s seconds, up to the first at which all is over."""
        import pandas as pd
        return pd.DataFrame(self.samples, columns=list(TIMELINE))

    def summary(self) -> dict[str, float | None]:
        """Means and percentiles over the served requests, and rates over the makespan; None where there is no number.

        Seconds, requests/s, tokens/s; preemption_ratio: preemptions ÷ finished requests; hit_rate: prompt tokens found
        in the prefix cache ÷ looked up. Percentiles are linear between order statistics, as numpy's.
        """
        import numpy as np
        found: dict[str, float | None] = {"requests": self.finished + self.rejected, "rejected": self.rejected,
                                          "makespan_s": self.makespan_s, "steps": self.steps}
        for name in ("queue", "ttft", "tpot", "e2e"):
            values = [v for one in self.served if (v := getattr(one, f"{name}_s")) is not None]
            found[f"{name}_mean_s"] = float(np.mean(values)) if values else None
            for p in (50, 90, 99):
                found[f"{name}_p{p}_s"] = float(np.percentile(values, p)) if values else None
        span = self.makespan_s
        found["requests_per_s"] = self.finished / span if span else None
        found["tokens_per_s"] = self.generated_tokens / span if span else None
        found["preemptions"] = self.preemptions
        found["preemption_ratio"] = self.preemptions / self.finished if self.finished else None
        found["hit_rate"] = self.cached_tokens / self.queried_tokens if self.queried_tokens else None
        return found


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one replica: when it began and ended (simulated seconds), what it computed, the state after it."""
    replica: int
    began_s: float
    ended_s: float
    step: Step
    running: int
    waiting: int
    blocks_used: int
    live: list[Live]                        # the running ones, the engine's own list
    evictions: int                          # blocks that the prefix cache has let go so far


class _Replica:
    """One engine with its own pool, the step that it is computing and, if it plans ahead, the next and when it did."""
    __slots__ = ("scheduler", "pool", "step", "ahead", "began", "now")

    def __init__(self, config: SchedulerConfig, num_blocks: int, block_size: int):
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(config, self.pool)
        self.step: Step | None = None
        self.ahead: tuple[Step, float] | None = None
        self.began = self.now = 0.0             # of the step, and when it ends; without one: when the next may begin

    @property
    def busy(self) -> bool:
        return self.step is not None or bool(self.scheduler.waiting)

    @property
    def load(self) -> int:
        """By which a request finds its replica. Source: vLLM 0.32, data-parallel balancer: 4 × waiting + running."""
        return 4 * self.scheduler.waiting + len(self.scheduler.running)


def simulate(requests: Iterable[Request], config: SchedulerConfig, *, num_blocks: int, step_time: StepTime,
             block_size: int = 16, replicas: int = 1, lockstep: bool = False, every_s: float | None = 1.0,
             sink: Callable[[Served], None] | None = None,
             on_step: Callable[[StepRecord], None] | None = None) -> Simulation:
    """Serve the requests, in order of arrival, on `replicas` engines of num_blocks blocks each; returns when all ended.

    requests: may be a generator; only live ones are kept, and with a sink, which is told each when it ended or was
    rejected, memory grows with them alone. num_blocks: of one replica, as an engine's log prints it, with the null
    block in it. lockstep: all replicas begin each step together and wait for the slowest, as vLLM's data-parallel ranks
    do that share a mixture's experts. every_s: interval of the timeline, None = none; it begins with the first
    arrival. on_step: told each step when it has ended. Refuses, with ValueError: requests out of order of arrival, a
    step time that is no finite number of at least 0, a timeline of more than MOST_SAMPLES lines.
    """
    positive(num_blocks=num_blocks, block_size=block_size, replicas=replicas)
    if every_s is not None and not 0 < every_s < float("inf"):
        raise ValueError(f"every_s={every_s!r} must be above 0 seconds, or None")
    engines = [_Replica(config, num_blocks, block_size) for _ in range(replicas)]
    done = Simulation(config, num_blocks, block_size, replicas, step_time)
    keep = sink or done.served.append
    coming = iter(requests)
    request = next(coming, None)
    done.began_s = last = request.arrival_s if request else 0.0
    ticks = _Ticks(every_s, done, engines)
    while True:
        busy = [one for one in engines if one.busy]
        engine = (max if lockstep else min)(busy, key=lambda one: one.now, default=None)
        if request is not None and (engine is None or request.arrival_s <= engine.now):
            if request.arrival_s < last:
                raise ValueError(f"request {request.id} arrives at {request.arrival_s} s, after one of {last} s was "
                                 "given; give requests in order of arrival")
            last = request.arrival_s
            ticks.until(last)
            chosen = min(engines, key=lambda one: one.load)
            served, idle = Served(request), not chosen.busy
            if chosen.scheduler.submit(served) is None:
                done.rejected += 1
                keep(served)
            elif idle:
                chosen.now = last
            request = next(coming, None)
            continue
        if engine is None:
            break
        ticks.until(engine.now)
        due = busy if lockstep else [engine]
        for one in due:
            if one.step is not None:
                _end(one, one.step, engines, done, keep, on_step)
        _begin([one for one in due if one.scheduler.running or one.scheduler.waiting], engine.now, done, step_time)
    done.makespan_s = max(one.now for one in engines) - done.began_s if done.steps else 0.0
    ticks.last(done.began_s + done.makespan_s)
    return done


def _begin(due: list[_Replica], now: float, done: Simulation, step_time: StepTime) -> None:
    """The next step of an engine, or of several that go together; it will end at their `now`."""
    batches, seconds = [], 0.0
    for engine in due:
        batches.append(_plan(engine, now, done).batch)
    tokens = sum(batch.tokens for batch in batches)
    for batch in batches:
        if batch.sequences:                     # else the only one that was to run was preempted: no step to compute
            batch.peer_tokens = tokens - batch.tokens
            takes = step_time(batch)
            if not 0 <= takes < float("inf"):
                raise ValueError(f"the step time of {step_time.device} ({step_time.source}) says {takes!r} s for "
                                 f"{batch}; it must be a finite number of at least 0")
            seconds = max(seconds, takes)
            done.steps += 1
    for engine in due:
        engine.began, engine.now = now, now + seconds


def _plan(engine: _Replica, now: float, done: Simulation) -> Step:
    """The engine's step that begins now: planned now, or while the last one was computed; then the one after it."""
    scheduler = engine.scheduler
    before = (scheduler.preemptions, scheduler.queried_tokens, scheduler.cached_tokens)
    step, planned = engine.ahead or (scheduler.schedule(), now)
    engine.step = step
    if not (step.batch.sequences or step.preempted):
        raise RuntimeError(f"{scheduler.waiting} requests wait, and an empty engine admits none: a bug in kvlab")
    for live in step.admitted:
        live.served.scheduled_s = planned
    engine.ahead = None
    if scheduler.config.async_scheduling:
        ahead = scheduler.schedule()
        if ahead.batch.sequences or ahead.preempted:
            engine.ahead = (ahead, now)
    done.preemptions += scheduler.preemptions - before[0]
    done.queried_tokens += scheduler.queried_tokens - before[1]
    done.cached_tokens += scheduler.cached_tokens - before[2]
    return step


def _end(engine: _Replica, step: Step, engines: list[_Replica], done: Simulation, keep: Callable[[Served], None],
         on_step: Callable[[StepRecord], None] | None) -> None:
    """The engine's step is over."""
    scheduler, ended = engine.scheduler, engine.now
    engine.step = None
    done.generated_tokens += step.generated
    for live in step.first:
        live.served.first_token_s = ended
        done.prompt_tokens += live.prompt
    for live in step.ended:
        served = live.served
        served.last_token_s = ended
        served.generated = live.known - live.prompt
        done.finished += 1
        keep(served)
    scheduler.finish(step)
    if on_step is not None:
        on_step(StepRecord(engines.index(engine), engine.began, ended, step, len(scheduler.running),
                           scheduler.waiting, engine.pool.used_blocks, scheduler.running,
                           engine.pool.evictions))


class _Ticks:
    """Samples of the engines' state: at each instant what is so then, in the middle of their steps."""
    __slots__ = ("every_s", "done", "engines", "count")

    def __init__(self, every_s: float | None, done: Simulation, engines: list[_Replica]):
        self.every_s, self.done, self.engines = every_s, done, engines
        self.count = 0 if every_s is None else int(done.began_s // every_s) + 1

    def until(self, now: float) -> None:
        """Those before now, at which something is about to change."""
        every_s, samples = self.every_s, self.done.samples
        if every_s is None or self.count * every_s >= now:
            return
        if len(samples) + now / every_s - self.count > MOST_SAMPLES:
            raise ValueError(f"a line every {every_s:g} s is more than {MOST_SAMPLES:,} lines up to {now:,.6g} s; give "
                             "a longer every_s, None for no timeline, or a trace without such a gap")
        while (t := self.count * every_s) < now:
            samples.append(_sample(t, self.engines, self.done))
            self.count += 1

    def last(self, end: float) -> None:
        """Those up to the first at which all is over, and what ended last is counted."""
        self.until(end)
        if self.every_s is not None and self.done.steps and (self.count - 1) * self.every_s < end:
            self.done.samples.append(_sample(self.count * self.every_s, self.engines, self.done))


def _sample(t: float, engines: list[_Replica], done: Simulation) -> tuple:
    used = sum(one.pool.used_blocks for one in engines)
    running = sum(len(one.scheduler.running) for one in engines)
    return (t, running, sum(one.scheduler.waiting for one in engines), used,
            used / (len(engines) * (done.num_blocks - 1)), done.preemptions, done.finished, done.prompt_tokens,
            done.generated_tokens, done.queried_tokens, done.cached_tokens)
