"""How long one engine step takes: from what it computes and reads to seconds, by a model that says what it is.

A step time belongs to one device. It is never carried to another in silence: `device` and `source` say whose it is.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(slots=True)
class Batch:
    """What one step of an engine computes.

    prefill_tokens: prompt tokens (and tokens computed again). decode_seqs: sequences that get their next token from a
    cache. kv_tokens: cached tokens that are attended to, the new ones included, once per sequence. prefill_pairs:
    (query, KV token) pairs under the causal mask in prefill. sequences: prefilling and decoding. peer_tokens: tokens
    that other replicas compute in the same step, where replicas share experts and go in lockstep.
    """
    prefill_tokens: int = 0
    decode_seqs: int = 0
    kv_tokens: int = 0
    prefill_pairs: int = 0
    sequences: int = 0
    peer_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decode_seqs


class StepTime(Protocol):
    """Seconds of a step on one device. kind: measured, modelled …; source: where the numbers come from."""
    @property
    def kind(self) -> str: ...

    @property
    def device(self) -> str: ...

    @property
    def source(self) -> str: ...

    def __call__(self, batch: Batch) -> float: ...


@dataclass(frozen=True, slots=True)
class Work:
    """What one step of a model costs one rank of tensor parallelism: bytes it reads and sends, flops it does.

    weight_bytes: weights read in every step. flops_per_token, flops_per_sequence: 2 × the parameters that every token,
    and that the token of a sequence that is sampled from, passes. kv_bytes_per_token: K and V of one cached token.
    kv_bytes_per_sequence: of layers that keep a window or a state, the most that a sequence reads there.
    flops_per_pair: of attention, per (query, KV token). experts, experts_per_token: of a mixture, the routed experts of
    a layer and how many a token takes; expert_bytes: of one of them over all layers, expert_flops_per_token: of all
    that a token takes, both this rank's part; weight_bytes and flops_per_token leave them out. reductions,
    reduced_bytes_per_token: all-reduces of a step among tp ranks, and what a token adds to each. exchanges,
    exchanged_bytes_per_token: the same of a mixture's all-gathers and reduce-scatters among dp replicas.
    """
    weight_bytes: float
    flops_per_token: float
    kv_bytes_per_token: float
    flops_per_pair: float = 0.0
    experts: int = 0
    experts_per_token: int = 0
    expert_bytes: float = 0.0
    expert_flops_per_token: float = 0.0
    flops_per_sequence: float = 0.0
    kv_bytes_per_sequence: float = 0.0
    tp: int = 1
    reductions: int = 0
    reduced_bytes_per_token: float = 0.0
    dp: int = 1
    exchanges: int = 0
    exchanged_bytes_per_token: float = 0.0

    def touched_experts(self, tokens: int) -> float:
        """Routed experts of a layer that a step of so many tokens reads, if each token picks any with equal chance.

        Source: expected number of distinct values, E · (1 − (1 − k/E)^tokens).
        """
        if not self.experts:
            return 0.0
        return self.experts * (1 - (1 - self.experts_per_token / self.experts) ** tokens)

    def read_expert_bytes(self, batch: Batch) -> float:
        return self.expert_bytes * self.touched_experts(batch.tokens + batch.peer_tokens)

    def expert_flops(self, batch: Batch) -> float:
        return self.expert_flops_per_token * (batch.tokens + batch.peer_tokens)

    def dense_flops(self, batch: Batch) -> float:
        """Of everything but attention and routed experts."""
        return self.flops_per_token * batch.tokens + self.flops_per_sequence * batch.sequences

    def kv_bytes(self, batch: Batch) -> float:
        return self.kv_bytes_per_token * batch.kv_tokens + self.kv_bytes_per_sequence * batch.sequences

    def bytes(self, batch: Batch) -> float:
        return self.weight_bytes + self.read_expert_bytes(batch) + self.kv_bytes(batch)

    def flops(self, batch: Batch) -> float:
        pairs = batch.prefill_pairs + (batch.kv_tokens if not batch.prefill_tokens else 0)
        return self.dense_flops(batch) + self.expert_flops(batch) + self.flops_per_pair * pairs


@dataclass(frozen=True, slots=True)
class Roofline:
    """A step as its bytes at the memory's rate or its flops at the units', whichever takes longer, and a constant.

    bandwidth in B/s and flops in flop/s, as one rank reaches them (share of the data sheet included); overhead_s:
    launch, sampling and scheduling of a step. scale: one factor on all of it, 1 = not fitted.
    Source: Williams, Waterman, Patterson, Roofline (CACM 2009); what is left out, such as communication, is in
    overhead_s and scale.
    """
    work: Work
    bandwidth: float
    flops: float
    device: str
    source: str
    overhead_s: float = 0.0
    scale: float = 1.0
    kind: str = "modelled"

    def __post_init__(self):
        if not (self.bandwidth > 0 and self.flops > 0 and self.scale > 0 and self.overhead_s >= 0):
            raise ValueError("bandwidth, flops and scale must be above 0 and overhead_s at least 0")

    def __call__(self, batch: Batch) -> float:
        work = self.work
        return self.scale * (self.overhead_s + max(work.bytes(batch) / self.bandwidth, work.flops(batch) / self.flops))

    def scaled(self, scale: float, source: str) -> Roofline:
        """The same model times a factor that was fitted; source says on what."""
        return replace(self, scale=self.scale * scale, source=f"{self.source}; {source}")


@dataclass(frozen=True, slots=True)
class Linear:
    """A step as a constant, a time per prompt token, per decoding sequence and per cached token: four measured numbers.

    All in seconds. Made from timings of this machine's own kernels or fitted to a run; kind and source say which.
    """
    base_s: float
    per_prefill_token_s: float
    per_decode_seq_s: float
    per_kv_token_s: float
    device: str
    source: str
    kind: str = "modelled"

    def __post_init__(self):
        parts = (self.base_s, self.per_prefill_token_s, self.per_decode_seq_s, self.per_kv_token_s)
        if not (all(part >= 0 for part in parts) and 0 < sum(parts) < float("inf")):
            raise ValueError(f"the four times {parts} must be at least 0, and one of them above it")

    def scaled(self, scale: float, source: str) -> Linear:
        """The same model times a factor that was fitted; source says on what."""
        return replace(self, base_s=self.base_s * scale, per_prefill_token_s=self.per_prefill_token_s * scale,
                       per_decode_seq_s=self.per_decode_seq_s * scale, per_kv_token_s=self.per_kv_token_s * scale,
                       source=f"{self.source}; {source}")

    def __call__(self, batch: Batch) -> float:
        return (self.base_s + self.per_prefill_token_s * batch.prefill_tokens
                + self.per_decode_seq_s * batch.decode_seqs + self.per_kv_token_s * batch.kv_tokens)


def fixed(seconds: float) -> Linear:
    """Every step takes the same time: for questions about blocks and order only."""
    return Linear(seconds, 0, 0, 0, device="none", source="a constant, given")
