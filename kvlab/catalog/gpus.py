"""Accelerators and CPUs from data/gpus.csv: data-sheet numbers, each row with its source and known conflicts.

data/gpu_formats.csv says which kinds of codes their matrix units multiply, by compute capability (a CPU: by arch).
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from kvlab.catalog import find, integer, number, rows
from kvlab.registry import no_such

WORDS = ("native", "storage-only", "unsupported", "unknown")     # of format_support, strongest to weakest
_NOISE = {"nvidia", "geforce", "edition", "amd", "instinct", "gpu", "generation", "tesla"}
_DRIVERS = {"nvidia h100 80gb hbm3": "H100 SXM5 80GB"}       # NVIDIA's name for it says neither SXM nor PCIe
_SAME_CODES = {"kivi4": "int4", "kivi2": "int2"}


@dataclass(frozen=True, slots=True)
class GPUSpec:
    """One accelerator or CPU as its data sheet states it; None = unknown.

    memory_bytes: the sheet's GB taken as decimal (10⁹ bytes); the device itself may report up to 7 % more.
    bandwidth: B/s, decimal. l2_bytes, llc_bytes: the sheet's MB taken as 2²⁰ bytes, as devices report caches;
    llc_bytes is a cache behind L2 (AMD's Infinity Cache, a CPU's L3). flops: dense flop/s (int8: op/s) by dtype.
    sm_count: SMs, CUs or cores. conflicts: where sources disagree, and notes.
    """
    name: str
    vendor: str
    arch: str
    memory_bytes: int | None
    bandwidth: float | None
    flops: Mapping[str, float | None] = field(hash=False)
    l2_bytes: int | None
    llc_bytes: int | None
    sm_count: int | None
    compute_capability: str | None
    fp8_support: str
    source: str
    conflicts: str

    def ridge(self, dtype: str = "bf16") -> float | None:
        """Ridge point of the roofline in flop/B: the intensity above which compute is the limit.

        None = unknown.
        Source: Williams, Waterman, Patterson, Roofline (CACM 2009): peak flop/s over peak B/s.
        """
        flops = self.flops.get(dtype)
        return flops / self.bandwidth if flops and self.bandwidth else None


def _spec(row: dict[str, str]) -> GPUSpec:
    columns = {"fp16": "fp16_dense_tflops", "bf16": "bf16_dense_tflops", "fp8": "fp8_dense_tflops",
               "int8": "int8_dense_tops"}
    return GPUSpec(row["name"], row["vendor"], row["arch"], memory_bytes=integer(row["memory_gb"], 10**9),
                   bandwidth=number(row["bandwidth_gb_s"], 1e9),
                   flops={dtype: number(row[column], 1e12) for dtype, column in columns.items()},
                   l2_bytes=integer(row["l2_mib"], 2**20), llc_bytes=integer(row["llc_mib"], 2**20),
                   sm_count=integer(row["sm_count"]), compute_capability=row["compute_capability"] or None,
                   fp8_support=row["fp8_support"], source=row["source"], conflicts=row["conflicts"])


@cache
def _by_name() -> dict[str, GPUSpec]:
    return {row["name"]: _spec(row) for row in rows("gpus.csv")}


def gpus() -> dict[str, GPUSpec]:
    """Every accelerator and CPU of the catalogue by name, in the file's order."""
    return dict(_by_name())


def gpu(name: str) -> GPUSpec:
    """The accelerator of that name in any case, or the one that it stands for.

    That is the one with the same letters and digits (`h200-sxm-141gb`), the only one whose name begins with it (`h200`,
    `RTXPRO6000`), or the one that a driver calls so (`NVIDIA GeForce RTX 4090`).
    Refuses an unknown or ambiguous name with KeyError, a near match and the list.
    """
    every = _by_name()
    begins = [spec for known, spec in every.items() if _letters(known) == _letters(name)]
    begins = begins or [spec for known, spec in every.items() if known.lower().startswith(name.lower())]
    begins = begins or [spec for known, spec in every.items() if _letters(name) and _letters(known).startswith(
        _letters(name))] or _called(name)
    return find("gpu", name, every, {name.lower(): begins})


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _words(name: str) -> set[str]:
    """The parts of a device's name, without who makes it."""
    return {part for part in re.split(r"[^a-z0-9]+", name.lower()) if part} - _NOISE


def _called(name: str) -> list[GPUSpec]:
    """Those whose name has most of a driver's words for it, the number of the model among them, and fewest others."""
    wanted = _words(_DRIVERS.get(name.strip().lower(), name))
    if all(word.isdigit() for word in wanted):                  # "6000" alone is the number of several models
        return []
    scored: dict[tuple[int, int], list[GPUSpec]] = {}
    for spec in _by_name().values():
        words = _words(spec.name)
        models = {word for word in words if re.search(r"\d", word) and not re.fullmatch(r"\d+gb", word)
                  and not re.match(r"(sxm|pcie|hbm)\d*$", word)}
        if (models or words) <= wanted:
            scored.setdefault((len(words & wanted), -len(words - wanted)), []).append(spec)
    return scored[max(scored)] if scored else []


@dataclass(frozen=True, slots=True)
class FormatSupport:
    """What a GPU's matrix units do with one kind of code, for the product of two operands of that kind.

    word: "native": one instruction multiplies two operands of this kind as they are stored, block scales inside it
    where the kind has them (fp32 on NVIDIA, and all on a CPU without matrix units: in the vector units, as `product`
    says). "storage-only": no such instruction; codes are converted in registers, and `product` says what is multiplied
    then. "unsupported": nothing multiplies it, and what converts it elsewhere refuses this target. "unknown": no
    source. A kernel that keeps q in 16 bits converts a smaller K and V whatever the word is: all of kvlab's own do.
    """
    kind: str
    word: str
    product: str
    why: str
    source: str


@cache
def _formats() -> dict[tuple[str, str], FormatSupport]:
    """(target, kind) -> its line of data/gpu_formats.csv; target "*" is any that has no line of its own."""
    return {(target, kind): FormatSupport(kind, row["word"], row["product"], row["why"], row["source"])
            for row in rows("gpu_formats.csv") for target in row["targets"].split(";")
            for kind in row["kinds"].split(";")}


def format_kinds() -> list[str]:
    """The kinds of codes that `format_support` knows, in the order of data/gpu_formats.csv."""
    return list(dict.fromkeys(kind for _, kind in _formats()))


def format_target(spec: GPUSpec) -> str:
    """By what the table of formats knows an accelerator: its compute capability, or its arch where it has none."""
    return spec.compute_capability or spec.arch


def format_support(spec: GPUSpec | str, fmt: str) -> FormatSupport:
    """Whether an accelerator multiplies a KV format's codes as they are: native, storage-only, unsupported, unknown.

    spec: a GPUSpec, a name that `gpu` takes, or a compute capability ("9.0", "gfx942"). fmt: a format's name or a kind
    ("int8/token", "fp8_e4m3"); of "K+V" stored apart the weaker side. KeyError for an unknown accelerator or kind.
    """
    if isinstance(spec, str) and spec in {format_target(known) for known in _by_name().values()}:
        target = spec
    else:
        target = format_target(gpu(spec) if isinstance(spec, str) else spec)
    sides = [_support(target, side) for side in fmt.split("+")]
    return max(sides, key=lambda side: WORDS.index(side.word))


def _support(target: str, side: str) -> FormatSupport:
    kind = side.partition("/")[0]
    kind = _SAME_CODES.get(kind, kind)
    if kind not in format_kinds():
        raise no_such("kind of code", kind, format_kinds())
    nothing = FormatSupport(kind, "unknown", "", f"data/gpu_formats.csv has no line about {kind} on {target}", "")
    return _formats().get((target, kind)) or _formats().get(("*", kind)) or nothing
