"""Alerts that mean something, on scrapes of a live server or on a simulated timeline alike.

Preemption ratio = requests preempted ÷ requests finished within the window: work thrown away and done again. An
evicted block of the prefix cache is no alarm: that is what a cache does. Only the ratio has a default (5 %); the
others depend on what was promised to users, and are off until a threshold is given.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from kvlab.serving.metrics import Snapshot
from kvlab.serving.windows import History, Window

PREEMPTION_RATIO = 0.05
WINDOW_S = 300.0


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When an alert fires; None = not watched. window_s: over how long the newest scrapes are looked at, in seconds.

    preemption_ratio: above. queue_p99_s: above, in seconds. kv_usage: above, of the fullest engine's mean. hit_rate:
    below, of the prefix cache. Shares are between 0 and 1. ValueError: a number that can be none of them.
    """
    preemption_ratio: float | None = PREEMPTION_RATIO
    queue_p99_s: float | None = None
    kv_usage: float | None = None
    hit_rate: float | None = None
    window_s: float = WINDOW_S

    def __post_init__(self):
        for name, most in (("preemption_ratio", float("inf")), ("queue_p99_s", float("inf")), ("kv_usage", 1.0),
                           ("hit_rate", 1.0), ("window_s", float("inf"))):
            value = getattr(self, name)
            if value is not None and not (0 <= value <= most and value < float("inf")):
                upper = " and at most 1 (5 % is 0.05)" if most == 1 else ""
                raise ValueError(f"the threshold {name} must be a number of at least 0{upper}, got {value}")
        if not self.window_s:
            raise ValueError("the window of alerts must be longer than 0 s")


@dataclass(frozen=True, slots=True)
class Alert:
    """One watched number.

    value: None = none to be had, `note` says why. over_s: what the window spans so far, None = since the engine's
    start. at_least: the true value lies beyond a histogram's last bound, which value is.
    """
    name: str
    value: float | None
    limit: float
    unit: str
    firing: bool
    over_s: float | None
    note: str = ""
    at_least: bool = False


def evaluate(samples: History | Window | Iterable[Snapshot], thresholds: Thresholds) -> list[Alert]:
    """The watched alerts at the newest of the scrapes, in the order of Thresholds' fields.

    Preemptions and no finished request: the ratio has no value, and the alert fires, as dividing by 0 does in PromQL.
    """
    if not isinstance(samples, Window):
        history = samples if isinstance(samples, History) else History(samples)
        samples = history.window(thresholds.window_s)
    return [_RULES[item.name](samples, getattr(thresholds, item.name)) for item in fields(thresholds)
            if item.name in _RULES and getattr(thresholds, item.name) is not None]


def timeline(samples: Iterable[Snapshot], thresholds: Thresholds) -> list[tuple[float, list[Alert]]]:
    """The alerts at each scrape, looking back from there: (time in seconds, alerts)."""
    history, found = History(keep_s=thresholds.window_s), []
    for snapshot in samples:
        history.add(snapshot)
        found.append((snapshot.at_s, evaluate(history, thresholds)))
    return found


def _alert(window: Window, name: str, value: float | None, limit: float, unit: str, firing: bool, notes: list[str],
           at_least: bool = False) -> Alert:
    if window.over_s is None:
        notes = [*notes, "since the engine's start"]
    elif window.short and not {*notes} & {*window.newest.missing.values()}:
        notes = [*notes, f"over {window.over_s:.0f} s so far" if window.over_s else "needs a second scrape"]
    return Alert(name, value, limit, unit, firing, window.over_s, "; ".join(notes), at_least)


def _missing(window: Window, *measures: str) -> list[str]:
    return [window.newest.missing[measure] for measure in measures if measure in window.newest.missing][:1]


def _restarts(window: Window, *measures: str) -> list[str]:
    return ["a counter went down: restarted, counted from 0"] if {*measures} & {*window.restarts} else []


def _preemption_ratio(window: Window, limit: float) -> Alert:
    part, whole = "preemptions", "finished"
    value, notes = window.ratio(part, whole), _missing(window, part, whole)
    firing = value is not None and value > limit
    if value is None and not notes and window.increase(whole) == 0:
        lost = window.increase(part)
        firing = bool(lost)
        notes = [f"{lost:.0f} preemptions and no finished request" if lost else "no finished request"]
    notes += _restarts(window, part, whole)
    return _alert(window, "preemption_ratio", value, limit, "ratio", firing, notes)


def _queue_p99_s(window: Window, limit: float) -> Alert:
    found, notes = window.quantile("queue_s", 0.99), _missing(window, "queue_s")
    if found is None and not notes and window.over_s != 0:
        notes = ["no request was observed"]
    notes += _restarts(window, "queue_s")
    value = None if found is None else found.value
    return _alert(window, "queue_p99_s", value, limit, "s", value is not None and value > limit, notes,
                  found is not None and found.at_least)


def _kv_usage(window: Window, limit: float) -> Alert:
    value = window.mean_of_fullest("kv_usage")
    return _alert(window, "kv_usage", value, limit, "ratio", value is not None and value > limit,
                  _missing(window, "kv_usage"))


def _hit_rate(window: Window, limit: float) -> Alert:
    part, whole = "prefix_hit_tokens", "prefix_queried_tokens"
    value, notes = window.ratio(part, whole), _missing(window, part, whole)
    if value is None and not notes and window.increase(whole) == 0:
        notes = ["nothing was looked up"]
    notes += _restarts(window, part, whole)
    return _alert(window, "hit_rate", value, limit, "ratio", value is not None and value < limit, notes)


_RULES = {"preemption_ratio": _preemption_ratio, "queue_p99_s": _queue_p99_s, "kv_usage": _kv_usage,
          "hit_rate": _hit_rate}
