"""The case of batching that is measured: what becomes of the answers of requests that a small pool preempts."""
from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import ClassVar

from kvlab.attention._base import digest
from kvlab.probes._base import hardware
from kvlab.record.reading import Reading
from kvlab.record.statistics import share
from kvlab.studies import _models
from kvlab.studies._run import case_row

METRICS = {"same_answer_share": "ratio", "complete_share": "ratio", "preemptions": "count"}


@dataclass(frozen=True)
class Preempted:
    """Requests that a real decoder answers greedily, once with room for all and once in a pool that preempts some.

    Prompts are pieces of a text, of prompt_tokens and up to three times `longer` more; every answer has new_tokens.
    num_blocks: of the small pool, the null block included. Times are not taken, so nothing else on the machine matters.
    """
    timed: ClassVar[bool] = False
    requests: int = 16
    prompt_tokens: int = 12
    longer: int = 4
    new_tokens: int = 20
    block_size: int = 8
    num_blocks: int = 23
    model: str = "smollm2-135m"
    text: str = "pydoc:types"

    @cached_property
    def comparison_id(self) -> str:
        return digest(asdict(self))

    def columns(self) -> dict:
        return dict(device="cpu", dtype="fp32", kv_format="fp32", block_size=self.block_size, variant="paged",
                    batch_size=self.requests, model=self.model, data=self.text, threads=1,
                    case=json.dumps(dict(question="preempted", num_blocks=self.num_blocks), sort_keys=True))

    def rows(self) -> list[dict]:
        """Shares of the answers that are the same token by token, and complete; how often a request was preempted."""
        try:
            readings = self._readings(_models.decoder(self.model, "cpu"))
        except _models.ABSENT as error:
            readings = _models.absent(METRICS, error, source="decoder")
        return [case_row(self, reading) for reading in readings]

    def _readings(self, decoder) -> list[Reading]:
        ample, small = self._answers(decoder)
        same = sum(one == other for one, other in zip(ample.tokens, small.tokens, strict=True))
        complete = sum(len(one) == self.new_tokens for one in small.tokens)
        readings = [Reading("preemptions", float(small.preemptions), "count", "measured",
                            f"times in {self.requests} requests, {self.num_blocks - 1} blocks", "decoder",
                            hardware("cpu"))]
        for metric, hits, method in (("same_answer_share", same, "greedy tokens, small pool = ample pool"),
                                     ("complete_share", complete, "tokens of the answer = tokens asked for")):
            part = share(hits, self.requests)
            readings.append(Reading(metric, part.value, "ratio", "measured", method, "decoder", hardware("cpu"),
                                    n=part.n, low=part.low, high=part.high))
        return readings

    def _answers(self, decoder):
        """What greedy decoding gives with room for all and in the small pool, on one thread."""
        import torch

        from kvlab.accuracy import scoring
        from kvlab.accuracy.texts import text
        from kvlab.kv.cache import Layout
        from kvlab.model.generate import greedy
        lengths = [self.prompt_tokens + number % 4 * self.longer for number in range(self.requests)]
        ids = scoring.encode(decoder, text(self.text))
        if len(ids) < sum(lengths):
            raise ValueError(f"{self.text} has {len(ids)} tokens, too few for {self.requests} prompts")
        prompts = ids[:sum(lengths)].split(lengths)
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return [greedy(decoder, prompts, self.new_tokens, variant="paged", layout=Layout(self.block_size),
                           num_blocks=blocks) for blocks in (None, self.num_blocks)]
        finally:
            torch.set_num_threads(before)
