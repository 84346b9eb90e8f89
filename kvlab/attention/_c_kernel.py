"""What the variants in C share: fp32, one thread, the cache as it lies; compiled at first use."""
from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from kvlab.attention._oracle import contiguous_only
from kvlab.kernels import compiled

SOURCE = Path(compiled.__file__).with_name("c_attention.c")
FIELDS = ("Q", "K", "T", "S", "D", "E", "window", "k_head", "k_row", "v_head", "v_row", "q_tile", "kv_tile")


class Shape(ctypes.Structure):
    """The Shape of c_attention.c."""
    _fields_ = [(name, ctypes.c_long) for name in FIELDS]


@cache
def library() -> ctypes.CDLL:
    """The kernels. Raises CannotCompile."""
    loaded = compiled.loaded((SOURCE,))
    for name in ("c_naive", "c_flash", "c_decode"):
        getattr(loaded, name).argtypes = [ctypes.POINTER(Shape)] + [ctypes.c_void_p] * 5
        getattr(loaded, name).restype = None
        getattr(loaded, f"{name}_space").argtypes = [ctypes.POINTER(Shape)]
        getattr(loaded, f"{name}_space").restype = ctypes.c_long
    return loaded


def c_why_not(trial) -> str | None:
    """Why the C kernels cannot compute this trial, in one sentence."""
    if trial.device != "cpu":
        return f"kvlab's C kernels run on a CPU, and this is device {trial.device}; use sdpa or flash"
    if trial.threads != 1:
        return f"kvlab's C kernels use one thread, and this trial has {trial.threads}; use sdpa"
    if trial.dtype != "fp32" or trial.kv_format != "fp32":
        return (f"kvlab's C kernels read and compute fp32 only, and this is {trial.dtype} over {trial.kv_format}; "
                "use naive, flash or sdpa")
    if trial.layout.order != "head":
        return "kvlab's C kernels read caches in head order only; use sdpa, or Layout(order='head')"
    if trial.workload.shape.softcap is not None:
        return "kvlab's C kernels have no soft-capping; use naive or flash"
    if why := contiguous_only(trial):
        return why
    try:
        library()
    except compiled.CannotCompile as error:
        return str(error)
    return None


def shapes(trial, tiles: tuple[int, int]) -> list[Shape]:
    """What each sequence's call is told, K and V beginning at its first visible token in a block of the longest."""
    w, s = trial.workload, trial.workload.shape
    k_row, v_row = s.head_dim, s.head_dim if s.v_in_k else s.v_dim
    longest = max(w.kv_lens)
    return [Shape(s.num_q_heads, s.num_kv_heads, q_len, kv_len - w.first_visible(b), s.head_dim, s.v_dim,
                  s.window or 0, longest * k_row, k_row, longest * v_row, v_row, *tiles)
            for b, (q_len, kv_len) in enumerate(zip(w.q_lens, w.kv_lens))]


def c_call(name: str, trial, inputs, tiles: tuple[int, int] = (1, 1)):
    """A call of that function of c_attention.c for each sequence, one after the other."""
    import torch
    kernel, w = getattr(library(), name), trial.workload
    told = shapes(trial, tiles)
    space = inputs.workspace("c", max(getattr(library(), f"{name}_space")(s) for s in told), dtype=torch.float32)

    def call():
        out_TQE = torch.empty(sum(w.q_lens), w.shape.num_q_heads, w.shape.v_dim)
        for b, (q_TQD, out) in enumerate(zip(inputs.q_BTQD, out_TQE.split(w.q_lens))):
            k_KSD, v_KSE = inputs.decode(*inputs.stored(b), w.kv_lens[b], w.first_visible(b))     # views: it is fp32
            kernel(told[b], q_TQD.data_ptr(), k_KSD.data_ptr(), v_KSE.data_ptr(), out.data_ptr(), space.data_ptr())
        return out_TQE
    return call
