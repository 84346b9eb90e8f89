"""One line of a table of server logs as read: what the checks take in, what they compare, and what a finding says."""
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvlab.catalog.gpus import gpus
from kvlab.serving._log_cells import Engine, Number, engine, number, numbers, text, whole
from kvlab.serving._log_models import find_model
from kvlab.shapes import ModelSpec

GiB = 2**30
COARSEST = 0.02                 # of a pool told in whole GiB or tenths: what is coarser tests nothing
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
    util: Number | None
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
        """Memory of the named accelerator in GiB, of a catalogued name or as printed beside it ("A100-80GB").

        Of several that the cell could mean the largest.
        """
        printed = re.search(r"(?<![A-Za-wyz\d.])(\d+(?:\.\d+)?) ?Gi?B?\b(?! ?(?:of )?weights)", self.gpu)
        if printed:
            return float(printed[1])
        cell = f" {re.sub('[^a-z0-9]+', ' ', self.gpu.lower())} "
        named = [spec.memory_bytes for name, spec in gpus().items() if spec.memory_bytes
                 and f" {re.sub('^rtx (?!pro)', '', name.lower()).split('(')[0].split()[0]} " in cell
                 and ("pro" in cell.split()) == ("pro" in name.lower().split())]
        return max(named) / 10**9 if named else None        # a sheet's GB are GiB but for what firmware takes


def read(row: Mapping) -> Case:
    """The line's inputs and logged quantities; no other column is looked at."""
    model, arch = text(row, "model"), text(row, "arch")
    spec, why = find_model(model, arch)
    tokens = number(row, "kv_tokens")
    if tokens and tokens.half <= 0.5:
        tokens = Number(tokens.value, 0.0)                  # an integer, printed whole
    by, kv_dtype = engine(text(row, "engine_version")), text(row, "kv_dtype").lower()
    if not by.name and re.search(r"\bi?q\d_\w+", kv_dtype):
        by = replace(by, name="llamacpp")                   # only ggml has such types
    return Case(spec, why, f"{model} {arch}".lower(), by, text(row, "gpu"),
                whole(row, "n_gpus"), whole(row, "tp", 1), _pool(row, by.name == "llamacpp"), tokens,
                whole(row, "gpu_blocks"), _block_size(row), whole(row, "cpu_blocks"), number(row, "swap_gib"),
                number(row, "gpu_memory_utilization"), whole(row, "max_model_len", 1), number(row, "max_concurrency"),
                text(row, "dtype").lower(), kv_dtype)


def _pool(row: Mapping, all_devices: bool) -> Number | None:
    """The pool in GiB: "K … V …" and "a + b" added; of several (one per rank) the least, whose blocks all take, or
    their sum where a pool is that of all devices, remarks in parentheses aside; MiB scaled; of both units the first."""
    cell = text(row, "kv_cache_gib").lower()
    if all_devices:
        cell = re.sub(r"\([^)]*\)", " ", cell)
    found = numbers({"cell": cell}, "cell")
    units = re.findall(r"\d ?([mg])i?b\b", cell)
    if units and units[0] == "m":
        found = [Number(one.value / 1024, one.half / 1024) for one in found]
    found = found[:1] if len(set(units)) > 1 else found
    exact = [one for one in found if one.half < 0.5] or found
    if not exact:
        return None
    if all_devices or re.search(r"\bk\b.*\d.*\bv\b.*\d|\d[^,;/]*\+", cell):
        pool = Number(sum(one.value for one in exact), sum(one.half for one in exact))
    else:
        pool = min(exact, key=lambda one: one.value)
    return pool if pool.half < 0.05 else Number(pool.value, min(pool.half, COARSEST * abs(pool.value)))


def part(words: str) -> str:
    """Which layers' pool or buffer a line names: full, sliding, total, or "" where it does not say."""
    words = re.sub(r"\bswa[- ]full\b", "", words)           # an option, which stores windows whole
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
