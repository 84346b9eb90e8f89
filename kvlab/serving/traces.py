"""Traces of requests, read one line at a time: Azure, Mooncake, BurstGPT, an engine's runs and kvlab's own JSONL.

Times are seconds, lengths tokens. A file of any size takes the same memory; only sort=True holds its requests.
"""
from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

from kvlab.serving._trace_formats import FORMATS, Format, detect, record
from kvlab.serving._trace_lines import BadLine, lines
from kvlab.serving._trace_summary import describe, reuse
from kvlab.serving.request import Request

__all__ = ["FORMATS", "Trace", "describe", "read_trace", "reuse", "write_trace"]
REMEMBERED = 100_000            # ids among which a second one of the same name is found
MOST_SORTED = 5_000_000         # requests that sort=True takes, about 2 GB


class Trace(Iterator[Request]):
    """The requests of a file, in order of arrival; what was found on the way stands in the attributes.

    format: name of the format. read: requests given so far. failed: requests left out because they failed in the trace
    itself (BurstGPT writes 0 response tokens). skipped: bad lines left out; first_skipped: what was wrong with the
    first of them.
    """

    def __init__(self, path: Path, format: Format, requests: Iterator[Request]):
        self.path, self.format, self._requests = path, format.name, requests
        self.read = self.failed = self.skipped = 0
        self.first_skipped = ""

    def __next__(self) -> Request:
        request = next(self._requests)
        self.read += 1
        return request

    def note(self) -> str:
        """One sentence on what was left out, "" if nothing was."""
        said = [f"{self.failed:,} that failed in the trace itself"] if self.failed else []
        if self.skipped:
            said.append(f"{self.skipped:,} bad lines (the first: {self.first_skipped})")
        return f"left out: {' and '.join(said)}" if said else ""


def read_trace(path: Path | str, format: str | None = None, *, bad: str = "refuse", sort: bool = False) -> Trace:
    """The requests of a trace file (plain or gzip), streamed; format: one of FORMATS, default: told by the first line.

    An id is the file's own, else the line's number. Times count from the first request, in kvlab's own format from
    0. bad: "refuse" ends at the first bad line with a sentence; "skip" leaves bad lines out and counts them. Times that
    go back are a fault of the file, not of a line, and refused either way; sort=True holds all requests and sorts them.
    Refused (ValueError, with the line's number): a length that is no whole number from 1 to 10⁸, a missing field, a
    time that is no finite number, an id that one of the last 100,000 requests had (with sort=True: any), hash_ids that
    do not fit the length, a line that is too long, cut off or not UTF-8; a file without a request.
    """
    if bad not in ("refuse", "skip"):
        raise ValueError(f"bad={bad!r} is unknown; allowed: refuse, skip")
    path = Path(path)
    source = lines(path)
    _, first, _ = next(source, (0, BadLine("is missing: the file is empty"), True))
    if isinstance(first, BadLine):
        raise ValueError(f"{path}: the first line {first}; give a trace of requests")
    found, columns = detect(first, format, str(path))
    if columns is None:                                     # JSONL has no header: the first line is a request too
        source.close()
        source = lines(path)
    trace = Trace(path, found, iter(()))
    timed = _timed(trace, source, found, columns, bad, None if sort else REMEMBERED)
    trace._requests = _from_zero(trace, _sorted(path, timed) if sort else _in_order(path, timed), found.from_zero)
    return trace


def write_trace(path: Path | str, requests: Iterable[Request]) -> int:
    """Write kvlab's own JSONL, whole or not at all; returns how many.

    What is at its default is left out.
    """
    plain = {field.name: field.default for field in fields(Request)}
    path, count = Path(path), 0
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            for request in requests:
                count += 1
                row = {name: getattr(request, name) for name in plain}
                file.write(json.dumps({name: value for name, value in row.items() if value != plain[name]}) + "\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return count


def _timed(trace: Trace, source, format: Format, columns, bad: str, remembered: int | None):
    """(line number, time, fields of a request) of every good line."""
    recent: deque[str] = deque(maxlen=remembered)
    seen: set[str] = set()
    for number, text, complete in source:
        try:
            if isinstance(text, BadLine):
                raise text
            parsed = format.parse(record(text, columns))
            if parsed is None:
                trace.failed += 1
                continue
            time, given = parsed
            named = "id" in given                           # a line's own number cannot stand twice
            name = given.setdefault("id", str(number))
            Request(**{**given, "arrival_s": 0.0})          # so that what Request refuses is a bad line as well
            if named and name in seen:
                raise ValueError(f"has the id {name!r:.60}, as a line before it; ids must differ")
        except (ValueError, KeyError) as error:
            why = _sentence(trace.path, number, error, complete)
            if bad == "refuse":
                raise ValueError(f'{why}; mend the line, or read with bad="skip" to leave such lines out') from error
            trace.skipped += 1
            trace.first_skipped = trace.first_skipped or why
            continue
        if named:
            if len(recent) == recent.maxlen:
                seen.discard(recent[0])
            recent.append(name)
            seen.add(name)
        yield number, time, given


def _sentence(path: Path, number: int, error: Exception, complete: bool) -> str:
    cut = "" if complete else "; the file ends in it, so it may be cut off"
    return f"{path}: line {number:,} {error.args[0]}{cut}"


def _in_order(path: Path, timed):
    before, at = -math.inf, 0
    for number, time, given in timed:
        if time < before:
            raise ValueError(f"{path}: line {number:,} arrives {before - time:,.6g} s before line {at:,}, and requests "
                             "must be in order of arrival; read with sort=True (holds them all), or sort the file")
        before, at = time, number
        yield time, given


def _sorted(path: Path, timed):
    held: list[tuple[float, dict]] = []
    for _, time, given in timed:
        if len(held) == MOST_SORTED:
            raise ValueError(f"{path} has more than the {MOST_SORTED:,} requests that kvlab sorts in memory; sort the "
                             "file first (sort), or take a part of it")
        held.append((time, given))
    held.sort(key=lambda one: one[0])                       # stable: of equal times the file's order
    yield from held


def _from_zero(trace: Trace, timed, from_zero: bool) -> Iterator[Request]:
    start = None
    for time, given in timed:
        start = time if start is None else start
        # microseconds: a float of seconds since 1970 has no more
        yield Request(**{**given, "arrival_s": round(time - start, 6) if from_zero else time})
    if trace.read == 0:
        raise ValueError(f"{trace.path} holds no request that can be used; {trace.note() or 'it has no lines'}")
