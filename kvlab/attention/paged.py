"""Attention over a paged cache, read in place through the block table."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvlab.attention._oracle import least_cost, not_found
from kvlab.attention._stored import checked_table, not_stored, slots_per_block, stored_sides
from kvlab.attention._variant import Cost
from kvlab.attention.paged_gather import PagedGather
from kvlab.kernels import cpu_decode
from kvlab.kv.cache import Layout

WIDEST = 4096                   # channels of a head: rows that are decoded once for many query heads lie on the stack


@dataclass(frozen=True)
class Paged:
    """Decode where the blocks lie, K and V read once per group of query heads, quantised codes decoded in registers.

    A C kernel for CPUs (`kvlab.kernels.cpu_decode`): fp32 arithmetic over fp32, fp16, bf16, fp8 and int8, tokens split
    over threads. What it does not do (a prompt, a packed format, another device, no compiler) is done as
    `paged_gather` does it, by torch, and the rows say so. On a GPU see triton_paged.
    Source: arXiv 2309.06180.
    """
    name: ClassVar[str] = "paged"
    default_layout: ClassVar[Layout] = Layout(block_size=16, page_order="random")

    def why_not(self, trial):
        if (why := self.not_in_place(trial)) and (torch_too := PagedGather().why_not(trial)):
            return f"{torch_too} (kvlab's kernel is not used: {why})"
        return None

    def not_in_place(self, trial) -> str | None:
        """Why the kernel does not take this trial, in one sentence."""
        if trial.device != "cpu":
            return f"it runs on a CPU, and this is device {trial.device}"
        if trial.workload.phase != "decode":
            return "it takes one query token per sequence"
        if why := not_stored(trial, cpu_decode.KINDS):
            return why
        if max(trial.workload.shape.head_dim, trial.workload.shape.v_dim) > WIDEST:
            return f"it takes heads of up to {WIDEST} channels"
        grains = [getattr(codec, "grain", None) for codec, _ in trial.format.sides(trial.workload.shape)]
        if any(grain and grain.channels not in (None, 1) or grain and grain.channels and not grain.static
               for grain in grains):
            return f"it reads a scale per token, head or channel, and {trial.kv_format} has one per group of channels"
        return cpu_decode.why_not()

    def format_path(self, trial) -> str:
        return PagedGather().format_path(trial) if self.not_in_place(trial) else "native"

    def ran(self, trial) -> str:
        why = self.not_in_place(trial)
        if why:
            return f"blocks gathered by torch, not read in place by kvlab's kernel: {why}"
        parts = self._splits(trial)
        return f"kvlab's {cpu_decode.built()}, {parts} part{'s' * (parts > 1)} per sequence, blocks read in place"

    def _splits(self, trial) -> int:
        w = trial.workload
        lengths = tuple(n - w.first_visible(b) for b, n in enumerate(w.kv_lens))
        return cpu_decode.plan(slots_per_block(trial), w.shape.num_kv_heads, lengths, trial.threads)[1]

    def prepare(self, trial, inputs):
        import torch
        if self.not_in_place(trial):
            return PagedGather().prepare(trial, inputs)
        w, shape = trial.workload, trial.workload.shape
        k, v = stored_sides(inputs.cache)
        table_BM, firsts = checked_table(inputs), tuple(map(w.first_visible, range(w.batch_size)))

        def call():
            out_BQE = torch.empty(w.batch_size, shape.num_q_heads, shape.v_dim, dtype=trial.torch_dtype)
            cpu_decode.decode(inputs.q_TQD, k, v, table_BM, firsts, w.kv_lens, softcap=shape.softcap, out_BQE=out_BQE,
                              workspace=inputs.workspace, threads=trial.threads)
            return out_BQE
        return call

    def cost(self, trial, cache_bytes=0) -> Cost:
        if self.not_in_place(trial):
            return PagedGather().cost(trial, cache_bytes)
        w, s = trial.workload, trial.workload.shape
        rows = w.batch_size * s.num_q_heads
        cost = least_cost(trial, cache_bytes)
        # q as it is multiplied and each part's results are written before K and V go by, or behind them, and read again
        kept = 4 * rows * (s.head_dim + self._splits(trial) * (s.v_dim + 2))
        if trial.dtype != "fp32":
            kept += 4 * rows * (s.head_dim + s.v_dim)
        blocks = sum(-(-n // (trial.layout.block_size or n)) for n in w.kv_lens)
        return cost.plus(read=not_found(kept, cost.read_bytes, cache_bytes) + 4 * blocks, write=kept)
