"""What the sources of bytes and of utilisation say of each other, in words. Nothing is claimed that no row holds."""
from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvlab.record.counters import EDGE, GROUPS, SOURCES, TOLERANCE, counted, group_of, reason_of, source_name, swept
from kvlab.record.reading import weakest
from kvlab.registry import case_from
from kvlab.studies._run import Finding
from kvlab.units import display

if TYPE_CHECKING:
    import pandas as pd

GPM_TO_NCU = 0.1                # |GPM bytes − ncu| that counts as agreement
CLAIM = 0.1                     # the article's: GPU compute utilisation can fall below 10 %


def findings(table: pd.DataFrame) -> list[Finding]:
    """Agreement source by source, repeated heads, utilisation, the cold label, GPM against ncu, and who was absent."""
    return [*_answer(table), *(one for source in SOURCES for one in _agreement(table, source)), *_sweep(table),
            *_gpm_to_ncu(table), *_repeated(table), *_utilisation(table), *_cold(table), *_absent(table)]


def verdict(low: float, high: float, tolerance: float) -> str:
    """agree: the whole interval within 1 ± tolerance; differ: the whole interval outside; else open."""
    if 1 - tolerance <= low and high <= 1 + tolerance:
        return "agree"
    return "differ" if high < 1 - tolerance or low > 1 + tolerance else "open"


def _ends(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with an interval each; a value without one is its own."""
    return rows.assign(low=rows["low"].fillna(rows["value"]), high=rows["high"].fillna(rows["value"]))


def _judged(table: pd.DataFrame, source: str) -> pd.DataFrame:
    """That source's ratios to the formula, with group, tolerance and verdict of each."""
    rows = _ends(counted(table, source, "traffic_to_model"))
    if source == "callgrind":
        sizes = swept(table).set_index("case_id")["cache_bytes"].to_dict()
        rows = rows.assign(cache_bytes=rows["case_id"].map(sizes).astype(float))
    if source == "gpm":                              # its κ comes from a copy and a read: there it agrees by making
        rows = rows[~rows["variant"].isin(["copy", "read"])]
    groups = rows["variant"].map(group_of)
    tolerances = groups.map(TOLERANCE)
    verdicts = [verdict(low, high, t) for low, high, t in zip(rows["low"], rows["high"], tolerances)]
    return rows.assign(group=groups, tolerance=tolerances, verdict=verdicts)


def _label(row) -> str:
    if not row["phase"]:
        return str(row["variant"])
    behind = row.get("cache_bytes")
    queries = f", q_len {row['q_len']}" if row["q_len"] > 1 else ""
    return (f"{row['variant']}, {row['phase']}, group ratio {row['group_ratio']}{queries}, kv_len {row['kv_len']}"
            + (f", behind {display(behind, 'B')}" if behind and behind == behind else ""))


def _answer(table) -> Iterator[Finding]:
    judged = {source: rows for source in SOURCES if len(rows := _judged(table, source))}
    if not judged:
        yield Finding("answer", "Do the sources agree? It cannot be told: no source of bytes gave a value here.", None,
                      "ratio", None, None, "missing")
        return
    rows = [row for one in judged.values() for row in zip(one["group"], one["verdict"])]
    groups = {group: [verdict for of, verdict in rows if of == group] for group in GROUPS}
    counts = {group: (found.count("agree"), len(found)) for group, found in groups.items() if found}
    said = ", ".join(f"{agree} of {n} of {group}" for group, (agree, n) in counts.items())
    named = ", ".join(f"{source} ({weakest(rows['kind'])})" for source, rows in judged.items())
    lonely = "" if len(judged) > 1 else "; no second source of bytes is there to contradict it"
    yield Finding("answer", f"Do the sources agree? {len(judged)} of {len(SOURCES)} sources counted bytes here: {named}"
                  f". Counts that agree with the variant's formula: {said}{lonely}.",
                  min(agree / n for agree, n in counts.values()), "ratio", None, None,
                  weakest(kind for rows in judged.values() for kind in rows["kind"]))


def _agreement(table, source) -> Iterator[Finding]:
    """Per group of cases the range of counted ÷ formula; below it each case that does not agree."""
    rows = _judged(table, source)
    for group in GROUPS:
        own = rows[rows["group"] == group]
        if own.empty:
            continue
        counts = {v: int((own["verdict"] == v).sum()) for v in ("agree", "differ", "open")}
        said = ", ".join(words for v, words in (("agree", f"{counts['agree']} agree"),
                                                ("differ", f"{counts['differ']} differ"),
                                                ("open", f"{counts['open']} cannot be told")) if counts[v])
        kind = weakest(own["kind"])
        name = f"agreement {source} {group}"
        yield Finding(name, f"{source} ÷ formula lies between {own['value'].min():.2f} and {own['value'].max():.2f} "
                      f"over {len(own)} case{'s' if len(own) > 1 else ''} of {group} ({kind}): within "
                      f"± {100 * TOLERANCE[group]:.0f} % {said}.", float(own["value"].median()), "ratio",
                      own["low"].min(), own["high"].max(), kind)
        for _, row in own[own["verdict"] != "agree"].sort_values("value", ascending=False).iterrows():
            told = "" if row["verdict"] == "differ" else ", which cannot be told from agreement"
            behind = row.get("cache_bytes")
            near = f" ({_step(row)})" if behind and behind == behind else ""
            yield Finding(f"{name}:{_label(row)}", f"{_label(row)}: {row['value']:.2f} × the formula "
                          f"[{row['low']:.2f}, {row['high']:.2f}]{told}{near}{_split(table, source, row)}.",
                          row["value"], "ratio", row["low"], row["high"], row["kind"])


def _split(table, source, row) -> str:
    """Bytes read and written of that case, where the source tells them apart: where the difference lies."""
    found = {}
    for metric in ("hbm_read_bytes", "hbm_write_bytes", "hbm_bytes"):
        own = counted(table, source, metric)
        own = own[own["case_id"] == row["case_id"]]
        if own.empty:
            return ""
        found[metric] = float(own["value"].iloc[0])
    return (f": {display(found['hbm_read_bytes'], 'B')} read, {display(found['hbm_write_bytes'], 'B')} written, the "
            f"formula says {display(found['hbm_bytes'] / row['value'], 'B')} in all")


def _sweep(table) -> Iterator[Finding]:
    """Each variant behind simulated caches of several sizes: where the formula holds, and where not, why."""
    rows = swept(table)
    for (variant, phase), own in rows.groupby(["variant", "phase"], sort=False):
        tolerance = TOLERANCE[group_of(variant)]
        off = own[(own["value"] - 1).abs() > tolerance]
        sizes = sorted(own["cache_bytes"].unique())
        said = "; ".join(
            f"{display(row['cache_bytes'], 'B')} at group ratio {row['group_ratio']}"
            + (f" and q_len {row['q_len']}" if row["q_len"] > 1 else "") + f": {row['value']:.2f} ×, {_step(row)}"
            for _, row in off.iterrows())
        ratios = ", ".join(str(n) for n in sorted(own["group_ratio"].unique()))
        yield Finding(f"sweep:{variant}, {phase}", f"{variant}, {phase}, behind simulated caches of "
                      f"{display(sizes[0], 'B')} to {display(sizes[-1], 'B')}, group ratios {ratios}: within "
                      f"± {100 * tolerance:.0f} % of its formula at {len(own) - len(off)} of {len(own)} "
                      f"({own['value'].min():.2f} to {own['value'].max():.2f} ×){'; ' + said if said else ''}.",
                      (len(own) - len(off)) / len(own), "ratio", None, None, weakest(own["kind"]))


def _step(row) -> str:
    """Whether the trial's formula takes a step within EDGE × of the simulated cache."""
    trial = case_from("kvlab.attention:Trial", json.loads(row["case"]))
    cost = trial.variant.load().cost
    smaller, larger = (cost(trial, int(row["cache_bytes"] * by))[:2] for by in (1 / EDGE, EDGE))
    return f"{'no' if smaller == larger else 'a'} working set lies within {EDGE:g} × of the cache"


def _gpm_to_ncu(table) -> Iterator[Finding]:
    """GPM's bytes over ncu's, case by case: two counters of the same memory."""
    gpm, ncu = (_ends(counted(table, source, "hbm_bytes")).drop_duplicates("case_id").set_index("case_id")
                for source in ("gpm", "ncu"))
    both = [case for case in gpm.index if case in ncu.index]
    if not both:
        return
    gpm, ncu = gpm.loc[both], ncu.loc[both]
    ratio, low, high = gpm["value"] / ncu["value"], gpm["low"] / ncu["high"], gpm["high"] / ncu["low"]
    verdicts = [verdict(a, b, GPM_TO_NCU) for a, b in zip(low, high)]
    yield Finding("gpm_to_ncu", f"GPM ÷ ncu lies between {ratio.min():.2f} and {ratio.max():.2f} over {len(both)} "
                  f"case{'s' if len(both) > 1 else ''}: within ± {100 * GPM_TO_NCU:.0f} % {verdicts.count('agree')} "
                  f"agree, {verdicts.count('differ')} differ, {verdicts.count('open')} cannot be told.",
                  float(ratio.median()), "ratio", low.min(), high.max(), weakest([*gpm["kind"], *ncu["kind"]]))
    for case, one, of in zip(both, ratio, verdicts):
        if of == "differ":
            yield Finding(f"gpm_to_ncu:{_label(gpm.loc[case])}", f"{_label(gpm.loc[case])}: GPM is {one:.2f} × ncu.",
                          float(one), "ratio", float(low[case]), float(high[case]), "measured")


def _repeated(table) -> Iterator[Finding]:
    """How many times repeated heads read what was needed, against the group ratio that they repeat by."""
    found = []
    for source in SOURCES:
        rows = _ends(counted(table, source, "read_amplification"))
        for _, row in rows[rows["variant"] == "naive_repeat"].sort_values("group_ratio").iterrows():
            plain = rows[(rows["comparison_id"] == row["comparison_id"]) & (rows["variant"] == "naive")]
            beside = "" if plain.empty else f"; naive beside it {plain['value'].iloc[0]:.2f} ×"
            found.append(Finding(
                f"repeated:{source}:ratio{row['group_ratio']}",
                f"At group ratio {row['group_ratio']} naive_repeat reads {row['value']:.2f} × what is needed at the "
                f"least, {row['value'] / row['group_ratio']:.2f} × its group ratio{beside} ({source}, {row['kind']}).",
                row["value"], "ratio", row["low"], row["high"], row["kind"]))
    yield from found or [Finding("repeated", "What repeated heads really read is not known here: no source gave the "
                                 "reads of naive_repeat.", None, "ratio", None, None, "missing")]


def _utilisation(table) -> Iterator[Finding]:
    """How busy the SMs are beside how much of the matmul ceiling useful flops reach: the article's claim in both."""
    flops = _ends(counted(table, "roofline", "flops_share"))
    # the ceiling is torch's matrix product: for a kernel of plain C it says nothing
    flops = flops[(flops["phase"] == "decode") & (flops["variant"].map(group_of) != "C kernels")]
    flops = flops.drop_duplicates("case_id").set_index("case_id")
    if flops.empty:
        return
    below = int((flops["high"] < CLAIM).sum())
    said = (f"The article's “compute utilisation can fall below 10 %”: useful flops are "
            f"{100 * flops['value'].min():.1f} to {100 * flops['value'].max():.1f} % of the matmul ceiling over "
            f"{len(flops)} decode cases of torch variants, below 10 % in {below} of them (modelled, from measured time)"
            + ("" if flops["device"].str.startswith("cuda").any() else " on this CPU; the claim is about GPUs"))
    ends = (float(flops["value"].median()), "ratio", flops["low"].min(), flops["high"].max())
    for source in ("gpm", "ncu"):
        busy = counted(table, source, "sm_utilization").drop_duplicates("case_id").set_index("case_id")
        busy = busy[busy.index.isin(flops.index)]
        if busy.empty:
            continue
        yield Finding("utilisation", f"{said}. SMs had work for {100 * busy['value'].min():.0f} to "
                      f"{100 * busy['value'].max():.0f} % of the time ({source}, {weakest(busy['kind'])}): two "
                      "numbers, one word.", *ends, "modelled")
        for case, row in busy.iterrows():
            share = flops.loc[case]
            yield Finding(f"utilisation:{_label(row)}", f"{_label(row)}: SMs busy {100 * row['value']:.0f} %, useful "
                          f"flops {100 * share['value']:.1f} % of the matmul ceiling.", share["value"], "ratio",
                          share["low"], share["high"], "modelled")
        return
    why = "; ".join(f"{source}: {reason}" for source in ("gpm", "ncu")
                    if (reason := reason_of(table, source, "sm_utilization")))
    yield Finding("utilisation", f"{said}. SM utilisation is missing{f' ({why})' if why else ''}, so whether busy SMs "
                  "hide it cannot be told here.", *ends, "modelled")


def _cold(table) -> Iterator[Finding]:
    """Whether somebody counted that the timer's calls found nothing of their inputs in the cache."""
    times = table[(table["metric"] == "latency_s") & (table["kind"] == "measured")].drop_duplicates("case_id")
    if times.empty:
        return
    shares = _ends(table[(table["metric"] == "cold_share") & (table["kind"] == "measured")])
    counts = times["case_id"].isin(shares["case_id"])
    claimed = times["cache_state"].str.startswith("cold (verified")
    warm = int(times["cache_state"].str.startswith("warm").sum())
    said = (f"Cold inputs: of {len(times)} times {int((claimed & counts).sum())} are verified by a count of reads, "
            f"{len(times) - warm - int((claimed & counts).sum())} are not{f', {warm} are warm' if warm else ''}")
    if bare := int((claimed & ~counts).sum()):
        said += f" ({bare} of them say that they are, and no row holds the count)"
    if shares.empty:
        why = reason_of(table, "ncu", "cold_share") or "no source was asked"
        yield Finding("cold", f"{said}. The label is unverified here: {why}.", None, "ratio", None, None, "missing")
        return
    yield Finding("cold", f"{said}. {', '.join(dict.fromkeys(shares['source'].map(source_name)))} read "
                  f"{shares['value'].min():.2f} to {shares['value'].max():.2f} × the ideal, called as the timer calls "
                  f"({shares['case_id'].nunique()} trials).", float(shares["value"].median()), "ratio",
                  shares["low"].min(), shares["high"].max(), "measured")


def _absent(table) -> Iterator[Finding]:
    """Sources that were asked and gave no bytes at all."""
    for source in SOURCES:
        if counted(table, source, "hbm_bytes").empty and (why := reason_of(table, source, "hbm_bytes")):
            yield Finding(f"absent:{source}", f"{source} gave no bytes on this machine: {why}.", None, "B", None, None,
                          "missing")
