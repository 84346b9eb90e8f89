"""Benchmark gates of the simulator: steps a second at 64 running, and a long trace in bounded time and memory.

All times are this process's CPU time, which neighbours on the machine disturb less than the clock on the wall.
"""
from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import partial

from kvlab.serving.request import Request
from kvlab.serving.scheduler import SchedulerConfig
from kvlab.serving.simulator import simulate
from kvlab.serving.step_time import fixed

ROUNDS = 7
RUNNING, STEPS = 64, 4000
LONG = 100_000                                  # requests


def gates() -> list[tuple]:
    """(name, unit, goal, measure) of every gate; a measurement and its interval, as low and high of all rounds."""
    return [
        (f"simulated steps a second, {RUNNING} running", "steps/s", ">= 20000", partial(steps_per_second, False)),
        (f"simulated steps a second, {RUNNING} running, prefix caching", "steps/s", ">= 20000",
         partial(steps_per_second, True)),
        (f"{LONG:,} requests", "s", "<= 60", long_trace),
        (f"peak memory, {LONG // 5:,} requests ÷ {LONG // 50:,}", "ratio", "<= 1.3", memory_growth),
    ]


def steps_per_second(prefix_caching: bool) -> tuple[float, float, float]:
    """64 sequences of 500 prompt tokens that decode, no end among them; median, least and most of the rounds."""
    requests = [Request(str(i), 0.0, 500, STEPS) for i in range(RUNNING)]
    config = SchedulerConfig(max_num_seqs=RUNNING, max_num_batched_tokens=RUNNING * 500, prefix_caching=prefix_caching)
    rates = []
    for _ in range(ROUNDS):
        began = time.process_time()
        done = simulate(requests, config, num_blocks=RUNNING * (500 + STEPS) // 16 + 100, step_time=fixed(0.01))
        rates.append(done.steps / (time.process_time() - began))
    return sorted(rates)[ROUNDS // 2], min(rates), max(rates)


def trace(count: int) -> Iterator[Request]:
    """A chat-like trace: Poisson arrivals, prompts of 20 … 2,000 tokens, outputs of 1 … 300, seven in ten shared."""
    draw, now = random.Random(0), 0.0
    for i in range(count):
        now += draw.expovariate(20.0)
        prefix = (draw.randint(1, 50),) * (draw.random() < 0.7)
        yield Request(str(i), now, draw.randint(20, 2000), min(300, 1 + int(draw.expovariate(1 / 100))),
                      prefix=prefix, piece_tokens=256)


def served(count: int) -> None:
    """The trace on one engine of 8,000 blocks, a prefix cache in them; nothing kept of who has ended."""
    gone = [0]

    def sink(_):
        gone[0] += 1
    simulate(trace(count), SchedulerConfig(max_num_seqs=128, max_num_batched_tokens=8192, prefix_caching=True),
             num_blocks=8000, step_time=fixed(0.03), every_s=None, sink=sink)
    if gone[0] != count:
        raise RuntimeError(f"{gone[0]:,} of {count:,} requests were told to the sink")


def long_trace() -> tuple[float, float, float]:
    began = time.process_time()
    served(LONG)
    took = time.process_time() - began
    return took, took, took


def memory_growth() -> tuple[float, float, float]:
    """Peak of what Python allocates, by tracemalloc, when ten times as many requests pass through."""
    import gc
    import tracemalloc
    peaks = []
    for count in (LONG // 50, LONG // 5):
        gc.collect()
        tracemalloc.start()
        served(count)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    ratio = peaks[1] / peaks[0]
    return ratio, ratio, ratio
