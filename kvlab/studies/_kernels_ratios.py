"""Ratios between trials of one comparison: to a contiguous cache, to the fastest library, to the dtype's own format.

Trials of a comparison are interleaved, so that what slows the machine slows both. Intervals are those that the two
stored ones give: the widest quotient.
"""
from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from kvlab.attention import Trial
from kvlab.record.reading import Reading, missing
from kvlab.registry import case_from

METRICS = {"to_contiguous": "ratio", "to_head_order": "ratio", "to_peer": "ratio", "format_speedup": "ratio",
           "format_bytes_ratio": "ratio"}
# what is not kvlab's own: torch's kernels and the libraries'
PEERS = ("sdpa", "sdpa_cudnn", "sdpa_efficient", "sdpa_enable_gqa", "sdpa_flash", "sdpa_math", "flash_attn",
         "flashinfer", "flex")


def with_ratios(rows: Sequence[dict]) -> list[dict]:
    """The rows of a comparison, and behind them a row for each ratio that its trials allow.

    to_contiguous: time over that of the same variant and format on a contiguous cache. to_head_order: over that of the
    same pages in head order. to_peer: over that of the fastest library on a contiguous cache in the dtype's own format.
    format_speedup, format_bytes_ratio: time and ideal bytes of the dtype's own format over those of this one. Missing,
    with the reason, where the trial that a ratio needs gave no time.
    """
    return [*rows, *_ratios(rows)]


def _ratios(rows) -> Iterator[dict]:
    firsts = {row["case_id"]: row for row in rows if row["metric"] == "latency_s" and not row.get("replica")}
    times = [(row, case_from("kvlab.attention:Trial", json.loads(row["case"]))) for row in firsts.values()]
    ideal = {row["case_id"]: row["value"] for row in rows if row["metric"] == "ideal_bytes"}
    for row, trial in times:
        if row["value"] is None:
            continue
        for metric, of, inverse in (("to_contiguous", _contiguous, False), ("to_head_order", _head_order, False),
                                    ("to_peer", _peer, False), ("format_speedup", _own_format, True)):
            base = of(trial, times)
            if base is not None:
                yield _row(row, _over(metric, *((base, row) if inverse else (row, base)), base))
        base = _own_format(trial, times)
        if base is not None and ideal.get(row["case_id"]) and ideal.get(base["case_id"]):
            yield _row(row, Reading("format_bytes_ratio", ideal[base["case_id"]] / ideal[row["case_id"]], "ratio",
                                    "modelled", method="formula:ideal_bytes ÷ ideal_bytes", source="kernels",
                                    denominator=f"ideal_bytes in {trial.kv_format}"))


def _contiguous(trial: Trial, times) -> dict | None:
    """The same variant and format on a contiguous cache, in the same order of heads and tokens if there is one."""
    if trial.layout.block_size is None:
        return None
    found = [(row, other) for row, other in times if _same(trial, other) and other.kv_format == trial.kv_format
             and other.layout.block_size is None]
    found.sort(key=lambda pair: pair[1].layout.order != trial.layout.order)
    return found[0][0] if found else None


def _head_order(trial: Trial, times) -> dict | None:
    if trial.layout.order == "head" or trial.layout.block_size is None:
        return None
    return next((row for row, other in times if _same(trial, other) and other.kv_format == trial.kv_format
                 and other.layout.order == "head" and other.layout.block_size == trial.layout.block_size
                 and other.layout.page_order == trial.layout.page_order), None)


def _own_format(trial: Trial, times) -> dict | None:
    if trial.kv_format == trial.dtype:
        return None
    return next((row for row, other in times if _same(trial, other) and other.kv_format == trial.dtype
                 and other.layout == trial.layout), None)


def _peer(trial: Trial, times) -> dict | None:
    """The fastest library; of those without a time the first, so that its reason is told."""
    peers = [row for row, other in times if other.variant.ref in PEERS and other.layout.block_size is None
             and other.kv_format == other.dtype]
    timed = [row for row in peers if row["value"] is not None]
    return min(timed, key=lambda row: row["value"]) if timed else peers[0] if peers else None


def _same(one: Trial, other: Trial) -> bool:
    return one.variant == other.variant


def _over(metric: str, above: dict, below: dict, base: dict) -> Reading:
    """above ÷ below as a reading; base: which of the two is another trial's."""
    against = f"{base['variant']}, {base['kv_format']}, {'paged' if base.get('block_size') else 'contiguous'}"
    if base["value"] is None:
        return missing(metric, "ratio", f"no time of {against}: {base['note']}", source="kernels")
    ends = {} if None in (above["low"], above["high"], below["low"], below["high"]) else dict(
        low=above["low"] / below["high"], high=above["high"] / below["low"])
    return Reading(metric, above["value"] / below["value"], "ratio", "measured", method="derived", source="kernels",
                   denominator=f"latency_s of {against}", note=f"to {base['variant']}; interval: from those of the two "
                   "times, which were measured interleaved" if ends else f"to {base['variant']}", **ends)


_KEPT = ("comparison_id", "case_id", "variant", "device", "dtype", "kv_format", "format_path", "block_size",
         "page_order", "phase", "batch_size", "q_len", "kv_len", "num_q_heads", "num_kv_heads", "group_ratio",
         "head_dim", "data", "threads", "seed", "replica", "case", "hardware")


def _row(row: dict, reading: Reading) -> dict:
    """A row about the trial that `row` is about."""
    from dataclasses import asdict
    return {**asdict(reading), **{name: row[name] for name in _KEPT if name in row}}
