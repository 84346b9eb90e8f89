"""Benchmark gates of the serving room: kvlab's block pool against vLLM's own, on the same operations.

Both pools live in one process and take turns; each pair of rounds hands out the same blocks, which is checked. That
process is a Python that imports vLLM: this one, or the one that the environment variable KVLAB_VLLM names. Each pool
is driven as its engine would: vLLM's by get_new_blocks, free_blocks, touch, get_cached_block and cache_full_blocks,
as vllm/v1/core/single_type_kv_cache_manager.py does. Measured against vLLM 0.32.0; its version is not asked for.
"""
from __future__ import annotations

import gc
import importlib.util
import json
import os
import random
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from kvlab.kv.block_pool import BlockPool

NUM_BLOCKS, BLOCK_SIZE, LIVE = 8192, 16, 64
PAIRS, OPERATIONS = 24, 4000
MIXES = ("allocate and free", "hashes and hits", "single-block appends")


def gates() -> list[tuple]:
    """(name, goal, measure) of every gate; all are ratios of time."""
    return [(f"vLLM's block pool ÷ kvlab's, {mix}", ">= 1", partial(_ratio, mix)) for mix in MIXES]


def _ratio(mix: str) -> tuple[float, float, float]:
    from kvlab.bench_models import NotRun
    from kvlab.probes._clock import paired_ratio
    here = importlib.util.find_spec("vllm") is not None
    if not here and not os.environ.get("KVLAB_VLLM"):
        raise NotRun("vllm does not import here, and KVLAB_VLLM names no Python that has it")
    python = sys.executable if here else os.environ["KVLAB_VLLM"]
    code = f"from kvlab.bench_serving import _pairs, json; print('PAIRS' + json.dumps(_pairs({mix!r})))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=600,
                          cwd=Path(__file__).parents[1], env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"})
    if done.returncode:
        raise RuntimeError(f"{python} ended with status {done.returncode}: {done.stderr.strip()[-200:]}")
    pairs = json.loads(done.stdout.split("PAIRS")[-1])
    return paired_ratio([theirs for theirs, _ in pairs], [ours for _, ours in pairs])


def _operations(mix: str) -> list[tuple]:
    """("come" | "grow" | "go", sequence, hashes of its full blocks, blocks to add), LIVE sequences at a time.

    Lengths 1 … 64 blocks. With hashes, half of the sequences begin with one of 32 prefixes of up to 32 blocks.
    """
    draw = random.Random(0)
    prefixes = [[draw.randbytes(32) for _ in range(draw.randint(1, 32))] for _ in range(32)]
    operations, live, held = [], [], {}
    for i in range(OPERATIONS):
        if mix == "single-block appends" and len(live) == LIVE:
            sequence = live[i % LIVE]
            operations.append(("grow", sequence, (), 1))
            held[sequence] += 1
            if held[sequence] < 64:
                continue
            live.remove(sequence)
            operations.append(("go", sequence, (), 0))
        elif len(live) == LIVE:
            operations.append(("go", live.pop(draw.randrange(LIVE)), (), 0))
        blocks, hashes = draw.randint(1, 64), []
        if mix == "hashes and hits":
            hashes = list(draw.choice(prefixes)) if draw.random() < 0.5 else []
            hashes += [draw.randbytes(32) for _ in range(blocks - len(hashes))]
            blocks = len(hashes) + 1                            # the last one is not full
        operations.append(("come", i, hashes, blocks))
        live.append(i)
        held[i] = blocks
    return operations + [("go", sequence, (), 0) for sequence in live]


def _ours(pool: BlockPool, operations: list[tuple]) -> dict[int, list[int]]:
    tables, last = {}, {}
    for name, sequence, hashes, blocks in operations:
        if name == "grow":
            tables[sequence] += pool.take(1)
        elif name == "go":
            pool.release(last.setdefault(sequence, tables.pop(sequence)))
        elif hashes:
            table = pool.cached(hashes)
            cached = len(table)
            pool.share(table)
            table += pool.take(blocks - cached)
            for i in range(cached, len(hashes)):
                pool.remember(table[i], hashes[i])
            tables[sequence] = table
        else:
            tables[sequence] = pool.take(blocks)
    return last


def _theirs(pool, operations: list[tuple]) -> dict[int, list]:
    tables, last = {}, {}
    for name, sequence, hashes, blocks in operations:
        if name == "grow":
            tables[sequence] += pool.get_new_blocks(1)
        elif name == "go":
            pool.free_blocks(reversed(last.setdefault(sequence, tables.pop(sequence))))
        elif hashes:
            table = []
            for block_hash in hashes:
                if not (found := pool.get_cached_block(block_hash, [0])):
                    break
                table += found
            cached = len(table)
            pool.touch(table)
            table += pool.get_new_blocks(blocks - cached)
            pool.cache_full_blocks(SimpleNamespace(block_hashes=hashes), table, cached, len(hashes), BLOCK_SIZE, 0)
            tables[sequence] = table
        else:
            tables[sequence] = pool.get_new_blocks(blocks)
    return last


def _pairs(mix: str) -> list[tuple[float, float]]:
    """Seconds of (vLLM's pool, kvlab's) per round of operations; the first of a pair alternates."""
    from vllm.v1.core.block_pool import BlockPool as Theirs
    operations = _operations(mix)
    ours, theirs = BlockPool(NUM_BLOCKS, BLOCK_SIZE), Theirs(NUM_BLOCKS, mix == "hashes and hits", BLOCK_SIZE)
    pairs = []
    for i in range(PAIRS + 2):                                  # two rounds to warm up: the cache fills
        took, tables = {}, {}
        gc.collect()
        gc.disable()
        for run, pool in ((_theirs, theirs), (_ours, ours))[::1 if i % 2 else -1]:
            began = time.thread_time()
            tables[run] = run(pool, operations)
            took[run] = time.thread_time() - began
        gc.enable()
        if {s: [block.block_id for block in table] for s, table in tables[_theirs].items()} != tables[_ours]:
            raise RuntimeError("the two pools handed out different blocks: not the same work")
        pairs.append((took[_theirs], took[_ours]))
    ours.check([])
    return pairs[2:]
