"""torch's FlexAttention: masks and scores are small functions that torch.compile builds into one fused kernel."""
from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import ClassVar

from kvlab.attention._oracle import contiguous_only, least_cost, read_again
from kvlab.attention._variant import Cost
from kvlab.libraries import library

BLOCK = 128                     # query and KV tokens of a block of the mask, torch's default
COMPILED_KINDS = 1024           # kinds of call that one process may compile; torch's own limit is 8, then it goes eager


@dataclass(frozen=True)
class Flex:
    """torch's FlexAttention with enable_gqa, compiled outside the clock for lengths that may grow (dynamic=True).

    A cache grows at every step, and a kernel per length would be compiled at every step. Never uncompiled: that would
    write the score matrix to memory, and torch does so with no more than a warning; fullgraph makes it an error.
    Source: arXiv 2412.05496.
    """
    name: ClassVar[str] = "flex"
    compiles: ClassVar[bool] = True     # each kind of shape costs seconds: tests that walk many shapes leave it out

    def why_not(self, trial):
        return contiguous_only(trial) or _cannot_compile(trial.device.startswith("cuda")) or (
            "flex_attention on CUDA needs a head_dim of at least 16" if trial.device.startswith("cuda")
            and min(trial.workload.shape.head_dim, trial.workload.shape.v_dim) < 16 else None)

    def prepare(self, trial, inputs):
        import torch
        w, shape = trial.workload, trial.workload.shape
        attend, firsts = _compiled(), [w.first_visible(b) for b in range(w.batch_size)]
        masks = [block_mask(q_len, kv_len - first, shape.window, trial.device)
                 for q_len, kv_len, first in zip(w.q_lens, w.kv_lens, firsts)][:1 if w.uniform else None]
        rest = dict(score_mod=_soft_capped(shape.softcap, trial.device), enable_gqa=shape.group_ratio > 1)

        def together():
            q_BQTD = inputs.q_TQD.view(w.batch_size, -1, *inputs.q_TQD.shape[1:]).transpose(1, 2)
            k_BKSD, v_BKSE = inputs.decode(*inputs.all_stored(), w.kv_lens[0], firsts[0])
            return attend(q_BQTD, k_BKSD, v_BKSE, block_mask=masks[0], **rest).transpose(1, 2).flatten(0, 1)

        def one_by_one():
            out = []
            for b, q_TQD in enumerate(inputs.q_BTQD):
                k_KSD, v_KSE = inputs.decode(*inputs.stored(b), w.kv_lens[b], firsts[b])
                out_QTE = attend(q_TQD.transpose(0, 1)[None], k_KSD[None], v_KSE[None], block_mask=masks[b], **rest)[0]
                out.append(out_QTE.transpose(0, 1))
            return torch.cat(out)
        call = together if w.uniform else one_by_one
        _compile_once(trial, call)
        return call

    def cost(self, trial, cache_bytes=0) -> Cost:
        if trial.device.startswith("cuda"):
            return least_cost(trial, cache_bytes)
        return read_again(trial, trial.workload.shape.group_ratio - 1, cache_bytes)


@cache
def _cannot_compile(cuda: bool) -> str | None:
    """Why torch.compile cannot build a kernel here: it calls a C++ compiler for the CPU and Triton for CUDA."""
    if cuda:
        why = library("triton").why_not
        return why and f"flex_attention needs Triton to compile for CUDA, and {why}"
    compiler = os.environ.get("CXX") or {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")
    if shutil.which(compiler) is None:
        return (f"flex_attention needs a C++ compiler to compile for the CPU, and there is no {compiler}; install one, "
                "or name it in CXX")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return ("flex_attention needs Python's C headers (Python.h) to compile for the CPU; install the package that "
                "has them, python3-dev or the like")
    return None


@cache
def _compiled():
    import torch
    from torch.nn.attention.flex_attention import flex_attention
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


_kinds: set = set()             # trials, but for their data, whose kernels this process has


def _compile_once(trial, call) -> None:
    """Run a call for the first time of its kind, when torch compiles it, in this process and for trial.threads."""
    import torch._dynamo
    import torch._inductor.config
    kind = replace(trial, data="gaussian", seed=0, replica=0)
    if kind in _kinds:
        return
    # compile_threads=1: a pool of compiling processes would outlive the compilation
    with (torch._dynamo.config.patch(recompile_limit=COMPILED_KINDS, accumulated_recompile_limit=COMPILED_KINDS),
          torch._inductor.config.patch({"compile_threads": 1, "cpp.threads": trial.threads})):
        call()
    _kinds.add(kind)


def _soft_capped(softcap: float | None, device: str):
    import torch
    if softcap is None:
        return None
    cap = torch.tensor(softcap, device=device)          # of a Python number, torch.compile would make a symbol
    return lambda score, b, h, t, s: cap * torch.tanh(score / cap)


def block_mask(q_len: int, kv_len: int, window: int | None, device):
    """Which blocks of KV tokens each block of query tokens sees, causal and bottom-right; None where all see all.

    From block numbers alone: torch's create_block_mask would write a [q_len, kv_len] mask first.
    """
    import torch
    from torch.nn.attention.flex_attention import BlockMask
    if q_len == 1 and (window is None or window >= kv_len):
        return None
    begin, width = torch.tensor(kv_len - q_len, device=device), torch.tensor(window or kv_len, device=device)

    def visible(b, h, t, s):
        return (s <= begin + t) & (s > begin + t - width)
    first_Q1 = torch.arange(0, q_len, BLOCK, device=device)[:, None] + begin             # positions of a block's ends
    last_Q1 = (first_Q1 + BLOCK - 1).clamp(max=kv_len - 1)
    low_S = torch.arange(0, kv_len, BLOCK, device=device)
    high_S = low_S + BLOCK - 1
    some_QS = (low_S <= last_Q1) & (high_S > first_Q1 - width)
    all_QS = (high_S <= first_Q1) & (low_S > last_Q1 - width)

    def ordered(chosen_QS):
        count_Q = chosen_QS.sum(-1, dtype=torch.int32)
        order_QS = torch.argsort(chosen_QS.int(), dim=-1, descending=True, stable=True)
        return count_Q[None, None], order_QS.int()[None, None]
    return BlockMask.from_kv_blocks(*ordered(some_QS & ~all_QS), *ordered(all_QS), BLOCK_SIZE=BLOCK, mask_mod=visible,
                                    seq_lengths=(q_len, kv_len))
