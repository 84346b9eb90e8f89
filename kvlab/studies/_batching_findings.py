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
RISE = 0.05                     # a p99 that rises by less does not pay for the others
FLAT = 0.02                     # a change of throughput below this is none


def findings(table: pd.DataFrame) -> list[Finding]:
    """Static batches, policies, starvation, the token budget, max_num_seqs, what relieves memory, preempted answers."""
    found = []
    for question, says in (("static", _static), ("policy", _policies), ("starvation", _starvation),
                           ("budget", _budget), ("max_num_seqs", _seqs), ("lever", _levers), ("preempted", _preempted)):
        rows = asked(table, question)
        found += [] if rows.empty else says(rows)
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
    """First whether short-first lowers the mean and raises the tail, then each policy on each workload."""
    each, holds, fails, untold = [], [], [], []
    for (data, label), mine in rows.groupby(["data", "label"], sort=False):
        mean, tail, rate = (value_of(mine, f"{metric}_ratio") for metric in (
            "ttft_mean_s", "ttft_p99_s", "tokens_per_s"))
        preempted = value_of(mine, "preemption_ratio")
        if label == "fcfs" or any(row is None for row in (mean, tail, rate, preempted)):
            continue
        workload = data.removeprefix("workload:")
        if label in ("short first", "shortest prefill"):
            said = (holds if mean["high"] < 1 < tail["low"] else
                    fails if mean["low"] > 1 or tail["high"] < 1 + RISE else untold)
            said.append(f"{label} on {workload} (mean {times(mean)}, p99 {times(tail)})")
        long = value_of(mine, "ttft_long_mean_s_ratio")
        others = "" if long is None else f", of prompts from 512 tokens on {times(long)}"
        each.append(_finding(f"policy: {label} on {workload}", f"{label[0].upper()}{label[1:]}, against fcfs on "
                             f"{workload}: mean TTFT {times(mean)}{others}, p99 {times(tail)}, tokens/s {times(rate)}: "
                             f"{moved('the mean', mean)}, {moved('the tail', tail)}; {preempted['value']:.2f} "
                             "preemptions per request.", mean))
    if holds or fails or untold:
        verdict = ("conditional" if holds and fails else "supported" if holds else "not supported" if fails else
                   "inconclusive")
        share = len(holds) / (len(holds) + len(fails) + len(untold))
        places = [f"{what} for {'; '.join(some)}" for what, some in (
            ("it holds", holds), ("it does not hold", fails), ("it cannot be told", untold)) if some]
        yield Finding("short-first", "That to serve short requests first lowers the mean time to first token and "
                      f"raises its p99: {verdict}; {'. And '.join(places)}.", share, "ratio", None, None, "simulated")
    yield from each


def _starvation(rows) -> Iterator[Finding]:
    """How long the unluckiest long prompt waits while short ones keep coming, and whether aging bounds that."""
    by_label = {label: mine for label, mine in rows.groupby("label", sort=False)}
    worst, ratio = ({label: value_of(mine, metric) for label, mine in by_label.items()}
                    for metric in ("ttft_long_max_s", "ttft_long_max_s_ratio"))
    fair = worst.get("fcfs")
    for label in by_label:
        aged = next((other for other in by_label if other.startswith(f"{label}, aging")), None)
        if aged is None or any(one is None for one in (fair, worst[label], ratio[label], worst[aged], ratio[aged])):
            continue
        verdict = "it starves" if ratio[label]["low"] > 1 else "whether it starves cannot be told"
        if ratio[label]["low"] > 1:
            verdict += (", and aging shortens the wait" if ratio[aged]["high"] < 1 else
                        ", and aging is of no use" if ratio[aged]["low"] > 0.95 else
                        ", and whether aging helps cannot be told")
        yield _finding(f"starvation: {label}", f"Where short prompts keep coming faster than they are served, the "
                       f"longest wait for a first token of a long prompt is {fair['value']:.0f} s by fcfs and "
                       f"{worst[label]['value']:.0f} s by {label} ({times(ratio[label])}); with aging it is "
                       f"{worst[aged]['value']:.0f} s ({aged}: {times(ratio[aged])} of that without): {verdict}.",
                       ratio[label])


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
    yield _finding("max_num_seqs", f"Over max_num_seqs, as a share of the requests of mean length that the blocks "
                   f"bear, preemptions (more than {ONSET:.0%} of requests) {onset}, and tokens/s are highest at "
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


def _preempted(rows) -> Iterator[Finding]:
    same, complete, how_often = (value_of(rows, metric) for metric in (
        "same_answer_share", "complete_share", "preemptions"))
    if same is None or complete is None or how_often is None:
        return
    yield _finding("preempted answers", f"Measured on {same['model']}: {same['n']:.0f} requests in a pool too small "
                   f"for all of them (preemptions: {how_often['value']:.0f}); {complete['value']:.0%} of their answers "
                   f"are complete, and {same['value']:.0%} [{same['low']:.0%}, {same['high']:.0%}] the same, "
                   "token by token, as with room for all.", same)
