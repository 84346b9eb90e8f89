"""Codes with scales: one codec for fp8, int8, int4 and int2, whatever shares a scale.

Legend: K = kv head, S = kv token, D = head_dim, R = row of scales, C = scale in a row, t x c = tokens and channels
that share a scale.
"""
from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from kvlab.kv.formats._base import Codec, Component, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor


class Grain(NamedTuple):
    """What shares a scale: `tokens` consecutive tokens x `channels` consecutive channels of a KV head (None = all).

    tokens None: a static scale, which later tokens share too; so a calibration pass must find it. heads: whether all
    KV heads of the layer share it.
    """
    about: str
    tokens: int | None
    channels: int | None
    heads: bool = False

    @property
    def static(self) -> bool:
        return self.tokens is None


_FIXED = {"tensor": Grain("per layer", None, None, heads=True), "head": Grain("per KV head", None, None),
          "channel": Grain("per KV head and channel", None, 1), "token": Grain("per KV head and token", 1, None)}


def grain(text: str) -> Grain | None:
    """tensor, head, channel, token, block16, channel/g32, token/g32; None where the text is none of them."""
    if text in _FIXED:
        return _FIXED[text]
    sized = re.fullmatch(r"(block|channel/g|token/g)([1-9][0-9]{0,5})", text)
    if sized is None:
        return None
    n = int(sized[2])
    return {"block": Grain(f"per KV head and {n} tokens", n, None),
            "channel/g": Grain(f"per KV head, channel and {n} tokens", n, 1),
            "token/g": Grain(f"per KV head, token and {n} channels", 1, n)}[sized[1]]


class Code(NamedTuple):
    """A kind of code. bits: of one code. largest: magnitude that the scale maps absmax to.

    asymmetric: codes 0 … largest, with a zero point beside each scale. stored: torch's dtype of the stored codes;
    value: the one they are read as. scale: torch's dtype of scales and zero points.
    """
    bits: int
    largest: float
    asymmetric: bool
    stored: str
    value: str
    scale: str
    scale_itemsize: int


@dataclass(frozen=True)
class Scaled(Codec):
    """x is stored as code = round((x - zero) / scale), and scales beside it; grain None: as it is, clipped.

    Symmetric codes: zero = 0 and scale = max|x| / largest. Asymmetric: zero = min x, scale = (max x - min x) / largest,
    both rounded to their own dtype before codes are made. residual: tokens that may stay in fp16; flushed: all of them
    are encoded at once when there are so many (KIVI's K), else the oldest one by one (its V).
    Source: KIVI (arXiv 2402.02750), equation 1 and section 3, and the schedule of its reference code.
    """
    name: str
    code: Code
    grain: Grain | None
    residual: int = 0
    flushed: bool = False
    scales: tuple[Tensor, ...] = field(default=(), compare=False)       # static: (scale_K1C, zero_K1C)

    @property
    def static(self) -> bool:
        return self.grain is not None and self.grain.static and not self.scales

    @property
    def about(self) -> str:
        kind = self.name.partition("/")[0]
        if self.grain is None:
            return f"{kind}, values beyond {self.code.largest:g} clipped"
        scale = ("static " if self.grain.static else "") + ("scale and zero point" if self.code.asymmetric else "scale")
        newest = f"newest kv_len % {self.residual}" if self.flushed else f"newest {self.residual}"
        return f"{kind}, {scale} {self.grain.about}" + (f", {newest} tokens in fp16" if self.residual else "")

    def settled(self, kv_len):
        if not self.residual:
            return kv_len
        return kv_len // self.residual * self.residual if self.flushed else max(0, kv_len - self.residual)

    def components(self, head_dim):
        codes = Component("codes", 1, -(-head_dim * self.code.bits // 8), 1, self.code.stored)
        if self.grain is None or self.grain.static:
            return (codes,)
        width = -(-head_dim // (self.grain.channels or head_dim))
        names = ("scale", "zero") if self.code.asymmetric else ("scale",)
        return (codes, *(Component(name, self.grain.tokens, width, self.code.scale_itemsize, self.code.scale)
                         for name in names))

    def calibrate(self, x_KSD):
        if self.grain is None or not self.grain.static:
            return self
        x_KSD = x_KSD.float()
        if self.grain.heads:
            x_KSD = x_KSD.flatten(0, 1)[None]
        return replace(self, scales=self._scales(x_KSD, x_KSD.shape[1]))

    def _check(self) -> None:
        if self.static:
            raise ValueError(f"{self.name} has static scales: find them first, fmt = kv_format({self.name!r})"
                             ".calibrate(k, v)")

    def encode(self, x_KSD):
        self._check()
        x_KSD = x_KSD.float()
        own = () if self.grain is None or self.grain.static else self._scales(x_KSD, self.grain.tokens)
        scale, zero = (*(own or self.scales), None, None)[:2]
        scaled = x_KSD
        if zero is not None:
            scaled = scaled - self._spread(zero, x_KSD.shape)
        if scale is not None:
            safe = scale.float().masked_fill(scale == 0, 1)            # a group of equal values keeps scale 0
            scaled = scaled / self._spread(safe, x_KSD.shape)
        return (self._codes(scaled), *own)

    def decode(self, arrays, kv_len, dtype):
        self._check()
        codes = arrays[0][..., :kv_len, :]
        scale, zero = (*(arrays[1:] or self.scales), None, None)[:2]
        if self.code.bits < 8:
            codes = unpack(codes, self.code.bits)
        elif self.code.stored != self.code.value:
            codes = codes.view(torch_dtype(self.code.value)).float()
        # whole-number codes become fp32 in the product itself: one pass over memory, not two
        x_KSW = codes.float() if scale is None else codes * self._spread(scale.to(codes.device), codes.shape)
        if zero is not None:
            x_KSW = x_KSW + self._spread(zero.to(x_KSW.device), x_KSW.shape)
        return x_KSW.to(dtype)

    def _codes(self, scaled: Tensor) -> Tensor:
        import torch
        low = 0 if self.code.asymmetric else -self.code.largest
        clipped = scaled.clamp(low, self.code.largest)
        if self.code.stored != self.code.value:                       # fp8: bytes, which every torch operator can move
            return clipped.to(torch_dtype(self.code.value)).view(torch.uint8).contiguous()
        rounded = clipped.round().to(torch_dtype(self.code.stored))
        return pack(rounded, self.code.bits) if self.code.bits < 8 else rounded.contiguous()

    def _scales(self, x_KSD: Tensor, tokens: int) -> tuple[Tensor, ...]:
        """(scale_KRC,) or (scale_KRC, zero_KRC) of every tile of `tokens` tokens."""
        import torch
        K, S, D = x_KSD.shape
        tokens, channels = min(tokens, S), min(self.grain.channels or D, D)    # a group may be larger than all
        rows, width = -(-S // tokens) if tokens else 0, -(-D // channels)
        if S == 0:
            empty = x_KSD.new_zeros(K, 0, width, dtype=torch_dtype(self.code.scale))
            return (empty, empty.clone()) if self.code.asymmetric else (empty,)

        def tiles(x, fill):
            padded = torch.nn.functional.pad(x, (0, width * channels - D, 0, rows * tokens - S), value=fill)
            return padded.view(K, rows, tokens, width, channels)
        if not self.code.asymmetric:
            return (tiles(x_KSD.abs(), 0).amax((2, 4)) / self.code.largest,)
        low = tiles(x_KSD, float("inf")).amin((2, 4))
        high = tiles(x_KSD, float("-inf")).amax((2, 4))
        found = tuple(a.to(torch_dtype(self.code.scale)) for a in ((high - low) / self.code.largest, low))
        if not all(bool(a.isfinite().all()) for a in found):
            raise ValueError(f"values up to {float(x_KSD.abs().max()):.3g} do not fit the fp16 scales of {self.name}")
        return found

    def _spread(self, scale_KRC: Tensor, shape) -> Tensor:
        """Scales laid over the elements they are of: [..., 1 or S, 1 or D]."""
        S, D = shape[-2:]
        tokens, channels = self.grain.tokens, self.grain.channels
        if tokens not in (None, 1) and scale_KRC.shape[-2] > 1:      # a single one spreads by itself
            scale_KRC = scale_KRC.repeat_interleave(tokens, -2)
        if channels not in (None, 1) and scale_KRC.shape[-1] > 1:
            scale_KRC = scale_KRC.repeat_interleave(channels, -1)
        short = D - scale_KRC.shape[-1]
        if scale_KRC.shape[-1] > 1 and short > 0:                    # the padding of packed codes beyond head_dim
            import torch
            scale_KRC = torch.nn.functional.pad(scale_KRC, (0, short))
        return (scale_KRC[..., :D] if tokens is None else scale_KRC[..., :S, :D]).float()


def pack(codes_KSD: Tensor, bits: int) -> Tensor:
    """Codes of 4 or 2 bits into bytes along the last axis, the first in the lowest bits; [K, S, ceil(D * bits / 8)]."""
    import torch
    each = 8 // bits
    padded = torch.nn.functional.pad(codes_KSD, (0, -codes_KSD.shape[-1] % each)).unflatten(-1, (-1, each))
    packed = padded[..., 0].clone()
    for i in range(1, each):
        packed |= padded[..., i] << (bits * i)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The codes again, with the padding of the last byte: [..., W * 8 / bits]."""
    import torch
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


def codec(name: str, prefix: str, code: Code) -> Scaled | None:
    """The codec called prefix/grain, None where the name is not of that family."""
    found = grain(name.removeprefix(prefix + "/")) if name.startswith(prefix + "/") else None
    return Scaled(name, code, found) if found else None
