"""The case of prefix_sharing that is measured: a real decoder computes prompts whose beginnings are in its cache."""
from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from functools import cached_property

from kvlab.attention._base import digest
from kvlab.kv.prefix import chain
from kvlab.probes._base import hardware
from kvlab.record.reading import Reading
from kvlab.record.statistics import t_interval
from kvlab.studies import _models

METRICS = {"prefill_time_saved": "ratio", "memory_saved": "ratio", "tokens_found": "ratio",
           "logits_difference": "ratio"}


@dataclass(frozen=True)
class Prefill:
    """R prompts of real text alive together in a decoder's paged cache, a share f of which is the same for all.

    The first computes everything; each other one is computed twice, with and without what it finds, one after the
    other, so that what slows the machine slows both.
    """
    shared: float
    sharers: int = 4
    prompt_tokens: int = 256
    rounds: int = 3
    block_size: int = 16
    model: str = "smollm2-135m"
    text: str = "pydoc:types"
    device: str = "cpu"

    @cached_property
    def comparison_id(self) -> str:
        return digest(asdict(self))

    def columns(self) -> dict:
        return dict(device=self.device, dtype="fp32", kv_format="fp32", block_size=self.block_size, phase="prefill",
                    variant="paged", batch_size=self.sharers, kv_len=self.prompt_tokens, model=self.model,
                    data=self.text, threads=1, case=json.dumps(dict(question="prefill", **asdict(self)),
                                                               sort_keys=True))

    def rows(self) -> list[dict]:
        """Time and memory saved, tokens found, and by how much the answers differ: of the largest logit."""
        try:
            readings = self._readings(_models.decoder(self.model, self.device))
        except _models.ABSENT as error:
            readings = _models.absent(METRICS, error, source="decoder")
        return [{"comparison_id": self.comparison_id, "case_id": self.comparison_id, **self.columns(),
                 **asdict(reading)} for reading in readings]

    def _readings(self, decoder) -> list[Reading]:
        import torch
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            pairs, difference, cache = self._measured(decoder)
        finally:
            torch.set_num_threads(before)
        ratio = t_interval(math.log(found / whole) for found, whole in pairs).through(math.exp)
        ends = dict(low=1 - ratio.high, high=1 - ratio.low) if ratio.n > 1 else {}
        used, blocks = cache.pool.used_blocks, cache.pool.blocks_for(self.prompt_tokens)
        about = dict(kind="measured", unit="ratio", source="decoder", hardware=hardware(self.device))
        return [
            Reading("prefill_time_saved", 1 - ratio.value, n=ratio.n, note="pairs, one after the other, on one thread",
                    method="timer: 1 − time of the rest ÷ of the whole prompt", **ends, **about),
            Reading("memory_saved", 1 - used / (blocks * self.sharers),
                    method="1 − blocks in use of the decoder's cache ÷ blocks without sharing", **about),
            Reading("tokens_found", self._common // self.block_size * self.block_size / self.prompt_tokens,
                    method="tokens of full blocks found ÷ tokens of the prompt", **about),
            Reading("logits_difference", difference, method="largest difference of a logit ÷ largest logit", **about)]

    @property
    def _common(self) -> int:
        return int(self.shared * self.prompt_tokens)

    def _measured(self, decoder):
        """(seconds with and without what was found, largest relative difference of the last logits, the cache)."""
        import torch

        from kvlab.accuracy import scoring
        from kvlab.accuracy.texts import text
        from kvlab.kv.cache import Layout
        ids = scoring.encode(decoder, text(self.text)).tolist()
        own = self.prompt_tokens - self._common
        if len(ids) < self._common + self.sharers * own:
            raise ValueError(f"{self.text} has {len(ids)} tokens, too few for {self.sharers} prompts")
        prompts = [ids[:self._common] + ids[self._common + i * own:][:own] for i in range(self.sharers)]
        spare = self.sharers                                  # the sequence that computes a whole prompt again
        pairs, difference = [], 0.0
        # on one thread of a CPU its own seconds, which whoever else uses the machine does not lengthen
        clock = time.thread_time if self.device == "cpu" else time.perf_counter

        def compute(prompt, sequence):
            began = clock()
            hidden_TH = decoder.hidden([torch.tensor(prompt[cache.kv_lens[sequence]:])], cache, sequences=[sequence])
            logits_V = decoder.logits(hidden_TH[-1:])[0].cpu()
            return clock() - began, logits_V
        for _ in range(self.rounds):
            cache = decoder.cache(self.prompt_tokens, variant="paged", layout=Layout(self.block_size),
                                  sequences=self.sharers + 1)
            for sequence, prompt in enumerate(prompts):
                hashes = chain(prompt, self.block_size)
                found = cache.pool.cached(hashes[:(len(prompt) - 1) // self.block_size])
                cache.pool.share(found)
                cache.tables[sequence], cache.kv_lens[sequence] = found, len(found) * self.block_size
                seconds, logits_V = compute(prompt, sequence)
                for block_id, block_hash in zip(cache.tables[sequence], hashes, strict=False):
                    cache.pool.remember(block_id, block_hash)
                if sequence:
                    again, whole_V = compute(prompt, spare)
                    cache.free(spare)
                    pairs.append((seconds, again))
                    difference = max(difference, float((logits_V - whole_V).abs().max() / whole_V.abs().max()))
        return pairs, difference, cache
