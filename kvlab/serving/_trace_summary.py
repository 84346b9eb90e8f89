"""What a trace is like, in one pass and constant memory: rate, lengths, burstiness, and how much prompts share."""
from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from kvlab.serving.request import Request

PERCENTILES = (1, 10, 25, 50, 75, 90, 99)
MOST_PIECES = 400_000           # pieces remembered to find what prompts share, about 120 MB


class Lengths:
    """A histogram of whole numbers: exact below 512, above in bins of at most 1/256 of the value.

    A percentile is the middle of its bin, so at most 0.2 % off; mean, least and most are exact.
    """

    def __init__(self):
        self.bins, self.count, self.total, self.least, self.most = Counter(), 0, 0, None, None

    def add(self, value: int) -> None:
        shift = max(0, value.bit_length() - 9)
        self.bins[value >> shift << shift] += 1
        self.count, self.total = self.count + 1, self.total + value
        self.least = value if self.least is None else min(self.least, value)
        self.most = value if self.most is None else max(self.most, value)

    def percentile(self, percent: float) -> int:
        """The smallest value that at least `percent` of the numbers do not exceed (nearest rank)."""
        rank, passed = max(1, math.ceil(self.count * percent / 100)), 0
        for start in sorted(self.bins):
            passed += self.bins[start]
            if passed >= rank:
                width = 1 << max(0, start.bit_length() - 9)
                return min(start + (width - 1) // 2, self.most)
        raise ValueError("a percentile of no numbers; add some first")

    def summary(self) -> dict:
        return {"mean": self.total / self.count, "min": self.least, "max": self.most,
                **{f"p{percent}": self.percentile(percent) for percent in PERCENTILES}}


def chain_names(prefix: Sequence[int]) -> list[int]:
    """A name for each leading part of a prompt: equal where two prompts begin with the same pieces."""
    names, name = [], 0
    for piece in prefix:
        name = hash((name, str(piece)))                 # hash(-1) == hash(-2)
        names.append(name)
    return names


class Reuse:
    """How many leading pieces of each prompt a cache of `capacity` pieces holds (None: all), least recently used first.

    A piece is known by all ids up to it. Looked up, then kept; leading pieces count as used later than the ones behind
    them, so that the tail of a prompt goes first, as in an engine that frees blocks in reverse.
    """

    def __init__(self, capacity: int | None = None):
        self.capacity, self._kept = capacity, OrderedDict()
        self.pieces = self.hits = self.evictions = 0

    def add(self, prefix: Sequence[int]) -> int:
        """The number of leading pieces that were there."""
        names = chain_names(prefix)
        found = next((i for i, name in enumerate(names) if name not in self._kept), len(names))
        for name in reversed(names):
            self._kept[name] = None
            self._kept.move_to_end(name)
        while self.capacity is not None and len(self._kept) > self.capacity:
            self._kept.popitem(last=False)
            self.evictions += 1
        self.pieces, self.hits = self.pieces + len(names), self.hits + found
        return found

    @property
    def share(self) -> float:
        return self.hits / self.pieces if self.pieces else 0.0


def reuse(requests: Iterable[Request], capacities: Sequence[int | None]) -> list[float]:
    """Share of all prompts' pieces found in a cache of each capacity (in pieces; None: unlimited), in one pass."""
    caches = [Reuse(capacity) for capacity in capacities]
    for request in requests:
        for cache in caches:
            cache.add(request.prefix)
    return [cache.share for cache in caches]


def describe(requests: Iterable[Request]) -> dict:
    """Statistics of requests in order of arrival, in one pass.

    count, duration_s (first to last arrival), rate_per_s ((count − 1) ÷ duration), gap_cv (standard deviation ÷ mean
    of the times between arrivals: 1 is Poisson, above is bursty), longest_gap_s and longest_gap_at_s (when it began);
    prompt_tokens and output_tokens: mean, min, max exact, percentiles within 0.2 % (nearest rank); shared_prefix: share
    of the prompts' pieces that an earlier prompt began with, None if no request names pieces; shared_prefix_note.
    None where one request has no gap. Refused (ValueError): no requests, requests that are not in order.
    """
    prompt, output, cache = Lengths(), Lengths(), Reuse(MOST_PIECES)
    first = last = None
    gaps, mean, squares, longest, longest_at = 0, 0.0, 0.0, None, None
    for request in requests:
        now = request.arrival_s
        if last is not None:
            gap = now - last
            if gap < 0:
                raise ValueError(f"request {request.id} arrives {-gap:g} s before the one before it; sort them first")
            gaps += 1
            off = gap - mean
            mean += off / gaps
            squares += off * (gap - mean)
            if longest is None or gap > longest:
                longest, longest_at = gap, last
        first, last = now if first is None else first, now
        prompt.add(request.prompt_tokens)
        output.add(request.output_tokens)
        cache.add(request.prefix)
    if first is None:
        raise ValueError("there are no requests to describe")
    duration = last - first
    note = "no request names the pieces of its prompt" if not cache.pieces else (
        "" if not cache.evictions else f"at least: only the last {MOST_PIECES:,} pieces were remembered")
    return dict(count=prompt.count, duration_s=duration, rate_per_s=gaps / duration if duration else None,
                gap_cv=math.sqrt(squares / gaps) / mean if mean else None, longest_gap_s=longest,
                longest_gap_at_s=longest_at, prompt_tokens=prompt.summary(), output_tokens=output.summary(),
                shared_prefix=cache.share if cache.pieces else None, shared_prefix_note=note)
