"""How long one engine step takes: from what it computes and reads to seconds, by a model that says what it is.

A step time belongs to one device. It is never carried to another in silence: `device` and `source` say whose it is.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from kvlab.shapes import positive


@dataclass(slots=True)
class Batch:
    """What one step of an engine computes.

    prefill_tokens: prompt tokens (and tokens computed again). decode_seqs: sequences that get their next token from a
    cache. kv_tokens: cached tokens that are attended to, the new ones included, once per sequence. prefill_pairs:
    (query, KV token) pairs under the causal mask in prefill. sequences: prefilling and decoding.
    """
    prefill_tokens: int = 0
    decode_seqs: int = 0
    kv_tokens: int = 0
    prefill_pairs: int = 0
    sequences: int = 0

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decode_seqs


class StepTime(Protocol):
    """Seconds of a step on one device. kind: measured, modelled …; source: where the numbers come from."""
    kind: str
    device: str
    source: str

    def __call__(self, batch: Batch) -> float: ...


@dataclass(frozen=True, slots=True)
class Work:
    """What one step of a model costs one rank of tensor parallelism: bytes it reads and flops it does.

    weight_bytes: weights read in every step. flops_per_token: 2 × active parameters. kv_bytes_per_token: K and V of one
    cached token. flops_per_pair: of attention, per (query, KV token). experts, experts_per_token, expert_bytes: of a
    mixture, the routed experts of all layers taken together: how many there are in a layer, how many a token takes, and
    the bytes of one of them over all layers; weight_bytes then leaves them out.
    """
    weight_bytes: float
    flops_per_token: float
    kv_bytes_per_token: float
    flops_per_pair: float = 0.0
    experts: int = 0
    experts_per_token: int = 0
    expert_bytes: float = 0.0

    def touched_experts(self, tokens: int) -> float:
        """Routed experts of a layer that a step of so many tokens reads, if each token picks any with equal chance.

        Source: expected number of distinct values, E · (1 − (1 − k/E)^tokens).
        """
        if not self.experts:
            return 0.0
        return self.experts * (1 - (1 - self.experts_per_token / self.experts) ** tokens)

    def bytes(self, batch: Batch) -> float:
        return (self.weight_bytes + self.expert_bytes * self.touched_experts(batch.tokens)
                + self.kv_bytes_per_token * batch.kv_tokens)

    def flops(self, batch: Batch) -> float:
        pairs = batch.prefill_pairs + (batch.kv_tokens if not batch.prefill_tokens else 0)
        return self.flops_per_token * batch.tokens + self.flops_per_pair * pairs


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
        if min(parts) < 0 or max(parts) == 0:
            raise ValueError(f"the four times {parts} must be at least 0, and one of them above it")

    def __call__(self, batch: Batch) -> float:
        return (self.base_s + self.per_prefill_token_s * batch.prefill_tokens
                + self.per_decode_seq_s * batch.decode_seqs + self.per_kv_token_s * batch.kv_tokens)


def fixed(seconds: float) -> Linear:
    """Every step takes the same time: for questions about blocks and order only."""
    positive(nanoseconds=round(seconds * 1e9))
    return Linear(seconds, 0, 0, 0, device="none", source="a constant, given")
