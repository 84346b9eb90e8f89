"""The common formula (VRAM − weights) ÷ (KV × 1.3 … 1.5), and where it goes wrong for one deployment."""
from __future__ import annotations

from dataclasses import dataclass

from kvlab.kv.sizing import article_formula_bytes
from kvlab.serving._budget import Term
from kvlab.serving._settings import Settings
from kvlab.serving.block_model import BlockModel
from kvlab.shapes import ModelSpec
from kvlab.units import GiB

FACTORS = (1.3, 1.5)


@dataclass(frozen=True, slots=True)
class Article:
    """What the formula gives for one replica. low, high: requests, with 1.5 and with 1.3.

    needed: the factor that would have given the block model's concurrency; None where that is none. errs: sentences.
    """
    low: float
    high: float
    needed: float | None
    errs: tuple[str, ...]


def article(spec: ModelSpec, settings: Settings, model: BlockModel, terms: tuple[Term, ...], blocks: int) -> Article:
    """With the config's own numbers, in 16 bits, the VRAM that devices report, and the same weights as the budget."""
    vram, weight, *rest = terms
    free = (vram.value - weight.value) * settings.tp
    each = article_formula_bytes(spec, model.max_len)
    errs = [f"it leaves out (1 − util) × VRAM = {(1 - settings.util) * vram.value / GiB:.2f} GiB and "
            f"{' + '.join(term.name for term in rest)} = {sum(term.value for term in rest) / GiB:.2f} GiB of each GPU"]
    true = model.blocks_per_request() * model.block_bytes * settings.tp
    if abs(each / true - 1) > 0.02:
        errs.append(f"its KV of one request, {each / GiB:.2f} GiB, is {each / true:.2f} times the {true / GiB:.2f} GiB "
                    f"of blocks on {settings.tp} rank{'s' * (settings.tp > 1)}{_reasons(spec, settings)}")
    held = model.concurrency(blocks)
    return Article(free / (each * FACTORS[1]), free / (each * FACTORS[0]), free / (each * held) if held else None,
                   tuple(errs))


def _reasons(spec: ModelSpec, settings: Settings) -> str:
    kinds = {layer.kind for layer in spec.layers}
    heads = min((layer.num_kv_heads for layer in spec.layers if layer.kind not in ("linear", "mla")), default=None)
    found = [words for is_so, words in (
        ("mla" in kinds, "it takes heads for what is one latent, whole on every rank"),
        (kinds & {"sliding", "chunked"}, "it knows no windows"),
        ("linear" in kinds, "it takes linear layers for full ones"),
        (heads and settings.tp > heads, f"the KV heads, {heads}, lie on {settings.tp} ranks more than once"),
        (settings.kv_format not in ("bf16", "fp16"), f"it takes 16 bits for {settings.kv_format}")) if is_so]
    return f": {', and '.join(found)}" if found else ""
