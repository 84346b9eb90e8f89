"""Both axes of a group ratio in one wide table: what a call takes, and what the cache remembers."""
from __future__ import annotations

import pandas as pd

from kvlab.accuracy.seeds import t_interval
from kvlab.record.reading import weakest
from kvlab.record.recall import main_cells, recall_rows, trained_length
from kvlab.record.wide import wide

KEY = ["num_q_heads", "group_ratio", "head_dim"]
KERNEL = ("latency_s", "ideal_bytes", "read_amplification")


def joined(table: pd.DataFrame, kv_len: int | None = None) -> pd.DataFrame:
    """One line per (num_q_heads, group_ratio, head_dim): time and bytes of a decode call beside recall and KL.

    latency_s, ideal_bytes, read_amplification: of the decode case (sdpa where it was measured), with kind, low, high,
    and the reason where missing. recall, nll: means over seeds at `kv_len` tokens (default: the longest trained), with
    t-interval, n seeds and kind. kl:<conversion>: conversion damage of a trained model. Absent where not tried.
    """
    lines = [part for part in (_kernel(table), _quality(table, kv_len), _damage(table)) if part is not None]
    if not lines:
        return pd.DataFrame(columns=KEY)
    whole = pd.concat(lines, axis=1).reset_index().sort_values(["num_q_heads", "head_dim", "group_ratio"],
                                                               ascending=[False, True, True])
    whole.insert(3, "num_kv_heads", whole["num_q_heads"] // whole["group_ratio"])
    return whole.reset_index(drop=True)


def _kernel(table):
    chosen = table[(table["phase"] == "decode") & (table["replica"].fillna(0) == 0) & (table["variant"] != "")
                   & table["metric"].isin(KERNEL)]
    if chosen.empty:
        return None
    variants = list(chosen["variant"].unique())
    chosen = chosen[chosen["variant"] == ("sdpa" if "sdpa" in variants else variants[0])]
    lines = wide(chosen, on=("case_id",)).drop_duplicates(KEY, keep="last").set_index(KEY)
    notes = chosen[(chosen["metric"] == "read_amplification") & (chosen["kind"] == "missing")]
    lines["read_amplification_note"] = lines["case_id"].map(notes.groupby("case_id")["note"].first())
    kept = [c for c in lines.columns if c.startswith(KERNEL)]
    return lines[["variant", "kv_len", *kept]].rename(columns={"kv_len": "decode_kv_len"})


def _quality(table, kv_len):
    rows = main_cells(recall_rows(table))
    if rows.empty:
        return None
    kv_len = trained_length(rows) if kv_len is None else kv_len
    if not (rows["kv_len"] == kv_len).any():
        raise ValueError(f"no recall was evaluated at kv_len {kv_len}; the run has "
                         f"{', '.join(map(str, sorted(rows['kv_len'].unique())))}")
    floats = table[table["metric"] == "kv_floats_per_token"].groupby("case_id")["value"].first()
    lines = {}
    for key, group in rows[rows["kv_len"] == kv_len].groupby(KEY):
        line = {"recall_kv_len": kv_len, "kv_floats_per_token": floats.get(group["case_id"].iloc[0])}
        for metric, values in group.groupby("metric", sort=False):
            mean = t_interval(values["value"])
            line |= {metric: mean.value, f"{metric}_kind": weakest(values["kind"]), f"{metric}_low": mean.low,
                     f"{metric}_high": mean.high, f"{metric}_n": mean.n}
        lines[key] = line
    return pd.DataFrame.from_dict(lines, orient="index").rename_axis(KEY)


def _damage(table):
    rows = table[table["data"].str.startswith("conversion:") & (table["metric"] == "kl") & (table["kind"] != "missing")]
    if rows.empty:
        return None
    rows = rows.assign(what="kl:" + rows["data"].str.removeprefix("conversion:"))
    return rows.pivot_table(index=KEY, columns="what", values="value", sort=False)
