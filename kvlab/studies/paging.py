"""What does paging save, what does it cost, and which block size?

Tests the article's claims that reserving the longest sequence for every request wastes most of the memory, that pages
end this, and that 16 tokens are a block. Unused room against block size and against three ways to reserve, over the
lengths of a workload; who owns which block after a while; and, measured on this machine, what the pages cost a kernel.
"""
from __future__ import annotations

from collections.abc import Iterator

from kvlab.attention import Comparison, VariantRef
from kvlab.probes import measure
from kvlab.probes._base import Watch
from kvlab.probes.ceilings import Ceilings
from kvlab.probes.kernel_error import KernelError
from kvlab.probes.roofline import Roofline
from kvlab.probes.timer import Timer
from kvlab.shapes import Workload
from kvlab.studies import _kernels_ratios, _paging_cases
from kvlab.studies._kernels_ratios import with_ratios
from kvlab.studies._paging_findings import findings
from kvlab.studies._run import Case
from kvlab.studies.kernels import GQA, OWN, paging_comparison

__all__ = ["METRICS", "SIZES", "cases", "findings", "run"]
SIZES = ("smoke", "small", "large")
METRICS = {**_paging_cases.METRICS, "to_contiguous": _kernels_ratios.METRICS["to_contiguous"]}
WORKLOAD = "azure_2023_conv"
BLOCKS = (1, 8, 16, 32, 64, 128, 256)


def cases(size: str, *, device: str = "cpu", variants: tuple[VariantRef, ...] | None = None,
          model: str | None = None) -> Iterator[Case]:
    """Unused room by block size and by reservation, two snapshots of a pool, and a decode kernel over block sizes.

    variants: what is timed, in place of kvlab's own kernel.
    """
    if model:
        raise ValueError("paging counts blocks of tokens, whatever the model: it takes no --model")
    yield from _paging_cases.cases(size, WORKLOAD, BLOCKS[::3] if size == "smoke" else BLOCKS)
    kind = "cuda" if device.startswith("cuda") else "cpu"
    kv_len = {"smoke": 512, "small": 4096, "large": 16384}[size]
    for variant in variants or (OWN[kind],):
        yield paging_comparison(Workload.decode(GQA, kv_len=kv_len), variant, (), size, device=device, threads=1)


def run(case: Case, *, artifacts=None, watch: Watch | None = None) -> list[dict]:
    """Blocks are counted in a pool; kernels are timed, with the ratio to one contiguous piece."""
    if isinstance(case, Comparison):
        chosen = (KernelError(), Ceilings(), Timer(cap_s=0.5), Roofline())
        return with_ratios(measure(case, chosen, artifacts=artifacts, watch=watch))
    return case.rows()
