"""What a run of batching says, in words: each claim beside the number that bears on it, and what it costs elsewhere."""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvlab.record.asked import asked
from kvlab.studies._run import Finding
from kvlab.studies._serving import value_of

if TYPE_CHECKING:
    import pandas as pd

ONSET = 0.05                    # preemptions per finished request from which memory is said to be too small
FLAT = 0.02                     # a change of throughput below this is none


def findings(table: pd.DataFrame) -> list[Finding]:
    """Static batches, policies, the token budget, max_num_seqs, what relieves memory."""
    found = [*_static(asked(table, "static")), *_policies(asked(table, "policy")), *_budget(asked(table, "budget")),
             *_seqs(asked(table, "max_num_seqs")), *_levers(asked(table, "lever"))]
    return found or [Finding("none", "no finding: the run holds no reading of this study", None, "ratio", None, None,
                             "missing")]


def _finding(name: str, sentence: str, row: pd.Series) -> Finding:
    low, high = (None if row[end] != row[end] else float(row[end]) for end in ("low", "high"))
    return Finding(name, sentence, float(row["value"]), row["unit"], low, high, row["kind"])


def times(row: pd.Series, digits: int = 2) -> str:
    """A ratio with its interval, as text."""
    text = f"{row['value']:.{digits}f} ×"
    return text if row["low"] != row["low"] else f"{text} [{row['low']:.{digits}f}, {row['high']:.{digits}f}]"


def _static(rows) -> Iterator[Finding]:
    rates = sorted(rows["x"].dropna().unique())
    if not rates:
        return
    calm, flooded = (rows[rows["x"] == rate] for rate in (rates[0], rates[-1]))
    rate = value_of(flooded, "tokens_per_s_ratio", "continuous")
    ttft = value_of(calm, "ttft_mean_s_ratio", "continuous")
    if rate is None or ttft is None:
        return
    verdict = "supported" if rate["low"] > 1 else "not supported" if rate["high"] < 1 else "inconclusive"
    yield _finding("static", f"Continuous batching gives {times(rate)} the tokens per second of static batches where "
                   f"requests queue ({rates[-1]:g} × what the engine serves; {verdict}), and {times(ttft)} their mean "
                   f"time to first token where they hardly do ({rates[0]:g} ×).", rate)


def _policies(rows) -> Iterator[Finding]:
    for label in rows["label"].unique():
        mean, tail, rate = (value_of(rows, f"{metric}_ratio", label)
                            for metric in ("ttft_mean_s", "ttft_p99_s", "tokens_per_s"))
        preempted = value_of(rows, "preemption_ratio", label)
        if label == "fcfs" or mean is None or tail is None or rate is None or preempted is None:
            continue
        long = value_of(rows, "ttft_long_mean_s_ratio", label)
        others = "" if long is None else f", of prompts from 512 tokens on {times(long)}"
        name = label[0].upper() + label[1:]
        yield _finding(f"policy: {label}", f"{name}, against fcfs: mean TTFT {times(mean)}{others}, "
                       f"p99 {times(tail)}, tokens/s {times(rate)}: {moved('the mean', mean)}, "
                       f"{moved('the tail', tail)}; {preempted['value']:.2f} preemptions per request.", mean)


def moved(what: str, row: pd.Series) -> str:
    """Which way a ratio to a baseline went, by its whole interval."""
    way = "falls" if row["high"] < 1 else "rises" if row["low"] > 1 else "cannot be told from the baseline's"
    return f"{what} {way}"


def _budget(rows) -> Iterator[Finding]:
    sizes = sorted(rows["x"].dropna().unique())
    if len(sizes) < 2:
        return
    small, large = (rows[rows["x"] == size] for size in (sizes[0], sizes[-1]))
    gap, rate, first = (value_of(large, f"{metric}_ratio") for metric in ("itl_p99_s", "tokens_per_s", "ttft_mean_s"))
    own = value_of(small, "itl_p99_s"), value_of(large, "itl_p99_s")
    if any(row is None for row in (gap, rate, first, *own)):
        return
    before, after = (row["value"] * 1e3 for row in own)
    yield _finding("budget", f"A token budget of {sizes[-1]:,.0f} instead of {sizes[0]:,.0f}: the p99 gap between two "
                   f"tokens goes from {before:.0f} to {after:.0f} ms ({times(gap)}), tokens/s {times(rate)}, mean TTFT "
                   f"{times(first)}.", gap)


def _seqs(rows) -> Iterator[Finding]:
    sweep = rows[rows["metric"] == "tokens_per_s"].dropna(subset=["x"]).sort_values("x")
    eighty, full = (value_of(rows[rows["x"] == share], "tokens_per_s_ratio") for share in (0.8, 1.0))
    ratio = rows[(rows["metric"] == "preemption_ratio") & (rows["kind"] != "missing")].sort_values("x")
    if sweep.empty or ratio.empty:
        return
    preempting = ratio[ratio["value"] > ONSET]
    onset = f"begin at {preempting['x'].iloc[0]:.0%}" if len(preempting) else "do not begin up to the largest"
    best = sweep.loc[sweep["value"].idxmax()]
    yield _finding("max_num_seqs", f"Over max_num_seqs, as a share of the requests that the blocks bear at full "
                   f"length, preemptions (more than {ONSET:.0%} of requests) {onset}, and tokens/s are highest at "
                   f"{best['x']:.0%}.", best)
    if eighty is not None and full is not None:
        lost = (f"costs more than {FLAT:.0%} of the throughput" if eighty["high"] < 1 - FLAT else
                f"costs less than {FLAT:.0%} of the throughput" if eighty["low"] > 1 - FLAT else
                f"may cost {FLAT:.0%} of the throughput or not (inconclusive)")
        yield _finding("max_num_seqs at 80 %", f"The rule of 80 % {lost} here: {times(eighty, 3)} the tokens/s of "
                       "100 %.", eighty)


def _levers(rows) -> Iterator[Finding]:
    base = value_of(rows, "preemption_ratio", "as it is")
    if base is None:
        return
    for label in rows["label"].unique():
        if label == "as it is":
            continue
        ratio, rate, tail, cut = (value_of(rows, metric, label) for metric in (
            "preemption_ratio", "tokens_per_s_ratio", "e2e_p99_s_ratio", "cut_share"))
        if any(row is None for row in (ratio, rate, tail, cut)):
            continue
        refused = value_of(rows, "rejected_share", label)
        price = [f"{cut['value']:.1%} of answers cut short"] if cut["value"] else []
        price += [f"{refused['value']:.1%} of requests refused"] if refused is not None and refused["value"] else []
        yield _finding(f"lever: {label}", f"{label[0].upper()}{label[1:]}: preemptions per request from "
                       f"{base['value']:.2f} to {ratio['value']:.2f}, tokens/s {times(rate)}, p99 end to end "
                       f"{times(tail)}{', at the price of ' + ' and '.join(price) if price else ''}.", ratio)
