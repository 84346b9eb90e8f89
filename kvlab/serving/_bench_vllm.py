"""What `vllm bench serve --save-result` writes: one JSON object, or one a line with --append-result.

Single requests only with --save-detailed (latencies in some versions always, in others never: then they are the time
to the first token and the gaps behind it). A failed request has an error text and zeros.
Source: vLLM 0.32.0, vllm/benchmarks/serve.py (benchmark, process_one_metric, main).
"""
from __future__ import annotations

from kvlab.serving._bench_case import MOST_SAMPLES, STATS, Case, number, text

_STATS = {"mean": "mean", "p50": "median", **{stat: stat for stat in STATS if stat[0] == "p" and stat != "p50"}}
_TIMES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2e": "e2el"}
_RATES = {"requests_per_s": "request_throughput", "tokens_per_s": "output_throughput"}


def is_result(data: dict) -> bool:
    return {"request_throughput", "completed", "duration"} <= set(data)


def result(data: dict) -> tuple[Case, str, list[str]]:
    """(case, model, remarks) of one result."""
    case, remarks = Case(_load(data)), []
    for time, name in _TIMES.items():
        given = {stat: number(data.get(f"{word}_{name}_ms"), 1e-3) for stat, word in _STATS.items()}
        if any(given.values()):                             # zeros stand for "not measured" there
            case.stats[time] = {stat: value for stat, value in given.items() if value is not None}
            if time != "itl" and isinstance(data.get("completed"), int):
                case.counts[time] = data["completed"]
    case.rates = {rate: value for rate, name in _RATES.items() if (value := number(data.get(name))) is not None}
    failed = number(data.get("failed")) or 0
    _samples(case, data, failed)
    if failed:
        remarks.append(f"{failed:.0f} requests failed and are not counted")
    return case, text(data.get("model_id")), remarks


def _samples(case: Case, data: dict, failed: float) -> None:
    """Per request, in order of sending where the file says when that was."""
    latencies, errors, ttfts, lengths, itls, starts = (
        _list(data, name) for name in ("latencies", "errors", "ttfts", "output_lens", "itls", "start_times"))
    if not latencies and len(ttfts) == len(itls) and all(isinstance(gaps, list) for gaps in itls):
        latencies = [_whole(first, gaps) for first, gaps in zip(ttfts, itls)]
    if not latencies or (failed and len(errors) != len(latencies)):
        return                                              # the failed ones cannot be told apart
    detailed = len(ttfts) == len(lengths) == len(latencies)
    good = [i for i in range(len(latencies)) if not (errors and i < len(errors) and errors[i])]
    if len(starts) == len(latencies):
        good.sort(key=lambda i: number(starts[i]) or 0.0)
    found: dict[str, list[float]] = {"e2e": [], "ttft": [], "tpot": [], "itl": []}
    for i in good[:MOST_SAMPLES]:
        whole, first = number(latencies[i]), number(ttfts[i]) if detailed else None
        if whole:
            found["e2e"].append(whole)
        if not first:
            continue
        found["ttft"].append(first)
        if whole and isinstance(lengths[i], int) and lengths[i] > 1:
            found["tpot"].append(max(0.0, whole - first) / (lengths[i] - 1))
        if len(itls) == len(latencies) and isinstance(itls[i], list):
            found["itl"] += [value for gap in itls[i] if (value := number(gap)) is not None]
    case.samples = {time: values[:MOST_SAMPLES] for time, values in found.items() if values}


def _whole(first: object, gaps: list) -> float | None:
    """From sending to the last token, None where a part of it is no time; a failed request's 0 stays."""
    times = [number(first), *map(number, gaps)]
    return None if None in times else sum(times)


def _list(data: dict, name: str) -> list:
    found = data.get(name)
    return found if isinstance(found, list) else []


def _load(data: dict) -> str:
    rate, most = data.get("request_rate"), number(data.get("max_concurrency"))
    said = [f"rate {rate}" if rate == "inf" else f"rate {number(rate):g}" if number(rate) is not None else "",
            f"concurrency {most:g}" if most is not None else ""]
    return ", ".join(filter(None, said))
