"""Claims of section 5 on FP8 and INT8 KV caches: bytes, accuracy, hardware, deployment."""
from __future__ import annotations

from kvlab.claims._base import (
    Claim,
    Found,
    Verdict,
    conditional,
    inconclusive,
    outdated,
    refuted,
    supported,
)
from kvlab.claims._kv_evidence import FP8, FP8_SCHEMES, INT8, MODEL, TOKENS, bytes_ratio, interval, loss, scored
from kvlab.claims._results import Results, catalogue
from kvlab.lang import Text

SECTION = 5
HALF = 0.55             # of the 16-bit bytes and less counts as half: scales may take up to a tenth of the codes
SMALL = 0.01            # of perplexity: what "minimal" is taken to allow, ten times the article's own "< 0.1 %"
FREE = 0.001            # of perplexity: the article's "< 0.1 %", what switching FP8 on without a check would need
NOISE = 0.02            # of a rate: run-to-run variation that vllm-project/vllm#49077 states of such figures
GIB, SAME_SIZE = 2**30, 0.01        # the article's "GB" are GiB by its own arithmetic; within 1 % is its number
MORE = Text("more tokens: kv_quant's rows tokens_needed say how many", "更多 token：数量见 kv_quant 的 tokens_needed")
SAID_16, SAID_8 = 1.25 * GIB, 0.625 * GIB


def _halved(results: Results):
    from kvlab.catalog.models import models
    from kvlab.kv.sizing import kv_bytes
    yield bytes_ratio("fp8", FP8, "FP8 without scales", "不带缩放因子的 FP8")
    yield bytes_ratio("fp8_token", "fp8_e4m3/token", "FP8 with an fp32 scale per token and head",
                      "每 token、每 head 一个 fp32 缩放因子的 FP8")
    ratios = {name: kv_bytes(spec, TOKENS, "fp8_e4m3/token") / kv_bytes(spec, TOKENS, "bf16")
              for name, spec in models().items()}
    worst = max(ratios, key=ratios.__getitem__)
    about = Text(f"The same, the catalogue's worst model ({worst})", f"同上，模型库中最差者（{worst}）")
    yield catalogue("worst", about, ratios[worst], "ratio", "kvlab.kv.sizing over data/models.csv", n=len(ratios))
    yield results.quoted("c40_l4_fp8_tokens")
    yield results.quoted("c40_a100_fp8_tokens")


def _halves(found: Found) -> Verdict:
    bare, worst = found["fp8"], found["worst"]
    en, zh = f"FP8 takes {bare.value:.1%} of the 16-bit bytes", f"FP8 占 16 位字节数的 {bare.value:.1%}"
    if not bare.below(HALF):
        return refuted(en, zh)
    told = (f"{en}, and with a scale per token and head at most {worst.value:.1%}",
            f"{zh}，加上每 token、每 head 的缩放因子至多 {worst.value:.1%}")
    return supported(*told) if worst.below(HALF) else conditional(*told)


def _fp8_losses(results: Results):
    for name, (fmt, en, zh) in FP8_SCHEMES.items():
        yield loss(results, fmt, name, en, zh)
    for name, fmt in (("top1_plain", FP8), ("top1_token", "fp8_e4m3/token")):
        yield scored(results, "top1_agreement", fmt, name, Text(f"Same likeliest token as with fp32, {fmt}",
                                                                f"首选 token 与 fp32 相同的比例，{fmt}"), unit="share")
    yield results.quoted("c41_gsm8k_scales_lost")
    yield results.quoted("c41_gsm8k_scales_there")


def _minimal(found: Found) -> Verdict:
    plain, token = found["plain"], found["token"]
    small = [one.below(SMALL) for one in (plain, token)]
    en = (f"perplexity of the one model scored changes by {interval(token).en} with a scale per token and head, by "
          f"{interval(plain).en} without scales; minimal is taken as below {SMALL:.0%}")
    zh = (f"所测的这一个模型：每 token、每 head 有缩放因子时困惑度变化 {interval(token).zh}，不带缩放因子时 "
          f"{interval(plain).zh}；以低于 {SMALL:.0%} 为“极小”")
    if all(small):
        return supported(en, zh)
    if any(small):
        return conditional(*_where_small(small, en, zh))
    if small == [False, False]:
        return refuted(en, zh)
    return inconclusive(en, zh, MORE)


def _where_small(small: list[bool | None], en: str, zh: str) -> tuple[str, str]:
    """Adds which of the two, without scales and with one per token and head, is shown to be small."""
    with_en, with_zh = ("without scales", "不带缩放因子") if small[0] else ("with scales", "带缩放因子")
    return f"{en}: so it is shown {with_en} only", f"{zh}：仅{with_zh}时得证"


def _fp8_units(results: Results):
    from kvlab.catalog.gpus import format_support, gpus
    native = {name: (spec, format_support(spec, FP8).word == "native") for name, spec in gpus().items()
              if spec.vendor == "NVIDIA" and spec.compute_capability}
    source = "data/gpus.csv, data/gpu_formats.csv"
    ampere = [yes for spec, yes in native.values() if spec.arch.startswith("Ampere")]
    later = [yes for spec, yes in native.values() if spec.arch.startswith(("Ada", "Hopper", "Blackwell"))]
    yield catalogue("ampere", Text("Ampere GPUs of the catalogue whose matrix units multiply FP8",
                                   "型号库里矩阵单元能直接算 FP8 的 Ampere GPU 占比"),
                    sum(ampere) / len(ampere), "share", source, n=len(ampere))
    yield catalogue("later", Text("The same of Ada, Hopper and Blackwell", "同上，Ada、Hopper 与 Blackwell"),
                    sum(later) / len(later), "share", source, n=len(later))
    yield catalogue("lowest", Text("Lowest compute capability that multiplies FP8", "能直接算 FP8 的最低计算能力"),
                    min(float(spec.compute_capability or "inf") for spec, yes in native.values() if yes),
                    "compute capability", source)
    yield results.quoted("c42_triton_fp8_below_8_9")


def _ampere_native(found: Found) -> Verdict:
    ampere, later, lowest = found["ampere"], found["later"], found["lowest"]
    en = (f"{ampere.value:.0%} of {ampere.n} Ampere GPUs and {later.value:.0%} of {later.n} later ones multiply FP8; "
          f"it begins at compute capability {lowest.value:g}")
    zh = (f"{ampere.n} 款 Ampere GPU 中 {ampere.value:.0%}、之后的 {later.n} 款中 {later.value:.0%} 能直接算 FP8；"
          f"计算能力 {lowest.value:g} 起才有")
    if ampere.value == 0:
        return refuted(f"{en}: Ampere can only store FP8", f"{zh}：Ampere 只能用 FP8 存储")
    return supported(en, zh) if ampere.value == later.value == 1 else conditional(en, zh)


def _calibration(results: Results):
    en, zh = "KL to the fp32 cache, INT8 with {}", "与 fp32 缓存的 KL，INT8，{}"
    yield scored(results, "kl", "int8/token", "dynamic", Text(en.format("a scale per token, no calibration"),
                                                              zh.format("每 token 一个缩放因子，不校准")))
    yield scored(results, "kl", INT8, "calibrated", Text(en.format("a calibrated scale per tensor"),
                                                         zh.format("每张量一个校准缩放因子")))
    for size in (8, 16, 32):                # the ranges that kv_quant guesses
        about = Text(en.format(f"a scale per tensor guessed for values up to ±{size}"),
                     zh.format(f"每张量一个猜测的缩放因子（±{size}）"))
        yield scored(results, "kl", f"{INT8}, guessed range ±{size}", f"guessed_{size}", about)
    for key in ("lmdeploy_data_free", "lmdeploy_offline_removed", "vllm_int8_per_token_head",
                "lmdeploy_from_capability"):
        yield results.quoted(f"c43_{key}", name=key)


def _needs_calibration(found: Found) -> Verdict:
    dynamic, fixed = found["dynamic"], found["calibrated"]
    en = (f"with scales taken while running KL is {dynamic.value:.2g} nat, with calibrated ones {fixed.value:.2g} "
          f"(n = {dynamic.n} tokens, one model)")
    zh = (f"运行时取缩放因子，KL 为 {dynamic.value:.2g} nat；校准的为 {fixed.value:.2g}"
          f"（n = {dynamic.n} token，一个模型）")
    worse = dynamic.above(fixed.value if fixed.high is None else fixed.high)
    if worse:
        return supported(en, zh)
    if not dynamic.below(fixed.value if fixed.low is None else fixed.low):
        return inconclusive(en, zh, Text("a paired difference of the two formats on more tokens",
                                         "两种格式在更多 token 上的成对差"))
    engines = [found["lmdeploy_data_free"], found["vllm_int8_per_token_head"]]
    if not any(one.value for one in engines):
        return conditional(f"{en}; but no engine looked at takes them", f"{zh}；但所查的推理引擎都不支持")
    if found["lmdeploy_offline_removed"].value:
        return outdated(f"{en}; LMDeploy dropped its calibrated method in 0.4.0, one setting is enough",
                        f"{zh}；LMDeploy 0.4.0 起移除了需要校准的方法，只需一个配置项")
    return refuted(f"{en}; engines offer it by one setting", f"{zh}；推理引擎只需一个配置项")


def _direct(results: Results):
    from kvlab.catalog.gpus import format_support, gpu
    yield loss(results, FP8, "plain", "FP8 without scales", "不带缩放因子的 FP8")
    yield bytes_ratio("fp8", FP8, "FP8 without scales", "不带缩放因子的 FP8")
    for name, spec in (("h100", gpu("H100 SXM5 80GB")), ("mi300", gpu("MI300X"))):
        support = format_support(spec, FP8)
        yield catalogue(name, Text(f"{spec.name} multiplies OCP FP8 as it is stored", f"{spec.name} 能直接算 OCP FP8"),
                        support.word == "native", "yes/no", f"data/gpu_formats.csv: {support.source}")
    for key in ("h100_fp8_best", "h100_fp8_worst", "vllm_warns_default_scale"):
        yield results.quoted(f"c44_{key}", name=key)


def _use_directly(found: Found) -> Verdict:
    size, plain, h100, mi300 = found["fp8"], found["plain"], found["h100"], found["mi300"]
    en = f"the cache shrinks to {size.value:.0%}"
    zh = f"KV 缩到 {size.value:.0%}"
    if not size.below(HALF):
        return refuted(en, zh)
    free = plain.below(FREE)
    snags = [told for told, there in (
        (("H100 does not multiply FP8", "H100 不能直接算 FP8"), not h100.value),
        (("MI300X multiplies FNUZ codes only, so OCP codes are converted first",
          "MI300X 只能算 FNUZ 编码，OCP 编码要先转换"), not mi300.value),
        ((f"without scales perplexity of the one model scored changes by {interval(plain).en}, so check accuracy",
          f"不带缩放因子时所测模型的困惑度变化 {interval(plain).zh}，应先验证精度"), free is False)) if there]
    if snags:
        return conditional(f"{en}, but: {'; '.join(told[0] for told in snags)}",
                           f"{zh}，但：{'；'.join(told[1] for told in snags)}")
    en, zh = f"{en}; perplexity changes by {interval(plain).en}", f"{zh}；困惑度变化 {interval(plain).zh}"
    return inconclusive(en, zh, MORE) if free is None else supported(en, zh)


def _a100(results: Results):
    from kvlab.catalog.gpus import format_support, gpu
    spec = gpu("A100 SXM4 80GB")
    for key in ("a100_fp8_dense", "a100_fp8_offline", "a100_int8_300", "a100_fp8_worst", "a100_fp8_8_requests",
                "a100_fp8_kernel_time", "a100_int8_100", "a100_int8_1"):
        yield results.quoted(f"c45_{key}", name=key)
    yield catalogue("native", Text(f"{spec.name} multiplies FP8 as it is stored", f"{spec.name} 能直接算 FP8"),
                    format_support(spec, FP8).word == "native", "yes/no", "data/gpu_formats.csv")


def _prefer_16_bits(found: Found) -> Verdict:
    alone, offline, full = (found[f"a100_{name}"] for name in ("fp8_dense", "fp8_offline", "int8_300"))
    slower, faster = alone.below(1 - NOISE), max(offline.value, full.value) > 1 + NOISE
    en = (f"against 16 bits on A100 FP8 KV runs at {alone.value:.2f} × for one request of a dense model, at "
          f"{offline.value:.2f} × in offline throughput (2023); INT8 at {full.value:.2f} × where 16 bits fill "
          "the cache")
    zh = (f"A100 上与 16 位相比：FP8 KV 在稠密模型单请求时为 {alone.value:.2f} 倍，离线吞吐（2023 年）为 "
          f"{offline.value:.2f} 倍；16 位占满 KV 时 INT8 为 {full.value:.2f} 倍")
    if slower and faster:
        return conditional(en, zh)
    if slower or faster:
        return supported(en, zh) if slower else refuted(en, zh)
    return inconclusive(en, zh, Text("decode times over batch sizes on an A100, with the spread of repeats",
                                     "在 A100 上按 batch 测 decode 时间，并给出重复测量的离散程度"))


def _sizes(results: Results):
    from kvlab.catalog.models import model
    from kvlab.kv.sizing import kv_bytes
    spec = model(MODEL)
    for name, fmt, tokens in (("fp16", "fp16", TOKENS), ("fp8", FP8, TOKENS), ("int8", INT8, TOKENS),
                              ("fp8_token", "fp8_e4m3/token", TOKENS), ("int8_token", "int8/token", TOKENS),
                              ("fp16_half_length", "fp16", TOKENS // 2)):
        yield catalogue(name, Text(f"One request of {tokens:,} tokens in {fmt}", f"单个请求，{tokens} token，{fmt}"),
                        kv_bytes(spec, tokens, fmt), "B", f"kvlab.kv.sizing; {spec.source}")


def _as_said(found: Found) -> Verdict:
    plain = {"fp16": SAID_16, "fp8": SAID_8, "int8": SAID_8}
    sized = {name: found[name].value for name in (*plain, "fp8_token", "int8_token")}
    near = [abs(sized[name] / said - 1) <= SAME_SIZE for name, said in plain.items()]
    scaled = max(sized["fp8_token"], sized["int8_token"])
    en = (f"at {TOKENS:,} tokens {sized['fp16'] / GIB:.3f}, {sized['fp8'] / GIB:.3f} and {sized['int8'] / GIB:.3f} "
          f"GiB (not GB); with a scale per token and head {scaled / GIB:.3f} GiB")
    zh = (f"{TOKENS} token 时为 {sized['fp16'] / GIB:.3f}、{sized['fp8'] / GIB:.3f}、{sized['int8'] / GIB:.3f} GiB"
          f"（不是 GB）；每 token、每 head 有缩放因子时为 {scaled / GIB:.3f} GiB")
    if not all(near):
        return refuted(en, zh)
    return supported(en, zh) if scaled <= SAID_8 * (1 + SAME_SIZE) else conditional(en, zh)


CLAIMS = (
    Claim("C40", Text("An FP8 KV cache takes half the memory", "FP8 KV Cache 只占一半显存"), "÷ 2", _halved, _halves,
          command=f"kvlab size {MODEL} --kv-len {TOKENS} --kv-format fp8_e4m3/token"),
    Claim("C41", Text("An FP8 KV cache costs next to no accuracy", "FP8 KV Cache 几乎不损失精度"), "minimal",
          _fp8_losses, _minimal, studies=("kv_quant",), figure="kv_quant"),
    Claim("C42", Text("GPUs from Ampere on compute in FP8 natively", "从 Ampere 起的 GPU 都能原生计算 FP8"), "Ampere+",
          _fp8_units, _ampere_native, figure="format_support", command="kvlab ls gpus"),
    Claim("C43", Text("An INT8 KV cache needs a calibration set and is harder to deploy",
                      "INT8 KV Cache 要用校准数据集，部署也更麻烦"), "calibration", _calibration, _needs_calibration,
          studies=("kv_quant",), figure="kv_quant"),
    Claim("C44", Text("On H100 and MI300, switch FP8 KV on and be done", "在 H100、MI300 上可以直接打开 FP8 KV"),
          "H100, MI300", _direct, _use_directly, studies=("kv_quant",), figure="format_support"),
    Claim("C45", Text("On A100 keep 16 bits, since decoding FP8 costs time",
                      "A100 上应保持 16 位，因为 FP8 反量化耗时"), "A100", _a100, _prefer_16_bits,
          figure="format_support"),
    Claim("C46", Text("A request's cache: 1.25 GB in FP16, 0.625 GB in FP8 or INT8",
                      "每个请求的 KV：FP16 为 1.25 GB，FP8 与 INT8 为 0.625 GB"), "1.25 / 0.625 GB", _sizes, _as_said,
          figure="kv_size", command=f"kvlab size {MODEL} --kv-len {TOKENS} --kv-format int8/token"),
)
