"""Requests that were never recorded: arrivals, lengths and shared prefixes drawn from distributions, same by seed.

data/workloads.csv holds distributions fitted to public traces, each with its source and how far off it is, so that
studies run where the traces are not. Times are seconds, lengths tokens; what is drawn is simulated, never measured.
"""
from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from kvlab.catalog import rows
from kvlab.registry import no_such
from kvlab.serving.request import Request

MOST_OPEN = 50_000              # prompts that a later one may go on from; the oldest is forgotten
_NEAR = 48                      # of them, those looked at around the moment that a follow-up goes back to
_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp of a normal number: its median, and sigma, the standard deviation of the logarithm; clipped to its ends."""
    median: float
    sigma: float
    least: float = 1
    most: float = 10**8

    def __post_init__(self):
        if not 0 < self.least <= self.most or not self.median > 0 or not 0 <= self.sigma < 20:
            raise ValueError(f"a log-normal takes a median above 0, a sigma of at least 0 and 0 < least <= most, got "
                             f"median {self.median}, sigma {self.sigma}, least {self.least}, most {self.most}")

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """So many numbers, one by one and independent."""
        return np.clip(self.median * np.exp(self.sigma * rng.standard_normal(count)), self.least, self.most)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution by its percentiles: points of (percent, value) from 0 to 100, log(1 + value) straight between."""
    points: tuple[tuple[float, float], ...]

    def __post_init__(self):
        percents, values = ([point[i] for point in self.points] for i in (0, 1))
        if len(percents) < 2 or percents[0] != 0 or percents[-1] != 100 or percents != sorted(set(percents)) \
                or list(values) != sorted(values) or not 0 <= values[0] <= values[-1] < float("inf"):
            raise ValueError(f"quantiles take points from 0 to 100 percent with values of at least 0 that never fall, "
                             f"got {self.points!r:.200}")

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """So many numbers, one by one and independent."""
        percents, values = zip(*self.points, strict=True)
        return np.expm1(np.interp(rng.random(count) * 100, percents, np.log1p(values)))

    @property
    def mean(self) -> float:
        total = 0.0
        for (low, a), (high, b) in zip(self.points, self.points[1:], strict=False):
            ratio = math.log1p(b) - math.log1p(a)
            total += (high - low) / 100 * ((b - a) / ratio - 1 if ratio > 1e-12 else a)
        return total


Distribution = LogNormal | Quantiles


@dataclass(frozen=True, slots=True)
class Workload:
    """What requests are like.

    Lengths are tokens, drawn one by one and independent of each other. rate_per_s: mean arrivals per second. gaps:
    the times between arrivals as a distribution, scaled to the rate; None: gamma of coefficient of variation gap_cv
    (1: Poisson; 0: even). tick_s: arrivals show only at its multiples. prompt, output: a first prompt's and every
    answer's tokens. system_prompts: how many there are (0: none), each of system_pieces pieces, the k-th drawn with
    weight 1 / k^zipf. follow: the share of requests that go on from an earlier prompt: from one that arrived `lag`
    seconds before them, with whose `kept` first pieces theirs begins, and `added` pieces behind them. A prompt has
    one follow-up, so that conversations grow and documents are asked about again. Where nothing that old and that
    long is open, the request is a first one after all.
    """
    name: str
    rate_per_s: float
    prompt: Distribution
    output: Distribution
    gap_cv: float = 1.0
    gaps: Quantiles | None = None
    tick_s: float = 0.0
    piece_tokens: int = 512
    system_prompts: int = 0
    system_pieces: int = 1
    zipf: float = 1.0
    follow: float = 0.0
    lag: Distribution | None = None
    kept: Distribution | None = None
    added: Distribution | None = None

    def __post_init__(self):
        for name, least, most in (("rate_per_s", 1e-9, 1e9), ("gap_cv", 0, 100), ("tick_s", 0, 1e6),
                                  ("piece_tokens", 1, 2**20), ("system_prompts", 0, 10**6), ("system_pieces", 1, 10**6),
                                  ("zipf", 0, 10), ("follow", 0, 1)):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"workload {self.name}: {name}={getattr(self, name)!r} must be from {least:g} to "
                                 f"{most:g}")
        if self.follow and None in (self.lag, self.kept, self.added):
            raise ValueError(f"workload {self.name}: follow={self.follow} needs lag, kept and added")


@cache
def workloads() -> dict[str, Workload]:
    """The fitted workloads of data/workloads.csv by name."""
    given: dict[str, dict] = {}
    for row in rows("workloads.csv"):
        if row["kind"] == "parameter":
            given.setdefault(row["workload"], {})[row["name"]] = _value(row["value"])
    return {name: Workload(name, **fields) for name, fields in given.items()}


def _value(text: str) -> int | float | Quantiles:
    """A parameter of data/workloads.csv: a number, or percentiles as 0:3 1:17 … 100:7437."""
    if ":" not in text:
        return int(text) if text.isdigit() else float(text)
    points = (point.partition(":") for point in text.split())
    return Quantiles(tuple((float(percent), float(value)) for percent, _, value in points))


def synthetic(workload: str | Workload, count: int, rate: float | None = None, seed: int = 0) -> Iterator[Request]:
    """`count` requests of a workload, in order of arrival; the same for the same arguments.

    workload: a name of data/workloads.csv, or one's own. rate: arrivals per second instead of the workload's; lags of
    follow-ups stay in seconds. Refused: an unknown name (KeyError), a count below 0, a rate that is not above 0.
    """
    if isinstance(workload, str):
        known = workloads()
        if workload not in known:
            raise no_such("workload", workload, known)
        workload = known[workload]
    if rate is not None:
        workload = replace(workload, rate_per_s=rate)
    if count < 0 or seed < 0:
        raise ValueError(f"count={count} and seed={seed} must be at least 0")
    return _drawn(workload, count, seed)


def _drawn(w: Workload, count: int, seed: int) -> Iterator[Request]:
    streams = np.random.default_rng(seed).spawn(4)          # one a purpose: more of one does not shift the others
    gap_rng, prompt_rng, output_rng, prefix_rng = streams
    pieces = _Pieces(w, prefix_rng) if w.follow or w.system_prompts else None
    now, made = 0.0, 0
    while made < count:
        size = min(_AT_ONCE, count - made)
        gaps = _gaps(w, gap_rng)
        prompts, outputs = _whole(w.prompt.draw(prompt_rng, _AT_ONCE)), _whole(w.output.draw(output_rng, _AT_ONCE))
        for gap, prompt, output in zip(gaps[:size], prompts, outputs, strict=False):
            now += gap if made else 0.0
            time, prefix = (now // w.tick_s * w.tick_s if w.tick_s else now), ()
            if pieces is not None:
                prompt, prefix = pieces.next(time, int(prompt))
            yield Request(str(made), float(time), int(prompt), int(output), prefix=prefix, piece_tokens=w.piece_tokens)
            made += 1


def _gaps(w: Workload, rng: np.random.Generator) -> np.ndarray:
    if w.gaps is not None:
        return w.gaps.draw(rng, _AT_ONCE) / (w.gaps.mean * w.rate_per_s)
    if w.gap_cv == 0:
        return np.full(_AT_ONCE, 1 / w.rate_per_s)
    shape = w.gap_cv**-2
    return rng.gamma(shape, 1 / (shape * w.rate_per_s), _AT_ONCE)


def _whole(drawn: np.ndarray) -> np.ndarray:
    return np.maximum(1, np.rint(drawn)).astype(np.int64)


def _stream(draw: Callable[[int], np.ndarray]) -> Iterator:
    """One number (or row) after the other of what is drawn many at a time."""
    while True:
        yield from draw(_AT_ONCE)


class _Pieces:
    """Which pieces each prompt begins with: those of a system prompt, or of an earlier prompt that it goes on from."""

    def __init__(self, w: Workload, rng: np.random.Generator):
        self.w = w
        chance, *of_links = rng.spawn(4)
        self.chances = _stream(lambda count: chance.random((count, 3)))
        self.links = zip(*(_stream(partial(one.draw, rng)) for one, rng in
                           zip((w.lag, w.kept, w.added), of_links, strict=True) if one), strict=True)
        self.times: list[float] = []                        # of the open prompts, in order of arrival
        self.open: list[tuple[int, ...]] = []
        self.forgotten = 0.0                                # until then nothing is open any more
        self.fresh = w.system_prompts * w.system_pieces     # the next id nobody has
        weights = np.arange(1.0, w.system_prompts + 1) ** -w.zipf
        self.shares = np.cumsum(weights / weights.sum()) if w.system_prompts else None

    def next(self, time: float, prompt: int) -> tuple[int, tuple[int, ...]]:
        """(tokens, pieces) of a prompt that arrives at `time`; prompt: how long it is if it is a first one."""
        follow, which, last = next(self.chances)
        found = self._follow_up(time) if follow < self.w.follow else None
        if found is None:
            found, number = self._system(which), -(-prompt // self.w.piece_tokens)
        else:
            found, number = found
            prompt = (number - 1) * self.w.piece_tokens + 1 + int(last * self.w.piece_tokens)
        own = max(0, number - len(found))
        prefix = found[:number] + tuple(range(self.fresh, self.fresh + own))
        self.fresh += own
        if self.w.follow:
            self.times.append(time)
            self.open.append(prefix)
            if len(self.open) > MOST_OPEN:
                self.forgotten = self.times[MOST_OPEN // 10]
                del self.times[:MOST_OPEN // 10], self.open[:MOST_OPEN // 10]
        return prompt, prefix

    def _system(self, which: float) -> tuple[int, ...]:
        if self.shares is None:
            return ()
        first = min(int(np.searchsorted(self.shares, which)), self.w.system_prompts - 1) * self.w.system_pieces
        return tuple(range(first, first + self.w.system_pieces))

    def _follow_up(self, time: float) -> tuple[tuple[int, ...], int] | None:
        """(pieces kept, pieces of the whole prompt); None where no open prompt is old and long enough."""
        lag, kept, added = next(self.links)
        then, kept = time - float(lag), max(1, round(float(kept)))
        if then < self.forgotten:
            return None
        middle = bisect_left(self.times, then)
        for reach in (_NEAR, 8 * _NEAR):
            near = [i for i in range(max(0, middle - reach), min(len(self.open), middle + reach))
                    if len(self.open[i]) >= kept]
            if near:
                break
        else:
            return None
        # the prompt that fits best: kept whole but for its last piece, which the answer went on in
        best = min(near, key=lambda i: (abs(len(self.open[i]) - 1 - kept), abs(i - middle)))
        del self.times[best]
        return self.open.pop(best)[:kept], kept + round(float(added))
