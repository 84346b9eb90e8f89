"""Claims of section 8: how many requests fit, and which reserve to keep."""
from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from kvlab.claims._base import Claim, Evidence, Found, Verdict, conditional, inconclusive, refuted, supported
from kvlab.claims._results import Results, catalogue, given
from kvlab.claims._serving import times
from kvlab.lang import Text

SECTION = 8
BIG, SMALL, LENGTH = "Qwen2-72B-Instruct", "meta-llama/Llama-3.1-8B", 4096
CARD, CARDS, CHEAP = "A100 SXM4 80GB", 4, "RTX 4090"
CLOSE = 0.25                    # an estimate of capacity that is off by more sizes a cluster wrongly
FACTOR = (1.3, 1.5)             # the article
SAFE = 0.9                      # a factor that is too small for more than one server in ten is not safe
COMMAND = f"kvlab plan {BIG} --gpu '{CARD}' --gpus {CARDS} --tp {CARDS} --max-len {LENGTH}"
AZURE = "azure_2023_conv"


@cache
def _plan(name: str, gpu: str, gpus: int):
    from kvlab.catalog.models import model
    from kvlab.serving.capacity import Settings, plan
    from kvlab.serving.workloads import synthetic
    lengths = tuple((one.prompt_tokens, one.output_tokens) for one in synthetic(AZURE, 600, 1.0, 0))
    return plan(model(name), gpu, gpus, Settings(max_len=LENGTH, tp=gpus), lengths)


def _formula(results: Results) -> Iterator[Evidence]:
    """The article's formula with its factors 1.5 … 1.3 beside the block model, which follows vLLM's logs."""
    from kvlab.catalog.gpus import gpu
    from kvlab.catalog.models import model
    from kvlab.kv.sizing import article_formula_bytes, weight_bytes
    from kvlab.serving._budget import device_memory
    spec = model(BIG)
    weights, each = given(weight_bytes(spec, 2), "weights"), article_formula_bytes(spec, LENGTH)
    free = device_memory(gpu(CARD)).value - weights
    yield catalogue("one_card", Text(f"the formula's requests of {LENGTH:,} tokens: {BIG} on one {CARD}",
                    f"按公式，一张 {CARD} 上 {BIG} 的并发数（{LENGTH} token）"), free / (each * FACTOR[0]), "count",
                    f"{spec.source}; data/device_memory.csv")
    for name, gpus, card, key in ((BIG, CARDS, CARD, "group"), (SMALL, 1, CHEAP, "small")):
        found = _plan(name, card, gpus)
        where = f"{name}, {gpus} × {card}"
        low, high = found.article.low / found.concurrency, found.article.high / found.concurrency
        yield Evidence(key, Text(f"the formula's requests ÷ the block model's, {where}, {LENGTH:,} tokens",
                       f"公式并发数 ÷ 块模型并发数，{where}，{LENGTH} token"), (low + high) / 2, "ratio",
                       "modelled", low, high, source="kvlab plan; data/models.csv, data/device_memory.csv")
    found = _plan(BIG, CARD, CARDS)
    mean = next(line.requests for line in found.lengths if line.name == "mean, complete")
    yield catalogue("mean_length", Text(f"block model: requests of {AZURE}'s mean length ÷ of {LENGTH:,} tokens",
                    f"块模型：{AZURE} 平均长度的并发数 ÷ {LENGTH} token 的并发数"), mean / found.concurrency,
                    "ratio", "kvlab plan; data/workloads.csv", n=600)


def _near(found: Found) -> Verdict:
    card, mean = found["one_card"], found["mean_length"]
    both = [found["group"], found["small"]]
    far = [one.below(1 - CLOSE) or one.above(1 + CLOSE) for one in both]
    inside = [one.above(1 - CLOSE) and one.below(1 + CLOSE) for one in both]
    en = (f"for one card it gives {card.value:.0f} requests of a 72B model; for its group of {CARDS} "
          f"{times(both[0])} of the block model, for an 8B model on a {CHEAP} {times(both[1])}; at a workload's mean "
          f"length {mean.value:.1f} × as many fit")
    zh = (f"72B 模型按单卡算得到 {card.value:.0f} 个请求；按 {CARDS} 卡组算是块模型的 {times(both[0])}，"
          f"8B 模型在 {CHEAP} 上是 {times(both[1])}；按负载平均长度可容纳 {mean.value:.1f} 倍")
    if all(far):
        return refuted(en, zh)
    return supported(en, zh) if card.value > 0 and all(inside) and mean.below(1 + CLOSE) else conditional(en, zh)


def _share(name: str, about: Text, hits: int, n: int, source: str) -> Evidence:
    """A share of n servers with its exact interval."""
    from kvlab.record.statistics import share
    part = share(hits, n)
    return Evidence(name, about, part.value, "share", "quoted", part.low, part.high, n, source)


def _factors(results: Results) -> Iterator[Evidence]:
    from kvlab.record.asked import asked
    low, high = FACTOR
    texts = {"within": Text(f"server starts, of published logs at hand, that need a factor of {low} to {high}",
                            f"手头公开日志中，所需系数在 {low}–{high} 之间的服务器占比"),
             "enough": Text(f"the same, for which a factor of {high} is large enough",
                            f"同上，系数取 {high} 足够的占比")}
    table = results.rows("capacity")
    factors = table if table is None else asked(table[table["metric"] == "safety_factor"], "budget")
    if factors is None or factors.empty:
        for name, about in texts.items():
            yield results.lacking("capacity", name, about)
    else:
        source, needed = results.source("capacity"), factors["value"].dropna()
        for name, hits in (("within", needed.between(low, high).sum()), ("enough", (needed <= high).sum())):
            yield _share(name, texts[name], int(hits), len(factors), source)
    yield results.finding("capacity", "safety factor", Text(
        "(VRAM − weights) ÷ the pool that a server's log prints: median, least, most",
        "（显存 − 权重）÷ 日志打印的 KV 池：中位数、最小、最大"), name="needed")


def _factor_fits(found: Found) -> Verdict:
    within, enough, needed = found["within"], found["enough"], found["needed"]
    least, most = (needed.value if end is None else end for end in (needed.low, needed.high))
    en = (f"{least:.2f} to {most:.2f} was needed, {needed.value:.2f} in the median; {FACTOR[0]} to {FACTOR[1]} on "
          f"{within.value:.0%} of {within.n} servers, and {FACTOR[1]} is large enough on {enough.value:.0%} "
          "(those that could not start: not)")
    zh = (f"实际所需系数为 {least:.2f}–{most:.2f}，中位数 {needed.value:.2f}；{within.n} 台服务器中 "
          f"{within.value:.0%} 落在 {FACTOR[0]}–{FACTOR[1]}，取 {FACTOR[1]} 足够的占 {enough.value:.0%}"
          "（无法启动的算不足）")
    if within.above(0.5):
        return supported(en, zh)
    if within.above(0.5) is None or enough.below(SAFE) is None:
        return inconclusive(en, zh, Text("logs of more servers that print the weights and the pool",
                                         "更多打印权重与 KV 池大小的服务器日志"))
    return refuted(en, zh) if enough.below(SAFE) else conditional(en, zh)


def _reserve(results: Results) -> Iterator[Evidence]:
    found = _plan(BIG, CARD, CARDS)
    where, source = f"{BIG}, {CARDS} × {CARD}", "kvlab plan; data/engine_budgets.csv"
    taken = [term for term in found.terms if term.name not in ("VRAM", "weights")]
    yield results.quoted("c69_autograd_off", name="autograd_off")
    yield catalogue("gradient_terms", Text("terms of an engine's memory budget that hold gradients",
                    "引擎显存预算中存放梯度的项数"), sum("grad" in term.name for term in taken), "count", source,
                    n=len(taken))
    value, low, high = (float(sum(getattr(term, end) for term in taken)) for end in ("value", "low", "high"))
    yield Evidence("temporary", Text(f"activation peak, CUDA graphs and libraries' buffers on each GPU, {where}",
                   f"每张 GPU 的激活峰值、CUDA graph 与库缓冲，{where}"), value, "B", "modelled", low, high,
                   source=source)


def _gradients(found: Found) -> Verdict:
    off, terms, extra = found["autograd_off"], found["gradient_terms"], found["temporary"]
    gib = extra.value / 2**30
    if off.value and not terms.value:
        return refuted(f"inference computes no gradients; what is allocated beside weights and KV is {gib:.1f} GiB a "
                       "GPU here", f"推理不计算梯度；权重与 KV 之外的分配在此例中为每张 GPU {gib:.1f} GiB")
    if terms.value and not off.value:
        return supported(f"the engine differentiates, and its budget keeps gradients beside {gib:.1f} GiB",
                         f"引擎启用自动求导，其预算除 {gib:.1f} GiB 外还有梯度")
    return conditional("the engine's code and its budget disagree on gradients", "引擎代码与显存预算在梯度上不一致")


CLAIMS = (
    Claim("C67", Text("Requests per card = (VRAM − weights) ÷ (KV of one request × a safety factor)",
                      "单卡并发数 =（GPU 显存 − 模型权重）÷（单请求 KV Cache × 安全系数）"),
          "(VRAM − weights) ÷ (KV × factor)", _formula, _near, figure="kv_budget", command=COMMAND),
    Claim("C68", Text("The safety factor should be 1.3 to 1.5", "安全系数建议 1.3–1.5"), "1.3–1.5", _factors,
          _factor_fits, ("capacity",), "capacity"),
    Claim("C69", Text("… which keeps room for gradient peaks and temporary allocations",
                      "……预留给梯度峰值和临时分配"), "gradient peak", _reserve, _gradients, command=COMMAND),
)
