"""Claims of section 3 about single models: how many heads Qwen2 and Kimi K3 have, and what their layers keep."""
from __future__ import annotations

from collections.abc import Iterator

from kvlab.claims._base import Claim, Evidence, Found, Verdict, conditional, refuted, supported
from kvlab.claims._results import Results, catalogue
from kvlab.lang import Text

SECTION = 3
ARTICLE = (64, 8)                       # query and KV heads of the article's GQA
LONG, LONGEST = 131_072, 1_000_000      # tokens
CSV = "data/models.csv"


def _qwen2(results: Results) -> Iterator[Evidence]:
    from kvlab.catalog.models import model, models
    spec = model("Qwen2-72B-Instruct")
    family = [one for one in models().values() if one.name.startswith(("Qwen/Qwen2-", "Qwen/Qwen2.5-"))]
    same = [one for one in family if (one.num_q_heads, one.num_kv_heads) == ARTICLE]
    others = sorted({f"{one.num_q_heads}/{one.num_kv_heads}" for one in family if one not in same})
    yield catalogue("family", Text(f"Qwen2 and Qwen2.5 models with 64/8 heads (others: {', '.join(others)})",
                                   f"Qwen2 与 Qwen2.5 中 64/8 的比例（其余：{'、'.join(others)}）"),
                    len(same) / len(family), "share", CSV, n=len(family))
    for name, what, count in (("q_heads", "query", spec.num_q_heads), ("kv_heads", "KV", spec.num_kv_heads)):
        yield catalogue(name, Text(f"{what} heads of Qwen2-72B", f"Qwen2-72B 的 {what} head 数"), count, "count",
                        f"{CSV}: {spec.source}")


def _is_64_8(found: Found) -> Verdict:
    heads, family = (found["q_heads"].value, found["kv_heads"].value), found["family"]
    numbers = f"{heads[0]:.0f}/{heads[1]:.0f}"
    if heads != ARTICLE:
        return refuted(f"Qwen2-72B has {numbers} heads", f"Qwen2-72B 是 {numbers}")
    if family.value == 1:
        return supported(f"all {family.n} Qwen2 and Qwen2.5 models of the catalogue have {numbers} heads",
                         f"目录中 {family.n} 个 Qwen2 与 Qwen2.5 模型都是 {numbers}")
    return conditional(f"{numbers} holds of the 72B; {1 - family.value:.0%} of the {family.n} Qwen2 and Qwen2.5 "
                       "models of the catalogue have other numbers",
                       f"72B 是 {numbers}；目录中 {family.n} 个 Qwen2 与 Qwen2.5 模型中 {1 - family.value:.0%} 不是")


def _k3(results: Results) -> Iterator[Evidence]:
    from kvlab.catalog.models import model
    from kvlab.kv.sizing import kv_bytes
    spec, n = model("Kimi-K3"), LONG
    source = f"{CSV}: {spec.source}"
    kinds = {"grouped": 0, "mla": 0, "linear": 0}
    for layer in spec.layers:
        grouped = layer.kind not in ("mla", "linear") and 1 < layer.num_kv_heads < layer.num_q_heads
        kinds["grouped" if grouped else layer.kind] = kinds.get("grouped" if grouped else layer.kind, 0) + layer.count
    for key, en, zh in (("grouped", "Layers of Kimi K3 whose query heads share KV heads (GQA)", "Kimi K3 的 GQA 层数"),
                        ("mla", "Layers of Kimi K3 with one latent per token (MLA)", "Kimi K3 的 MLA 层数"),
                        ("linear", "Layers of Kimi K3 with linear attention", "Kimi K3 的线性注意力层数")):
        yield catalogue(f"{key}_layers", Text(f"{en}, of {spec.num_layers}", f"{zh}（共 {spec.num_layers} 层）"),
                        kinds[key], "count", source)
    yield catalogue("q_heads", Text("Query heads of Kimi K3", "Kimi K3 的 query head 数"), spec.num_q_heads, "count",
                    source)
    yield catalogue("kv_bytes", Text("Kimi K3's KV cache of 131,072 tokens, bf16", "Kimi K3 在 131,072 token 的 KV"),
                    kv_bytes(spec, n, "bf16"), "B", source)
    yield catalogue("as_said", Text(f"The same if all {spec.num_layers} layers were GQA 64/8 with head_dim 128",
                                    f"若 {spec.num_layers} 层都是 64/8、head_dim 128 的 GQA"),
                    2 * 2 * spec.num_layers * ARTICLE[1] * 128 * n, "B", source)


def _k3_heads(found: Found) -> Verdict:
    grouped, mla, linear = (found[f"{kind}_layers"].value for kind in ("grouped", "mla", "linear"))
    heads = found["q_heads"].value
    layers = (f"{grouped:.0f} GQA, {mla:.0f} MLA and {linear:.0f} linear layers, {heads:.0f} query heads",
              f"{grouped:.0f} 层 GQA、{mla:.0f} 层 MLA、{linear:.0f} 层线性注意力，{heads:.0f} 个 query head")
    if not grouped:
        return refuted(f"Kimi K3 has {layers[0]}", f"Kimi K3 有 {layers[1]}")
    if mla or linear or heads != ARTICLE[0]:
        return conditional(f"in part: {layers[0]}", f"部分成立：{layers[1]}")
    return supported(f"every layer is GQA: {layers[0]}", f"每层都是 GQA：{layers[1]}")


def _k3_saving(results: Results) -> Iterator[Evidence]:
    """What each kind of layer takes off the cache of 1M tokens, of what MHA with the same heads would keep."""
    from kvlab.catalog.models import model
    from kvlab.kv.sizing import layer_bytes
    spec, n = model("Kimi-K3"), LONGEST
    saved = {"grouped": 0, "mla": 0, "linear": 0}
    for layer in spec.layers:
        kind = layer.kind if layer.kind in ("mla", "linear") else "grouped"
        mha = 2 * 2 * n * spec.num_q_heads * spec.head_dim
        saved[kind] += layer.count * (mha - layer_bytes(layer, n, "bf16") - layer.state_bytes)
    for key, en, zh in (("grouped", "sharing KV heads (GQA)", "共享 KV head（GQA）"), ("mla", "MLA", "MLA"),
                        ("linear", "linear attention", "线性注意力")):
        yield catalogue(f"{key}_saved", Text(f"Of the bytes that Kimi K3 spares at 1M tokens: by {en}",
                                             f"Kimi K3 在 100 万 token 省下的字节中来自{zh}的份额"),
                        saved[key] / sum(saved.values()), "share", f"{CSV}: {spec.source}")


def _k3_key(found: Found) -> Verdict:
    grouped, mla, linear = (found[f"{kind}_saved"].value for kind in ("grouped", "mla", "linear"))
    shares = (f"GQA {grouped:.0%}, MLA {mla:.0%}, linear attention {linear:.0%} of the bytes spared at 1M tokens",
              f"100 万 token 时省下的字节：GQA {grouped:.0%}，MLA {mla:.0%}，线性注意力 {linear:.0%}")
    if grouped > 0.5:
        return supported(f"most of what is spared comes from GQA: {shares[0]}", f"主要来自 GQA。{shares[1]}")
    if grouped > 0:
        return conditional(f"GQA has a part in it: {shares[0]}", f"GQA 只占一部分。{shares[1]}")
    return refuted(f"the model has no GQA layer that could be the key: {shares[0]}; how well it does was not tested",
                   f"该模型没有 GQA 层，谈不上关键。{shares[1]}；模型效果未作测试")


CLAIMS = (
    Claim("C18", Text("Qwen2 uses grouped-query attention with 64 query heads and 8 KV heads",
                      "Qwen2 用的是 64 个 query head、8 个 KV head 的 GQA"), "64/8", _qwen2, _is_64_8,
          figure="ratio_census", command="kvlab ls models"),
    Claim("C19", Text("Kimi K3 uses grouped-query attention with 64 query heads and 8 KV heads",
                      "Kimi K3 用的是 64 个 query head、8 个 KV head 的 GQA"), "64/8", _k3, _k3_heads,
          figure="kv_size", command="kvlab size Kimi-K3 --kv-len 131072"),
    Claim("C20", Text("Grouped-query attention is what keeps Kimi K3 strong in long contexts",
                      "Kimi K3 靠 GQA 在长上下文中保持性能"), "GQA", _k3_saving, _k3_key, figure="kv_size",
          command="kvlab size Kimi-K3 --kv-len 1000000"),
)
