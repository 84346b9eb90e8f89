"""What serving engines export, in one vocabulary: each engine's metric names mapped onto the same measures.

data/engine_metrics.csv maps engine by engine: one line per measure and metric, the newest name first; a line without
a metric says why there is none. What an engine does not give is missing with that reason, never 0. Counters keep
their series apart, so that a restart of one engine among several is seen.
"""
from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from kvlab.catalog import rows
from kvlab.registry import no_such

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

PREFIXES: dict[str, str | tuple[str, ...]] = {                  # by which an engine is known
    "vllm": "vllm:", "sglang": "sglang:", "tgi": "tgi_", "triton": ("nv_trt_llm_", "nv_llm_"),
    "trtllm": "trtllm_", "llamacpp": "llamacpp:", "kvlab_sim": "kvlab_sim:"}
# Ranks of one tensor- or pipeline-parallel engine repeat the same number: copies, not shares. SGLang labels them so.
COPIES = ("tp_rank", "pp_rank", "moe_ep_rank")
NOT_EXPORTED = "this server does not export "                  # of what its engine has
MOST = 1e18                                                    # no engine counts so far, and sums stay finite
_TERM = re.compile(r'([a-zA-Z_:][\w:]*)(?:\{(\w+)="([^"]*)"\})?(?:\[(\w+)\])?')

Series = tuple[tuple[str, str], ...]                   # labels and their values, sorted
Buckets = tuple[tuple[float, float], ...]              # upper bound, observations up to it; the last bound is infinite


@dataclass(frozen=True, slots=True)
class Measure:
    """One thing that engines tell: gauge (as it is now), counter (total since the start) or histogram.

    across: what several engines of one exposition come to, "sum", or "mean" for what is no amount.
    """
    name: str
    unit: str
    type: str
    meaning: str
    across: str = "sum"


MEASURES = {m.name: m for m in (
    Measure("running", "count", "gauge", "requests in the batch"),
    Measure("waiting", "count", "gauge", "requests not yet admitted, preempted ones included"),
    Measure("kv_usage", "ratio", "gauge", "share of the KV cache in use, 0 to 1", "mean"),
    Measure("preemptions", "count", "counter", "times a running request lost its KV cache and went back to the queue"),
    Measure("finished", "count", "counter", "requests that ended"),
    Measure("prompt_tokens", "tokens", "counter", "prompt tokens, those found in the prefix cache included"),
    Measure("generated_tokens", "tokens", "counter", "tokens generated"),
    Measure("prefix_queried_tokens", "tokens", "counter", "prompt tokens looked up in the prefix cache"),
    Measure("prefix_hit_tokens", "tokens", "counter", "prompt tokens found in the prefix cache"),
    Measure("queue_s", "s", "histogram", "from arrival to first admission"),
    Measure("ttft_s", "s", "histogram", "from arrival to the first token"),
    Measure("tpot_s", "s", "histogram", "time per output token after the first, a mean per request"),
    Measure("itl_s", "s", "histogram", "gap between two output tokens"),
    Measure("e2e_s", "s", "histogram", "from arrival to the last token"),
    Measure("kv_tokens", "tokens", "gauge", "tokens that fit into the KV cache"),
    Measure("kv_blocks", "count", "gauge", "blocks of the KV cache"),
    Measure("block_size", "tokens", "gauge", "tokens per block", "mean"),
)}


@dataclass(frozen=True, slots=True)
class Term:
    """One metric name, of its series those with `label` equal to `value` (absent counts as ""), as in PromQL.

    number_in: the label whose text is the number, for metrics whose value is always 1.
    """
    metric: str
    label: str = ""
    value: str = ""
    number_in: str = ""


@dataclass(frozen=True, slots=True)
class Mapped:
    """How one engine tells a measure: one term, or two joined by + (counters), / or * (gauges of the same labels)."""
    terms: tuple[Term, ...]
    joined: str
    text: str
    note: str
    source: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one scrape told: per measure and series the number, or why there is none.

    at_s: when, in seconds of any clock that only goes forward. gauges, counters: number by series. histograms:
    cumulative counts by series. names: the metric that each was read from. notes: what the mapping says of it.
    unreadable: of the missing ones those that the server gives, as something that is no number.
    """
    at_s: float
    engine: str
    gauges: Mapping[str, Mapping[Series, float]]
    counters: Mapping[str, Mapping[Series, float]]
    histograms: Mapping[str, Mapping[Series, Buckets]]
    names: Mapping[str, str]
    missing: Mapping[str, str]
    notes: Mapping[str, str] = field(default_factory=dict)
    unreadable: frozenset[str] = frozenset()

    def value(self, measure: str) -> float | None:
        """A gauge or a counter's total over all engines of the exposition; None = missing."""
        series = self.gauges.get(measure) or self.counters.get(measure)
        if not series:
            return None
        total = sum(series.values())
        return total / len(series) if MEASURES[measure].across == "mean" else total

    @property
    def kind(self) -> str:
        """Of its numbers, in the result table's words."""
        return "simulated" if self.engine == "kvlab_sim" else "measured"


@cache
def mappings(engine: str) -> dict[str, tuple[tuple[Mapped, ...], str]]:
    """Of each measure the metrics that may tell it, newest first, and why it is missing if none is there.

    KeyError: an engine that is not among PREFIXES.
    """
    if engine not in PREFIXES:
        raise no_such("engine", engine, PREFIXES)
    found: dict[str, tuple[tuple[Mapped, ...], str]] = {}
    for row in rows("engine_metrics.csv"):
        if row["engine"] == engine:
            known, why = found.get(row["measure"], ((), ""))
            if row["metric"]:
                known += (_mapped(row),)
                why = why or NOT_EXPORTED + " or ".join(one.text for one in known) + " (yet)"
            else:
                why = row["note"]
            found[row["measure"]] = (known, why)
    return found


def _mapped(row: dict[str, str]) -> Mapped:
    left, joined, right = (re.split(r" ([+/*]) ", row["metric"]) + ["", ""])[:3]
    terms = tuple(Term(*(part or "" for part in found.groups())) for text in (left, right)
                  if (found := _TERM.fullmatch(text)))
    return Mapped(terms, joined, row["metric"], row["note"], row["source"])


def engine_of(names: Iterable[str]) -> str:
    """The engine whose metrics these are: the one with most names.

    ValueError where there are none of any.
    """
    names = list(names)
    counts = {engine: sum(name.startswith(prefix) for name in names) for engine, prefix in PREFIXES.items()}
    engine = max(counts, key=counts.__getitem__)
    if not counts[engine]:
        known = ", ".join(prefix if isinstance(prefix, str) else prefix[0] for prefix in PREFIXES.values())
        raise ValueError(f"none of its {len(names)} metrics is of an engine that kvlab knows; theirs begin with "
                         f"{known}")
    return engine


def read(families: Iterable[Metric], at_s: float, engine: str = "") -> Snapshot:
    """The snapshot that the metric families of one exposition make. engine: "" = detect it by the names."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in families:
        for sample in family.samples:
            value = float(str(sample.value))                # a whole number may be beyond any float
            samples.setdefault(sample.name, []).append((sample.labels, value))
    engine = engine or engine_of(samples)
    parts: dict[str, dict] = {"gauge": {}, "counter": {}, "histogram": {}}
    names, missing, notes, unreadable = {}, {}, {}, set()
    for measure, (known, why) in mappings(engine).items():
        kind = MEASURES[measure].type
        try:
            for mapped in known:
                series = _histogram(samples, mapped) if kind == "histogram" else _numbers(samples, mapped)
                if series:
                    parts[kind][measure] = _checked(measure, series)
                    names[measure], notes[measure] = mapped.text, mapped.note
                    break
            else:
                missing[measure] = why
        except ValueError as error:
            missing[measure] = str(error)
            unreadable.add(measure)
    return Snapshot(at_s, engine, parts["gauge"], parts["counter"], parts["histogram"], names, missing, notes,
                    frozenset(unreadable))


def _numbers(samples, mapped: Mapped) -> dict[Series, float]:
    sides = [_without_copies(_term(samples, term)) for term in mapped.terms]
    if not all(sides):
        return {}
    if mapped.joined == "+":                                  # two counters: their series stay apart
        return {(("", str(i)), *series): value for i, side in enumerate(sides) for series, value in side.items()}
    if not mapped.joined:
        return sides[0]
    both = [(series, sides[0][series], sides[1][series]) for series in sides[0] if series in sides[1]]
    if mapped.joined == "/":
        return {series: left / right for series, left, right in both if right}
    return {series: left * right for series, left, right in both}


def _term(samples, term: Term) -> list[tuple[dict[str, str], float]]:
    found = samples.get(term.metric) or samples.get(term.metric + "_total", [])    # the parser adds what a type implies
    picked = []
    for labels, value in found:
        if term.label and labels.get(term.label, "") != term.value:
            continue
        if term.number_in:
            try:
                value = float(labels.get(term.number_in, ""))
            except ValueError:                                # "None" before the engine knows it
                continue
        picked.append(({name: text for name, text in labels.items() if name != term.label and not term.number_in
                        or name in ("engine", "model_name")}, value))
    return picked


def _without_copies(picked: list[tuple[dict[str, str], float]]) -> dict[Series, float]:
    series: dict[Series, float] = {}
    for labels, value in picked:
        key = _series(labels)
        series[key] = value if key not in series or not value <= series[key] else series[key]
    return series


def _series(labels: Mapping[str, str], *without: str) -> Series:
    return tuple(sorted((name, text) for name, text in labels.items() if name not in COPIES and name not in without))


def _histogram(samples, mapped: Mapped) -> dict[Series, Buckets]:
    raw: dict[Series, dict[str, dict[float, float]]] = {}
    for labels, count in samples.get(mapped.terms[0].metric + "_bucket", []):
        copy = ",".join(labels.get(name, "") for name in COPIES)
        try:
            bound = float(labels["le"])
        except (KeyError, ValueError):
            raise ValueError(f"a bucket of {mapped.text} has no bound that is a number") from None
        raw.setdefault(_series(labels, "le"), {}).setdefault(copy, {})[bound] = count
    series = {}
    for key, copies in raw.items():
        buckets = max(copies.values(), key=lambda buckets: max(buckets.values()))
        if max(buckets) != math.inf:
            raise ValueError(f"{mapped.text} lacks its last bucket, le=\"+Inf\"")
        series[key] = tuple(sorted(buckets.items()))
    return series


def _checked(measure: str, series: dict) -> dict:
    """The series, or a ValueError that says why they are no numbers of that measure."""
    for value in series.values():
        counts = [count for _, count in value] if isinstance(value, tuple) else [value]
        wrong = next((count for count in counts if not 0 <= count <= MOST), None)
        if wrong is not None:
            raise ValueError(f"the server gives {wrong}, which is no number between 0 and {MOST:g}")
        if measure == "kv_usage" and value > 1.001:
            raise ValueError(f"the server gives {value}, which is no share between 0 and 1")
    return series
