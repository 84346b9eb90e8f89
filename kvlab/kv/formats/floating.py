"""Floating-point storage without scales: fp32, fp16, bf16."""
from __future__ import annotations

from dataclasses import dataclass

from kvlab.kv.formats._base import Codec, Component, KVFormat, torch_dtype

EXAMPLES = ("fp32", "fp16", "bf16")
_DTYPES = {"fp32": ("float32", 4), "fp16": ("float16", 2), "bf16": ("bfloat16", 2)}


@dataclass(frozen=True)
class Floating(Codec):
    """K or V as plain floats; values outside the range of fp16 become infinite, as the hardware would make them."""
    name: str

    @property
    def about(self) -> str:
        return f"{self.name}, no scale"

    def components(self, head_dim):
        dtype, itemsize = _DTYPES[self.name]
        return (Component("values", 1, head_dim, itemsize, dtype),)

    def encode(self, x_KSD):
        import torch
        stored = x_KSD.to(torch_dtype(_DTYPES[self.name][0]))
        return (stored.clone(memory_format=torch.contiguous_format),)       # never the caller's own memory

    def decode(self, arrays, kv_len, dtype):
        return arrays[0][..., :kv_len, :].to(dtype)


def kv_format(name: str) -> KVFormat | None:
    return KVFormat(name, Floating(name), Floating(name)) if name in _DTYPES else None
