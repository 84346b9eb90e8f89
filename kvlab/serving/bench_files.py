"""Result files of load generators as kvlab's result table, so that two runs of two engines can be compared.

aiperf (its folder, profile_export_aiperf.json, .csv, profile_export.jsonl), guidellm (benchmarks.json, .csv),
`vllm bench serve` (JSON); and the requests of a simulation (`kvlab simulate --out`, .csv, .parquet). The files come
from others: size limits, no code, and what is missing stays missing.
"""
from __future__ import annotations

import csv
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.catalog._files import bytes_of, opened, parse_json
from kvlab.record.reading import table as result_table
from kvlab.serving import _bench_aiperf as aiperf
from kvlab.serving import _bench_guidellm as guidellm
from kvlab.serving import _bench_simulated as simulated
from kvlab.serving import _bench_vllm as vllm
from kvlab.serving._bench_case import TIMES, Case, interval, rounds, statistic
from kvlab.serving._trace_formats import json_object
from kvlab.serving._trace_lines import BadLine, lines

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

LARGEST_FILE = 256 * 2**20      # bytes of a JSON or CSV file, which is held whole; a .jsonl is streamed
MOST_CASES = MOST_COLUMNS = 1000
_WHAT = "a result file of aiperf, guidellm or vllm bench serve, or of kvlab simulate --out"
SIMULATED = "kvlab simulate"
_PARTS = ("profile_export_aiperf.json", "profile_export_aiperf.csv", "profile_export.jsonl", "benchmarks.json",
          "benchmarks.csv")
PER_REQUEST = tuple(f"{time}_p50_s" for time in TIMES)      # medians, of which single requests are kept
DEFAULT_METRICS = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "e2e_p50_s", "requests_per_s", "tokens_per_s")


@dataclass
class Bench:
    """What a load generator measured. tool, version, model: "" where the file does not say. remarks: sentences."""
    path: Path
    tool: str
    version: str
    model: str
    cases: list[Case]
    remarks: list[str] = field(default_factory=list)

    @property
    def source(self) -> str:
        return f"{self.tool} {self.version or '(version not stated)'}"

    def table(self) -> pd.DataFrame:
        """The result table, a case per benchmark; of a file with a single one the load is not part of the case."""
        return result_table(row for number, case in enumerate(self._told()) for row in
                            case.rows(f"{self.path}:{number}", self.source, ""))

    def samples(self) -> dict[tuple[str, str], list[np.ndarray]]:
        """(case id, metric) -> single requests by rounds, of the medians, which samples give whole."""
        return {(f"{self.path}:{number}", f"{time}_p50_s"): rounds(values)
                for number, case in enumerate(self.cases) for time, values in case.samples.items()}

    def _told(self) -> list[Case]:
        if len(self.cases) > 1:
            return self.cases
        return [replace(case, load="") for case in self.cases]


def is_bench(path: Path) -> bool:
    """Whether the file or folder is a load generator's, by its first bytes; never raises for what is something else."""
    if path.is_dir():
        return any((path / name).is_file() for name in _PARTS)
    if path.suffix == ".parquet":
        return path.is_file() and simulated.is_table(simulated.columns_of(path))
    if path.suffix not in (".json", ".jsonl", ".csv") or not path.is_file():
        return False
    if path.suffix == ".json":
        return True                                         # kvlab itself has no results in .json
    try:
        with opened(path, _WHAT) as file:
            start = file.read(2**20).decode("utf-8-sig", "replace")
    except ValueError:
        return False
    first = start.split("\n", 1)[0].strip()
    if path.suffix == ".csv":
        return guidellm.is_table(first) or first.startswith("Metric,avg,") or simulated.is_table(first.split(",", 100))
    try:
        found = json_object(first)
    except ValueError:
        return False
    return aiperf.is_records(found) or vllm.is_result(found)


def read_bench(path: Path | str) -> Bench:
    """Read a file or folder. Refused (ValueError): what is none of these, too large, not UTF-8, or without a number."""
    path = Path(path)
    if path.is_dir():
        found = _folder(path)
    elif path.suffix == ".jsonl":
        found = _lines(path)
    elif path.suffix == ".csv":
        found = _csv(path)
    elif path.suffix == ".parquet":
        found = _simulated(path, bytes_of(path, _WHAT, LARGEST_FILE))
    else:
        found = _json(path)
    if not any(any([*case.stats.values(), case.samples, case.rates]) for case in found.cases):
        raise ValueError(f"{path} holds no latency and no throughput of a run; give {_WHAT}")
    if not any(case.samples for case in found.cases):
        found.remarks.append(f"{path.name} has no single requests, so its numbers have no interval and nothing is said "
                             f"beyond them{_ADVICE[found.tool]}")
    if any(case.partial for case in found.cases):
        found.remarks.append(f"{path.name} keeps a part of its requests; intervals come from those, values from all")
    return found


def of_scrapes(table: pd.DataFrame) -> pd.DataFrame:
    """What `kvlab watch --out` wrote, a case per scrape, as one case: each metric's median over the scrapes.

    low, high: its 95 % interval, by rounds of consecutive scrapes.
    """
    told = ["metric", "unit", "kind", "method", "source", "scope", "hardware"]
    found = []
    for names, group in table[table["value"].notna()].groupby(told, sort=False):
        values = group["value"].astype(float).tolist()
        low, high, note = interval(values, "p50")
        found.append(dict(zip(told, names, strict=True), study="watch", value=statistic(values, "p50"), n=len(values),
                          low=low, high=high, status="ok", note=note.replace("requests", "scrapes")))
    return result_table(found)


_ADVICE = {"aiperf": "; give the folder with profile_export.jsonl in it", "guidellm": "; give its benchmarks.json",
           "vllm bench serve": "; measure with --save-detailed", SIMULATED: ""}


def _folder(path: Path) -> Bench:
    summary = next((path / name for name in _PARTS[:2] if (path / name).is_file()), None)
    records = path / "profile_export.jsonl"
    if summary is None and not records.is_file():
        report = next((path / name for name in _PARTS[3:] if (path / name).is_file()), None)
        if report is None:
            raise ValueError(f"{path} holds none of {', '.join(_PARTS)}; give {_WHAT}")
        return read_bench(report)
    found = _lines(records) if summary is None else _json(summary) if summary.suffix == ".json" else _csv(summary)
    if summary is not None and records.is_file():
        said = aiperf.records(records, found.cases[0])
        found.remarks += [sentence for sentence in said if sentence not in found.remarks]
    return Bench(path, found.tool, found.version, found.model, found.cases, found.remarks)


def _json(path: Path) -> Bench:
    content = bytes_of(path, _WHAT, LARGEST_FILE)
    if b"\n{" in content.strip():                           # --append-result: one object a line
        return _appended(path, content)
    data = parse_json(content, str(path), _WHAT)
    try:
        if guidellm.is_report(data):
            cases, version, remarks = guidellm.report(data)
            return Bench(path, "guidellm", version, "", cases[:MOST_CASES], remarks)
        if vllm.is_result(data):
            case, model, remarks = vllm.result(data)
            return Bench(path, "vllm bench serve", "", model, [case], remarks)
        if aiperf.is_summary(data):
            case, version, model, remarks = aiperf.summary(data)
            return Bench(path, "aiperf", version, model, [case], remarks)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    raise ValueError(f"{path} is of no load generator that kvlab knows; give {_WHAT}")


def _lines(path: Path) -> Bench:
    _, first, _ = next(lines(path, _WHAT), (0, BadLine("is missing"), True))
    try:
        known = not isinstance(first, BadLine) and json_object(first)
    except ValueError:
        known = False
    if known and vllm.is_result(known):
        return _appended(path, bytes_of(path, _WHAT, LARGEST_FILE))
    case = Case()
    return Bench(path, "aiperf", "", "", [case], aiperf.records(path, case))


def _appended(path: Path, content: bytes) -> Bench:
    cases: list[Case] = []
    models, remarks = set(), []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        data = parse_json(line, f"{path}: line {number}", _WHAT)
        if not vllm.is_result(data) or len(cases) == MOST_CASES:
            raise ValueError(f"{path}: line {number} is no result of vllm bench serve, or one too many")
        case, model, said = vllm.result(data)
        cases.append(case)
        models.add(model)
        remarks += [f"{case.load}: {sentence}" for sentence in said]
    loads = [case.load for case in cases]
    for number, case in enumerate(cases, 1):
        if loads.count(case.load) > 1:                      # the same load twice: the order tells them apart
            case.load = f"{case.load} (run {number})".strip()
    return Bench(path, "vllm bench serve", "", ", ".join(sorted(models)), cases, remarks)


def _simulated(path: Path, content: bytes) -> Bench:
    try:
        case, remarks = simulated.requests(content, path.suffix == ".parquet")
    except ValueError as error:
        raise ValueError(f"{path}: {error}; give {_WHAT}") from error
    return Bench(path, SIMULATED, "", "", [case], remarks)


def _csv(path: Path) -> Bench:
    content = bytes_of(path, _WHAT, LARGEST_FILE)
    if simulated.is_table(content.split(b"\n", 1)[0].decode("utf-8-sig", "replace").strip().split(",", 100)):
        return _simulated(path, content)
    try:
        said = content.decode("utf-8-sig")
        if guidellm.is_table(said[:100]):
            cases, version = guidellm.table(said)
            return Bench(path, "guidellm", version, "", cases[:MOST_CASES])
        if any(line.count(b",") > MOST_COLUMNS for line in content.splitlines()):
            raise ValueError(f"a line has more than {MOST_COLUMNS:,} columns")
        return Bench(path, "aiperf", "", "", [aiperf.table(said)])
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as CSV ({error}); give {_WHAT}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}; give {_WHAT}") from error
