"""How the rows of data/workloads.csv came from the traces, and how far what they draw is from the trace.

Everything here is deterministic; a test makes the rows again from the traces and compares.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from kvlab.serving._trace_summary import chain_names, describe, reuse
from kvlab.serving.request import Request
from kvlab.serving.workloads import LogNormal, Quantiles, Workload, synthetic

PERCENTS = (0, 0.5, 1, 2, *range(5, 100, 5), 98, 99, 99.5, 99.9, 100)
CAPACITIES = (1000, 5000, 30000, None)                      # pieces of the cache whose hit rate is compared


def quantiles(values: Sequence[float], digits: int = 6) -> Quantiles:
    """The values' percentiles at PERCENTS, of `digits` significant digits."""
    found = np.percentile(np.asarray(values, float), PERCENTS)
    return Quantiles(tuple((percent, float(f"{value:.{digits}g}")) for percent, value in
                           zip(PERCENTS, found, strict=True)))


def log_normal(values: Sequence[float]) -> LogNormal:
    """The log-normal of the same mean and deviation of the logarithm, clipped to the values' ends."""
    logs = np.log(np.asarray(values, float))
    return LogNormal(float(np.exp(logs.mean())), float(logs.std()), float(min(values)), float(max(values)))


def links(requests: Sequence[Request], system_pieces: int) -> list[tuple[float, int] | None]:
    """For each request (seconds since, pieces in common with) the last one that shares the most with it; None: a first.

    A request that shares no more than the system prompt's pieces is a first one.
    """
    seen: dict[int, float] = {}
    found: list[tuple[float, int] | None] = []
    for request in requests:
        names = chain_names(request.prefix)
        kept = next((i for i, name in enumerate(names) if name not in seen), len(names))
        found.append((request.arrival_s - seen[names[kept - 1]], kept) if kept > system_pieces else None)
        seen.update(dict.fromkeys(names, request.arrival_s))
    return found


def fit(name: str, requests: Sequence[Request], *, gaps: str = "gamma", tick_s: float = 0.0, system_prompts: int = 0,
        system_pieces: int = 1) -> Workload:
    """A workload like the requests. gaps: "gamma" by their mean and CV, "quantiles", or "poisson" before a tick."""
    times = np.diff([request.arrival_s for request in requests])
    cv = 1.0 if gaps == "poisson" else float(f"{times.std() / times.mean():.4g}")
    fitted = Workload(name, float(f"{1 / times.mean():.6g}"), quantiles([r.prompt_tokens for r in requests]),
                      quantiles([r.output_tokens for r in requests]), gap_cv=1.0 if gaps == "quantiles" else cv,
                      gaps=quantiles(times * 1e6, 4) if gaps == "quantiles" else None, tick_s=tick_s)
    if not requests[0].prefix:
        return fitted
    found = links(requests, system_pieces if system_prompts else 0)
    later = [(request, link) for request, link in zip(requests, found, strict=True) if link]
    firsts = [request.prompt_tokens for request, link in zip(requests, found, strict=True) if not link]
    fitted = replace(
        fitted, prompt=quantiles(firsts), system_prompts=system_prompts, system_pieces=system_pieces,
        piece_tokens=requests[0].piece_tokens, follow=float(f"{len(later) / len(requests):.4g}"),
        lag=quantiles([lag for _, (lag, _) in later], 5), kept=quantiles([kept for _, (_, kept) in later]),
        added=quantiles([len(request.prefix) - kept for request, (_, kept) in later]))
    # Early requests find nothing open that is old enough and count as first ones: the wish exceeds what comes of it.
    goal, wish = fitted.follow, fitted.follow
    for _ in range(4):
        made = list(synthetic(replace(fitted, follow=wish), len(requests)))
        got = sum(link is not None for link in links(made, system_pieces if system_prompts else 0)) / len(made)
        wish = min(1.0, float(f"{wish * goal / got:.4g}"))
    return replace(fitted, follow=wish)


def goodness(workload: Workload, requests: Sequence[Request], seeds: Sequence[int] = (1, 2, 3)) -> dict[str, float]:
    """How far as many drawn requests are from the trace, each the mean over `seeds` of runs of the trace's length.

    ks_…: the largest distance between the two distribution functions. …_error: relative error. reuse_…: the hit rate
    of an LRU cache of so many pieces, in the trace and drawn.
    """
    known = describe(requests), reuse(requests, CAPACITIES)
    each = [_one_goodness(workload, requests, known, seed) for seed in seeds]
    return {name: float(np.mean([one[name] for one in each])) for name in each[0]}


def _one_goodness(workload: Workload, requests: Sequence[Request], known: tuple, seed: int) -> dict[str, float]:
    made = list(synthetic(workload, len(requests), seed=seed))
    (real, shares), drawn, found = known, describe(made), {}
    for length in ("prompt_tokens", "output_tokens"):
        both = [[getattr(r, length) for r in one] for one in (requests, made)]
        found[f"ks_{length}"] = distance(*both)
        for stat in ("mean", "p50", "p90", "p99"):
            found[f"{length}_{stat}_error"] = drawn[length][stat] / real[length][stat] - 1
    found["ks_gap"] = distance(*(np.diff([r.arrival_s for r in one]) for one in (requests, made)))
    found["rate_error"] = drawn["rate_per_s"] / real["rate_per_s"] - 1
    found["gap_cv_error"] = drawn["gap_cv"] / real["gap_cv"] - 1
    if requests[0].prefix:
        for capacity, a, b in zip(CAPACITIES, shares, reuse(made, CAPACITIES), strict=True):
            found[f"reuse_{capacity or 'all'}_trace"], found[f"reuse_{capacity or 'all'}_drawn"] = a, b
    return found


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Kolmogorov-Smirnov: the largest difference of two empirical distribution functions."""
    a, b = np.sort(a), np.sort(b)
    both = np.concatenate([a, b])
    return float(np.abs(np.searchsorted(a, both, "right") / len(a) - np.searchsorted(b, both, "right") / len(b)).max())


def log_normal_distance(values: Sequence[float]) -> float:
    """How far the values are from the log-normal fitted to them (Kolmogorov-Smirnov)."""
    values, fitted = np.sort(values), log_normal(values)
    below = np.array([0.5 * math.erfc(-(math.log(v / fitted.median)) / (fitted.sigma * math.sqrt(2))) for v in values])
    count = np.arange(len(values))
    return float(max((below - count / len(values)).max(), ((count + 1) / len(values) - below).max()))


@dataclass(frozen=True)
class Fitted:
    """A workload of data/workloads.csv: the trace it is fitted to, where that is from, and what `fit` was told."""
    name: str
    file: str
    source: str
    options: dict


_AZURE = "Azure/AzurePublicDataset at b469a11 (CC-BY-4.0): AzureLLMInferenceTrace_{}.csv"
_MOONCAKE = "kvcache-ai/Mooncake at 3b5a594 (Apache-2.0): FAST25-release/traces/{}_trace.jsonl"
FITTED = (
    Fitted("azure_2023_conv", "traces/azure_2023_conv.csv", _AZURE.format("conv"), {}),
    Fitted("azure_2023_code", "traces/azure_2023_code.csv", _AZURE.format("code"), dict(gaps="quantiles")),
    Fitted("mooncake_conversation", "traces/mooncake_conversation.jsonl", _MOONCAKE.format("conversation"),
           dict(gaps="poisson", tick_s=3.0, system_prompts=1)),
    Fitted("mooncake_synthetic", "traces/mooncake_synthetic.jsonl", _MOONCAKE.format("synthetic"), {}),
    Fitted("sharegpt_300", "engine_runs/rtx4090_llama-3.1-8b/requests.jsonl",
           "casys-kaist/LLMServingSim at 5daddb2 (MIT): bench/examples, 300 ShareGPT requests on vLLM 0.19", {}),
)
_HOW = {
    "rate_per_s": "1 / mean time between arrivals", "gap_cv": "standard deviation / mean of those times",
    "gaps": "their percentiles in microseconds", "tick_s": "the trace's times are multiples of 3 s to 1 ms",
    "prompt": "percentiles of first prompts' tokens", "output": "percentiles of tokens",
    "system_prompts": "every prompt begins with the same piece", "system_pieces": "pieces that all prompts share",
    "follow": "raised until drawn traces have the trace's share of prompts that go on from an earlier one",
    "lag": "percentiles of seconds since the prompt that a follow-up goes on from",
    "kept": "percentiles of leading pieces in common with it", "added": "percentiles of pieces behind those",
    "piece_tokens": "as the trace counts",
}


def table_rows(fitted: Fitted, requests: Sequence[Request]) -> list[dict[str, str]]:
    """The rows of data/workloads.csv for one workload: its parameters, then how far what it draws is from the trace."""
    workload = fit(fitted.name, requests, **fitted.options)
    plain = {field.name: field.default for field in fields(Workload)}
    found = []
    for name, value in ((field, getattr(workload, field)) for field in plain if field != "name"):
        if value != plain[name]:
            points = getattr(value, "points", ())
            text = " ".join(f"{percent:g}:{point:.10g}" for percent, point in points) or f"{value:.10g}"
            found.append(dict(kind="parameter", name=name, value=text, how=_HOW[name]))
    measured = goodness(workload, requests)
    for name in ("prompt_tokens", "output_tokens"):
        measured[f"ks_{name}_log_normal"] = log_normal_distance([getattr(request, name) for request in requests])
    for name, value in measured.items():
        how = "distance of the trace from the log-normal fitted to it" if name.endswith("log_normal") else (
            "the trace's own" if name.endswith("_trace") else "mean of seeds 1, 2, 3, as many requests as the trace")
        found.append(dict(kind="goodness", name=name, value=f"{value:.4f}", how=how))
    return [{"workload": fitted.name, **row, "source": fitted.source} for row in found]
