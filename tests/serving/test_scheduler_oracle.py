"""kvlab's scheduler against vLLM's own, step by step on the same traces: tokens, order, block ids, hits, preemptions.

vLLM's runs without a model in a Python of its own, named by KVLAB_VLLM (a path to an interpreter that imports vllm),
else in this one where vllm is importable.
"""
import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab.kv.block_pool import BlockPool
from kvlab.serving.request import Request, Served
from kvlab.serving.scheduler import Scheduler, SchedulerConfig

CASES = 400
LIMIT = 600                                     # seconds for all of them; the import alone takes half a minute


def drawn(seed: int) -> dict:
    """A configuration and a trace, small enough that blocks run short often."""
    draw = random.Random(seed)
    block_size = draw.choice((1, 2, 4, 4, 16))
    num_blocks = draw.randint(8, 40)
    longest = min((num_blocks - 1) * block_size, 200)
    config = dict(max_num_seqs=draw.randint(1, 8), max_num_batched_tokens=max(8, draw.choice((8, 16, 40, 200))),
                  chunked_prefill=draw.random() < 0.8, policy=draw.choice(("fcfs", "priority")),
                  watermark=draw.choice((0.0, 0.0, 0.1, 0.3)), admission=draw.choice(("full_prompt", "first_chunk")),
                  prefix_caching=draw.random() < 0.6, block_size=block_size, num_blocks=num_blocks,
                  max_model_len=longest)
    if not config["chunked_prefill"]:
        config["max_num_batched_tokens"] = max(config["max_num_batched_tokens"], longest)
    config["max_num_seqs"] = min(config["max_num_seqs"], config["max_num_batched_tokens"])
    trace, now, pace = [], 0.0, draw.choice((0.2, 1.0, 5.0))
    piece = draw.choice((block_size, 2 * block_size, 3))
    for i in range(draw.randint(1, 25)):
        now += draw.random() * pace
        prompt = draw.randint(1, max(1, longest * 2 // 3))
        output = draw.randint(1, min(40, longest - prompt)) if longest > prompt else 1
        prefix = [draw.randint(1, 2) for _ in range(draw.randint(0, prompt // piece))]
        trace.append(dict(id=str(i), arrival_s=now, prompt_tokens=prompt, output_tokens=output, prefix=prefix,
                          piece_tokens=piece, priority=draw.randint(0, 3)))
    return dict(config=config, trace=[one for one in trace if one["prompt_tokens"] < longest])


def steps(config: dict, trace: list[dict]) -> list[dict]:
    """kvlab's steps, told as vllm_steps tells them."""
    settings = {name: value for name, value in config.items() if name not in ("block_size", "num_blocks")}
    pool = BlockPool(config["num_blocks"], config["block_size"])
    scheduler, coming, now, found = Scheduler(SchedulerConfig(**settings), pool), list(trace), 0, []
    living = {}
    while coming or living:
        while coming and coming[0]["arrival_s"] <= now:
            one = coming.pop(0)
            request = Request(**one | dict(prefix=tuple(one["prefix"])))
            living[request.id] = scheduler.submit(Served(request))
        if not living:
            now += 1
            continue
        before = {name: live.computed for name, live in living.items()}
        counted = (scheduler.queried_tokens, scheduler.cached_tokens)
        step = scheduler.schedule()
        tokens = {live.served.request.id: step.chunks.get(live, 1) for live in scheduler.running
                  if live in step.chunks or live.computed > before[live.served.request.id]}
        pool.check([live.table for live in scheduler.running])
        assert step.batch.tokens == sum(tokens.values()) and step.batch.sequences == len(tokens)
        assert step.batch.kv_tokens == sum(living[name].computed for name in tokens)
        waiting = sorted(set(living) - {live.served.request.id for live in scheduler.running})
        found.append(dict(
            now=now, tokens=tokens, running=[live.served.request.id for live in scheduler.running], waiting=waiting,
            preempted=[name for name in waiting if living[name].served.preemptions],
            tables={live.served.request.id: list(live.table) for live in scheduler.running}, used=pool.used_blocks,
            queried=scheduler.queried_tokens - counted[0], hits=scheduler.cached_tokens - counted[1]))
        now += bool(tokens)
        for live in step.ended:
            del living[live.served.request.id]
        scheduler.finish(step)
    return found


@pytest.fixture(scope="module")
def oracle():
    """vLLM's steps of every case, in one run."""
    python = os.environ.get("KVLAB_VLLM")
    if python is None and importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not importable; KVLAB_VLLM may name a Python that has it")
    cases = [drawn(seed) for seed in range(CASES)]
    ran = subprocess.run([python or sys.executable, str(Path(__file__).with_name("vllm_steps.py"))],
                         input=json.dumps(cases), capture_output=True, text=True, timeout=LIMIT)
    if ran.returncode:
        pytest.fail(f"vLLM's scheduler did not run: {ran.stderr[-2000:]}")
    return list(zip(cases, json.loads(ran.stdout.splitlines()[-1]), strict=True))


def test_every_step_is_vllms(oracle):
    preempted = hits = 0
    for seed, (case, theirs) in enumerate(oracle):
        ours = steps(**case)
        for i, (mine, their) in enumerate(zip(ours, theirs, strict=False)):
            assert mine == their, f"case {seed}, step {i} of {len(theirs)}: {case['config']}"
        assert len(ours) == len(theirs), f"case {seed}: {case['config']}"
        preempted += any(step["preempted"] for step in theirs)
        hits += any(step["hits"] for step in theirs)
    assert preempted > CASES // 10 and hits > CASES // 10, "the traces are too easy to tell anything"
