"""Greedy generation of a batch, in whatever cache; a paged pool that runs dry preempts a sequence and recomputes it."""
from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvlab.kv.block_pool import OutOfBlocks
from kvlab.kv.cache import Layout

if TYPE_CHECKING:
    from torch import Tensor

    from kvlab.model.decoder import Decoder


@dataclass
class Generated:
    """The new token ids of each prompt, and how often a sequence gave its blocks up and was computed anew."""
    tokens: list[list[int]]
    preemptions: int = 0
    steps: int = 0


def greedy(decoder: Decoder, prompts: Sequence[Tensor], max_new: int, *, kv_format="fp32", variant="sdpa",
           layout: Layout | None = None, num_blocks: int | None = None, stop: Collection[int] = ()) -> Generated:
    """The most probable next token, max_new times or until a token of `stop`, which is kept.

    prompts: token ids of each sequence. num_blocks: of a paged pool, the null block included. Where it runs dry the
    sequence that came last gives its blocks up, waits, and is computed again from all its tokens: nothing is cut off.
    Raises ValueError where a sequence would not fit even alone.
    """
    if max_new < 1:
        raise ValueError(f"max_new={max_new} must be at least 1")
    if not prompts:
        raise ValueError("there are no prompts; give token ids of at least one")
    texts = [torch.as_tensor(p).tolist() for p in prompts]
    room = max(map(len, texts)) + max_new
    cache = decoder.cache(room, kv_format=kv_format, variant=variant, layout=layout, sequences=len(texts),
                          num_blocks=num_blocks)
    done = Generated([[] for _ in texts])
    waiting, running = list(range(len(texts))), []
    while waiting or running:
        running += _admit(cache, texts, done, waiting, running)
        try:
            _step(decoder, cache, texts, done, running)
        except OutOfBlocks as short:
            victim = running.pop()
            if not running:
                raise ValueError(f"sequence {victim} needs more than the pool's {cache.pool.num_blocks - 1} blocks "
                                 f"even alone ({short.needed} more, {short.free} free); give num_blocks="
                                 f"{1 + cache.pool.blocks_for(room)} or more") from None
            cache.free(victim)
            waiting.insert(0, victim)
            done.preemptions += 1
            continue
        for b in [b for b in running if len(done.tokens[b]) == max_new or done.tokens[b][-1] in stop]:
            cache.free(b)
            running.remove(b)
    return done


def _admit(cache, texts, done: Generated, waiting: list[int], running: list[int]) -> list[int]:
    """Sequences that may join: in order, as long as all their tokens and one more fit in the free blocks."""
    admitted, free = [], cache.pool.free_blocks if cache.pool else None
    while waiting:
        if cache.pool:
            needed = cache.pool.blocks_for(len(texts[waiting[0]]) + len(done.tokens[waiting[0]]) + 1)
            if needed > free and (running or admitted):     # alone it is tried, and the step says what is lacking
                break
            free -= needed
        admitted.append(waiting.pop(0))
    return admitted


def _step(decoder: Decoder, cache, texts, done: Generated, running: list[int]) -> None:
    """One more token of every running sequence; those that hold nothing yet are computed from all their tokens."""
    new = [torch.tensor((texts[b] + done.tokens[b])[cache.kv_lens[b]:]) for b in running]
    hidden_TH = decoder.hidden(new, cache, sequences=running)
    last = torch.tensor([len(ids) for ids in new]).cumsum(0) - 1
    for b, token in zip(running, decoder.logits(hidden_TH[last]).argmax(-1).tolist()):
        done.tokens[b].append(token)
    done.steps += 1
