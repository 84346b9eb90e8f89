"""Claims of section 5 that are one number each: what FP8 and INT8 KV caches give in speed and cost in accuracy."""
from __future__ import annotations

from math import hypot, sqrt
from statistics import NormalDist

from kvlab.claims._base import Claim, Evidence, Found, Verdict, conditional, inconclusive, refuted, supported
from kvlab.claims._kv_evidence import FP8, FP8_SCHEMES, INT8, bytes_ratio, interval, loss, minus_fp8, percent, scored
from kvlab.claims._kv_speed import gain, on_a_cpu, published_gains, steps
from kvlab.claims._results import Results, catalogue
from kvlab.lang import Text

SECTION = 5
SAID_FP8, SAID_INT8 = 0.08, 0.05        # of a step's speed. Source: the article's table
ONE_NUMBER = 0.02       # points around the article's number inside which every step must lie for it to be one number
VALID = 0.03            # points by which bytes alone may miss published speed-ups and still be called right
LOSS_FP8, LOSS_INT8 = 0.001, (0.001, 0.003)     # of accuracy, metric unstated. Source: the article's table
RIGHT = 0.928           # share of right answers assumed for a benchmark: that of the 16-bit run in data/facts.csv
WIDTH = NormalDist().inv_cdf(0.975)             # half-width of a 95 % interval in standard errors
INT8_SCHEMES = {"tensor": (INT8, "per tensor", "按张量"), "head": ("int8/head", "per head", "按 head"),
                "channel": ("int8/channel", "per channel", "按通道"), "token": ("int8/token", "per token", "按 token")}


def _fp8_speed(results: Results):
    yield from steps(results, FP8)
    yield from published_gains(results)
    yield results.quoted("c47_a100_decode_16k")
    yield on_a_cpu(results, "fp8_e4m3/token", "cpu")


def _int8_speed(results: Results):
    yield from steps(results, "int8/token")
    yield from published_gains(results)
    yield bytes_ratio("int8", INT8, "INT8 without scales per token", "不带逐 token 缩放因子的 INT8")
    yield bytes_ratio("fp8", FP8, "FP8 without scales", "不带缩放因子的 FP8")
    for key in ("c48_lmdeploy_llama2_7b", "c48_lmdeploy_internlm2_7b", "c45_a100_int8_1", "c45_a100_int8_100",
                "c45_a100_int8_300"):
        yield gain(results.quoted(key, name=key.partition("_")[2]))
    yield on_a_cpu(results, "int8/token", "cpu")
    yield on_a_cpu(results, "fp8_e4m3/token", "cpu_fp8")


def _as_one_number(found: Found, said: float) -> Verdict:
    """Whether every step gains about what is said, some do, or none does."""
    least, most = found["least"], found["most"]
    at_16 = found.get("at_16")
    here = (f" ({percent(at_16.value, 1)} at the article's 16 × 4,096 tokens)",
            f"（文章的 16 × 4096 token 时 {percent(at_16.value, 1)}）") if at_16 else ("", "")
    en = (f"by bytes alone a step gains {percent(least.value, 1)} to {percent(most.value, 1)} over batch and "
          f"context{here[0]}")
    zh = (f"仅按字节计，随 batch 与上下文不同，一步快 {percent(least.value, 1)} 至 {percent(most.value, 1)}"
          f"{here[1]}")
    never, always = most.below(said - ONE_NUMBER), least.above(said + ONE_NUMBER)
    one = not least.below(said - ONE_NUMBER) and not most.above(said + ONE_NUMBER)
    if never:
        return refuted(f"{en}, never {said:.0%}", f"{zh}，达不到 {said:.0%}")
    if not (always or one):
        short, long = found.get("batch_short"), found.get("batch_long")
        if short and long:
            en += (f"; {said:.0%} takes batch {short.value:.0f} at the shortest context, {long.value:.0f} at the "
                   "longest")
            zh += f"；要到 {said:.0%}，最短的上下文需 batch {short.value:.0f}，最长的需 {long.value:.0f}"
        return conditional(en, zh)
    miss = found["miss"]
    if not miss.below(VALID):
        return inconclusive(f"{en}, but bytes alone miss published gains by up to {percent(miss.value, 1)}",
                            f"{zh}，但与公开数据最多差 {percent(miss.value, 1)}",
                            Text("decode times of both formats over batch and context on the GPU in question",
                                 "在目标 GPU 上按 batch 与上下文测两种格式的 decode 时间"))
    return supported(en, zh) if one else refuted(f"{en}, always more", f"{zh}，总是更多")


def _fp8_gain(found: Found) -> Verdict:
    return _as_one_number(found, SAID_FP8)


def _int8_gain(found: Found) -> Verdict:
    verdict, int8, fp8 = _as_one_number(found, SAID_INT8), found["int8"], found["fp8"]
    if int8.value == fp8.value:
        because = Text(f"{verdict.because.en}; with scales alike INT8 and FP8 store the same bytes, so only "
                       "kernels make a difference",
                       f"{verdict.because.zh}；缩放方式相同时 INT8 与 FP8 字节数相同，差别只来自 kernel")
        return Verdict(verdict.word, because, verdict.needs)
    return verdict


def questions_needed(share: float, difference: float) -> float:
    """Questions of each of two unpaired runs whose difference has a 95 % interval of ± `difference`.

    share: of right answers. Source: normal approximation, n = 2·p·(1 − p)·(1.96 ÷ difference)².
    """
    return 2 * share * (1 - share) * (WIDTH / difference)**2


def resolved(share: float, questions: float) -> float:
    """Half-width of the 95 % interval of a difference of two unpaired runs of `questions` each, as a share.

    Source: normal approximation, 1.96·√(2·p·(1 − p) ÷ n).
    """
    return WIDTH * sqrt(2 * share * (1 - share) / questions)


def _benchmark(results: Results):
    """What a benchmark of questions can tell, by arithmetic, and what a published run of one does tell."""
    items = results.quoted("c49_gsm8k_items", name="gsm8k_items")
    at = f"normal approximation, unpaired, {RIGHT:.1%} right"
    yield catalogue("questions", Text(f"Questions that tell {LOSS_FP8:.1%} apart, two unpaired runs",
                                      f"分辨 {LOSS_FP8:.1%} 之差所需的题数（两次不成对的运行）"),
                    questions_needed(RIGHT, LOSS_FP8), "count", at)
    yield items
    about = Text("Difference that GSM8K's test split tells apart, unpaired", "GSM8K 测试集能分辨的差（不成对）")
    yield catalogue("gsm8k_resolves", about, resolved(RIGHT, items.value), "share", at)


def _published_difference(results: Results, fmt: str, key: str) -> Evidence:
    """GSM8K in a format minus in 16 bits of one published run, with the 95 % interval of its standard errors."""
    ours, base = results.quoted(key), results.quoted("c49_gsm8k_16bit")
    errors = [results.quoted(f"{name}_stderr").value for name in (key, "c49_gsm8k_16bit")]
    difference, half = ours.value - base.value, WIDTH * hypot(*errors)
    n = round(base.value * (1 - base.value) / errors[1]**2) + 1         # of the standard error of a share
    about = Text(f"GSM8K, {fmt} minus 16 bits, published run of about {n} questions",
                 f"GSM8K，{fmt} 减 16 位，公开的一次运行（约 {n} 题）")
    return Evidence("published", about, difference, "share", "quoted", difference - half, difference + half, n,
                    source=base.source)


def _fp8_loss(results: Results):
    for name, (fmt, en, zh) in FP8_SCHEMES.items():
        yield loss(results, fmt, name, en, zh)
    yield from _tokens(results, FP8_SCHEMES)
    yield from _benchmark(results)
    yield _published_difference(results, "FP8", "c49_gsm8k_fp8")


def _tokens(results: Results, schemes):
    """The tokens that would bring each scheme's interval to ± 0.05 %."""
    for name, (fmt, en, zh) in schemes.items():
        yield scored(results, "tokens_needed", fmt, f"{name}_tokens", Text(
            f"Tokens for an interval of ±0.05 %, {en}", f"区间缩到 ±0.05% 所需 token 数，{zh}"))


def _below_a_tenth(found: Found) -> Verdict:
    """Below the article's bound in every scheme, above it in every one, or not to be told."""
    losses = {name: found[name] for name in FP8_SCHEMES}
    told = {name: one.below(LOSS_FP8) for name, one in losses.items()}
    en = "perplexity of the one model scored: " + "; ".join(
        f"{FP8_SCHEMES[name][1]} {interval(one).en}" for name, one in losses.items())
    zh = "所测的这一个模型的困惑度：" + "；".join(
        f"{FP8_SCHEMES[name][2]} {interval(one).zh}" for name, one in losses.items())
    if None not in told.values():
        return (supported if all(told.values()) else conditional if any(told.values()) else refuted)(en, zh)
    for name in (settled := [name for name, below in told.items() if below is not None]):
        en += f"; {FP8_SCHEMES[name][1]} is {'below' if told[name] else 'above'} {LOSS_FP8:.1%}"
        zh += f"；{FP8_SCHEMES[name][2]}{'低于' if told[name] else '高于'} {LOSS_FP8:.1%}"
    if settled:
        en, zh = f"{en}, the rest is open", f"{zh}，其余未决"
    return inconclusive(f"the metric is not said; {en}", f"文章没有说是什么指标；{zh}", _more(found, told))


def _more(found: Found, told) -> Text:
    """How many tokens, and how many questions of a benchmark, would tell."""
    tokens = [found.get(f"{name}_tokens") for name, is_below in told.items() if is_below is None]
    most = max((one.value for one in tokens if one), default=None)
    questions = found["questions"]
    en = f"about {_about(questions.value):,} questions of a benchmark for ±{LOSS_FP8:.1%} (two unpaired runs)"
    zh = f"约 {_about(questions.value)} 道基准题才能分辨 ±{LOSS_FP8:.1%}（两次不成对的运行）"
    if most is None:
        return Text(en, zh)
    return Text(f"about {_about(most):,} tokens of such texts for ±0.05 % of perplexity; {en}",
                f"约 {_about(most)} 个同类文本的 token，困惑度区间才到 ±0.05%；{zh}")


def _about(count: float) -> int:
    """A sample size to two digits: more would claim what an estimate of it does not know."""
    return int(float(f"{count:.1e}"))


def _int8_loss(results: Results):
    for name, (fmt, en, zh) in INT8_SCHEMES.items():
        yield loss(results, fmt, name, f"INT8, scale {en}", f"INT8，缩放因子{zh}")
    for name, fp8, en, zh in (("tensor", "fp8_e4m3/tensor", "the same scales", "缩放方式相同"),
                              ("token", "fp8_e4m3/token", "the same scales", "缩放方式相同"),
                              ("channel", FP8, "FP8 has no scales", "FP8 不带缩放因子"),
                              ("head", FP8, "FP8 has no scales", "FP8 不带缩放因子")):
        _, scale_en, scale_zh = INT8_SCHEMES[name]
        yield minus_fp8(results, INT8_SCHEMES[name][0], fp8, f"{name}_minus_fp8", Text(
            f"KL of INT8 minus FP8, scale {scale_en} ({en})", f"KL：INT8 减 FP8，缩放因子{scale_zh}（{zh}）"))
    yield from _tokens(results, INT8_SCHEMES)
    yield from _benchmark(results)
    yield _published_difference(results, "INT8", "c50_gsm8k_int8")
    for key in ("c50_lmdeploy_gsm8k_internlm2", "c50_lmdeploy_gsm8k_qwen15"):
        yield results.quoted(key)


def _worse_than_fp8(found: Found) -> Verdict:
    """By the order of INT8 and FP8 with scales alike first; then by INT8's own loss."""
    from kvlab.accuracy.statistics import Estimate, inside
    order = {name: found[f"{name}_minus_fp8"] for name in ("tensor", "token")}
    order |= {name: one for name in ("channel", "head") if (one := found.get(f"{name}_minus_fp8"))}
    worse = [INT8_SCHEMES[name] for name, one in order.items() if one.above(0)]
    better = [INT8_SCHEMES[name] for name, one in order.items() if one.above(0) is False]
    told = {}
    for name in INT8_SCHEMES:
        one = found[name]
        verdict = inside(Estimate(one.value, one.value if one.low is None else one.low,
                                  one.value if one.high is None else one.high, one.n or 1), *LOSS_INT8)
        told[name] = {"inside": True, "outside": False}.get(verdict)
    within = [name for name, yes in told.items() if yes]
    open_ = [name for name, yes in told.items() if yes is None]
    en = (f"by KL on the one model scored INT8 is worse than FP8 with these scales: {_listed(worse, 1)}; better with: "
          f"{_listed(better, 1)} (per tensor and per token beside FP8 with the same scales, else FP8 without); a "
          f"perplexity loss of 0.1 to 0.3 % is shown in {len(within)} of {len(told)} schemes, open in {len(open_)}")
    zh = (f"按所测的这一个模型的 KL，INT8 差于 FP8 的缩放方式：{_listed(worse, 2)}；好于 FP8 的：{_listed(better, 2)}"
          "（按张量、按 token 与缩放方式相同的 FP8 比，其余与不带缩放因子的 FP8 比）；"
          f"困惑度损失 0.1% 至 0.3%：{len(told)} 种中得证 {len(within)} 种，未决 {len(open_)} 种")
    if worse and better:
        return conditional(en, zh)
    if better:
        return refuted(en, zh)
    if worse and len(within) == len(told):
        return supported(en, zh)
    if worse and not open_:
        return conditional(en, zh)
    return inconclusive(en, zh, _more(found, told))


def _listed(schemes, language: int) -> str:
    """Schemes by name in English (1) or Chinese (2)."""
    between, nothing = ((", ", "none"), ("、", "无"))[language - 1]
    return between.join(one[language] for one in schemes) or nothing


CLAIMS = (
    Claim("C47", Text("An FP8 KV cache makes inference 8 % faster", "FP8 KV Cache 让推理快 8%"), "+8%", _fp8_speed,
          _fp8_gain, studies=("kernels",), figure="format_speed"),
    Claim("C48", Text("An INT8 KV cache makes inference 5 % faster", "INT8 KV Cache 让推理快 5%"), "+5%", _int8_speed,
          _int8_gain, studies=("kernels",), figure="format_speed"),
    Claim("C49", Text("An FP8 KV cache loses less than 0.1 % of accuracy", "FP8 KV Cache 的精度损失低于 0.1%"), "<0.1%",
          _fp8_loss, _below_a_tenth, studies=("kv_quant",), figure="kv_quant"),
    Claim("C50", Text("An INT8 KV cache loses 0.1 to 0.3 % of accuracy, more than FP8",
                      "INT8 KV Cache 的精度损失为 0.1% 至 0.3%，比 FP8 大"), "0.1%-0.3%", _int8_loss, _worse_than_fp8,
          studies=("kv_quant",), figure="kv_quant"),
)
