"""A dozen requests on an engine with few blocks: what each did when, for a Gantt chart."""
from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property

from kvlab.attention._base import digest
from kvlab.record.reading import Reading
from kvlab.serving.gantt import Gantt
from kvlab.serving.scheduler_config import SchedulerConfig
from kvlab.serving.simulator import simulate
from kvlab.serving.workloads import synthetic
from kvlab.studies._run import case_row
from kvlab.studies._serving import engine

METRICS = {"span_s": "s", "blocks_used": "count"}
EVERY = 8                       # steps between two readings of the blocks in use


@dataclass(frozen=True)
class Spans:
    """Requests of a workload on the studies' engine with `num_blocks` blocks, under one policy."""
    label: str
    config: tuple[tuple[str, object], ...]
    workload: str = "azure_2023_conv"
    count: int = 12
    rate: float = 4.0
    num_blocks: int = 321
    seed: int = 5

    @cached_property
    def comparison_id(self) -> str:
        return digest(asdict(self))

    def columns(self) -> dict:
        return dict(device="none", block_size=16, data=f"workload:{self.workload}")

    def rows(self) -> list[dict]:
        """Each span's length, and the blocks in use over time."""
        gantt = Gantt()
        simulate(synthetic(self.workload, self.count, self.rate, self.seed), SchedulerConfig(**dict(self.config)),
                 num_blocks=self.num_blocks, step_time=engine(), every_s=None, on_step=gantt)
        rows = [self._row("span_s", span.ended_s - span.began_s, "gantt", request=span.id, what=span.what,
                          began_s=span.began_s) for span in gantt.spans().itertuples()]
        used = [(ended, blocks) for _, _, ended, *_, blocks in gantt.steps]
        return rows + [self._row("blocks_used", blocks, "gantt_blocks", t=ended)
                       for ended, blocks in [*used[::EVERY], used[-1]]]

    def _row(self, metric: str, value: float, question: str, **about) -> dict:
        reading = Reading(metric, float(value), METRICS[metric], "simulated", source="serving.gantt",
                          method="one simulation", hardware=f"simulated {engine().device}",
                          note=f"simulated clock; step time: {engine().source}")
        shown = dict(question=question, label=self.label, num_blocks=self.num_blocks, **about)
        return case_row(self, reading, digest([self.comparison_id, metric, about]),
                        case=json.dumps(shown, sort_keys=True))
