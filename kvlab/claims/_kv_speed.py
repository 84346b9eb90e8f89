"""Evidence on the speed of smaller KV formats: what bytes allow a decode step, what is published, what a CPU does."""
from __future__ import annotations

from dataclasses import replace

from kvlab.claims._base import Evidence
from kvlab.claims._kv_evidence import FP8, TOKENS
from kvlab.claims._results import Results, catalogue
from kvlab.lang import Text

BATCH = 16                      # the article's concurrent requests
L4_MODEL, L4_TOKENS = "Qwen3-4B", {2: 2048, 8: 8192, 16: 16384, 32: 32768}


def steps(results: Results, fmt: str):
    """The least and the most that bytes let a decode step gain over batch x context, and the article's batches."""
    loaded = Text("Gain of a decode step by bytes alone, the article's load",
                  "仅按字节计，decode 一步的加速，文章的负载")
    least = Text("Least gain of a decode step by bytes alone", "仅按字节计，decode 一步的最小加速")
    most = Text("The same, the most", "同上，最大加速")
    batch = Text("Batch from which bytes allow the article's number", "仅按字节计，达到文章数字的最小 batch")
    table = results.rows("kernels")
    if table is None:
        for name, about in (("at_16", loaded), ("least", least), ("most", most), ("batch_short", batch),
                            ("batch_long", batch)):
            yield results.lacking("kernels", name, about)
        return
    own = table[(table["kv_format"] == fmt) & (table["kind"] == "modelled")]
    gains = own[own["metric"] == "step_speedup"].sort_values("value")
    at_16 = gains[(gains["batch_size"] == BATCH) & (gains["kv_len"] == TOKENS)]
    for name, about, row in (("at_16", loaded, at_16), ("least", least, gains.iloc[:1]),
                             ("most", most, gains.iloc[-1:])):
        yield gain(results.reading("kernels", name, _at(about, row), row))
    meets = own[own["metric"] == "batch_to_quoted"].sort_values("kv_len")
    for name, row in (("batch_short", meets.iloc[:1]), ("batch_long", meets.iloc[-1:])):
        yield results.reading("kernels", name, _at(batch, row), row)


def _at(about: Text, row) -> Text:
    """The text with the batch and the context of the row, where it has them."""
    if row.empty:
        return about
    import pandas as pd
    one = row.iloc[0]
    of = [one["model"]] if one["model"] else []
    batch = [] if pd.isna(one["batch_size"]) else [f"batch {one['batch_size']}"]
    return Text(f"{about.en} ({', '.join([*of, *batch, format(one['kv_len'], ',')])} tokens)",
                f"{about.zh}（{'，'.join([*of, *batch, str(one['kv_len'])])} token）")


def gain(one: Evidence) -> Evidence:
    """A ratio of speeds as what is gained: 1.08 is 8 %."""
    if one.value is None:
        return one
    ends = {end: getattr(one, end) - 1 for end in ("low", "high") if getattr(one, end) is not None}
    return replace(one, value=one.value - 1, unit="share", **ends)


def published_gains(results: Results):
    """The gains that vLLM publishes for one GPU beside those that bytes alone give, and the largest miss."""
    from kvlab.catalog.models import model
    from kvlab.kv.sizing import kv_bytes, weight_bytes
    spec = model(L4_MODEL)
    misses = []
    for thousand, tokens in L4_TOKENS.items():
        there = gain(results.quoted(f"c47_l4_{thousand}k", name=f"l4_{thousand}k"))
        weights, own, small = weight_bytes(spec), kv_bytes(spec, tokens, "bf16"), kv_bytes(spec, tokens, FP8)
        ours = (weights + own) / (weights + small) - 1
        misses.append(abs(ours - there.value))
        yield there
        yield catalogue(f"l4_{thousand}k_bytes", Text(f"The same by bytes alone, {tokens:,} tokens",
                                                      f"同上，仅按字节计，{tokens} token"), ours, "share",
                        f"(W + K) ÷ (W + K in FP8) − 1; {spec.name}, {spec.source}")
    yield Evidence("miss", Text("Largest distance of the two, four contexts", "两者的最大差（四种长度）"), max(misses),
                   "share", "quoted", n=len(misses), source=f"c47_l4_* of data/facts.csv and {spec.name}'s bytes")


def on_a_cpu(results: Results, fmt: str, name: str) -> Evidence:
    """What one attention call of kvlab's own kernel gained over fp32 on the CPU of the run: nothing about a GPU."""
    about = Text(f"Attention call on a CPU, {fmt} over fp32", f"CPU 上的一次注意力调用，{fmt} ÷ fp32")
    table = results.rows("kernels")
    if table is None:
        return results.lacking("kernels", name, about)
    rows = table[(table["metric"] == "format_speedup") & (table["kv_format"] == fmt) & (table["kind"] == "measured")]
    row = rows.sort_values("kv_len").iloc[-1:]
    return results.reading("kernels", name, _at(about, row), row)
