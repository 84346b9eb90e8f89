"""Decode attention on a CPU over a block-stored cache, read in place: c_paged.c, compiled at first use.

Legend: B = sequence, Q = query head, K = kv head, D = head_dim, E = v_head_dim, M = block of a sequence.
"""
from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.kernels import compiled

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kvlab.kernels.stored import Stored

SOURCES = tuple(Path(__file__).with_name(name) for name in ("c_paged.c", "c_codes.h"))
KINDS = ("fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8")             # in the order of c_paged.c
# what torch found this processor to have (a simulator of one included) -> the compiler's name for it
LEVELS = {"AVX512": "x86-64-v4", "AVX2": "x86-64-v3"}
SHARES = 4          # parts of the work for each thread, so that one that is held up leaves little to wait for
LEAST = 64          # tokens of a part, or merging would cost more than it saves


class Side(ctypes.Structure):
    """The Side of c_paged.c."""
    _fields_ = [("codes", ctypes.c_void_p), *((name, ctypes.c_long) for name in ("block", "head", "slot")),
                ("scale", ctypes.c_void_p),
                *((name, ctypes.c_long) for name in ("scale_block", "scale_head", "scale_row", "tokens")),
                ("channel", ctypes.c_void_p), ("channel_head", ctypes.c_long)]


class Shape(ctypes.Structure):
    """The Shape of c_paged.c."""
    _fields_ = [(name, ctypes.c_long) for name in ("B", "K", "G", "D", "E", "kind_k", "kind_v", "block_size",
                                                   "num_blocks", "table_row", "heads", "threads")] + [
                                                       ("softcap", ctypes.c_float)]


def flags() -> tuple[str, ...]:
    """Flags for the instructions that this processor has; OpenMP is torch's own, so that threads are shared with it."""
    import torch
    level = LEVELS.get(torch.backends.cpu.get_cpu_capability()) if platform.machine() in ("x86_64", "AMD64") else None
    return ("-fopenmp", *((f"-march={level}",) if level else ()))


def built() -> str:
    """How it was compiled, in words: "C kernel (x86-64-v4)", "C kernel, one thread: compiled without OpenMP"."""
    chosen = "".join(f" ({flag.removeprefix('-march=')})" for flag in flags() if flag.startswith("-march="))
    return f"C kernel{chosen}" + ("" if library().c_paged_threads() else ", one thread: compiled without OpenMP")


@cache
def _loaded(given: tuple[str, ...]) -> ctypes.CDLL | str:
    """The kernel compiled with those flags, or why there is none: a compiler that fails is not asked for every call.

    Without OpenMP, which a compiler may lack (Apple's), it is compiled for one thread.
    """
    try:
        found = compiled.loaded(SOURCES, given)
    except compiled.CannotCompile as error:
        if "-fopenmp" not in given or isinstance(serial := _loaded(tuple(f for f in given if f != "-fopenmp")), str):
            return str(error)
        return serial
    found.c_paged.argtypes = [ctypes.POINTER(Shape), ctypes.POINTER(Side), ctypes.POINTER(Side), ctypes.c_void_p,
                              ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p,
                              ctypes.c_void_p, ctypes.c_void_p]
    found.c_paged_space.argtypes, found.c_paged_space.restype = [ctypes.POINTER(Shape), ctypes.c_long], ctypes.c_long
    return found


def why_not() -> str | None:
    """Why the kernel cannot be had here, in one sentence; compiles it, once."""
    found = _loaded(flags())
    return found if isinstance(found, str) else None


def library() -> ctypes.CDLL:
    """The kernel. Raises CannotCompile."""
    if isinstance(found := _loaded(flags()), str):
        raise compiled.CannotCompile(found)
    return found


def plan(block_size: int, kv_heads: int, lengths: tuple[int, ...], threads: int) -> tuple[int, int]:
    """(KV heads of a part of the work, parts of each sequence's tokens).

    Where blocks are small, a part takes all heads of its tokens, since they lie side by side; else a head at a time.
    """
    heads = kv_heads if block_size < 1024 else 1
    if threads == 1:
        return heads, 1
    parts = len(lengths) * -(-kv_heads // heads)
    return heads, max(1, min(-(-SHARES * threads // parts), max(lengths) // LEAST))


def decode(q_BQD: Tensor, k: Stored, v: Stored, block_table_BM: Tensor, firsts, kv_lens, *,
           softcap: float | None = None, out_BQE: Tensor, lse_BQ: Tensor | None = None,
           workspace: Callable[..., Tensor], threads: int = 1) -> None:
    """Attention of one query token per sequence over its tokens firsts[b] … kv_lens[b] - 1, into out_BQE.

    Arithmetic in fp32, whatever the codes and q's dtype. lse_BQ: natural logarithm of the sum of exp(score), fp32; an
    empty range gives 0 and -inf. Raises IndexError where a block id is out of range; CannotCompile without a compiler.
    Source: arXiv 2309.06180 (block tables), arXiv 1805.02867 (online softmax), Flash-Decoding (splits merged by LSE).
    """
    import torch
    B, Q, D = q_BQD.shape
    N, K, P, _ = k.codes.shape
    lengths = tuple(n - first for n, first in zip(kv_lens, firsts))
    heads, splits = plan(P, K, lengths, threads)
    shape = Shape(B, K, Q // K, D, v.width, KINDS.index(k.kind), KINDS.index(v.kind), P, N, block_table_BM.stride(0),
                  heads, threads, softcap or 0.0)
    kernel = library()
    space = workspace("c_paged", kernel.c_paged_space(shape, splits), dtype=torch.float32)
    plain = out_BQE.dtype == torch.float32
    out = out_BQE if plain else workspace("c_paged out", *out_BQE.shape, dtype=torch.float32)
    q = q_BQD.float().contiguous()
    ranges = (ctypes.c_long * (2 * B))(*firsts, *kv_lens)
    half = ctypes.addressof(ranges)
    bad = kernel.c_paged(shape, _side(k), _side(v), q.data_ptr(), block_table_BM.data_ptr(), half,
                         half + B * ctypes.sizeof(ctypes.c_long), splits, space.data_ptr(), out.data_ptr(),
                         None if lse_BQ is None else lse_BQ.data_ptr())
    if bad:
        raise IndexError(f"a block id in the block table is out of range; this cache has blocks 0 … {N - 1}")
    if not plain:
        out_BQE.copy_(out)


def _side(stored: Stored) -> Side:
    codes, scale = stored.codes, stored.scale
    side = Side(codes.data_ptr(), *codes.stride()[:3])
    if scale is not None and stored.channels == 1 and stored.width > 1:
        side.channel, side.channel_head = scale.data_ptr(), scale.stride(1)
    elif scale is not None:
        side.scale, side.scale_block, side.scale_head, side.scale_row = scale.data_ptr(), *scale.stride()[:3]
        side.tokens = stored.tokens
    return side

