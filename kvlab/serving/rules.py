"""The same alerts as a Prometheus rule file: PromQL over an engine's own metric names.

One group per engine, one rule per threshold that is set; each looks at every scraped target on its own (labels job
and instance). Where an engine has no metric for an alert, or only former versions had one, asking for it is refused
with the reason. A name of an older version stands behind `or` its successor. No rule has a `for`: each expression looks
back over the whole window already, so that a `for` would only delay it, and the rules say at every moment what
`kvlab watch` says. Check with `promtool check rules FILE`.
"""
from __future__ import annotations

import json

from kvlab.serving.alerts import Thresholds
from kvlab.serving.metrics import COPIES, NOT_EXPORTED, Mapped, Term, mappings

_BY = "by (job, instance)"
_SAYS = {"preemption_ratio": "requests preempted per request finished",
         "queue_p99_s": "99th percentile of the time in the queue, in seconds",
         "kv_usage": "share of the KV cache in use",
         "hit_rate": "share of prompt tokens found in the prefix cache"}
_ALERT = {"preemption_ratio": "KVPreemptionRatioHigh", "queue_p99_s": "QueueTimeP99High", "kv_usage": "KVUsageHigh",
          "hit_rate": "PrefixHitRateLow"}


def rule_file(engine: str, thresholds: Thresholds, skip_missing: bool = False) -> str:
    """The YAML text. skip_missing: leave out, with a comment, what the engine has no metric for.

    KeyError: an unknown engine. ValueError: an alert that this engine cannot have, or none that is left.
    """
    mappings(engine)
    over, lines, left_out = f"[{_duration(thresholds.window_s)}]", [], []
    for name, build in _EXPRESSIONS.items():
        limit = getattr(thresholds, name)
        if limit is None:
            continue
        try:
            expression = build(engine, over, f"{limit:.12g}")
        except LookupError as error:
            if not skip_missing:
                raise ValueError(f"{engine} cannot have the alert {name}: {error.args[0]}") from None
            left_out.append(f"{name}: {error.args[0]}")
            continue
        side = "below" if name == "hit_rate" else "above"
        summary = f"{_SAYS[name]} is {{{{ $value }}}}, {side} {limit:.12g}, over {_duration(thresholds.window_s)}"
        lines += [f"      - alert: {_ALERT[name]}", f"        expr: {json.dumps(expression)}", "        labels:",
                  "          severity: warning", f"          engine: {engine}", "        annotations:",
                  f"          summary: {json.dumps(summary)}"]
    if not lines:
        raise ValueError(f"there is no alert to write for {engine}: " + ("; ".join(left_out) or "no threshold is set"))
    return "\n".join([f"# Alerts of kvlab for {engine}", *(f"# {line}" for line in left_out), "groups:",
                      f"  - name: kvlab_{engine}", "    rules:", *lines, ""])


def _duration(seconds: float) -> str:
    """In Prometheus' words, to the millisecond."""
    ms = round(seconds * 1000)
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if ms % size == 0:
            return f"{ms // size}{unit}"
    return f"{ms}ms"


def _known(engine: str, measure: str) -> tuple[Mapped, ...]:
    known, why = mappings(engine)[measure]
    if not known or not why.startswith(NOT_EXPORTED):        # none, or none any more
        raise LookupError(why)
    return known


def _selector(term: Term, suffix: str = "") -> str:
    labels = f'{{{term.label}="{term.value}"}}' if term.label else ""
    return term.metric + suffix + labels


def _once(engine: str, expression: str) -> str:
    """Ranks of one engine repeat a number; it counts once."""
    return f"max without ({', '.join(COPIES)}) ({expression})" if engine == "sglang" else expression


def _increase(engine: str, measure: str, over: str) -> str:
    ways = [" + ".join(f"sum {_BY} ({_once(engine, f'increase({_selector(term)}{over})')})" for term in mapped.terms)
            for mapped in _known(engine, measure)]
    return " or ".join(f"({way})" for way in ways) if len(ways) > 1 else ways[0]


def _ratio(engine: str, part: str, whole: str, over: str) -> str:
    return f"({_increase(engine, part, over)}) / ({_increase(engine, whole, over)})"


def _queue(engine: str, over: str, limit: str) -> str:
    (mapped,) = _known(engine, "queue_s")
    rates = _once(engine, f"rate({_selector(mapped.terms[0], '_bucket')}{over})")
    return f"histogram_quantile(0.99, sum by (job, instance, le) ({rates})) > {limit}"


def _usage(engine: str, over: str, limit: str) -> str:
    ways = []
    for mapped in _known(engine, "kv_usage"):
        if mapped.joined == "/":
            top, below = mapped.terms
            each = f"{_selector(top)} / ignoring ({top.label}) {_selector(below)}"
            ways.append(f"avg_over_time(({each}){over[:-1]}:])")
        else:
            ways.append(f"avg_over_time({_selector(mapped.terms[0])}{over})")
    return f"max {_BY} ({' or '.join(ways)}) > {limit}"


_EXPRESSIONS = {
    "preemption_ratio":
        lambda engine, over, limit: f"{_ratio(engine, 'preemptions', 'finished', over)} > {limit}",
    "queue_p99_s": _queue,
    "kv_usage": _usage,
    "hit_rate":
        lambda engine, over, limit: f"{_ratio(engine, 'prefix_hit_tokens', 'prefix_queried_tokens', over)} < {limit}",
}
