"""Small traces and configurations for the scheduler, and a scheduler driven step by step, one time unit each."""
from __future__ import annotations

from collections.abc import Callable, Iterable

from hypothesis import strategies as st

from kvlab.kv.block_pool import BlockPool
from kvlab.serving.live import Step
from kvlab.serving.request import Request, Served
from kvlab.serving.scheduler import Scheduler
from kvlab.serving.scheduler_config import ADMISSIONS, BATCHINGS, POLICIES, SHORT_BY, SchedulerConfig

NUM_BLOCKS, BLOCK_SIZE = 12, 4                  # of most of these tests: room for 44 tokens


@st.composite
def traces(draw, most: int = 60, prefixes: bool = True) -> list[Request]:
    """Up to 12 requests in order of arrival, some too long for the pool, some with prompts in common."""
    now, found = 0.0, []
    for i in range(draw(st.integers(0, 12))):
        now += draw(st.sampled_from((0.0, 0.3, 1.0, 7.5)))
        output = draw(st.integers(1, most // 2))
        found.append(Request(
            str(i), now, draw(st.integers(1, most)), output, priority=draw(st.integers(-1, 2)),
            max_tokens=draw(st.sampled_from((None, output + 3))),
            prefix=tuple(draw(st.lists(st.integers(1, 2), max_size=8))) if prefixes else (), piece_tokens=BLOCK_SIZE))
    return found


configs = st.builds(
    SchedulerConfig, max_num_seqs=st.integers(1, 5), max_num_batched_tokens=st.sampled_from((3, 8, 20, 100)),
    policy=st.sampled_from(POLICIES), admission=st.sampled_from(ADMISSIONS), batching=st.sampled_from(BATCHINGS),
    chunked_prefill=st.booleans(), prefix_caching=st.booleans(), watermark=st.sampled_from((0.0, 0.1, 0.5)),
    aging_s=st.sampled_from((None, 2.0)), short_threshold=st.integers(1, 40), short_by=st.sampled_from(SHORT_BY),
    max_model_len=st.sampled_from((None, 30)))


def of_lengths(*lengths: tuple[int, int], arrivals: Iterable[float] | None = None, **other) -> list[Request]:
    """Requests of (prompt, output) tokens, named a, b, c …, all at 0 unless arrivals say otherwise."""
    times = list(arrivals) if arrivals is not None else [0.0] * len(lengths)
    return [Request("abcdefghijklmnopqrstuvwxyz"[i], times[i], *one, **other) for i, one in enumerate(lengths)]


def drive(requests: Iterable[Request], config: SchedulerConfig, num_blocks: int = NUM_BLOCKS,
          block_size: int = BLOCK_SIZE, *, each: Callable[[Scheduler, Step, float], None] = lambda *_: None,
          most_steps: int = 20_000) -> tuple[Scheduler, list[Served]]:
    """The scheduler until all have ended, one time unit per step; each is called before a step is over."""
    pool = BlockPool(num_blocks, block_size)
    scheduler, coming, now, done = Scheduler(config, pool), list(requests), 0.0, []
    for _ in range(most_steps):
        while coming and coming[0].arrival_s <= now:
            served = Served(coming.pop(0))
            if scheduler.submit(served) is None:
                done.append(served)
        if not (scheduler.running or scheduler.waiting):
            if not coming:
                return scheduler, done
            now = coming[0].arrival_s
            continue
        step = scheduler.schedule()
        each(scheduler, step, now)
        assert step.batch.sequences or step.preempted, "a step without work: nobody would ever move"
        for live in step.admitted:
            live.served.scheduled_s = now
        now += 1
        for live in step.first:
            live.served.first_token_s = now
        for live in step.ended:
            live.served.last_token_s, live.served.generated = now, live.known - live.prompt
            done.append(live.served)
        scheduler.finish(step)
    raise AssertionError(f"still at work after {most_steps} steps")


def names(lives) -> str:
    return "".join(live.served.request.id for live in lives)
