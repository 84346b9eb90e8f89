"""How K and V are stored. A KVFormat pairs two codecs; sizes are exact and need no torch.

Legend: K = kv head, S = kv token, D = head_dim, W = width of a stored row.
Arrays here are head-major with tokens second to last: codes_KSD, scale_KS1.
"""
from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

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


class Codec(ABC):
    """How one of K, V is turned into stored arrays.

    Codecs are frozen dataclasses: one file per family. name, about: of the codec; about is one line for `kvlab ls
    formats`. static: scales that a calibration pass must find are not there yet. sizes_only: kvlab knows the bytes
    and does not compute. residual: most tokens that stay in fp16, in one tail per sequence outside the blocks.
    """
    name: str
    static = False
    sizes_only = False
    residual = 0

    @property
    @abstractmethod
    def about(self) -> str:
        """The codec in one line."""

    @abstractmethod
    def components(self, head_dim: int) -> tuple[Component, ...]:
        """The stored arrays for that width."""

    @abstractmethod
    def encode(self, x_KSD: Tensor) -> tuple[Tensor, ...]:
        """Arrays [K, rows, width] in the order of the components."""

    @abstractmethod
    def decode(self, arrays: tuple[Tensor, ...], kv_len: int, dtype) -> Tensor:
        """x_KSW of arrays [K, rows, width]; leading axes are free, and the caller cuts off what is beyond head_dim."""

    def calibrate(self, x_KSD: Tensor) -> Codec:
        """The codec with the static scales of these tokens; itself where it has none."""
        return self

    def settled(self, kv_len: int) -> int:
        """Leading tokens of a sequence that are encoded, in whole token groups; the others are its tail."""
        return kv_len

    def token_group(self, head_dim: int) -> int:
        """Tokens that share a stored row."""
        return math.lcm(*(c.tokens for c in self.components(head_dim)))


class Packed(NamedTuple):
    """One sequence as stored: the arrays of K, those of V (none where V is a view of K), and its length.

    Of a codec with a residual, the last array is the tail of tokens that are kept as fp16.
    """
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    kv_len: int

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.k + self.v)


@dataclass(frozen=True)
class KVFormat:
    """How K and V are stored, each by its own codec.

    Multiplies freely with every attention variant.
    """
    name: str
    k: Codec
    v: Codec

    @property
    def sizes_only(self) -> bool:
        """Whether kvlab knows how large this storage is and does not compute with it."""
        return self.k.sizes_only or self.v.sizes_only

    @property
    def static(self) -> bool:
        """Whether a calibration pass must find its scales first: `calibrate` gives the format with them."""
        return self.k.static or self.v.static

    @property
    def residual(self) -> int:
        """Most tokens of a sequence that stay in fp16 outside the blocks."""
        return max(self.k.residual, self.v.residual)

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
        check_finite(k_SKD, v_SKD)
        v = self.v if v_SKD is None else self.v.calibrate(v_SKD.permute(1, 0, 2))
        return replace(self, k=self.k.calibrate(k_SKD.permute(1, 0, 2)), v=v)

    def encode(self, k_SKD: Tensor, v_SKD: Tensor | None) -> Packed:
        """Store one sequence: k [kv_len, num_kv_heads, head_dim], v likewise, or None where V is a view of K.

        Refuses NaN and infinity: one such value would spoil every later output without a word.
        """
        if self.sizes_only:
            raise ValueError(self.why_not(AttentionShape(1, 1, 1)))
        check_finite(k_SKD, v_SKD)
        v = () if v_SKD is None else encode_side(self.v, v_SKD.permute(1, 0, 2))
        return Packed(encode_side(self.k, k_SKD.permute(1, 0, 2)), v, k_SKD.shape[0])

    def decode(self, packed: Packed, shape: AttentionShape, dtype) -> tuple[Tensor, Tensor]:
        """(k_SKD, v_SKD) of one sequence in the given floating dtype."""
        k_KSD, v_KSD = self.decode_heads(packed.k, packed.v, packed.kv_len, shape, dtype)
        return k_KSD.transpose(0, 1), v_KSD.transpose(0, 1)

    def decode_heads(self, arrays_k, arrays_v, kv_len: int, shape: AttentionShape, dtype, first: int = 0,
                     base: int = 0) -> tuple[Tensor, Tensor]:
        """(k_KSD, v_KSD) of tokens first … kv_len from stored arrays that begin at token `base`; leading axes are free.

        Views of the storage where it is in that dtype. Rows that lie wholly before `first` are not touched.
        """
        k_KSD = decode_side(self.k, arrays_k, kv_len, shape.head_dim, dtype, first, base)
        if shape.v_in_k:
            return k_KSD, k_KSD[..., :shape.v_dim]
        return k_KSD, decode_side(self.v, arrays_v, kv_len, shape.v_dim, dtype, first, base)

    def sides(self, shape: AttentionShape) -> tuple[tuple[Codec, int], ...]:
        """(codec, width) of K, and of V unless it is a view of K."""
        return ((self.k, shape.head_dim),) if shape.v_in_k else ((self.k, shape.head_dim), (self.v, shape.v_dim))

    def components(self, shape: AttentionShape) -> tuple[tuple[Component, ...], tuple[Component, ...]]:
        """The arrays of K and of V that lie in blocks, for this shape; the tail of a residual is not among them."""
        return self.k.components(shape.head_dim), () if shape.v_in_k else self.v.components(shape.v_dim)

    def token_group(self, shape: AttentionShape) -> int:
        """Tokens that share a stored row; a paged layout's block_size must be a multiple of it."""
        return math.lcm(*(codec.token_group(width) for codec, width in self.sides(shape)))

    def depends_on_later(self, shape: AttentionShape) -> bool:
        """Whether what is stored of a token changes with those behind it: shared scales, a tail in fp16."""
        return self.token_group(shape) > 1 or any(codec.residual for codec, _ in self.sides(shape))

    def period(self, shape: AttentionShape) -> int:
        """Tokens after which storage has grown by the same bytes again: a token group, or a residual's turn."""
        return math.lcm(self.token_group(shape), *(max(1, codec.residual) for codec, _ in self.sides(shape)))

    def nbytes(self, kv_len: int, shape: AttentionShape, first: int = 0) -> int:
        """Bytes that hold tokens first … kv_len of one sequence in one layer, scales included; ignores the window.

        Every touched scale or group counts whole, so nbytes(kv_len, shape) equals Packed.nbytes exactly. Static scales
        belong to the layer, not to a sequence, and are not counted.
        """
        total = 0
        for codec, width in self.sides(shape):
            settled = codec.settled(kv_len)
            total += sum(c.rows(settled, first) * c.width * c.itemsize for c in codec.components(width))
            total += max(0, kv_len - max(first, settled)) * width * TAIL_ITEMSIZE
        return shape.num_kv_heads * total

    def allocated(self, num_blocks: int, block_size: int, sequences: int, shape: AttentionShape) -> int:
        """Bytes of a cache of so many blocks, and of the longest tail for each sequence where there is a residual."""
        total = 0
        for codec, width in self.sides(shape):
            total += num_blocks * sum(c.rows(block_size) * c.width * c.itemsize for c in codec.components(width))
            total += sequences * codec.residual * width * TAIL_ITEMSIZE
        return shape.num_kv_heads * total


def encode_side(codec: Codec, x_KSD: Tensor) -> tuple[Tensor, ...]:
    """Tokens of one side, from the start or from where a sequence is settled: arrays, and the tail if it keeps one."""
    import torch
    settled = codec.settled(x_KSD.shape[1])
    arrays = codec.encode(x_KSD[:, :settled])
    if not codec.residual:
        return arrays
    tail = x_KSD[:, settled:].to(torch_dtype(TAIL_DTYPE))
    if not bool(tail.isfinite().all()):
        raise ValueError(f"values up to {float(x_KSD.abs().max()):.3g} do not fit a residual's fp16 (65504 at most)")
    return *arrays, tail.clone(memory_format=torch.contiguous_format)


def decode_side(codec: Codec, arrays, kv_len: int, width: int, dtype, first: int, base: int) -> Tensor:
    """Tokens first … kv_len of one side as floats, from arrays that begin at token `base` (a tail is always whole)."""
    import torch
    settled, group, parts = codec.settled(kv_len), codec.token_group(width), codec.components(width)
    start = min(first, settled) // group * group                    # what lies before is hidden, and is not touched
    rows = tuple(a[..., (start - base) // c.tokens:, :] for a, c in zip(arrays, parts))
    x_KSD = codec.decode(rows, settled - start, dtype)[..., :width]
    if codec.residual:
        x_KSD = torch.cat([x_KSD, arrays[-1][..., :kv_len - settled, :].to(dtype)], dim=-2)
    return x_KSD[..., first - start:, :]


def check_finite(k_SKD: Tensor, v_SKD: Tensor | None) -> None:
    """Refuse no tokens, NaN and infinity."""
    kv_len = k_SKD.shape[0]
    if kv_len < 1:
        raise ValueError("there are no tokens to store: K has kv_len 0")
    for name, x_SKD in (("K", k_SKD), ("V", v_SKD)):
        if x_SKD is not None and not bool((finite := x_SKD.isfinite()).all()):
            token = int((~finite).flatten(1).any(1).nonzero()[0])
            raise ValueError(f"{name} holds NaN or infinity, first at token {token} of {kv_len}; "
                             "a cache takes finite values only")


families = Registry("KV format family", "kvlab.kv.formats")


def format_names(sizes_only: bool = False) -> list[str]:
    """Every family's example names, of formats that compute or of those that are only sized.

    Sizes in a name (int8/block16, int4/token/g32) may be changed freely.
    """
    every = [name for family in families for name in families[family].EXAMPLES]
    return [name for name in every if kv_format(name).sizes_only == sizes_only]


def kv_format(name: str) -> KVFormat:
    """The format of that name.

    Unknown names raise KeyError with a near match and the list.
    """
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
