"""What the claims about KV formats share: scores of the kv_quant study, ratios of sizes, and numbers in sentences."""
from __future__ import annotations

from kvlab.claims._base import Evidence
from kvlab.claims._results import Results, catalogue
from kvlab.lang import Text

MODEL = "Qwen2-72B-Instruct"                 # the article's
TOKENS = 4096                                # of the article's request
FP8, INT8 = "fp8_e4m3", "int8/tensor"        # one byte per number, at most a scale per tensor: the article's count
FP8_SCHEMES = {"plain": (FP8, "FP8 without scales", "不带缩放因子的 FP8"),
               "tensor": ("fp8_e4m3/tensor", "FP8 with a calibrated scale per tensor", "每张量一个校准缩放因子的 FP8"),
               "token": ("fp8_e4m3/token", "FP8 with a scale per token and head",
                         "每 token、每 head 一个缩放因子的 FP8")}


def scored(results: Results, metric: str, fmt: str, name: str, about: Text, *, unit: str = "") -> Evidence:
    """One score of a KV format over all texts of a kv_quant run, with its interval and the number of tokens."""
    from kvlab.record.quality import TEXTS
    return _chosen(results, name, about, unit, metric=metric, kv_format=fmt, scope=TEXTS)


def loss(results: Results, fmt: str, name: str, en: str, zh: str) -> Evidence:
    """Change of perplexity in a KV format, with the 90 % interval of two one-sided tests."""
    about = Text(f"Change of perplexity, {en} (90 % interval)", f"困惑度变化，{zh}（90 % 区间）")
    return scored(results, "perplexity_delta_90", fmt, name, about, unit="share")


def minus_fp8(results: Results, fmt: str, fp8: str, name: str, about: Text) -> Evidence:
    """KL of a format minus that of an FP8 format on the same tokens, in nat: above 0 the format is worse than FP8."""
    return _chosen(results, name, about, "", metric="kl_difference", kv_format=fmt, scope=f"minus {fp8}")


def _chosen(results: Results, name: str, about: Text, unit: str, *, metric: str, kv_format: str,
            scope: str) -> Evidence:
    table = results.rows("kv_quant")
    if table is None:
        return results.lacking("kv_quant", name, about)
    chosen = table[(table["metric"] == metric) & (table["kv_format"] == kv_format) & (table["scope"] == scope)]
    if len(chosen):
        model = chosen["model"].iloc[0]
        about = Text(f"{model}: {about.en}", f"{model}：{about.zh}")
    return results.reading("kv_quant", name, about, chosen, unit=unit)


def bytes_ratio(name: str, fmt: str, en: str, zh: str) -> Evidence:
    """Bytes of the article's request in a KV format over those in 16 bits."""
    from kvlab.catalog.models import model
    from kvlab.kv.sizing import kv_bytes
    spec = model(MODEL)
    about = Text(f"Bytes of the cache in {en} over 16 bits, {spec.name}, {TOKENS:,} tokens",
                 f"KV 字节数，{zh} ÷ 16 位（{spec.name}，{TOKENS} token）")
    return catalogue(name, about, kv_bytes(spec, TOKENS, fmt) / kv_bytes(spec, TOKENS, "bf16"), "ratio",
                     f"kvlab.kv.sizing; {spec.source}")


def percent(value: float, digits: int = 2) -> str:
    """A share with its sign, per cent."""
    return f"{100 * value:+.{digits}f} %"


def interval(one: Evidence) -> Text:
    """A share with its interval and the number of samples, as sentences show it."""
    said = percent(one.value)
    if one.low is not None:
        said += f" [{100 * one.low:+.2f}, {100 * one.high:+.2f}]"
    return Text(said, said) if one.n is None else Text(f"{said} (n = {one.n:,})", f"{said}（n = {one.n}）")
