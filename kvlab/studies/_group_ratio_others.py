"""What a run of group_ratio says beside recall: conversion damage, time and bytes by ratio, and what was lost."""
from __future__ import annotations

from kvlab.record.statistics import aa_resolution
from kvlab.studies._run import Finding
from kvlab.units import display


def none(name: str, sentence: str) -> Finding:
    """A question that this run cannot answer, and why."""
    return Finding(name, sentence, None, "ratio", None, None, "missing")


def conversions(table) -> list[Finding]:
    rows = table[table["data"].str.startswith("conversion:")]
    found = []
    for _, kl in rows[rows["metric"] == "kl"].iterrows():
        what = kl["data"].removeprefix("conversion:")
        if kl["kind"] == "missing":
            continue                                                 # lost() says so, once
        top = rows[(rows["case_id"] == kl["case_id"]) & (rows["metric"] == "top1_agreement")]["value"].iloc[0]
        label = ("Exact expansion (a correctness test)" if what == "expand" else f"Conversion damage, {what}")
        found.append(Finding(
            f"conversion:{what}", f"{label}: {kl['model']} at ratio {kl['group_ratio']}, KL {kl['value']:.3g} nat "
            f"[{kl['low']:.3g}, {kl['high']:.3g}] to the model as it was, top-1 agreement {100 * top:.1f} % "
            f"(n = {kl['n']} tokens)." + ("" if what == "expand" else " It says nothing of a model trained so."),
            kl["value"], "nat", kl["low"], kl["high"], kl["kind"]))
    return [*found, *_steps(rows)]


def _steps(rows) -> list[Finding]:
    """A whole decode step of the model as it was against its exact expansion, on real text."""
    steps = rows[(rows["metric"] == "decode_step_s") & (rows["kind"] == "measured")].sort_values("group_ratio")
    if len(steps) != 2:
        return []
    few, many = steps.iloc[1], steps.iloc[0]            # KV heads
    size = rows[rows["metric"] == "kv_bytes_per_token"].groupby("group_ratio")["value"].first()
    ratio, low, high = (many["value"] / few["value"], many["low"] / few["high"], many["high"] / few["low"])
    return [Finding(
        "decode_step", f"The same function on real text, {few['model']}: a whole decode step at ratio "
        f"{many['group_ratio']} takes {ratio:.3f} × [{low:.3f}, {high:.3f}] the time of ratio {few['group_ratio']} and "
        f"its cache {size[many['group_ratio']] / size[few['group_ratio']]:.0f} × the bytes, with the same tokens "
        f"({few['n']} steps each).", ratio, "ratio", low, high, "measured")]


def kernels(table) -> list[Finding]:
    rows = table[(table["phase"] == "decode") & (table["replica"].fillna(0) == 0) & (table["kind"] != "missing")]
    times = rows[rows["metric"] == "latency_s"]
    ideal = rows[rows["metric"] == "ideal_bytes"].set_index("case_id")["value"]
    found = []
    for (variant, q_heads, head_dim), group in times.groupby(["variant", "num_q_heads", "head_dim"]):
        group = group.sort_values("group_ratio")
        a, b = group.iloc[0], group.iloc[-1]
        if a["group_ratio"] == b["group_ratio"]:
            continue
        value, low, high = b["value"] / a["value"], b["low"] / a["high"], b["high"] / a["low"]
        moved = ideal[b["case_id"]] / ideal[a["case_id"]]
        found.append(Finding(
            f"kernel:{variant}:q{q_heads}:head_dim{head_dim}",
            f"Decode with {q_heads} query heads, head_dim {head_dim}: "
            f"ratio {b['group_ratio']} takes {value:.3f} × [{low:.3f}, {high:.3f}] the time of ratio "
            f"{a['group_ratio']} ({display(b['value'], 's')} against {display(a['value'], 's')}) and {moved:.3f} × the "
            f"ideal bytes ({variant}, kv_len {b['kv_len']:,}, n = {b['n']} and {a['n']}).", value, "ratio", low, high,
            "measured"))
    return found


def resolution(table) -> list[Finding]:
    pair = aa_resolution(table)
    if pair is None:
        return []
    return [Finding("resolution", "Resolution of times: the same trial measured twice differs by a factor {:.3f} "
                    "[{:.3f}, {:.3f}]; smaller differences mean nothing.".format(*pair), pair[0], "ratio", *pair[1:],
                    "measured")]


def lost(table) -> list[Finding]:
    """What was to be measured and could not be, once per reason and kind of case."""
    rows = table[table["metric"].isin(["recall", "kl", "latency_s", "case"]) & (table["kind"] == "missing")]
    decode = ("decode attention (" + rows["variant"].astype(str) + ")").where(rows["phase"] == "decode")
    rows = rows.assign(what=decode.fillna(rows["data"].where(rows["data"] != "", "a case")))
    found = []
    for i, ((metric, note, what), group) in enumerate(rows.groupby(["metric", "note", "what"])):
        count = f"{len(group)} case" + ("s" if len(group) > 1 else "")
        result = "result" if metric == "case" else metric
        found.append(none(f"lost:{i}", f"{count} of {what} gave no {result}: {note}."))
    return found
