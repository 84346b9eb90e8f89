"""How an engine fills its steps: the policies, rules of admission and ways of batching that kvlab's scheduler knows."""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvlab.serving.request import Request
from kvlab.shapes import positive

POLICIES = ("fcfs", "priority", "short_first", "shortest_prefill")      # each has its line in SchedulerConfig.rank
ADMISSIONS = ("full_prompt", "first_chunk", "worst_case")
BATCHINGS = ("continuous", "static")
SHORT_BY = ("prompt", "most")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How an engine fills its steps. Tokens and sequences are counts, times seconds.

    policy: order of the waiting. fcfs; priority (smallest Request.priority first); short_first (requests below
    short_threshold tokens first); shortest_prefill; or one's own, a function of a Request that gives a number, smallest
    first, asked once when the request arrives (one that looks at output_tokens knows what no engine knows). short_by:
    what is compared with the threshold: the prompt, or `most`, the prompt and all that may be generated, which needs an
    honest max_tokens.
    aging_s: None = a waiting request never gains on another. short_first: score = short_weight, or 1 if it is not
    short, and waited ÷ aging_s; highest first, so that a short one overtakes whoever came up to (short_weight − 1) ×
    aging_s seconds before it. priority: aging_s seconds of waiting count as one priority; shortest_prefill: as
    short_threshold tokens; one's own: as 1.
    admission: full_prompt (a request is admitted when its whole prompt has blocks), first_chunk (the tokens of this
    step), worst_case (its prompt and all it may generate, set aside until it ends: no preemption ever).
    watermark: share of the pool's blocks that stay free when a request is admitted beside others that run.
    chunked_prefill: a prompt longer than the budget left is computed in pieces; without, it waits for a step with room.
    batching: continuous, or static: a batch is filled once, with worst_case blocks; who has finished stays in it as
    padding until the last has, and only then others are admitted. Prompts are not padded to the longest.
    prefix_caching: full blocks are found again by their chained hash, as long as no other tokens took the block.
    max_model_len: longest prompt and output; longer prompts are rejected, longer outputs cut there. None = no limit.
    async_scheduling: a step is put together while the one before it computes, so that whoever arrives or ends during a
    step takes part, or gives up its place, one step later. vLLM's default since 0.14.
    """
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    policy: str | Callable[[Request], float] = "fcfs"
    admission: str = "full_prompt"
    batching: str = "continuous"
    chunked_prefill: bool = True
    prefix_caching: bool = False
    watermark: float = 0.0
    aging_s: float | None = None
    short_threshold: int = 512
    short_weight: float = 2.0
    short_by: str = "prompt"
    max_model_len: int | None = None
    async_scheduling: bool = False

    def __post_init__(self):
        positive(max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens,
                 short_threshold=self.short_threshold)
        for name, allowed in (("policy", POLICIES), ("admission", ADMISSIONS), ("batching", BATCHINGS),
                              ("short_by", SHORT_BY)):
            if getattr(self, name) not in allowed and not (name == "policy" and callable(self.policy)):
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; allowed: {', '.join(allowed)}"
                                 f"{', or a function of a Request' if name == 'policy' else ''}")
        if self.max_model_len is not None:
            positive(max_model_len=self.max_model_len)
        if self.async_scheduling and self.batching == "static":
            raise ValueError("async_scheduling is of continuous batching; a static batch is put together once")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark={self.watermark!r} must be a share of the pool, from 0 to below 1")
        if self.aging_s is not None and not self.aging_s > 0:
            raise ValueError(f"aging_s={self.aging_s!r} must be above 0 seconds, or None for no aging")
        if not 1 <= self.short_weight < float("inf"):
            raise ValueError(f"short_weight={self.short_weight!r} must be a number of at least 1, the others' weight")

    def rank(self, request: Request) -> float:
        """Whose turn it is among the waiting, smallest first; equals go by arrival.

        It stays the same while a request waits: all gain at the same pace, so that arrival alone tells who gained more.
        """
        if callable(self.policy):
            rank = self.policy(request)
            if not isinstance(rank, int | float) or math.isnan(rank):
                raise ValueError(f"the policy gave {rank!r:.60} for request {request.id}; it must give a number, and "
                                 "the smallest goes first")
        elif self.policy == "fcfs":
            rank = 0.0
        elif self.policy == "priority":
            rank = request.priority
        elif self.policy == "shortest_prefill":
            rank = request.prompt_tokens / self.short_threshold
        else:
            tokens = request.prompt_tokens if self.short_by == "prompt" else request.most_tokens
            rank = -self.short_weight if tokens < self.short_threshold else -1.0
        return rank if self.aging_s is None else rank + request.arrival_s / self.aging_s
