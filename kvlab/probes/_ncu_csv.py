"""What Nsight Compute printed, read so that nothing is guessed: either the full number or a sentence on why not."""
from __future__ import annotations

import csv
import re

UNITS = {"byte": 1.0, "cycle": 1.0, "%": 0.01, "ns": 1e-9}          # base units, to B, cycles, ratio, s
ALSO = {"nsecond": "ns"}            # as versions before 2025 say it
END = "spin_kernel"                 # of torch.cuda._sleep: the child launches it last, so a table that has it is whole
RANGE = re.compile(r"kvlab-([0-9a-f]{12})")
_NUMBER = re.compile(r"(\d+|\d{1,3}(?:,\d{3})+)(\.\d+)?(e[+-]?\d+)?", re.ASCII)
Kernel = dict[str, "float | str"]   # metric -> its value in B, cycles, s or as a ratio; or why there is none

_KNOWN = (
    ("ERR_NVGPUCTRPERM", "ERR_NVGPUCTRPERM: this user may not read the GPU's performance counters; run as root or with "
     "CAP_PERFMON or CAP_SYS_ADMIN (a container: --cap-add=SYS_ADMIN), or load the driver with "
     "NVreg_RestrictProfilingToAdminUsers=0"),
    ("LibraryNotLoaded", "LibraryNotLoaded: ncu could not start the driver's counter library: it does not fit the "
     "driver, or a sandbox (gVisor, WSL) hides the library; update ncu, or run outside of the sandbox"),
    ("MULTIPLE_SUBSCRIBERS", "another profiler is attached to this GPU's program (MULTIPLE_SUBSCRIBERS); end it"),
    ("concurrently", "the counters are taken by another tool; end other profilers and DCGM's (dcgmi profile --pause)"),
    ("failed to connect to the CUDA driver", "ncu found a stub of libcuda.so, not the driver; take the stub's folder "
     "out of LD_LIBRARY_PATH"),
    ("unrecogni", "this ncu does not know one of kvlab's options; update Nsight Compute"),
)


class Unreadable(Exception):
    """Counts that cannot be had; the message says why, and what to do."""


def refused(log: str) -> str:
    """Why ncu itself could count nothing at all, with the remedy; "" where it says no such thing."""
    said = "\n".join(line for line in log.splitlines() if not line.startswith('"'))
    return next((why for mark, why in _KNOWN if mark in said), "")


def replays(log: str) -> int:
    """How often a kernel was run to read all that was asked for, the most of all kernels; 0 where ncu does not say."""
    said = re.findall(r"^==PROF== Profiling .*- (\d+) pass(?:es)?\b", log, re.MULTILINE)
    return max(map(int, said), default=0)


def unknown(log: str, metrics: tuple[str, ...]) -> list[str]:
    """Those of the metrics that ncu says it does not know on this GPU."""
    said = [line for line in log.splitlines() if line.startswith(("==ERROR==", "==WARNING==")) and "metric" in line]
    return [m for m in metrics if any(m.partition(".")[0] in line for line in said)]


def number(text: str, unit: str) -> float:
    """A cell as a number. Raises Unreadable where it could be meant otherwise, as "1.048" could of bytes."""
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        raise Unreadable(f"ncu gave {text!r} instead of a number")
    if unit == "byte" and found[2] and (len(found[2]) == 4 or found[2].strip(".0")):
        raise Unreadable(f"ncu gave {text!r} bytes, and bytes are whole: it does not print in the C locale")
    return float(found[0].replace(",", "")) * UNITS[unit]


def kernels(log: str, metrics: dict[str, str]) -> dict[str, list[Kernel]]:
    """The kernels of each range kvlab-<case_id>, in order; those outside of all ranges under "".

    log: all that ncu printed with --csv --page raw --print-units base. metrics: name -> its base unit, one of UNITS.
    Raises Unreadable: no table; one that was cut; rows that two ranges claim.
    """
    lines = log.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise Unreadable("No kernels were profiled: ncu saw no kernel inside the profiled calls"
                         if "No kernels were profiled" in log else "ncu printed no table")
    try:
        names, *rows = csv.reader(line for line in lines[start:] if not line.startswith("=="))
    except csv.Error as error:
        raise Unreadable(f"ncu's table is no CSV: {error}") from None
    if not rows or rows[0][0] or len(rows[0]) != len(names):
        raise Unreadable("ncu's table has no row of units: it was cut, or ncu is too old")
    units, rows = dict(zip(names, rows[0])), [row for row in rows[1:] if row]
    last = "".join(rows[-1]) if rows and len(rows[-1]) == len(names) else ""
    if END not in last or RANGE.search(last):
        raise Unreadable("ncu's table was cut: the kernel that kvlab launches last is not in it")
    found: dict[str, list[Kernel]] = {}
    for row in rows[:-1]:
        if len(row) != len(names):
            raise Unreadable("a row of ncu's table has too few or too many cells")
        ranges = set(RANGE.findall(" ".join(row)))
        if len(ranges) > 1:
            raise Unreadable(f"a kernel lies in {len(ranges)} of kvlab's ranges at once")
        cells = dict(zip(names, row))
        found.setdefault("".join(ranges), []).append({m: _cell(cells, units, m, unit) for m, unit in metrics.items()})
    return found


def _cell(row: dict[str, str], units: dict[str, str], metric: str, unit: str) -> float | str:
    if metric not in row:
        return f"ncu printed no column {metric}"
    given = ALSO.get(units[metric], units[metric])
    if given != unit:
        return (f"ncu gave {metric} in {given!r} where --print-units base was asked for, which is {unit!r}; update "
                "Nsight Compute")
    try:
        return number(row[metric], unit)
    except Unreadable as why:
        return f"{metric}: {why}"


def summed(found: list[Kernel], metric: str) -> float:
    """The metric over all kernels of a call. Raises Unreadable where that of one kernel is not there."""
    return sum(_value(kernel, metric) for kernel in found)


def weighted(found: list[Kernel], metric: str, weight: str, over: str | None = None) -> float:
    """The metric's mean over the kernels of a call (or of its ratio to another), each as heavy as its weight."""
    total = summed(found, weight)
    if not total or over and not all(_value(kernel, over) for kernel in found):
        raise Unreadable(f"ncu gave 0 for {over if total else weight}")
    return sum(_value(k, metric) / (_value(k, over) if over else 1) * _value(k, weight) for k in found) / total


def _value(kernel: Kernel, metric: str) -> float:
    value = kernel[metric]
    if isinstance(value, str):
        raise Unreadable(value)
    return value
