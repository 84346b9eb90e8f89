"""The weights of one tensor-parallel rank: as given, as a file stores them, or modelled from the parameters.

Bytes. Unknown weights are asked for, not guessed: how many bits a checkpoint has is the user's to say.
"""
from __future__ import annotations

import re

from kvlab.catalog import rows
from kvlab.kv.sizing import weight_bytes
from kvlab.serving._budget import Term, widths
from kvlab.shapes import ModelSpec
from kvlab.units import GiB

BITS = (4, 8, 16)               # of --weight-bits
# What quantised checkpoints hold beside the bare bits: scales (FP8 in 128 × 128 blocks < 0.1 %, MXFP4 and groups of 128
# with zeros 6 %, of 64 up to 10 %), and embedding and output head, which AWQ, GPTQ, FP8 and MXFP4 leave in 16 bits.
SCALES = 0.1
SPLIT = 0.02                    # what stays whole on every rank: norms, routers, MLA's down projections, KV heads
_EIGHT = re.compile(r"fp8|int8|w8a\d+|8bit|[^a-z]q8_|published as fp8", re.IGNORECASE)
_SMALLER = re.compile(r"fp4|int[24]|awq|gptq|w\d+a\d+|[^a-z]q\d_|gguf|\dbit|gpt-oss", re.IGNORECASE)


def weights(spec: ModelSpec, tp: int, total_gib: float | None = None, bits: int | None = None) -> Term:
    """The weights of one rank: as given, of so many bits, as a file stores them, or 2 bytes for each parameter.

    total_gib: of all ranks together. bits: parameters × bits ÷ 8, up to what scales and 16-bit embeddings add. Every
    matrix is split, embedding and output head too (vLLM's log halves with tp=2: 14.96 → 7.48 GiB, vllm#10511); what
    stays whole has up to 2 % in the interval. Refuses unknown weights, with what to give.
    """
    total, high, kind, how, source = _of_all_ranks(spec, total_gib, bits)
    share = round(total / tp)
    if tp == 1:
        return Term("weights", share, share, round(high), kind, how, source)
    return Term("weights", share, share, round(high / tp * (1 + SPLIT)), "modelled", f"{how}, ÷ tp {tp}", source)


def least_weights(spec: ModelSpec, tp: int, total_gib: float | None = None, bits: int | None = None) -> int:
    """Bytes that one rank holds at least: its weights where they are known, else 4 bits for each parameter, else 0."""
    try:
        return weights(spec, tp, total_gib, bits).low
    except ValueError:
        return (parameters(spec) or 0) * min(BITS) // 8 // tp


def _of_all_ranks(spec: ModelSpec, total_gib: float | None, bits: int | None) -> tuple[float, float, str, str, str]:
    """(bytes, at most, kind, how, source) of all ranks together."""
    if total_gib is not None:
        return total_gib * GiB, total_gib * GiB, "quoted", "given", "the user"
    if bits is not None:
        count = parameters(spec)
        if count is None:
            raise ValueError(f"--weight-bits needs the parameters of {spec.name}, and data/models.csv has no count: "
                             f"give {_ASK}")
        total = count * bits / 8
        of = widths(spec)
        unquantised = 2 * max(of.vocab) * of.hidden * (16 - bits) / 8
        high = total if bits == 16 else total * (1 + SCALES) + unquantised
        left_out = "" if bits == 16 else ", scales and unquantised layers not counted"
        return total, high, "modelled", f"{count:,} parameters × {bits} bits{left_out}", spec.source
    if spec.weight_bytes is not None:
        return spec.weight_bytes, spec.weight_bytes, "quoted", "as the file stores them", spec.source
    published = published_bits(spec)
    if spec.params is None or published:
        raise ValueError(_unknown(spec, published))
    total = weight_bytes(spec)
    return total, total, "modelled", f"{spec.params:,} parameters × 2 bytes", spec.source


_ASK = ("--weights-gib, the GiB of all ranks together (an engine's log: model loading took … GiB, times tp), or the "
        "folder with its safetensors as the model")


def _unknown(spec: ModelSpec, published: int | None) -> str:
    why = (f"it is published in {published} bits or so" if published else "data/models.csv has no parameter count")
    head = f"how large the weights of {spec.name} are is not known ({why}): "
    if parameters(spec) is None:
        return f"{head}give {_ASK}"
    bits = published or 16
    return (f"{head}add --weight-bits {bits} (`kvlab plan {spec.name} --weight-bits {bits} …` counts parameters × "
            f"{bits} bits), or {_ASK}")


def published_bits(spec: ModelSpec) -> int | None:
    """Bits of a weight by a model's name and source, where they say that it is published in fewer than 16."""
    if _EIGHT.search(spec.name) or _EIGHT.search(spec.source):
        return 8
    return 4 if _SMALLER.search(spec.name) else None


def parameters(spec: ModelSpec) -> int | None:
    """As the catalogue or a file has them; else counted for a mixture of experts whose widths are known.

    Source: data/model_widths.csv and data/model_experts.csv: attention, three matrices an expert, router, embedding and
    head; gpt-oss-120b so has 116.8 × 10⁹, where its model card says 117B.
    """
    if spec.params is not None:
        return spec.params
    mixture = next((row for row in rows("model_experts.csv") if row["model"] == spec.name), None)
    of = widths(spec)
    if mixture is None or not of.known or any(layer.kind in ("mla", "linear") for layer in spec.layers):
        return None
    attention = sum(layer.count * of.hidden * (2 * layer.num_q_heads * layer.head_dim
                                               + layer.num_kv_heads * (layer.head_dim + layer.shape.v_dim))
                    for layer in spec.layers)
    experts = int(mixture["layers"]) * int(mixture["experts"]) * of.hidden * (3 * int(mixture["width"]) + 1)
    return attention + experts + 2 * max(of.vocab) * of.hidden
