"""Bytes between a chip and its main memory, however they were found: the same readings from every source."""
from __future__ import annotations

from kvlab.attention import Cost, ideal_traffic
from kvlab.record.counters import EDGE
from kvlab.record.reading import Reading, missing
from kvlab.units import display

AMPLIFICATION = {"read_amplification": "ratio", "traffic_amplification": "ratio"}
TRAFFIC = {"hbm_read_bytes": "B", "hbm_write_bytes": "B", "hbm_bytes": "B", **AMPLIFICATION,
           "traffic_to_model": "ratio"}

def ideal_of(case) -> Cost:
    """What a trial must move at the least whatever computes it, or an operation."""
    if not hasattr(case, "variant"):
        return case.cost()
    return ideal_traffic(case.workload, case.format, case.itemsize)


def model_of(case, cache_bytes: int) -> Cost:
    """What the case's own cost formula says behind a cache of that size."""
    return case.variant.load().cost(case, cache_bytes) if hasattr(case, "variant") else case.cost(cache_bytes)


def traffic(case, *, total: float, read: float | None = None, write: float | None = None, unsplit: str = "",
            cache_bytes: int, kind: str, low: float | None = None, high: float | None = None,
            **common) -> list[Reading]:
    """Readings of TRAFFIC for a Trial or an Operation, per call.

    total, read, write: bytes; read and write None where the source does not tell them apart, and why (unsplit).
    cache_bytes: of the cache in front of memory, real or simulated: the formula gets the same one. low, high: interval
    of total. common: method, source, scope, n, window_s, cache_state, note, ….
    """
    found = [Reading(metric, value, "B", kind, **common) if value is not None else
             missing(metric, "B", unsplit, source=common["source"])
             for metric, value in (("hbm_read_bytes", read), ("hbm_write_bytes", write))]
    found.append(Reading("hbm_bytes", total, "B", kind, low=low, high=high, **common))
    found += amplifications(ideal_of(case), total=total, read=read, unsplit=unsplit, cache_bytes=cache_bytes, kind=kind,
                            low=low, high=high, **common)
    formula = _moved(case, cache_bytes)
    found.append(Reading("traffic_to_model", total / formula, "ratio", kind, denominator="variant.cost, read and write",
                         low=None if low is None else low / formula, high=None if high is None else high / formula,
                         **{**common, "method": "derived", "note": "; ".join(filter(None, (
                             _formula_said(case, formula, cache_bytes), common.get("note"))))}))
    return found


def _moved(case, cache_bytes: int) -> int:
    model = model_of(case, cache_bytes)
    return model.read_bytes + model.write_bytes


def _formula_said(case, formula: int, cache_bytes: int) -> str:
    """The formula's own number, and whether it is near one of its steps, where a cache slides."""
    said = f"formula: {display(formula, 'B')} behind a cache of {display(cache_bytes, 'B')}"
    most, least = (_moved(case, int(cache_bytes * factor)) for factor in (1 / EDGE, EDGE))
    if most - least <= 0.05 * formula:
        return said
    return (f"{said}, near a step of it: {display(most, 'B')} behind one {EDGE:g} × smaller, {display(least, 'B')} "
            "behind one as much larger; a cache slides between them")


def amplifications(ideal: Cost, *, total: float, read: float | None, unsplit: str = "", cache_bytes: int, kind: str,
                   low: float | None = None, high: float | None = None, **common) -> list[Reading]:
    """How many times the bytes that were needed at least were moved: of reads alone, and of all.

    None where the ideal reads are below twice the cache: what is used twice would be found there.
    """
    source, moved = common["source"], ideal.read_bytes + ideal.write_bytes
    if ideal.read_bytes < 2 * cache_bytes:
        why = (f"ideal reads are below twice the last-level cache ({cache_bytes:,} bytes): reuse inside the cache "
               "would decide the ratio")
        return [missing(metric, "ratio", why, source=source) for metric in AMPLIFICATION]
    common = {**common, "method": common["method"] if kind == "modelled" else "derived"}
    reads = missing("read_amplification", "ratio", unsplit, source=source) if read is None else Reading(
        "read_amplification", read / ideal.read_bytes, "ratio", kind, denominator="ideal read bytes", **common)
    return [reads, Reading("traffic_amplification", total / moved, "ratio", kind, denominator="ideal_bytes",
                           low=None if low is None else low / moved, high=None if high is None else high / moved,
                           **common)]
