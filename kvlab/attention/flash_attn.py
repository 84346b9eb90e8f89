"""The FlashAttention libraries (2, 3 and 4) on the cache as it lies: paged through the block table, or contiguous."""
from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from kvlab.attention import _native
from kvlab.attention._variant import Cost
from kvlab.kv.cache import Layout
from kvlab.libraries import Library, library


class Release(NamedTuple):
    """What tells one FlashAttention from the others: its module, the function called, the GPUs it has kernels for."""
    module: str
    function: str
    distribution: str
    majors: tuple[int, ...]             # of the compute capability

    def library(self) -> Library:
        return library(self.module, attributes=(self.function,), distribution=self.distribution)


# 4 installs flash_attn/cute beside no flash_attn/__init__.py, so finding a folder flash_attn says nothing about 2
RELEASES = {2: Release("flash_attn", "flash_attn_with_kvcache", "flash-attn", (8, 9, 10, 11, 12)),
            3: Release("flash_attn_interface", "flash_attn_with_kvcache", "flash_attn_3", (9,)),
            4: Release("flash_attn.cute", "flash_attn_varlen_func", "flash-attn-4", (9, 10, 11, 12))}
NONE = (0, 0)                   # the compute capability of what is no GPU


@dataclass(frozen=True)
class FlashAttn:
    """The FlashAttention library, version 2, 3 or 4: one call for a whole batch, paged or contiguous.

    flash_attn_with_kvcache of 2 and 3, flash_attn_varlen_func of 4. version: None is the newest that imports here and
    has kernels for the device. In 2, query lengths that differ take a call per sequence; 3 reads fp8 only with q in
    fp8 too, which no trial has. Written from the public signatures; not yet run on a GPU.
    Source: arXiv 2205.14135, 2307.08691, 2407.08608.
    """
    version: int | None = None
    name: ClassVar[str] = "flash_attn"
    default_layout: ClassVar[Layout] = Layout(order="token")

    def __post_init__(self):
        if self.version not in (None, *RELEASES):
            raise ValueError(f"version={self.version!r}; allowed: 2, 3, 4, or None for the newest that runs here")

    def why_not(self, trial):
        why = _native.native_why_not("FlashAttention", trial)
        if why:
            return why
        version, reasons = self.resolved(trial.device)
        return reasons if version is None else _cannot(version, trial)

    def resolved(self, device: str) -> tuple[int | None, str]:
        """(the version that runs on the device, or None; why those before it do not)."""
        major, reasons = (_native.capability(device) or NONE)[0], list[str]()
        for version in (self.version,) if self.version else sorted(RELEASES, reverse=True):
            release = RELEASES[version]
            why = (release.library().why_not if major in release.majors else
                   f"it has no kernels for compute capability {major}.x")
            if why is None:
                return version, "; ".join(reasons)
            reasons.append(f"FlashAttention {version} cannot run: {why}")
        return None, "; ".join(reasons)

    def prepare(self, trial, inputs):
        import torch
        w, shape, device = trial.workload, trial.workload.shape, trial.device
        version, reasons = self.resolved(device)
        if version is None:
            raise RuntimeError(reasons)
        module = importlib.import_module(RELEASES[version].module)
        k_NPKD, v_NPKE = _native.stored_arrays(inputs.cache, "token")
        table = inputs.block_table.int() if trial.layout.block_size else None
        lens = torch.tensor(w.kv_lens, dtype=torch.int32, device=device)
        same = dict(causal=True, softcap=shape.softcap or 0.0)
        if shape.window is not None:
            same["window_size"] = (shape.window - 1, 0)
        varied = len(set(w.q_lens)) > 1
        starts = torch.tensor([0, *w.q_lens], device=device).cumsum(0, dtype=torch.int32)
        ragged = dict(cu_seqlens_q=starts, max_seqlen_q=max(w.q_lens))

        def with_kvcache(q_BTQD, rows=slice(None), **rest):
            paged = {"block_table" if version == 2 else "page_table": None if table is None else table[rows]}
            k, v = (k_NPKD, v_NPKE) if table is not None else (k_NPKD[rows], v_NPKE[rows])
            return module.flash_attn_with_kvcache(q_BTQD, k, v, cache_seqlens=lens[rows], **paged, **same, **rest)

        def one_by_one():
            return torch.cat([with_kvcache(q_TQD[None], slice(b, b + 1))[0] for b, q_TQD in enumerate(inputs.q_BTQD)])

        def together():
            return with_kvcache(inputs.q_TQD.view(w.batch_size, w.q_lens[0], *inputs.q_TQD.shape[1:])).flatten(0, 1)

        def varlen():
            if version == 3:
                return with_kvcache(inputs.q_TQD, **ragged)
            out = module.flash_attn_varlen_func(inputs.q_TQD, k_NPKD, v_NPKE, seqused_k=lens, page_table=table,
                                                **ragged, **same)
            return out[0] if isinstance(out, tuple) else out         # some releases of 4 return the log-sum-exp too
        return varlen if version == 4 or (varied and version == 3) else one_by_one if varied else together

    def cost(self, trial, cache_bytes=0) -> Cost:
        return _native.table_cost(trial, cache_bytes)


def _cannot(version: int, trial) -> str | None:
    """What this version has no kernel for. Source: the checks in its flash_api.cpp, of 4 in cute/interface.py."""
    s, block_size = trial.workload.shape, trial.layout.block_size
    major, _ = _native.capability(trial.device) or NONE
    widths = f"head_dim={s.head_dim}" + (f" with v_head_dim={s.v_dim}" if s.v_dim != s.head_dim else "")
    if s.head_dim % 8 or s.v_dim % 8:
        return f"FlashAttention {version} needs head widths that 8 divides, got {widths}"
    if version == 2:
        release = RELEASES[2].library().version or ""
        if re.match(r"(0|1|2\.[0-5])(\.|$)", release):
            return f"flash-attn {release} has neither paged caches nor soft-capping of this call; install 2.6 or newer"
        if s.head_dim > 256 or s.v_dim != s.head_dim:
            return f"FlashAttention 2 needs K and V of one width of at most 256, got {widths}"
        if block_size and block_size % 256:
            return f"FlashAttention 2 pages in blocks of a multiple of 256 tokens, got block_size={block_size}"
    if version == 3:
        mixed = 128 < s.head_dim <= 192 and 96 < s.v_dim <= 128 or s.head_dim <= 64 and s.v_dim <= 512
        if s.head_dim > 256 or (s.v_dim != s.head_dim and not mixed):
            return (f"FlashAttention 3 takes widths of at most 256, and a V of another width only for K of 129 … 192 "
                    f"with V of 97 … 128, or K of at most 64 with V of at most 512; got {widths}")
    if version == 4:
        mixed = (s.head_dim, s.v_dim) == (192, 128) and major in (10, 11)
        if not mixed and (s.head_dim > 128 or s.v_dim != s.head_dim):
            return (f"FlashAttention 4 takes K and V of one width of at most 128 (192 with 128 on compute capability "
                    f"10.x), got {widths}")
        if block_size and major not in (10, 11):
            return (f"FlashAttention 4 pages on compute capability 10.x only, and this device has {major}.x; use "
                    "version 2 or 3, or a layout without block_size")
    return None
