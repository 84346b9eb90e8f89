"""What a step of a model costs one rank: bytes and flops, from its layers, its parameters and its experts.

Parameters come from the catalogue or a file, hidden size and vocabulary from data/model_widths.csv, mixtures from
data/model_experts.csv. What is not known there is left out or refused, as `ranked` says; nothing is guessed.
"""
from __future__ import annotations

import re
from functools import cache

from kvlab.catalog import rows
from kvlab.kv.sizing import layer_bytes
from kvlab.serving.step_time import Work
from kvlab.shapes import LayerSpec, ModelSpec, positive

_MIXTURE = re.compile(r"(?i)\d+x\d+(\.\d+)?b|-a\d+(\.\d+)?b|moe|deepseek-v[23]|gpt-oss|glm-4\.[5-9]|minimax-m|kimi-k2")


@cache
def _table(name: str) -> dict[str, dict[str, str]]:
    return {row["model"]: row for row in rows(name)}


def ranked(spec: ModelSpec, *, tp: int = 1, dp: int = 1, kv_format: str = "bf16", itemsize: float = 2.0) -> Work:
    """The work of one of tp ranks, of which dp replicas share a mixture's experts; weights take itemsize bytes each.

    Dense models: all parameters but the embedding table are read in each step, and the output head's flops are of
    sampled tokens only; without widths the table and the head are not told apart and both count for every token. A
    mixture's routed experts are spread over tp × dp ranks, by slices or whole: either way a rank reads its part of
    those that the step touches. Sliding and chunked layers read at most a window per sequence, linear ones no KV.
    ValueError: parameters unknown, a mixture without its line in data/model_experts.csv, tp that does not fit.
    Source: kernels of a decoder; vLLM 0.32 fused_moe/config.py for how experts are spread.
    """
    positive(tp=tp, dp=dp)
    if spec.params is None:
        raise ValueError(f"the number of parameters of {spec.name} is not known: give its folder with the safetensors "
                         "as the model, or one of `kvlab ls models` that has them")
    mixture, width = _table("model_experts.csv").get(spec.name), _table("model_widths.csv").get(spec.name)
    if mixture is None and (_MIXTURE.search(spec.name) or _hides_experts(spec, width)):
        raise ValueError(f"{spec.name} is a mixture of experts, and data/model_experts.csv has no line on it; known: "
                         f"{', '.join(_table('model_experts.csv'))}")
    hidden = int(width["hidden"]) if width else spec.num_q_heads * spec.head_dim
    routed = expert = 0
    if mixture:
        expert = 3 * hidden * int(mixture["width"]) * int(mixture["layers"])      # gate, up, down; over all layers
        routed = expert * int(mixture["experts"])
    body, head = spec.params - routed, 0
    if width:
        head = int(width["vocab"]) * hidden
        body -= head if _tied(spec, width, mixture) else 2 * head
    ranks, taken = tp * dp, int(mixture["experts_per_token"]) if mixture else 0
    kept = [layer for layer in spec.layers if layer.kind != "linear"]
    whole = [layer for layer in kept if layer.kind in ("full", "mla")]
    windowed = [layer for layer in kept if layer.kind in ("sliding", "chunked")]
    return Work(
        weight_bytes=(body + head) * itemsize / tp, flops_per_token=2 * body / tp, flops_per_sequence=2 * head / tp,
        kv_bytes_per_token=sum(layer.count * layer_bytes(layer, 128, kv_format, tp) / 128 for layer in whole),
        kv_bytes_per_sequence=sum(layer.count * layer_bytes(layer, layer.span, kv_format, tp) for layer in windowed)
        + sum(layer.count * layer.state_bytes for layer in spec.layers if layer.kind == "linear") / tp,
        flops_per_pair=sum(_pair_flops(layer) for layer in whole) / tp,
        experts=int(mixture["experts"]) if mixture else 0, experts_per_token=taken,
        expert_bytes=expert * itemsize / ranks, expert_flops_per_token=2 * expert * taken / ranks,
        tp=tp, reductions=2 * spec.num_layers if tp > 1 else 0, reduced_bytes_per_token=2 * hidden,
        dp=dp, exchanges=2 * int(mixture["layers"]) if mixture and dp > 1 else 0,
        exchanged_bytes_per_token=2 * hidden)


def is_mixture(spec: ModelSpec) -> bool:
    return spec.name in _table("model_experts.csv") or bool(_MIXTURE.search(spec.name))


def _pair_flops(layer: LayerSpec) -> int:
    """A product with K and one with V, over all query heads of the layers."""
    return layer.count * 2 * layer.num_q_heads * (layer.head_dim + layer.heads.v_dim)


def _blocks(spec: ModelSpec, width: dict[str, str]) -> int:
    """Parameters of attention and gated FFN as the widths give them; nearly all of a dense model's layers."""
    hidden, ffn = int(width["hidden"]), int(width["ffn"])
    heads = sum(layer.count * layer.head_dim * 2 * (layer.num_q_heads + layer.num_kv_heads)
                for layer in spec.layers if layer.kind in ("full", "sliding", "chunked"))
    return hidden * (heads + 3 * ffn * spec.num_layers)


def _tied(spec: ModelSpec, width: dict[str, str], mixture: dict[str, str] | None) -> bool:
    """Whether the output head is the embedding table: whichever leaves what the layers have."""
    table = int(width["vocab"]) * int(width["hidden"])
    blocks = _blocks(spec, width)
    if mixture:
        blocks += 3 * int(width["hidden"]) * int(mixture["width"]) * int(mixture["layers"]) \
            * (int(mixture["experts"]) - int(mixture["experts_per_token"]))
    params = spec.params or 0
    return abs(params - table - blocks) < abs(params - 2 * table - blocks)


def _hides_experts(spec: ModelSpec, width: dict[str, str] | None) -> bool:
    """Far more parameters than a token passes: experts that no table names."""
    if width is None or any(layer.kind in ("mla", "linear") for layer in spec.layers):
        return False
    return (spec.params or 0) > 1.5 * (_blocks(spec, width) + 2 * int(width["vocab"]) * int(width["hidden"]))
