"""Watching a server: scrape after scrape, what each tells as readings, and the alerts."""
from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvlab.record.reading import Reading, failed, missing
from kvlab.serving.alerts import Alert, Thresholds, evaluate
from kvlab.serving.metrics import MEASURES
from kvlab.serving.scrape import Scrape, ScrapeError
from kvlab.serving.windows import History, Window

MOST_NAME = 200                                      # characters of the models' names: labels are the server's own

RATES = {"generated_tokens_per_s": ("generated_tokens", "tokens/s"),
         "prompt_tokens_per_s": ("prompt_tokens", "tokens/s"), "finished_per_s": ("finished", "1/s")}
RATIOS = {"preemption_ratio": ("preemptions", "finished"), "hit_rate": ("prefix_hit_tokens", "prefix_queried_tokens")}


@dataclass(frozen=True, slots=True)
class Look:
    """One scrape of a watch. readings: what it tells. problem: why this scrape failed; then its
    readings are failed ones, and the alerts those of the scrape before.

    elapsed_s: since the first scrape; unix_s: when. restarts: measures whose counters went down within the window.
    """
    elapsed_s: float
    unix_s: float
    engine: str
    model: str
    readings: tuple[Reading, ...]
    alerts: tuple[Alert, ...]
    over_s: float | None
    restarts: tuple[str, ...]
    problem: str = ""

    def rows(self, number: int) -> list[dict[str, Any]]:
        """Lines of the result table: a scrape is a case, named by its time in UTC."""
        from datetime import UTC, datetime
        case = datetime.fromtimestamp(self.unix_s, UTC).isoformat(timespec="milliseconds")
        context = {"study": "watch", "comparison_id": "watch", "case_id": f"{number:06d}", "case": case,
                   "model": self.model}
        return [{**context, **asdict(reading)} for reading in self.readings]


def watch(scrape: Scrape, thresholds: Thresholds, every_s: float = 1.0, for_s: float | None = None, *,
          once: bool = False, clock: Callable[[], float] = time.monotonic,
          sleep: Callable[[float], None] = time.sleep) -> Iterator[Look]:
    """One Look per scrape, every_s apart, until for_s have passed (None: until the caller stops).

    once: a single scrape, and what the engine tells of all the time since it started. A first scrape that fails
    raises ScrapeError; a later one is a Look with a problem. ValueError: every_s or for_s that is not positive.
    """
    for name, seconds in (("every", every_s), ("for", for_s)):
        if seconds is not None and not 0 < seconds < float("inf"):
            raise ValueError(f"--{name} must be a positive time, got {seconds} s")
    history, look, begun = History(keep_s=thresholds.window_s), None, clock()
    while True:
        began = clock()
        try:
            history.add(scrape.snapshot(began))
            window = history.since_start() if once else history.window(thresholds.window_s)
            look = _look(history, window, thresholds, began - begun)
        except ScrapeError as error:
            if look is None:
                raise
            gone = tuple(failed(reading.metric, reading.unit, str(error), source=look.engine)
                         for reading in look.readings)
            look = replace(look, elapsed_s=began - begun, unix_s=time.time(), readings=gone, problem=str(error))
        yield look
        rest = every_s - (clock() - began)
        if once or for_s is not None and clock() + max(rest, 0.0) - begun > for_s:
            return
        if rest > 0:
            sleep(rest)


def _look(history: History, window: Window, thresholds: Thresholds, elapsed_s: float) -> Look:
    newest = window.newest
    labels = [dict(series) for series in newest.gauges.get("running", {})]
    models = {one.get("model_name") or one.get("model") for one in labels}
    return Look(elapsed_s, time.time(), newest.engine, ", ".join(sorted(filter(None, models)))[:MOST_NAME],
                tuple(readings(window, history.window(1e-9))), tuple(evaluate(window, thresholds)), window.over_s,
                tuple(window.restarts))


def readings(window: Window, last: Window) -> Iterator[Reading]:
    """What a window tells: gauges and totals of its newest scrape, rates between the last two scrapes (`last`), ratios
    and quantiles over the window. What is not there is missing with the reason."""
    newest = window.newest

    def source(measures: Iterable[str]) -> str:
        return f"{newest.engine}: " + " ÷ ".join(newest.names[measure] for measure in measures)

    def reading(metric, value, unit, measures, method, over, why, note=""):
        gone = [newest.missing[measure] for measure in measures if measure in newest.missing]
        if value is None:
            return missing(metric, unit, gone[0] if gone else why, source=newest.engine)
        notes = [note, *dict.fromkeys(newest.notes.get(measure, "") for measure in measures)]
        return Reading(metric, value, unit, newest.kind, method, source(measures), window_s=over,
                       note="; ".join(filter(None, notes)))
    for name, measure in MEASURES.items():
        if measure.type != "histogram":
            method = "sensor" if measure.type == "gauge" else "counter"
            yield reading(name, newest.value(name), measure.unit, [name], method, None, "")
    for name, (counted, unit) in RATES.items():
        yield reading(name, last.rate(counted), unit, [counted], "derived", last.over_s, "a rate needs a second scrape")
    for name, (part, whole) in RATIOS.items():
        why = "a ratio needs a second scrape" if window.over_s == 0 else f"no {MEASURES[whole].meaning} in the window"
        yield reading(name, window.ratio(part, whole), "ratio", [part, whole], "derived", window.over_s, why)
    for name, measure in MEASURES.items():
        if measure.type == "histogram":
            why = "a window needs a second scrape" if window.over_s == 0 else "nothing was observed in the window"
            for q in (0.5, 0.99):
                found = window.quantile(name, q)
                note = "at least: beyond the histogram's last bound" if found and found.at_least else ""
                yield reading(f"{name}_p{q * 100:.0f}", found and found.value, measure.unit, [name], "derived",
                              window.over_s, why, note)
