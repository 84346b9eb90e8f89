"""Requests that fit at the lengths of a trace: at their mean blocks, and at the lengths of percentiles."""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.serving._settings import requests, shared_blocks
from kvlab.serving.block_model import BlockModel

PERCENTILES = (50, 90, 99, 100)


@dataclass(frozen=True, slots=True)
class LengthRow:
    """Requests that a replica's pool holds if all were as `name` says, max_num_seqs aside. blocks: of one, or mean."""
    name: str
    tokens: int
    blocks: float
    requests: int


def length_rows(model: BlockModel, blocks: int, share: float, lengths: Sequence[tuple[int, int]]
                ) -> tuple[LengthRow, ...]:
    """One line for the mean complete request, one half-way through the output, one per percentile of complete lengths.

    lengths: (prompt, output). A mix of many requests holds the mean of their blocks at the lengths they have reached:
    half-way through the output on average while they decode; their prefill, short beside it, is left out. The shared
    prefix is that share of the line's own prompt (of the mean one in the means). Requests beyond max_len are left out.
    """
    held = sorted((one for one in lengths if sum(one) <= model.max_len), key=lambda one: (sum(one), one))
    if not held:
        return ()
    common = shared_blocks(model, round(sum(prompt for prompt, _ in held) / len(held)), share)
    found = [_mean(name, model, blocks, common, reached) for name, reached in (
        ("mean, complete", [prompt + output for prompt, output in held]),
        ("mean, half-way through the output", [prompt + -(-output // 2) for prompt, output in held]))]
    for percent in PERCENTILES:
        prompt, output = held[-(-percent * len(held) // 100) - 1]
        per = model.blocks_per_request(prompt + output)
        found.append(LengthRow("longest" if percent == 100 else f"p{percent}, complete", prompt + output, per,
                               requests(blocks, per, shared_blocks(model, prompt, share))))
    return tuple(found)


def _mean(name: str, model: BlockModel, blocks: int, common: int, reached: list[int]) -> LengthRow:
    per = sum(model.blocks_per_request(n) * times for n, times in Counter(reached).items()) / len(reached)
    return LengthRow(name, round(sum(reached) / len(reached)), per, requests(blocks, per, common))
