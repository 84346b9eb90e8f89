"""Is B faster than A? Two runs, or two variants of one run, case by case, with the interval of the ratio."""
from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.comparing._ratio import Limits, in_cycles, interval, verdict
from kvlab.comparing._sides import Side, differences, sides
from kvlab.record.reading import COLUMNS, CONTEXT
from kvlab.record.statistics import aa_resolution
from kvlab.record.wide import strength
from kvlab.registry import no_such
from kvlab.serving.bench_files import DEFAULT_METRICS, is_bench, read_bench
from kvlab.units import display

if TYPE_CHECKING:
    import pandas as pd

MARGIN = 0.05
ONCE = ("kind", "source", "method")                     # a case has one reading of a metric for each of these
VERDICTS = ("FASTER", "SLOWER", "LESS", "MORE", "SAME", "AMBIGUOUS")
LAYOUT = ("block_size", "page_order")
# what a row is about: all of its context but ids and what follows from the rest, and which part was looked at
ABOUT = (*(name for name in CONTEXT if name not in
           ("run_id", "comparison_id", "case_id", "study", "worker", "format_path", "replica", "case")), "scope")


def compare(a, b, *, metric: str = "latency_s", run=None, by: Sequence[str] | None = None, margin: float = MARGIN,
            profiles: Path | str = "profiles") -> pd.DataFrame:
    """B against A, one line per case that both hold: ratio B / A with an interval, and a verdict.

    a, b: two runs (directory, id, file of results, result table, a study's name for its newest run, or what aiperf,
    guidellm or `vllm bench serve` wrote), or two
    variants of `run` (default: the newest run under `profiles` that holds both). by: columns in which two rows must
    agree to be of one case; default all that say what was looked at, of two variants the layout only if one of them
    has several.
    low, high: of two variants of one run the 95 % interval of the ratio; of two runs what scatters within each, which
    held the ratio 1 of the same trial minutes apart in 55 to 76 % only (`.attrs["interval"]` says which).
    verdict: SAME where the whole interval lies within the margin of 1, never where an A/A pair differs by more than
    that margin; FASTER or SLOWER (LESS, MORE where it is no time) where the whole interval is further from 1 than the
    A/A resolution (without an A/A pair, and between two runs, the margin, if that is larger); else AMBIGUOUS. A
    latency_s whose cycles are known on both sides is FASTER or SLOWER only where the cycles are too: else the clocks
    differed. A metric of several sources is compared between those of one source, the strongest (kind, then method,
    then source as in `wide`) that both have. `.attrs` also says what was compared, what only one of them has, and how
    their environments differ.
    Refused: unknown names (KeyError), a margin below 0, columns in `by` that leave several rows to a case (ValueError).
    """
    import pandas as pd
    if not 0 <= margin < 1:
        raise ValueError(f"margin {margin} must be at least 0 and below 1; 0.05 is 5 %")
    side_a, side_b, variants = sides(a, b, run, Path(profiles))
    known = {*side_a.rows["metric"], *side_b.rows["metric"]}
    if metric not in known:
        raise no_such("metric in these results", metric, known)
    about, whole = _columns(by, (side_a, side_b), metric, variants), by is None
    cases_a, cases_b = (_cases(side, metric, about, whole) for side in (side_a, side_b))
    resolution = _resolution((side_a, side_b), metric)
    limits = Limits(margin, resolution, between_runs=not variants)
    both = {key: _pair(cases_a[key], cases_b[key]) for key in cases_a if key in cases_b}
    cycles = [_cases(side, "cycles", about, whole) if metric == "latency_s" else {} for side in (side_a, side_b)]
    found = [{**{name: one[name] for name in about},
              **_judged(side_a, one, side_b, other, limits, [side[key][0] for side in cycles if key in side])}
             for key, (one, other) in both.items() if one["kind"] == other["kind"]]
    table = pd.DataFrame(found, columns=[*about, "kind", "a", "b", "ratio", "low", "high", "verdict", "note"])
    table = table.astype({name: COLUMNS[name] for name in about} | dict.fromkeys(("ratio", "low", "high"), "float64"))
    rows = [rows[0] for cases in (cases_a, cases_b) for rows in cases.values()]
    told = [name for name in about if len({row[name] for row in rows}) > 1]
    missing_a, missing_b = (dict(_keyed(_rows(side, metric, missing=True), about, whole)) for side in (side_a, side_b))
    table.attrs.update(
        a=side_a.name, b=side_b.name, run=side_a.source if variants else "", metric=metric,
        machines=[side.machine for side in (side_a, side_b)],
        unit=rows[0]["unit"] if rows else "", margin=margin, resolution=resolution, resolves_margin=limits.resolves,
        beyond=limits.beyond, interval="95 % interval" if variants else "within-run interval",
        warnings=_warnings(side_a, side_b, about, variants, metric, resolution),
        kinds_differ=[f"{_label(one, told)}: {one['kind']} in A, {other['kind']} in B" for one, other in both.values()
                      if one["kind"] != other["kind"]],
        only_in_a=[_label(row, told, missing_b.get(key)) for key, (row, *_) in cases_a.items() if key not in cases_b],
        only_in_b=[_label(row, told, missing_a.get(key)) for key, (row, *_) in cases_b.items() if key not in cases_a])
    return table


def default_metrics(a: str, b: str) -> list[str]:
    """What to compare where no metric is given: of two files of load generators all that both have, else latency_s."""
    paths = [Path(name) for name in (a, b)]
    if not all(map(is_bench, paths)):
        return ["latency_s"]
    known = [set(read_bench(path).table()["metric"]) for path in paths]
    return [name for name in DEFAULT_METRICS if name in known[0] & known[1]] or [DEFAULT_METRICS[0]]


def _columns(by, both, metric, variants) -> tuple[str, ...]:
    """The columns that tell the cases apart."""
    for name in by or ():
        if name not in (*CONTEXT, "scope"):
            raise no_such("result column", name, (*CONTEXT, "scope"))
    if by is not None:
        return tuple(by)
    about = tuple(name for name in ABOUT if not variants or name != "variant")
    short = tuple(name for name in about if name not in LAYOUT)
    if variants and not any(_rows(side, metric).duplicated(["comparison_id", *short, *ONCE]).any()
                            for side in both):
        return short                                     # each variant has its own layout: it is part of the variant
    return about


def _rows(side: Side, metric: str, missing: bool = False) -> pd.DataFrame:
    rows = side.rows[(side.rows["metric"] == metric) & ((side.rows["kind"] == "missing") == missing)]
    return rows[rows["replica"].fillna(0) == 0]


def _keyed(rows: pd.DataFrame, about, whole: bool) -> Iterator[tuple[tuple, dict]]:
    """(key, row). whole: what no column says (windows, each sequence's length) is in `case`, and counts as well."""
    plain = rows.astype(object).where(rows.notna(), None)
    for row in plain.to_dict("records"):
        yield tuple(row[name] for name in about) + ((_rest(row["case"], about),) if whole else ()), row


def _cases(side: Side, metric: str, about, whole) -> dict[tuple, list[dict]]:
    """Key -> rows, strongest first: at most one of a kind, source and method."""
    cases: dict[tuple, list[dict]] = {}
    for key, row in _keyed(_rows(side, metric), about, whole):
        seen = next((s for s in cases.get(key, ()) if all(s[name] == row[name] for name in ONCE)), None)
        if seen is not None:
            apart = [name for name in (*CONTEXT, "scope")
                     if seen[name] != row[name] and name not in ("case_id", "case")]
            advice = f"they differ in {', '.join(apart)}: add that to the columns to compare by" if apart else (
                "no column tells them apart, so that they cannot be compared")
            raise ValueError(f"{side.name} has several readings of {metric} for {_label(row, about)}; {advice}")
        cases.setdefault(key, []).append(row)
    return {key: sorted(rows, key=lambda row: strength(row["kind"], row["method"], row["source"]))
            for key, rows in cases.items()}


def _pair(ones: list[dict], others: list[dict]) -> tuple[dict, dict]:
    """The rows of A and B to compare: of their strongest kind and of one source if both have it, else the strongest."""
    if ones[0]["kind"] == others[0]["kind"]:
        for one in ones:
            for other in others:
                if one["kind"] == other["kind"] == ones[0]["kind"] and one["source"] == other["source"]:
                    return one, other
    return ones[0], others[0]


@lru_cache(maxsize=4096)
def _rest(case: str, about: tuple[str, ...]) -> str:
    """A case's own text without variant and replica (nor the layout, where that is the variant's)."""
    try:
        data = json.loads(case)
    except (ValueError, RecursionError):
        return case
    if isinstance(data, dict):
        left_out = {"variant", "replica", *(() if set(LAYOUT) <= set(about) else ("layout",))}
        data = {name: value for name, value in data.items() if name not in left_out}
    return json.dumps(data, sort_keys=True)


def _label(row: dict, told, elsewhere: dict | None = None) -> str:
    """The columns that tell this case from the others, and why the other side has no number for it, if it says so."""
    about = ", ".join(f"{name} {row[name]}" for name in told if row[name] not in (None, "")) or "the only case"
    return about if elsewhere is None else f"{about} (there: {elsewhere['error'] or elsewhere['note']})"


def _resolution(both, metric: str) -> float | None:
    """By how much two measurements of one trial may differ, the larger of two runs; None if no A/A pair tells."""
    if not metric.startswith("latency_"):
        return None
    pairs = [pair for side in both if (pair := aa_resolution(side.table)) and pair[1] and pair[1] > 0]
    return max((float(max(high, 1 / low)) - 1 for _, low, high in pairs), default=None)


def _judged(side_a, one, side_b, other, limits: Limits, cycles: list[dict]) -> dict:
    """Values, ratio, interval and verdict of one case. cycles: their rows, where sides have them."""
    low, high, remark = interval(side_a, one, side_b, other)
    differ = [f"{name}: {one[name] or 'none'} / {other[name] or 'none'}"
              for name in ("source", "method", "cache_state", "denominator") if one[name] != other[name]]
    said = verdict(low, high, limits, one["unit"] == "s")
    noisy = "" if limits.resolution is None or limits.resolves or said != "AMBIGUOUS" else (
        f"the run cannot resolve the margin: A/A {100 * limits.resolution:.1f} %, margin {100 * limits.margin:.1f} %")
    if low is not None and high is not None and said in ("FASTER", "SLOWER") and len(cycles) == 2:
        in_time, said = said, verdict(*in_cycles(low, high, one, other, *cycles), limits, True)
        if said != in_time:
            said, noisy = "AMBIGUOUS", "time separates, cycles do not: the clocks differed"
    return dict(kind=one["kind"], a=one["value"], b=other["value"],
                ratio=other["value"] / one["value"] if one["value"] else None, low=low, high=high, verdict=said,
                note="; ".join(filter(None, [noisy, remark, *differ])))


def _warnings(a: Side, b: Side, about, variants: bool, metric: str, resolution: float | None) -> list[str]:
    said = [] if variants else differences(a, b)
    if variants and "block_size" not in about:
        layouts = [", ".join(sorted({_layout(row) for _, row in _rows(side, metric)[[*LAYOUT]].iterrows()}))
                   for side in (a, b)]
        if layouts[0] != layouts[1]:
            said.append(f"layouts differ, each variant's own: {layouts[0]} / {layouts[1]}")
    if metric.startswith("latency_") and resolution is None:
        said.append("no A/A pair was measured, so the resolution is unknown; the margin stands for it")
    return said


def _layout(row) -> str:
    """A layout in words."""
    size = row["block_size"]
    return f"blocks of {size}, {row['page_order']}" if size == size and size is not None else "contiguous"


def summary(table: pd.DataFrame) -> str:
    """One line: what was compared, and how many cases got which verdict."""
    about, counts = table.attrs, table["verdict"].value_counts()
    said = ", ".join(f"{counts[name]} {name}" for name in VERDICTS if name in counts) or "no case in common"
    apart = [f"{len(about[name])} {words}" for name, words in (
        ("only_in_a", "only in A"), ("only_in_b", "only in B"), ("kinds_differ", "of two kinds, not compared"))
        if about[name]]
    return f"{about['metric']} of B ({about['b']}) against A ({about['a']}): {'; '.join([said, *apart])}"


def as_json(table: pd.DataFrame) -> dict:
    """The same as plain values; a bound without end is null."""
    plain = table.astype(object).where(table.notna() & (table != float("inf")), None)
    return {**table.attrs, "summary": summary(table), "cases": plain.to_dict("records")}


def print_comparison(table: pd.DataFrame, briefly: bool = False) -> None:
    """The table with the columns that differ between its cases, what to know of it, and the summary line.

    briefly: table and summary only, where another metric of the same two follows.
    """
    from rich.console import Console
    from rich.table import Table

    from kvlab.show import printable
    about, unit = table.attrs, table.attrs["unit"]
    context = list(table.columns[:list(table.columns).index("kind")])
    varying = [name for name in context if table[name].nunique(dropna=False) > 1]
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in [*varying, "A", "B", "B / A", about["interval"], "", "remark"]:
        shown.add_column(name, overflow="fold")
    plain = table.astype(object).where(table.notna(), None).to_dict("records")
    for row in plain:
        ends = "" if row["low"] is None else f"{row['low']:.3f} … {row['high']:.3f}"
        cells = [*("" if row[name] is None else str(row[name]) for name in varying), display(row["a"], unit),
                 display(row["b"], unit), "–" if row["ratio"] is None else f"{row['ratio']:.3f}", ends, row["verdict"],
                 "; ".join(filter(None, [row["kind"] if row["kind"] != "measured" else "", row["note"]]))]
        shown.add_row(*(printable(cell).replace("[", "\\[") for cell in cells))
    if len(table):
        fixed = {name: plain[0][name] for name in context if name not in varying}
        on = [f" ({machine})" if machine and not about["run"] else "" for machine in about["machines"]]
        print(printable(f"A = {about['a']}{on[0]}, B = {about['b']}{on[1]}"
                        f"{', in ' + about['run'] if about['run'] else ''}; all: {_label(fixed, fixed)}"))
        Console(width=None if sys.stdout.isatty() else 160).print(shown)
    if briefly:
        return print(f"{printable(summary(table))}\n")
    for words, name in (("only in A", "only_in_a"), ("only in B", "only_in_b"), ("not compared", "kinds_differ")):
        for line in about[name][:5]:
            print(f"{words}: {printable(line)}")
        if len(about[name]) > 5:
            print(f"{words}: {len(about[name]) - 5} more (--json lists them)")
    for warning in about["warnings"]:
        print(f"! {printable(warning)}")
    print(_limits(about))
    print(printable(summary(table)))


def _limits(about: dict) -> str:
    """The line that says what the words mean here."""
    margin, beyond = (f"{100 * about[name]:.1f} %" for name in ("margin", "beyond"))
    resolution = "unknown" if about["resolution"] is None else f"{100 * about['resolution']:.1f} %"
    same = (f"the whole interval is within the margin of {margin}" if about["resolves_margin"] else
            f"never here, an A/A pair differs by more than the margin of {margin}")
    return f"SAME: {same}; FASTER, SLOWER: it is beyond {beyond}; AMBIGUOUS: neither; A/A resolution {resolution}"
