"""What the studies of serving share: a load, an engine whose steps a real run has timed, and rows of what came out.

A case is simulated once per seed. Times and rates are geometric means over the seeds with Student's t-interval of their
logarithms, since they are positive and skewed; shares are means, with an interval that ends at 0. Ratios between cases
of one load are taken seed by seed, since the same requests arrive in both.
"""
from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, ClassVar

from kvlab.attention._base import digest
from kvlab.catalog.gpus import gpu
from kvlab.catalog.models import model
from kvlab.record.reading import Reading, missing
from kvlab.record.statistics import t_interval
from kvlab.serving.model_work import ranked
from kvlab.serving.request import Request
from kvlab.serving.scheduler_config import SchedulerConfig
from kvlab.serving.simulator import Simulation, StepRecord, simulate
from kvlab.serving.step_models import parts
from kvlab.serving.step_time import StepTime
from kvlab.serving.workloads import synthetic
from kvlab.studies._run import case_row

if TYPE_CHECKING:
    import pandas as pd

MODEL = "meta-llama/Llama-3.1-8B"
BLOCKS = 2588                   # of one real engine: what its log printed
LONG = 512                      # tokens from which a prompt is no short one: the article's threshold
METRICS = {"makespan_s": "s", "tokens_per_s": "token/s", "requests_per_s": "request/s", "ttft_mean_s": "s",
           "ttft_p50_s": "s", "ttft_p99_s": "s", "ttft_short_mean_s": "s", "ttft_long_mean_s": "s",
           "ttft_long_max_s": "s", "tpot_mean_s": "s", "tpot_p99_s": "s", "itl_p99_s": "s",
           "queue_mean_s": "s", "queue_p99_s": "s", "e2e_mean_s": "s", "e2e_p99_s": "s", "preemption_ratio": "ratio",
           "hit_rate": "ratio", "rejected_share": "ratio", "cut_share": "ratio", "kv_usage_mean": "ratio"}


@cache
def engine() -> StepTime:
    """What the steps of that engine cost: data/engine_rates.csv, fitted on its run.

    Source: casys-kaist/LLMServingSim@5daddb2, bench/examples/RTX4090/Llama-3.1-8B.
    """
    return replace(parts(gpu("RTX 4090"), ranked(model(MODEL))), source="the kernels of Llama-3.1-8B in bf16 one after "
                   "another, at shares of the RTX 4090's data sheet fitted on one recorded run of vLLM 0.19 "
                   "(data/engine_rates.csv); steps are planned one at a time, not ahead")


@dataclass(frozen=True)
class Load:
    """Requests of a workload of data/workloads.csv: how many, and how many arrive per second (None: as fitted).

    long_every: above 1, only every so many-th of the prompts that are not short stays; that needs a rate.
    """
    workload: str
    count: int
    rate: float | None = None
    long_every: int = 1

    def requests(self, seed: int) -> Iterable[Request]:
        if self.long_every == 1:
            return synthetic(self.workload, self.count, self.rate, seed)
        drawn = synthetic(self.workload, 4 * self.count, 1.0, seed)
        kept = [one for at, one in enumerate(drawn) if one.prompt_tokens < LONG or not at % self.long_every]
        kept = kept[:self.count]
        slower = len(kept) / (self.rate * kept[-1].arrival_s)
        return [replace(one, arrival_s=one.arrival_s * slower) for one in kept]


@dataclass(frozen=True)
class Serving:
    """One way to serve a load, in the simulator, for each of the seeds.

    question and label say what it is compared with and as what; x: what a sweep varies. config: the fields of
    SchedulerConfig that are not its defaults. baseline: the config (with BLOCKS blocks) to whose result on the same
    requests each seed's is held; None = no ratios.
    """
    timed: ClassVar[bool] = False
    question: str
    label: str
    load: Load
    config: tuple[tuple[str, object], ...] = ()
    num_blocks: int = BLOCKS
    block_size: int = 16
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    baseline: tuple[tuple[str, object], ...] | None = None
    x: float | None = None

    @cached_property
    def comparison_id(self) -> str:
        return digest(asdict(self))

    def columns(self) -> dict:
        shown = dict(question=self.question, label=self.label, x=self.x, rate=self.load.rate,
                     num_blocks=self.num_blocks, **dict(self.config))
        return dict(model=MODEL, device="none", block_size=self.block_size, data=f"workload:{self.load.workload}",
                    case=json.dumps(shown, sort_keys=True))

    def rows(self) -> list[dict]:
        """Every metric over the seeds; with a baseline, each metric's ratio to it as <metric>_ratio."""
        mine = [_simulated(self.load, self.config, self.num_blocks, self.block_size, seed) for seed in self.seeds]
        readings = [_over_seeds(name, [one[name] for one in mine], METRICS[name]) for name in mine[0]]
        if self.baseline is not None:
            base = [_simulated(self.load, self.baseline, BLOCKS, self.block_size, seed) for seed in self.seeds]
            beside = ", ".join(f"{name}={value}" for name, value in self.baseline) or "the default configuration"
            readings += [_over_seeds(f"{name}_ratio", [a[name] / b[name] if a[name] and b[name] else None
                                                       for a, b in zip(mine, base)], "ratio", beside)
                         for name in mine[0] if METRICS[name] != "ratio"]
        return [case_row(self, reading) for reading in readings]


@cache
def _simulated(load: Load, config: tuple, num_blocks: int, block_size: int, seed: int) -> dict[str, float | None]:
    """The metrics of one simulation; many cases share a baseline."""
    gaps = Gaps()
    done = simulate(load.requests(seed), SchedulerConfig(**dict(config)), num_blocks=num_blocks, block_size=block_size,
                    step_time=engine(), every_s=None, on_step=gaps)
    found = done.summary()
    found |= {**_by_length(done), "rejected_share": done.rejected / found["requests"],
              "cut_share": sum(one.generated < one.request.output_tokens for one in done.served
                               if not one.rejected) / found["requests"],
              "itl_p99_s": gaps.percentile(99), "kv_usage_mean": gaps.usage(num_blocks)}
    return {name: found[name] for name in METRICS}


class Gaps:
    """Gaps between two tokens of a sequence: each step's length, once for every sequence that decodes in it."""

    def __init__(self):
        self._lengths: list[float] = []
        self._weights: list[int] = []
        self._blocks = self._seconds = 0.0

    def __call__(self, record: StepRecord) -> None:
        seconds = record.ended_s - record.began_s
        self._blocks += record.blocks_used * seconds
        self._seconds += seconds
        if record.step.batch.decode_seqs:
            self._lengths.append(seconds)
            self._weights.append(record.step.batch.decode_seqs)

    def percentile(self, p: float) -> float | None:
        """What p percent of all gaps do not exceed, in seconds; a wait after a preemption is not among them."""
        import numpy as np
        if not self._lengths:
            return None
        order = np.argsort(self._lengths)
        share = np.cumsum(np.asarray(self._weights)[order]) / sum(self._weights)
        return float(np.asarray(self._lengths)[order][np.searchsorted(share, p / 100)])

    def usage(self, num_blocks: int) -> float | None:
        """Mean share of the pool in use while the engine was busy."""
        return self._blocks / self._seconds / (num_blocks - 1) if self._seconds else None


def _over_seeds(metric: str, values: Sequence[float | None], unit: str, beside: str = "") -> Reading:
    """Mean and t-interval over the seeds; of times, rates and ratios to a baseline, those of their logarithms.

    beside: what the baseline of a ratio is.
    """
    found = [value for value in values if value is not None]
    if len(found) < len(values):
        return missing(metric, unit, f"{len(values) - len(found)} of {len(values)} seeds have no such number",
                       source="serving.simulator")
    log = (bool(beside) or unit != "ratio") and min(found) > 0
    estimate = t_interval(map(math.log, found)).through(math.exp) if log else t_interval(found)
    ends = dict(low=max(0.0, estimate.low), high=estimate.high) if estimate.n > 1 else {}
    return Reading(metric, estimate.value, unit, "simulated", n=estimate.n, **ends, source="serving.simulator",
                   denominator=f"the same requests, {beside}" if beside else "",
                   method=f"{'geometric mean' if log else 'mean'} over {len(values)} seeds",
                   hardware=f"simulated {engine().device}", note=f"simulated clock; step time: {engine().source}")


def _by_length(done: Simulation) -> dict[str, float | None]:
    """Mean and longest TTFT of short prompts, and of the others; None where there are none."""
    found = {}
    for name, short in (("short", True), ("long", False)):
        times = [one.ttft_s for one in done.served if one.ttft_s is not None
                 and (one.request.prompt_tokens < LONG) == short]
        found |= {f"ttft_{name}_mean_s": sum(times) / len(times) if times else None,
                  f"ttft_{name}_max_s": max(times, default=None)}
    return found


def capacity_of(load: Load) -> tuple[float, float]:
    """(requests per second that the engine serves when all arrive at once, requests that its blocks bear at a time).

    The second is the pool's tokens ÷ the mean length of a whole request, which no engine knows beforehand.
    """
    every = [replace(one, arrival_s=0.0) for one in load.requests(seed=0)]
    done = simulate(every, SchedulerConfig(), num_blocks=BLOCKS, step_time=engine(), every_s=None)
    mean = sum(one.prompt_tokens + one.output_tokens for one in every) / len(every)
    return done.finished / done.makespan_s, (BLOCKS - 1) * 16 / mean


def value_of(rows: pd.DataFrame, metric: str, label: str | None = None) -> pd.Series | None:
    """The one row of a metric, of the case with that label; None where there is none with a value."""
    chosen = rows[(rows["metric"] == metric) & (rows["kind"] != "missing")]
    chosen = chosen if label is None else chosen[chosen["label"] == label]
    return None if chosen.empty else chosen.iloc[0]
