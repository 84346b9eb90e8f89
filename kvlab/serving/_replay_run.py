"""A recorded run of an engine as it lies in a folder: meta.json, requests.jsonl and, where it is there, timeseries.csv.

Times are seconds of the engine's own clock, lengths tokens. A file that is not what it should be is refused with a
sentence that names the line; what a run does not say is None.
Source: the format is casys-kaist/LLMServingSim@5daddb2's, bench/core/recorder.py.
"""
from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvlab.catalog._files import opened
from kvlab.serving._trace_formats import json_object
from kvlab.serving._trace_lines import lines
from kvlab.serving.request import Request

REQUESTS, META, SERIES = "requests.jsonl", "meta.json", "timeseries.csv"
MOST_BYTES = 256 * 2**20
SAME_CLOCK_S = 100_000          # two stamps of one request that lie further apart are of different clocks
MOST_LAG_S = 2.0                # an engine takes a request in within a step; later, the two stamps do not go together
COLUMNS = ("running", "waiting", "kv_cache_pct")


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request of the run. arrived_s and the others count from the run's first arrival; None = not finished.

    arrived_s: when it came, on the engine's clock. An engine stamps queued_ts when it next looks, up to a step later,
    so that arrival_time counts where a run has both, moved by the least queued_ts − arrival_time of the run; else
    queued_ts. What the client's side of an engine adds at least to every request is not simulated.
    """
    id: str
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    first_s: float | None
    last_s: float | None

    @property
    def request(self) -> Request:
        return Request(self.id, self.arrived_s, self.prompt_tokens, self.output_tokens)


@dataclass(frozen=True, slots=True)
class Run:
    """A recorded run. requests: in order of arrival. left_out: why rows were left out -> how many. series: columns of
    timeseries.csv by name, `t` (s) among them; {} = none. clock: the column that arrivals are of."""
    path: Path
    meta: dict
    requests: tuple[Recorded, ...]
    left_out: dict[str, int]
    series: dict[str, list[float]]
    clock: str = "queued_ts"

    def get(self, *places: str):
        """The first of these places of meta.json that has something: "kv_cache.block_size", … ; None where none has."""
        for place in places:
            found = self.meta
            for name in place.split("."):
                found = found.get(name) if isinstance(found, dict) else None
            if found is not None and found != "":
                return found
        return None


@dataclass(slots=True)
class _Row:
    """A line of requests.jsonl that can be used; stamps as they stand there."""
    where: str
    id: str
    prompt: int
    output: int
    queued: float | None
    arrived: float | None
    first: float | None
    last: float | None


def read_run(folder: Path | str) -> Run:
    """The run of a folder, or of its only folder with one (vllm/). ValueError, with file and line, for what is no run.

    A file may have a name of its own around its usual one, such as rtx4090_requests.jsonl, and requests may be
    gzipped. A stamp of 0 is none: vLLM writes it for what did not come.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; a run is a folder with {META}, {REQUESTS} and, better, {SERIES}")
    path = _file(folder, REQUESTS)
    inner = [] if path else [one for one in sorted(folder.iterdir()) if one.is_dir() and _file(one, REQUESTS)]
    if len(inner) == 1:
        folder, path = inner[0], _file(inner[0], REQUESTS)
    if path is None:
        raise ValueError(f"{folder} is no recorded run: it has no {REQUESTS} (one JSON object per request with "
                         "input_toks, output_toks, queued_ts, first_token_ts, last_token_ts)"
                         + (f"; give one of {', '.join(one.name for one in inner)} in it" if inner else ""))
    meta, series = _file(folder, META), _file(folder, SERIES)
    left_out: dict[str, int] = {}
    rows, clock = _on_one_clock(_rows(path, left_out), left_out)
    if not any(row.last_s is not None for row in rows):
        raise ValueError(f"{path} has no finished request: nothing to compare with"
                         + (f"; left out: {_said(left_out)}" if left_out else ""))
    rows.sort(key=lambda row: row.arrived_s)
    start = rows[0].arrived_s
    spread = rows[-1].arrived_s - start
    if spread > SAME_CLOCK_S:
        raise ValueError(f"{path}: its requests were queued {spread:,.0f} s apart; these are not stamps of one clock")
    shifted = tuple(replace(row, arrived_s=row.arrived_s - start, first_s=None if row.first_s is None else
                            row.first_s - start, last_s=None if row.last_s is None else row.last_s - start)
                    for row in rows)
    return Run(folder, _meta(meta) if meta else {}, shifted, left_out, _series(series) if series else {}, clock)


def _file(folder: Path, name: str) -> Path | None:
    """The file of that name; else the only one with another name around it, or gzipped."""
    stem, _, kind = name.partition(".")
    found = [path for pattern in (f"*{stem}*.{kind}", f"*{stem}*.{kind}.gz") for path in folder.glob(pattern)]
    if (folder / name).is_file() or not found:
        return folder / name if (folder / name).is_file() else None
    if len(found) > 1:
        raise ValueError(f"{folder} has no {name}, and more than one that might be: "
                         f"{', '.join(sorted(path.name for path in found))}")
    return found[0]


def _said(left_out: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {why}" for why, count in left_out.items())


def _text(path: Path, what: str) -> str:
    with opened(path, what) as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{path} has more than the {MOST_BYTES:,} bytes that are read of it")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None


def _meta(path: Path) -> dict:
    """NaN and Infinity, which Python writes for settings that are none, count as not said."""
    try:
        found = json.loads(_text(path, "a run's meta.json"), parse_constant=lambda word: None)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {str(error)[:100]}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object")
    return found


def _rows(path: Path, left_out: dict[str, int]) -> Iterator[_Row]:
    seen = set()
    for number, text, _ in lines(path, "a run's requests.jsonl"):
        where = f"{path} line {number}"
        try:
            record = json_object(text)
        except ValueError as error:
            raise ValueError(f"{where} {error}") from None
        prompt, output = _count(record, "input_toks", where), _count(record, "output_toks", where)
        if not prompt or not output:
            why = "with no prompt tokens" if not prompt else "with no output tokens"
            left_out[why] = left_out.get(why, 0) + 1
            continue
        name = record.get("request_id")
        row = _Row(where, str(number) if name is None else str(name), prompt, output,
                   *(_stamp(record, name, where) for name in ("queued_ts", "arrival_time", "first_token_ts",
                                                              "last_token_ts")))
        if row.id in seen:
            raise ValueError(f"{where}: request_id {row.id!r} was there before")
        seen.add(row.id)
        yield row


def _on_one_clock(read: Iterator[_Row], left_out: dict[str, int]) -> tuple[list[Recorded], str]:
    """The rows with their arrival on the engine's clock, and the column that it comes from."""
    rows, found = list(read), []
    lags = [row.queued - row.arrived for row in rows if row.queued is not None and row.arrived is not None]
    moved = min(lags) if lags and max(lags) - min(lags) <= MOST_LAG_S else None
    for row in rows:
        if row.arrived is not None and moved is not None:
            begin = row.arrived + moved
        elif row.queued is not None:
            begin = row.queued
        elif row.arrived is not None and row.last is not None and abs(row.last - row.arrived) <= SAME_CLOCK_S:
            begin = row.arrived
        else:
            left_out["without a queued_ts"] = left_out.get("without a queued_ts", 0) + 1
            continue
        first, last = row.first, row.last
        if first is None or last is None:
            first = last = None
        elif not begin <= first <= last:
            raise ValueError(f"{row.where}: queued at {begin}, first token at {first}, last at {last}: times go back")
        elif last - begin > SAME_CLOCK_S:
            raise ValueError(f"{row.where}: queued at {begin}, last token at {last}: these are stamps of different "
                             "clocks")
        found.append(Recorded(row.id, begin, row.prompt, row.output, first, last))
    return found, "queued_ts" if moved is None else "arrival_time"


def _count(row: dict, name: str, where: str) -> int:
    value = row.get(name)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 10**8 or value % 1:
        raise ValueError(f"{where}: {name}={value!r:.40} is no whole number from 0 to 10⁸")
    return int(value)


def _stamp(row: dict, name: str, where: str) -> float | None:
    value = row.get(name)
    if value is None or value == 0 and not isinstance(value, bool):
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{where}: {name}={value!r:.40} is no time of at least 0 s")
    return float(value)


def _series(path: Path) -> dict[str, list[float]]:
    """The columns of the time series that can be compared; rows with a cell that is no number are left out."""
    table = csv.DictReader(_text(path, "a run's timeseries.csv").splitlines())
    try:
        names = [name for name in ("t", *COLUMNS) if name in (table.fieldnames or ())]
        if "t" not in names:
            return {}
        found: dict[str, list[float]] = {name: [] for name in names}
        for row in table:
            try:
                values = [float(row[name]) for name in names]
            except (TypeError, ValueError):
                continue
            if all(map(math.isfinite, values)):
                for name, value in zip(names, values):
                    found[name].append(value)
    except csv.Error as error:
        raise ValueError(f"{path} is no CSV: {error}") from None
    return found if found["t"] else {}
