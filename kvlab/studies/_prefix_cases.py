"""The cases of prefix_sharing: blocks held by those who share, prompts found again in pools of some size, and both."""
from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from kvlab.attention._base import digest
from kvlab.kv.block_pool import BlockPool
from kvlab.kv.prefix import PrefixCache, chain_of_pieces
from kvlab.record.reading import Reading
from kvlab.record.statistics import t_interval
from kvlab.serving.scheduler_config import SchedulerConfig
from kvlab.serving.simulator import Simulation, StepRecord, simulate
from kvlab.serving.traces import read_trace
from kvlab.serving.workloads import LogNormal, Workload, synthetic
from kvlab.studies import _prefix_prefill
from kvlab.studies._prefix_prefill import Prefill
from kvlab.studies._run import case_row
from kvlab.studies._serving import BLOCKS, MODEL, engine

METRICS = {**_prefix_prefill.METRICS, "hit_rate": "ratio", "live_memory_saved": "ratio", "prefill_saved": "ratio",
           "ttft_mean_s_ratio": "ratio"}
ENDLESS = 10**7                 # blocks of a pool that never evicts anything here


@dataclass(frozen=True)
class Sharers:
    """R live requests of one prompt length, a share f of which is the same for all: blocks held, against f(R − 1)/R."""
    shared: float
    sharers: int
    prompt_tokens: int = 2048
    block_size: int = 16

    @cached_property
    def comparison_id(self) -> str:
        return digest(asdict(self))

    def columns(self) -> dict:
        return dict(device="none", block_size=self.block_size, kv_len=self.prompt_tokens, batch_size=self.sharers,
                    case=json.dumps(dict(question="sharers", **asdict(self)), sort_keys=True))

    def rows(self) -> list[dict]:
        """What the pool counts, and what the formula says."""
        size, common = self.prompt_tokens, int(self.shared * self.prompt_tokens)
        pool = BlockPool(self.sharers * (size // self.block_size + 1) + 1, self.block_size)
        cache, blocks = PrefixCache(pool), pool.blocks_for(size)
        for request in range(1, self.sharers + 1):
            cache.allocate([*range(common), *range(request * size + common, (request + 1) * size)])
        saved = 1 - pool.used_blocks / (blocks * self.sharers)
        formula = self.shared * (self.sharers - 1) / self.sharers
        readings = [
            Reading("memory_saved", saved, "ratio", "simulated", source="kv.prefix", hardware="none",
                    method="1 − blocks in use ÷ blocks without sharing"),
            Reading("memory_saved", formula, "ratio", "modelled", source="formula", hardware="none",
                    method="formula:f · (R − 1) ÷ R")]
        return [case_row(self, reading) for reading in readings]


@dataclass(frozen=True)
class Pool:
    """Prompts that arrive one after another at a pool of so many blocks: the share of their tokens that is found.

    trace: the recorded requests themselves, from the folder that KVLAB_TRACES names, in place of drawn ones.
    """
    timed: ClassVar[bool] = False
    workload: str
    num_blocks: int
    block_size: int = 512
    count: int = 6000
    seeds: tuple[int, ...] = (0, 1, 2)
    trace: bool = False

    @cached_property
    def comparison_id(self) -> str:
        return digest(asdict(self))

    def columns(self) -> dict:
        shown = dict(question="pool", num_blocks=self.num_blocks, endless=self.num_blocks == ENDLESS)
        return dict(device="none", block_size=self.block_size, case=json.dumps(shown, sort_keys=True),
                    data=f"{'trace' if self.trace else 'workload'}:{self.workload}")

    def rows(self) -> list[dict]:
        """hit_rate: prompt blocks found ÷ prompt blocks, over seeds. No request lives beside another."""
        rates = t_interval(self._rate(seed) for seed in self.seeds)
        ends = dict(low=rates.low, high=rates.high) if rates.n > 1 else {}
        over = "the recorded requests" if self.trace else "mean over seeds"
        return [case_row(self, Reading("hit_rate", rates.value, "ratio", "simulated", n=rates.n, hardware="none",
                                       source="kv.block_pool", method=f"least recently used blocks evicted; {over}",
                                       **ends))]

    def _rate(self, seed: int) -> float:
        requests = list(read_trace(trace_file(self.workload)) if self.trace else
                        synthetic(self.workload, self.count, seed=seed))
        most = sum(len(one.prefix) for one in requests) + 2
        pool = BlockPool(min(self.num_blocks, most), self.block_size)
        found = asked = 0
        for one in requests:
            hashes = chain_of_pieces(one.prefix, one.piece_tokens, self.block_size, most=pool.num_blocks - 1)
            hit = pool.cached(hashes)
            pool.share(hit)
            fresh = pool.take(len(hashes) - len(hit))
            for block_id, block_hash in zip(fresh, hashes[len(hit):]):
                pool.remember(block_id, block_hash)
            pool.release(hit + fresh)
            found, asked = found + len(hit), asked + len(hashes)
        return found / asked


@dataclass(frozen=True)
class Engine:
    """An engine with and without a prefix cache, at a rate: prompt tokens not computed, memory not held per request.

    The load: prompts of some 1,400 tokens that begin with one of `prompts` system prompts of 1,024.
    """
    timed: ClassVar[bool] = False
    rate: float
    prompts: int = 4
    count: int = 600
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)

    @cached_property
    def comparison_id(self) -> str:
        return digest(asdict(self))

    def columns(self) -> dict:
        return dict(device="none", block_size=16, model=MODEL, data="workload:system prompts",
                    case=json.dumps(dict(question="engine", **asdict(self)), sort_keys=True))

    def rows(self) -> list[dict]:
        """With ÷ without, on the same requests, over seeds."""
        found = [self._one(seed) for seed in self.seeds]
        readings = []
        for metric in found[0]:
            mean = t_interval(one[metric] for one in found)
            readings.append(Reading(metric, mean.value, METRICS[metric], "simulated", low=mean.low, high=mean.high,
                                    n=mean.n, source="serving.simulator", hardware=f"simulated {engine().device}",
                                    method="with a prefix cache against without, mean over seeds",
                                    note=f"simulated clock; step time: {engine().source}"))
        return [case_row(self, reading) for reading in readings]

    def _one(self, seed: int) -> dict[str, float]:
        load = Workload("system prompts", self.rate, prompt=LogNormal(1400, 0.25, 1040, 4096),
                        output=LogNormal(200, 0.7, 8, 2048), system_prompts=self.prompts, system_pieces=2)
        (with_cache, held), (without, held_without) = (self._served(load, seed, on) for on in (True, False))
        before, after = (done.summary() for done in (without, with_cache))
        return {"prefill_saved": after["hit_rate"], "live_memory_saved": 1 - held / held_without,
                "ttft_mean_s_ratio": after["ttft_mean_s"] / before["ttft_mean_s"]}

    def _served(self, load: Workload, seed: int, caching: bool) -> tuple[Simulation, float]:
        """(the simulation, blocks in use per running request, both over the busy time)."""
        total = [0.0, 0.0]

        def add(record: StepRecord) -> None:
            seconds = record.ended_s - record.began_s
            total[0] += record.blocks_used * seconds
            total[1] += len(record.live) * seconds
        done = simulate(synthetic(load, self.count, seed=seed), SchedulerConfig(prefix_caching=caching),
                        num_blocks=BLOCKS, step_time=engine(), every_s=None, on_step=add)
        return done, total[0] / total[1]


def trace_file(workload: str) -> Path:
    """Where a workload's trace lies, if the environment variable KVLAB_TRACES names a folder that holds it."""
    return Path(os.environ.get("KVLAB_TRACES", "")) / "traces" / f"{workload}.jsonl"


def cases(size: str, device: str) -> Iterator[Sharers | Prefill | Pool | Engine]:
    """Every share and number of sharers, real prompts, every pool size, every rate."""
    smoke = size == "smoke"
    for shared in (0.25, 0.5, 0.9):
        for sharers in (1, 2, 4, 8, 16, 64)[::3 if smoke else 1]:
            yield Sharers(shared, sharers)
    longer = {"smoke": dict(sharers=2, prompt_tokens=64, rounds=2), "large": dict(prompt_tokens=512, rounds=5)}
    for shared in (0.5,) if smoke else (0.5, 0.9):
        yield Prefill(shared, device=device, **longer.get(size, {}))
    drawn = dict(count=300, seeds=(0, 1)) if smoke else dict(count=12031) if size == "large" else {}
    for workload in ("mooncake_conversation", "mooncake_synthetic"):
        chosen = dict(trace=True, seeds=(0,)) if size == "large" and trace_file(workload).is_file() else drawn
        for blocks in (1000, ENDLESS) if smoke else (500, 1000, 2000, 5000, 10_000, 30_000, 100_000, ENDLESS):
            yield Pool(workload, blocks, **chosen)
    fewer = dict(count=100, seeds=(0, 1)) if smoke else {}
    for rate in (1.0, 4.0) if smoke else (0.25, 0.5, 1.0, 2.0, 3.0, 4.0):
        yield Engine(rate, **fewer)
