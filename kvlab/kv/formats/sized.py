"""Storage that kvlab sizes and does not compute with: llama.cpp's cache types, NVFP4 and the OCP MX formats."""
from __future__ import annotations

from dataclasses import dataclass

from kvlab.kv.formats._base import Codec, Component, KVFormat

# name -> (elements, bytes) of a block, and what it is. Source: ggml-common.h's block structs (MIT) for the cache types
# of llama.cpp's --cache-type-k; NVIDIA's NVFP4 (an E4M3 scale per 16, and one fp32 scale per tensor, not counted);
# OCP Microscaling Formats 1.0 (an E8M0 scale per 32).
_BLOCKS = {"q8_0": (32, 34, "llama.cpp"), "q5_1": (32, 24, "llama.cpp"), "q5_0": (32, 22, "llama.cpp"),
           "q4_1": (32, 20, "llama.cpp"), "q4_0": (32, 18, "llama.cpp"), "iq4_nl": (32, 18, "llama.cpp"),
           "nvfp4": (16, 9, "NVIDIA"), "mxfp4": (32, 17, "OCP MX"), "mxfp8": (32, 33, "OCP MX")}
EXAMPLES = tuple(_BLOCKS)


@dataclass(frozen=True)
class Sized(Codec):
    """Blocks of `elements` consecutive channels of a token take `block_bytes` bytes, scales included."""
    name: str
    elements: int
    block_bytes: int
    of: str
    sizes_only = True

    @property
    def about(self) -> str:
        return f"{self.of}: {self.block_bytes} bytes per {self.elements} elements; sized only"

    def components(self, head_dim):
        if head_dim % self.elements:
            raise ValueError(f"{self.name} stores blocks of {self.elements} channels, and head_dim {head_dim} is not a "
                             "multiple of that")
        return (Component("blocks", 1, head_dim // self.elements * self.block_bytes, 1, "uint8"),)

    def encode(self, *what):
        raise ValueError(f"kvlab knows how large {self.name} is and does not compute with it; see kvlab ls formats")

    decode = encode


def kv_format(name: str) -> KVFormat | None:
    if name not in _BLOCKS:
        return None
    found = Sized(name, *_BLOCKS[name])
    return KVFormat(name, found, found)
