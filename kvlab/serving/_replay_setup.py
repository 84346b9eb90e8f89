"""What a recorded run was: model, GPUs, blocks and scheduler, each fact with where it comes from."""
from __future__ import annotations

import re
from dataclasses import dataclass

from kvlab.catalog.gpus import GPUSpec
from kvlab.catalog.gpus import gpu as gpu_named
from kvlab.serving._replay_meta import MOST, RESOLVED, Fact, flag, share, whole, word
from kvlab.serving._replay_model import Formats, formats, served_model
from kvlab.serving._replay_run import Run
from kvlab.serving._settings import with_defaults
from kvlab.serving.capacity import Settings, plan
from kvlab.serving.model_work import is_mixture, ranked
from kvlab.serving.scheduler import SchedulerConfig
from kvlab.shapes import ModelSpec, positive
from kvlab.units import GiB

# First vLLM version of each default: asynchronous scheduling (vllm#27614, 0.14.0); CUDA graphs in the memory budget
# (0.21). Utilisation was 0.9 in 0.19.0 and 0.92 in 0.28.0, as resolved in those runs; the change is taken to be 0.21's.
_ASYNC, _GRAPHS, _UTIL_92 = (0, 14), (0, 21), (0, 21)


@dataclass(frozen=True, slots=True)
class Setup:
    """What is replayed. gpu: None where the device is not in the catalogue and its step time is given. blocks: of one
    replica, the null block included; modelled_blocks: by kvlab's capacity model, None with why_no_model where that
    refuses. lockstep: replicas of a mixture wait for one another. nccl_only: tensor-parallel ranks reduce by NCCL
    alone, without vLLM's own kernel. notes: what to know before believing it.
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
    formats: Formats
    nccl_only: bool
    facts: dict[str, Fact]
    notes: tuple[str, ...]


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
    spec, called = served_model(run, model, facts)
    device, name, other = _device(run, gpu, measured, facts)
    tp, dp = _ranks(run, gpus, facts)
    config = _config(run, version, spec, device, tp, facts)
    block_size = whole(run, facts, "block_size", 16, "kv_cache.block_size", f"{RESOLVED}.cache_config.block_size",
                       "engine_kwargs.block_size")
    stored = formats(run, called, facts)
    modelled, why = (_modelled(run, version, spec, device, tp, dp, config, block_size, stored)
                     if device else (None, f"{name} is not in the catalogue"))
    true, kind = _blocks(run, blocks, spec, device, tp, dp, block_size, stored, modelled, why, facts)
    nccl = tp > 1 and flag(run, facts, "disable_custom_all_reduce", False, "engine_kwargs.disable_custom_all_reduce",
                           f"{RESOLVED}.parallel_config.disable_custom_all_reduce")
    return Setup(spec, device, name, tp, dp, dp > 1 and is_mixture(spec), config, block_size, true, kind, modelled, why,
                 stored, nccl, facts, tuple(filter(None, (other, stored.note))))


def _version(run: Run) -> tuple[int, int] | None:
    found = re.match(r"v?(\d+)\.(\d+)", str(run.get("vllm_version") or ""))
    return (int(found[1]), int(found[2])) if found else None


def _since(version: tuple[int, int] | None, first: tuple[int, int]) -> bool:
    return version is None or version >= first


def _device(run: Run, given: str | None, measured: bool, facts: dict[str, Fact]) -> tuple[GPUSpec | None, str, str]:
    """The accelerator, its name, and a note where the argument and the run differ."""
    name = run.get("hardware.device_name")
    name = name if isinstance(name, str) and len(name) < 200 else None
    if given is None and name is None:
        raise ValueError(f"{run.path} does not say its GPU: give it with --gpu, a name from `kvlab ls gpus`")
    if measured:
        facts["gpu"] = Fact(given or name, "argument" if given else "meta")
        return None, given or name, ""
    try:
        device = gpu_named(given or name)
    except KeyError as error:
        if given:
            raise
        raise KeyError(f"the GPU of {run.path}: {error.args[0]}; give it with --gpu") from None
    facts["gpu"] = Fact(device.name, "argument" if given else f"meta: {name}")
    other = given is not None and name is not None and _is_other(name, device)
    return device, device.name, f"meta.json says {name}; {device.name} was given and stands above it" if other else ""


def _is_other(name: str, device: GPUSpec) -> bool:
    try:
        return gpu_named(name) != device
    except KeyError:
        return True


def _ranks(run: Run, given: int | None, facts: dict[str, Fact]) -> tuple[int, int]:
    """Tensor-parallel ranks and replicas."""
    if given is not None:
        positive(gpus=given)
    tp = whole(run, facts, "tensor_parallel_size", None, "engine_kwargs.tensor_parallel_size",
                f"{RESOLVED}.parallel_config.tensor_parallel_size")
    dp = whole(run, facts, "data_parallel_size", 1, "engine_kwargs.data_parallel_size",
                f"{RESOLVED}.parallel_config.data_parallel_size")
    stages = whole(run, facts, "pipeline_parallel_size", 1, "engine_kwargs.pipeline_parallel_size",
                    f"{RESOLVED}.parallel_config.pipeline_parallel_size")
    if stages > 1:
        raise ValueError(f"{run.path} has {stages} pipeline stages; kvlab replays tensor- and data-parallel runs only")
    if tp is None:
        tp = max(1, (given or 1) // dp)
        facts["tensor_parallel_size"] = Fact(tp, "argument: --gpus ÷ replicas" if given else "default: 1")
    if given is not None and given != tp * dp:
        raise ValueError(f"--gpus {given} does not fit the run: it has {dp} replicas of {tp} GPUs, {tp * dp} in all; "
                         f"leave --gpus out or give {tp * dp}")
    return tp, dp


def _config(run: Run, version: tuple[int, int] | None, spec: ModelSpec, device: GPUSpec | None, tp: int,
            facts: dict[str, Fact]) -> SchedulerConfig:
    where, cache, kwargs = f"{RESOLVED}.scheduler_config", f"{RESOLVED}.cache_config", "engine_kwargs"
    said = all(run.get(f"{where}.{name}", f"{kwargs}.{name}") for name in ("max_num_seqs", "max_num_batched_tokens"))
    usual = with_defaults(spec, device, Settings(tp, max_len=1)) if device and not said else None
    source = "default of vLLM 0.32's server on this GPU" if usual else "default of vLLM"
    seqs = whole(run, facts, "max_num_seqs", usual.max_num_seqs if usual else 256, f"{where}.max_num_seqs",
                 f"{kwargs}.max_num_seqs", source=source)
    tokens = whole(run, facts, "max_num_batched_tokens", usual.max_batched_tokens if usual else 2048,
                   f"{where}.max_num_batched_tokens", f"{kwargs}.max_num_batched_tokens", source=source)
    longest = whole(run, facts, "max_model_len", None, f"{RESOLVED}.model_config.max_model_len",
                    f"{kwargs}.max_model_len")
    policy = word(run, "policy", "", f"{where}.policy", f"{kwargs}.scheduling_policy")
    facts["policy"] = Fact(policy or "fcfs", "meta" if policy else "default of vLLM")
    reserve = flag(run, facts, "reserve_full_isl", True, f"{where}.scheduler_reserve_full_isl")
    chunked = flag(run, facts, "chunked_prefill", True, f"{where}.enable_chunked_prefill",
                   f"{kwargs}.enable_chunked_prefill")
    caching = flag(run, facts, "prefix_caching", True, "kv_cache.enable_prefix_caching",
                   f"{cache}.enable_prefix_caching", f"{kwargs}.enable_prefix_caching")
    ahead = flag(run, facts, "async_scheduling", _since(version, _ASYNC), f"{where}.async_scheduling",
                 f"{kwargs}.async_scheduling")
    watermark = share(run, "watermark", 0.0, f"{where}.watermark", f"{kwargs}.watermark")
    facts["watermark"] = Fact(watermark, "meta" if watermark else "default of vLLM")
    return SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens, policy=policy or "fcfs",
                           max_model_len=longest, admission="full_prompt" if reserve else "first_chunk",
                           chunked_prefill=chunked, prefix_caching=caching, watermark=watermark,
                           async_scheduling=ahead)


def _modelled(run: Run, version: tuple[int, int] | None, spec: ModelSpec, device: GPUSpec, tp: int, dp: int,
              config: SchedulerConfig, block_size: int, stored: Formats) -> tuple[int | None, str]:
    """Blocks of one replica by kvlab's capacity model, or why it has none."""
    util = share(run, "gpu_memory_utilization", 0.92 if _since(version, _UTIL_92) else 0.9,
                 "kv_cache.gpu_memory_utilization", f"{RESOLVED}.cache_config.gpu_memory_utilization",
                 "engine_kwargs.gpu_memory_utilization")
    pool = whole(run, {}, "kv_cache_memory_bytes", None, "kv_cache.kv_cache_memory_bytes",
                 "engine_kwargs.kv_cache_memory_bytes", most=10**15)
    try:
        settings = Settings(tp, util, config.max_num_seqs, config.max_num_batched_tokens, block_size,
                            config.max_model_len, stored.kv_format,
                            weights_gib=_rank_bytes(spec, tp, dp, stored) * tp / GiB,
                            graphs_gib=None if _since(version, _GRAPHS) else 0.0,
                            pool_gib=pool / GiB if pool else None)
        return plan(spec, device, tp, settings).blocks, ""
    except (ValueError, KeyError) as error:
        return None, str(error.args[0] if error.args else error)


def _rank_bytes(spec: ModelSpec, tp: int, dp: int, stored: Formats) -> float:
    """Bytes of weights on one rank: a mixture's experts are spread over all of them, the rest over a replica's."""
    work = ranked(spec, tp=tp, dp=dp if is_mixture(spec) else 1, kv_format=stored.kv_format, itemsize=stored.itemsize)
    experts = work.experts * work.expert_bytes
    return (spec.params * stored.itemsize - experts * tp * work.dp) / tp + experts


def _blocks(run: Run, given: int | None, spec: ModelSpec, device: GPUSpec | None, tp: int, dp: int, block_size: int,
            stored: Formats, modelled: int | None, why: str, facts: dict[str, Fact]) -> tuple[int, str]:
    """Blocks of one replica, and whether they are the engine's own, given, or modelled."""
    total = whole(run, facts, "blocks", None, "kv_cache.num_gpu_blocks", f"{RESOLVED}.cache_config.num_gpu_blocks")
    if total is None and (tokens := whole(run, {}, "num_kv_tokens", None, "kv_cache.num_kv_tokens", most=10**9)):
        total = tokens // block_size
        facts["blocks"] = Fact(total, f"meta: num_kv_tokens {tokens:,} ÷ {block_size}")
    if total is not None and total < 2 * dp:
        raise ValueError(f"{run.path}: {total} blocks for {dp} replicas are none to serve with, beside the null block")
    if given is not None:
        positive(blocks=given)
        if given > MOST:
            raise ValueError(f"blocks={given:,} are more than the {MOST:,} that are simulated")
        summed = dp > 1 and (given == total or _too_many(given, spec, device, tp, dp, block_size, stored))
        facts["blocks"] = Fact(given // dp if summed else given,
                               f"argument: {given:,}, taken for the sum over {dp} replicas, as vLLM's metadata has it: "
                               + ("meta.json says so" if given == total else "one's memory does not hold them")
                               if summed else "argument: of one replica")
        return facts["blocks"].value, "argument"
    if total is not None:
        if dp > 1:
            # Source: vLLM 0.32 v1/engine/core_client.py: num_gpu_blocks is the sum over data-parallel engines.
            facts["blocks"] = Fact(total // dp, f"meta: {total:,}, which vLLM sums over its {dp} replicas")
        return total // dp, "meta"
    if modelled is None:
        raise ValueError(f"{run.path} does not say its blocks, and kvlab cannot model them ({why}): give --blocks")
    facts["blocks"] = Fact(modelled, f"capacity: kvlab's model of vLLM's memory budget on {device.name}")
    return modelled, "capacity"


def _too_many(blocks: int, spec: ModelSpec, device: GPUSpec | None, tp: int, dp: int, block_size: int,
              stored: Formats) -> bool:
    """Whether so many blocks are more than a rank's memory holds beside its weights."""
    if device is None or device.memory_bytes is None or spec.params is None:
        return False
    token = ranked(spec, tp=tp, dp=dp if is_mixture(spec) else 1, kv_format=stored.kv_format,
                   itemsize=stored.itemsize).kv_bytes_per_token
    return blocks * block_size * token > 1.07 * device.memory_bytes - _rank_bytes(spec, tp, dp, stored)
