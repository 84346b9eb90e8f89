"""One benchmark of a load generator, or one simulation, as kvlab result rows: statistics, and intervals by requests.

Times are seconds. Requests next to each other resemble each other, so that a run is cut into up to ten consecutive
rounds, and rounds are drawn before requests (kvlab.comparing takes the same rounds for the ratio of two runs).
"""
from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from kvlab.record.reading import Reading

# time to first token; time per token after the first, one number per request; between one stream chunk and the next;
# from sending a request to its last token; waiting before it is first computed, which only a simulation tells
TIMES = ("ttft", "tpot", "itl", "e2e", "queue")
STATS = ("mean", "p50", "p90", "p99")
RATES = {"requests_per_s": "request/s", "tokens_per_s": "token/s"}          # finished requests, their output tokens
MOST_SAMPLES = 5_000_000        # of one metric
_PICKS, _DRAWS = 5_000, 400      # more requests than that do not narrow an interval any further


@dataclass
class Case:
    """One benchmark. load: what was offered, in the tool's words. stats: "ttft" -> {"mean": …, "p50": …, …} as the
    file has them, replaced by what `samples` give. samples: "ttft" -> one number per request, in order of sending.
    rates: as RATES. counts: requests behind a metric, where the file says so. partial: samples are a part of them.
    kind, method: of its readings; the default is the generator's clock.
    """
    load: str = ""
    stats: dict[str, dict[str, float]] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    partial: bool = False
    kind: str = "measured"
    method: str = "client"

    def rows(self, case_id: str, source: str, model: str) -> Iterator[dict]:
        """Rows of the result table."""
        about = dict(run_id=case_id, comparison_id=case_id, case_id=case_id, study="load", model=model,
                     case=json.dumps({"load": self.load}) if self.load else "")
        for time in TIMES:
            samples = self.samples.get(time, [])
            for stat in STATS:
                value = self.stats.get(time, {}).get(stat)
                if samples and not (self.partial and value is not None):
                    value = statistic(samples, stat)
                if value is None:
                    continue
                low, high, note = interval(samples, stat)
                yield about | asdict(Reading(
                    f"{time}_{stat}_s", value, "s", self.kind, self.method, source, scope="run",
                    n=self.counts.get(time) or len(samples) or None, low=low, high=high, note=note))
        for rate, unit in RATES.items():
            if rate in self.rates:
                yield about | asdict(Reading(rate, self.rates[rate], unit, self.kind, self.method, source, scope="run",
                                             note="one number for the whole run"))


def statistic(samples: Sequence[float], stat: str) -> float:
    """The mean or a percentile of the samples."""
    return float(np.mean(samples) if stat == "mean" else np.percentile(samples, float(stat[1:])))


def rounds(samples: Sequence[float]) -> list[np.ndarray]:
    """Up to ten consecutive parts of at least five samples each."""
    return np.array_split(np.asarray(samples, float), max(1, min(10, len(samples) // 5)))


def interval(samples: Sequence[float], stat: str) -> tuple[float | None, float | None, str]:
    """(low, high, note) of the 95 % bootstrap interval, by rounds; (None, None, why) where the samples do not give one.

    A percentile needs five samples beyond it, everything ten samples.
    """
    if not samples:
        return None, None, "the file has no single requests, so there is no interval"
    share = 0.5 if stat == "mean" else min(float(stat[1:]), 100 - float(stat[1:])) / 100
    needed = max(10, round(5 / share))
    if len(samples) < needed:
        return None, None, f"{len(samples)} requests are too few for an interval of {stat}; it takes {needed}"
    parts, rng = rounds(samples), np.random.default_rng(0)
    sizes = np.array([len(part) for part in parts])
    starts = np.cumsum(sizes) - sizes
    each = -(-min(len(samples), _PICKS) // len(parts))
    chosen = np.repeat(rng.integers(0, len(parts), (_DRAWS, len(parts))), each, axis=1)
    drawn = np.concatenate(parts)[starts[chosen] + (rng.random(chosen.shape) * sizes[chosen]).astype(int)]
    found = drawn.mean(1) if stat == "mean" else np.percentile(drawn, float(stat[1:]), axis=1)
    low, high = np.quantile(found, [0.025, 0.975])
    return float(low), float(high), ""


def number(value: object, scale: float = 1.0) -> float | None:
    """A finite number of at least 0 times scale; None where a file has null or no number there."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e300:
        return None
    return float(value) * scale


def text(value: object, most: int = 100) -> str:
    """A short plain text of a value from a file, "" where it is none."""
    return "".join(c if c.isprintable() else " " for c in value)[:most] if isinstance(value, str) else ""
