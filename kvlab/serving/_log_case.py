"""One line of a table of server logs as read: what the checks take in, what they compare, and what a finding says."""
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvlab.catalog.gpus import gpus
from kvlab.serving._log_cells import Engine, Number, engine, number, numbers, text, whole
from kvlab.serving._log_models import find_model
from kvlab.shapes import ModelSpec

GiB = 2**30
VERDICTS = ("agreed", "explained", "unexplained", "unmatched")


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one line: a verdict, the quantity compared, its logged and predicted value, and why."""
    verdict: str
    what: str = ""
    logged: float | int | None = None
    predicted: float | int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """The cells that count, read. None = not printed.

    pool: GiB of one rank (llama.cpp: of all devices). words: the cells model and arch, in lower case.
    """
    spec: ModelSpec | None
    why_not: str
    words: str
    engine: Engine
    gpu: str
    n_gpus: int | None
    tp: int | None
    pool: Number | None
    tokens: Number | None
    blocks: int | None
    block_size: Number | None
    cpu_blocks: int | None
    swap: Number | None
    max_len: int | None
    concurrency: Number | None
    dtype: str
    kv_dtype: str

    @property
    def kinds(self) -> set[str]:
        return {layer.kind for layer in self.spec.layers}

    @property
    def windows(self) -> bool:
        return any(layer.window for layer in self.spec.layers)

    @property
    def ranks(self) -> int:
        return max(self.n_gpus or 1, self.tp or 1)

    @property
    def gpu_gib(self) -> float | None:
        """Memory of the named accelerator in GiB, of a catalogued name or as printed beside it ("A100-80GB")."""
        printed = re.search(r"(\d+(?:\.\d+)?) ?(GiB|GB|G)\b", self.gpu)
        if printed:
            return float(printed[1])
        cell = f" {re.sub('[^a-z0-9]+', ' ', self.gpu.lower())} "
        named = [spec.memory_bytes for name, spec in gpus().items() if spec.memory_bytes
                 and f" {' '.join(name.lower().split()[:2 if name.startswith('RTX') else 1])} " in cell]
        return max(named) / GiB if named else None


def read(row: Mapping) -> Case:
    """The line's inputs and logged quantities; no other column is looked at."""
    model, arch = text(row, "model"), text(row, "arch")
    spec, why = find_model(model, arch)
    tokens = number(row, "kv_tokens")
    if tokens and tokens.half <= 0.5:
        tokens = Number(tokens.value, 0.0)                  # an integer, printed whole
    return Case(spec, why, f"{model} {arch}".lower(), engine(text(row, "engine_version")), text(row, "gpu"),
                whole(row, "n_gpus"), whole(row, "tp", 1), _pool(row), tokens,
                whole(row, "gpu_blocks"), _block_size(row), whole(row, "cpu_blocks"), number(row, "swap_gib"),
                whole(row, "max_model_len", 1), number(row, "max_concurrency"), text(row, "dtype").lower(),
                text(row, "kv_dtype").lower())


def _pool(row: Mapping) -> Number | None:
    """The pool in GiB: "K … V …" added; of several (one per rank) the least, whose blocks all take; MiB scaled."""
    cell, found = text(row, "kv_cache_gib").lower(), numbers(row, "kv_cache_gib")
    if re.search(r"\d ?mi?b\b", cell):
        found = [Number(one.value / 1024, one.half / 1024) for one in found]
    exact = [one for one in found if one.half < 0.5] or found
    if len(exact) == 2 and re.search(r"\bk\b.*\bv\b", cell):
        return Number(exact[0].value + exact[1].value, exact[0].half + exact[1].half)
    return min(exact, key=lambda one: one.value) if exact else None


def part(words: str) -> str:
    """Which layers' pool or buffer a line names: full, sliding, total, or "" where it does not say."""
    if re.search(r"non[- _]?swa|\bfull\b|\bglobal\b", words):
        return "full"
    if re.search(r"\bswa\b|\bsliding\b|\bwindow", words):
        return "sliding"
    return "total" if re.search(r"\btotal\b|\bwhole\b|\ball layers\b", words) else ""


def _block_size(row: Mapping) -> Number | None:
    found = number(row, "block_size")
    return found if found and found.value > 0 else None


def kv_format(case: Case) -> str | None:
    """kvlab's name of how K and V are stored, by the cells kv_dtype and dtype; None for one that is not known."""
    cell = case.kv_dtype or "auto"
    sparse = case.spec is not None and case.spec.attention_type == "MLA + sparse"
    if "ds_mla" in cell or "656" in cell or sparse and "fp8" in cell:
        return "fp8_ds_mla"
    per_token = "token" in cell and "head" in cell
    for pattern, name in ((r"fp8|e4m3|e5m2|float8", "fp8_e4m3/token" if per_token else "fp8_e4m3"),
                          (r"int8|quant_policy ?=? ?8", "int8/token" if per_token else "int8/tensor"),
                          (r"nvfp4|fp4", "nvfp4"),
                          (r"int4", "int4/token" if per_token else "int4/head"),
                          (r"turbo|ultra|kivi|tq\d", None),
                          (r"fp32|float32|\bf32", "fp32"),
                          (r"fp16|bf16|float16|bfloat16|half|\bf16", "bf16")):
        if re.search(pattern, cell):
            return name
    if re.search(r"auto|^$", cell):
        return "fp32" if re.search(r"fp32|float32", case.dtype) else "bf16"
    return None
