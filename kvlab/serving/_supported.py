"""The same pool under other KV formats: requests, and whether the GPU multiplies them as they are stored."""
from __future__ import annotations

from dataclasses import dataclass, replace

from kvlab.catalog.gpus import GPUSpec, format_support
from kvlab.kv.sizing import kv_format
from kvlab.serving._budget import DIES
from kvlab.serving._settings import Settings, blocks_of, requests_in
from kvlab.shapes import ModelSpec

OF_INTEREST = ("bf16", "fp8_e4m3", "int8/token", "int4/token", "nvfp4")


@dataclass(frozen=True, slots=True)
class FormatRow:
    """One KV format on this GPU. requests: of max_len in the pool; None, with why, where blocks cannot be that size.

    word: native, storage-only, unsupported or unknown, of the GPU's matrix units; product: what is multiplied.
    """
    kv_format: str
    requests: int | None
    tokens: int | None
    word: str
    product: str
    why: str


def format_rows(spec: ModelSpec, gpu: GPUSpec, settings: Settings, pool_bytes: int) -> tuple[FormatRow, ...]:
    """The asked format first, then those of interest; a format whose scales the block size splits has no number."""
    found = []
    for name in dict.fromkeys((settings.kv_format, *OF_INTEREST)):
        word, product, why = _support(gpu, name)
        try:
            model = blocks_of(spec, replace(settings, kv_format=name))
        except ValueError as error:
            found.append(FormatRow(name, None, None, word, product, str(error)))
            continue
        found.append(FormatRow(name, requests_in(model, pool_bytes, settings.prefix_share),
                               model.tokens(model.blocks(max(0, pool_bytes))), word, product, why))
    return tuple(found)


def device_notes(gpu: GPUSpec, settings: Settings) -> list[str]:
    """What an engine makes of this device that its data sheet does not say.

    Source: vLLM 0.32 platforms/cuda.py (check_if_supports_dtype); data/gpus.csv for the dies.
    """
    notes = []
    if gpu.name in DIES:
        notes.append(f"{gpu.name} is {DIES[gpu.name]} GPUs to software: GPUs are counted, and its memory given, by die")
    old = gpu.vendor == "NVIDIA" and gpu.compute_capability and float(gpu.compute_capability) < 8
    if old and settings.kv_format == "bf16":
        notes.append(f"{gpu.name}: vLLM refuses bf16 below compute capability 8.0; start it with --dtype half, of the "
                     "same bytes")
    return notes


def _support(gpu: GPUSpec, name: str) -> tuple[str, str, str]:
    """By the codecs of K and V: a format's own name (k16v8) need not say them."""
    if name == "fp8_ds_mla":
        codecs = "fp8_e4m3"
    else:
        fmt = kv_format(name)
        codecs = "+".join(dict.fromkeys((fmt.k.name, fmt.v.name)))
    try:
        found = format_support(gpu, codecs)
    except KeyError as error:
        return "unknown", "", str(error.args[0])
    return found.word, found.product, found.why
