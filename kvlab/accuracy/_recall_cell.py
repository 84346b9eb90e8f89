"""One architecture of recall models as pure data: sizes, training, where it is tried, and what follows from them."""
from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import ClassVar

from kvlab.attention._base import digest
from kvlab.kv.formats import kv_format
from kvlab.shapes import AttentionShape, positive

TASKS = {"pair": 1, "two_token": 2}                     # task -> layers that it takes


@dataclass(frozen=True)
class RecallCell:
    """One architecture of recall models, trained from scratch once per seed, and where it is tried.

    pairs: N in training, by turns; evaluated: N at evaluation, also beyond the trained. task: "pair" (a pair is one
    token, one layer) or "two_token" (key and value are tokens in a row, two layers). parameter_matched: the MLP is
    wider by what few KV heads save, so that every ratio has the parameters of MHA. longer: times as many training steps
    as `steps`, the grid's, so that speed of learning is not taken for capacity. kv_formats: how the cache is stored
    at evaluation; training keeps fp32. steps, batch_size (sequences), lr: AdamW, one cycle, gradients clipped at 1.
    """
    num_kv_heads: int
    head_dim: int
    num_q_heads: int = 32
    seeds: tuple[int, ...] = (0, 1, 2)
    task: str = "pair"
    pairs: tuple[int, ...] = (8, 16, 32, 64)
    evaluated: tuple[int, ...] = (8, 16, 32, 64, 128)
    num_keys: int = 256
    num_values: int = 64
    queries: int = 32
    batch_size: int = 24
    steps: int = 400
    lr: float = 4e-3
    width: int = 64
    parameter_matched: bool = False
    longer: int = 1
    kv_formats: tuple[str, ...] = ("fp32",)
    device: str = "cpu"
    threads: int = 1
    timed: ClassVar[bool] = False                       # its numbers are the same beside other work

    def __post_init__(self):
        for name in ("seeds", "pairs", "evaluated", "kv_formats"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; a cell needs at least one of them")
        shape = self.shape                                           # raises for heads that do not divide
        if self.task not in TASKS:
            raise ValueError(f"task={self.task!r}; allowed: {', '.join(TASKS)}")
        if self.task == "two_token" and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: rotary positions of the two_token task need an even one")
        positive(num_values=self.num_values, queries=self.queries, batch_size=self.batch_size, steps=self.steps,
                 longer=self.longer, width=self.width, threads=self.threads)
        for n in self.pairs + self.evaluated:
            positive(pairs=n)
        if max(self.pairs + self.evaluated) > self.num_keys:
            raise ValueError(f"{max(self.pairs + self.evaluated)} pairs need as many distinct keys, and "
                             f"num_keys={self.num_keys}; raise it")
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds={self.seeds} repeat; a seed that counts twice is no new evidence")
        if any(type(seed) is not int or not 0 <= seed < 2**32 for seed in self.seeds):
            raise ValueError(f"seeds={self.seeds}; allowed: whole numbers from 0 to 2**32 - 1")
        if not self.lr > 0:
            raise ValueError(f"lr={self.lr!r} must be above 0")
        for name in self.kv_formats:
            if why := kv_format(name).why_not(shape):           # raises for an unknown format, by name
                raise ValueError(why)

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.num_q_heads, self.num_kv_heads, self.head_dim)

    @property
    def layers(self) -> int:
        return TASKS[self.task]

    @property
    def mlp_width(self) -> int:
        spared = self.head_dim * (self.num_q_heads - self.num_kv_heads) if self.parameter_matched else 0
        return 2 * self.width + spared           # 2·width·D per KV head in K and V, 2·width per neuron of the MLP

    @property
    def kv_floats_per_token(self) -> int:
        """Numbers that the cache keeps of a token, K and V of all layers."""
        return 2 * self.layers * self.num_kv_heads * self.head_dim

    @property
    def parameters(self) -> int:
        """Weights of one seed's model."""
        attention = 2 * self.width * self.head_dim * (self.num_q_heads + self.num_kv_heads)
        layer = attention + 2 * self.width * self.mlp_width
        return self.width * (self.num_keys + 2 * self.num_values) + self.layers * layer

    @property
    def training_steps(self) -> int:
        return self.steps * self.longer

    @property
    def tokens_per_pair(self) -> int:
        return 1 if self.task == "pair" else 2

    @property
    def chance(self) -> float:
        """Recall of a model that guesses."""
        return 1 / self.num_values

    def training_flops(self) -> int:
        """Floating-point operations of training one seed: matrix products, forward once and backward twice."""
        C, wide, narrow = self.width, self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        total = 0
        for n in self.pairs:
            S, T = n * self.tokens_per_pair, self.queries
            per_query = 2 * C * (2 * wide + 2 * self.mlp_width)
            total += self.layers * (S * 2 * C * 2 * narrow + T * (per_query + 4 * wide * S))
            total += (self.layers - 1) * S * (per_query + 4 * wide * S // 2)
        return 3 * total // len(self.pairs) * self.batch_size * self.training_steps

    @cached_property
    def comparison_id(self) -> str:
        return digest(asdict(self))

    def columns(self) -> dict:
        """The result table's columns about the whole cell."""
        apart = (", parameters matched" if self.parameter_matched else "") + (
            f", {self.longer} × the steps" if self.longer > 1 else "")
        return dict(device=self.device, dtype="fp32", num_q_heads=self.num_q_heads, num_kv_heads=self.num_kv_heads,
                    group_ratio=self.shape.group_ratio, head_dim=self.head_dim, data=f"recall:{self.task}{apart}",
                    threads=self.threads, case=json.dumps(asdict(self), sort_keys=True))
