"""The rows of kv_quant's cases on text: scores under a format, by position, by layer, and of a mix of layers."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.accuracy import scoring, sensitivity
from kvlab.accuracy.statistics import block_bootstrap
from kvlab.accuracy.texts import sha256, text
from kvlab.attention._base import digest
from kvlab.kv.formats import kv_format
from kvlab.probes._base import hardware
from kvlab.record.export import write_frame
from kvlab.record.quality import COMMON, TEXTS
from kvlab.record.reading import Reading, failed
from kvlab.studies import _kv_quant_scores as scores
from kvlab.studies import _models

if TYPE_CHECKING:
    import pandas as pd

METRICS = {**scoring.UNITS, "perplexity_delta_90": "ratio", "tokens_needed": "count", "kv_bytes_per_token": "B"}
METHOD = "paired moving-block bootstrap, blocks of 32 tokens, 2000 draws"
HOW = "simulated cache: values are rounded through the storage format and attention is computed in fp32"
WEIGHTS = {"smollm2-135m": "weights dequantised from a Q4_1 file, so the reference is that model, not the original"}
BUCKETS = (0, 512, 1024, 2048, 4096, 8192)          # of position in a long window
SOURCE = dict(source="kv_quant", hardware="none")   # of what is computed from formulas


def scored(case, artifacts: Path | None, watch) -> list[dict]:
    """One format on the case's texts: quality with intervals, the equivalence test, bytes; then KL of each text."""
    def readings(decoder, told):
        frame, of = scores.frame(case, told), _about(case, decoder)
        _keep(frame, case, artifacts)
        size = _bytes(case, decoder, [case.kv_format] * decoder.config.num_layers)
        found = [(case.comparison_id, {}, one) for one in (*_readings(scoring.compare(frame), of), size(TEXTS))]
        if case.common:
            place, names = digest({"case": case.comparison_id, "of": COMMON}), " + ".join(case.common)
            part = frame[frame["document"].isin(case.common) & (frame["window"] == 0)].reset_index(drop=True)
            found += [(place, dict(data=names), one) for one in (
                *_readings(scoring.compare(part), of | {"scope": COMMON}), size(COMMON))]
        found += _differences(case, frame, told, of)
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
        frame = scores.frame(case, told)
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
        found = []
        for line in scores.sensed(scores.plain(case, case.kv_format), told).to_dict("records"):
            about = _about(case, decoder) | {"scope": f"layer {line['layer']} {line['side']}"}
            place = digest({"case": case.comparison_id, "of": about["scope"]})
            found += [(place, {}, Reading("kl", line["kl"], "nat", "measured", low=line["low"], high=line["high"],
                                          n=line["n"], **about)),
                      (place, {}, Reading("kv_bytes_per_token", line["bytes_per_token"], "B", "modelled",
                                          method="formula:nbytes(4096) ÷ 4096", scope=about["scope"], **SOURCE))]
        return found
    return _rows(case, readings, watch)


def mixed(case, artifacts: Path | None, watch) -> list[dict]:
    """A mix of layers within the bytes of a uniform format: its KL on the scored texts; predicted against measured.

    The mix is chosen on windows behind those that it is scored on.
    """
    def readings(decoder, told):
        import pandas as pd
        sensing = [scores.sensing(case, name) for name in case.candidates]
        for one in scores.windows(sensing[0]):
            scoring.disjoint(one.ids_T, scores.windows(case), f"what chooses the mix ({one.document})",
                             "layers must be chosen on tokens that are not scored")
        budget = sum(kv_format(case.kv_format).nbytes(sensitivity.SIZED_AT, decoder.config.shape(layer))
                     for layer in range(decoder.config.num_layers)) / sensitivity.SIZED_AT
        chosen = sensitivity.mix(pd.concat([scores.sensed(one, told) for one in sensing]), budget)
        about = _about(case, decoder)
        about["note"] = f"K+V of layers 0 … {len(chosen.formats) - 1}: {', '.join(chosen.formats)}; {about['note']}"
        frame = scores.scored(case, chosen.formats, told)
        _keep(frame, case, artifacts)
        size = _bytes(case, decoder, chosen.formats)(TEXTS)
        again = scoring.compare(scores.scored(sensing[0], chosen.formats, told)).kl
        where, own = dict(kv_len=case.sensed), about | {"scope": "sensed windows"}
        place = digest({"case": case.comparison_id, "of": "sensed"})
        predicted = Reading("kl", chosen.predicted_kl, "nat", "modelled", scope=own["scope"],
                            method="formula:sum of the KL of single layers", **SOURCE)
        return [*((case.comparison_id, {}, one) for one in (*_readings(scoring.compare(frame), about), size)),
                *_differences(case, frame, told, about),
                (place, where, _reading("kl", again, **own)), (place, where, predicted)]
    return _rows(case, readings, watch)


def _rows(case, readings: Callable, watch) -> list[dict]:
    """The readings of a case as rows; a model or text that is not there is missing, NaN and the like is failed."""
    def told(stage: str) -> None:
        watch.at("", stage)

    def whole(reading):
        return {"comparison_id": case.comparison_id, "case_id": case.comparison_id, **case.columns(),
                **asdict(reading)}
    try:
        told(f"loading {case.model}")
        decoder = _models.decoder(case.model, case.device)
        scores.windows(case)
    except _models.ABSENT as error:
        return [whole(one) for one in _models.absent(METRICS, error, source="kv_quant")]
    shape = decoder.config.shape(0)
    heads = dict(variant="sdpa", format_path="decoded", num_q_heads=shape.num_q_heads, num_kv_heads=shape.num_kv_heads,
                 group_ratio=shape.group_ratio, head_dim=shape.head_dim)
    try:
        found = readings(decoder, told)
    except ValueError as error:
        return [whole(failed("kl", "nat", str(error), source="kv_quant"))]
    return [{"comparison_id": case.comparison_id, "case_id": place, **case.columns(), **heads, **columns,
             **asdict(reading)} for place, columns, reading in found]


def _about(case, decoder) -> dict:
    """What the readings of a case have in common."""
    parts = [HOW, WEIGHTS.get(case.model, f"weights of {decoder.name}"),
             "texts " + ", ".join(f"{name} sha256 {sha256(text(name))[:12]}" for name in case.documents)]
    if scoring.is_static(case.kv_format):
        parts.insert(1, f"static scales of {case.calibration}" + (
            ", guessed" if case.calibration.startswith("range:") else f", {scoring.CALIBRATION_TOKENS} tokens"))
    return dict(method=METHOD, source="kv_quant", hardware=hardware(case.device), scope=TEXTS, note="; ".join(parts))


def _reading(metric: str, found, **about) -> Reading:
    return Reading(metric, found.value, METRICS[metric], "measured", low=found.low, high=found.high, n=found.n, **about)


def _readings(quality: scoring.Quality, of: dict) -> list[Reading]:
    """The quality's numbers, the interval of its equivalence test, and the tokens that half the margin would take."""
    test = of | {"method": METHOD + "; the 90 % interval of two one-sided tests",
                 "note": f"margin {100 * quality.margin:g} %: {quality.verdict}; {of['note']}"}
    return [*quality.readings(**of), _reading("perplexity_delta_90", quality.loss, **test),
            Reading("tokens_needed", quality.n_needed, "count", "modelled", scope=of["scope"],
                    method=f"formula:n · (half-width ÷ {quality.margin / 2:g})²", **SOURCE)]


def _differences(case, frame: pd.DataFrame, told, of: dict) -> list[tuple]:
    """How much more this format loses than each of others, paired token by token."""
    found = []
    for name in case.against:
        other, about = scores.frame(scores.plain(case, name), told), of | {"scope": f"minus {name}"}
        kl = block_bootstrap(frame["kl"] - other["kl"], frame["document"], frame["window"])
        place = digest({"case": case.comparison_id, "of": about["scope"]})
        found += [(place, {}, Reading(metric, e.value, "nat", "measured", low=e.low, high=e.high, n=e.n, **about))
                  for metric, e in (("kl_difference", kl), ("nll_difference", scoring.compare(frame, other).nll_delta))]
    return found


def _bytes(case, decoder, formats: Sequence[str]) -> Callable[[str], Reading]:
    """Bytes per token of the cache as it stands at the end of a scored window, for rows of a scope."""
    total = sum(kv_format(fmt).nbytes(case.window, decoder.config.shape(layer)) for layer, fmt in enumerate(formats))
    return lambda scope: Reading("kv_bytes_per_token", total / case.window, "B", "modelled", scope=scope,
                                 method=f"formula:nbytes({case.window}) ÷ {case.window}", **SOURCE)


def _keep(frame: pd.DataFrame, case, artifacts: Path | None) -> None:
    """The per-token scores beside the run, so that another statistic needs no other run."""
    if artifacts is not None:
        folder = Path(artifacts) / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        write_frame(frame, folder / f"{case.comparison_id}-tokens.parquet")
