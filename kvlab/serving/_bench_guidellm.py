"""What guidellm writes: benchmarks.json (statistics and single requests) and benchmarks.csv (statistics).

Of successful requests only. Its inter_token_latency_ms, (last − first token) ÷ (tokens − 1), is kvlab's tpot; its own
time_per_output_token_ms counts the first token as well and is not read. It has no times between single chunks.
Source: guidellm 0.8.1, benchmark/schemas/{report,metrics}.py, schemas/base/{statistics,request_stats}.py,
benchmark/outputs/csv.py.
"""
from __future__ import annotations

import csv
import io
import json

from kvlab.serving._bench_case import MOST_SAMPLES, STATS, Case, number, text

_TIMES = {"ttft": ("time_to_first_token_ms", 1e-3), "tpot": ("inter_token_latency_ms", 1e-3),
          "e2e": ("request_latency", 1.0)}
_RATES = {"requests_per_s": "requests_per_second", "tokens_per_s": "output_tokens_per_second"}
_GROUPS = {"ttft": ("Time to First Token", "ms", 1e-3), "tpot": ("Inter Token Latency", "ms", 1e-3),
           "e2e": ("Request Latency", "Sec", 1.0)}
_CSV_PERCENTILES = ("min", "p001", "p01", "p05", "p10", "p25", "p75", "p90", "p95", "p99", "max")


def is_report(data: dict) -> bool:
    return isinstance(data.get("benchmarks"), list) and isinstance(data.get("metadata"), dict) \
        and "guidellm_version" in data["metadata"]


def report(data: dict) -> tuple[list[Case], str, list[str]]:
    """(cases, version, remarks) of benchmarks.json."""
    cases, remarks = [], []
    for at, benchmark in enumerate(data["benchmarks"], 1):
        metrics = benchmark.get("metrics") if isinstance(benchmark, dict) else None
        if not isinstance(metrics, dict):
            raise ValueError(f"benchmark {at} has no metrics; give the file as guidellm wrote it")
        config = benchmark.get("config")
        case = Case(_load(config.get("strategy") if isinstance(config, dict) else None))
        for time, (name, scale) in _TIMES.items():
            found = _successful(metrics, name)
            percentiles = found.get("percentiles") if isinstance(found.get("percentiles"), dict) else {}
            given = {stat: number(found.get("mean") if stat == "mean" else percentiles.get(stat), scale)
                     for stat in STATS}
            if found.get("count"):
                case.stats[time] = {stat: value for stat, value in given.items() if value is not None}
                case.counts[time] = int(number(found["count"]) or 0)
        for rate, name in _RATES.items():
            found = _successful(metrics, name)
            if found.get("count") and (value := number(found.get("mean"))) is not None:
                case.rates[rate] = value
        _samples(case, benchmark.get("requests"))
        failed = metrics.get("request_totals")
        if isinstance(failed, dict) and (number(failed.get("errored")) or number(failed.get("incomplete"))):
            remarks.append(f"{case.load or f'benchmark {at}'}: {failed.get('errored') or 0} requests failed and "
                           f"{failed.get('incomplete') or 0} were not finished; they are not counted")
        cases.append(case)
    return cases, text(data["metadata"].get("guidellm_version")), remarks


def _samples(case: Case, requests: object) -> None:
    kept = requests.get("successful") if isinstance(requests, dict) else None
    kept = [one for one in kept if isinstance(one, dict)] if isinstance(kept, list) else []
    kept = sorted(kept, key=lambda one: number(one.get("request_start_time")) or 0.0)[:MOST_SAMPLES]
    for time, (name, scale) in _TIMES.items():
        values = [value for one in kept if (value := number(one.get(name), scale)) is not None]
        if values:
            case.samples[time] = values
            case.partial |= len(values) < case.counts.get(time, 0)


def _successful(metrics: dict, name: str) -> dict:
    found = metrics.get(name)
    found = found.get("successful") if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _load(strategy: object) -> str:
    """A strategy as guidellm names it: its type, and @ the streams, the rate or the time scale."""
    if not isinstance(strategy, dict):
        return text(strategy)
    streams, rate = (number(strategy.get(name)) for name in ("streams", "rate"))
    scale = number(strategy.get("time_scale"))
    after = f"@{streams:.0f}" if streams is not None else f"@{rate:.2f}" if rate is not None else (
        f"@{scale:.2f}" if scale is not None else "")
    return text(strategy.get("type_")) + after


def is_table(first: str) -> bool:
    return first.startswith("Run Info,")


def table(content: str) -> tuple[list[Case], str]:
    """(cases, version) of benchmarks.csv: three header lines, then one line per benchmark."""
    limit = csv.field_size_limit(2**24)                     # of one cell: a run's whole configuration
    try:
        found = list(csv.reader(io.StringIO(content)))
    finally:
        csv.field_size_limit(limit)                         # it is the whole process's
    if len(found) < 4 or len({len(row) for row in found}) > 1:
        raise ValueError("it has no three header lines with a line of values for each benchmark")
    names, cases, version = list(zip(*found[:3], strict=True)), [], ""
    for values in found[3:]:
        row = dict(zip(names, values, strict=True))
        case = Case(text(row.get(("Benchmark", "Strategy", ""), "")))
        total = _float(row.get(("Request Counts", "Successful", "")))
        for time, (group, unit, scale) in _GROUPS.items():
            cell = {part: row.get((group, f"Successful {unit}", part), "")
                    for part in ("Mean", "Median", "Percentiles")}
            percentiles = dict(zip(_CSV_PERCENTILES, cell["Percentiles"].strip("[]").split(", "), strict=False))
            given = {"mean": cell["Mean"], "p50": cell["Median"], **{p: percentiles.get(p) for p in ("p90", "p99")}}
            stats = {stat: _float(value, scale) for stat, value in given.items()}
            if stats["mean"] is not None:
                case.stats[time] = {stat: value for stat, value in stats.items() if value is not None}
                if total and time == "e2e":
                    case.counts[time] = int(total)
        rate = _float(row.get(("Server Throughput", "Successful Requests/Sec", "Mean")))
        tokens = _float(row.get(("Token Throughput", "Successful Output Tokens/Sec", "Mean")))
        case.rates = {name: value for name, value in (("requests_per_s", rate), ("tokens_per_s", tokens))
                      if value is not None}
        try:
            version = text(json.loads(row.get(("Runtime Info", "Metadata", ""), "")).get("guidellm_version"))
        except (ValueError, AttributeError, RecursionError):
            version = ""
        cases.append(case)
    return cases, version


def _float(cell: str | None, scale: float = 1.0) -> float | None:
    try:
        return number(float(cell or ""), scale)
    except ValueError:
        return None
