"""Claims of section 4 on the article's vLLM settings: GPUs, the share of memory, sequences, prefix caching."""
from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from kvlab.claims._base import (
    Claim,
    Evidence,
    Found,
    Verdict,
    absent,
    conditional,
    inconclusive,
    outdated,
    refuted,
    supported,
)
from kvlab.claims._results import Results, catalogue, given
from kvlab.lang import Text

if TYPE_CHECKING:
    from kvlab.serving.capacity import Plan

SECTION = 4
MODEL, GPU, LENGTH = "Qwen2-72B-Instruct", "A100 SXM4 80GB", 4096     # the article's example
TP, UTIL, CAP = 4, 0.90, 256                                          # its settings
# Of the card's memory: how far the modelled budget may be from start-up logs before util would mean something else
CLOSE = 0.05
YES = 0.5                                                             # between the no and the yes of a fact
PLAN = f"kvlab plan {MODEL} --gpu '{GPU}' --gpus {TP} --tp {TP} --util {UTIL} --max-len {LENGTH} --max-num-seqs {CAP}"


@cache
def _plan(gpus: int) -> Plan | str:
    """The planner's answer for that many GPUs as one tensor-parallel group; its words where the answer is no."""
    from kvlab.catalog.models import model
    from kvlab.serving.capacity import DoesNotFit, Settings, plan
    settings = Settings(tp=gpus, util=UTIL, max_num_seqs=CAP, max_len=LENGTH)
    try:
        return plan(model(MODEL), GPU, gpus, settings)
    except DoesNotFit as no:
        return str(no)


def _requests(name: str, about: Text, gpus: int) -> Evidence:
    """Requests of LENGTH tokens in the pool of so many GPUs, from worst to best budget; 0 if the weights do not fit."""
    found = _plan(gpus)
    whole, low, high = (0, 0, 0) if isinstance(found, str) else (found.requests, found.least, found.most)
    return Evidence(name, about, float(whole), "count", "modelled", float(low), float(high),
                    source=f"kvlab plan, {MODEL} on {gpus} × {GPU}, util {UTIL}")


def _divides(tp: int) -> bool:
    """Whether tp splits the query heads evenly, and the KV heads evenly or into whole copies."""
    from kvlab.catalog.models import model
    spec = model(MODEL)
    return all(layer.num_q_heads % tp == 0 and (layer.num_kv_heads % tp == 0 or tp % layer.num_kv_heads == 0)
               for layer in spec.layers)


def _four_gpus(_: Results) -> Iterator[Evidence]:
    from kvlab.catalog.models import model
    spec = model(MODEL)
    source = f"{spec.name}, {spec.source}"
    yield _requests("requests", Text(f"requests of {LENGTH:,} tokens that {TP} GPUs hold",
                                     f"{TP} 张卡能容纳的 {LENGTH:,} token 请求"), TP)
    yield catalogue("heads", Text(f"tp {TP} divides the query heads and the KV heads",
                                   f"tp {TP} 能整除 Q head 数与 KV head 数"),
                    _divides(TP), "yes/no", source)
    yield catalogue("weights", Text("weights on each GPU", "每张卡上的权重"),
                    2 * given(spec.params, "parameters") / TP, "B", source)
    yield _requests("half", Text(f"the same on {TP // 2} GPUs", f"同上，{TP // 2} 张卡"), TP // 2)
    yield _requests("twice", Text(f"the same on {2 * TP} GPUs", f"同上，{2 * TP} 张卡"), 2 * TP)


def _tp_four(found: Found) -> Verdict:
    heads, requests = found["heads"], found["requests"]
    en = f"{TP} GPUs hold {requests.value:.0f} requests of {LENGTH:,} tokens beside the weights"
    zh = f"{TP} 张卡除权重外还能容纳 {requests.value:.0f} 个 {LENGTH:,} token 的请求"
    if not heads.above(YES):
        return refuted(f"tp {TP} does not divide the heads", f"tp {TP} 不能整除 head 数")
    if not requests.above(0):
        return refuted(en, zh) if requests.value < 1 else conditional(
            f"{en}, none at the worst end of the budget", f"{zh}，按最坏预算则一个也放不下")
    if half := found.get("half"):
        en += f", {TP // 2} GPUs {half.value:.0f}"
        zh += f"，{TP // 2} 张卡为 {half.value:.0f} 个"
    return supported(en, zh)


def _share_of_memory(results: Results) -> Iterator[Evidence]:
    plan, source = _plan(TP), f"kvlab plan, {MODEL} on {TP} × {GPU}, util {UTIL}"
    kv = Text(f"KV cache's share of the GPU at {UTIL:.2f} ({TP} GPUs)",
              f"设为 {UTIL:.2f} 时 KV Cache 占显存的比例（{TP} 张卡）")
    if isinstance(plan, str):
        yield absent("kv", kv, plan, f"放不下：{plan}")
    else:
        vram = plan.terms[0].value
        yield Evidence("kv", kv, plan.pool.value / vram, "share", "modelled", plan.pool.low / vram,
                       plan.pool.high / vram, source=source)
        yield catalogue("others", Text("share of weights, activations, CUDA graphs and libraries",
                                       "权重、激活、CUDA graph 与库的比例"),
                        sum(term.value for term in plan.terms[1:]) / vram, "share", source)
    yield results.finding("capacity", "budget", Text(
        "pools in start-up logs against util × memory − the rest, of the memory: median difference",
        "启动日志中的 KV 池与 util × 显存 − 其余 之差，占显存：中位数"), name="logs", unit="share")
    yield results.quoted("c36_default_now", name="default")
    yield results.quoted("c36_default_before", name="default_before")


def _is_a_ceiling(found: Found) -> Verdict:
    logs, kv = found["logs"], found["kv"]
    en = f"pools in start-up logs are {logs.value:.1%} of the memory off such a budget (median)"
    zh = f"启动日志中的池与这样算出的预算相差显存的 {logs.value:.1%}（中位数）"
    close = logs.below(CLOSE)
    if close is None:
        return inconclusive(en, zh, Text("more start-up logs of servers: kvlab plan --from-log FILE",
                                         "需要更多服务器启动日志：kvlab plan --from-log FILE"))
    if not close:
        return refuted(en, zh)
    if kv.below(UTIL):
        return conditional(
            f"it is the ceiling of all that vLLM takes, weights included: KV gets {kv.value:.0%} of the GPU here; {en}",
            f"它是 vLLM 可用显存（含权重）的上限：这里 KV 只得到 {kv.value:.0%}；{zh}")
    return supported(en, zh)


def _sequences(results: Results) -> Iterator[Evidence]:
    from kvlab.catalog.models import model
    from kvlab.serving.capacity import Settings, longest_context
    source = f"kvlab plan --longest, {MODEL} on {TP} × {GPU}, util {UTIL}"
    yield _requests("requests", Text(f"requests of {LENGTH:,} tokens that the pool of {TP} GPUs holds",
                                     f"{TP} 张卡的池能容纳的 {LENGTH:,} token 请求"), TP)
    longest = longest_context(model(MODEL), GPU, TP, CAP, Settings(tp=TP, util=UTIL, max_num_seqs=CAP))
    yield catalogue("longest", Text(f"longest sequences of which {CAP} fit at once",
                                    f"{CAP} 条能同时放下的最长序列"), longest, "token", source)
    yield _requests("twice", Text(f"requests of {LENGTH:,} tokens that {2 * TP} GPUs hold",
                                  f"{2 * TP} 张卡能容纳的 {LENGTH:,} token 请求"), 2 * TP)
    yield results.quoted("c37_default_a100", name="default")
    yield results.quoted("c37_default_large", name="default_large")


def _is_a_cap(found: Found) -> Verdict:
    requests, longest = found["requests"], found["longest"]
    en = f"the pool of {TP} GPUs holds {requests.value:.0f} sequences of {LENGTH:,} tokens"
    zh = f"{TP} 张卡的池能容纳 {requests.value:.0f} 条 {LENGTH:,} token 的序列"
    fewer = requests.below(CAP)
    if fewer is None:
        return inconclusive(en, zh, Text("the pool in the server's start-up log: kvlab plan --from-log FILE",
                                         "需要服务器启动日志中的池大小：kvlab plan --from-log FILE"))
    if not fewer:
        return supported(en, zh)
    if longest.value < 1:
        return refuted(f"{en}: {CAP} of no length fit", f"{zh}：任何长度都放不下 {CAP} 条")
    return conditional(f"it is a cap, not a reservation: {en}; {CAP} fit up to {longest.value:,.0f} tokens each",
                       f"它是上限而非预留：{zh}；{CAP} 条只在每条不超过 {longest.value:,.0f} token 时放得下")


def _prefix_caching(results: Results) -> Iterator[Evidence]:
    yield results.quoted("c38_on_now", name="now")
    yield results.quoted("c38_on_before", name="before")


def _must_be_set(found: Found) -> Verdict:
    if not found["now"].above(YES):
        return supported("it is off unless it is set", "不设置就不开启")
    if not found["before"].above(YES):
        return outdated("it is on by default since the V1 engine; V0 had to be told",
                        "自 V1 引擎起默认开启；V0 才需要设置")
    return refuted("it has been on by default all along", "一直默认开启")


CLAIMS = (
    Claim("C35", Text("Qwen2-72B is served with a tensor parallelism of 4", "用 4 路张量并行部署 Qwen2-72B"),
          "tensor_parallel_size=4", _four_gpus, _tp_four, figure="kv_budget", command=PLAN),
    Claim("C36", Text("gpu_memory_utilization 0.90 is the utilisation of the GPU's memory",
                      "gpu_memory_utilization=0.90 即 GPU 显存利用率"), "0.90",
          _share_of_memory, _is_a_ceiling, ("capacity",), "capacity", PLAN),
    Claim("C37", Text("max_num_seqs 256 is the number of concurrent sequences",
                      "max_num_seqs=256 即最大并发序列数"), "256",
          _sequences, _is_a_cap, figure="kv_budget", command=PLAN),
    Claim("C38", Text("Prefix caching is to be switched on", "需要设置参数来启用前缀缓存"),
          "enable_prefix_caching=True", _prefix_caching, _must_be_set),
)
