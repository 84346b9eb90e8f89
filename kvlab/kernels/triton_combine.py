"""Partial results of attention over parts of the tokens, merged by their log-sum-exp (LSE), in Triton.

Legend: R = row of results (sequence and query head), S = part of the tokens, E = channel of V.
Source: arXiv 2205.14135, section 3.1 (the same sums, in another order).
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvlab.kernels.triton_codes import require


@triton.jit
def combine_kernel(part, lse, out, merged, splits, part_r, part_s, lse_r, lse_s, E: tl.constexpr, CHUNK_E: tl.constexpr,
                   SPLITS: tl.constexpr, CHUNK: tl.constexpr, HAS_LSE: tl.constexpr):
    """One row of results and CHUNK_E of its channels; SPLITS: the next power of two of splits."""
    row = tl.program_id(0).to(tl.int64)
    channel_E = tl.program_id(1) * CHUNK_E + tl.arange(0, CHUNK_E)
    every_S = tl.arange(0, SPLITS)
    lse_S = tl.load(lse + row * lse_r + every_S.to(tl.int64) * lse_s, mask=every_S < splits, other=-float("inf"))
    peak = tl.max(lse_S, 0)
    peak = tl.where(peak == -float("inf"), 0.0, peak)               # no part saw a token: all weights are 0
    total = tl.sum(tl.exp(lse_S - peak), 0)
    acc_E = tl.zeros([CHUNK_E], tl.float32)
    for start in tl.range(0, splits, CHUNK):
        split_S = (start + tl.arange(0, CHUNK)).to(tl.int64)
        ok_S = split_S < splits
        weight_S = tl.exp(tl.load(lse + row * lse_r + split_S * lse_s, mask=ok_S, other=-float("inf")) - peak)
        part_SE = tl.load(part + row * part_r + split_S[:, None] * part_s + channel_E[None, :], other=0,
                          mask=ok_S[:, None] & (channel_E < E)[None, :])
        acc_E += tl.sum(weight_S[:, None] * part_SE, 0)
    acc_E /= tl.where(total > 0, total, 1.0)
    tl.store(out + row * E + channel_E, acc_E.to(out.dtype.element_ty), mask=channel_E < E)
    if HAS_LSE:
        whole = tl.where(total > 0, peak + tl.log(tl.where(total > 0, total, 1.0)), -float("inf"))
        tl.store(merged + row, whole, mask=tl.program_id(1) == 0)


def combine(part_RSE, lse_RS, out_RE, lse_R=None) -> None:
    """Merge partial results over S parts of the tokens by their log-sum-exp (natural log; -inf: the part is empty).

    part_RSE, lse_RS: fp32, any strides but a last one of 1 of part. out_RE: contiguous, any floating dtype; 0 where all
    parts are empty, and lse_R [R] fp32 -inf.
    """
    rows, parts, width = part_RSE.shape
    chunk, power = min(128, triton.next_power_of_2(width)), triton.next_power_of_2(parts)
    require(part_RSE.dtype == lse_RS.dtype == torch.float32, "partial results and their lse must be fp32, got "
             f"{part_RSE.dtype} and {lse_RS.dtype}")
    require(tuple(lse_RS.shape) == (rows, parts) and tuple(out_RE.shape) == (rows, width),
             f"parts {tuple(part_RSE.shape)} need lse [rows, parts] and out [rows, width], got {tuple(lse_RS.shape)} "
             f"and {tuple(out_RE.shape)}")
    require(part_RSE.stride(2) == 1 and out_RE.is_contiguous() and (lse_R is None or lse_R.is_contiguous()),
             "the channels of parts and all of the results must lie side by side: call contiguous()")
    with torch.cuda.device_of(part_RSE):
        combine_kernel[(rows, triton.cdiv(width, chunk))](
            part_RSE, lse_RS, out_RE, lse_RS if lse_R is None else lse_R, parts, *part_RSE.stride()[:2],
            *lse_RS.stride(), E=width, CHUNK_E=chunk, SPLITS=power, CHUNK=min(16, power), HAS_LSE=lse_R is not None,
            num_warps=4, num_stages=2, enable_fp_fusion=True)
