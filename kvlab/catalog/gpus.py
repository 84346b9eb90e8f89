"""Accelerators and CPUs from data/gpus.csv: data-sheet numbers, each row with its source and known conflicts."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from kvlab.catalog import find, integer, number, rows


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
        """Ridge point of the roofline in flop/B: the intensity above which compute is the limit. None = unknown.

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
    """The accelerator of that name, in any case, or the only one whose name begins with it (`h200`).

    Refuses an unknown or ambiguous name with KeyError, a near match and the list.
    """
    every = _by_name()
    begins = [spec for known, spec in every.items() if known.lower().startswith(name.lower())]
    return find("gpu", name, every, {name.lower(): begins})
