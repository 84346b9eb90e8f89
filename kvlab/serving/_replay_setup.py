"""What a recorded run was: model, GPUs, blocks and scheduler, each fact with where it comes from."""
from __future__ import annotations

import re
from dataclasses import dataclass

from kvlab.catalog.gpus import GPUSpec
from kvlab.catalog.gpus import gpu as gpu_named
from kvlab.catalog.models import model as catalogued
from kvlab.catalog.resolve import model as resolved
from kvlab.serving._replay_run import Run
from kvlab.serving.capacity import Settings, plan
from kvlab.serving.model_work import is_mixture, ranked
from kvlab.serving.scheduler import SchedulerConfig
from kvlab.shapes import ModelSpec, positive
from kvlab.units import GiB

_RESOLVED = "resolved_config"
# First vLLM version of each default: asynchronous scheduling (vllm#27614, 0.14.0); CUDA graphs in the memory budget
# (0.21). Utilisation was 0.9 in 0.19.0 and 0.92 in 0.28.0, as resolved in those runs; the change is taken to be 0.21's.
_ASYNC, _GRAPHS, _UTIL_92 = (0, 14), (0, 21), (0, 21)


@dataclass(frozen=True, slots=True)
class Fact:
    """A value and where it comes from: the run's meta.json, an argument, a default, or a model of it."""
    value: object
    source: str


@dataclass(frozen=True, slots=True)
class Setup:
    """What is replayed. gpu: None where the device is not in the catalogue and its step time is given. blocks: of one
    replica, the null block included; modelled_blocks: by kvlab's capacity model, None with why_no_model where that
    refuses. lockstep: replicas of a mixture wait for one another.
    """
    spec: ModelSpec
    gpu: GPUSpec | None
    device: str
    tp: int
    dp: int
    lockstep: bool
    config: SchedulerConfig
    block_size: int
    blocks: int
    blocks_kind: str
    modelled_blocks: int | None
    why_no_model: str
    itemsize: float
    kv_format: str
    facts: dict[str, Fact]


def setup(run: Run, *, model: str | None = None, gpu: str | None = None, gpus: int | None = None,
          blocks: int | None = None, measured: bool = False) -> Setup:
    """Model, GPUs, blocks and scheduler of a run; arguments stand above meta.json, defaults below it.

    measured: the step time of the run's device is given, which then need not be in the catalogue.
    ValueError or KeyError, with what to give, where the run does not say its model or GPU, or says what cannot be.
    """
    facts: dict[str, Fact] = {}
    version = _version(run)
    facts["engine"] = Fact(f"vLLM {run.get('vllm_version')}" if run.get("vllm_version") else "vLLM, version unknown",
                           "meta" if run.get("vllm_version") else "assumed")
    spec = _model(run, model, facts)
    device, name = _device(run, gpu, measured, facts)
    tp, dp = _ranks(run, gpus, facts)
    config = _config(run, version, facts)
    block_size = _whole(run, facts, "block_size", 16, "kv_cache.block_size", f"{_RESOLVED}.cache_config.block_size",
                        "engine_kwargs.block_size")
    kv_format, itemsize = _formats(run, facts)
    modelled, why = (_modelled(run, version, spec, device, tp, dp, config, block_size, kv_format, itemsize)
                     if device else (None, f"{name} is not in the catalogue"))
    true, kind = _blocks(run, blocks, dp, modelled, why, name, facts)
    return Setup(spec, device, name, tp, dp, dp > 1 and is_mixture(spec), config, block_size, true, kind, modelled, why,
                 itemsize, kv_format, facts)


def _version(run: Run) -> tuple[int, int] | None:
    found = re.match(r"v?(\d+)\.(\d+)", str(run.get("vllm_version") or ""))
    return (int(found[1]), int(found[2])) if found else None


def _since(version: tuple[int, int] | None, first: tuple[int, int]) -> bool:
    return version is None or version >= first


def _model(run: Run, given: str | None, facts: dict[str, Fact]) -> ModelSpec:
    if given:
        facts["model"] = Fact(given, "argument")
        return resolved(given)
    name = run.get("model", "engine_kwargs.model", f"{_RESOLVED}.model_config.model")
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"{run.path} does not say its model: give it with --model")
    try:
        spec = catalogued(name)
    except KeyError:
        try:
            spec = catalogued(name.rstrip("/").rpartition("/")[2])      # a path on the machine of the run
        except KeyError as unknown:
            raise KeyError(f"{run.path} is of {unknown.args[0]}. Give --model: a name from `kvlab ls models`, a "
                           "config.json or a folder") from None
    facts["model"] = Fact(spec.name, f"meta: {name}")
    return spec


def _device(run: Run, given: str | None, measured: bool, facts: dict[str, Fact]) -> tuple[GPUSpec | None, str]:
    """The accelerator and its name."""
    name = run.get("hardware.device_name")
    if given is None and not isinstance(name, str):
        raise ValueError(f"{run.path} does not say its GPU: give it with --gpu, a name from `kvlab ls gpus`")
    if measured:
        facts["gpu"] = Fact(given or name, "argument" if given else "meta")
        return None, given or name
    device = gpu_named(given or name)
    facts["gpu"] = Fact(device.name, "argument" if given else f"meta: {name}")
    return device, device.name


def _ranks(run: Run, given: int | None, facts: dict[str, Fact]) -> tuple[int, int]:
    """Tensor-parallel ranks and replicas."""
    if given is not None:
        positive(gpus=given)
    tp = _whole(run, facts, "tensor_parallel_size", None, "engine_kwargs.tensor_parallel_size",
                f"{_RESOLVED}.parallel_config.tensor_parallel_size")
    dp = _whole(run, facts, "data_parallel_size", 1, "engine_kwargs.data_parallel_size",
                f"{_RESOLVED}.parallel_config.data_parallel_size")
    stages = _whole(run, facts, "pipeline_parallel_size", 1, "engine_kwargs.pipeline_parallel_size",
                    f"{_RESOLVED}.parallel_config.pipeline_parallel_size")
    if stages > 1:
        raise ValueError(f"{run.path} has {stages} pipeline stages; kvlab replays tensor- and data-parallel runs only")
    if tp is None:
        tp = max(1, (given or 1) // dp)
        facts["tensor_parallel_size"] = Fact(tp, "argument: --gpus ÷ replicas" if given else "default: 1")
    if given is not None and given != tp * dp:
        raise ValueError(f"--gpus {given} does not fit the run: it has {dp} replicas of {tp} GPUs, {tp * dp} in all")
    return tp, dp


def _whole(run: Run, facts: dict[str, Fact], name: str, default: int | None, *places: str) -> int | None:
    value = run.get(*places)
    if value is None:
        if default is not None:
            facts[name] = Fact(default, "default")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{run.path}: {name} = {value!r} in meta.json is no whole number of at least 1")
    facts[name] = Fact(value, "meta")
    return value


def _config(run: Run, version: tuple[int, int] | None, facts: dict[str, Fact]) -> SchedulerConfig:
    where, cache = f"{_RESOLVED}.scheduler_config", f"{_RESOLVED}.cache_config"

    def known(name: str, default, *places: str):
        value = run.get(*places)
        facts[name] = Fact(default, "default of vLLM") if value is None else Fact(value, "meta")
        return facts[name].value

    seqs = _whole(run, facts, "max_num_seqs", 256, f"{where}.max_num_seqs", "engine_kwargs.max_num_seqs")
    tokens = _whole(run, facts, "max_num_batched_tokens", 2048, f"{where}.max_num_batched_tokens",
                    "engine_kwargs.max_num_batched_tokens")
    longest = _whole(run, facts, "max_model_len", None, f"{_RESOLVED}.model_config.max_model_len",
                     "engine_kwargs.max_model_len")
    policy = known("policy", "fcfs", f"{where}.policy", "engine_kwargs.scheduling_policy")
    reserve = known("reserve_full_isl", True, f"{where}.scheduler_reserve_full_isl")
    chunked = known("chunked_prefill", True, f"{where}.enable_chunked_prefill", "engine_kwargs.enable_chunked_prefill")
    caching = known("prefix_caching", True, "kv_cache.enable_prefix_caching", f"{cache}.enable_prefix_caching",
                    "engine_kwargs.enable_prefix_caching")
    ahead = known("async_scheduling", _since(version, _ASYNC), f"{where}.async_scheduling",
                  "engine_kwargs.async_scheduling")
    watermark = known("watermark", 0.0, f"{where}.watermark")
    return SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens, policy=policy, max_model_len=longest,
                           admission="full_prompt" if reserve else "first_chunk", chunked_prefill=bool(chunked),
                           prefix_caching=bool(caching), watermark=float(watermark), async_scheduling=bool(ahead))


def _formats(run: Run, facts: dict[str, Fact]) -> tuple[str, float]:
    """KV format and bytes of a weight."""
    cache = str(run.get(f"{_RESOLVED}.cache_config.cache_dtype", "engine_kwargs.kv_cache_dtype") or "auto")
    kv_format = {"auto": "bf16", "bfloat16": "bf16", "float16": "fp16", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3",
                 "fp8_e5m2": "fp8_e5m2"}.get(cache)
    if kv_format is None:
        raise ValueError(f"{run.path}: kv_cache_dtype {cache!r} is not known to the replay; known: auto, bfloat16, "
                         "float16, fp8, fp8_e4m3, fp8_e5m2")
    quantized = run.get(f"{_RESOLVED}.model_config.quantization", "engine_kwargs.quantization")
    if quantized not in (None, "fp8"):
        raise ValueError(f"{run.path}: weights quantized by {quantized!r}; the replay knows bf16, fp16 and fp8 weights")
    itemsize = 1.0 if quantized == "fp8" else 2.0
    facts["kv_format"], facts["weight_itemsize"] = Fact(kv_format, f"meta: {cache}"), Fact(itemsize, "meta: dtype")
    return kv_format, itemsize


def _modelled(run: Run, version, spec, device, tp, dp, config, block_size, kv_format,
              itemsize) -> tuple[int | None, str]:
    """Blocks of one replica by kvlab's capacity model, or why it has none."""
    util = run.get("kv_cache.gpu_memory_utilization", f"{_RESOLVED}.cache_config.gpu_memory_utilization",
                   "engine_kwargs.gpu_memory_utilization")
    try:
        work = ranked(spec, tp=tp, dp=dp if is_mixture(spec) else 1, kv_format=kv_format, itemsize=itemsize)
        table = work.flops_per_sequence / 2 * itemsize                  # the embedding, beside a head of its size
        rank = work.weight_bytes + work.experts * work.expert_bytes + table
        settings = Settings(tp, util if util is not None else 0.92 if _since(version, _UTIL_92) else 0.9,
                            config.max_num_seqs, config.max_num_batched_tokens, block_size, config.max_model_len,
                            kv_format, weights_gib=rank * tp / GiB,
                            graphs_gib=None if _since(version, _GRAPHS) else 0.0)
        return plan(spec, device, tp, settings).blocks, ""
    except (ValueError, KeyError) as error:
        return None, str(error.args[0] if error.args else error)


def _blocks(run: Run, given: int | None, dp: int, modelled: int | None, why: str, device: str,
            facts: dict[str, Fact]) -> tuple[int, str]:
    """Blocks of one replica, and whether they are the engine's own, given, or modelled."""
    if given is not None:
        positive(blocks=given)
        facts["blocks"] = Fact(given, "argument: of one replica")
        return given, "argument"
    total = _whole(run, facts, "blocks", None, "kv_cache.num_gpu_blocks", f"{_RESOLVED}.cache_config.num_gpu_blocks")
    if total is not None:
        if dp > 1:
            # Source: vLLM 0.32 v1/engine/core_client.py: num_gpu_blocks is the sum over data-parallel engines.
            facts["blocks"] = Fact(total // dp, f"meta: {total:,}, which vLLM sums over its {dp} replicas")
        return total // dp, "meta"
    if modelled is None:
        raise ValueError(f"{run.path} does not say its blocks, and kvlab cannot model them ({why}): give --blocks")
    facts["blocks"] = Fact(modelled, f"capacity: kvlab's model of vLLM's memory budget on {device}")
    return modelled, "capacity"
