"""The cases of paging that are about blocks, not time: what pages waste, what reserving wastes, who owns what."""
from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import count

import numpy as np

from kvlab.attention._base import digest
from kvlab.kv.block_pool import BlockPool
from kvlab.record.reading import Reading
from kvlab.record.statistics import t_interval
from kvlab.serving.scheduler_config import SchedulerConfig
from kvlab.serving.simulator import StepRecord, simulate
from kvlab.serving.step_time import fixed
from kvlab.serving.workloads import synthetic
from kvlab.studies._run import case_row

METRICS = {"waste_of_tokens": "ratio", "used_share": "ratio", "sequences_held": "count", "blocks_held": "count"}
POOL_TOKENS = 41_408            # what one RTX 4090 held for Llama-3.1-8B beside its weights (2,588 blocks of 16)
# kinds of contiguous reservation that the PagedAttention paper names
RESERVED = ("max_model_len", "next power of two", "true length")


@dataclass(frozen=True)
class Lengths:
    """Sequences of a workload, each at a random moment of its decoding: what a pool holds of them by pages.

    block_size in tokens; 0 stands for one contiguous piece per sequence, as long as `reserved` says.
    """
    workload: str
    block_size: int
    reserved: str = ""
    count: int = 2000
    max_model_len: int = 8192
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)

    @cached_property
    def comparison_id(self) -> str:
        return digest(asdict(self))

    def columns(self) -> dict:
        shown = dict(question="waste", reserved=self.reserved, max_model_len=self.max_model_len)
        return dict(device="none", data=f"workload:{self.workload}", block_size=self.block_size or None,
                    case=json.dumps(shown, sort_keys=True))

    def rows(self) -> list[dict]:
        """Unused room ÷ tokens, tokens ÷ room, sequences that fit, over seeds; for pages the rule of half a block."""
        found = [self._one(seed) for seed in self.seeds]
        way = f"reserved: {self.reserved}" if self.reserved else f"blocks of {self.block_size}"
        source = "arithmetic over drawn lengths" if self.reserved else "kv.block_pool"
        readings = []
        for metric in found[0]:
            mean = t_interval(one[metric] for one in found)
            readings.append(Reading(metric, mean.value, METRICS[metric], "simulated", source=source,
                                    low=mean.low, high=mean.high, n=mean.n, hardware="none",
                                    method=f"{way}; mean over seeds"))
        if not self.reserved:
            lengths = np.concatenate([self._lengths(seed)[0] for seed in self.seeds])
            readings.append(Reading("waste_of_tokens", self.block_size / 2 / lengths.mean(), "ratio", "modelled",
                                    source="the rule of half a block", hardware="none",
                                    method="formula:block_size ÷ 2 ÷ mean length"))
        return [case_row(self, reading) for reading in readings]

    def _lengths(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens now, tokens at the end) of sequences that live at a random moment: longer answers live longer."""
        every = [one for one in synthetic(self.workload, self.count, seed=seed)
                 if one.prompt_tokens + one.output_tokens <= self.max_model_len]
        prompt, output = (np.array([getattr(one, f"{name}_tokens") for one in every]) for name in ("prompt", "output"))
        rng = np.random.default_rng(seed)
        alive = rng.choice(len(every), size=len(every), p=output / output.sum())
        now = prompt[alive] + rng.integers(1, output[alive] + 1)
        return now, prompt[alive] + output[alive]

    def _one(self, seed: int) -> dict[str, float]:
        now, end = self._lengths(seed)
        if self.reserved:
            room = {"max_model_len": np.full_like(now, self.max_model_len),
                    "next power of two": 2 ** np.ceil(np.log2(end)).astype(int), "true length": end}[self.reserved]
            held = int(np.searchsorted(np.cumsum(room), POOL_TOKENS, side="right"))
            allocated = int(room.sum())
        else:
            pool = BlockPool(int(sum(-(-now // self.block_size))) + 1, self.block_size)
            for tokens in now.tolist():
                pool.allocate(tokens)
            allocated, held = pool.used_blocks * self.block_size, self._fitting(now)
        unused = allocated - int(now.sum())
        return {"waste_of_tokens": unused / now.sum(), "used_share": now.sum() / allocated, "sequences_held": held}

    def _fitting(self, lengths: np.ndarray) -> int:
        pool = BlockPool(POOL_TOKENS // self.block_size + 1, self.block_size)
        for held, tokens in enumerate(lengths.tolist()):
            if pool.blocks_for(tokens) > pool.free_blocks:
                return held
            pool.allocate(tokens)
        return len(lengths)


@dataclass(frozen=True)
class Snapshot:
    """Who owns which block of a small pool after so many steps of a simulated engine: one row per running request."""
    workload: str
    after_steps: int
    num_blocks: int = 256
    block_size: int = 16
    seed: int = 0

    @cached_property
    def comparison_id(self) -> str:
        return digest(asdict(self))

    def columns(self) -> dict:
        return dict(device="none", data=f"workload:{self.workload}", block_size=self.block_size, seed=self.seed)

    def rows(self) -> list[dict]:
        """blocks_held of each request; `case` holds the ids in the order of its table."""
        seen: list[tuple[str, list[int], int]] = []
        limit = (self.num_blocks - 1) * self.block_size
        coming = (replace(one, arrival_s=0.0) for one in synthetic(self.workload, 400, seed=self.seed)
                  if one.prompt_tokens + one.output_tokens <= limit // 4)

        steps = count(1)

        def look(record: StepRecord) -> None:
            if next(steps) == self.after_steps:
                seen.extend((live.served.request.id, list(live.table), live.computed) for live in record.live)
        simulate(coming, SchedulerConfig(), num_blocks=self.num_blocks, block_size=self.block_size,
                 step_time=fixed(0.02), every_s=None, on_step=look)
        rows = []
        for name, table, tokens in seen:
            shown = dict(question="snapshot", after_steps=self.after_steps, num_blocks=self.num_blocks, request=name,
                         blocks=table, tokens=tokens)
            reading = Reading("blocks_held", len(table), "count", "simulated", source="kv.block_pool", hardware="none",
                              method=f"block table after {self.after_steps} steps")
            rows.append(case_row(self, reading, digest([self.comparison_id, name]),
                                 case=json.dumps(shown, sort_keys=True)))
        return rows


def cases(size: str, workload: str, sizes: tuple[int, ...]) -> Iterator[Lengths | Snapshot]:
    """Every block size, every kind of reservation, two snapshots of a pool."""
    less = dict(count=300, seeds=(0, 1)) if size == "smoke" else {}
    yield from (Lengths(workload, one, **less) for one in sizes)
    yield from (Lengths(workload, 0, kind, **less) for kind in RESERVED)
    yield from (Snapshot(workload, steps) for steps in (3, 400))
