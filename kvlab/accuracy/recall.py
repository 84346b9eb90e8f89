"""Associative recall, trained from scratch: what a group ratio and a head_dim can remember.

A sequence holds N key-value pairs, drawn anew for every batch; a query names a key, the answer is its value. Nothing
can be learned by heart: what is read must be found in the KV cache. Source: multi-query associative recall, Arora et
al. 2023 (arXiv 2312.04927).
Legend: Z = seed, B = sequence, T = query token, V = value.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kvlab.accuracy._recall_cell import TASKS, RecallCell
from kvlab.accuracy._recall_model import Batch, CachedAttention, draw, init, logits
from kvlab.attention import VariantRef
from kvlab.attention._base import digest, no_device
from kvlab.record.reading import Reading, failed

__all__ = ["METRICS", "QUERIES", "TASKS", "RecallCell", "Score", "Trained", "evaluate", "rows", "train"]
METRICS = {"recall": "ratio", "nll": "nat", "kv_floats_per_token": "count", "parameters": "count"}
QUERIES = 2048                                          # asked of each seed at each length
CHUNK_TOKENS = 65_536                                   # stored tokens of one evaluation call
CALIBRATION_SEQUENCES = 8
# what a generator's seed is built from, so that training, evaluation and calibration never see the same batch
_TRAINING, _EVALUATION, _CALIBRATION = 1, 2, 3


@dataclass
class Trained:
    """The models of a cell: weights [seeds, …] by name, and the step at which the loss of a seed was not finite."""
    cell: RecallCell
    weights: dict[str, Tensor]
    diverged: dict[int, int] = field(default_factory=dict)

    def seed(self, seed: int) -> dict[str, Tensor]:
        """The weights of one seed, with an axis of length 1 for it."""
        at = self.cell.seeds.index(seed)
        return {name: w[at:at + 1] for name, w in self.weights.items()}


class Score(NamedTuple):
    """recall: share of queries whose most likely value is the right one; nll: nats; queries: how many were asked."""
    recall: float
    nll: float
    queries: int


def train(cell: RecallCell, step: Callable[[int], None] = lambda i: None) -> Trained:
    """Train the models of all seeds side by side; each step is announced to `step`.

    A seed's models and batches come from its own generators and its gradient is clipped by its own norm, so that it
    comes out the same whichever other seeds are trained beside it (on a GPU: up to rounding). A seed whose loss is not
    finite is noted and disturbs no other. Raises ValueError for a device that is not there.
    """
    if why := no_device(cell.device):
        raise ValueError(why)
    weights = {name: w.requires_grad_() for name, w in init(cell).items()}
    generators = [_generator(cell, seed, _TRAINING) for seed in cell.seeds]
    # the loss is the sum over seeds, and AdamW works element by element: no seed's step depends on another's
    optimiser = torch.optim.AdamW(weights.values(), cell.lr, betas=(0.9, 0.98), weight_decay=0.01)
    steps = cell.training_steps
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, cell.lr, total_steps=max(2, steps), pct_start=0.15,
                                                   cycle_momentum=False)
    trained = Trained(cell, weights)
    for i in range(steps):
        step(i)
        batch = draw(cell, cell.pairs[i % len(cell.pairs)], cell.batch_size, generators)
        loss_Z = _nll(logits(cell, weights, batch), batch).mean((1, 2))
        for seed, fine in zip(cell.seeds, loss_Z.isfinite().tolist()):
            if not fine:
                trained.diverged.setdefault(seed, i)
        if len(trained.diverged) == len(cell.seeds):
            break
        optimiser.zero_grad()
        loss_Z.sum().backward()
        _clip(list(weights.values()))
        optimiser.step()
        schedule.step()
    trained.weights = {name: w.detach() for name, w in weights.items()}
    return trained


def evaluate(trained: Trained, seed: int, pairs: int, kv_format: str = "fp32", variant: str = "sdpa") -> Score:
    """Recall of one seed's model over at least QUERIES queries at N = pairs.

    Attention is the variant's, over a KVCache in that format; its static scales, if it has any, come from other
    sequences. The questions depend on seed and N alone: every architecture is asked the same ones.
    Raises ValueError where the model diverged, or where the variant cannot attend to such a cache.
    """
    cell = trained.cell
    if seed in trained.diverged:
        raise ValueError(_diverged(cell, seed, trained.diverged[seed]))
    weights, attend = trained.seed(seed), CachedAttention(cell, kv_format, VariantRef.of(variant))
    sequences = -(-QUERIES // cell.queries)
    with torch.no_grad():
        if attend.calibrating:
            sample = draw(cell, pairs, CALIBRATION_SEQUENCES, [_generator(cell, seed, _CALIBRATION, pairs)])
            logits(cell, weights, sample, attend)
            attend.calibrating = False
        batch = draw(cell, pairs, sequences, [_generator(cell, seed, _EVALUATION, pairs)])
        each = max(1, CHUNK_TOKENS // (pairs * cell.tokens_per_pair))
        right = nll = 0.0
        for first in range(0, sequences, each):
            part = Batch(*(x[:, first:first + each] for x in batch))
            found = logits(cell, weights, part, attend)
            right += float((found.argmax(-1) == part.answer_ZBT).sum())
            nll += float(_nll(found, part).double().sum())
    asked = sequences * cell.queries
    return Score(right / asked, nll / asked, asked)


def rows(cell: RecallCell, step: Callable[[int], None] = lambda i: None, hardware: str = "") -> list[dict]:
    """Train the cell and score every seed at every N in every format: one case each, or its failed rows."""
    before = torch.get_num_threads()
    torch.set_num_threads(cell.threads)
    try:
        trained = train(cell, step)
        return [row for seed in cell.seeds for n in cell.evaluated for name in cell.kv_formats
                for row in _case(trained, seed, n, name, step, hardware)]
    finally:
        torch.set_num_threads(before)


def _case(trained, seed, pairs, kv_format, step, hardware) -> Iterator[dict]:
    cell = trained.cell
    one = replace(cell, seeds=(seed,), evaluated=(pairs,), kv_formats=(kv_format,))
    columns = {**one.columns(), "seed": seed, "kv_len": pairs * cell.tokens_per_pair, "kv_format": kv_format,
               "variant": "sdpa", "comparison_id": cell.comparison_id, "case_id": digest(
                   {"cell": cell.comparison_id, "seed": seed, "pairs": pairs, "kv_format": kv_format})}
    about = dict(source="accuracy.recall", hardware=hardware)
    step(cell.training_steps)
    if seed in trained.diverged:
        why = _diverged(cell, seed, trained.diverged[seed])
        found = [failed(metric, METRICS[metric], why, **about) for metric in ("recall", "nll")]
    else:
        score = evaluate(trained, seed, pairs, kv_format)
        note = f"chance: recall {cell.chance:.4f}, nll {math.log(cell.num_values):.3f}"
        found = [Reading(metric, getattr(score, metric), METRICS[metric], "measured", method="trained from scratch",
                         n=score.queries, note=note, **about) for metric in ("recall", "nll")]
    found += [Reading(metric, getattr(cell, metric), METRICS[metric], "modelled", method=f"formula:{formula}", **about)
              for metric, formula in (("kv_floats_per_token", "2·layers·Hkv·D"), ("parameters", "sum of weights"))]
    for reading in found:
        yield {**columns, **asdict(reading)}


def _nll(found_ZBTV: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(found_ZBTV.movedim(-1, 1), batch.answer_ZBT, reduction="none")


def _clip(weights: Sequence[Tensor]) -> None:
    """Scale each seed's gradient so that its norm is 1 at most."""
    grads = [w.grad for w in weights]
    norm_Z = sum(g.flatten(1).square().sum(1) for g in grads).sqrt()
    scale_Z = (1 / norm_Z.clamp_min(1e-6)).clamp_max(1)
    for g in grads:
        g.mul_(scale_Z.view(-1, *[1] * (g.dim() - 1)))


def _generator(cell: RecallCell, seed: int, use: int, pairs: int = 0) -> torch.Generator:
    """A generator of its own per seed, use and N. All three are mixed into 32 bits, since torch's generator of the CPU
    ignores whatever stands above them."""
    mixed = np.random.SeedSequence((seed, use, pairs)).generate_state(1)[0]
    return torch.Generator(cell.device).manual_seed(int(mixed))


def _diverged(cell: RecallCell, seed: int, step: int) -> str:
    return (f"training diverged: the loss of seed {seed} is not finite at step {step} of {cell.training_steps}; take a "
            "smaller lr")
