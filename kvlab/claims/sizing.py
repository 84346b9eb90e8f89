"""Claims of section 2: the one-line formula of the cache's size, and the numbers put into it."""
from __future__ import annotations

from collections.abc import Iterator

from kvlab.claims import _steps
from kvlab.claims._base import Claim, Evidence, Found, Verdict, conditional, refuted, supported
from kvlab.claims._results import Results, catalogue, given
from kvlab.lang import Text
from kvlab.shapes import ModelSpec

SECTION = 2
MODEL = _steps.MODEL
TOKENS = 4096                   # the article's example
SAID_PARTS = {"layers": 80, "head_dim": 128, "kv_heads": 8}
SAID_ITEM = 2                   # bytes per element
SAID_BYTES = 1_342_177_280
SAID_GB, ROUNDED = 1.25, 0.005  # the article's GB, and what its two decimals round away
EXACT = 0.001                   # by how much an exact formula may miss the bytes, as a share
FAR_OFF = 1.5                   # times the bytes: a plan made with the formula is then wrong by half and more
WIDE = 16                       # ranks of tensor parallelism, twice the article's model's KV heads


def example() -> tuple[ModelSpec, str]:
    """The article's model and its source."""
    from kvlab.catalog.models import model
    spec = model(MODEL)
    return spec, f"{spec.name}, {spec.source}"


def over_truth(spec: ModelSpec, kv_len: int | None = None) -> float:
    """The formula's bytes over the true ones in 16 bits, at kv_len tokens (default: the model's whole context)."""
    from kvlab.kv.sizing import article_formula_bytes, kv_bytes
    kv_len = kv_len or given(spec.context, "a context")
    return article_formula_bytes(spec, kv_len) / kv_bytes(spec, kv_len, "bf16")


def _formula(results: Results) -> Iterator[Evidence]:
    """Where the formula is exact, how far off it is elsewhere, and what it leaves out even where it is exact."""
    from kvlab.catalog.models import model, models
    (spec, source), k3 = example(), model("moonshotai/Kimi-K3")
    ratios, csv = [over_truth(one) for one in models().values() if one.context], "data/models.csv"
    yield catalogue("exact", Text("models of which it gives the bytes at their whole context",
                                  "在最大上下文处公式准确的模型占比"),
                    sum(abs(one - 1) <= EXACT for one in ratios) / len(ratios), "share", csv, n=len(ratios))
    yield catalogue("own", Text(f"formula ÷ bytes of one sequence of {spec.name}",
                                f"{spec.name} 单条序列：公式 ÷ 实际字节"), over_truth(spec, TOKENS), "ratio", source)
    yield catalogue("far_off", Text("models of which it gives more than 1.5 × the bytes",
                                    "公式结果超过实际 1.5 倍的模型占比"),
                    sum(one > FAR_OFF for one in ratios) / len(ratios), "share", csv, n=len(ratios))
    yield catalogue("kimi_k3", Text(f"formula ÷ bytes of one sequence of {k3.name}",
                                    f"{k3.name} 单条序列：公式 ÷ 实际字节"),
                    over_truth(k3), "ratio", f"{k3.name}, {k3.source}")
    yield from _left_out(results)


def _left_out(results: Results) -> Iterator[Evidence]:
    """What the formula does not know: copies, scales, constant states, whole blocks."""
    from kvlab.catalog.models import model
    from kvlab.kv.sizing import kv_bytes, state_bytes
    (spec, source), k3 = example(), model("moonshotai/Kimi-K3")
    yield catalogue("copies", Text(f"bytes on all ranks at tp {WIDE} ÷ one sequence's",
                                   f"tp {WIDE} 时各卡字节之和 ÷ 单份字节"),
                    WIDE * kv_bytes(spec, TOKENS, "bf16", tp=WIDE) / kv_bytes(spec, TOKENS, "bf16"), "ratio", source)
    yield catalogue("scales", Text("int8 with a scale per token and head ÷ formula with 1 byte",
                                   "int8（每 token 每头一个 scale）÷ dtype_bytes 取 1 的公式"),
                    SAID_ITEM * kv_bytes(spec, TOKENS, "int8/token") / kv_bytes(spec, TOKENS, "bf16"), "ratio",
                    source)
    yield catalogue("state", Text(f"constant state of {k3.name} per sequence, unknown to the formula",
                                  f"{k3.name} 每条序列的常量状态，公式未计"),
                    state_bytes(k3), "B", f"{k3.name}, {k3.source}")
    yield results.finding("paging", "waste at 16", name="blocks", unit="share", about=Text(
        "room left unused in blocks of 16, over the tokens held", "16 token 的块中闲置空间 ÷ 已存 token"))


def _exactness(found: Found) -> Verdict:
    own, exact, far, k3 = (found[name] for name in ("own", "exact", "far_off", "kimi_k3"))
    copies, scales = found["copies"], found["scales"]
    if abs(own.value - 1) > EXACT:
        return refuted(f"for its own model it gives {own.value:.3g} × the bytes",
                       f"对文中的模型，结果是实际的 {own.value:.3g} 倍")
    left_out = copies.value > 1 + EXACT or scales.value > 1 + EXACT
    if exact.value == 1 and not left_out:
        return supported(f"it gives the bytes of all {exact.n} models", f"对全部 {exact.n} 个模型都准确")
    en = (f"exact for one sequence of {exact.value:.0%} of {exact.n} models; more than {FAR_OFF} × the bytes for "
          f"{far.value:.0%}, and {k3.value:.3g} × for Kimi K3; it leaves out copies ({copies.value:.3g} × at tp "
          f"{WIDE}), scales ({scales.value - 1:+.1%} in int8), whole blocks and states")
    zh = (f"{exact.n} 个模型中 {exact.value:.0%} 的单条序列准确；{far.value:.0%} 的结果超过实际的 {FAR_OFF} 倍，"
          f"Kimi K3 为 {k3.value:.3g} 倍；未计 KV 头副本（tp {WIDE} 时 {copies.value:.3g} 倍）、"
          f"scale（int8 时 {scales.value - 1:+.1%}）、块取整和状态")
    return conditional(en, zh)


def _parts(results: Results) -> Iterator[Evidence]:
    spec, source = example()
    values = {"layers": spec.num_layers, "head_dim": spec.head_dim, "kv_heads": spec.num_kv_heads}
    for name, about in (("layers", Text("layers of Qwen2-72B", "Qwen2-72B 的层数")),
                        ("head_dim", Text("width of a head", "每个头的宽度 head_dim")),
                        ("kv_heads", Text("KV heads", "KV 头数"))):
        yield Evidence(name, about, float(values[name]), "count", "quoted", source=source)


def _as_said(found: Found) -> Verdict:
    values = {name: found[name].value for name in SAID_PARTS}
    wrong = {name: value for name, value in values.items() if value != SAID_PARTS[name]}
    en = ", ".join(f"{name} {value:.0f}" for name, value in (wrong or values).items())
    zh = en.replace(", ", "，")
    if not wrong:
        return supported(f"the configuration has {en}", f"配置文件中为 {zh}")
    if len(wrong) < len(values):
        return conditional(f"not all of them: the configuration has {en}", f"部分不符：配置文件中为 {zh}")
    return refuted(f"the configuration has {en}", f"配置文件中为 {zh}")


def _item(results: Results) -> Iterator[Evidence]:
    from kvlab.kv.sizing import kv_bytes
    spec, source = example()
    elements = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * TOKENS
    yield catalogue("fp16", Text("bytes of one element of the cache in FP16", "FP16 下 KV Cache 每个元素的字节数"),
                    kv_bytes(spec, TOKENS, "fp16") / elements, "B", f"{source}; format fp16 of kvlab ls formats")
    yield results.quoted("c10_qwen2_72b_item", name="own")
    yield results.quoted("c10_vllm_auto", name="auto")


def _two_bytes(found: Found) -> Verdict:
    fp16, own, auto = found["fp16"], found["own"], found.get("auto")
    follows = auto is not None and auto.value == 1
    if fp16.value != SAID_ITEM:
        return refuted(f"an element takes {fp16.value:g} bytes", f"每个元素占 {fp16.value:g} 字节")
    if own.value != SAID_ITEM:
        return conditional(f"in FP16; the checkpoint's own type takes {own.value:g} bytes",
                           f"FP16 下成立；权重文件自身的类型占 {own.value:g} 字节")
    return supported("FP16 takes 2 bytes, as does the checkpoint's BF16" + ", which vLLM's default follows" * follows,
                     "FP16 占 2 字节，权重文件自身的 BF16 也是 2 字节" + "，vLLM 默认沿用它" * follows)


def _example_bytes(results: Results) -> Iterator[Evidence]:
    from kvlab.kv.sizing import engine_bytes, kv_bytes
    spec, source = example()
    yield catalogue("bytes", Text(f"bytes of {TOKENS:,} tokens in FP16", f"{TOKENS} token 的字节数（FP16）"),
                    kv_bytes(spec, TOKENS, "fp16"), "count", source)
    yield catalogue("in_blocks", Text("the same in an engine's blocks of 16 tokens",
                                      "放进引擎 16 token 的块后的字节数"),
                    engine_bytes(spec, TOKENS, "fp16"), "count", source)


def _same_bytes(found: Found) -> Verdict:
    value, blocks = found["bytes"].value, found.get("in_blocks")
    en, zh = f"it is {value:,.0f} bytes", f"为 {value:,.0f} 字节"
    if value != SAID_BYTES:
        return refuted(en, zh)
    if blocks is not None and blocks.value != value:
        return conditional(f"{en}, but {blocks.value:,.0f} in an engine's blocks",
                           f"{zh}，放进引擎的块后为 {blocks.value:,.0f} 字节")
    return supported(f"{en}, in an engine's blocks as well" if blocks else en,
                     f"{zh}，放进引擎的块后也一样" if blocks else zh)


def _in_units(results: Results) -> Iterator[Evidence]:
    for name, unit, scale, power in (("gb", "GB", 1e9, "10⁹"), ("gib", "GiB", 2**30, "2³⁰")):
        yield catalogue(name, Text(f"{SAID_BYTES:,} bytes in {unit} ({power} bytes)",
                                   f"{SAID_BYTES:,} 字节，单位 {unit}（{power} 字节）"),
                        SAID_BYTES / scale, unit, "arithmetic")


def _unit(found: Found) -> Verdict:
    gb, gib = found["gb"], found["gib"]
    en, zh = f"it is {gb.value:.3f} GB or {gib.value:.3f} GiB", f"为 {gb.value:.3f} GB，即 {gib.value:.3f} GiB"
    if abs(gb.value - SAID_GB) <= ROUNDED:
        return supported(en, zh)
    if abs(gib.value - SAID_GB) <= ROUNDED:
        more = gb.value / gib.value - 1
        return conditional(f"in GiB, not in GB, which differ by {more:.1%}: {en}",
                           f"单位是 GiB 时成立，GB 则差 {more:.1%}：{zh}")
    return refuted(en, zh)


SIZE = f"kvlab size {MODEL} --kv-len {TOKENS}"
CLAIMS = (
    Claim("C08", Text("2 × layers × tokens × head_dim × KV heads × bytes is the exact size of the cache",
                      "2 × 层数 × token 数 × head_dim × KV 头数 × 字节数，即 KV Cache 的精确大小"), "2·L·n·d·h·b",
          _formula, _exactness, studies=("paging",), figure="kv_size", command="kvlab size Kimi-K3 --kv-len 1048576"),
    Claim("C09", Text("Qwen2-72B has 80 layers, heads of 128 and 8 KV heads",
                      "Qwen2-72B 有 80 层，head_dim 为 128，KV 头 8 个"), "80, 128, 8", _parts, _as_said, command=SIZE),
    Claim("C10", Text("An element takes 2 bytes (FP16)", "每个元素 2 字节（FP16）"), "2 B", _item, _two_bytes,
          command=SIZE),
    Claim("C11", Text("4,096 tokens of Qwen2-72B take 1,342,177,280 bytes",
                      "Qwen2-72B 的 4096 token 占 1,342,177,280 字节"),
          "1,342,177,280 B", _example_bytes, _same_bytes, figure="kv_size", command=SIZE),
    Claim("C12", Text("1,342,177,280 bytes are about 1.25 GB", "1,342,177,280 字节约为 1.25 GB"), "≈ 1.25 GB",
          _in_units, _unit, command=SIZE),
)
