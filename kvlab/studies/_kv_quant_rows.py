"""The rows of kv_quant's cases on text: scores under a format, by position, by layer, and of a mix of layers.

The decoder, the fp32 cache's hidden states and what other cases are subtracted from are kept in the process: cases of
one run that follow one another share them, and a case that is run alone computes them itself.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvlab.accuracy import scoring, sensitivity
from kvlab.accuracy.statistics import block_bootstrap
from kvlab.accuracy.texts import sha256, text
from kvlab.attention._base import digest
from kvlab.kv.formats import kv_format
from kvlab.model.load import load_decoder
from kvlab.record.environment import cpu_name
from kvlab.record.reading import Reading, failed, missing
from kvlab.studies._kv_quant_cases import ScoreCase

if TYPE_CHECKING:
    import pandas as pd

METRICS = {**scoring.UNITS, "perplexity_delta_90": "ratio", "tokens_needed": "count", "kv_bytes_per_token": "B"}
METHOD = "paired moving-block bootstrap, blocks of 32 tokens, 2000 draws"
HOW = "simulated cache: values are rounded through the storage format and attention is computed in fp32"
WEIGHTS = {"smollm2-135m": "weights dequantised from a Q4_1 file, so the reference is that model, not the original"}
BUCKETS = (0, 512, 1024, 2048, 4096, 8192)          # of position in a long window
_KEPT: dict = {}


def scored(case, artifacts: Path | None, watch) -> list[dict]:
    """One format on the case's texts: quality with intervals, the equivalence test, bytes; then KL of each text."""
    def readings(decoder, told):
        frame = _frame(case, told)
        _keep(frame, case, artifacts)
        quality = scoring.compare(frame)
        of = _about(case, decoder)
        found = [(case.comparison_id, {}, one) for one in (*_readings(quality, of), _bytes(case, decoder))]
        if case.against:
            found += [(case.comparison_id, {}, one) for one in _difference(case, frame, told, of)]
        if len(case.documents) > 1:
            for name, own in frame.groupby("document", sort=False):
                kl = block_bootstrap(own["kl"], window=own["window"])
                found.append((digest({"case": case.comparison_id, "of": name}), dict(data=name),
                              _reading("kl", kl, **{**of, "scope": "document"})))
        return found
    return _rows(case, readings, watch)


def by_position(case, artifacts: Path | None, watch) -> list[dict]:
    """KL in buckets of position in one long window: kv_len is where a bucket ends."""
    def readings(decoder, told):
        frame = _frame(case, told)
        _keep(frame, case, artifacts)
        found = []
        for first, last in zip(BUCKETS, BUCKETS[1:]):
            own = frame[(frame["position"] >= first) & (frame["position"] < last)]
            if len(own) >= 64:
                about = _about(case, decoder) | {"scope": f"tokens {first} … {min(last, case.window) - 1}"}
                place = digest({"case": case.comparison_id, "of": last})
                kl = block_bootstrap(own["kl"])
                agreement = block_bootstrap(own["top1"]).through(lambda share: min(1.0, max(0.0, share)))
                found += [(place, dict(kv_len=min(last, case.window)), one)
                          for one in (_reading("kl", kl, **about), _reading("top1_agreement", agreement, **about))]
        return found
    return _rows(case, readings, watch)


def by_layer(case, artifacts: Path | None, watch) -> list[dict]:
    """KL with one layer's K or V in the format: scope says which."""
    def readings(decoder, told):
        frame, found = _sensed(_plain(case, case.kv_format, case.window), told), []
        for line in frame.to_dict("records"):
            about = _about(case, decoder) | {"scope": f"layer {line['layer']} {line['side']}"}
            place = digest({"case": case.comparison_id, "of": about["scope"]})
            found += [(place, {}, Reading("kl", line["kl"], "nat", "measured", low=line["low"], high=line["high"],
                                          n=line["n"], **about)),
                      (place, {}, Reading("kv_bytes_per_token", line["bytes_per_token"], "B", "modelled",
                                          method="formula:nbytes(4096) ÷ 4096", source="kv_quant", hardware="none",
                                          scope=about["scope"]))]
        return found
    return _rows(case, readings, watch)


def mixed(case, artifacts: Path | None, watch) -> list[dict]:
    """A mix of layers within the bytes of a uniform format: its KL on the scored texts; predicted against measured."""
    def readings(decoder, told):
        import pandas as pd
        sensed = [_plain(case, name, case.sensed) for name in case.candidates]
        budget = sum(kv_format(case.kv_format).nbytes(sensitivity.SIZED_AT, decoder.config.shape(layer))
                     for layer in range(decoder.config.num_layers)) / sensitivity.SIZED_AT
        chosen = sensitivity.mix(pd.concat([_sensed(one, told) for one in sensed]), budget)
        about = _about(case, decoder)
        about["note"] = f"K+V of layers 0 … {len(chosen.formats) - 1}: {', '.join(chosen.formats)}; {about['note']}"
        frame = scoring.score_windows(decoder, _windows(_plain(case)), chosen.formats, told=told,
                                      reference=_reference(_plain(case)))
        _keep(frame, case, artifacts)
        size = Reading("kv_bytes_per_token", chosen.bytes_per_token, "B", "modelled", source="kv_quant",
                       method="formula:nbytes(4096) ÷ 4096", hardware="none", scope="texts")
        found = [(case.comparison_id, {}, one) for one in (*_readings(scoring.compare(frame), about), size)]
        again = scoring.score_windows(decoder, _windows(sensed[0]), chosen.formats, told=told)
        place, own = digest({"case": case.comparison_id, "of": "sensed"}), about | {"scope": "sensed windows"}
        return [*found,
                (place, dict(kv_len=case.sensed), _reading("kl", scoring.compare(again).kl, **own)),
                (place, dict(kv_len=case.sensed), Reading(
                    "kl", chosen.predicted_kl, "nat", "modelled", source="kv_quant", hardware="none",
                    method="formula:sum of the KL of single layers", scope="sensed windows"))]
    return _rows(case, readings, watch)


def _rows(case, readings: Callable, watch) -> list[dict]:
    """The readings of a case as rows; a model or text that is not there is missing, NaN and the like is failed."""
    def told(stage: str) -> None:
        watch.at("", stage)

    def whole(reading):
        return [{"comparison_id": case.comparison_id, "case_id": case.comparison_id, **case.columns(),
                 **asdict(reading)}]
    try:
        decoder = _decoder(case.model, case.device)
        _windows(case)
    except (KeyError, ValueError, OSError) as error:
        why = str(error.args[0] if error.args else error)
        return [row for name, unit in METRICS.items() for row in whole(missing(name, unit, why, source="kv_quant"))]
    shape = decoder.config.shape(0)
    heads = dict(variant="sdpa", format_path="decoded", num_q_heads=shape.num_q_heads, num_kv_heads=shape.num_kv_heads,
                 group_ratio=shape.group_ratio, head_dim=shape.head_dim)
    try:
        found = readings(decoder, told)
    except ValueError as error:
        return whole(failed("kl", "nat", str(error), source="kv_quant"))
    return [{"comparison_id": case.comparison_id, "case_id": place, **case.columns(), **heads, **columns,
             **asdict(reading)} for place, columns, reading in found]


def _about(case, decoder) -> dict:
    """What the readings of a case have in common."""
    parts = [HOW, WEIGHTS.get(case.model, f"weights of {decoder.name}"),
             "texts " + ", ".join(f"{name} sha256 {sha256(text(name))[:12]}" for name in case.documents)]
    if scoring.is_static(case.kv_format):
        parts.insert(1, f"static scales of {case.calibration}" + (
            ", guessed" if case.calibration.startswith("range:") else f", {scoring.CALIBRATION_TOKENS} tokens"))
    device = torch.cuda.get_device_name(case.device) if case.device.startswith("cuda") else cpu_name()
    return dict(method=METHOD, source="kv_quant", hardware=device, scope="texts", note="; ".join(parts))


def _reading(metric: str, found, **about) -> Reading:
    return Reading(metric, found.value, METRICS[metric], "measured", low=found.low, high=found.high, n=found.n, **about)


def _readings(quality: scoring.Quality, of: dict) -> list[Reading]:
    """The quality's numbers, the interval of its equivalence test, and how many tokens would settle that."""
    test = of | {"method": METHOD + "; the 90 % interval of two one-sided tests",
                 "note": f"margin {100 * quality.margin:g} %: {quality.verdict}; {of['note']}"}
    return [*quality.readings(**of), _reading("perplexity_delta_90", quality.loss, **test),
            Reading("tokens_needed", quality.n_needed, "count", "modelled", source="kv_quant", hardware="none",
                    scope="texts", method=f"formula:n · (half-width ÷ {quality.margin / 2:g})²")]


def _difference(case, frame, told, of) -> list[Reading]:
    """How much more this format loses than another, paired token by token."""
    other = _frame(replace(case, kv_format=case.against, calibration=scoring.CALIBRATION, against=""), told)
    kl = block_bootstrap(frame["kl"] - other["kl"], frame["document"], frame["window"])
    nll = scoring.compare(frame, other).nll_delta
    about = of | {"note": f"minus that of {case.against}; {of['note']}"}
    return [Reading(name, e.value, "nat", "measured", low=e.low, high=e.high, n=e.n, **about)
            for name, e in (("kl_difference", kl), ("nll_difference", nll))]


def _bytes(case, decoder) -> Reading:
    layers, tokens = range(decoder.config.num_layers), sensitivity.SIZED_AT
    total = sum(kv_format(case.kv_format).nbytes(tokens, decoder.config.shape(layer)) for layer in layers)
    return Reading("kv_bytes_per_token", total / tokens, "B", "modelled", method="formula:nbytes(4096) ÷ 4096",
                   source="kv_quant", hardware="none", scope="texts")


def _keep(frame: pd.DataFrame, case, artifacts: Path | None) -> None:
    """The per-token scores beside the run, so that another statistic needs no other run."""
    if artifacts is not None:
        folder = Path(artifacts) / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        frame.to_parquet(folder / f"{case.comparison_id}-tokens.parquet")


def _plain(case, fmt: str = "fp32", window: int | None = None) -> ScoreCase:
    """The windows of a case as a key of what is kept: every case that scores the same ones gives the same one."""
    return ScoreCase(case.model, fmt, case.documents, window or case.window, case.count, case.start,
                     device=case.device)


@lru_cache(maxsize=1)
def _decoder(model: str, device: str):
    decoder = load_decoder(model)
    return decoder if device == "cpu" else decoder.to(device)


def _windows(case) -> list[scoring.Window]:
    decoder = _decoder(case.model, case.device)
    return [one for name in case.documents for one in scoring.windows(
        name, scoring.encode(decoder, text(name)), window=case.window, count=case.count, start=case.start)]


@lru_cache(maxsize=4)
def _reference(key) -> list[torch.Tensor]:
    return scoring.hidden_states(_decoder(key.model, key.device), _windows(key))


def _frame(case, told) -> pd.DataFrame:
    """Per-token scores of a case, kept for those that subtract it."""
    every = getattr(case, "every", 1)
    return _kept(("scores", replace(_plain(case, case.kv_format), calibration=case.calibration), every),
                 lambda: _fresh(case, every, told))


def _kept(key: tuple, make: Callable):
    """What is made once per process, of the last eight things asked for."""
    if key not in _KEPT:
        while len(_KEPT) >= 8:
            _KEPT.pop(next(iter(_KEPT)))
        _KEPT[key] = make()
    return _KEPT[key]


def _fresh(case, every: int, told) -> pd.DataFrame:
    decoder, windows = _decoder(case.model, case.device), _windows(case)
    told("fp32 cache")
    return scoring.score_windows(decoder, windows, _formats(case, decoder, windows), every=every, told=told,
                                 reference=_reference(_plain(case)))


def _formats(case, decoder, windows):
    """The case's format, with the scales of its calibration text or of the guessed range."""
    kind, _, limit = case.calibration.partition(":")
    if not scoring.is_static(case.kv_format):
        return case.kv_format
    if kind == "range":
        shape = decoder.config.shape(0)
        k_SKD, v_SKE = (torch.full((1, shape.num_kv_heads, width), float(limit), device=decoder.device)
                        for width in (shape.head_dim, shape.v_dim))
        return kv_format(case.kv_format).calibrate(k_SKD, v_SKE)
    return scoring.with_scales(decoder, case.kv_format, _calibration(case, decoder), windows)


def _calibration(case, decoder):
    if case.calibration in case.documents:
        raise ValueError(f"{case.calibration} is scored; scales must come from another text")
    return scoring.encode(decoder, text(case.calibration))[:scoring.CALIBRATION_TOKENS]


def _sensed(case, told) -> pd.DataFrame:
    """Sensitivities to a format, kept for the mix that chooses from them."""
    def make():
        decoder, windows = _decoder(case.model, case.device), _windows(case)
        ids = _calibration(case, decoder) if scoring.is_static(case.kv_format) else None
        return sensitivity.sensitivity(decoder, windows, case.kv_format, calibration_ids=ids, told=told)
    return _kept(("sensed", case), make)
