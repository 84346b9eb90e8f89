"""What a table of kv_quant says about the article's claims, in words: supported, refuted or inconclusive."""
from __future__ import annotations

from typing import TYPE_CHECKING

from kvlab.accuracy.statistics import Estimate, equivalence, inside
from kvlab.record.wide import wide
from kvlab.studies._run import Finding

if TYPE_CHECKING:
    import pandas as pd

FP8_MARGIN, INT8_RANGE = 0.001, (0.001, 0.003)      # of perplexity. Source: the article's claims
FP8, INT8, PER_TOKEN = "fp8_e4m3", "int8/tensor", "int8/token"
PREFERRED = (FP8, "fp8_e4m3/tensor", "fp8_e4m3/token"), (INT8, "int8/head", "int8/channel", PER_TOKEN)


def per_format(table: pd.DataFrame) -> pd.DataFrame:
    """One line per format (and variant of decode attention): bytes, time, error and quality side by side.

    The columns are those of kvlab.wide: latency_s, ideal_bytes, kernel_error, format_error of decode attention in the
    model's shape; kl, top1_agreement, perplexity_delta, … of the texts. What is said of single documents, positions
    and layers is left out.
    """
    texts = table[table["scope"] == "texts"]
    decode = table[(table["phase"] == "decode") & (table["variant"] != "") & (table["replica"].fillna(0) == 0)]
    both = table.loc[[*texts.index, *decode.index]]
    return wide(both, on=("run_id", "kv_format", "variant"))


def findings(table: pd.DataFrame) -> list[Finding]:
    """The article's three claims, what calibration changes, and where the error sits."""
    rows = table[(table["status"] == "ok") & (table["kind"] != "missing")]
    texts = rows[rows["scope"] == "texts"]
    found = [*_loss(texts, "fp8_below_0.1_%", PREFERRED[0], FP8_MARGIN),
             *_loss(texts, "int8_0.1_to_0.3_%", PREFERRED[1], INT8_RANGE), *_order(texts), *_calibration(texts),
             *_pareto(texts), *_context(rows), *_layers(rows), *_mix(rows)]
    if found:
        return found
    absent = table[(table["kind"] == "missing") & (table["source"] == "kv_quant")]
    why = f": {absent['note'].iloc[0]}" if len(absent) else ""
    return [Finding("none", f"no finding: the run holds no score of a text{why}", None, "ratio", None, None, "missing")]


def _of(rows: pd.DataFrame, metric: str, fmt: str, kind: str = "measured"):
    chosen = rows[(rows["metric"] == metric) & (rows["kv_format"] == fmt) & (rows["kind"] == kind)]
    return None if chosen.empty else chosen.iloc[0]


def _percent(row, digits: int = 2) -> str:
    return (f"{100 * row['value']:+.{digits}f} % [{100 * row['low']:+.{digits}f}, {100 * row['high']:+.{digits}f}]")


def _loss(texts, name: str, formats, claimed) -> list[Finding]:
    """The claimed loss against each format's: a margin (equivalence) or a range, both from the 90 % interval."""
    found = []
    for fmt in formats:
        row, kl = _of(texts, "perplexity_delta_90", fmt), _of(texts, "kl", fmt)
        if row is None or kl is None:
            continue
        interval = Estimate(row["value"], row["low"], row["high"], int(row["n"]))
        if isinstance(claimed, tuple):
            verdict, said = inside(interval, *claimed), f"{100 * claimed[0]:g} to {100 * claimed[1]:g} %"
        else:
            verdict, said = equivalence(interval, claimed), f"less than {100 * claimed:g} %"
        verdict = {"below": "supported", "inside": "supported", "inconclusive": "inconclusive"}.get(verdict, "refuted")
        needed = _of(texts, "tokens_needed", fmt, "modelled")
        more = "" if verdict != "inconclusive" or needed is None else (
            f"; about {needed['value']:,.0f} tokens would tell ±0.05 %")
        family = fmt.partition("_")[0].partition("/")[0].upper()
        found.append(Finding(
            f"{name}:{fmt}", f"“{family} KV loses {said}”: {verdict} for {fmt} on {row['model']}. Perplexity changes "
            f"by {_percent(row)} (90 %, {row['n']} tokens{more}); KL {kl['value']:.2g} nat.",
            row["value"], "ratio", row["low"], row["high"], "measured"))
    return found


def _order(texts) -> list[Finding]:
    found = []
    for fmt in PREFERRED[1]:
        kl, nll = _of(texts, "kl_difference", fmt), _of(texts, "nll_difference", fmt)
        if kl is None or nll is None:
            continue
        verdict = "supported" if kl["low"] > 0 else "refuted" if kl["high"] < 0 else "inconclusive"
        found.append(Finding(
            f"int8_worse_than_fp8:{fmt}", f"“INT8 is worse than FP8”: {verdict} for {fmt} against {FP8} by KL, which "
            f"differs by {kl['value']:+.2g} [{kl['low']:+.2g}, {kl['high']:+.2g}] nat on the same {kl['n']} tokens; "
            f"NLL by {nll['value']:+.2g} [{nll['low']:+.2g}, {nll['high']:+.2g}].", kl["value"], "nat", kl["low"],
            kl["high"], "measured"))
    return found


def _calibration(texts) -> list[Finding]:
    token, static = _of(texts, "kl", PER_TOKEN), _of(texts, "kl", INT8)
    guessed = next((_of(texts, "kl", fmt) for fmt in texts["kv_format"].unique() if ", guessed range" in fmt), None)
    if token is None or static is None or guessed is None:
        return []
    need = guessed["low"] > static["high"]
    free = token["high"] < static["low"]
    verdict = ("supported for static scales only" if need and free else "supported" if need else
               "refuted" if guessed["high"] < static["low"] else "inconclusive")
    return [Finding(
        "int8_needs_calibration", f"“INT8 needs a calibration set”: {verdict}. KL {guessed['value']:.2g} with a "
        f"guessed range, {static['value']:.2g} calibrated, {token['value']:.2g} with a scale per token, which needs no "
        "calibration.", guessed["value"] / static["value"], "ratio", guessed["low"] / static["high"],
        guessed["high"] / static["low"], "measured")]


def _pareto(texts) -> list[Finding]:
    kl = texts[(texts["metric"] == "kl") & (texts["kind"] == "measured")].set_index("kv_format")["value"]
    size = texts[texts["metric"] == "kv_bytes_per_token"].drop_duplicates("kv_format").set_index("kv_format")["value"]
    both = size.to_frame("bytes").join(kl.rename("kl"), how="inner").sort_values(["bytes", "kl"])
    if len(both) < 3:
        return []
    best = both[both["kl"] < both["kl"].cummin().shift(fill_value=float("inf"))]
    listed = "; ".join(f"{fmt} {row['bytes']:,.0f} B, KL {row['kl']:.2g}" for fmt, row in best.iterrows())
    return [Finding("pareto", "No format of those scored is both smaller and nearer to fp32 than one of these: "
                    f"{listed} (bytes per token of all layers).", float(len(best)), "count", None, None, "measured")]


def _context(rows) -> list[Finding]:
    kl = rows[(rows["metric"] == "kl") & rows["scope"].str.startswith("tokens ")]
    found = []
    for fmt, own in kl.groupby("kv_format", sort=False):
        own = own.sort_values("kv_len")
        if len(own) < 2:
            continue
        a, b = own.iloc[0], own.iloc[-1]
        grows = ("grows" if b["low"] > a["high"] else "falls" if b["high"] < a["low"] else
                 "shows no change that the intervals tell")
        found.append(Finding(
            f"context:{fmt}", f"The error of {fmt} {grows} with context: KL {a['value']:.2g} "
            f"[{a['low']:.2g}, {a['high']:.2g}] up to {a['kv_len']} tokens, {b['value']:.2g} [{b['low']:.2g}, "
            f"{b['high']:.2g}] up to {b['kv_len']}; one text, so position and subject are not told apart.",
            b["value"] / a["value"], "ratio", b["low"] / a["high"], b["high"] / a["low"], "measured"))
    return found


def _layers(rows) -> list[Finding]:
    kl = rows[(rows["metric"] == "kl") & rows["scope"].str.startswith("layer ")]
    found = []
    for fmt, own in kl.groupby("kv_format", sort=False):
        total, k = own["value"].sum(), own[own["scope"].str.endswith(" K")]["value"].sum()
        worst = own.sort_values("value").iloc[-1]
        found.append(Finding(
            f"sensitivity:{fmt}", f"With one layer's K or V at a time in {fmt}, K makes {100 * k / total:.0f} % of the "
            f"summed KL; the worst is {worst['scope']} with {100 * worst['value'] / total:.0f} %.", k / total, "ratio",
            None, None, "measured"))
    return found


def _mix(rows) -> list[Finding]:
    own = rows[(rows["metric"] == "kl") & rows["kv_format"].str.startswith("layers mixed")]
    whole = own[own["scope"] == "texts"]
    sensed = own[own["scope"] == "sensed windows"].set_index("kind")["value"]
    if whole.empty:
        return []
    row = whole.iloc[0]
    uniform = _of(rows[rows["scope"] == "texts"], "kl", row["kv_format"].rpartition(" of ")[2])
    beside = "" if uniform is None else (f", {uniform['value']:.2g} [{uniform['low']:.2g}, {uniform['high']:.2g}] for "
                                         f"{uniform['kv_format']} of the same bytes")
    added = "" if not {"measured", "modelled"} <= set(sensed.index) else (
        f"; on the windows that chose it, the sum of single layers predicted {sensed['modelled']:.2g} and "
        f"{sensed['measured']:.2g} was measured")
    return [Finding("mix", f"Layers in formats chosen by sensitivity: KL {row['value']:.2g} [{row['low']:.2g}, "
                    f"{row['high']:.2g}]{beside}{added}.", row["value"], "nat", row["low"], row["high"], "measured")]
