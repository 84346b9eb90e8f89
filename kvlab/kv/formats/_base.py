"""How K and V are stored. A KVFormat pairs two codecs; sizes are exact and need no torch.

Legend: K = kv head, S = kv token, D = head_dim, W = width of a stored row.
Arrays here are head-major with tokens second to last: codes_KSD, scale_KS1.
"""
from __future__ import annotations

import importlib
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvlab.registry import Registry, no_such
from kvlab.shapes import AttentionShape

if TYPE_CHECKING:
    from torch import Tensor


class Component(NamedTuple):
    """One stored array of a codec: per KV head, a row of `width` elements for every `tokens` tokens."""
    name: str
    tokens: int
    width: int
    itemsize: int
    dtype: str                                                      # torch's name, resolved only where tensors are made

    def rows(self, kv_len: int, first: int = 0) -> int:
        """Rows that hold tokens first … kv_len, a row that is touched at all counted whole."""
        return 0 if first >= kv_len else -(-kv_len // self.tokens) - first // self.tokens


class Codec(Protocol):
    """How one of K, V is turned into stored arrays. Codecs are frozen dataclasses: one file per family."""
    name: str

    def components(self, head_dim: int) -> tuple[Component, ...]: ...
    def encode(self, x_KSD: Tensor) -> tuple[Tensor, ...]: ...     # arrays [K, rows, width], in components' order
    def decode(self, arrays: tuple[Tensor, ...], kv_len: int, dtype) -> Tensor: ...     # x_KSD; leading axes are free


class Packed(NamedTuple):
    """One sequence as stored: the arrays of K, those of V (none where V is a view of K), and its length."""
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    kv_len: int

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.k + self.v)


@dataclass(frozen=True)
class KVFormat:
    """How K and V are stored, each by its own codec. Multiplies freely with every attention variant."""
    name: str
    k: Codec
    v: Codec

    def encode(self, k_SKD: Tensor, v_SKD: Tensor | None) -> Packed:
        """Store one sequence: k [kv_len, num_kv_heads, head_dim], v likewise, or None where V is a view of K.

        Refuses NaN and infinity: one such value would spoil every later output without a word.
        """
        kv_len = k_SKD.shape[0]
        if kv_len < 1:
            raise ValueError("there are no tokens to store: K has kv_len 0")
        for name, x_SKD in (("K", k_SKD), ("V", v_SKD)):
            if x_SKD is not None and not bool((finite := x_SKD.isfinite()).all()):
                token = int((~finite).flatten(1).any(1).nonzero()[0])
                raise ValueError(f"{name} holds NaN or infinity, first at token {token} of {kv_len}; "
                                 "a cache takes finite values only")
        v = () if v_SKD is None else self.v.encode(v_SKD.permute(1, 0, 2))
        return Packed(self.k.encode(k_SKD.permute(1, 0, 2)), v, kv_len)

    def decode(self, packed: Packed, shape: AttentionShape, dtype) -> tuple[Tensor, Tensor]:
        """(k_SKD, v_SKD) of one sequence in the given floating dtype."""
        k_KSD = self.k.decode(packed.k, packed.kv_len, dtype)
        v_KSD = k_KSD[..., :shape.v_dim] if shape.v_in_k else self.v.decode(packed.v, packed.kv_len, dtype)
        return k_KSD.transpose(0, 1), v_KSD.transpose(0, 1)

    def components(self, shape: AttentionShape) -> tuple[tuple[Component, ...], tuple[Component, ...]]:
        """The stored arrays of K and of V for this shape."""
        return self.k.components(shape.head_dim), () if shape.v_in_k else self.v.components(shape.v_dim)

    def token_group(self, shape: AttentionShape) -> int:
        """Tokens that share a stored row; a paged layout's block_size must be a multiple of it."""
        return math.lcm(*(c.tokens for side in self.components(shape) for c in side))

    def nbytes(self, kv_len: int, shape: AttentionShape, first: int = 0) -> int:
        """Bytes that hold tokens first … kv_len of one sequence in one layer, scales included; ignores the window.

        Every touched scale or group counts whole, so nbytes(kv_len, shape) equals Packed.nbytes exactly.
        """
        return sum(c.rows(kv_len, first) * shape.num_kv_heads * c.width * c.itemsize
                   for side in self.components(shape) for c in side)


families = Registry("KV format family", "kvlab.kv.formats")


def format_names() -> list[str]:
    """Every family's example names; sizes in a name (int8/block16) may be changed freely."""
    return [name for family in families for name in families[family].EXAMPLES]


def kv_format(name: str) -> KVFormat:
    """The format of that name. Unknown names raise KeyError with a near match and the list."""
    for family in families:
        found = families[family].kv_format(name)
        if found is not None:
            return found
    raise no_such("KV format", name, format_names())


def granularity(name: str, prefix: str) -> tuple[str, int | None] | None:
    """Split 'int8/block16' into ('block', 16) and 'int8/token' into ('token', None); None if not of that family."""
    match = re.fullmatch(rf"{prefix}/([a-z]+)([1-9]\d*)?", name)
    return (match[1], int(match[2]) if match[2] else None) if match else None


def torch_dtype(name: str):
    """torch's dtype of that name, imported late so that sizing works without torch."""
    return getattr(importlib.import_module("torch"), name)
