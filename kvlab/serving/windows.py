"""What happened between scrapes: counters' increases with restarts handled, and quantiles of histograms.

A counter that went down was restarted: it counts from 0 again, and the window says so. A series that was not there
before counts from 0. Quantiles interpolate inside a bucket as PromQL's histogram_quantile does.
Source: Prometheus, promql/quantile.go and the functions increase and histogram_quantile (documentation, 2.42).
"""
from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kvlab.serving.metrics import Buckets, Series, Snapshot


@dataclass(frozen=True, slots=True)
class Quantile:
    """A quantile in the histogram's unit. at_least: it lies beyond the last finite bound, which value is."""
    value: float
    at_least: bool = False


def quantile(q: float, buckets: Mapping[float, float]) -> Quantile | None:
    """The q-quantile (0 to 1) of cumulative counts by upper bound, the last one infinite; None without observations.

    ValueError: q outside 0 … 1, or no infinite bound.
    """
    if not 0 <= q <= 1:
        raise ValueError(f"a quantile is between 0 and 1, got {q}")
    bounds = sorted(buckets)
    if not bounds or bounds[-1] != math.inf:
        raise ValueError("a histogram's last bound must be infinite")
    counts, most = [], 0.0
    for bound in bounds:                            # bounds are scraped one after another: a later count is never less
        most = max(most, buckets[bound])
        counts.append(most)
    if not most or len(bounds) == 1:
        return None
    rank = q * most
    at = next(i for i, count in enumerate(counts) if count >= rank)
    if at == len(bounds) - 1:
        return Quantile(bounds[-2], at_least=True)
    if at == 0 and bounds[0] <= 0:
        return Quantile(bounds[0])
    low, below = (bounds[at - 1], counts[at - 1]) if at else (0.0, 0.0)
    inside = counts[at] - below
    return Quantile(low + (bounds[at] - low) * ((rank - below) / inside if inside else 0.0))


class Window:
    """What the scrapes of the last `asked_s` seconds tell. over_s: what they span, None = since the engine's start.

    engine, names, missing: of the newest scrape. restarts: measures whose counters went down within the window.
    """

    def __init__(self, entries: list[_Entry], asked_s: float, since_start: bool = False):
        self._entries, self.asked_s = entries, asked_s
        self.newest = entries[-1].snapshot
        self.over_s = None if since_start else self.newest.at_s - entries[0].snapshot.at_s
        self.restarts = sorted({measure for entry in entries[1:] for measure in entry.restarted})

    @property
    def short(self) -> bool:
        """Whether it spans less than was asked for."""
        return self.over_s is not None and self.over_s < 0.99 * self.asked_s

    def increase(self, measure: str) -> float | None:
        """How much a counter grew over all engines; None = missing, or no second scrape yet."""
        if measure in self.newest.missing or self.over_s == 0:
            return None
        first, last = self._entries[0].totals, self._entries[-1].totals
        if self.over_s is None:
            return self.newest.value(measure)
        return last[measure] - first.get(measure, 0.0) if measure in last else None

    def rate(self, measure: str) -> float | None:
        """Increase per second; None also where the window has no length."""
        grown = self.increase(measure)
        return grown / self.over_s if grown is not None and self.over_s else None

    def ratio(self, part: str, whole: str) -> float | None:
        """Increase of one counter over that of another; None = one is missing, or the whole did not grow."""
        part_s, whole_s = self.increase(part), self.increase(whole)
        return part_s / whole_s if part_s is not None and whole_s else None

    def quantile(self, measure: str, q: float) -> Quantile | None:
        """Of what was observed within the window; None = missing, or nothing was."""
        if measure in self.newest.missing or self.over_s == 0:
            return None
        last = self._entries[-1].buckets.get(measure, {})
        first = {} if self.over_s is None else self._entries[0].buckets.get(measure, {})
        grown = {bound: count - first.get(bound, 0.0) for bound, count in last.items()}
        return quantile(q, grown) if grown else None

    def mean_of_fullest(self, measure: str) -> float | None:
        """A gauge averaged over the window's scrapes, engine by engine, then the largest of the engines."""
        seen: dict[Series, list[float]] = {}
        for entry in self._entries if self.over_s is None else self._within():
            for series, value in entry.snapshot.gauges.get(measure, {}).items():
                seen.setdefault(series, []).append(value)
        if measure in self.newest.missing or not seen:
            return None
        return max(sum(values) / len(values) for values in seen.values())

    def _within(self) -> list[_Entry]:
        return [entry for entry in self._entries if entry.snapshot.at_s >= self.newest.at_s - self.asked_s]


@dataclass(frozen=True, slots=True)
class _Entry:
    """totals, buckets: what counters and histograms would say had no engine been restarted since the first scrape."""
    snapshot: Snapshot
    totals: Mapping[str, float]
    buckets: Mapping[str, Mapping[float, float]]
    restarted: frozenset[str]


class History:
    """Scrapes in order, kept as long as a window of keep_s seconds needs them.

    ValueError from `add`: a scrape that is not later than the one before, or of another engine.
    """

    def __init__(self, snapshots: Iterable[Snapshot] = (), keep_s: float = math.inf):
        self.keep_s = keep_s
        self._entries: deque[_Entry] = deque()
        self._counters: dict[str, dict[Series, float]] = {}
        self._histograms: dict[str, dict[Series, Buckets]] = {}
        self._unreadable: set[str] = set()              # so far: what was counted before it can be read is unknown
        for snapshot in snapshots:
            self.add(snapshot)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, snapshot: Snapshot) -> None:
        """Append one scrape, in order of time."""
        before = self._entries[-1] if self._entries else None
        if before and snapshot.engine != before.snapshot.engine:
            raise ValueError(f"the server was {before.snapshot.engine} and is {snapshot.engine} now; watch it anew")
        if before and not snapshot.at_s > before.snapshot.at_s:
            raise ValueError(f"a scrape at {snapshot.at_s} s is not later than the one before")
        totals = dict(before.totals) if before else {}
        buckets = dict(before.buckets) if before else {}
        restarted = set()
        self._unreadable |= snapshot.unreadable - set(self._counters) - set(self._histograms)
        for measure, series in snapshot.counters.items():
            known = self._counters.setdefault(measure, {})
            from_zero = before and measure not in self._unreadable
            for key, value in series.items():
                was = known.get(key, 0.0 if from_zero else value)
                if value < was:
                    restarted.add(measure)
                    was = 0.0
                totals[measure] = totals.get(measure, 0.0) + value - was
                known[key] = value
        for measure, series in snapshot.histograms.items():
            known = self._histograms.setdefault(measure, {})
            sums = dict(buckets.get(measure, {}))
            from_zero = before and measure not in self._unreadable
            for key, now in series.items():
                was = known.get(key, () if from_zero else now)
                if was and (now[-1][1] < was[-1][1] or [b for b, _ in now] != [b for b, _ in was]):
                    restarted.add(measure)
                    was = ()
                for (bound, count), old in zip(now, [count for _, count in was] or [0.0] * len(now)):
                    sums[bound] = sums.get(bound, 0.0) + count - old
                known[key] = now
            buckets[measure] = sums
        self._unreadable -= set(snapshot.counters) | set(snapshot.histograms)
        if before:                                      # of what was, gauges are looked at again; the rest is in totals
            self._entries[-1] = replace(before, snapshot=replace(before.snapshot, counters={}, histograms={}))
        self._entries.append(_Entry(snapshot, totals, buckets, frozenset(restarted)))
        while len(self._entries) > 2 and self._entries[1].snapshot.at_s <= snapshot.at_s - self.keep_s:
            self._entries.popleft()

    def window(self, seconds: float) -> Window:
        """The window that ends with the newest scrape, from the last one at least `seconds` earlier, or from the first.

        ValueError: no scrape at all.
        """
        if not self._entries:
            raise ValueError("there is no scrape to look at")
        since, kept = self._entries[-1].snapshot.at_s - seconds, []
        for entry in reversed(self._entries):
            kept.append(entry)
            if entry.snapshot.at_s <= since:
                break
        return Window(kept[::-1], seconds)

    def since_start(self) -> Window:
        """What the newest scrape tells of all the time since the engine was started."""
        last = self._entries[-1]
        buckets: dict[str, dict[float, float]] = {}
        for measure, series in last.snapshot.histograms.items():
            sums = buckets.setdefault(measure, {})
            for now in series.values():
                for bound, count in now:
                    sums[bound] = sums.get(bound, 0.0) + count
        return Window([_Entry(last.snapshot, last.totals, buckets, frozenset())], math.inf, since_start=True)

