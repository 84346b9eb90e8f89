"""One request as it arrives at an engine, and what became of it. Times are seconds, lengths tokens."""
from __future__ import annotations

from dataclasses import dataclass

from kvlab.shapes import positive


@dataclass(frozen=True, slots=True)
class Request:
    """A request: when it arrives, how long its prompt is and how many tokens it will generate.

    arrival_s: seconds since the trace began. output_tokens: what it generates until it ends, which no scheduler knows
    beforehand. max_tokens: the limit given with the request (None: output_tokens), which a scheduler does know.
    priority: smaller is sooner, as in vLLM. prefix: ids of the prompt's successive pieces of piece_tokens tokens each;
    two prompts have as much in common as their leading ids. What the pieces do not cover is the request's own.
    """
    id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int | None = None
    priority: int = 0
    prefix: tuple[int, ...] = ()
    piece_tokens: int = 512

    def __post_init__(self):
        positive(prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens, piece_tokens=self.piece_tokens)
        if not 0 <= self.arrival_s < float("inf"):
            raise ValueError(f"request {self.id}: arrival_s={self.arrival_s!r} must be a finite number of at least 0")
        if not isinstance(self.priority, int):
            raise ValueError(f"request {self.id}: priority={self.priority!r} must be a whole number")
        if self.max_tokens is not None:
            positive(max_tokens=self.max_tokens)
            if self.max_tokens < self.output_tokens:
                raise ValueError(f"request {self.id}: max_tokens={self.max_tokens} is below output_tokens="
                                 f"{self.output_tokens}; a request ends at its limit")

    @property
    def most_tokens(self) -> int:
        """Prompt and the most it may generate: what a scheduler that never evicts sets aside."""
        return self.prompt_tokens + (self.max_tokens or self.output_tokens)


@dataclass(slots=True)
class Served:
    """What became of a request. Times are seconds on the trace's clock; None = it did not come so far.

    scheduled_s: first admitted. first_token_s, last_token_s: when the step that made them ended. preemptions: how often
    its blocks were taken away and all its tokens computed again. cached_tokens: prompt tokens found in the prefix cache
    at first admission. rejected: why it was never admitted, "" = it was. generated: output tokens, fewer than
    asked for where max_model_len cut it.
    """
    request: Request
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    preemptions: int = 0
    cached_tokens: int = 0
    rejected: str = ""
    generated: int = 0

    @property
    def queue_s(self) -> float | None:
        """From arrival to first admission."""
        return None if self.scheduled_s is None else self.scheduled_s - self.request.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from arrival."""
        return None if self.first_token_s is None else self.first_token_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for a request of one token."""
        if self.last_token_s is None or self.first_token_s is None or self.generated < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.generated - 1)

    @property
    def e2e_s(self) -> float | None:
        """From arrival to last token."""
        return None if self.last_token_s is None else self.last_token_s - self.request.arrival_s
