"""The summary of a trace: operators by their own time, gaps in which none ran, bytes by their shapes, kernels."""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from kvlab.record._operators import MAY_WIDEN, VIEWS, WORKERS, Moved, moved, operator_class
from kvlab.record.simulated_trace import Simulated
from kvlab.record.trace import CALL, Event, Lane, Trace, no_collector, usable
from kvlab.units import display

NO_OPERATOR = "(no operator)"       # FlashInfer, Triton and others launch kernels without one of torch's around
OCCUPANCY = "est. achieved occupancy %"                 # of a kernel, as Kineto writes it
Interval = tuple[float, float, str, str]                # start, end, what begins it, what ends it


@dataclass(frozen=True)
class Summary:
    """What a trace says.

    Times are the profiler's (measured, its overhead included), bytes are modelled from shapes. calls: ranges
    "kvlab:call …"; seconds: inside them, or of the whole trace where there are none (calls 0), the processes of a
    trace added up. operators, by their own time, on a GPU by that of the kernels they launched: name, class, calls,
    total_s, self_s, share (of these seconds on every thread, so that all shares and the gaps make 1), kernel_s,
    bytes, bytes_of
    ("inputs + outputs", "inputs", "" where an operator inside is counted). lanes, one a thread or stream: lane, kind,
    busy_s, gap_s, gap_share, largest_gap_s, largest_gap. kernels: operator (NO_OPERATOR where a call launched them
    outside of any, a row of operators without calls and time of its own), kernel, class (the operator's, else by the
    kernel's name), count, total_s. not_counted: operator -> why its bytes are not. launches: kernels that ran, copies
    and fills of memory not among them. occupancy: (mean by kernel time, share of the kernel time that it is known of),
    as the profiler works it out from each launch's grid; None where it does so of no kernel.
    """
    calls: int
    seconds: float
    call_seconds: tuple[float, ...]
    operators: list[dict[str, Any]]
    lanes: list[dict[str, Any]]
    kernels: list[dict[str, Any]]
    not_counted: dict[str, str]
    problems: tuple[str, ...]
    launches: int = 0
    occupancy: tuple[float, float] | None = None

    @property
    def bytes(self) -> int | None:
        """Modelled bytes of all operators that are counted; None where the shapes of none are there."""
        counted = [operator["bytes"] for operator in self.operators if operator["bytes_of"]]
        return sum(counted) if counted else None

    @property
    def kernel_s(self) -> float:
        return sum(kernel["total_s"] for kernel in self.kernels)


@no_collector()
def summary(trace: Trace) -> Summary | Simulated:
    """Operators, gaps, modelled bytes and kernels of the calls in a trace; of a simulated engine's, steps and spans."""
    if trace.simulated is not None:
        return trace.simulated
    calls = [event for event in trace.ranges if event.name.startswith(CALL)]
    windows = {process: _union((c.start, c.end, c.name, c.name) for c in of)
               for process, of in _by(calls, lambda event: event.lane[0]).items()}
    lanes = _by_lane(_inside(trace.operators, windows) if calls else trace.operators)
    if not calls:
        windows = {process: [(min(e.start for e in of), max(e.end for e in of), "", "")]
                   for process, of in _by(trace.operators, lambda event: event.lane[0]).items()}
    spent = {process: sum(end - start for start, end, _, _ in of) for process, of in windows.items()}
    launches, nested, found = _by_lane(trace.launches), _Nested(), []
    alone = {id(e): None for e in trace.launches} | {id(e): NO_OPERATOR for e in _inside(trace.launches, windows)}
    for lane in {**lanes, **launches}:
        events, own = lanes.get(lane, []), launches.get(lane, [])
        nested.walk(sorted([*events, *own], key=attrgetter("start")) if own else events, alone)
        if events:
            found.append(_lane(lane, "thread", nested.intervals, windows[lane[0]]))
    problems = list(trace.problems)
    kernels = _kernels(trace, nested.launched, problems, within_calls=bool(calls))
    for lane, events in _by_lane(kernel for kernel, _ in kernels).items():
        busy = _union((e.start, e.end, e.name, e.name) for e in events)
        found.append(_lane(lane, "stream", busy, [(busy[0][0], busy[-1][1], "", "")]))
    if calls and trace.operators and not nested.totals:
        problems.append(f"no operator ran inside the ranges {CALL!r}")
    launched = _launched(kernels)
    operators = _operators(nested.totals, sum(spent[lane[0]] for lane in lanes), launched)
    return Summary(len(calls), sum(spent.values()), tuple(c.seconds for c in calls), operators, found, launched,
                   nested.not_counted, tuple(problems),
                   sum(not kernel.name.startswith(("Memcpy", "Memset")) for kernel, _ in kernels),
                   _occupancy([kernel for kernel, _ in kernels]))


_NOTHING, _COPIES, _WORK = range(3)                     # what of the operators inside another has its bytes counted


class _Nested:
    """Operators gone through lane by lane, with a stack of those that still run: totals by name."""

    def __init__(self):
        self.totals: dict[str, list] = {}               # name -> [calls, total_s, self_s, bytes, counted, inputs only]
        self.launched: dict[Any, str | None] = {}       # correlation id -> operator, None: not in a call
        self.not_counted: dict[str, str] = {}
        self.intervals: list[Interval] = []             # of the last lane: when some operator ran
        self._stack: list[list] = []                    # [event, its end, own seconds, what inside has its bytes]
        self._seen: dict[str, Moved | None] = {}

    def walk(self, events: Iterable[Event], alone: dict[int, str | None]) -> None:
        """One lane's events, sorted by start. alone: of launches (by id), whose kernels are those of no operator."""
        stack, outermost = self._stack, []
        for event in events:
            start = event.start
            while stack and stack[-1][1] <= start:
                self._pop()
            if alone and id(event) in alone:
                if (number := _number(event, "correlation")) is not None:
                    self.launched[number] = stack[-1][0].name if stack else alone[id(event)]
                continue
            end = start + event.seconds
            if stack:                                   # what sticks out of its parent is not the parent's
                stack[-1][2] -= (end if end < stack[-1][1] else stack[-1][1]) - start
            if len(stack) == 0 or end > stack[0][1]:
                outermost.append((start, end, event.name, event.name))
            stack.append([event, end, event.seconds, _NOTHING])
        while stack:
            self._pop()
        self.intervals = _union(outermost)

    def _pop(self) -> None:
        event, _, own, below = self._stack.pop()
        name = event.name
        sums = self.totals.get(name)
        if sums is None:
            sums = self.totals[name] = [0, 0.0, 0.0, 0, False, False]
        sums[0] += 1
        if own > 0:
            sums[2] += own
        for outer in self._stack:
            if outer[0].name == name:
                break
        else:
            sums[1] += event.seconds                    # one inside another of its name is in that one's time
        # those around hand the same tensors on, so the innermost counts; a worker counts too beside mere copies
        if (not below or below == _COPIES and name in WORKERS) and name not in VIEWS and self._bytes(event, sums):
            below = max(below, _COPIES if operator_class(name) == "copy" else _WORK)
        if below and self._stack:
            self._stack[-1][3] = max(self._stack[-1][3], below)

    def _bytes(self, event: Event, sums: list) -> bool:
        name, args = event.name, event.args
        shapes = [args.get("Input Dims"), args.get("Input type"), args.get("Input Strides")]
        if name in MAY_WIDEN:
            shapes.append(args.get("Concrete Inputs"))
        key = f"{name} {shapes}"
        if key not in self._seen:
            self._seen[key] = moved(name, *shapes)
        found = self._seen[key]
        if found is None:
            return False
        if found.why_not:
            self.not_counted[event.name] = found.why_not
        else:
            sums[3] += found.inputs + (found.output or 0)
            sums[4], sums[5] = True, sums[5] or found.output is None
        return True


def _inside(events: list[Event], windows: dict[str, list[Interval]]) -> Iterable[Event]:
    """The events that start inside one of their process's windows."""
    starts = {process: [window[0] for window in of] for process, of in windows.items()}
    for event in events:
        process = event.lane[0]
        at = bisect_right(starts.get(process, ()), event.start) - 1
        if at >= 0 and event.start < windows[process][at][1]:
            yield event


def _by(events: Iterable[Event], key: Callable[[Event], Any]) -> dict[Any, list[Event]]:
    groups: dict[Any, list[Event]] = {}
    for event in events:
        groups.setdefault(key(event), []).append(event)
    return groups


def _by_lane(events: Iterable[Event]) -> dict[Lane, list[Event]]:
    return _by(events, attrgetter("lane"))


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end, first, last in sorted(intervals):
        if not merged or start > merged[-1][1]:
            merged.append((start, end, first, last))
        elif end > merged[-1][1]:
            merged[-1] = (merged[-1][0], end, merged[-1][2], last)
    return merged


def _lane(lane: Lane, kind: str, busy: list[Interval], windows: list[Interval]) -> dict[str, Any]:
    """How long a lane was busy inside the windows, and its largest gap with what ran before and after it."""
    used, largest, at = 0.0, (0.0, ""), 0
    for start, end, _, _ in windows:
        reached, before = start, "the start"
        while at < len(busy) and busy[at][0] < end:
            begin, until, first, last = busy[at]
            largest = max(largest, (begin - reached, f"between {before} and {first}"))
            used += max(0.0, min(until, end) - max(begin, reached))
            reached, before, at = max(reached, min(until, end)), last, at + 1
        largest = max(largest, (end - reached, f"between {before} and the end"))
    whole = sum(end - start for start, end, _, _ in windows)
    gap = max(0.0, whole - used)
    return dict(lane="/".join(lane), kind=kind, busy_s=used, gap_s=gap, gap_share=gap / whole if whole else 0.0,
                largest_gap_s=largest[0], largest_gap=largest[1])


def _number(event: Event, key: str) -> int | str | None:
    """The number by which one event names another."""
    number = event.args.get(key)
    return number if type(number) in (int, str) else None


def _kernels(trace: Trace, launched: dict[Any, str | None], problems: list[str],
             within_calls: bool) -> list[tuple[Event, str]]:
    """Kernels with the operator that launched them: by correlation id; in a trace without calls, by external id too.

    Those launched outside of the calls are left out, and those whose launch is not found, which is said.
    """
    names = {} if within_calls else {_number(e, "External id"): e.name for e in trace.operators}
    names.pop(None, None)
    found, lost = [], []
    for kernel in trace.kernels:
        number = _number(kernel, "correlation")
        operator = launched.get(number)
        if not within_calls and operator in (None, NO_OPERATOR):
            operator = names.get(_number(kernel, "External id"), NO_OPERATOR)
        elif number is None or number not in launched:
            lost.append(kernel.seconds)
        if operator is not None:
            found.append((kernel, operator))
    if lost:
        problems.append(f"{len(lost):,} kernels ({display(sum(lost), 's')}) are left out: their launch is not in the "
                        "trace, so whether a call launched them is unknown")
    return found


def _launched(kernels: list[tuple[Event, str]]) -> list[dict[str, Any]]:
    sums: dict[tuple[str, str], list] = {}
    for kernel, operator in kernels:
        total = sums.setdefault((operator, kernel.name), [0, 0.0])
        total[0] += 1
        total[1] += kernel.seconds
    found = [dict(operator=operator, kernel=name, count=count, total_s=total,
                  **{"class": operator_class(name if operator == NO_OPERATOR else operator)})
             for (operator, name), (count, total) in sums.items()]
    return sorted(found, key=lambda row: -row["total_s"])


def _occupancy(kernels: list[Event]) -> tuple[float, float] | None:
    """Mean of what the profiler estimates per kernel, by their time, and the share of the time that has an estimate."""
    known = [(kernel.seconds, percent / 100) for kernel in kernels
             if usable(percent := kernel.args.get(OCCUPANCY)) and 0 <= percent <= 100]
    spent = sum(seconds for seconds, _ in known)
    if not spent:
        return None
    return sum(seconds * ratio for seconds, ratio in known) / spent, spent / sum(kernel.seconds for kernel in kernels)


def _operators(totals: dict[str, list], seconds: float, kernels: list[dict]) -> list[dict[str, Any]]:
    on_gpu: dict[str, float] = {}
    for row in kernels:
        on_gpu[row["operator"]] = on_gpu.get(row["operator"], 0.0) + row["total_s"]
    if NO_OPERATOR in on_gpu:
        totals = {**totals, NO_OPERATOR: [0, 0.0, 0.0, 0, False, False]}
    found = [dict(name=name, **{"class": operator_class(name)}, calls=calls, total_s=total, self_s=own,
                  share=own / seconds if seconds else 0.0, kernel_s=on_gpu.get(name, 0.0), bytes=size,
                  bytes_of="" if not counted else "inputs" if inputs_only else "inputs + outputs")
             for name, (calls, total, own, size, counted, inputs_only) in totals.items()]
    return sorted(found, key=lambda row: (-row["kernel_s"], -row["self_s"]))
