"""kvlab's block pool beside vLLM's, on the same random operations: blocks, order of the free queue, hits, evictions.

vLLM runs in a child, by this interpreter if it imports vLLM, else by the one that KVLAB_VLLM names. Without either the
comparison is skipped.
"""
import importlib.util
import json
import os
import random
import subprocess
import sys

import pytest

from kvlab.kv.block_pool import BlockPool, OutOfBlocks

VLLM = r"""
import json, sys
from types import SimpleNamespace
from vllm.v1.core.block_pool import BlockPool
SIZE = 4

class Counting(BlockPool):
    evictions = 0
    def _maybe_evict_cached_block(self, block):
        evicted = super()._maybe_evict_cached_block(block)
        self.evictions += evicted
        return evicted

def named(number):
    return number.to_bytes(32, "little")

def do(pool, name, *args):
    if name == "take":
        try:
            return [block.block_id for block in pool.get_new_blocks(*args)]
        except ValueError:
            return "refused"
    if name == "share":
        return pool.touch([pool.blocks[i] for i in args[0]])
    if name == "release":
        return pool.free_blocks(pool.blocks[i] for i in reversed(args[0]))
    if name == "remember":
        request = SimpleNamespace(block_hashes=[named(args[1])])
        return pool.cache_full_blocks(request, [pool.blocks[args[0]]], 0, 1, SIZE, 0)
    hits = []
    for number in args[0]:
        found = pool.get_cached_block(named(number), [0])
        if not found:
            break
        hits.append(found[0].block_id)
    return hits

answers = []
for num_blocks, operations in json.load(sys.stdin):
    pool, seen = Counting(num_blocks, True, SIZE), []
    for operation in operations:
        told = do(pool, *operation)
        seen.append([told, [b.block_id for b in pool.free_block_queue.get_all_free_blocks()], pool.evictions,
                     [int.from_bytes(b.block_hash[:32], "little") if b.block_hash else None for b in pool.blocks]])
    answers.append(seen)
print("ANSWERS" + json.dumps(answers))
"""


class Life:
    """A random life of a pool: requests over a small tree of prefixes come, grow, are forked and go."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.pool = BlockPool(self.random.randint(4, 40), 4)
        self.tables, self.operations, self.seen = [], [], []    # a table: [block ids, hashes, how many remembered]
        for _ in range(80):
            self.random.choice([self.come, self.come, self.grow, self.grow, self.settle, self.fork, self.go])()

    def do(self, name, *args):
        pool = self.pool
        try:
            told = getattr(pool, name)(*args)
        except OutOfBlocks:
            told = "refused"
        pool.check([table[0] for table in self.tables] if name == "cached" else None)
        self.operations.append([name, *args])
        self.seen.append([told, pool._queue(), pool.evictions, list(pool._hashes)])
        return told

    def come(self):
        path, hashes = 1, []
        for _ in range(self.random.randint(1, 6)):
            path = path * 2 + self.random.randrange(2)
            hashes.append(path)
        hits = self.do("cached", hashes[:-1])
        self.do("share", list(hits))
        fresh = self.do("take", len(hashes) - len(hits) + self.random.randrange(2))
        if fresh == "refused":
            self.do("release", list(hits))
            return
        self.tables.append([hits + fresh, hashes, len(hits)])
        if self.random.random() < 0.7:
            for _ in range(len(hashes) - len(hits)):
                self.settle(self.tables[-1])

    def settle(self, table=None):
        """The next full block of a table gets its hash."""
        if table is None:
            table = self.random.choice(self.tables) if self.tables else [[], [], 0]
        ids, hashes, done = table
        if done < len(hashes):
            if self.pool._hashes[ids[done]] is None:            # a fork's blocks may have theirs already
                self.do("remember", ids[done], hashes[done])
            table[2] += 1

    def grow(self):
        if self.tables and (fresh := self.do("take", 1)) != "refused":
            self.random.choice(self.tables)[0].extend(fresh)

    def fork(self):
        if self.tables:
            ids, hashes, done = self.random.choice(self.tables)
            self.do("share", list(ids))
            self.tables.append([list(ids), hashes, done])

    def go(self):
        if self.tables:
            table = self.tables.pop(self.random.randrange(len(self.tables)))
            self.do("release", list(table[0]))


def vllm_python() -> str:
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    if not (named := os.environ.get("KVLAB_VLLM")):
        pytest.skip("vllm does not import here, and KVLAB_VLLM names no Python that has it")
    return named


def test_every_operation_does_what_vllms_pool_does():
    python = vllm_python()
    lives = [Life(seed) for seed in range(200)]
    given = json.dumps([(life.pool.num_blocks, life.operations) for life in lives])
    done = subprocess.run([python, "-c", VLLM], input=given, capture_output=True, text=True, timeout=600,
                          env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"})
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(done.stdout.split("ANSWERS")[-1])
    for seed, (life, theirs) in enumerate(zip(lives, answers, strict=True)):
        for i, (operation, ours, their) in enumerate(zip(life.operations, life.seen, theirs, strict=True)):
            assert ours == their, f"life {seed}, operation {i}: {operation}"


def test_the_lives_are_worth_comparing():
    lives = [Life(seed) for seed in range(200)]
    done = [(operation[0], seen[0]) for life in lives for operation, seen in zip(life.operations, life.seen)]
    assert sum(told == "refused" for _, told in done) > 100
    assert sum(len(told) for name, told in done if name == "cached") > 300, "hits"
    assert sum(life.pool.evictions for life in lives) > 500
    assert sum(bool(life.pool._twins) for life in lives) > 20, "hashes that several blocks have"
