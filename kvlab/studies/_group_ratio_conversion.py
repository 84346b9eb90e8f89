"""A trained model with another number of KV heads, judged on real text: conversion damage, never "GQA degradation"."""
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from kvlab.attention._base import digest
from kvlab.record.reading import Reading
from kvlab.studies import _models

WINDOW = 512
TRAINING_TEXT, TRAINING_TOKENS = "pydoc:typesmapping", 2048      # what alignment and distillation see, never scored
METRICS = {"kl": "nat", "top1_agreement": "ratio", "nll_delta": "nat", "kv_bytes_per_token": "B"}
ABOUT = "conversion damage: the model was trained with another group ratio, and says nothing of one trained with this"


@dataclass(frozen=True)
class Conversion:
    """A trained model whose KV heads are expanded or pooled to num_kv_heads, scored against the model as it was.

    method: expand, mean, first or aligned. distil_steps: of Adam per layer afterwards. tokens: scored, in windows of
    512 at most.
    """
    method: str
    num_kv_heads: int
    distil_steps: int = 0
    tokens: int = WINDOW
    text: str = "pydoc:execmodel"
    model: str = "smollm2-135m"
    device: str = "cpu"

    @property
    def comparison_id(self) -> str:
        return digest(asdict(self))

    @property
    def window(self) -> int:
        return min(WINDOW, self.tokens)

    def columns(self) -> dict:
        after = f", distilled {self.distil_steps} steps a layer" if self.distil_steps else ""
        return dict(model=self.model, num_kv_heads=self.num_kv_heads, data=f"conversion:{self.method}{after}",
                    device=self.device, dtype="fp32", kv_format="fp32", kv_len=self.window,
                    case=json.dumps(asdict(self), sort_keys=True))


def converted(case: Conversion, told: Callable[[str], None], hardware: str = "") -> list[dict]:
    """Rows of one conversion; where model or text is not there, `missing` rows that say why."""
    about = dict(source="accuracy.scoring", hardware=hardware)
    try:
        decoder, chosen, reference, ids = _scored(case, told)
    except _models.ABSENT as error:
        return _rows(case, _models.absent(METRICS, error, **about), {})
    from kvlab.accuracy.scoring import compare, score_windows
    from kvlab.kv.formats import kv_format
    from kvlab.model.heads import convert
    told(f"{case.method} to {case.num_kv_heads} KV heads")
    other = convert(decoder, case.num_kv_heads, case.method, case.distil_steps, ids, told=told)
    scores = score_windows(other, chosen, reference=reference, told=told)
    note = "the same function with more KV heads; only rounding differs" if case.method == "expand" else ABOUT
    readings = compare(scores).readings(method="against the model as it was", note=note, **about)
    c = other.config
    size = sum(kv_format("fp32").nbytes(1, c.shape(layer)) for layer in range(c.num_layers))
    readings.append(Reading("kv_bytes_per_token", size, "B", "modelled", method="formula:layers·2·Hkv·D·4", **about))
    shape = c.shape(0)
    return _rows(case, readings, dict(num_q_heads=shape.num_q_heads, group_ratio=shape.group_ratio,
                                      head_dim=shape.head_dim))


def _scored(case: Conversion, told):
    """(decoder, windows to score, the decoder's own hidden states of them, token ids that are not scored)."""
    from kvlab.accuracy.scoring import encode, hidden_states, windows
    from kvlab.accuracy.texts import text as text_of
    told(f"loading {case.model}")
    decoder = _models.decoder(case.model, case.device)

    def states():
        chosen = windows(case.text, encode(decoder, text_of(case.text)), window=case.window,
                         count=max(1, case.tokens // case.window))
        ids = encode(decoder, text_of(TRAINING_TEXT))[:TRAINING_TOKENS]
        return chosen, hidden_states(decoder, chosen, told=told), ids
    return decoder, *_models.once(("conversion", case.model, case.device, case.text, case.tokens), states)


def _rows(case: Conversion, readings: list[Reading], heads: dict) -> list[dict]:
    return [{"comparison_id": case.comparison_id, "case_id": case.comparison_id, **case.columns(), **heads,
             **asdict(reading)} for reading in readings]
