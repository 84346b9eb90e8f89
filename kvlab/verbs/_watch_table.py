"""How `kvlab watch` shows a scrape: as a table that stays in place, as one line, or as one JSON object."""
from __future__ import annotations

import json
import textwrap
from dataclasses import asdict

from kvlab.serving.alerts import Alert
from kvlab.serving.metrics import MEASURES
from kvlab.serving.watching import Look
from kvlab.show import printable

_LINE = (("running", "running", "", 1), ("waiting", "waiting", "", 1), ("kv_usage", "KV", " %", 100),
         ("generated_tokens_per_s", "gen", " tok/s", 1), ("prompt_tokens_per_s", "prompt", " tok/s", 1),
         ("hit_rate", "hits", " %", 100), ("preemption_ratio", "preempted", " % of finished", 100))
_PAIRS = (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("itl_s", "ITL"), ("e2e_s", "latency"), ("queue_s", "queue"))
LEGEND = "times are p50/p99 over the window; preempted: requests preempted per request finished in it; - is missing"
WIDTH, INDENT = 120, " " * 10                             # characters of a line; what its continuation begins with


def number(value: float | None, scale: float = 1) -> str:
    """Three digits, or as many as a whole number has; a dash where there is none."""
    if value is None:
        return "-"
    value *= scale
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"


def line(look: Look) -> str:
    """One scrape in a line of up to WIDTH characters, and further ones where it needs them or an alert fires."""
    if look.problem:
        return f"{look.elapsed_s:6.1f} s  {printable(look.problem)}"
    values = {reading.metric: reading.value for reading in look.readings}
    parts = [f"{name} {number(values[metric], scale)}{unit if values[metric] is not None else ''}"
             for metric, name, unit, scale in _LINE]
    parts += [f"{name} {number(values[f'{metric}_p50'])}/{number(values[f'{metric}_p99'])} s" for metric, name in _PAIRS
              if values[f"{metric}_p50"] is not None]
    parts += [f"RESTARTED ({', '.join(look.restarts)})"] if look.restarts else []
    rows = [f"{look.elapsed_s:6.1f} s"]
    for part in parts:
        if len(rows[-1]) + 2 + len(part) <= WIDTH:
            rows[-1] += f"  {part}"
        else:
            rows.append(INDENT + part)
    for alert in look.alerts:
        if alert.firing:
            rows += textwrap.wrap(said(alert), WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
    return "\n".join(rows)


def said(alert: Alert) -> str:
    """An alert in words: what, how much, the threshold, over which time."""
    value = "no value" if alert.value is None else f"{'at least ' if alert.at_least else ''}{number(alert.value)}"
    sign = "<" if alert.name == "hit_rate" else ">"
    note = f" ({printable(alert.note)})" if alert.note else ""
    return f"{'FIRING' if alert.firing else 'ok' if alert.value is not None else 'unknown'}: {alert.name} {value}" \
           f" (fires {sign} {alert.limit:g}{'' if alert.unit == 'ratio' else ' ' + alert.unit}){note}"


def absent(look: Look) -> list[str]:
    """Why numbers are missing, one line per reason; and which rates jump, since the engine counts late."""
    reasons: dict[str, dict[str, None]] = {}
    for reading in look.readings:
        measure = reading.metric.removesuffix("_p50")
        if measure in MEASURES and reading.value is None and not reading.note.endswith(("second scrape", "window")):
            reasons.setdefault(reading.note, {})[measure] = None
    late = [f"note: {reading.metric} {printable(reading.note)}" for reading in look.readings
            if reading.metric in MEASURES and reading.note.startswith("counted when")]
    return [f"missing {', '.join(measures)}: {printable(why)}" for why, measures in reasons.items()] + late


def table(look: Look, url: str):
    """One scrape as a rich renderable."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text
    values = {reading.metric: reading.value for reading in look.readings}
    since = "since the engine's start" if look.over_s is None else f"window of {look.over_s:.0f} s"
    title, grid = Text(f"{' '.join(filter(None, (look.engine, printable(look.model))))} at {printable(url)}"), Table()
    for name in ("", "now", "p50", "p99"):
        grid.add_column(name, justify="left" if not name else "right")
    if look.problem:
        return Group(title, Text(printable(look.problem), "red"))
    for metric, name, unit, scale in _LINE:
        grid.add_row(name, number(values[metric], scale) + (unit if values[metric] is not None else ""), "", "")
    for metric, name in _PAIRS:
        grid.add_row(f"{name}, s", "", number(values[f"{metric}_p50"]), number(values[f"{metric}_p99"]))
    notes = [f"{look.elapsed_s:.0f} s watched; ratios, p50 and p99: {since}"]
    notes += [f"a counter went down, the engine was restarted: {', '.join(look.restarts)}"] if look.restarts else []
    shown = [Text("\n".join([*notes, *absent(look)]), "dim")]
    shown += [Text(said(alert), "bold red" if alert.firing else "") for alert in look.alerts]
    return Group(title, grid, *shown)


def json_line(look: Look) -> str:
    """One scrape as one line of JSON: values, the reasons of what is missing, and the alerts."""
    return json.dumps({
        "elapsed_s": round(look.elapsed_s, 3), "unix_s": round(look.unix_s, 3), "engine": look.engine,
        "model": look.model, "window_s": look.over_s, "restarts": list(look.restarts), "problem": look.problem,
        "values": {r.metric: r.value for r in look.readings if r.value is not None},
        "missing": {r.metric: r.note for r in look.readings if r.value is None},
        "alerts": [asdict(alert) for alert in look.alerts]}, ensure_ascii=True, allow_nan=False)
