"""Stored codes turned into numbers in a Triton kernel's registers, whatever shares a scale.

A scale goes where it is cheap: of a token onto scores (K) or weights (V), of a static channel onto q or the output.
Only what varies along both axes is spread over a tile.

Legend: T = token of a tile, D = channel.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs

from kvlab.kernels.stored import Stored

INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def dot(a, b, total):
    if INTERPRETED:                                     # the interpreter multiplies bf16's bit patterns, not numbers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")  # fp32 stays fp32: the default would round it to tf32


@triton.jit
def tanh(x, FINE: tl.constexpr):
    """Right at infinity too; the quotient loses the digits of a small x, of which FINE takes the series."""
    large = 1 - 2 / (tl.exp2(x * 2.885390081777927) + 1)
    if FINE:
        y = x * x
        small = x * (1 - y * (1 / 3 - y * (2 / 15 - y * (17 / 315 - y * (62 / 2835)))))
        return tl.where(y < 0.09, small, large)
    return large


@triton.jit
def numbers(code, KIND: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Stored bytes as numbers without their scale, exact in every floating type that q may have."""
    if KIND == "fp8_e4m3":
        if NATIVE_FP8:
            x = code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:                                           # as fp16, whose exponent counts from 8 lower; also subnormals
            bits = code.to(tl.uint16)
            x = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256
    elif KIND == "fp8_e5m2":
        x = (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True)              # the upper half of an fp16
    elif KIND == "int4":
        x = tl.interleave(code & 15, code >> 4)
    elif KIND == "int2":
        x = tl.interleave(tl.interleave(code & 3, (code >> 4) & 3), tl.interleave((code >> 2) & 3, code >> 6))
    else:
        x = code
    return x


@triton.jit
def block_ids(table_B, start, first, end, BLOCK: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr):
    """Block ids of every STEP-th token of a tile, in int64: strides may be long. BLOCK 0: all lie in the only one.

    start: a multiple of TOKENS, so that a tile lies in one block where blocks are whole tiles.
    """
    if BLOCK == 0:
        block = tl.load(table_B)
    elif BLOCK % TOKENS == 0:
        block = tl.load(table_B + start // BLOCK, mask=start < end, other=0)
    else:
        token_T, ok_T = tokens(start, first, end, TOKENS, STEP)
        block = tl.load(table_B + token_T // BLOCK, mask=ok_T, other=0)
    return block.to(tl.int64)


@triton.jit
def slots(start, first, end, BLOCK: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr):
    """(slot in its block, in int64; whether it is wanted) of every STEP-th token of a tile."""
    token_T, ok_T = tokens(start, first, end, TOKENS, STEP)
    if BLOCK == 0:
        slot_T = token_T
    elif BLOCK % TOKENS == 0:
        slot_T = start % BLOCK + STEP * tl.arange(0, TOKENS // STEP)
    else:
        slot_T = token_T % BLOCK
    return slot_T.to(tl.int64), ok_T


@triton.jit
def tokens(start, first, end, TOKENS: tl.constexpr, STEP: tl.constexpr):
    token_T = start + STEP * tl.arange(0, TOKENS // STEP)
    return token_T, (token_T + STEP > first) & (token_T < end)


@triton.jit
def tile(codes, at_T, ok_T, scale, zero, scale_at_T, scale_ok_T, FROM: tl.constexpr, COUNT: tl.constexpr,
         WIDTH: tl.constexpr, KIND: tl.constexpr, GRAIN: tl.constexpr, ZERO: tl.constexpr, CHANNELS: tl.constexpr,
         TYPE: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Channels FROM … FROM + COUNT of a tile's tokens as TYPE, 0 where there are none; centred if scaled elsewhere."""
    EACH: tl.constexpr = 4 if KIND == "int2" else 2 if KIND == "int4" else 1        # codes in a stored element
    byte_D = FROM // EACH + tl.arange(0, COUNT // EACH)
    ok_TD = ok_T[:, None]
    if FROM + COUNT > WIDTH:
        ok_TD = ok_TD & (byte_D < (WIDTH + EACH - 1) // EACH)[None, :]
    x_TD = numbers(tl.load(codes + at_T[:, None] + byte_D[None, :], mask=ok_TD, other=0), KIND, NATIVE_FP8)
    if EACH > 1 and (GRAIN == "fixed" or GRAIN == "token"):
        CENTRE: tl.constexpr = 8 if KIND == "int4" else 2
        x_TD = x_TD.to(tl.int8) - CENTRE                # small sums; what they lack goes into the zero point
    if GRAIN == "tile":
        x_TD = x_TD.to(tl.float32) * spread(scale, scale_at_T, scale_ok_T, FROM, COUNT, WIDTH, CHANNELS, x_TD.shape[0])
        if ZERO:
            x_TD += spread(zero, scale_at_T, scale_ok_T, FROM, COUNT, WIDTH, CHANNELS, x_TD.shape[0])
    if INTERPRETED or (x_TD.dtype == tl.float16 and TYPE == tl.bfloat16):
        x_TD = x_TD.to(tl.float32)                      # it makes no bf16 of whole numbers; a GPU, of fp16 one by one
    return x_TD.to(TYPE)


@triton.jit
def spread(scale, at_T, ok_T, FROM: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
           TOKENS: tl.constexpr):
    """Scales of a tile [TOKENS, COUNT]: each is loaded once where groups are whole parts of a tile, or the reverse."""
    STEP: tl.constexpr = (CHANNELS if COUNT % CHANNELS == 0 and FROM % CHANNELS == 0
                          else COUNT if FROM // CHANNELS == (FROM + COUNT - 1) // CHANNELS else 1)
    channel_C = FROM + STEP * tl.arange(0, COUNT // STEP)
    some_TC = tl.load(scale + at_T[:, None] + (channel_C // CHANNELS)[None, :], other=0,
                      mask=ok_T[:, None] & (channel_C < WIDTH)[None, :]).to(tl.float32)
    ROWS: tl.constexpr = some_TC.shape[0]
    every = tl.broadcast_to(some_TC[:, None, :, None], (ROWS, TOKENS // ROWS, COUNT // STEP, STEP))
    return tl.reshape(every, (TOKENS, COUNT))


@triton.jit
def scales(scale, zero, at, known, KIND: tl.constexpr, ZERO: tl.constexpr):
    """(scales, zero points of centred codes) of tokens or of channels, 0 where there are none."""
    found = tl.load(scale + at, mask=known, other=0).to(tl.float32)
    CENTRE: tl.constexpr = 8 if KIND == "int4" else 2 if KIND == "int2" else 0
    shift = found * CENTRE
    if ZERO:
        shift += tl.load(zero + at, mask=known, other=0).to(tl.float32)
    return found, shift


def grain(stored: Stored, dtype) -> str:
    """Where the scales of one side go: none (there are none), fixed (q or output), token (scores or weights), tile."""
    if stored.scale is None:
        return "none"
    if stored.kind in ("int4", "int2") and stored.zero is None:     # only a zero point makes up for centred codes
        return "tile"
    if stored.scale.stride(0) == 0 and stored.scale.shape[2] == 1:
        return "fixed"
    # a scale times a weight may fall below fp16's range; there each code is scaled before it is rounded
    return "token" if stored.scale.shape[3] == 1 and dtype != torch.float16 else "tile"


def require(holds: bool, otherwise: str) -> None:
    """Raise ValueError with that sentence unless it holds."""
    if not holds:
        raise ValueError(otherwise)
