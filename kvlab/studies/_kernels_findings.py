"""What a run of kernels says, in words: the verdict first, then each question. Nothing is claimed that no row holds."""
from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvlab.record.reading import KINDS
from kvlab.record.statistics import fit
from kvlab.studies._kernels_groups import (
    by_case,
    factor,
    grouped,
    is_library,
    layout_of,
    named,
    percent,
    shape_of,
    untold,
)
from kvlab.studies._run import Finding
from kvlab.units import display

if TYPE_CHECKING:
    import pandas as pd

AT_ROOF = {"cpu": 0.75, "cuda": 0.85}       # share of its nearer ceiling from which a kernel is said to be at its roof
FOR_BYTES = 0.9                 # share of the bytes saved from which the time saved is said to follow them


def findings(table: pd.DataFrame) -> list[Finding]:
    """Verdict, each shape, pages, order, formats, memory, flops, threads, the article's numbers, what is missing."""
    ok = table[(table["status"] == "ok") & (table["kind"] != "missing")]
    first = ok[ok["replica"].fillna(0) == 0]
    groups = grouped(first, table)
    layouts, formats = (groups.get(("decode", question), []) for question in ("layout", "format"))
    found = [*_verdict(groups), *_shapes(groups), *_pages(ok, layouts), *_order(layouts), *_formats(formats),
             *_memory(first), *_flops(groups), *_threads(groups), *_article(table)]
    found = found or [Finding("none", "no finding: the run holds no successful reading of this study", None, "ratio",
                              None, None, "missing")]
    return [*found, *_absent(table)]


SHARE = {"decode": ("bandwidth_share", "read"), "prefill": ("flops_share", "matmul")}


def _sides(rows, phase):
    """(the fastest variant of kvlab's own, the fastest library) of a comparison, as rows of their share; None: none."""
    shares, times = by_case(rows, SHARE[phase][0]), by_case(rows, "latency_s")["value"]
    shares = shares[shares.index.isin(times.index)]
    shares = shares.loc[times[times.index.isin(shares.index)].sort_values().index]
    libraries = shares["variant"].map(is_library)
    mine, theirs = (shares[libraries == library] for library in (False, True))
    return tuple(None if side.empty else side.iloc[0] for side in (mine, theirs))


def _all_cores(groups, phase):
    """The comparisons of variants, without those that repeat a shape on fewer threads."""
    every = groups.get((phase, "variant"), [])
    most = max((int(group["threads"].max()) for group in every), default=1)
    return [group for group in every if int(group["threads"].max()) == most]


def _verdict(groups) -> Iterator[Finding]:
    best, libraries = [], []
    for group in _all_cores(groups, "decode"):
        mine, theirs = _sides(group, "decode")
        best += [_of_roof(group, mine)] if mine is not None else []
        libraries += [_of_roof(group, theirs)] if theirs is not None else []
    if not best:
        return
    worst, need = min(best, key=lambda row: row["value"]), AT_ROOF[best[0]["device"].partition(":")[0]]
    reached = sum(row["low"] >= need for row in best)
    verdict = "Yes" if reached == len(best) else "No" if not reached else f"In {reached} of {len(best)} shapes"
    beside = "" if not libraries else f", the fastest libraries at {_span(libraries)}"
    said = (f"Do kernels reach their roof? {verdict}: the fastest of each decode shape that is no library's is at "
            f"{_span(best)} of the nearer ceiling, of reads or of products{beside}. At the roof means "
            f"{100 * need:.0f} % and more.")
    if any(row["low"] > 1 for row in best):
        said += " Above 100 %: the ceiling is torch's fastest reduction, and a kernel that prefetches may read faster."
    yield Finding("verdict", said, worst["value"], "ratio", worst["low"], worst["high"], "modelled")


def _of_roof(group, row):
    """The row of its share of the read ceiling, or of the matmul ceiling where that is the nearer limit."""
    flops = by_case(group, "flops_share")
    return flops.loc[row.name] if _nearer(group, row) else row


def _span(rows) -> str:
    low, high = (100 * end(row["value"] for row in rows) for end in (min, max))
    return f"{low:.0f} %" if f"{low:.0f}" == f"{high:.0f}" else f"{low:.0f} to {high:.0f} %"


def _shapes(groups) -> Iterator[Finding]:
    """Of each shape the best share of the ceiling, and kvlab's fastest against the fastest library."""
    for phase, (_, ceiling) in SHARE.items():
        for group in _all_cores(groups, phase):
            mine, theirs = _sides(group, phase)
            if mine is None and theirs is None:
                continue
            best = max((side for side in (mine, theirs) if side is not None), key=lambda row: row["value"])
            said = f"{phase}, {shape_of(best)}: {named(best)} is fastest at {percent(best)} of the {ceiling} ceiling"
            said += _nearer(group, best) if phase == "decode" else ""
            if mine is not None and theirs is not None:
                other = theirs if best is mine else mine
                said += f"; {named(other)} reaches {percent(other)}"
                if mine.name in (ratios := by_case(group, "to_peer")).index:
                    ratio = ratios.loc[mine.name]
                    said += f". {named(mine)} takes {factor(ratio)} the time of {theirs['variant']}{untold(ratio)}"
            yield Finding(f"share:{phase}:{best['num_q_heads']}/{best['num_kv_heads']}:{best['kv_len']}:"
                          f"{best['dtype']}", said + ".", best["value"], "ratio", best["low"], best["high"],
                          "modelled")


def _nearer(group, best) -> str:
    """Where arithmetic is the nearer limit (MQA on a CPU), its share; torch's bf16 product on some CPUs is no limit."""
    share = group[(group["metric"] == "flops_share") & (group["case_id"] == best.name)]["value"].max()
    return f" and {100 * share:.0f} % of the matmul ceiling, the nearer limit" if best["value"] < share <= 1 else ""


def _pages(ok, groups) -> Iterator[Finding]:
    for group in groups:
        ratios = by_case(group, "to_contiguous")
        if ratios.empty:                                # a GPU's kernel that gave no time
            continue
        ratios = ratios[[layout_of(row)["order"] == "head" for _, row in ratios.iterrows()]]
        for variant, own in ratios.groupby("variant", sort=False):
            shuffled = own[own["page_order"] == "random"].set_index("block_size")
            if 16 not in shuffled.index:
                continue
            main = shuffled.loc[16]
            same = _twice(ok[ok["comparison_id"] == group["comparison_id"].iloc[0]])
            within = max(same, 1 / same) if same else 1.0
            verdict = ("Yes" if main["low"] > within else "No, they save it" if main["high"] < 1 / within else
                       "No effect found")
            others = ", ".join(f"{row['value']:.2f} × at {size}" for size, row in shuffled.sort_index().iterrows()
                               if size != 16)
            line = own[(own["page_order"] == "in_order") & (own["block_size"] == 16)]
            said = (f"Do pages cost time? {verdict}. {variant} takes {factor(main)} the time of a contiguous cache in "
                    "blocks of 16 in random order") + (f", {line['value'].iloc[0]:.2f} × in order" if len(line) else "")
            said += f"; in random blocks {others}" if others else ""
            said += f". The same trial twice differs by {within:.3f} ×" if same else ""
            yield Finding(f"pages:{variant}", said + ".", main["value"], "ratio", main["low"], main["high"],
                          "measured")


def _twice(rows) -> float | None:
    """Time of a trial's second measurement over its first, where the comparison holds an A/A pair."""
    times = {row["case"]: row for _, row in rows[rows["metric"] == "latency_s"].iterrows()}
    for row in times.values():
        if row["replica"] == 1:
            first = times.get(json.dumps({**json.loads(row["case"]), "replica": 0}, sort_keys=True))
            return None if first is None else row["value"] / first["value"]
    return None


def _order(groups) -> Iterator[Finding]:
    for group in groups:
        for _, row in by_case(group, "to_head_order").iterrows():
            yield Finding(f"order:{row['variant']}", f"Token order takes {factor(row)} the time of head order "
                          f"({named(row)}){untold(row)}.", row["value"], "ratio", row["low"], row["high"], "measured")


def _formats(groups) -> Iterator[Finding]:
    """Time saved beside bytes saved at the longest context, and the best format over contexts."""
    for variant in dict.fromkeys(v for group in groups for v in by_case(group, "format_speedup")["variant"]):
        own = {int(group["kv_len"].iloc[0]): group[group["variant"] == variant] for group in groups}
        speedups = {n: by_case(rows, "format_speedup").set_index("kv_format") for n, rows in sorted(own.items())}
        speedups = {n: found for n, found in speedups.items() if len(found)}
        longest = max(speedups)
        faster, fewer = speedups[longest], by_case(own[longest], "format_bytes_ratio").set_index("kv_format")
        faster = faster[faster.index.isin(fewer.index)].sort_values("value", ascending=False)
        if faster.empty:
            continue
        every = list(faster.iterrows())
        follows = all(row["value"] >= FOR_BYTES * fewer.loc[one, "value"] for one, row in every)
        slower = [one for one, row in every if row["high"] < 1]
        verdict = "Yes" if follows else "No" if len(slower) == len(every) else "Not in full"
        said = ", ".join(f"{one} {factor(row)} ({fewer.loc[one, 'value']:.2f} ×)" for one, row in every)
        torchs = [one for one, row in every if row["format_path"] == "decoded"]
        decoded = ("" if not torchs else " All are decoded by torch first." if len(torchs) == len(every) else
                   f" Decoded by torch first: {', '.join(torchs)}.")
        lost = f" Slower: {', '.join(slower)}." if slower else ""
        best = faster.iloc[0]
        course = [(n, found.loc[best.name, "value"]) for n, found in speedups.items() if best.name in found.index]
        over = "" if len(course) < 2 else (f" {best.name} by context: {course[0][1]:.2f} × at {course[0][0]:,}, "
                                           f"{course[-1][1]:.2f} × at {course[-1][0]:,}.")
        yield Finding(f"formats:{variant}", f"Do fewer bytes save as much time? {verdict}. Speed-up of {variant} over "
                      f"{best['dtype']} at {longest:,} tokens (bytes saved): {said}.{lost}{decoded}{over}",
                      best["value"], "ratio", best["low"], best["high"], "measured")


def _memory(rows) -> Iterator[Finding]:
    """Exponents of the bytes of a call beyond its inputs over the prompt's length, all variants in one sentence."""
    extra, fitted = by_case(rows[rows["phase"] == "prefill"], "peak_extra_bytes"), {}
    extra = extra[extra["value"] > 0]
    for variant, points in extra.groupby("variant", sort=False):
        if len(points := points.sort_values("kv_len")) >= 3:
            fitted[variant] = fit(points["kv_len"], points["value"], points["low"].clip(lower=1), points["high"],
                                  power=True)
    if not fitted:
        return
    said = ", ".join(f"n^{slope:.2f} [{low:.2f}, {high:.2f}] for {variant}"
                     for variant, (slope, low, high) in fitted.items())
    first = fitted.get("naive", next(iter(fitted.values())))
    yield Finding("memory", f"Memory beyond the inputs grows as {said}, to {int(extra['kv_len'].max()):,} tokens.",
                  first[0], "ratio", first[1], first[2], "measured")


def _flops(groups) -> Iterator[Finding]:
    """Whether what flash saves is work or bytes: executed flops, bytes and time of naive over those of each other."""
    for group in groups.get(("prefill", "variant"), []):
        useful, executed, took = (by_case(group, m).set_index("variant") for m in
                                  ("useful_flops", "executed_flops", "latency_s"))
        moved = _bytes(group)
        if "naive" not in moved.index or useful["value"].nunique() != 1:
            continue
        for variant in (v for v in ("flash", "triton_flash", "sdpa", "flash_attn") if v in moved.index):
            per = useful["value"].iloc[0]
            fewer = moved.loc["naive", "value"] / moved.loc[variant, "value"]
            work = [executed.loc[v, "value"] / per for v in ("naive", variant)]
            verdict = ("saves bytes, not useful work" if fewer > 1.1 else "saves neither bytes nor useful work")
            time = ""
            if {"naive", variant} <= set(took.index):
                a, b = took.loc[variant], took.loc["naive"]
                time = f"; it takes {a['value'] / b['value']:.2f} × [{a['low'] / b['high']:.2f}, " \
                       f"{a['high'] / b['low']:.2f}] the time"
            yield Finding(
                f"flops:{variant}", f"{variant} {verdict}: {display(per, 'flop')} are useful in either, of which naive "
                f"executes {work[0]:.2f} × (the masked half too) and {variant} {work[1]:.2f} ×; naive moves "
                f"{fewer:.1f} × the bytes ({moved.loc[variant, 'kind']}){time}.", fewer, "ratio", None, None,
                max((moved.loc[v, "kind"] for v in ("naive", variant)), key=KINDS.index))
            break                                            # one tiled variant is enough: the others say the same


def _bytes(group):
    """Bytes moved by variant, counted ones before modelled ones."""
    rows = group[group["metric"] == "hbm_bytes"]
    rows = rows.assign(strength=rows["kind"].map(KINDS.index)).sort_values("strength", kind="stable")
    return rows.drop_duplicates("variant").set_index("variant")


def _threads(groups) -> Iterator[Finding]:
    """How much faster the fastest of kvlab's own is on all threads, where a shape was timed on fewer too."""
    by_shape: dict[str, list] = {}
    for group in groups.get(("decode", "variant"), []):
        by_shape.setdefault(shape_of(group.iloc[0]), []).append(group)
    for shape, pair in by_shape.items():
        if len(pair) != 2:
            continue
        few, many = sorted(pair, key=lambda group: group["threads"].max())
        slow, fast = (_fastest_of_each(group) for group in (few, many))
        both = [v for v in fast.index if v in slow.index]
        ours = [v for v in both if not is_library(v)] or both
        if not ours:
            continue
        said = [(v, slow.loc[v], fast.loc[v]) for v in dict.fromkeys([ours[0], *filter(is_library, both)][:2])]
        ratios = [(v, a["value"] / b["value"], a["low"] / b["high"], a["high"] / b["low"]) for v, a, b in said]
        one, value, low, high = ratios[0]
        rest = "".join(f", {v} {x:.2f} ×" for v, x, *_ in ratios[1:])
        n, m = (int(group["threads"].max()) for group in (few, many))
        yield Finding("threads", f"{shape}: {one} is {value:.2f} × [{low:.2f}, {high:.2f}] as fast on {m} threads as "
                      f"on {n}{rest}.", value, "ratio", low, high, "measured")


def _fastest_of_each(group):
    return by_case(group, "latency_s").sort_values("value").drop_duplicates("variant").set_index("variant")


def _article(table) -> Iterator[Finding]:
    """What is quoted beside what bytes allow: never one number, and at which batch the two meet."""
    rows = table[(table["metric"] == "step_speedup") & (table["kind"] != "missing")]
    quoted, modelled = (rows[rows["kind"] == kind] for kind in ("quoted", "modelled"))
    if quoted.empty or modelled.empty:
        return
    least, most = (f"{_gain(row)} (batch {row['batch_size']}, {row['kv_len']:,} tokens)" for row in
                   (modelled.loc[modelled["value"].idxmin()], modelled.loc[modelled["value"].idxmax()]))
    named = " and ".join(f"{_gain(row)} for {row['kv_format']}" for _, row in quoted.iterrows())
    meets = table[(table["metric"] == "batch_to_quoted") & (table["kind"] != "missing")].sort_values("kv_len")
    said = []
    for _, row in quoted.iterrows():
        own = meets[meets["kv_format"] == row["kv_format"]]
        ends = own.iloc[[0, -1]] if len(own) > 1 else own
        at = " and ".join(f"{end['value']:.0f} at {end['kv_len']:,} tokens" for _, end in ends.iterrows())
        said.append(f"{_gain(row)} takes a batch of {at}" if at else f"{_gain(row)} is met nowhere")
    yield Finding("article", f"The article's {named} (quoted) depend on batch × context: bytes alone let a step of "
                  f"{modelled['model'].iloc[0]} gain {least} to {most}; {', '.join(said)} (modelled).",
                  float(meets["value"].iloc[0]) if len(meets) else None, "count", None, None,
                  "modelled" if len(meets) else "missing")


def _gain(row) -> str:
    return f"{100 * (row['value'] - 1):+.{1 if row['kind'] == 'modelled' else 0}f} %"


def _absent(table) -> Iterator[Finding]:
    """Variants that gave no time at all, failures first, with the first reason of each."""
    rows = table[table["metric"].isin(["latency_s", "peak_extra_bytes"]) & (table["variant"] != "")]
    there = set(rows[rows["kind"] != "missing"]["variant"])
    gone = rows[~rows["variant"].isin(there)].sort_values("status").drop_duplicates("variant")
    if len(gone):
        why: dict[str, list] = {}
        for _, row in gone.iterrows():
            why.setdefault(f"{row['status']}: {row['note'].partition(';')[0].rstrip('.')}", []).append(row["variant"])
        said = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in why.items())
        yield Finding("absent", f"No time here of {said}.", None, "s", None, None, "missing")
    failed = rows[rows["status"].isin(["failed", "oom"]) & rows["variant"].isin(there)].drop_duplicates("case_id")
    for _, row in failed.iterrows():
        yield Finding(f"failed:{row['variant']}", f"{row['variant']} {row['status']} at {shape_of(row)}, "
                      f"{row['kv_format']}: {row['note'].rstrip('.')}.", None, "s", None, None, "missing")
