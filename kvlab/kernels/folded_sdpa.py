"""torch's scaled_dot_product_attention, arranged so that K and V are never repeated.

Legend: B = sequence, Q = query head, K = kv head, G = query heads per kv head, T = query token, S = kv token.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Rule = dict                     # which tokens a query sees, as keyword arguments of scaled_dot_product_attention


def visible_mask(q_len: int, kv_len: int, window: int | None, device, first: int = 0) -> Tensor | None:
    """[T, S - first] booleans, True where a query sees a token (causal, bottom-right); None where all see all."""
    import torch
    if q_len == 1 and (window is None or first >= kv_len - window):
        return None
    position_T1 = torch.arange(kv_len - q_len, kv_len, device=device)[:, None]
    token_S = torch.arange(first, kv_len, device=device)
    seen_TS = token_S <= position_T1
    if window is not None:
        seen_TS &= token_S > position_T1 - window
    return None if bool(seen_TS.all()) else seen_TS


def visible_rule(q_len: int, kv_len: int, window: int | None, device, first: int = 0) -> Rule:
    """The same for torch: nothing where all see all, is_causal (no array) for q_len = kv_len, else the mask."""
    if q_len == kv_len > 1 and (window is None or window >= kv_len):
        return dict(is_causal=True)
    mask_TS = visible_mask(q_len, kv_len, window, device, first)
    return {} if mask_TS is None else dict(attn_mask=mask_TS)


def folded_sdpa(q_BTQD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor, rule: Rule) -> Tensor:
    """Grouped attention without repeated heads; returns [B, T, Q, E].

    Where all see all (decoding), a group's query heads become extra query tokens, which is exact. Under a mask: on a
    CPU one call per head of the group, since enable_gqa is slower there; on a GPU enable_gqa.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa
    B, T, Q, D = q_BTQD.shape
    K = k_BKSD.shape[1]
    G = Q // K
    if rule and (G == 1 or q_BTQD.is_cuda):
        return sdpa(q_BTQD.transpose(1, 2), k_BKSD, v_BKSE, enable_gqa=G > 1, **rule).transpose(1, 2)
    q_BKGTD = q_BTQD.view(B, T, K, G, D).permute(0, 2, 3, 1, 4)
    if rule:
        out_BKGTE = torch.stack([sdpa(q_BKGTD[:, :, g], k_BKSD, v_BKSE, **rule) for g in range(G)], dim=2)
    else:
        out_BKGTE = sdpa(q_BKGTD.reshape(B, K, G * T, D), k_BKSD, v_BKSE).view(B, K, G, T, -1)
    return out_BKGTE.permute(0, 3, 1, 2, 4).reshape(B, T, Q, -1)
