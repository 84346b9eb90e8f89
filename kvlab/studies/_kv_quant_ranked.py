"""What a table of kv_quant says beside the article's claims: top-1, bytes, time, context, layers and a mix of them."""
from __future__ import annotations

from kvlab.record.quality import TEXTS
from kvlab.studies._run import Finding
from kvlab.units import display

TOLD = ("fp8_e4m3", "fp8_e4m3/token", "int8/tensor", "int8/token", "kivi4/g32/r32", "int4/token/g32")


def agreement(same) -> list[Finding]:
    """Top-1 agreement with the fp32 cache of some formats."""
    rows = same[(same["metric"] == "top1_agreement") & same["kv_format"].isin(TOLD)]
    rows = rows.sort_values("value", ascending=False)
    if rows.empty:
        return []
    worst, best = rows.iloc[-1], rows.iloc[0]
    listed = ", ".join(f"{row['kv_format']} {100 * row['value']:.1f} [{100 * row['low']:.1f}, {100 * row['high']:.1f}]"
                       for _, row in rows.iterrows())
    return [Finding("top1", f"Top-1 agreement with the fp32 cache (%, {best['n']} tokens): {listed}.", worst["value"],
                    "ratio", worst["low"], worst["high"], "measured")]


def bytes_saved(same) -> list[Finding]:
    """Bytes of some formats, as a share of 16 bits."""
    size = same[same["metric"] == "kv_bytes_per_token"].drop_duplicates("kv_format").set_index("kv_format")
    chosen = [fmt for fmt in TOLD if fmt in size.index]
    if "bf16" not in size.index or not chosen:
        return []
    whole = size["value"]["bf16"]
    share = size["value"][chosen].sort_values() / whole
    listed = ", ".join(f"{fmt} {100 * part:.0f} %" for fmt, part in share.items())
    return [Finding("bytes", f"Bytes of the cache against 16 bits ({whole:,.0f} B per token), scales included, at "
                    f"{size['kv_len']['bf16']} tokens: {listed}.", float(share.iloc[0]), "ratio", None, None,
                    "modelled")]


def time(rows) -> list[Finding]:
    """Time of decode attention by format, per variant."""
    found, latency = [], rows[(rows["metric"] == "latency_s") & (rows["phase"] == "decode")
                              & (rows["replica"].fillna(0) == 0)]
    for variant, own in latency.groupby("variant", sort=False):
        own = own.drop_duplicates("kv_format").set_index("kv_format")
        chosen = [fmt for fmt in TOLD if fmt in own.index]
        if "fp32" not in own.index or not chosen:
            continue
        times = own["value"][chosen] / own["value"]["fp32"]
        listed = ", ".join(f"{fmt} {ratio:.2g} ×" for fmt, ratio in times.sort_values().items())
        decoded = set(own.loc[chosen, "format_path"]) == {"decoded"}
        why = "; the whole cache is decoded before each call, so this is no kernel that reads these formats" * decoded
        found.append(Finding(
            f"time:{variant}", f"Time of decode attention in {variant} at {own['kv_len']['fp32']} tokens, fp32 = "
            f"{display(own['value']['fp32'], 's')}: {listed}{why}.", float(times.min()), "ratio", None, None,
            "measured"))
    return found


def context(rows) -> list[Finding]:
    """KL at the first and the last positions of a long window."""
    kl = rows[(rows["metric"] == "kl") & rows["scope"].str.startswith("tokens ")]
    found = []
    for fmt, own in kl.groupby("kv_format", sort=False):
        own = own.sort_values("kv_len")
        if len(own) < 2:
            continue
        a, b = own.iloc[0], own.iloc[-1]
        grows = ("is larger far into the context" if b["low"] > a["high"] else "is smaller far into the context"
                 if b["high"] < a["low"] else "shows no change with the position that the intervals tell")
        at = [f"{row['value']:.2g} [{row['low']:.2g}, {row['high']:.2g}] at positions "
              f"{'–'.join(f'{int(end):,}' for end in row['scope'].removeprefix('tokens ').split(' … '))}"
              for row in (a, b)]
        found.append(Finding(
            f"context:{fmt}", f"The error of {fmt} {grows}: KL {at[0]}, {at[1]}; one text, so position and subject are "
            "not told apart.", b["value"] / a["value"], "ratio", b["low"] / a["high"], b["high"] / a["low"],
            "measured"))
    return found


def layers(rows) -> list[Finding]:
    """Shares of K and of the worst layer in the sum of KL of single layers."""
    kl = rows[(rows["metric"] == "kl") & rows["scope"].str.startswith("layer ")]
    found = []
    for fmt, own in kl.groupby("kv_format", sort=False):
        total, k = own["value"].sum(), own[own["scope"].str.endswith(" K")]["value"].sum()
        worst = own.sort_values("value").iloc[-1]
        found.append(Finding(
            f"sensitivity:{fmt}", f"With one layer's K or V at a time in {fmt}, K makes {100 * k / total:.0f} % of the "
            f"summed KL; the worst is {worst['scope']} with {100 * worst['value'] / total:.0f} % ({worst['n']} tokens "
            f"in windows of {worst['kv_len']}).", k / total, "ratio", None, None, "measured"))
    return found


def mix(rows) -> list[Finding]:
    """A mix of layers against the uniform format of the same bytes, paired token by token."""
    own = rows[rows["kv_format"].str.startswith("layers mixed")]
    whole = own[(own["scope"] == TEXTS) & (own["metric"] == "kl")]
    sensed = own[(own["scope"] == "sensed windows") & (own["metric"] == "kl")].set_index("kind")
    if whole.empty:
        return []
    row, beside, added = whole.iloc[0], "", ""
    paired = own[(own["metric"] == "kl_difference") & own["scope"].str.startswith("minus ")]
    if len(paired):
        d = paired.iloc[0]
        gain = ("a gain" if d["high"] < 0 else "a loss" if d["low"] > 0 else "no gain shown")
        beside = (f", {d['value']:+.2g} [{d['low']:+.2g}, {d['high']:+.2g}] against "
                  f"{d['scope'].removeprefix('minus ')} of the same bytes on the same {d['n']} tokens: {gain}")
    if {"measured", "modelled"} <= set(sensed.index):
        value, n = sensed["value"], sensed["n"]["measured"]
        added = (f" On the {n} tokens that chose it, the sum of single layers predicted {value['modelled']:.2g}, and "
                 f"{value['measured']:.2g} was measured.")
    return [Finding("mix", f"Layers in formats chosen by sensitivity on other tokens: KL {row['value']:.2g} "
                    f"[{row['low']:.2g}, {row['high']:.2g}]{beside}.{added}", row["value"], "nat", row["low"],
                    row["high"], "measured")]
