"""Claims of section 1: what a decode step reads of the cache, and how large that is beside the weights."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from kvlab.claims import _steps
from kvlab.claims._base import Claim, Evidence, Found, Verdict, conditional, refuted, supported
from kvlab.claims._results import Results, catalogue, given
from kvlab.lang import Text
from kvlab.units import display

if TYPE_CHECKING:
    from kvlab.shapes import ModelSpec

SECTION = 1
MODEL, CONTEXT = _steps.MODEL, _steps.CONTEXT
# the families that the article names, each by the model of the catalogue that stands for it
NAMED = {"llama": "meta-llama/Llama-3.3-70B-Instruct", "qwen": MODEL, "kimi_k3": "moonshotai/Kimi-K3"}
MHA = "Qwen/Qwen-72B"           # as large as the article's model, and every query head has its own KV head
MAINSTREAM = 0.9                # of the catalogue's models: with less of them "mainstream" would be said too much
SEVERAL = 2e9                   # bytes: the least that "several GB" can mean
FAR = 2.0                       # times: the least that "far exceeds" can mean
HALF = 0.5                      # of the bytes read: from here on the larger part of fetching is the cache


def whole_share(spec: ModelSpec) -> float:
    """Share of a model's caching layers in which a new token reads K and V of all earlier tokens (0 to 1).

    Layers that keep a window, a chunk or a state read less; so do those of models with sparse attention. Layers that
    cache nothing (MLP blocks of a hybrid) do not count.
    Source: layer kinds and attention_type of data/models.csv.
    """
    caching = [layer for layer in spec.layers if layer.kind != "linear" or layer.state_bytes]
    whole = sum(layer.count for layer in caching if layer.kind in ("full", "mla"))
    return 0.0 if "sparse" in spec.attention_type else whole / sum(layer.count for layer in caching)


def _reads_all(results: Results) -> Iterator[Evidence]:
    from kvlab.catalog.models import model, models
    shares = [whole_share(spec) for spec in models().values()]
    yield catalogue("models", Text("models whose every layer reads all earlier tokens",
                                   "每一层都读取全部历史 token 的模型占比"),
                    sum(share == 1 for share in shares) / len(shares), "share", "data/models.csv", n=len(shares))
    for name, full in NAMED.items():
        spec = model(full)
        yield catalogue(name, Text(f"{spec.name}: layers that read all earlier tokens",
                                   f"{spec.name}：读取全部历史 token 的层占比"),
                        whole_share(spec), "share", f"{spec.name}, {spec.source}", n=spec.num_layers)


def _all_read(found: Found) -> Verdict:
    models, named = found["models"], {name: found[name] for name in NAMED}
    listed = {lang: f"{'；' if lang == 'zh' else '; '}".join(f"{NAMED[name].split('/')[1]} {one.value:.0%}"
              for name, one in named.items()) for lang in ("en", "zh")}
    en = (f"layers that read all earlier tokens: {listed['en']}; every layer does in {models.value:.0%} of {models.n} "
          "models")
    zh = f"读取全部历史 token 的层占比：{listed['zh']}；{models.n} 个模型中 {models.value:.0%} 的每一层都如此"
    if all(one.value == 1 for one in named.values()) and models.above(MAINSTREAM):
        return supported(en, zh)
    if all(one.value < 1 for one in named.values()):
        return refuted(en, zh)
    return conditional(f"only where every layer has full attention, not with windows, states or sparse reads; {en}",
                       f"只在每层都是全注意力时成立，滑动窗口、线性状态、稀疏读取的模型不成立；{zh}")


def _bytes_at_2048(results: Results) -> Iterator[Evidence]:
    from kvlab.catalog.models import model
    from kvlab.kv.sizing import kv_bytes
    for name, full in (("gqa", MODEL), ("llama", NAMED["llama"]), ("mha", MHA)):
        spec = model(full)
        yield catalogue(name, Text(f"{spec.name} ({spec.num_kv_heads} KV heads): KV of 1 × 2,048 tokens",
                                   f"{spec.name}（{spec.num_kv_heads} 个 KV 头）：1 × 2048 token 的 KV"),
                        kv_bytes(spec, CONTEXT, "bf16"), "B", f"{spec.name}, {spec.source}")


def _several_gb(found: Found) -> Verdict:
    grouped, own = [found["gqa"], found["llama"]], found["mha"]
    most, each = display(max(one.value for one in grouped), "B"), display(own.value, "B")
    if all(one.above(SEVERAL) for one in grouped) and own.above(SEVERAL):
        return supported(f"it is {most} with grouped heads and {each} without", f"GQA 为 {most}，MHA 为 {each}")
    if own.above(SEVERAL):
        return conditional(f"only where every query head has its own KV head, {each}; with 8 KV heads it is {most}",
                           f"仅在 MHA（每个 query 头各有 KV 头）时成立，为 {each}；8 个 KV 头的 GQA 只有 {most}")
    return refuted(f"it is {most} with grouped heads and {each} without", f"GQA 为 {most}，MHA 也只有 {each}")


def _kv_and_weights(results: Results) -> Iterator[Evidence]:
    """KV ÷ weights of one sequence of 2,048 tokens, as it is and with 64 KV heads; where they would be equal."""
    from kvlab.catalog.models import model
    from kvlab.kv.sizing import crossover_tokens, kv_bytes, weight_bytes
    spec = model(MODEL)
    weights, source = given(weight_bytes(spec), "weights"), f"{spec.name}, {spec.source}"
    mha = replace(spec, layers=tuple(replace(layer, num_kv_heads=layer.num_q_heads) for layer in spec.layers))
    yield catalogue("kv_over_weights", Text("KV ÷ weights, one sequence of 2,048 tokens",
                                            "KV ÷ 权重（单条 2048 token）"), kv_bytes(spec, CONTEXT, "bf16") / weights,
                    "share", source)
    yield catalogue("with_64_heads", Text("the same with 64 KV heads, over these weights",
                                          "若有 64 个 KV 头，KV ÷ 同一权重"), kv_bytes(mha, CONTEXT, "bf16") / weights,
                    "share", source)
    yield catalogue("equal_at", Text("cached tokens up to which KV does not exceed the weights",
                                     "KV 不超过权重的最大缓存 token 数"),
                    given(crossover_tokens(spec), "weights"), "count", source)


def _exceeds_weights(found: Found) -> Verdict:
    share, most, equal = found["kv_over_weights"], found.get("with_64_heads"), found.get("equal_at")
    en = f"the cache is {share.value:.2%} of the weights" + (
        f", with 64 KV heads {most.value:.1%}" if most else "") + (
        f"; equal at {equal.value:,.0f} cached tokens, {equal.value / CONTEXT:.0f} such sequences" if equal else "")
    zh = f"KV 是权重的 {share.value:.2%}" + (f"，64 个 KV 头时为 {most.value:.1%}" if most else "") + (
        f"；缓存 {equal.value:,.0f} 个 token（约 {equal.value / CONTEXT:.0f} 条）时才与权重相等" if equal else "")
    if share.above(FAR):
        return supported(en, zh)
    if share.above(1):
        return conditional(f"it exceeds them, though not by {FAR:g} times: {en}", f"超过权重，但不到 {FAR:g} 倍：{zh}")
    return refuted(en, zh)


def _fetched(results: Results) -> Iterator[Evidence]:
    """KV share of a decode step's bytes over batch × context; where it is half; what the article's four GPUs hold."""
    from kvlab.serving.capacity import Settings, plan
    source = _steps.roofline().source
    for name, batch_size in (("one", 1), ("sixteen", 16), ("many", 256)):
        yield catalogue(name, Text(f"K and V among the bytes of a decode step, {batch_size} × 2,048 tokens",
                                   f"decode 一步读取的字节中 KV 的占比，{batch_size} × 2048 token"),
                        _steps.kv_share(_steps.decode(batch_size)), "share", source)
    yield catalogue("half_at", Text("cached tokens beyond which K and V are more than half of the bytes read",
                                    "KV 超过读取字节一半所需的缓存 token 数"),
                    _steps.tokens_at_share(HALF), "count", source)
    found = plan(_spec(), _steps.GPU, 4, Settings(tp=4, max_len=4096, util=0.9))
    low, value, high = (size // found.block_bytes * found.block_size
                        for size in (found.pool.low, found.pool.value, found.pool.high))
    yield Evidence("room", Text(f"tokens that 4 × {found.gpu} hold beside the weights, at 90 % of their memory",
                                f"4 × {found.gpu} 在权重之外能放下的 token 数（显存利用率 90%）"),
                   value, "count", "modelled", low, high, source=f"kvlab plan; {source}")


def _spec() -> ModelSpec:
    from kvlab.catalog.models import model
    return model(MODEL)


def _fetch_or_store(found: Found) -> Verdict:
    one, many, half, room = (found[name] for name in ("one", "many", "half_at", "room"))
    en = (f"K and V are {one.value:.2%} of the bytes read at 1 × 2,048 tokens and {many.value:.0%} at 256 × 2,048; "
          f"they are half at {half.value:,.0f} cached tokens, and 4 × {_steps.GPU} hold {room.value:,.0f}")
    zh = (f"1 × 2048 token 时 KV 占读取字节的 {one.value:.2%}，256 × 2048 时占 {many.value:.0%}；"
          f"缓存 {half.value:,.0f} 个 token 时占一半，4 × {_steps.GPU} 能放 {room.value:,.0f} 个")
    if one.above(HALF):
        return supported(en, zh)
    if room.below(half.value):
        return refuted(f"room runs out first: {en}", f"显存先用完：{zh}")
    return conditional(f"fetching the cache outweighs fetching the weights only with many cached tokens, and storing "
                       f"them is a limit, too: {en}",
                       f"只有缓存的 token 足够多时，读取 KV 才超过读取权重，而能放多少又受显存限制：{zh}")


CLAIMS = (
    Claim("C01", Text("For each token, mainstream models (LLaMA, Qwen, Kimi K3) read K and V of all earlier tokens",
                      "主流自回归模型（LLaMA、Qwen、Kimi K3）每生成一个 token 都要读取全部历史 token 的 K、V"),
          "LLaMA, Qwen, Kimi K3", _reads_all, _all_read, figure="kv_size",
          command="kvlab size Kimi-K3 --kv-len 131072"),
    Claim("C02", Text("A 70B model's cache takes several GB at batch 1 and 2,048 tokens",
                      "70B 模型在 batch 1、2048 token 时，KV Cache 达数 GB"), "70B, 1 × 2048: n GB",
          _bytes_at_2048, _several_gb, figure="kv_size", command=f"kvlab size {MODEL} --kv-len 2048"),
    Claim("C03", Text("… and the cache is far larger than the model's weights", "……且远超模型权重本身"),
          "KV ≫ weights", _kv_and_weights, _exceeds_weights, figure="kv_size",
          command=f"kvlab size {MODEL} --kv-len 2048"),
    Claim("C04", Text("The trouble with the cache is to fetch it, not to store it", "问题不在“存” KV Cache，而在“取”"),
          "fetch, not store", _fetched, _fetch_or_store, figure="decode_roofline",
          command=f"kvlab plan {MODEL} --gpu '{_steps.GPU}' --gpus 4 --tp 4 --max-len 4096 --util 0.9"),
)
