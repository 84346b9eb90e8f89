"""An incident on a simulated engine: calm, more requests than it can serve, calm again; and what each alarm says."""
from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import ClassVar

from kvlab.attention._base import digest
from kvlab.record.reading import Reading, missing
from kvlab.record.statistics import t_interval
from kvlab.serving.alerts import Thresholds
from kvlab.serving.alerts import timeline as alerts_over
from kvlab.serving.exposition import Exposition
from kvlab.serving.request import Request
from kvlab.serving.scheduler_config import SchedulerConfig
from kvlab.serving.simulator import Simulation, StepRecord, simulate
from kvlab.serving.workloads import synthetic
from kvlab.studies._run import case_row
from kvlab.studies._serving import BLOCKS, engine

METRICS = {"running": "count", "waiting": "count", "kv_usage": "ratio", "preemption_ratio": "ratio",
           "cache_evictions": "count", "firing": "ratio", "detected_after_s": "s", "false_share": "ratio",
           "cleared_after_s": "s"}
WINDOW_S, EVERY_S = 300.0, 15.0
# alarm -> what it says; the last two are the article's (section 7), which no engine exports under its names
ALARMS = {"preemption ratio": "preemptions ÷ finished requests over 5 minutes > 5 %",
          "KV usage": "mean KV usage over 5 minutes > 90 %",
          "queue p99": "p99 of the time in the queue over 5 minutes > 10 s",
          "evictions > 0": "any block of the prefix cache evicted within 5 minutes (the article)",
          "evictions > 5 %": "evicted blocks ÷ finished requests over 5 minutes > 5 % (the article's share)"}
_THRESHOLDS = Thresholds(preemption_ratio=0.05, kv_usage=0.9, queue_p99_s=10.0, window_s=WINDOW_S)
_OF = {"preemption_ratio": "preemption ratio", "kv_usage": "KV usage", "queue_p99_s": "queue p99"}


@dataclass(frozen=True)
class Incident:
    """Requests of a workload at a calm rate, a burst, and calm again; one engine with a prefix cache.

    calm, burst: arrivals as a share of what the engine can serve (`capacity` per second). Times in seconds. curves: the
    seed whose time series become rows.
    """
    timed: ClassVar[bool] = False
    workload: str
    capacity: float
    calm: float = 0.5
    burst: float = 2.0
    calm_s: float = 900.0
    burst_s: float = 180.0
    after_s: float = 900.0
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)

    @cached_property
    def comparison_id(self) -> str:
        return digest(asdict(self))

    def columns(self) -> dict:
        return dict(device="none", block_size=16, data=f"workload:{self.workload}")

    def requests(self, seed: int) -> Iterator[Request]:
        """Three stretches of the workload, one after another."""
        began = 0.0
        for part, (share, seconds) in enumerate(((self.calm, self.calm_s), (self.burst, self.burst_s),
                                                 (self.calm, self.after_s))):
            rate = share * self.capacity
            for one in synthetic(self.workload, int(rate * seconds), rate, 3 * seed + part):
                if one.arrival_s < seconds:
                    yield replace(one, id=f"{part}-{one.id}", arrival_s=began + one.arrival_s)
            began += seconds

    def rows(self) -> list[dict]:
        """The first seed's curves, and over all seeds: how soon each alarm fires, and how often without a reason."""
        found, rows = [], []
        for seed in self.seeds:
            done, evicted = self._served(seed)
            states = self._states(done, evicted)
            found.append({name: self._judged(states[name]) for name in ALARMS})
            if seed == self.seeds[0]:
                rows += self._curves(done, evicted, states)
        for name, says in ALARMS.items():
            for metric in ("detected_after_s", "false_share", "cleared_after_s"):
                values = [one[name][metric] for one in found if one[name][metric] is not None]
                rows.append(self._row(self._over_seeds(metric, values, says), question="alarm", alarm=name))
        return rows

    def _served(self, seed: int) -> tuple[Simulation, list[tuple[float, int]]]:
        """(the simulation, blocks evicted from the prefix cache so far at the end of each step)."""
        evicted: list[tuple[float, int]] = []

        def count(record: StepRecord) -> None:
            evicted.append((record.ended_s, record.evictions))
        done = simulate(self.requests(seed), SchedulerConfig(prefix_caching=True), num_blocks=BLOCKS,
                        step_time=engine(), every_s=EVERY_S, on_step=count)
        return done, evicted

    def _states(self, done: Simulation, evicted) -> dict[str, list[tuple[float, bool]]]:
        """When each alarm was on: by kvlab's own alerts, as live, and by the article's rule."""
        table = done.timeline()
        exposed = Exposition(table, done.served)
        states: dict[str, list[tuple[float, bool]]] = {name: [] for name in ALARMS}
        for t, alerts in alerts_over(exposed.snapshots(), _THRESHOLDS):
            for alert in alerts:
                states[_OF[alert.name]].append((t, alert.firing))
        total = _at(evicted, table["t"])
        before = _at(evicted, table["t"] - WINDOW_S)
        finished = dict(zip(table["t"], table["finished"]))
        for t, now, then in zip(table["t"], total, before):
            ended = finished[t] - max((n for at, n in finished.items() if at <= t - WINDOW_S), default=0)
            states["evictions > 0"].append((t, now > then))
            states["evictions > 5 %"].append((t, now - then > 0.05 * ended))
        return states

    def _judged(self, state: list[tuple[float, bool]]) -> dict[str, float | None]:
        """Seconds from the burst to the alarm and from its end to the all-clear; share of the calm time it was on."""
        calm = [firing for t, firing in state if WINDOW_S <= t < self.calm_s]
        burst_ended = self.calm_s + self.burst_s
        first = next((t for t, firing in state if t >= self.calm_s and firing), None)
        last = max((t for t, firing in state if firing), default=None)
        over = last is None or last == state[-1][0]
        return {"false_share": sum(calm) / len(calm),
                "detected_after_s": None if first is None else first - self.calm_s,
                "cleared_after_s": None if over else max(0.0, last + EVERY_S - burst_ended)}

    def _curves(self, done: Simulation, evicted, states) -> Iterator[dict]:
        table = done.timeline()
        total = _at(evicted, table["t"])
        for i, line in table.iterrows():
            t = float(line["t"])
            for metric, value in (("running", line["running"]), ("waiting", line["waiting"]),
                                  ("kv_usage", line["kv_usage"]), ("cache_evictions", total[i])):
                yield self._row(self._reading(metric, value, "the engine's state"), question="curve", t=t)
            for name in ALARMS:
                yield self._row(self._reading("firing", float(states[name][i][1]), ALARMS[name]), question="strip",
                                alarm=name, t=t)

    def _over_seeds(self, metric: str, values: list[float], says: str) -> Reading:
        if len(values) < len(self.seeds):
            what = {"detected_after_s": "did not fire", "cleared_after_s": "was still on at the end"}[metric]
            lacking = len(self.seeds) - len(values)
            return missing(metric, METRICS[metric], f"it {what} in {lacking} of {len(self.seeds)} seeds",
                           source="serving.alerts")
        mean = t_interval(values)
        return replace(self._reading(metric, mean.value, says), n=mean.n,
                       **(dict(low=max(0.0, mean.low), high=mean.high) if mean.n > 1 else {}))

    def _reading(self, metric: str, value: float, method: str) -> Reading:
        return Reading(metric, float(value), METRICS[metric], "simulated", source="serving.alerts", method=method,
                       hardware=f"simulated {engine().device}", note=f"simulated clock; step time: {engine().source}")

    def _row(self, reading: Reading, **about) -> dict:
        shown = dict(about, calm_s=self.calm_s, burst_s=self.burst_s)
        return case_row(self, reading, digest([self.comparison_id, about]), case=json.dumps(shown, sort_keys=True))


def _at(steps: list[tuple[float, int]], times) -> list[int]:
    """The count at each of the times: of the last step that had ended."""
    import numpy as np
    ended, counts = np.array([t for t, _ in steps]), [0, *(n for _, n in steps)]
    return [counts[i] for i in np.searchsorted(ended, times, side="right")]
