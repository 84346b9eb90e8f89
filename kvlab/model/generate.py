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

    prompts: [tokens] ids of each sequence. num_blocks: of a paged pool, the null block included. Where it runs dry the
    sequence that came last gives its blocks up, waits, and is computed again from all its tokens: nothing is cut off.
    Raises ValueError where a sequence would not fit even alone.
    """
    if max_new < 1:
        raise ValueError(f"max_new={max_new} must be at least 1")
    if not prompts:
        raise ValueError("there are no prompts; give token ids of at least one")
    texts = [torch.as_tensor(p).tolist() for p in prompts]
    room = max(map(len, texts)) + max_new
    if room > decoder.config.context:
        raise ValueError(f"{room} tokens, prompt and max_new, are beyond the {decoder.config.context} of context of "
                         f"{decoder.name or 'this model'}; take a smaller max_new, or a shorter prompt")
    cache = decoder.cache(room, kv_format=kv_format, variant=variant, layout=layout, sequences=len(texts),
                          num_blocks=num_blocks)
    if cache.pool and cache.pool.blocks_for(room) >= cache.pool.num_blocks:
        raise ValueError(f"a sequence of {room} tokens needs more than the pool's {cache.pool.num_blocks - 1} blocks "
                         f"even alone; give num_blocks={1 + cache.pool.blocks_for(room)} or more")
    done = Generated([[] for _ in texts])
    waiting, running = list(range(len(texts))), []
    while waiting or running:
        running += _admit(cache, texts, done, waiting, running)
        try:
            _step(decoder, cache, texts, done, running)
        except OutOfBlocks:
            victim = running.pop()
            done.preemptions += cache.kv_lens[victim] > 0
            cache.free(victim)
            waiting.insert(0, victim)
            continue
        for b in [b for b in running if len(done.tokens[b]) == max_new or done.tokens[b][-1] in stop]:
            cache.free(b)
            running.remove(b)
    return done


def _admit(cache, texts, done: Generated, waiting: list[int], running: list[int]) -> list[int]:
    """Sequences that may join: in order, as long as all their tokens and one more fit in the free blocks.

    Blocks that the running ones need for their next token are not free: who takes them would be thrown out at once.
    """
    admitted, pool = [], cache.pool
    if pool:
        free = pool.free_blocks - sum(max(0, pool.blocks_for(cache.kv_lens[b] + 1) - len(cache.tables[b]))
                                      for b in running)
    while waiting:
        if pool:
            needed = pool.blocks_for(len(texts[waiting[0]]) + len(done.tokens[waiting[0]]) + 1)
            if needed > free:
                break
            free -= needed
        admitted.append(waiting.pop(0))
    return admitted


def _step(decoder: Decoder, cache, texts, done: Generated, running: list[int]) -> None:
    """One more token of every running sequence; those that hold nothing yet are computed from all their tokens."""
    for b in running:
        if not cache.kv_lens[b]:
            _again(decoder, cache, texts[b], done.tokens[b], b)
    new = [torch.tensor((texts[b] + done.tokens[b])[cache.kv_lens[b]:]) for b in running]
    hidden_TH = decoder.hidden(new, cache, sequences=running)
    last = torch.tensor([len(ids) for ids in new]).cumsum(0) - 1
    logits_BV = decoder.logits(hidden_TH[last])
    if not bool((finite := logits_BV.isfinite().all(1)).all()):
        b = running[int((~finite).nonzero()[0])]
        raise ValueError(f"the output layer of {decoder.name or 'the decoder'} gives NaN or infinite logits, first of "
                         f"sequence {b} at token {len(texts[b]) + len(done.tokens[b])}; its weights are broken")
    for b, token in zip(running, logits_BV.argmax(-1).tolist()):
        done.tokens[b].append(token)
    done.steps += 1


def _again(decoder: Decoder, cache, prompt: list[int], tokens: list[int], sequence: int) -> None:
    """A preempted sequence up to its last token, as it was the first time where the cache depends on the steps.

    A prompt is attended to in full precision there (see DecoderCache), an answer's tokens over what is stored.
    """
    if tokens and any(cache.depends_on_later(layer) for layer in range(len(cache.layers))):
        for piece in (prompt, *([token] for token in tokens[:-1])):
            decoder.hidden([torch.tensor(piece)], cache, sequences=[sequence])
