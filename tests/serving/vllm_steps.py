"""Drives vLLM's own V1 scheduler without a model: a trace comes on stdin as JSON, its steps go to stdout as JSON.

Run by test_scheduler_oracle with a Python that imports vLLM. Every scheduled sequence that has caught up with its
tokens gets one more, one time unit per step; all of it is the engine's own code but the model and the clock.
Source: vLLM 0.32, tests/v1/core/utils.py (create_scheduler) for how a scheduler is put together.
"""
from __future__ import annotations

import json
import sys
from types import SimpleNamespace


def scheduler_of(config: dict):
    """A vLLM scheduler of one full-attention layer on `num_blocks` blocks."""
    import torch
    from vllm.config import CacheConfig, DeviceConfig, ObservabilityConfig, ParallelConfig, SchedulerConfig
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    longest = config["max_model_len"]
    scheduling = SchedulerConfig(
        max_num_seqs=config["max_num_seqs"], max_num_batched_tokens=config["max_num_batched_tokens"],
        max_model_len=longest, is_encoder_decoder=False, enable_chunked_prefill=config["chunked_prefill"],
        policy=config["policy"], watermark=config["watermark"], async_scheduling=False,
        scheduler_reserve_full_isl=config["admission"] == "full_prompt")
    cache = CacheConfig(block_size=config["block_size"], enable_prefix_caching=config["prefix_caching"])
    cache.num_gpu_blocks = config["num_blocks"]
    model = SimpleNamespace(uses_mrope=False, is_encoder_decoder=False, is_mm_encoder_only=False,
                            max_model_len=longest, runner_type="generate", is_diffusion=False,
                            supports_multimodal_inputs=False, return_sampling_mask=False)
    whole = SimpleNamespace(
        scheduler_config=scheduling, cache_config=cache, lora_config=None, model_config=model, kv_events_config=None,
        parallel_config=ParallelConfig(), observability_config=ObservabilityConfig(), kv_transfer_config=None,
        ec_transfer_config=None, speculative_config=None, num_speculative_tokens=0, num_lookahead_tokens=0,
        num_prefill_lookahead_tokens=0, max_in_flight_tokens=config["max_num_batched_tokens"],
        max_concurrent_batches=1, use_v2_model_runner=False, is_encoder_decoder=False, is_mm_encoder_only=False,
        device_config=DeviceConfig("cpu"), aux_output_config=SimpleNamespace(enabled=False),
        ec_manager_config=SimpleNamespace(get_encoder_cache_manager_obj=lambda: EncoderCacheManager))
    spec = FullAttentionSpec(block_size=config["block_size"], num_kv_heads=1, head_size=1, dtype=torch.float32)
    pool = KVCacheConfig(num_blocks=config["num_blocks"], kv_cache_tensors=[],
                         kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return Scheduler(whole, pool, structured_output_manager=SimpleNamespace(
        accept_tokens=lambda *_: True), block_size=config["block_size"],
        log_stats=True)


def request_of(one: dict, config: dict, serial: int):
    """The request; where its prompt's pieces are the same as another's, its tokens are, and nowhere else."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request
    own = 1_000_000 * (serial + 1)
    tokens = [piece for piece in one["prefix"] for _ in range(one["piece_tokens"])][:one["prompt_tokens"]]
    tokens += [own + i for i in range(one["prompt_tokens"] - len(tokens))]
    sampling = SamplingParams(max_tokens=one["output_tokens"], ignore_eos=True)
    return own, Request(one["id"], tokens, sampling, None, arrival_time=one["arrival_s"], priority=one["priority"],
                        block_hasher=get_request_block_hasher(config["block_size"], sha256))


def steps(config: dict, trace: list[dict]):
    """One dictionary per step until all have ended; a request arrives before the step of its arrival_s."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.outputs import ModelRunnerOutput
    init_none_hash(sha256)
    scheduler, coming, now, own = scheduler_of(config), list(trace), 0, {}
    pool = scheduler.kv_cache_manager.block_pool
    for serial, one in enumerate(coming):
        own[one["id"]], one["made"] = request_of(one, config, serial)
    while coming or scheduler.requests:
        while coming and coming[0]["arrival_s"] <= now:
            scheduler.add_request(coming.pop(0)["made"])
        if not scheduler.requests:
            now += 1
            continue
        known = {one.request_id: one.num_tokens for one in scheduler.requests.values()}
        planned = scheduler.schedule()
        counts = dict(planned.num_scheduled_tokens)
        ids = list(counts)
        requests, looked = scheduler.requests, scheduler.kv_cache_manager.prefix_cache_stats
        complete = [requests[i].num_computed_tokens == requests[i].num_tokens for i in ids]
        found = dict(
            now=now, tokens=counts, running=[one.request_id for one in scheduler.running],
            waiting=sorted(one.request_id for one in scheduler.waiting),
            preempted=sorted(one.request_id for one in requests.values() if one.status.name == "PREEMPTED"),
            tables={one.request_id: scheduler.kv_cache_manager.get_block_ids(one.request_id)[0]
                    for one in scheduler.running},
            used=pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(), queried=looked.queries, hits=looked.hits)
        sampled = [[own[i] + known[i]] if done else [] for i, done in zip(ids, complete, strict=True)]
        scheduler.update_from_output(planned, ModelRunnerOutput(
            req_ids=ids, req_id_to_index={i: k for k, i in enumerate(ids)}, sampled_token_ids=sampled,
            logprobs=None, prompt_logprobs_dict={}, pooler_output=[None] * len(ids)))
        yield found
        now += bool(ids)


if __name__ == "__main__":
    sys.path[:] = [place for place in sys.path if not place.endswith("tests/serving")]
    found = []
    for case in json.load(sys.stdin):
        found.append(list(steps(case["config"], case["trace"])))
    print(json.dumps(found))
