"""torch's scaled_dot_product_attention, arranged so that K and V are read once per KV head and never repeated.

Legend: B = sequence, Q = query head, K = kv head, G = query heads per kv head, T = query token, S = kv token.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def visible_mask(q_len: int, kv_len: int, window: int | None, device, first: int = 0) -> Tensor | None:
    """[T, S - first] booleans, True where a query sees a token (causal, bottom-right); None where all see all."""
    import torch
    position_T1 = torch.arange(kv_len - q_len, kv_len, device=device)[:, None]
    token_S = torch.arange(first, kv_len, device=device)
    seen_TS = token_S <= position_T1
    if window is not None:
        seen_TS &= token_S > position_T1 - window
    return None if bool(seen_TS.all()) else seen_TS


def folded_sdpa(q_BTQD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor, mask_TS: Tensor | None, square: bool) -> Tensor:
    """Grouped attention without repeated heads; returns [B, T, Q, E].

    One query token (or no mask): a group's query heads become extra query tokens, which is exact as no mask applies.
    Several under a mask: one call per head of the group. square says that the mask is the plain causal one of
    q_len = kv_len, which torch then applies without an array.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa
    B, T, Q, D = q_BTQD.shape
    K = k_BKSD.shape[1]
    G = Q // K
    q_BKGTD = q_BTQD.view(B, T, K, G, D).permute(0, 2, 3, 1, 4)
    if mask_TS is None:
        out_BKGTE = sdpa(q_BKGTD.reshape(B, K, G * T, D), k_BKSD, v_BKSE).view(B, K, G, T, -1)
    else:
        rule = dict(is_causal=True) if square else dict(attn_mask=mask_TS)
        if G == 1:
            out_BKGTE = sdpa(q_BKGTD[:, :, 0], k_BKSD, v_BKSE, **rule)[:, :, None]
        else:
            out_BKGTE = torch.stack([sdpa(q_BKGTD[:, :, g], k_BKSD, v_BKSE, **rule) for g in range(G)], dim=2)
    return out_BKGTE.permute(0, 3, 1, 2, 4).reshape(B, T, Q, -1)
