"""A Chrome trace (torch's profiler writes them), read: which operators took the time, and where none ran.

Times are seconds. A trace is data from anywhere: what in it cannot be used is counted and said, never fatal.
"""
from __future__ import annotations

import contextlib
import errno
import gc
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from pydantic_core import from_json

from kvlab.record.export import StoreError
from kvlab.record.simulated_trace import Simulated, is_simulated, simulated

MOST_BYTES = 2**28              # of JSON text; Python takes about ten times as much memory to hold it
MOST_PACKED = 200               # times a packed file's own size beyond 16 MiB: traces reach 40, gzip's limit is 1,000
MOST_EVENTS = 2_000_000
OPERATORS, KERNELS = {"cpu_op"}, {"kernel", "gpu_memcpy", "gpu_memset"}
LAUNCHES, RANGES = {"cuda_runtime", "cuda_driver"}, {"user_annotation"}
CALL = "kvlab:call"             # the range around one call; only what is inside is summarised


Lane = tuple[str, str]          # process and thread, or GPU and stream


class Event(NamedTuple):
    """Something that took time on one lane."""
    lane: Lane
    start: float
    seconds: float
    name: str
    args: dict[str, Any]

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclass(frozen=True)
class Trace:
    """Complete events by what they are, sorted by lane and start, and one sentence for each thing left out.

    about: kvlab's own metadata (the trial, kvlab's version), empty in a trace of another program. simulated: what a
    simulated engine's trace says, which has no operators; else None.
    """
    operators: list[Event]
    launches: list[Event]
    ranges: list[Event]
    kernels: list[Event]
    about: dict[str, Any]
    problems: tuple[str, ...]
    simulated: Simulated | None = None


def read_trace(path: Path | str) -> Trace:
    """A trace from a .json or .json.gz file: an object with traceEvents, or a bare list of events.

    Refused in one sentence: a file that is not there (StoreError), one that is no Chrome trace, more than MOST_BYTES of
    JSON (also when it only unpacks to that), what unpacks to very much more than it is. A file that ends in the middle
    gives the whole events before, and says so.
    """
    with no_collector():
        return trace_of(*load(path))


def load(path: Path | str, most: int = MOST_BYTES) -> tuple[dict[str, Any], list[str]]:
    """The trace's object as it is written (a bare list becomes one), and what was wrong with the file."""
    path = Path(path)
    text, problems = _text(path, most)
    if 192 * text.count(b"{") + 72 * text.count(b"[") > 10 * len(text) + 2**20:    # they may take 25 times as much
        raise ValueError(f"{path} is no Chrome trace: it is nested too deeply, or holds little but "
                         "empty lists and objects")
    with no_collector():
        try:
            data = _parsed(text, problems)
        except RecursionError:
            raise ValueError(f"{path} is no Chrome trace: it is nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"{path} is no Chrome trace ({error}); give the .json or .json.gz that a profiler "
                             "wrote") from None
    data = {"traceEvents": data} if isinstance(data, list) else data
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        raise ValueError(f"{path} is no Chrome trace: it has no list of traceEvents; give the .json or .json.gz that a "
                         "profiler wrote")
    return data, problems


def _parsed(text: bytes, problems: list[str]) -> Any:
    """The JSON, nested 200 deep at most and without lone surrogates, so that it can be written again whatever it is."""
    with contextlib.suppress(ValueError):
        return from_json(text)
    loose = text.decode("utf-8-sig", "replace")
    try:
        data = json.loads(loose)
    except ValueError as error:
        data = _whole_events(loose)
        if data is None:
            raise
        problems.append(f"the file ends in the middle or is damaged ({error}): the {len(data['traceEvents']):,} whole "
                        "events before are read")
    return from_json(json.dumps(data, ensure_ascii=False).encode("utf-8", "replace"))


def _text(path: Path, most: int) -> tuple[bytes, list[str]]:
    if not path.is_file():
        raise StoreError(errno.ENOENT, f"there is no trace file {path}; give a .json or .json.gz file, or a run")
    pieces, size, problems = [], 0, []
    with open(path, "rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        most_packed = max(2**24, MOST_PACKED * os.fstat(raw.fileno()).st_size) if packed else 2 * most
        with gzip.GzipFile(fileobj=raw) if packed else contextlib.nullcontext(raw) as file:
            while size <= most:
                try:
                    piece = file.read1(min(2**18, most + 1 - size))         # what there is, also before a break
                except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                    problems.append(f"the compressed file is cut off or damaged ({error})")
                    break
                if not piece:
                    break
                pieces.append(piece)
                size += len(piece)
                if size > most_packed:
                    raise ValueError(f"{path} unpacks to more than {MOST_PACKED} times its bytes, as no trace does")
    if size > most:
        raise ValueError(f"{path} holds more than {most:,} bytes of JSON, which kvlab does not read; open it in "
                         "ui.perfetto.dev, or profile fewer calls")
    return b"".join(pieces), problems


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Without the cycle collector, which would walk all objects of a long trace again and again (8 times slower).

    At the end they join its oldest generation unseen: a trace has no cycles.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()
        if was:
            gc.enable()


def _whole_events(text: str) -> dict[str, Any] | None:
    """What stands before the break of a broken file: its head and whole events; None where there is no event."""
    found = re.search(r'"traceEvents"\s*:\s*\[|\A\s*\[', text)
    if found is None:
        return None
    decode, between, at, events = json.JSONDecoder().raw_decode, re.compile(r"[\s,]*"), found.end(), []
    with contextlib.suppress(ValueError, RecursionError):
        while True:
            gap = between.match(text, at)
            event, at = decode(text, gap.end() if gap else at)
            events.append(event)
    head = {}
    with contextlib.suppress(ValueError, RecursionError):
        head = json.loads(text[:found.end()] + "]}")
    return {**(head if isinstance(head, dict) else {}), "traceEvents": events} if events else None


def trace_of(data: dict[str, Any], problems: list[str] | None = None) -> Trace:
    """The events of a trace's object sorted out; what is no complete event with a usable time is counted."""
    problems = list(problems or [])
    all_of = data["traceEvents"]
    if len(all_of) > MOST_EVENTS:
        problems.append(f"only the first {MOST_EVENTS:,} of {len(all_of):,} events are read")
    if is_simulated(data):
        found = simulated(all_of[:MOST_EVENTS], problems)
        return Trace([], [], [], [], {}, found.problems, found)
    kinds: dict[str, list[Event]] = {}
    lanes: dict[tuple, Lane] = {}
    unusable = halves = 0
    with no_collector():
        for event in all_of[:MOST_EVENTS]:
            if type(event) is not dict or type(name := event.get("name")) is not str:
                unusable += 1
            elif event.get("ph") == "X":
                start, took, category, args = event.get("ts"), event.get("dur"), event.get("cat"), event.get("args")
                if not (usable(start) and usable(took) and took >= 0):
                    unusable += 1
                    continue
                where = event.get("pid", ""), event.get("tid", "")
                try:
                    lane = lanes[where]
                except (KeyError, TypeError):                            # a new one, or one that is no number or text
                    pid, tid = where = tuple(one if type(one) in (int, float, str) else "" for one in where)
                    lane = lanes.setdefault(where, (str(pid), str(tid)))
                one = Event(lane, start * 1e-6, took * 1e-6, name, args if type(args) is dict else {})
                kinds.setdefault(category if type(category) is str else "", []).append(one)
            else:
                halves += event.get("ph") in ("B", "E", "b", "e")
    if unusable:
        problems.append(f"{unusable:,} events without a name or a usable time are left out")
    if halves:
        problems.append(f"{halves:,} begin and end events are left out: complete events (ph X) are read")
    if not OPERATORS & set(kinds) and not KERNELS & set(kinds):
        plain = sorted(set(kinds) - RANGES - LAUNCHES)
        if plain:
            problems.append("it holds no operators of torch: every complete event is taken as one")
        kinds["cpu_op"] = [event for kind in plain for event in kinds[kind]]

    def sorted_of(names):
        events = [event for name in names for event in kinds.get(name, ())]
        events.sort(key=lambda event: (event.lane, event.start, -event.seconds))   # the longest is around
        return events
    about = data.get("kvlab")
    operators, launches, ranges, kernels = map(sorted_of, (OPERATORS, LAUNCHES, RANGES, KERNELS))
    return Trace(operators, launches, ranges, kernels, about if isinstance(about, dict) else {}, tuple(problems))


def usable(number: Any) -> TypeGuard[float]:
    """A number of microseconds that can be computed with; NaN, infinity, text and booleans are none."""
    return type(number) in (int, float) and -1e17 < number < 1e17
