"""Which model a recorded run served, and in which formats: names of forks and quantized weights, each said aloud."""
from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvlab.catalog.models import model as catalogued
from kvlab.catalog.resolve import model as resolved
from kvlab.serving._replay_meta import RESOLVED, Fact, word
from kvlab.serving._replay_run import Run
from kvlab.shapes import ModelSpec

# Ends of names that leave the architecture as it is: how the weights are stored, and what they were tuned for.
_STORED = {"fp8", "dynamic", "static", "block", "kv", "awq", "gptq", "int4", "int8", "4bit", "8bit", "bnb", "w4a16",
           "w8a8", "w8a16", "quantized", "nvfp4", "mxfp4", "bf16", "fp16"}
_TUNED = {"instruct", "chat", "it", "hf", "base"}
_HUB = re.compile(r"models--([^/\\]+?)--([^/\\]+)[/\\]snapshots[/\\]")
_KV = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3",
       "fp8_e5m2": "fp8_e5m2"}
_DTYPES = {"auto": "bf16", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
# Bytes of a weight with its scales, and the units' format that multiplies it: fp8 and int8 by channel or large block;
# AWQ and GPTQ 4 bits, a scale of 16 and a zero of 4 bits for every 128; MXFP4 a byte for every 32, NVFP4 for every 16;
# bitsandbytes' NF4 4 bytes for every 64.
_FP8, _INT8, _W4 = (1.0, "fp8"), (1.0, "int8"), (0.52, "bf16")
_WEIGHTS = {"fp8": _FP8, "fbgemm_fp8": _FP8, "ptpc_fp8": _FP8, "modelopt": _FP8, "w8a8": _INT8, "int8": (1.0, "bf16"),
            "8bit": (1.0, "bf16"), "w8a16": (1.0, "bf16"), "nvfp4": (0.5625, "bf16"), "modelopt_fp4": (0.5625, "bf16"),
            "mxfp4": (0.53, "bf16"), "bitsandbytes": (0.5625, "bf16"), "bnb": (0.5625, "bf16"), "awq": _W4,
            "awq_marlin": _W4, "gptq": _W4, "gptq_marlin": _W4, "w4a16": _W4, "int4": _W4, "4bit": _W4}
_BY_NAME = ("nvfp4", "mxfp4", "w8a8", "w8a16", "int8", "8bit", "fp8", "bnb", "awq", "gptq", "w4a16", "int4", "4bit")


@dataclass(frozen=True, slots=True)
class Formats:
    """How cache and weights are stored: bytes of a weight, the units' format that multiplies it; a note, "" = none."""
    kv_format: str
    itemsize: float
    multiplied: str
    note: str


def served_model(run: Run, given: str | None, facts: dict[str, Fact]) -> tuple[ModelSpec, str]:
    """The model, and its name in the run ("" where the model is given). ValueError, KeyError: which to give instead."""
    if given:
        facts["model"] = Fact(given, "argument")
        return resolved(given), ""
    name = run.get("model", "engine_kwargs.model", f"{RESOLVED}.model_config.model")
    if not isinstance(name, str) or not name.strip() or len(name) > 1000:
        raise ValueError(f"{run.path} does not say its model: give it, kvlab simulate MODEL --replay …")
    unknown = ""
    for form in _forms(name):
        try:
            spec = catalogued(form)
        except KeyError as error:
            unknown = unknown or str(error.args[0])
            continue
        same = form.lower() == name.lower() or name.lower().endswith(("/" + form.lower(), "\\" + form.lower()))
        taken = "" if same else f", taken for the architecture of {form}"
        facts["model"] = Fact(spec.name, f"meta: {name}{taken}")
        return spec, name
    raise KeyError(f"{run.path} is of {unknown}. Give the model, kvlab simulate MODEL --replay …: a name from `kvlab "
                   "ls models`, a config.json or a folder")


def _forms(name: str) -> Iterator[str]:
    """The name; of a path the last part; then without its ends one by one, while they say nothing of layers."""
    name = name.strip().rstrip("/\\")
    yield name
    hub = _HUB.search(name + "/")
    short = hub[2] if hub else re.split(r"[/\\]", name)[-1]
    yield short
    while (ends := re.fullmatch(r"(.+)[-_.]([A-Za-z0-9]+)", short)) and ends[2].lower() in _STORED | _TUNED:
        short = ends[1]
        yield short


def formats(run: Run, name: str, facts: dict[str, Fact]) -> Formats:
    """Formats of cache and weights. name: of the model in the run, whose ends count where meta.json is silent."""
    dtype = word(run, "dtype", "auto", f"{RESOLVED}.model_config.dtype", "engine_kwargs.dtype").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise ValueError(f"{run.path}: dtype {dtype!r} is not known to the replay; known: {', '.join(_DTYPES)}")
    places = (f"{RESOLVED}.cache_config.cache_dtype", "engine_kwargs.kv_cache_dtype")
    cache = word(run, "kv_cache_dtype", "auto", *places).removeprefix("torch.")
    kv_format = _DTYPES[dtype] if cache == "auto" else _KV.get(cache)
    if kv_format is None:
        raise ValueError(f"{run.path}: kv_cache_dtype {cache!r} is not known to the replay; known: auto, "
                         f"{', '.join(_KV)}")
    facts["kv_format"] = Fact(kv_format, f"meta: {cache}" if run.get(*places) else "default")
    quantized = word(run, "quantization", "", f"{RESOLVED}.model_config.quantization", "engine_kwargs.quantization")
    ends, source = set(re.split(r"[-_./\\]", name.lower())), "meta"
    if quantized == "compressed-tensors" or not quantized and run.get(f"{RESOLVED}.model_config") is None:
        quantized, source = next((end for end in _BY_NAME if end in ends), quantized), f"the model's name: {name}"
    if not quantized:
        facts["weight_itemsize"] = Fact(2.0, f"dtype {dtype}")
        return Formats(kv_format, 2.0, _DTYPES[dtype], "")
    if quantized not in _WEIGHTS:
        raise ValueError(f"{run.path}: weights quantized by {quantized!r}, which the replay does not know; known: "
                         f"{', '.join(_WEIGHTS)}")
    itemsize, multiplied = _WEIGHTS[quantized]
    facts["weight_itemsize"] = Fact(itemsize, f"{source}: {quantized}")
    return Formats(kv_format, itemsize, multiplied, f"weights are quantized ({quantized}): {itemsize:g} bytes each, "
                   "the output head too, which may be stored in 16 bits")
