"""Rotary position embedding in Hugging Face's convention: channel i turns with channel i + head_dim / 2.

Shapes: T token, H head, D head_dim, R = D / 2 pairs of channels. Angles are computed in fp64: in fp32 a position of
8,192 is already off by up to 5e-4 rad.
"""
from __future__ import annotations

import math

import torch
from torch import Tensor

from kvlab.model.config import DecoderConfig, RopeScaling


def tables(config: DecoderConfig, n: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """(cos_TR, sin_TR) of positions 0 … n - 1, fp32, yarn's attention factor included."""
    angles_TR = torch.outer(torch.arange(n, dtype=torch.float64), frequencies(config))
    scale = config.rope_scaling.attention_factor if config.rope_scaling else 1.0
    return (scale * angles_TR.cos()).float().to(device), (scale * angles_TR.sin()).float().to(device)


def rotate(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """x with every head of token t turned by the angles in row t of the tables; in x's dtype, computed in fp32."""
    first_THR, second_THR = x_THD.chunk(2, -1)
    cos_T1R, sin_T1R = cos_TR[:, None], sin_TR[:, None]
    return torch.cat((first_THR * cos_T1R - second_THR * sin_T1R, second_THR * cos_T1R + first_THR * sin_T1R),
                     -1).to(x_THD.dtype)


def frequencies(config: DecoderConfig) -> Tensor:
    """Radians per token of each pair of channels, [R], fp64: theta^(-2i/D), changed by the scaling.

    Source: RoFormer, arXiv 2104.09864, section 3.2.2.
    """
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    plain_R = config.rope_theta ** (-pairs / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return plain_R
    if scaling.kind == "linear":
        return plain_R / scaling.factor
    return _llama3(plain_R, scaling) if scaling.kind == "llama3" else _yarn(plain_R, scaling, config.rope_theta)


def _llama3(plain_R: Tensor, scaling: RopeScaling) -> Tensor:
    """Kept above high_freq_factor turns within the original context, divided below low_freq_factor, mixed between.

    Source: Meta's public reference code of Llama 3.1.
    """
    turns_R = scaling.original_context * plain_R / (2 * math.pi)
    kept_R = ((turns_R - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return plain_R * (kept_R + (1 - kept_R) / scaling.factor)


def _yarn(plain_R: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Kept for pairs that turn more than beta_fast times within the original context, divided below beta_slow.

    The ramp between runs over the pairs' numbers, not over their turns. Source: YaRN, arXiv 2309.00071, section 3.2.
    """
    width = 2 * len(plain_R)

    def pair_of(turns: float) -> float:
        return width * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    span = high - low or 0.001              # a ramp of no width is a step
    divided_R = ((torch.arange(len(plain_R), dtype=torch.float64) - low) / span).clamp(0, 1)
    return plain_R * ((1 - divided_R) + divided_R / scaling.factor)
