"""What an all-reduce between GPUs costs over NVLink: of GPUs that have it, where no run of them tells.

Bandwidths by data sheet, latency and share from one published benchmark of one of them. Nothing here is fitted to a
served run, and whoever uses it says so.
"""
from __future__ import annotations

from dataclasses import dataclass

# vLLM's collectives on H100 SXM, 6 ranks, 0.5, 1, 1.5, 2, 3, 4 MiB: its best kernel takes 13, 16, 18, 21, 25, 31 µs,
# NCCL 23, 25, 32, 43, 47, 53 µs. Least squares of latency + 2(p-1)/p × bytes ÷ rate: 10.7 µs and 350 GB/s; 18.9 µs and
# 192 GB/s, as shares of 450 GB/s a direction. Smaller messages take about the latency alone: vLLM's kernel 9 to 12 µs
# at 32 KiB on 2 to 8 H100.
# Source: vllm-project/vllm#24111 (isolated primitives, TP=6); sgl-project/sglang#2904 (vLLM's kernel by size).
REDUCE_S, REDUCE_SHARE = 10.7e-6, 0.78
NCCL_S, NCCL_SHARE = 18.9e-6, 0.43
SOURCE = "vllm#24111's benchmark of all-reduces on H100 SXM"


@dataclass(frozen=True, slots=True)
class Link:
    """bandwidth: B/s in one direction, of one GPU. most: GPUs that it joins; beyond them lies another link."""
    bandwidth: float
    most: int = 8


# Half of what the data sheets state, which count both directions. Eight GPUs to a board, two to a bridge, 32 and 72 to
# a rack. Source: NVIDIA's data sheets of V100, A100, H100, H200, H20, GH200, HGX B200 and B300, GB200 and GB300 NVL72.
NVLINK = {"V100 SXM2 32GB": Link(150e9), "A100 SXM4 40GB": Link(300e9), "A100 SXM4 80GB": Link(300e9),
          "H100 SXM5 80GB": Link(450e9), "H100 NVL 94GB": Link(300e9, 2), "H200 SXM 141GB": Link(450e9),
          "GH200 (HBM3e)": Link(450e9, 32), "H20": Link(450e9), "B200 SXM": Link(900e9), "B300 SXM": Link(900e9),
          "GB200 (per GPU)": Link(900e9, 72), "GB300 (per GPU)": Link(900e9, 72)}


def nvlink(gpu: str, ranks: int) -> Link | None:
    """The NVLink that joins so many ranks on that GPU; None: they have PCIe, a network or another maker's link."""
    link = NVLINK.get(gpu)
    return link if link and ranks <= link.most else None
