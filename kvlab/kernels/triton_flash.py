"""Flash attention over prompts in Triton: causal, grouped heads, sequences of any lengths in one launch.

The rows of a tile are (query token, query head of the group) pairs of one KV head, so that K and V are loaded once for
a whole group. Tiles that no row may see are skipped, and only those are masked of which some row sees a part.
Source: arXiv 2205.14135; online softmax: arXiv 1805.02867; powers of 2 and few masks: arXiv 2307.08691.

Legend: T = query token of the batch, Q = query head, K = kv head, X = tile, R = row of a tile, S = kv token of a tile,
D = head_dim, E = v_head_dim (each in two parts that are powers of 2, the second may be 0), B = sequence, M = block.
"""
from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kvlab.kernels.decode_tiles import parts
from kvlab.kernels.stored import Stored
from kvlab.kernels.triton_codes import dot, tanh
from kvlab.kernels.triton_tuning import Config

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
WIDEST = 256                            # a wider tile's queries, K, V and sums would not fit a multiprocessor


@triton.jit
def _load(start_ptr, offset_S, seen_S, FIRST: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr,
          MASKED: tl.constexpr):
    """[S, PART] channels from FIRST on; 0 beyond WIDTH and, if MASKED, of tokens that are not seen."""
    d_D = FIRST + tl.arange(0, PART)
    ptr = start_ptr + offset_S[:, None] + d_D[None, :]
    if FIRST + PART <= WIDTH:
        return tl.load(ptr, mask=seen_S[:, None], other=0.0) if MASKED else tl.load(ptr)
    inside_D = (d_D < WIDTH)[None, :]
    return tl.load(ptr, mask=seen_S[:, None] & inside_D if MASKED else inside_D, other=0.0)


@triton.jit
def _offsets(table_ptr, token_S, seen_S, n_stride, p_stride, BLOCK: tl.constexpr):
    """Where tokens lie, seen from the sequence's only block, or (BLOCK slots each) from block 0 of the cache."""
    if BLOCK == 0:
        return token_S.to(tl.int64) * p_stride
    block_S = tl.load(table_ptr + token_S // BLOCK, mask=seen_S, other=0)
    return block_S.to(tl.int64) * n_stride + (token_S % BLOCK).to(tl.int64) * p_stride


@triton.jit
def _attend(q1_RD, q2_RD, acc1_RE, acc2_RE, high_R, total_R, start, end, first, position_R, k_ptr, v_ptr, table_ptr,
            k_n, k_p, v_n, v_p, scale, D, D1, D2, E, E1, E2, BLOCK, WINDOW, SOFTCAP, TOKENS: tl.constexpr,
            MASKED: tl.constexpr):
    """One tile of KV tokens from `start` on; running maximum, sum and weighted sum of V, scores in powers of 2."""
    token_S = start + tl.arange(0, TOKENS)
    seen_S = (token_S >= first) & (token_S < end)           # by some row: others may hold anything, NaN too
    at_S = _offsets(table_ptr, token_S, seen_S, k_n, k_p, BLOCK)
    score_RS = dot(q1_RD, tl.trans(_load(k_ptr, at_S, seen_S, 0, D1, D, MASKED)), None)
    if D2 > 0:
        score_RS = dot(q2_RD, tl.trans(_load(k_ptr, at_S, seen_S, D1, D2, D, MASKED)), score_RS)
    if SOFTCAP > 0:
        cap = SOFTCAP * 1.4426950408889634                              # of scores in powers of 2, as they are here
        score_RS = cap * tanh(score_RS * (scale / cap), v_ptr.dtype.element_ty == tl.float32)
        scale = 1.0
    if MASKED:
        visible_RS = token_S[None, :] <= position_R[:, None]
        if WINDOW > 0:
            visible_RS = visible_RS & (token_S[None, :] > position_R[:, None] - WINDOW)
        score_RS = tl.where(visible_RS, score_RS, -float("inf"))
    peak_R = tl.maximum(high_R, tl.max(score_RS, 1) * scale)
    base_R = peak_R
    if MASKED:                                              # a row that has seen nothing yet: its weights stay 0
        base_R = tl.where(peak_R == -float("inf"), 0.0, peak_R)
    weight_RS = tl.exp2(score_RS * scale - base_R[:, None])             # one fused multiply-add, and the power
    shrink_R = tl.exp2(high_R - base_R)
    total_R = total_R * shrink_R + tl.sum(weight_RS, 1)
    at_S = _offsets(table_ptr, token_S, seen_S, v_n, v_p, BLOCK)
    weight_RS = weight_RS.to(v_ptr.dtype.element_ty)
    acc1_RE = dot(weight_RS, _load(v_ptr, at_S, seen_S, 0, E1, E, MASKED), acc1_RE * shrink_R[:, None])
    if E2 > 0:
        acc2_RE = dot(weight_RS, _load(v_ptr, at_S, seen_S, E1, E2, E, MASKED), acc2_RE * shrink_R[:, None])
    return acc1_RE, acc2_RE, peak_R, total_R


@triton.jit
def flash_prefill_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, table_ptr, tiles_ptr, q_t, q_h, k_n, k_h, k_p, v_n, v_h,
                         v_p, table_b, scale, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
                         D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr,
                         BLOCK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr,
                         TOKENS: tl.constexpr):
    tiles_ptr += tl.program_id(0) * 5
    sequence, row = tl.load(tiles_ptr).to(tl.int64), tl.load(tiles_ptr + 1)
    q_start, q_len, kv_len = tl.load(tiles_ptr + 2), tl.load(tiles_ptr + 3), tl.load(tiles_ptr + 4)
    head, row_R = tl.program_id(1), row + tl.arange(0, ROWS)
    position_R = kv_len - q_len + row_R // GROUP
    inside_R = row_R // GROUP < q_len
    at_T = (q_start + row_R // GROUP).to(tl.int64)
    head_R = head * GROUP + row_R % GROUP
    at_R = at_T * q_t + head_R.to(tl.int64) * q_h
    q1_RD = _load(q_ptr, at_R, inside_R, 0, D1, D, True)
    q2_RD = _load(q_ptr, at_R, inside_R, D1, D2, D, True) if D2 > 0 else q1_RD
    table_ptr += sequence * table_b
    k_ptr += head.to(tl.int64) * k_h
    v_ptr += head.to(tl.int64) * v_h
    if BLOCK == 0:
        block = tl.load(table_ptr).to(tl.int64)
        k_ptr += block * k_n
        v_ptr += block * v_n

    earliest = kv_len - q_len + row // GROUP                        # where the first row stands, and the last
    latest = kv_len - q_len + tl.minimum((row + ROWS - 1) // GROUP, q_len - 1)
    end, first, left, open_from = latest + 1, 0, 0, 0
    open_to = (earliest + 1) // TOKENS * TOKENS                     # up to there every row sees every token
    if WINDOW > 0:
        first = tl.maximum(0, earliest + 1 - WINDOW)
        left = first // TOKENS * TOKENS
        open_from = tl.minimum(tl.cdiv(tl.maximum(0, latest + 1 - WINDOW), TOKENS) * TOKENS, open_to)
    before = (open_from - left) // TOKENS                           # tiles that the window's edge cuts

    high_R = tl.full([ROWS], -float("inf"), tl.float32)
    total_R = tl.zeros([ROWS], tl.float32)
    acc1_RE = tl.zeros([ROWS, E1], tl.float32)
    acc2_RE = tl.zeros([ROWS, E2], tl.float32) if E2 > 0 else total_R
    for start in tl.range(open_from, open_to, TOKENS):
        acc1_RE, acc2_RE, high_R, total_R = _attend(
            q1_RD, q2_RD, acc1_RE, acc2_RE, high_R, total_R, start, end, first, position_R, k_ptr, v_ptr, table_ptr,
            k_n, k_p, v_n, v_p, scale, D, D1, D2, E, E1, E2, BLOCK, WINDOW, SOFTCAP, TOKENS, False)
    for i in tl.range(0, before + tl.cdiv(end - open_to, TOKENS)):
        start = tl.where(i < before, left + i * TOKENS, open_to + (i - before) * TOKENS)
        acc1_RE, acc2_RE, high_R, total_R = _attend(
            q1_RD, q2_RD, acc1_RE, acc2_RE, high_R, total_R, start, end, first, position_R, k_ptr, v_ptr, table_ptr,
            k_n, k_p, v_n, v_p, scale, D, D1, D2, E, E1, E2, BLOCK, WINDOW, SOFTCAP, TOKENS, True)

    at_R = at_T * HEADS + head_R
    d_E = tl.arange(0, E1)
    tl.store(out_ptr + at_R[:, None] * E + d_E[None, :], (acc1_RE / total_R[:, None]).to(out_ptr.dtype.element_ty),
             mask=inside_R[:, None] & (d_E < E)[None, :])
    if E2 > 0:
        d_E = E1 + tl.arange(0, E2)
        tl.store(out_ptr + at_R[:, None] * E + d_E[None, :],
                 (acc2_RE / total_R[:, None]).to(out_ptr.dtype.element_ty),
                 mask=inside_R[:, None] & (d_E < E)[None, :])
    if lse_ptr is not None:
        tl.store(lse_ptr + at_R, (high_R + tl.log2(total_R)) / 1.4426950408889634, mask=inside_R)


@lru_cache(maxsize=64)                                          # a model's layers and a bench's input copies share them
def tiles(q_lens: tuple[int, ...], kv_lens: tuple[int, ...], group: int, rows: int, device: torch.device) -> Tensor:
    """[X, 5] int32: sequence, first row, first query token in the batch, q_len and kv_len of each tile.

    A sequence's tiles lie together, so that those that run at a time share K and V, the longest first.
    """
    found, q_start = [], 0
    for b, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens)):
        if q_len > kv_len:
            raise ValueError(f"sequence {b} has {q_len} query tokens and {kv_len} KV tokens; these count the new "
                             "tokens too")
        found += [(b, row, q_start, q_len, kv_len) for row in range(0, q_len * group, rows)][::-1]
        q_start += q_len
    return torch.tensor(found, dtype=torch.int32, device=device).view(-1, 5)


def flash_prefill(q_TQD: Tensor, k: Stored, v: Stored, block_table_BM: Tensor, q_lens: tuple[int, ...],
                  kv_lens: tuple[int, ...], *, window: int | None = None, softcap: float | None = None,
                  out_TQE: Tensor, lse_TQ: Tensor | None = None, config: Config) -> None:
    """Causal softmax attention of a batch: query t of a sequence sees its KV tokens up to kv_len - q_len + t.

    q [T, Q, D] with any strides but a last one of 1; K and V of q's dtype; out [T, Q, E] and lse [T, Q] (fp32; natural
    log of the sum of exp(score), scores scaled by D**-0.5 and soft-capped) are contiguous. block_table is int32 and
    checked; one block per sequence is a contiguous cache. Runs on q's device, whichever is current. Raises ValueError
    for what it does not compute.
    """
    (_, Q, D), E, (_, K, P, _) = q_TQD.shape, v.width, k.codes.shape
    if k.kind != v.kind or DTYPES.get(k.kind) != q_TQD.dtype:
        raise ValueError(f"K is {k.kind}, V is {v.kind} and q is {q_TQD.dtype}; all three must be one of "
                         f"{', '.join(DTYPES)}")
    if max(D, E) > WIDEST:
        raise ValueError(f"head_dim {D} and v_head_dim {E} must be {WIDEST} at most")
    if q_TQD.stride(2) != 1 or not (out_TQE.is_contiguous() and (lse_TQ is None or lse_TQ.is_contiguous())):
        raise ValueError("q's last stride must be 1, and out and lse contiguous; call .contiguous() first")
    tiles_X5 = tiles(tuple(q_lens), tuple(kv_lens), Q // K, config.rows, q_TQD.device)
    (D1, D2), (E1, E2) = parts(D), parts(E)
    with torch.cuda.device_of(q_TQD):
        flash_prefill_kernel[len(tiles_X5), K](
            q_TQD, k.codes, v.codes, out_TQE, lse_TQ, block_table_BM, tiles_X5, *q_TQD.stride()[:2],
            *k.codes.stride()[:3], *v.codes.stride()[:3], block_table_BM.stride(0), D**-0.5 / math.log(2), HEADS=Q,
            GROUP=Q // K, D=D, D1=D1, D2=D2, E=E, E1=E1, E2=E2, BLOCK=P if block_table_BM.shape[1] > 1 else 0,
            WINDOW=window or 0, SOFTCAP=softcap or 0.0, ROWS=config.rows, TOKENS=config.tokens, num_warps=config.warps,
            num_stages=config.stages, enable_fp_fusion=True)     # Triton's default, until 3.10
