"""Claims of section 3: what sharing KV heads is and saves, against what else there is."""
from __future__ import annotations

from collections.abc import Iterator

from kvlab.claims._base import Claim, Evidence, Found, Verdict, conditional, inconclusive, outdated, refuted, supported
from kvlab.claims._recall_models import MARGIN, NARROW, STUDY, WIDE, nll_rise, shown
from kvlab.claims._results import Results, catalogue
from kvlab.lang import Text

SECTION = 3
ARTICLE = (64, 8)                       # query and KV heads of the article's GQA
LENGTHS = {"8k": 8192, "128k": 131_072, "1m": 1_000_000}
CLEARLY = 1.1                           # a compression this many times the other's counts as stronger
ROUNDING = 1e-5                         # fp32 against fp64: what order of summation explains
SAME_FUNCTION = 1e-6                    # nat of KL: two computations of one function
SAVED = 0.875                           # the article's
EXACT = 0.0005                          # 0.05 percentage points: what its three digits allow
CSV = "data/models.csv"


def _mha_bytes(spec, kv_len: int) -> int:
    """bf16 bytes if each layer that mixes tokens kept K and V of every query head for every token."""
    return sum(2 * layer.count * kv_len * (
        layer.num_q_heads * (layer.head_dim + layer.shape.v_dim) if layer.kind in ("full", "sliding", "chunked")
        else spec.num_q_heads * 2 * spec.head_dim)
        for layer in spec.layers if layer.kind != "linear" or layer.state_bytes)


def _compression(spec, kv_len: int) -> float:
    """Bytes of the same heads as MHA over what the model keeps, recurrent state included."""
    from kvlab.kv.sizing import kv_bytes, state_bytes
    return _mha_bytes(spec, kv_len) / (kv_bytes(spec, kv_len, "bf16") + state_bytes(spec))


def _only_grouped(spec) -> bool:
    return all(layer.kind == "full" and 1 < layer.num_kv_heads < layer.num_q_heads for layer in spec.layers)


def _strongest(results: Results) -> Iterator[Evidence]:
    """Models whose bytes are approximate are left out, so that the rest is, if anything, weaker than it could be."""
    from kvlab.catalog.models import model, models
    from kvlab.kv.sizing import kv_bytes
    exact = [spec for spec in models().values() if spec.context and not spec.approximate]
    latent = [spec for spec in exact if all(layer.kind == "mla" for layer in spec.layers)]
    best, kv_len = max(latent, key=lambda spec: _compression(spec, LENGTHS["128k"])), LENGTHS["128k"]
    yield catalogue("mla_128k", Text(f"Best by MLA alone at {kv_len:,} tokens, MHA ÷ kept bytes ({best.name})",
                                     f"仅靠 MLA 的最高压缩倍数，{kv_len:,} token，MHA ÷ 实际字节（{best.name}）"),
                    _compression(best, kv_len), "ratio", f"{CSV}: {best.source}", n=len(latent))
    for name, kv_len in LENGTHS.items():
        long = [spec for spec in exact if (spec.context or 0) >= kv_len]
        for key, en, zh, chosen in (
                ("gqa", "Best by GQA alone", "仅靠 GQA 的最高压缩倍数", [one for one in long if _only_grouped(one)]),
                ("other", "Best by latents, windows or linear layers", "潜变量、窗口或线性层的最高压缩倍数",
                 [one for one in long if any(layer.kind != "full" for layer in one.layers)])):
            best = max(chosen, key=lambda spec: _compression(spec, kv_len))
            yield catalogue(f"{key}_{name}", Text(f"{en} at {kv_len:,} tokens, MHA ÷ kept bytes ({best.name})",
                                                  f"{zh}，{kv_len:,} token，MHA ÷ 实际字节（{best.name}）"),
                            _compression(best, kv_len), "ratio", f"{CSV}: {best.source}", n=len(chosen))
    for key, name in (("qwen2", "Qwen2-72B-Instruct"), ("deepseek", "DeepSeek-V3"), ("k3", "Kimi-K3")):
        spec = model(name)
        yield catalogue(f"bytes_{key}", Text(f"KV bytes per token of {name} ({spec.attention_type}), bf16",
                                             f"{name} 每 token 的 KV 字节（{spec.attention_type}，bf16）"),
                        kv_bytes(spec, LENGTHS["128k"], "bf16") / LENGTHS["128k"], "B", f"{CSV}: {spec.source}")
    yield results.quoted("c16_gqa_year", name="gqa_year")
    yield results.quoted("c16_mla_year", name="mla_year")


def _most_effective(found: Found) -> Verdict:
    pairs = {name: (found[f"gqa_{name}"], found[f"other_{name}"]) for name in LENGTHS}
    beaten = [name for name, (gqa, other) in pairs.items() if other.above(CLEARLY * gqa.value)]
    said = ", ".join(f"{gqa.value:.0f} × against {other.value:.0f} × at {LENGTHS[name]:,} tokens"
                     for name, (gqa, other) in pairs.items())
    zh = "；".join(f"{LENGTHS[name]:,} token 时 {gqa.value:.0f} 倍对 {other.value:.0f} 倍"
                  for name, (gqa, other) in pairs.items())
    if not beaten:
        return supported(f"nothing in the catalogue compresses more than GQA alone: {said}", f"目录中没有更强的：{zh}")
    if len(beaten) < len(pairs):
        return conditional(f"not at every length; GQA alone against latents, windows or linear layers: {said}",
                           f"并非在每种长度下；仅 GQA 与潜变量、窗口或线性层中的最强者相比：{zh}")
    since, first, latent = found["mla_year"].value, found["gqa_year"].value, found["mla_128k"]
    text = (f"GQA alone against latents, windows or linear layers: {said} (bytes only, not accuracy)",
            f"仅 GQA 与潜变量、窗口或线性层中的最强者相比：{zh}（只比字节，不比精度）")
    if since > first and latent.above(CLEARLY * found["gqa_128k"].value):
        return outdated(f"GQA is of {first:.0f}; since {since:.0f} MLA alone does {latent.value:.0f} ×. {text[0]}",
                        f"GQA 出自 {first:.0f} 年；{since:.0f} 年有了 MLA，单凭它就有 {latent.value:.0f} 倍。{text[1]}")
    return refuted(*text)


def _sharing(results: Results) -> Iterator[Evidence]:
    names = {"repeated": ("naive_repeat", "Largest error of attention over repeated KV heads, fp32 against fp64",
                          "重复 KV head 的注意力，fp32 对 fp64 的最大误差"),
             "grouped": ("naive", "Largest error of attention over shared KV heads, fp32 against fp64",
                         "共享 KV head 的注意力，fp32 对 fp64 的最大误差")}
    table = results.rows("memory_wall")
    for key, (variant, en, zh) in names.items():
        rows = None if table is None else table[
            (table["metric"] == "kernel_error") & (table["variant"] == variant) & (table["phase"] == "decode")
            & (table["group_ratio"] > 1) & (table["kind"] == "measured")]
        if rows is None or rows.empty:
            yield results.lacking("memory_wall", key, Text(en, zh))
            continue
        ratios = ", ".join(map(str, sorted(rows["group_ratio"].unique())))
        yield Evidence(key, Text(f"{en} (ratios {ratios})", f"{zh}（组比 {ratios}）"), float(rows["value"].max()),
                       "ratio", "measured", n=len(rows), source=results.source("memory_wall"))
    table = results.rows(STUDY)
    about = Text("KL of a GQA model to itself with every KV head copied to its query heads",
                 "GQA 模型与把每个 KV head 复制给各 query head 之后的自身之间的 KL")
    yield results.lacking(STUDY, "expanded", about) if table is None else results.reading(
        STUDY, "expanded", about, table[(table["data"] == "conversion:expand") & (table["metric"] == "kl")])


def _is_sharing(found: Found) -> Verdict:
    repeated, grouped, kl = found["repeated"], found["grouped"], found["expanded"]
    en = f"largest errors {repeated.value:.1e} and {grouped.value:.1e}, KL {kl.value:.1g} nat"
    zh = f"最大误差 {repeated.value:.1e} 与 {grouped.value:.1e}，KL {kl.value:.1g} nat"
    if not (repeated.below(ROUNDING) and grouped.below(ROUNDING)) or kl.above(SAME_FUNCTION):
        return refuted(f"shared heads and repeated heads differ by more than rounding: {en}",
                       f"共享与重复 KV head 的差别超出舍入误差：{zh}")
    if kl.above(SAME_FUNCTION) is None:
        return inconclusive(f"the KL's interval holds {SAME_FUNCTION:g} nat: {en}",
                            f"KL 的区间包含 {SAME_FUNCTION:g} nat：{zh}",
                            Text("more tokens of text", "更多文本 token"))
    return supported(f"shared heads compute what repeated heads do: {en}", f"共享与重复 KV head 的结果相同：{zh}")


def _saving(results: Results) -> Iterator[Evidence]:
    from kvlab.catalog.models import model, models
    from kvlab.kv.sizing import kv_bytes
    q, kv = ARTICLE
    yield catalogue("at_64_8", Text("KV bytes saved against MHA by 64 query and 8 KV heads", "64/8 相对 MHA 省下的 KV"),
                    1 - kv / q, "share", "1 − num_kv_heads ÷ num_q_heads")
    saved = {spec.name: 1 - 1 / _compression(spec, 4096) for spec in models().values() if _only_grouped(spec)}
    least, most = min(saved, key=saved.__getitem__), max(saved, key=saved.__getitem__)
    for key, name, en, zh in (("least", least, "Least", "最少"), ("most", most, "Most", "最多")):
        yield catalogue(key, Text(f"{en} saved by a GQA model ({name})", f"GQA 模型中省得{zh}（{name}）"), saved[name],
                        "share", CSV, n=len(saved))
    as_said = sum(abs(value - SAVED) < EXACT for value in saved.values()) / len(saved)
    yield catalogue("as_said", Text("GQA models of the catalogue that save 87.5 %", "目录中恰好省 87.5 % 的 GQA 模型"),
                    as_said, "share", CSV, n=len(saved))
    spec, tp = model("Qwen2-72B-Instruct"), 16
    per_rank = 1 - kv_bytes(spec, 4096, "bf16", tp) / (_mha_bytes(spec, 4096) / tp)
    yield catalogue("per_rank", Text(f"Saved per GPU by {spec.name} at TP = {tp}, more ranks than KV heads",
                                     f"{spec.name} 在 TP = {tp}（多于 KV head 数）时每卡省下的 KV"),
                    per_rank, "share", f"{CSV}: {spec.source}")


def _is_87_5(found: Found) -> Verdict:
    here, least, most, share = found["at_64_8"], found["least"], found["most"], found["as_said"]
    if abs(here.value - SAVED) >= EXACT:
        return refuted(f"64/8 saves {here.value:.1%}", f"64/8 省 {here.value:.1%}")
    if share.value == 1:
        return supported(f"all {share.n} GQA models save {here.value:.1%}",
                         f"{share.n} 个 GQA 模型都省 {here.value:.1%}")
    rank = found.get("per_rank")
    more = ("", "") if rank is None else (f"; per GPU it shrinks to {rank.value:.1%} where TP exceeds the KV heads",
                                          f"；TP 超过 KV head 数时每卡只省 {rank.value:.1%}")
    return conditional(f"exact at group ratio 8; {share.n} GQA models save {least.value:.0%} to {most.value:.1%}, "
                       f"{share.value:.0%} of them 87.5%{more[0]}",
                       f"组比为 8 时成立；{share.n} 个 GQA 模型省 {least.value:.0%} 到 {most.value:.1%}，"
                       f"其中 {share.value:.0%} 恰为 87.5 %{more[1]}")


def _mqa(results: Results) -> Iterator[Evidence]:
    yield nll_rise(results, "narrow", NARROW, 8, 32)
    yield nll_rise(results, "wide", WIDE, 16, 32)
    yield catalogue("saved", Text("KV bytes saved against MHA by 64 query heads on one KV head",
                                  "64 个 query head 共用 1 个 KV head 相对 MHA 省下的 KV"), 1 - 1 / ARTICLE[0], "share",
                    "1 − num_kv_heads ÷ num_q_heads")


def _less_diverse(found: Found) -> Verdict:
    """Diversity has no number of its own: judged by what MQA (32 of 32 heads on one) loses against GQA."""
    saved, narrow, wide = found["saved"], found["narrow"], found["wide"]
    numbers = (f"one KV head for 32 adds {shown(narrow)} to NLL against four at head_dim {NARROW} (n = {narrow.n}), "
               f"{shown(wide)} against two at {WIDE} (n = {wide.n}), in small recall models; for 64 it saves "
               f"{saved.value:.1%}",
               f"32 个 query head 共用 1 个 KV head：NLL 在 head_dim {NARROW} 时比 4 个多 {shown(narrow)}"
               f"（n = {narrow.n}），在 {WIDE} 时比 2 个多 {shown(wide)}（n = {wide.n}），均为小型召回模型；"
               f"64 个共用时省 {saved.value:.1%}")
    if narrow.above(MARGIN) and wide.above(MARGIN):
        return supported(f"one KV head loses against several: {numbers[0]}", f"单个 KV head 不如多个：{numbers[1]}")
    if narrow.below(MARGIN) and wide.below(MARGIN):
        return refuted(f"no loss of {MARGIN:g} nat: {numbers[0]}", f"没有 {MARGIN:g} nat 的损失：{numbers[1]}")
    if narrow.above(MARGIN) and wide.below(MARGIN):
        return conditional(f"where KV heads are narrow, not where they are wide: {numbers[0]}",
                           f"KV head 窄时成立，宽时不成立：{numbers[1]}")
    return inconclusive(f"the intervals hold {MARGIN:g} nat: {numbers[0]}", f"区间包含 {MARGIN:g} nat：{numbers[1]}",
                        Text("more seeds: kvlab run group_ratio --size large",
                             "更多随机种子：kvlab run group_ratio --size large"))


CLAIMS = (
    Claim("C16", Text("Grouped-query attention is today's most effective way to compress the KV cache",
                      "GQA 是目前压缩 KV Cache 最有效的办法"), "GQA > all else", _strongest, _most_effective,
          figure="kv_size", command="kvlab size Kimi-K3 --kv-len 131072"),
    Claim("C17", Text("Query heads share KV heads; MHA, GQA and MQA differ in nothing but the number of KV heads",
                      "多个 query head 共享一个 KV head；MHA、GQA、MQA 只差 KV head 的数量"),
          "64/64, 64/8, 64/1", _sharing, _is_sharing, studies=("memory_wall", STUDY)),
    Claim("C21", Text("GQA takes 87.5 % off the KV cache of multi-head attention",
                      "GQA 比 MHA 少用 87.5 % 的 KV Cache"), "−87.5 %", _saving, _is_87_5,
          figure="kv_size", command="kvlab size Qwen2-72B-Instruct --kv-len 4096 --tp 16"),
    Claim("C22", Text("One KV head (MQA) compresses to the extreme, but GQA keeps more diverse attention",
                      "MQA 只留 1 个 KV head，压缩到极致；GQA 则保留更多注意力多样性"), "64/1", _mqa, _less_diverse,
          studies=(STUDY,), figure="group_ratio"),
)
