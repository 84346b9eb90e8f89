"""What aiperf writes: profile_export_aiperf.json and .csv (statistics), profile_export.jsonl (one line per request).

Its inter_token_latency, (latency − TTFT) ÷ (tokens − 1) of a request, is kvlab's tpot; its inter_chunk_latency, a list
per request, is kvlab's itl.
Source: aiperf 0.13.0, common/models/export_models.py (JsonExportData), record_models.py (MetricRecordInfo),
exporters/metrics_csv_exporter.py.
"""
from __future__ import annotations

import csv
import io
from pathlib import Path

from kvlab.serving._bench_case import MOST_SAMPLES, STATS, Case, number, text
from kvlab.serving._trace_formats import json_object
from kvlab.serving._trace_lines import lines

TAGS = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "itl": "inter_chunk_latency",
        "e2e": "request_latency"}
_HEADERS = {"Time to First Token": "ttft", "Inter Token Latency": "tpot", "Inter Chunk Latency": "itl",
            "Request Latency": "e2e"}
_RATE_TAGS = {"requests_per_s": "request_throughput", "tokens_per_s": "output_token_throughput"}
_RATE_HEADERS = {"Request Throughput": "requests_per_s", "Output Token Throughput": "tokens_per_s"}
_SCALES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "sec": 1.0, "s": 1.0}
_NAMES = {"mean": "avg", **{stat: stat for stat in STATS if stat != "mean"}}


def is_summary(data: dict) -> bool:
    return "aiperf_version" in data or any(
        isinstance(data.get(tag), dict) and "unit" in data[tag] for tag in TAGS.values())


def summary(data: dict) -> tuple[Case, str, str, list[str]]:
    """(case, version, model, remarks) of profile_export_aiperf.json."""
    case = Case()
    for time, tag in TAGS.items():
        found = data.get(tag)
        scale = _SCALES.get(text(found.get("unit"))) if isinstance(found, dict) else None
        if scale is None:
            continue
        case.stats[time] = {stat: value for stat, name in _NAMES.items()
                            if (value := number(found.get(name), scale)) is not None}
        if isinstance(found.get("count"), int):
            case.counts[time] = found["count"]
    for rate, tag in _RATE_TAGS.items():
        found = data.get(tag)
        if isinstance(found, dict) and (value := number(found.get("avg"))) is not None:
            case.rates[rate] = value
    remarks = []
    if data.get("is_complete") is False or data.get("was_cancelled") is True:
        remarks.append(f"the run is not complete ({text(data.get('incomplete_reason')) or 'it was cancelled'})")
    info = data.get("run_info")
    case.load = text(info.get("variation_label")) if isinstance(info, dict) else ""
    case.load = "" if case.load == "base" else case.load
    failed = data.get("error_request_count")
    if isinstance(failed, dict) and number(failed.get("avg")):
        remarks.append(f"{failed['avg']:.0f} requests failed and are not counted")
    return case, text(data.get("aiperf_version")), _model(data.get("input_config")), remarks


def _model(config: object) -> str:
    """The first model's name in the run's configuration, which is a text, a list, or items with a name."""
    found = config.get("models", config.get("model")) if isinstance(config, dict) else None
    for _ in range(4):
        if isinstance(found, dict):
            found = found.get("name", found.get("items"))
        elif isinstance(found, list):
            found = found[0] if found else None
    return text(found)


def is_records(first: dict) -> bool:
    metadata = first.get("metadata")
    return isinstance(metadata, dict) and "request_start_ns" in metadata and isinstance(first.get("metrics"), dict)


def records(path: Path, case: Case) -> list[str]:
    """Add the samples of profile_export.jsonl to the case, and rates if it has none; remarks. Warm-up is left out.

    Times between chunks are left out, and a remark says so, where there are more than MOST_SAMPLES.
    """
    started, failed, tokens, chunks, first, last = [], 0, 0, 0, None, None
    for number_, line, _ in lines(path):
        try:
            found = json_object(line)
        except ValueError as error:
            raise ValueError(f"{path}: line {number_:,} {error}; give the file as aiperf wrote it") from error
        if not is_records(found):
            raise ValueError(f"{path}: line {number_:,} is no record of aiperf (metadata and metrics)")
        about, metrics = found["metadata"], found["metrics"]
        if about.get("benchmark_phase", "profiling") != "profiling":
            continue
        if found.get("error") is not None or about.get("was_cancelled"):
            failed += 1
            continue
        start, end = number(about.get("request_start_ns")), number(about.get("request_end_ns"))
        if start is None or end is None:
            raise ValueError(f"{path}: line {number_:,} has no request_start_ns and request_end_ns")
        if len(started) == MOST_SAMPLES:
            raise ValueError(f"{path} has more than the {MOST_SAMPLES:,} requests that kvlab reads of one run")
        first, last = min(start, first or start), max(end, last or end)
        length = metrics.get("output_sequence_length")
        tokens += (number(length.get("value")) or 0) if isinstance(length, dict) else 0
        values = {time: _values(metrics.get(tag)) for time, tag in TAGS.items()}
        chunks += len(values["itl"])
        if chunks > MOST_SAMPLES:
            values["itl"] = []
        started.append((start, values))
    started.sort(key=lambda one: one[0])
    for time in TAGS:
        values = [value for _, one in started for value in one[time]]
        if values and (time != "itl" or chunks <= MOST_SAMPLES):
            case.samples[time] = values
    if started and not case.rates and last > first:
        case.rates = {"requests_per_s": len(started) / (last - first) * 1e9}
        if tokens:
            case.rates["tokens_per_s"] = tokens / (last - first) * 1e9
    remarks = [f"{failed:,} requests failed and are not counted"] if failed else []
    if chunks > MOST_SAMPLES:
        remarks.append(f"{chunks:,} times between chunks are more than the {MOST_SAMPLES:,} that kvlab reads; they are "
                       "left out")
    return remarks


def _values(found: object) -> list[float]:
    if not isinstance(found, dict) or (scale := _SCALES.get(text(found.get("unit")))) is None:
        return []
    given = found.get("value")
    values = (number(value, scale) for value in (given if isinstance(given, list) else [given]))
    return [value for value in values if value is not None]


def table(content: str) -> Case:
    """The case of profile_export_aiperf.csv: a section with percentiles, one with single values."""
    case, header = Case(), None
    for cells in csv.reader(io.StringIO(content)):
        if not cells:
            header = None
        elif cells[0] == "Metric" or header is None:
            header = cells
        elif header[0] == "Metric":
            name, unit = cells[0], ""
            if name.endswith(")"):
                name, _, unit = name.removesuffix(")").rpartition(" (")
            row = dict(zip(header[1:], map(_cell, cells[1:]), strict=False))
            if name in _HEADERS and unit in _SCALES:
                case.stats[_HEADERS[name]] = {
                    stat: row[as_named] * _SCALES[unit] for stat, as_named in _NAMES.items()
                    if row.get(as_named) is not None}
            elif name in _RATE_HEADERS and row.get("Value") is not None:
                case.rates[_RATE_HEADERS[name]] = row["Value"]
            elif name == "Request Count" and row.get("Value") is not None:
                case.counts = dict.fromkeys(("ttft", "tpot", "e2e"), int(row["Value"]))
    return case


def _cell(cell: str) -> float | None:
    try:
        return number(float(cell))
    except ValueError:
        return None
