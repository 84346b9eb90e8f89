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
from dataclasses import dataclass
from pathlib import Path

from kvlab.serving.request import Request

REQUESTS, META, SERIES = "requests.jsonl", "meta.json", "timeseries.csv"
MOST_BYTES = 256 * 2**20
SAME_CLOCK_S = 100_000          # two stamps of one request that lie further apart are of different clocks
COLUMNS = ("running", "waiting", "kv_cache_pct")


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request of the run. queued_s and the others count from the run's first queued request; None = not finished.

    queued_s: when the engine took it in (queued_ts; arrival_time where that is missing and of the same clock). TTFT and
    end-to-end time count from there on both sides: what the client's side of an engine adds is not simulated.
    """
    id: str
    queued_s: float
    prompt_tokens: int
    output_tokens: int
    first_s: float | None
    last_s: float | None

    @property
    def request(self) -> Request:
        return Request(self.id, self.queued_s, self.prompt_tokens, self.output_tokens)


@dataclass(frozen=True, slots=True)
class Run:
    """A recorded run. requests: in order of queued_s. left_out: why rows were left out -> how many. series: columns of
    timeseries.csv by name, `t` (s) among them; {} = none."""
    path: Path
    meta: dict
    requests: tuple[Recorded, ...]
    left_out: dict[str, int]
    series: dict[str, list[float]]

    def get(self, *places: str):
        """The first of these places of meta.json that has something: "kv_cache.block_size", … ; None where none has."""
        for place in places:
            found = self.meta
            for name in place.split("."):
                found = found.get(name) if isinstance(found, dict) else None
            if found is not None:
                return found
        return None


def read_run(folder: Path | str) -> Run:
    """The run of a folder. ValueError, with file and line, for what is no run; OSError as it comes."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; a run is a folder with {META}, {REQUESTS} and, better, {SERIES}")
    if not (folder / REQUESTS).is_file():
        raise ValueError(f"{folder} is no recorded run: it has no {REQUESTS} (one JSON object per request with "
                         "input_toks, output_toks, queued_ts, first_token_ts, last_token_ts)")
    meta = _meta(folder / META)
    left_out: dict[str, int] = {}
    rows, seen = [], set()
    for number, row in _objects(folder / REQUESTS):
        where = f"{folder / REQUESTS} line {number}"
        found = _recorded(row, where, number, left_out)
        if found is None:
            continue
        if found.id in seen:
            raise ValueError(f"{where}: request_id {found.id!r} was there before")
        seen.add(found.id)
        rows.append(found)
    if not any(row.last_s is not None for row in rows):
        raise ValueError(f"{folder / REQUESTS} has no finished request: nothing to compare with"
                         + (f"; left out: {_said(left_out)}" if left_out else ""))
    rows.sort(key=lambda row: row.queued_s)
    start = rows[0].queued_s
    spread = rows[-1].queued_s - start
    if spread > SAME_CLOCK_S:
        raise ValueError(f"{folder / REQUESTS}: its requests were queued {spread:,.0f} s apart; these are not stamps "
                         "of one clock")
    shifted = tuple(Recorded(row.id, row.queued_s - start, row.prompt_tokens, row.output_tokens,
                             None if row.first_s is None else row.first_s - start,
                             None if row.last_s is None else row.last_s - start) for row in rows)
    return Run(folder, meta, shifted, left_out, _series(folder / SERIES))


def _said(left_out: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {why}" for why, count in left_out.items())


def _text(path: Path) -> str:
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes; at most {MOST_BYTES:,} are read")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None


def _no_constant(word: str):
    raise ValueError(f"{word} is no number")


def _load(text: str, where: str) -> dict:
    try:
        found = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {str(error)[:100]}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where} holds no JSON object")
    return found


def _meta(path: Path) -> dict:
    return _load(_text(path), str(path)) if path.is_file() else {}


def _objects(path: Path) -> Iterator[tuple[int, dict]]:
    for number, line in enumerate(_text(path).splitlines(), 1):
        if line.strip():
            yield number, _load(line, f"{path} line {number}")


def _recorded(row: dict, where: str, number: int, left_out: dict[str, int]) -> Recorded | None:
    prompt, output = _count(row, "input_toks", where), _count(row, "output_toks", where)
    first, last = _stamp(row, "first_token_ts", where), _stamp(row, "last_token_ts", where)
    queued, arrived = _stamp(row, "queued_ts", where), _stamp(row, "arrival_time", where)
    if not prompt or not output:
        why = "with no prompt tokens" if not prompt else "with no output tokens"
        left_out[why] = left_out.get(why, 0) + 1
        return None
    if queued is None and (last is None or arrived is None or abs(last - arrived) > SAME_CLOCK_S):
        left_out["without a queued_ts"] = left_out.get("without a queued_ts", 0) + 1
        return None
    begin = queued if queued is not None else arrived
    if first is None or last is None:
        first = last = None
    elif not begin <= first <= last:
        raise ValueError(f"{where}: queued at {begin}, first token at {first}, last at {last}: times go back")
    elif last - begin > SAME_CLOCK_S:
        raise ValueError(f"{where}: queued at {begin}, last token at {last}: these are stamps of different clocks")
    name = row.get("request_id")
    return Recorded(str(number) if name is None else str(name), begin, prompt, output, first, last)


def _count(row: dict, name: str, where: str) -> int:
    value = row.get(name)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or not 0 <= value <= 10**8:
        raise ValueError(f"{where}: {name}={value!r} is no whole number from 0 to 10⁸")
    return int(value)


def _stamp(row: dict, name: str, where: str) -> float | None:
    value = row.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{where}: {name}={value!r} is no time of at least 0 s")
    return float(value)


def _series(path: Path) -> dict[str, list[float]]:
    """The columns of the time series that can be compared; rows with a cell that is no number are left out."""
    if not path.is_file():
        return {}
    table = csv.DictReader(_text(path).splitlines())
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
    return found if found["t"] else {}
