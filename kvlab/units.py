"""Units for display only. Inside kvlab everything is bytes, seconds, flop and ratios."""
from __future__ import annotations

GiB, MiB, KiB = 2**30, 2**20, 2**10
_SCALES: dict[str, list[tuple[float, str]]] = {
    "B": [(GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB"), (1, "B")],
    "s": [(1, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")],
    "B/s": [(1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1, "B/s")],
    "flop/s": [(1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"), (1, "FLOP/s")],
    "flop": [(1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1, "FLOP")],
}


def display(value: float | None, unit: str, digits: int = 3) -> str:
    """A number for people: bytes in KiB/MiB/GiB (binary), rates in GB/s (decimal), `digits` significant digits."""
    if value is None or value != value:
        return "–"
    if unit == "ratio" or unit not in _SCALES:
        return f"{value:.{digits}g}" + (f" {unit}" if unit not in ("ratio", "") else "")
    scale, name = next(((s, n) for s, n in _SCALES[unit] if abs(value) >= s), _SCALES[unit][-1])
    scaled = value / scale
    text = f"{scaled:.0f}" if abs(scaled) >= 10**(digits - 1) else f"{scaled:.{digits}g}"
    return f"{text} {name}"
