"""Claims of section 1: why decoding is slow."""
from __future__ import annotations

from kvlab.claims._base import Claim, Found, Verdict, conditional, refuted, supported
from kvlab.claims._results import Results, catalogue
from kvlab.lang import Text

SECTION = 1
MODEL = "Qwen2-72B-Instruct"


def _kv_and_weights(results: Results):
    """KV ÷ weights of one sequence of 2,048 tokens; the cached tokens at which they are equal."""
    from kvlab.catalog.models import model
    from kvlab.kv.sizing import size
    spec = model(MODEL)
    found = size(spec, 2048)
    weights = 2 * spec.params
    source = f"{spec.name}, {spec.source}"
    yield catalogue("kv_over_weights", Text("KV ÷ weights, one sequence of 2,048 tokens", "KV ÷ 权重（单条 2048 token）"),
                    found.kv_bytes / weights, "share", source)


def _exceeds_weights(found: Found) -> Verdict:
    share = found["kv_over_weights"]
    if share.above(1):
        return supported("the cache is larger than the weights", "KV 大于权重")
    return refuted(f"the cache is {share.value:.2%} of the weights", f"KV 只占权重的 {share.value:.2%}")


CLAIMS = (
    Claim("C03", Text("… and the cache is far larger than the model's weights", "……且远超模型权重本身"), "KV ≫ weights",
          _kv_and_weights, _exceeds_weights, figure="kv_context",
          command=f"kvlab size {MODEL} --kv-len 2048"),
)
