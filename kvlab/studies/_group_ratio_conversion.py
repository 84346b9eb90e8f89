"""A trained model with another number of KV heads, judged on real text: conversion damage, never "GQA degradation"."""
from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from kvlab.attention._base import digest
from kvlab.record.reading import Reading
from kvlab.studies import _models

WINDOW = 512
TRAINING_TEXT, TRAINING_TOKENS = "pydoc:typesmapping", 2048      # what alignment and distillation see, never scored
METRICS = {"kl": "nat", "top1_agreement": "ratio", "nll_delta": "nat", "kv_bytes_per_token": "B", "decode_step_s": "s"}
DECODE_STEPS = 24
UNCONVERTED = "conversion:none"                         # the model as it was, timed beside its exact expansion
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
    from kvlab.model.heads import convert
    told(f"{case.method} to {case.num_kv_heads} KV heads")
    other = convert(decoder, case.num_kv_heads, case.method, case.distil_steps, ids, told=told)
    scores = score_windows(other, chosen, reference=reference, told=told)
    note = "the same function with more KV heads; only rounding differs" if case.method == "expand" else ABOUT
    readings = compare(scores).readings(method="against the model as it was", note=note, **about)
    c = other.config
    readings.append(_size(c, about))
    if case.method != "expand":
        return _rows(case, readings, _heads(c))
    told("decode steps")
    before, after = _decode_steps(decoder, other, chosen[0].ids_T, about)
    as_it_was = _heads(decoder.config) | dict(data=UNCONVERTED, case_id=digest({"as it was": case.comparison_id}))
    return [*_rows(case, [*readings, after], _heads(c)),
            *_rows(case, [before, _size(decoder.config, about)], as_it_was)]


def _heads(config) -> dict:
    shape = config.shape(0)
    return dict(num_q_heads=shape.num_q_heads, num_kv_heads=shape.num_kv_heads, group_ratio=shape.group_ratio,
                head_dim=shape.head_dim)


def _size(config, about) -> Reading:
    from kvlab.kv.formats import kv_format
    size = sum(kv_format("fp32").nbytes(1, config.shape(layer)) for layer in range(config.num_layers))
    return Reading("kv_bytes_per_token", size, "B", "modelled", method="formula:layers·2·Hkv·D·4", **about)


def _decode_steps(decoder, expanded, ids_T, about) -> list[Reading]:
    """Seconds of a whole decode step on the last tokens of a text, of the model as it was and expanded, by turns.

    Both must hold the same token most probable at every step: what is timed is one function at two group ratios.
    """
    import torch

    from kvlab.probes._clock import summarise
    steps, cuda = min(DECODE_STEPS, len(ids_T) // 2), str(decoder.device).startswith("cuda")
    clock, method = (time.perf_counter, "timer:wall") if cuda else (time.thread_time, "timer:thread_cpu")
    threads, models = torch.get_num_threads(), (decoder, expanded)
    torch.set_num_threads(1)                            # then other programs do not enter the time
    try:
        caches, seconds = [model.cache(len(ids_T)) for model in models], ([], [])
        for model, cache in zip(models, caches):
            model.hidden([ids_T[:-steps]], cache)
        for token in ids_T[-steps:].split(1):
            best = []
            for model, cache, spent in zip(models, caches, seconds):
                began = clock()
                logits_1V = model.logits(model.hidden([token], cache))
                best.append(int(logits_1V.argmax()))    # waits for a GPU
                spent.append(clock() - began)
            if best[0] != best[1]:
                raise RuntimeError("the expanded model does not predict what the model did: expansion is not exact")
    finally:
        torch.set_num_threads(threads)
    found = [summarise(spent) for spent in seconds]
    return [Reading("decode_step_s", one.median, "s", "measured", low=one.low, high=one.high, n=one.n, method=method,
                    note=f"whole steps on real text from {len(ids_T) - steps} cached tokens on, by turns; same tokens",
                    **about) for one in found]


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
