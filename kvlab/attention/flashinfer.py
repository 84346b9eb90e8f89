"""The FlashInfer library's paged attention: planned from the block table once, then run as often as wished."""
from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import ClassVar

from kvlab.attention import _native
from kvlab.attention._variant import Cost
from kvlab.kv.cache import Layout
from kvlab.libraries import library

WORKSPACE_BYTES = 128 * 2**20           # what FlashInfer's documentation recommends for partial results
PLAN_BYTES = 8 * 2**20                  # what it takes itself for the plan, unless it is given a buffer
WRAPPERS = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
WIDTHS = (64, 128, 256)


@dataclass(frozen=True)
class FlashInfer:
    """The FlashInfer library's paged attention: plan() outside the clock, run() in it.

    BatchDecodeWithPagedKVCacheWrapper where all query lengths are 1, BatchPrefill… else. Reads head order (HND) and
    token order (NHD); a contiguous cache is one page per sequence. Decoding uses tensor cores from a group ratio of 4
    on, where a group fills them. Written from the public signatures; not yet run on a GPU. Source: arXiv 2501.01005.
    """
    name: ClassVar[str] = "flashinfer"
    default_layout: ClassVar[Layout] = Layout(block_size=16, page_order="random", order="token")

    def why_not(self, trial):
        why = _native.native_why_not("FlashInfer", trial)
        if why:
            return why
        s, found = trial.workload.shape, _native.capability(trial.device) or (0, 0)
        if found < (8, 0):
            return f"FlashInfer needs compute capability 8.0 for these kernels, and this is {found[0]}.{found[1]}"
        if s.head_dim not in WIDTHS or s.v_dim != s.head_dim:
            return (f"FlashInfer's paged kernels take K and V of one width of {', '.join(map(str, WIDTHS))}, got "
                    f"head_dim={s.head_dim} with v_head_dim={s.v_dim}")
        return library("flashinfer", attributes=WRAPPERS, distribution="flashinfer-python").why_not

    def prepare(self, trial, inputs):
        import torch
        w, s, page_size = trial.workload, trial.workload.shape, inputs.cache.block_size
        decoding = w.phase == "decode"
        make = getattr(importlib.import_module("flashinfer"), WRAPPERS[not decoding])
        space = inputs.workspace("partial results", WORKSPACE_BYTES, dtype=torch.uint8)
        layout = "HND" if inputs.cache.order == "head" else "NHD"
        wrapper = make(space, layout, **(dict(use_tensor_cores=s.group_ratio >= 4) if decoding else {}))
        # input copies differ in page numbers only, so that their plans are one
        wrapper.reset_workspace_buffer(space, inputs.workspace("plan", PLAN_BYTES, dtype=torch.uint8))

        def int32(values):
            return torch.tensor(values, dtype=torch.int32, device=trial.device)
        pages = [-(-n // page_size) for n in w.kv_lens]
        starts = int32([0, *pages]).cumsum(0, dtype=torch.int32)
        indices = torch.cat([row[:n] for row, n in zip(inputs.block_table, pages)]).int()
        last = int32([n - (count - 1) * page_size for n, count in zip(w.kv_lens, pages)])
        plan = [starts, indices, last, s.num_q_heads, s.num_kv_heads, s.head_dim, page_size]
        if not decoding:
            plan = [int32([0, *w.q_lens]).cumsum(0, dtype=torch.int32), *plan]
        wrapper.plan(*plan, **({} if decoding else dict(causal=True)), logits_soft_cap=s.softcap or 0.0,
                     window_left=-1 if s.window is None else s.window - 1, q_data_type=trial.torch_dtype,
                     kv_data_type=trial.torch_dtype)
        k_and_v = _native.stored_arrays(inputs.cache, inputs.cache.order)
        return lambda: wrapper.run(inputs.q_TQD, k_and_v)

    def cost(self, trial, cache_bytes=0) -> Cost:
        return _native.table_cost(trial, cache_bytes)
