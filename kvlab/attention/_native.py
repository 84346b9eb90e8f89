"""What the variants on CUDA libraries share: they read the cache as it lies, through its block table if it has one.

Legend: N = block, P = slot in block, K = kv head, D = head_dim, E = v_head_dim.
"""
from __future__ import annotations

from kvlab.attention._oracle import least_cost
from kvlab.attention._variant import Cost


def capability(device: str) -> tuple[int, int] | None:
    """The compute capability of a CUDA device, None for any other."""
    if not device.startswith("cuda"):
        return None
    import torch
    return torch.cuda.get_device_capability(device)


def native_why_not(library: str, trial) -> str | None:
    """Why a library of CUDA kernels for fp16 and bf16 that decodes no format cannot compute this trial."""
    if capability(trial.device) is None:
        return f"{library} has CUDA kernels only, and this is device {trial.device}; use sdpa or flash"
    if trial.dtype == "fp32":
        return f"{library} computes in fp16 and bf16 only; give dtype bf16"
    if trial.format_path != "native":
        return (f"{library} reads K and V in the trial's own dtype only, and {trial.kv_format} would have to be "
                f"decoded first; use sdpa, or kv_format {trial.dtype}")
    return None


def triton_why_not(name: str, found: tuple[int, int] | None, library, instead: str) -> str | None:
    """Why a variant on one of kvlab's Triton kernels cannot run on a device of that capability (None: a CPU)."""
    if found is None:
        return ("Triton's kernels run on a GPU; a CPU only interprets them, and a time of the interpreter is no "
                f"number: use {instead}")
    if why := library("triton").why_not:
        return f"{why}; install kvlab[gpu] on Linux"
    if found < (8, 0):
        return f"{name} needs compute capability 8.0, and this is {found[0]}.{found[1]}"
    return None


def stored_arrays(cache, order: str):
    """K [N, P, K, D] and V [N, P, K, E] in token order, [N, K, P, D] and [N, K, P, E] in head order, as views."""
    (k,), shape = cache.k_arrays, cache.shape
    v = k[..., :shape.v_dim] if shape.v_in_k else cache.v_arrays[0]
    return (k, v) if cache.order == order else (k.transpose(1, 2), v.transpose(1, 2))


def table_cost(trial, cache_bytes: int) -> Cost:
    """The ideal traffic, and the block table in int32."""
    blocks = sum(-(-n // (trial.layout.block_size or n)) for n in trial.workload.kv_lens)
    return least_cost(trial, cache_bytes).plus(read=4 * blocks)
