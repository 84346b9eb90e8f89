"""A decode step in Triton: split over the context, through a block table, codes turned into numbers in registers.

One program: one sequence, one KV head, one tile of its group's query heads, one part of the tokens. Each stored byte
is read once per tile of heads.
Source: split and merge as in Flash-Decoding (pytorch.org/blog/flash-decoding) and arXiv 2205.14135 (online softmax).

Legend: B = sequence, M = block of a sequence, Q = query head, K = kv head, R = row of a tile (query head of a group),
T = token of a tile, S = part of the tokens (split), D = channel of q and K, E = channel of V. Channels are cut in two,
1 and 2: the largest power of two, and the rest, padded.
"""
from __future__ import annotations

import math
from functools import cache, lru_cache

import torch
import triton
import triton.language as tl

from kvlab.kernels.decode_tiles import candidates, multiprocessors, parts, splits
from kvlab.kernels.stored import CODES, Stored
from kvlab.kernels.triton_codes import block_ids, dot, grain, require, scales, slots, tanh, tile
from kvlab.kernels.triton_combine import combine
from kvlab.kernels.triton_tuning import Config

KINDS = CODES
LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit(do_not_specialize=["blocks", "splits"])                 # they grow with the tokens
def paged_decode_kernel(
    q, table_BM, lengths_B2, out, lse, k, k_scale, k_zero, v, v_scale, v_zero, score_scale,
    blocks, splits, k_n, k_k, k_p, ks_n, ks_k, ks_r, v_n, v_k, v_p, vs_n, vs_k, vs_r,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr,
    K_KIND: tl.constexpr, K_GRAIN: tl.constexpr, K_ZERO: tl.constexpr, K_TOKENS: tl.constexpr, K_CHANNELS: tl.constexpr,
    V_KIND: tl.constexpr, V_GRAIN: tl.constexpr, V_ZERO: tl.constexpr, V_TOKENS: tl.constexpr, V_CHANNELS: tl.constexpr,
    V_IN_K: tl.constexpr, SOFTCAP: tl.constexpr, HAS_LSE: tl.constexpr, NATIVE_FP8: tl.constexpr,
):
    """Row (sequence · query heads + head) · splits + split of out and lse. Strides are named array_axis (N, K, P or R).

    BLOCK: slots of a block; 0 where each sequence has but one.
    """
    TYPE: tl.constexpr = q.dtype.element_ty
    TILES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    # of scales that are spread over a tile: tokens that share one, or all of the tile's, or none
    K_STEP: tl.constexpr = (1 if K_GRAIN != "tile" else K_TOKENS if TOKENS % K_TOKENS == 0
                            else TOKENS if K_TOKENS % TOKENS == 0 else 1)
    V_STEP: tl.constexpr = (1 if V_GRAIN != "tile" else V_TOKENS if TOKENS % V_TOKENS == 0
                            else TOKENS if V_TOKENS % TOKENS == 0 else 1)
    # heads that share K and V lie side by side in the grid, so that all but one find them in L2
    program = tl.program_id(0)
    part, head = program % TILES, program // TILES % HEADS
    split, b = program // (TILES * HEADS) % splits, (program // (TILES * HEADS) // splits).to(tl.int64)
    first, last = tl.load(lengths_B2 + 2 * b), tl.load(lengths_B2 + 2 * b + 1)
    low = first // TOKENS * TOKENS                                  # tiles begin at multiples of their size
    each = tl.cdiv(tl.cdiv(last - low, splits), TOKENS) * TOKENS
    begin = tl.where(first < last, low + split * each, last)
    end = tl.minimum(begin + each, last)
    table_B = table_BM + b * blocks

    row_R = part * ROWS + tl.arange(0, ROWS)
    real_R = row_R < GROUP
    query_R = (b * HEADS + head) * GROUP + row_R
    channel1_D, channel2_D = tl.arange(0, D1), D1 + tl.arange(0, max(D2, 1))
    q1_RD = tl.load(q + query_R[:, None] * D + channel1_D[None, :], other=0,
                    mask=real_R[:, None] & (channel1_D < D)[None, :])
    if D2:
        q2_RD = tl.load(q + query_R[:, None] * D + channel2_D[None, :], other=0,
                        mask=real_R[:, None] & (channel2_D < D)[None, :])
    head = head.to(tl.int64)
    k, v, k_scale, k_zero = k + head * k_k, v + head * v_k, k_scale + head * ks_k, k_zero + head * ks_k
    v_scale, v_zero = v_scale + head * vs_k, v_zero + head * vs_k

    k_factor = 1.0                                      # score = (q · code) · k_factor + offset_R
    offset_R = tl.zeros([ROWS], tl.float32)
    if K_GRAIN == "fixed":
        scale1_D, zero1_D = scales(k_scale, k_zero, channel1_D // K_CHANNELS, channel1_D < D, K_KIND, K_ZERO)
        offset_R += tl.sum(q1_RD.to(tl.float32) * zero1_D[None, :], 1)
        k_factor = tl.max(tl.abs(scale1_D), 0)
        if D2:
            scale2_D, zero2_D = scales(k_scale, k_zero, channel2_D // K_CHANNELS, channel2_D < D, K_KIND, K_ZERO)
            offset_R += tl.sum(q2_RD.to(tl.float32) * zero2_D[None, :], 1)
            k_factor = tl.maximum(k_factor, tl.max(tl.abs(scale2_D), 0))
        k_factor = tl.where(k_factor > 0, k_factor, 1.0)
        # relative to the largest: one scale of all channels leaves q as it is, and none takes it out of fp16's range
        q1_RD = (q1_RD.to(tl.float32) * (scale1_D / k_factor)[None, :]).to(TYPE)
        if D2:
            q2_RD = (q2_RD.to(tl.float32) * (scale2_D / k_factor)[None, :]).to(TYPE)
    if K_GRAIN == "token" and K_ZERO:
        q_sum_R = tl.sum(q1_RD.to(tl.float32), 1)
        if D2:
            q_sum_R += tl.sum(q2_RD.to(tl.float32), 1)

    peak_R = tl.full([ROWS], -float("inf"), tl.float32)             # running maximum of the scores, in units of log 2
    total_R = tl.zeros([ROWS], tl.float32)                          # running sum of the weights
    zeros_R = tl.zeros([ROWS], tl.float32)                          # running weighted sum of V's zero points
    acc1_RE = tl.zeros([ROWS, E1], tl.float32)
    if E2:
        acc2_RE = tl.zeros([ROWS, E2], tl.float32)
    block_T = block_ids(table_B, begin, first, end, BLOCK, TOKENS, 1)
    ks_block_X = block_ids(table_B, begin, first, end, BLOCK, TOKENS, K_STEP)
    vs_block_Y = block_ids(table_B, begin, first, end, BLOCK, TOKENS, V_STEP)
    for start in tl.range(begin, end, TOKENS):
        slot_T, ok_T = slots(start, first, end, BLOCK, TOKENS, 1)   # all else is read as 0, whatever lies there
        k_T, v_T = block_T * k_n + slot_T * k_p, block_T * v_n + slot_T * v_p
        slot_X, ks_ok_X = slots(start, first, end, BLOCK, TOKENS, K_STEP)
        ks_X = ks_block_X * ks_n + slot_X // K_TOKENS * ks_r
        slot_Y, vs_ok_Y = slots(start, first, end, BLOCK, TOKENS, V_STEP)
        vs_Y = vs_block_Y * vs_n + slot_Y // V_TOKENS * vs_r
        # of the next tile already: so its K and V are loaded ahead, and do not wait for the block table
        if BLOCK:                                       # Triton's scheduler fails on a value that stays the same
            block_T = block_ids(table_B, start + TOKENS, first, end, BLOCK, TOKENS, 1)
            ks_block_X = block_ids(table_B, start + TOKENS, first, end, BLOCK, TOKENS, K_STEP)
            vs_block_Y = block_ids(table_B, start + TOKENS, first, end, BLOCK, TOKENS, V_STEP)
        k1_TD = tile(k, k_T, ok_T, k_scale, k_zero, ks_X, ks_ok_X, 0, D1, D, K_KIND, K_GRAIN, K_ZERO, K_CHANNELS, TYPE,
                     NATIVE_FP8)
        score_RT = dot(q1_RD, tl.trans(k1_TD), None)
        if D2:
            k2_TD = tile(k, k_T, ok_T, k_scale, k_zero, ks_X, ks_ok_X, D1, D2, D, K_KIND, K_GRAIN, K_ZERO, K_CHANNELS,
                         TYPE, NATIVE_FP8)
            score_RT = dot(q2_RD, tl.trans(k2_TD), score_RT)
        if K_GRAIN == "fixed":
            score_RT = score_RT * k_factor + offset_R[:, None]
        if K_GRAIN == "token":
            scale_T, zero_T = scales(k_scale, k_zero, ks_X, ks_ok_X, K_KIND, K_ZERO)
            score_RT *= scale_T[None, :]
            if K_ZERO:
                score_RT += q_sum_R[:, None] * zero_T[None, :]
        if SOFTCAP > 0:
            score_RT = tanh(score_RT * (score_scale / SOFTCAP), True) * (SOFTCAP * LOG2E)
        else:
            score_RT *= score_scale * LOG2E
        score_RT = tl.where(ok_T[None, :], score_RT, -float("inf"))

        higher_R = tl.maximum(peak_R, tl.max(score_RT, 1))          # finite: every tile holds a token
        weight_RT = tl.exp2(score_RT - higher_R[:, None])
        shrink_R = tl.exp2(peak_R - higher_R)
        total_R = total_R * shrink_R + tl.sum(weight_RT, 1)
        peak_R = higher_R
        if V_GRAIN == "token":
            scale_T, zero_T = scales(v_scale, v_zero, vs_Y, vs_ok_Y, V_KIND, V_ZERO)
            if V_ZERO:
                zeros_R = zeros_R * shrink_R + tl.sum(weight_RT * zero_T[None, :], 1)
            weight_RT *= scale_T[None, :]
        weight_RT = weight_RT.to(TYPE)
        if V_IN_K:
            v1_TE = k1_TD
        else:
            v1_TE = tile(v, v_T, ok_T, v_scale, v_zero, vs_Y, vs_ok_Y, 0, E1, E, V_KIND, V_GRAIN, V_ZERO, V_CHANNELS,
                         TYPE, NATIVE_FP8)
        acc1_RE = dot(weight_RT, v1_TE, acc1_RE * shrink_R[:, None])
        if E2:
            if V_IN_K:
                v2_TE = k2_TD
            else:
                v2_TE = tile(v, v_T, ok_T, v_scale, v_zero, vs_Y, vs_ok_Y, E1, E2, E, V_KIND, V_GRAIN, V_ZERO,
                             V_CHANNELS, TYPE, NATIVE_FP8)
            acc2_RE = dot(weight_RT, v2_TE, acc2_RE * shrink_R[:, None])

    result_R = query_R * splits + split
    seen_R = tl.where(total_R > 0, total_R, 1.0)                    # 1 and not 0 where there was no token
    _store(out, acc1_RE, total_R, seen_R, zeros_R, v_scale, v_zero, result_R, real_R, 0, E1, E, V_KIND, V_GRAIN, V_ZERO,
           V_CHANNELS)
    if E2:
        _store(out, acc2_RE, total_R, seen_R, zeros_R, v_scale, v_zero, result_R, real_R, E1, E2, E, V_KIND, V_GRAIN,
               V_ZERO, V_CHANNELS)
    if HAS_LSE:
        tl.store(lse + result_R, (peak_R + tl.log2(seen_R)) / LOG2E, mask=real_R)


@triton.jit
def _store(out, acc_RE, total_R, seen_R, zeros_R, v_scale, v_zero, result_R, real_R, FROM: tl.constexpr,
           COUNT: tl.constexpr, E: tl.constexpr, V_KIND: tl.constexpr, V_GRAIN: tl.constexpr, V_ZERO: tl.constexpr,
           V_CHANNELS: tl.constexpr):
    """The weighted mean of V; 0 where no token was seen."""
    channel_E = FROM + tl.arange(0, COUNT)
    if V_GRAIN == "fixed":
        scale_E, zero_E = scales(v_scale, v_zero, channel_E // V_CHANNELS, channel_E < E, V_KIND, V_ZERO)
        acc_RE = acc_RE * scale_E[None, :] + total_R[:, None] * zero_E[None, :]
    if V_GRAIN == "token" and V_ZERO:
        acc_RE += zeros_R[:, None]
    tl.store(out + result_R[:, None] * E + channel_E[None, :], (acc_RE / seen_R[:, None]).to(out.dtype.element_ty),
             mask=real_R[:, None] & (channel_E < E)[None, :])


@lru_cache(maxsize=64)
def _lengths(firsts: tuple[int, ...], kv_lens: tuple[int, ...], device) -> torch.Tensor:
    return torch.tensor([firsts, kv_lens], dtype=torch.int32, device=device).T.contiguous()


def _side(name: str, stored: Stored, dtype):
    """(codes, scale, zero), their strides and the constants of one side; codes stand in for what there is not."""
    require(stored.kind in KINDS, f"{name} holds codes of {stored.kind}; the kernel reads {', '.join(KINDS)}")
    require(stored.codes.stride(3) == 1, f"a token's codes of {name} must lie side by side; their stride is "
            f"{stored.codes.stride(3)}")
    scale = stored.codes if stored.scale is None else stored.scale
    zero = scale if stored.zero is None else stored.zero
    require(scale.shape[3] == 1 or scale.stride(3) == 1, f"a row of {name}'s scales must lie side by side")
    require(zero.stride() == scale.stride(), f"{name}'s zero points must lie as its scales do")
    where = grain(stored, dtype)
    # tokens that share a static scale are no constant: a kernel would be compiled for every length of a cache
    constants = dict(KIND=stored.kind, GRAIN=where, ZERO=stored.zero is not None, CHANNELS=stored.channels,
                     TOKENS=stored.tokens if where in ("token", "tile") else 1)
    return ((stored.codes, scale, zero), (*stored.codes.stride()[:3], *scale.stride()[:3]),
            {f"{name}_{key}": value for key, value in constants.items()})


def decode(q_BQD, k: Stored, v: Stored, block_table_BM, firsts, kv_lens, *, softcap=None, out_BQE, lse_BQ=None,
           workspace, config: Config | None = None) -> None:
    """One query token per sequence over its tokens firsts[b] … kv_lens[b] - 1, written to out_BQE.

    q_BQD, out_BQE: contiguous, fp32, fp16 or bf16. block_table_BM: int32, checked by the caller; with one column the
    sequence lies in one block. lse_BQ: fp32, the natural log of the sum of exp(score); an empty range gives 0 and -inf.
    workspace(name, *size, dtype=…) gives memory for the partial results. config: None takes the first candidate.
    Runs on q's device, whichever is current. Scales of K per channel multiply q, which is rounded to its dtype again:
    where they span decades and scores are huge, lse is off by as much (by 13.8 in bf16 over six decades).
    """
    (batch, queries, width), heads = q_BQD.shape, k.codes.shape[1]
    group = queries // heads
    require(q_BQD.is_contiguous() and out_BQE.is_contiguous() and (lse_BQ is None or lse_BQ.is_contiguous()),
            "q, out and lse must be contiguous: call contiguous()")
    require(width == k.width and tuple(out_BQE.shape) == (batch, queries, v.width) and queries == group * heads,
            f"q {tuple(q_BQD.shape)} and out {tuple(out_BQE.shape)} do not fit {heads} KV heads of K {k.width} and V "
            f"{v.width} wide")
    require(len(firsts) == len(kv_lens) == len(block_table_BM) == batch, f"{batch} sequences need as many rows in the "
            f"block table, firsts and kv_lens, got {len(block_table_BM)}, {len(firsts)} and {len(kv_lens)}")
    require(all(0 <= first <= n for first, n in zip(firsts, kv_lens)), "a first token must lie in 0 … kv_len")
    require(block_table_BM.dtype == torch.int32 and block_table_BM.is_contiguous(), "the block table must be int32 and "
            f"contiguous, got {block_table_BM.dtype}")
    k_tensors, k_strides, k_constants = _side("K", k, q_BQD.dtype)
    v_tensors, v_strides, v_constants = _side("V", v, q_BQD.dtype)
    v_in_k = v.codes is k.codes
    sides = ((k.kind, width),) if v_in_k else ((k.kind, width), (v.kind, v.width))
    config = config or candidates(group, sides, q_BQD.dtype.itemsize)[0]
    programs, blocks = batch * heads * -(-group // config.rows), block_table_BM.shape[1]
    longest = max(n - first for first, n in zip(firsts, kv_lens))
    count = splits(programs, longest, config.tokens, multiprocessors(q_BQD.device))
    out, lse = out_BQE, lse_BQ
    if count > 1:
        out = workspace("split results", batch * queries, count, v.width, dtype=torch.float32)
        lse = workspace("split lse", batch * queries, count, dtype=torch.float32)
    (d1, d2), (e1, e2) = parts(width), parts(v.width)
    if v_in_k:                                          # V's tiles are those of K; what lies beyond V is not stored
        e1, e2 = d1, d2 if v.width > d1 else 0
    with torch.cuda.device_of(q_BQD):
        paged_decode_kernel[(programs * count,)](
            q_BQD, block_table_BM, _lengths(tuple(firsts), tuple(kv_lens), q_BQD.device), out,
            out if lse is None else lse, *k_tensors, *v_tensors, width**-0.5, blocks, count, *k_strides, *v_strides,
            **k_constants, **v_constants, HEADS=heads, GROUP=group, ROWS=config.rows, TOKENS=config.tokens,
            BLOCK=k.codes.shape[2] if blocks > 1 else 0, D=width, D1=d1, D2=d2, E=v.width, E1=e1, E2=e2, V_IN_K=v_in_k,
            SOFTCAP=softcap or 0.0, HAS_LSE=lse is not None, NATIVE_FP8=_native_fp8(q_BQD.device),
            num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=True)     # Triton's default, until 3.10
    if count > 1:
        combine(out, lse, out_BQE.view(batch * queries, v.width), None if lse_BQ is None else lse_BQ.view(-1))


@cache
def _native_fp8(device) -> bool:
    """Whether the GPU itself turns fp8 e4m3 into other types."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
