"""What kv_quant's rows are made of: windows, per-token scores and sensitivities, each computed once per process.

Cases of one run that follow one another share them; a case that is run alone computes them itself.
"""
from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvlab.accuracy import scoring, sensitivity
from kvlab.accuracy.texts import text
from kvlab.kv.formats import kv_format
from kvlab.studies import _models
from kvlab.studies._kv_quant_cases import MixCase, ScoreCase, TextCase

if TYPE_CHECKING:
    import pandas as pd


def plain(case: TextCase, fmt: str = "fp32") -> ScoreCase:
    """The windows of a case as a key of what is kept: every case that scores the same ones gives the same one."""
    return ScoreCase(case.model, fmt, case.documents, case.window, case.count, case.start, device=case.device)


def sensing(case: MixCase, fmt: str) -> ScoreCase:
    """Where a mix is chosen: right behind what it is scored on."""
    return replace(plain(case, fmt), start=case.start + case.window * case.count, window=case.sensed)


def windows(case: TextCase) -> list[scoring.Window]:
    """The windows of all the case's documents."""
    decoder = _models.decoder(case.model, case.device)
    return [one for name in case.documents for one in scoring.windows(
        name, scoring.encode(decoder, text(name)), window=case.window, count=case.count, start=case.start)]


def reference(case: TextCase, told) -> list[torch.Tensor]:
    """Hidden states of the windows with an fp32 cache."""
    key = plain(case)
    return _models.once(("reference", key), lambda: scoring.hidden_states(
        _models.decoder(key.model, key.device), windows(key), told=lambda stage: told(f"fp32 cache: {stage}")))


def frame(case: TextCase, told) -> pd.DataFrame:
    """Per-token scores of a case."""
    every = getattr(case, "every", 1)
    key = "scores", replace(plain(case, case.kv_format), calibration=case.calibration), every
    return _models.once(key, lambda: scored(case, _formats(case), told, every))


def scored(case: TextCase, formats, told, every: int = 1) -> pd.DataFrame:
    """Per-token scores of the case's windows under these formats, one or one per layer."""
    decoder = _models.decoder(case.model, case.device)
    return scoring.score_windows(decoder, windows(case), formats, every=every, told=told,
                                 reference=reference(case, told))


def sensed(case: ScoreCase, told) -> pd.DataFrame:
    """Sensitivity of every layer's K and V to the format; kept for the mix that chooses from them."""
    def make():
        decoder = _models.decoder(case.model, case.device)
        ids = _calibration(case) if scoring.is_static(case.kv_format) else None
        return sensitivity.sensitivity(decoder, windows(case), case.kv_format, calibration_ids=ids, told=told)
    return _models.once(("sensed", case), make)


def _formats(case: TextCase):
    """The case's format, with the scales of its calibration text or of the guessed range."""
    kind, _, limit = case.calibration.partition(":")
    if not scoring.is_static(case.kv_format):
        return case.kv_format
    decoder = _models.decoder(case.model, case.device)
    if kind == "range":
        shape = decoder.config.shape(0)
        k_SKD, v_SKE = (torch.full((1, shape.num_kv_heads, width), float(limit), device=decoder.device)
                        for width in (shape.head_dim, shape.v_dim))
        return kv_format(case.kv_format).calibrate(k_SKD, v_SKE)
    return scoring.with_scales(decoder, case.kv_format, _calibration(case), windows(case))


def _calibration(case: TextCase) -> torch.Tensor:
    if case.calibration in case.documents:
        raise ValueError(f"{case.calibration} is scored; scales must come from another text")
    decoder = _models.decoder(case.model, case.device)
    return scoring.encode(decoder, text(case.calibration))[:scoring.CALIBRATION_TOKENS]
