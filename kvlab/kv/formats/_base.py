"""How K and V are stored. A KVFormat pairs two codecs; sizes are exact and need no torch.

Legend: K = kv head, S = kv token, D = head_dim, W = width of a stored row.
Arrays here are head-major with tokens second to last: codes_KSD, scale_KS1.
"""
from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvlab.registry import Registry, no_such
from kvlab.shapes import AttentionShape

if TYPE_CHECKING:
    from torch import Tensor

TAIL_ITEMSIZE, TAIL_DTYPE = 2, "float16"        # of a residual, as in KIVI's own code


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
    about: str                                                      # one line for `kvlab ls formats`
    # optional: `static` (True while scales that a calibration pass must find are not there) and `calibrate(x_KSD)`,
    # the codec with them; `sizes_only` (True where kvlab knows the bytes and does not compute)

    def components(self, head_dim: int) -> tuple[Component, ...]: ...
    def encode(self, x_KSD: Tensor) -> tuple[Tensor, ...]: ...     # arrays [K, rows, width], in components' order
    def decode(self, arrays: tuple[Tensor, ...], kv_len: int, dtype) -> Tensor: ...
    # x_KSW; leading axes are free, and what lies beyond head_dim is cut off by the caller


class Packed(NamedTuple):
    """One sequence as stored: the arrays of K, those of V (none where V is a view of K), and its length.

    With a residual, the last array of each side is the tail of tokens that are kept as fp16.
    """
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    kv_len: int

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.k + self.v)


@dataclass(frozen=True)
class KVFormat:
    """How K and V are stored, each by its own codec. Multiplies freely with every attention variant.

    residual: at least so many of the newest tokens stay in fp16, one tail per sequence outside the blocks; older ones
    are encoded in whole token groups. Source: KIVI (arXiv 2402.02750), section 3.
    """
    name: str
    k: Codec
    v: Codec
    residual: int = 0

    @property
    def sizes_only(self) -> bool:
        """Whether kvlab knows how large this storage is and does not compute with it."""
        return any(getattr(codec, "sizes_only", False) for codec in (self.k, self.v))

    @property
    def static(self) -> bool:
        """Whether a calibration pass must find its scales first: `calibrate` gives the format with them."""
        return any(getattr(codec, "static", False) for codec in (self.k, self.v))

    def why_not(self, shape: AttentionShape) -> str | None:
        """Why kvlab cannot compute with this storage for these heads, in one sentence."""
        if self.sizes_only:
            return f"kvlab knows how large {self.name} is and does not compute with it; see kvlab ls formats"
        try:
            self.components(shape)
        except ValueError as error:
            return str(error)
        return None

    def calibrate(self, k_SKD: Tensor, v_SKD: Tensor | None) -> KVFormat:
        """This format with static scales from the K [tokens, num_kv_heads, head_dim] and V of a calibration pass.

        Later values outside the range that was seen are clipped. A format without static scales is returned as it is.
        """
        _check(k_SKD, v_SKD)

        def bound(codec, x_SKD):
            find = getattr(codec, "calibrate", None)
            return codec if x_SKD is None or find is None else find(x_SKD.permute(1, 0, 2))
        return replace(self, k=bound(self.k, k_SKD), v=bound(self.v, v_SKD))

    def encode(self, k_SKD: Tensor, v_SKD: Tensor | None) -> Packed:
        """Store one sequence: k [kv_len, num_kv_heads, head_dim], v likewise, or None where V is a view of K.

        Refuses NaN and infinity: one such value would spoil every later output without a word.
        """
        if self.sizes_only:
            raise ValueError(self.why_not(AttentionShape(1, 1, 1)))
        _check(k_SKD, v_SKD)
        kv_len = k_SKD.shape[0]
        settled = self.settled(kv_len, *(x.shape[-1] for x in (k_SKD, v_SKD) if x is not None))

        def side(codec, x_SKD):
            x_KSD = x_SKD.permute(1, 0, 2)
            return codec.encode(x_KSD[:, :settled]) + ((_tail(x_KSD[:, settled:]),) if self.residual else ())
        return Packed(side(self.k, k_SKD), () if v_SKD is None else side(self.v, v_SKD), kv_len)

    def decode(self, packed: Packed, shape: AttentionShape, dtype) -> tuple[Tensor, Tensor]:
        """(k_SKD, v_SKD) of one sequence in the given floating dtype."""
        k_KSD, v_KSD = self.decode_heads(packed.k, packed.v, packed.kv_len, shape, dtype)
        return k_KSD.transpose(0, 1), v_KSD.transpose(0, 1)

    def decode_heads(self, arrays_k, arrays_v, kv_len: int, shape: AttentionShape, dtype,
                     first: int = 0) -> tuple[Tensor, Tensor]:
        """(k_KSD, v_KSD) of tokens first … kv_len from stored arrays; leading axes are free.

        Views of the storage where it is in that dtype. Rows that lie wholly before `first` are not touched.
        """
        settled = self.settled(kv_len, *self._widths(shape))
        k_parts, v_parts = self.components(shape)
        base = min(first, settled) // self.token_group(shape) * self.token_group(shape)

        def side(codec, arrays, parts, width):
            rows = tuple(a[..., base // c.tokens:, :] for a, c in zip(arrays, parts))
            x_KSD = codec.decode(rows, settled - base, dtype)[..., :width]
            if self.residual:
                x_KSD = _join(x_KSD, arrays[-1][..., :kv_len - settled, :width].to(dtype))
            return x_KSD[..., first - base:, :]
        k_KSD = side(self.k, arrays_k, k_parts, shape.head_dim)
        return k_KSD, k_KSD[..., :shape.v_dim] if shape.v_in_k else side(self.v, arrays_v, v_parts, shape.v_dim)

    def components(self, shape: AttentionShape) -> tuple[tuple[Component, ...], tuple[Component, ...]]:
        """The arrays of K and of V that lie in blocks, for this shape; the tail of a residual is not among them."""
        return self.k.components(shape.head_dim), () if shape.v_in_k else self.v.components(shape.v_dim)

    def token_group(self, shape: AttentionShape) -> int:
        """Tokens that share a stored row; a paged layout's block_size must be a multiple of it."""
        return self._group(*self._widths(shape))

    def settled(self, kv_len: int, *widths: int) -> int:
        """Tokens of a sequence that are encoded: all of them, or without its full-precision tail (whole groups)."""
        if not self.residual:
            return kv_len
        group = self._group(*widths)
        return max(0, kv_len - self.residual) // group * group

    def tail(self, kv_len: int, shape: AttentionShape) -> int:
        """Newest tokens of a sequence that are kept in fp16."""
        return kv_len - self.settled(kv_len, *self._widths(shape))

    def longest_tail(self, shape: AttentionShape) -> int:
        """Most tokens that a tail ever holds: the residual and a group that is not full yet."""
        return self.residual + self.token_group(shape) - 1 if self.residual else 0

    def nbytes(self, kv_len: int, shape: AttentionShape, first: int = 0) -> int:
        """Bytes that hold tokens first … kv_len of one sequence in one layer, scales included; ignores the window.

        Every touched scale or group counts whole, so nbytes(kv_len, shape) equals Packed.nbytes exactly. Static scales
        belong to the layer, not to a sequence, and are not counted.
        """
        settled = self.settled(kv_len, *self._widths(shape))
        blocks = sum(c.rows(settled, first) * c.width * c.itemsize for side in self.components(shape) for c in side)
        tail = max(0, kv_len - max(first, settled)) * sum(self._widths(shape)) * TAIL_ITEMSIZE
        return shape.num_kv_heads * (blocks + tail)

    def allocated(self, num_blocks: int, block_size: int, sequences: int, shape: AttentionShape) -> int:
        """Bytes of a cache of so many blocks, and of the longest tail for each sequence where there is a residual."""
        block = sum(c.rows(block_size) * c.width * c.itemsize for side in self.components(shape) for c in side)
        tail = self.longest_tail(shape) * sum(self._widths(shape)) * TAIL_ITEMSIZE
        return shape.num_kv_heads * (num_blocks * block + sequences * tail)

    def _widths(self, shape: AttentionShape) -> tuple[int, ...]:
        return (shape.head_dim,) if shape.v_in_k else (shape.head_dim, shape.v_dim)

    def _group(self, k_width: int, v_width: int | None = None) -> int:
        parts = self.k.components(k_width) + (self.v.components(v_width) if v_width else ())
        return math.lcm(*(c.tokens for c in parts))


def _check(k_SKD: Tensor, v_SKD: Tensor | None) -> None:
    kv_len = k_SKD.shape[0]
    if kv_len < 1:
        raise ValueError("there are no tokens to store: K has kv_len 0")
    for name, x_SKD in (("K", k_SKD), ("V", v_SKD)):
        if x_SKD is not None and not bool((finite := x_SKD.isfinite()).all()):
            token = int((~finite).flatten(1).any(1).nonzero()[0])
            raise ValueError(f"{name} holds NaN or infinity, first at token {token} of {kv_len}; "
                             "a cache takes finite values only")


def _tail(x_KSD: Tensor) -> Tensor:
    import torch
    tail = x_KSD.to(torch_dtype(TAIL_DTYPE))
    if not bool(tail.isfinite().all()):
        raise ValueError(f"values up to {float(x_KSD.abs().max()):.3g} do not fit a residual's fp16 (65504 at most)")
    return tail.clone(memory_format=torch.contiguous_format)


def _join(x_KSD: Tensor, tail_KSD: Tensor) -> Tensor:
    import torch
    return torch.cat([x_KSD, tail_KSD], dim=-2)


families = Registry("KV format family", "kvlab.kv.formats")


def format_names(sizes_only: bool = False) -> list[str]:
    """Every family's example names, of formats that compute or of those that are only sized.

    Sizes in a name (int8/block16, int4/token/g32) may be changed freely.
    """
    every = [name for family in families for name in families[family].EXAMPLES]
    return [name for name in every if kv_format(name).sizes_only == sizes_only]


def kv_format(name: str) -> KVFormat:
    """The format of that name. Unknown names raise KeyError with a near match and the list."""
    if not isinstance(name, str):
        raise _unknown(name)
    return _found(name)


@cache
def _found(name: str) -> KVFormat:                  # asked for by every trial; listing a folder each time is not free
    for family in families:
        found = families[family].kv_format(name)
        if found is not None:
            return found
    raise _unknown(name)


def _unknown(name) -> KeyError:
    return no_such("KV format", name, format_names() + format_names(sizes_only=True))


def torch_dtype(name: str):
    """torch's dtype of that name, imported late so that sizing works without torch."""
    return getattr(importlib.import_module("torch"), name)
