"""The Chrome trace of a simulated engine, summed up: steps by what they computed, requests by what they waited for.

Times are seconds of the simulated clock: nothing was measured. Written by `kvlab.serving.gantt`.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

SOURCE = "kvlab.serving.gantt"
STEPS = ("prefill", "mixed", "decode")
SPANS = ("queued", "prefill", "decode", "preempted", "recompute")


@dataclass(frozen=True)
class Simulated:
    """What a simulated trace says.

    replicas: of each its id, simulated_s (first to last step), busy_s (in steps), steps and spans, which are rows of
    what, count, mean_s, total_s. problems: one sentence for each thing left out.
    """
    replicas: list[dict[str, Any]]
    problems: tuple[str, ...]
    kind: str = "simulated"
    bytes: None = None                                       # no step of a simulation moves any


def is_simulated(data: dict[str, Any]) -> bool:
    """Whether a trace's object says that kvlab simulated it."""
    about = data.get("otherData")
    return isinstance(about, dict) and about.get("source") == SOURCE


def simulated(events: Iterable[Any], problems: Iterable[str]) -> Simulated:
    """Steps (complete events) and spans of requests (begin and end events), replica by replica; the rest is counted."""
    from kvlab.record.trace import usable
    steps: dict[str, list[tuple[str, float, float]]] = {}
    spans: dict[str, list[tuple[str, float]]] = {}
    opened: dict[tuple[str, str, str], float] = {}
    unusable, problems = 0, list(problems)
    for event in events:
        phase = event.get("ph") if type(event) is dict else None
        if phase == "C":                                     # the engine's state between steps: not summed up
            continue
        name, at = (event.get("name"), event.get("ts")) if phase in ("X", "b", "e") else (None, None)
        if not isinstance(name, str) or not usable(at):
            unusable += 1
            continue
        replica, key = str(event.get("pid", "")), (str(event.get("pid", "")), str(event.get("id", "")), name)
        if phase == "X" and usable(took := event.get("dur")) and took >= 0:
            steps.setdefault(replica, []).append((name, at * 1e-6, took * 1e-6))
        elif phase == "b" and key not in opened:
            opened[key] = at
        elif phase == "e" and at >= opened.get(key, float("inf")):
            spans.setdefault(replica, []).append((name, (at - opened.pop(key)) * 1e-6))
        else:
            unusable += 1
    if unusable or opened:
        problems.append(f"{unusable + len(opened):,} events without a name, a usable time or their other end are left "
                        "out")
    return Simulated([_replica(one, steps.get(one, []), spans.get(one, []))
                      for one in sorted({*steps, *spans}, key=lambda one: (len(one), one))], tuple(problems))


def _replica(name: str, steps: list[tuple[str, float, float]], spans: list[tuple[str, float]]) -> dict[str, Any]:
    ends = [began + took for _, began, took in steps]
    return dict(replica=name, simulated_s=max(ends) - min(began for _, began, _ in steps) if steps else 0.0,
                busy_s=sum(took for _, _, took in steps),
                steps=_rows(STEPS, ((what, took) for what, _, took in steps)), spans=_rows(SPANS, spans))


def _rows(order: tuple[str, ...], timed: Iterable[tuple[str, float]]) -> list[dict[str, Any]]:
    found: dict[str, list[float]] = {what: [] for what in order}
    for what, seconds in timed:
        found.setdefault(what, []).append(seconds)
    return [dict(what=what, count=len(all_of), mean_s=sum(all_of) / len(all_of), total_s=sum(all_of))
            for what, all_of in found.items() if all_of]
