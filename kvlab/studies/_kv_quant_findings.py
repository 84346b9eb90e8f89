"""What a table of kv_quant says about the article's claims, in words: supported, refuted or inconclusive."""
from __future__ import annotations

from typing import TYPE_CHECKING

from kvlab.accuracy.statistics import Estimate, below, inside
from kvlab.record.quality import TEXTS, comparable, front
from kvlab.record.wide import wide
from kvlab.studies._kv_quant_ranked import agreement, bytes_saved, context, layers, mix, time
from kvlab.studies._run import Finding

if TYPE_CHECKING:
    import pandas as pd

FP8_MARGIN, INT8_RANGE = 0.001, (0.001, 0.003)      # of perplexity. Source: the article's claims
FP8, INT8, PER_TOKEN = "fp8_e4m3", "int8/tensor", "int8/token"
PREFERRED = (FP8, "fp8_e4m3/tensor", "fp8_e4m3/token"), (INT8, "int8/head", "int8/channel", PER_TOKEN)


def per_format(table: pd.DataFrame) -> pd.DataFrame:
    """One line per format (and variant of decode attention): bytes, time, error and quality side by side.

    The columns are those of kvlab.wide: latency_s, ideal_bytes, kernel_error, format_error of decode attention in the
    model's shape; kl, top1_agreement, perplexity_delta, … of the windows that all formats were scored on. What is said
    of single documents, positions and layers is left out.
    """
    decode = table[(table["phase"] == "decode") & (table["variant"] != "") & (table["replica"].fillna(0) == 0)]
    both = table.loc[[*comparable(table).index, *decode.index]]
    return wide(both, on=("run_id", "kv_format", "variant"))


def findings(table: pd.DataFrame) -> list[Finding]:
    """The article's claims, what calibration changes, top-1, bytes and time by format, and where the error sits."""
    rows = table[(table["status"] == "ok") & (table["kind"] != "missing")]
    texts, same = rows[rows["scope"] == TEXTS], comparable(rows)
    found = [*_loss(texts, "fp8_below_0.1_%", PREFERRED[0], FP8_MARGIN),
             *_loss(texts, "int8_0.1_to_0.3_%", PREFERRED[1], INT8_RANGE), *_order(rows), *_calibration(rows, same),
             *agreement(same), *_pareto(same), *bytes_saved(same), *time(rows), *context(rows), *layers(rows),
             *mix(rows)]
    if found:
        return found
    absent = table[(table["kind"] == "missing") & (table["source"] == "kv_quant")]
    why = f": {absent['note'].iloc[0]}" if len(absent) else ""
    return [Finding("none", f"no finding: the run holds no score of a text{why}", None, "ratio", None, None, "missing")]


def _of(rows: pd.DataFrame, metric: str, fmt: str, kind: str = "measured"):
    chosen = rows[(rows["metric"] == metric) & (rows["kv_format"] == fmt) & (rows["kind"] == kind)]
    return None if chosen.empty else chosen.iloc[0]


def _loss(texts, name: str, formats, claimed) -> list[Finding]:
    """The claimed loss against each format's, by the 90 % interval: below a margin (a gain is no loss) or a range."""
    found = []
    for fmt in formats:
        row, kl = _of(texts, "perplexity_delta_90", fmt), _of(texts, "kl", fmt)
        if row is None or kl is None:
            continue
        interval = Estimate(row["value"], row["low"], row["high"], int(row["n"]))
        if isinstance(claimed, tuple):
            verdict, said = inside(interval, *claimed), f"{100 * claimed[0]:g} to {100 * claimed[1]:g} %"
        else:
            verdict, said = below(interval, claimed), f"less than {100 * claimed:g} %"
        verdict = {"below": "supported", "inside": "supported", "inconclusive": "inconclusive"}.get(verdict, "refuted")
        needed = _of(texts, "tokens_needed", fmt, "modelled")
        more = "" if verdict != "inconclusive" or needed is None else (
            f"; ±0.05 % would take about {needed['value']:,.0f}")
        family = fmt.partition("_")[0].partition("/")[0].upper()
        low, value, high = (f"{100 * row[of]:+.2f}" for of in ("low", "value", "high"))
        found.append(Finding(
            f"{name}:{fmt}", f"“{family} KV loses {said}”: {verdict} for {fmt} on {row['model']}. Perplexity changes "
            f"by {value} % [{low}, {high}] (90 %, {row['n']} tokens{more}); KL {kl['value']:.2g} nat.",
            row["value"], "ratio", row["low"], row["high"], "measured"))
    return found


def _order(rows) -> list[Finding]:
    """INT8 against FP8 by KL, judged by the FP8 of the same grain where there is one."""
    found, minus = [], rows[rows["scope"].str.startswith("minus fp8")]
    for fmt in PREFERRED[1]:
        own = minus[minus["kv_format"] == fmt]
        differences = own[own["metric"] == "kl_difference"].sort_values("scope", key=lambda s: ~s.str.contains("/"))
        if differences.empty:
            continue
        first, told = differences.iloc[0], []
        for _, kl in differences.iterrows():
            grain = "scales alike" if "/" in kl["scope"] else "no scales"
            told.append(f"{kl['value']:+.2g} [{kl['low']:+.2g}, {kl['high']:+.2g}] nat against "
                        f"{kl['scope'].removeprefix('minus ')} ({grain})")
        verdict = "supported" if first["low"] > 0 else "refuted" if first["high"] < 0 else "inconclusive"
        found.append(Finding(
            f"int8_worse_than_fp8:{fmt}", f"“INT8 is worse than FP8”: {verdict} for {fmt}: KL differs by "
            f"{'; '.join(told)}, on the same {first['n']} tokens.", first["value"], "nat", first["low"], first["high"],
            "measured"))
    return found


def _calibration(rows, same) -> list[Finding]:
    """Refuted by any scheme without calibration that is better than the calibrated one, or no worse than FP8."""
    token, static = _of(same, "kl", PER_TOKEN), _of(same, "kl", INT8)
    kl = same[(same["metric"] == "kl") & (same["kind"] == "measured")]
    guessed = kl[kl["kv_format"].str.startswith(f"{INT8}, guessed range")].sort_values("value")
    if token is None or static is None or guessed.empty:
        return []
    fp8 = _of(rows[rows["scope"] == f"minus {FP8}"], "kl_difference", PER_TOKEN)
    free = token["high"] < static["low"] or fp8 is not None and fp8["high"] <= 0
    best = guessed.iloc[0]
    need = best["low"] > static["high"] and token["low"] > static["high"] and fp8 is not None and fp8["low"] > 0
    verdict = "refuted" if free else "supported" if need else "inconclusive"
    of_static = ("needs it" if best["low"] > static["high"] else "does not need it" if best["high"] <= static["high"]
                 else "may need it")
    listed = ", ".join(f"{row['value']:.2g} at {row['kv_format'].rpartition(' ')[2]}" for _, row in guessed.iterrows())
    beside = "" if fp8 is None else (f" ({fp8['value']:+.2g} [{fp8['low']:+.2g}, {fp8['high']:+.2g}] against {FP8})")
    return [Finding(
        "int8_needs_calibration", f"“INT8 needs a calibration set”: {verdict}: with a scale per token, without "
        f"calibration, KL is {token['value']:.2g}{beside}, with a calibrated scale per tensor {static['value']:.2g}. A "
        f"fixed scale per tensor {of_static}: with guessed ranges KL is {listed}.", best["value"] / static["value"],
        "ratio", best["low"] / static["high"], best["high"] / static["low"], "measured")]


def _pareto(same) -> list[Finding]:
    kl = same[(same["metric"] == "kl") & (same["kind"] == "measured")].set_index("kv_format")["value"]
    size = same[same["metric"] == "kv_bytes_per_token"].drop_duplicates("kv_format").set_index("kv_format")
    both = size["value"].to_frame("bytes").join(kl.rename("kl"), how="inner")
    if len(both) < 3:
        return []
    best = front(both, "bytes", "kl")
    listed = "; ".join(f"{fmt} {row['bytes']:,.0f} B, KL {row['kl']:.2g}" for fmt, row in best.iterrows())
    return [Finding("pareto", "No format of those scored is both smaller and nearer to fp32 than one of these: "
                    f"{listed} (bytes per token of all layers, in a cache of {size['kv_len'].iloc[0]} tokens; by point "
                    "estimates).", float(len(best)), "count", None, None, "measured")]
