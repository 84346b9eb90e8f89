"""What a smaller KV format can give a whole decode step, by bytes alone, beside what the article states.

A step reads every weight once (W) and the whole KV cache of the batch (K). So a cache of half the bytes makes it
(W + K) ÷ (W + K/2) times as fast where memory is the limit: a number that depends on batch × context, never one number.
"""
from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from kvlab.attention._base import digest
from kvlab.catalog.models import model as catalogued
from kvlab.kv.sizing import kv_bytes, weight_bytes
from kvlab.record.reading import Reading, missing
from kvlab.studies._run import case_row
from kvlab.units import display

METRICS = {"weight_bytes": "B", "kv_bytes": "B", "step_speedup": "ratio", "batch_to_quoted": "count"}
OWN = "bf16"                                                # what the smaller formats are held against
# format -> what the article states (section 5, its table), and the claim's number in kvlab's list
QUOTED = {"fp8_e4m3": (1.08, "C47"), "int8/token": (1.05, "C48")}
BATCHES = (1, 4, 16, 64, 256)
CONTEXTS = (2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class Steps:
    """Decode steps of one model, over batch x context, with the KV cache in one of the article's smaller formats."""
    model: str
    kv_format: str

    @property
    def comparison_id(self) -> str:
        return digest(asdict(self))

    def columns(self) -> dict:
        return dict(model=self.model, kv_format=self.kv_format, case=json.dumps(asdict(self), sort_keys=True))

    def rows(self) -> list[dict]:
        """The article's number (quoted), the bytes and the speed-up of every step, and where the two meet."""
        return [case_row(self, reading, digest([self.comparison_id, at]), **at) for at, reading in self._readings()]

    def _readings(self) -> Iterator[tuple[dict, Reading]]:
        value, claim = QUOTED[self.kv_format]
        yield {}, Reading("step_speedup", value, "ratio", "quoted", method=f"cite:{claim}", hardware="not stated",
                          source="the article, section 5", note="no model, batch, context or GPU is stated with it")
        spec = catalogued(self.model)
        weights = weight_bytes(spec)
        if weights is None:
            why = f"the parameter count of {spec.name} is not in the catalogue; choose another --model"
            for metric in METRICS:
                yield {}, missing(metric, METRICS[metric], why, source="kv.sizing")
            return
        about = dict(kind="modelled", source="kv.sizing", hardware="none",
                     note="every weight is read once in a step: of a mixture of experts too many at a small batch")
        yield {}, Reading("weight_bytes", weights, "B", method="formula:parameters · 2 bytes", **about)
        for kv_len in CONTEXTS:
            own, small = (kv_bytes(spec, kv_len, name) for name in (OWN, self.kv_format))
            yield dict(kv_len=kv_len), self._meeting(weights, own, small, value, kv_len, about)
            for batch in BATCHES:
                at = dict(kv_len=kv_len, batch_size=batch)
                yield at, Reading("kv_bytes", batch * small, "B", method="formula:layer_bytes", **about)
                yield at, Reading("step_speedup", (weights + batch * own) / (weights + batch * small), "ratio",
                                  method="formula:(W + K) ÷ (W + K in the format)",
                                  denominator=f"a step with the cache in {OWN}", **about)

    def _meeting(self, weights, own, small, quoted, kv_len, about) -> Reading:
        """The smallest batch at which bytes alone allow what is quoted: W + bK ≥ quoted · (W + bk), solved for b."""
        gained = own - quoted * small
        if gained <= 0:
            return missing("batch_to_quoted", "count", f"at no batch: {self.kv_format} saves too little of "
                           f"{display(own, 'B')} of KV per sequence", source="kv.sizing")
        return Reading("batch_to_quoted", -(-(quoted - 1) * weights // gained), "count",
                       method="formula:smallest batch with (W + K) ÷ (W + K in the format) ≥ quoted", **about)
