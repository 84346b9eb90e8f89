"""What a GPU's counters are validated on: operations of known traffic, decode and prefill, all as sizes say."""
from __future__ import annotations

from dataclasses import dataclass

from kvlab.attention import Comparison, trial
from kvlab.probes._known import Operation
from kvlab.shapes import AttentionShape, Workload

Case = Comparison | Operation


@dataclass(frozen=True)
class Sizes:
    """How large the cases are and how long it all may take. A dry run makes them small."""
    copy_bytes: int = 2**30
    matmul_bytes: int = 2**28
    q_heads: int = 32
    kv_heads: tuple[int, ...] = (8, 1, 32)                  # GQA first: the time may be up before the others
    head_dim: int = 128
    batch: int = 4                                          # long, not many: naive launches kernels per sequence, and
    kv_len: int = 65536                                     # ncu takes its time for each
    prefill_heads: tuple[int, int] = (16, 4)
    prefill_batch: int = 32                                  # what L2 still holds at the end must not decide
    prefill_len: int = 4096
    window_s: float = 1.0
    sweep_s: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
    times: int = 3                                          # each window of the sweep
    timer_s: float = 0.3
    budget_s: float = 150.0


def operations(s: Sizes, device: str) -> list[Operation]:
    """Copy, read and matrix product, as the study counters has them."""
    return [Operation(name, nbytes, "bf16", device) for name, nbytes in
            (("copy", s.copy_bytes), ("read", s.copy_bytes), ("matmul", s.matmul_bytes))]


def comparisons(s: Sizes, device: str) -> list[Comparison]:
    """Decode per number of KV heads, then prefill; each trial as the study counters has it."""
    found = []
    for kv_heads in s.kv_heads:
        workload = Workload.decode(AttentionShape(s.q_heads, kv_heads, s.head_dim), batch_size=s.batch, kv_len=s.kv_len)
        names = ("sdpa", "naive") if kv_heads == s.q_heads else ("sdpa", "naive_repeat", "naive")
        found.append((workload, names))
    found.append((Workload.prefill(AttentionShape(*s.prefill_heads, s.head_dim), batch_size=s.prefill_batch,
                                   q_len=s.prefill_len), ("sdpa", "naive")))
    return [Comparison(tuple(trial(name, workload, device=device) for name in names)) for workload, names in found]


def name_of(case: Case) -> str:
    """The case in a word or two."""
    if isinstance(case, Operation):
        return case.name
    shape = case.workload.shape
    return f"{case.workload.phase} {shape.num_q_heads}:{shape.num_kv_heads}"


def trials_of(case: Case) -> list:
    """What is measured by itself: a comparison's trials, or the operation."""
    return [case] if isinstance(case, Operation) else list(case.trials)
