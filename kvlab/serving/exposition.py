"""A simulation as Prometheus sees an engine: vLLM's metric names under the prefix kvlab_sim:, at any instant.

So that dashboards, rules and `kvlab watch` can be tried offline. Counters and gauges are the timeline's last row at or
before the instant; histograms hold what had been observed by then: TTFT when a first token came, queue time, TPOT and
latency when a request finished, as in vLLM. Times are the trace's seconds. Everything is simulated.
Source: names and buckets of vllm 0.32.0, vllm/v1/metrics/loggers.py and buckets.py.
"""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from kvlab.serving.metrics import Snapshot, read
from kvlab.serving.request import Served

if TYPE_CHECKING:
    import pandas as pd
    from prometheus_client.metrics_core import Metric

PREFIX = "kvlab_sim:"
LATENCY_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
             960.0, 1920.0, 7680.0)
TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
          160.0, 640.0, 2560.0)
TPOT_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_GAUGES = {"running": ("num_requests_running", "Requests in the batch."),
           "waiting": ("num_requests_waiting", "Requests not yet admitted."),
           "kv_usage": ("kv_cache_usage_perc", "Share of blocks in use, 0 to 1.")}
_COUNTERS = {"preemptions": ("num_preemptions", "Preemptions so far."),
             "finished": ("request_success", "Requests finished so far."),
             "prompt_tokens": ("prompt_tokens", "Prompt tokens, cached ones included."),
             "generated_tokens": ("generation_tokens", "Tokens generated."),
             "queried_tokens": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
             "cached_tokens": ("prefix_cache_hits", "Prompt tokens found in the prefix cache.")}
_HISTOGRAMS = {"request_queue_time_seconds": ("queue_s", "last_token_s", LATENCY_S, "Time in the queue."),
               "time_to_first_token_seconds": ("ttft_s", "first_token_s", TTFT_S, "Time to first token."),
               "request_time_per_output_token_seconds": ("tpot_s", "last_token_s", TPOT_S, "Time per output token."),
               "e2e_request_latency_seconds": ("e2e_s", "last_token_s", LATENCY_S, "Arrival to last token.")}


class Exposition:
    """The metrics of one simulation. timeline: its DataFrame, in order of t; served: its requests.

    num_blocks, block_size: the pool of all replicas, exported as cache_config_info if both are given. ValueError: an
    empty timeline, or one without the columns that are exported.
    """

    def __init__(self, timeline: pd.DataFrame, served: Iterable[Served] = (), *, model: str = "simulated",
                 num_blocks: int | None = None, block_size: int | None = None):
        lacking = {"t", *_GAUGES, *_COUNTERS} - set(timeline)
        if lacking or not len(timeline):
            columns = ", ".join(["t", *_GAUGES, *_COUNTERS])
            raise ValueError(f"the timeline needs at least one row and the columns {columns}"
                             + (f"; it lacks {', '.join(sorted(lacking))}" if lacking else ""))
        self._rows = timeline[["t", *_GAUGES, *_COUNTERS]].astype(float).to_dict("records")
        self.times: list[float] = [row["t"] for row in self._rows]
        if self.times != sorted(self.times):
            raise ValueError("the timeline's times must not go backward")
        self.model = model
        self.cache = None if num_blocks is None or block_size is None else {
            "block_size": str(block_size), "num_gpu_blocks": str(num_blocks),
            "kv_cache_size_tokens": str(num_blocks * block_size)}
        served = list(served)
        self._observed = {name: _Observed(served, value, when, bounds)
                          for name, (value, when, bounds, _) in _HISTOGRAMS.items()}

    def families(self, times: Iterable[float], clock: float | None = None) -> list[Metric]:
        """The metric families with one sample per series and instant. clock: what is added to make timestamps of
        the instants (Unix seconds at t = 0), None = no timestamps. ValueError: an instant before the first row."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
        names, values = ["engine", "model_name"], ["0", self.model]
        gauges = {key: GaugeMetricFamily(PREFIX + name, says, labels=names) for key, (name, says) in _GAUGES.items()}
        counters = {key: CounterMetricFamily(PREFIX + name, says,
                                             labels=[*names, *(["finished_reason"] if key == "finished" else [])])
                    for key, (name, says) in _COUNTERS.items()}
        histograms = {name: HistogramMetricFamily(PREFIX + name, says, labels=names)
                      for name, (_, _, _, says) in _HISTOGRAMS.items()}
        cache = GaugeMetricFamily(PREFIX + "cache_config_info", "The pool.", labels=[*names, *(self.cache or ())])
        for t in times:
            stamp = None if clock is None else clock + t
            at = bisect_right(self.times, t) - 1
            if at < 0:
                raise ValueError(f"the timeline begins at {self.times[0]} s, and {t} s was asked for")
            row = self._rows[at]
            for key, gauge in gauges.items():
                gauge.add_metric(values, row[key], timestamp=stamp)
            for key, counter in counters.items():
                counter.add_metric([*values, *(["stop"] if key == "finished" else [])], row[key], timestamp=stamp)
            for name, histogram in histograms.items():
                buckets, total = self._observed[name].until(t)
                histogram.add_metric(values, buckets, total, timestamp=stamp)
            if self.cache:
                cache.add_metric([*values, *self.cache.values()], 1, timestamp=stamp)
        return [*gauges.values(), *counters.values(), *histograms.values(), *([cache] if self.cache else [])]

    def text(self, t: float | None = None) -> str:
        """What /metrics would answer at t (default: at the end), in Prometheus' text format."""
        from prometheus_client import generate_latest
        return generate_latest(_Collected(self.families([self.times[-1] if t is None else t]))).decode()

    def openmetrics(self, clock: float, times: Iterable[float] | None = None) -> str:
        """All instants with timestamps, for `promtool tsdb create-blocks-from openmetrics`; default: every row.

        clock: Unix seconds at t = 0.
        """
        from prometheus_client.openmetrics.exposition import ALLOWUTF8, generate_latest
        families = self.families(self.times if times is None else times, clock)
        return generate_latest(_Collected(families), escaping=ALLOWUTF8).decode()      # else colons become underscores

    def snapshots(self, times: Iterable[float] | None = None) -> Iterator[Snapshot]:
        """One scrape per instant (default: per row), as `kvlab watch` would read it."""
        for t in self.times if times is None else times:
            yield read(self.families([t]), t, "kvlab_sim")


class _Collected:
    """What prometheus_client's writers take for a registry."""

    def __init__(self, families: list[Metric]):
        self.families = families

    def collect(self) -> list[Metric]:
        return self.families


class _Observed:
    """The observations of one histogram: per bucket the sorted times at which it grew."""

    def __init__(self, served: list[Served], value: str, when: str, bounds: tuple[float, ...]):
        pairs = sorted((getattr(one, when), getattr(one, value)) for one in served
                       if getattr(one, when) is not None and getattr(one, value) is not None)
        self._bounds = [*bounds, float("inf")]
        self._times = [[at for at, seen in pairs if seen <= bound] for bound in self._bounds]
        self._sums = [0.0]
        for _, seen in pairs:
            self._sums.append(self._sums[-1] + seen)

    def until(self, t: float) -> tuple[list[tuple[str, float]], float]:
        from prometheus_client.utils import floatToGoString
        counts = [bisect_right(times, t) for times in self._times]
        return [(floatToGoString(bound), float(count)) for bound, count in zip(self._bounds, counts)], \
            self._sums[counts[-1]]
