"""Another number of KV heads for a trained decoder: exact expansion, and pooling with or without alignment.

Expansion is exact, so it gives one function at several group ratios. Pooling is not: what a pooled model loses is
*conversion damage*, and says nothing about a model that was trained with so few KV heads.
Legend: T = token, Q = query head, K = kv head, J = kv head within its group, D = head_dim, R = D / 2 pairs of channels.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from kvlab.model.distil import distil
from kvlab.registry import no_such

if TYPE_CHECKING:
    from torch import Tensor

    from kvlab.model.decoder import Decoder

POOLINGS = ("mean", "first", "aligned")
METHODS = ("expand", *POOLINGS)


def convert(decoder: Decoder, num_kv_heads: int, method: str, distil_steps: int = 0,
            ids: Tensor | None = None, *, told: Callable[[str], None] = lambda stage: None) -> Decoder:
    """The decoder with num_kv_heads KV heads in every layer, by `expand`, `mean`, `first` or `aligned`.

    ids: token ids of a text that is not evaluated; what `aligned` and distillation work on. distil_steps: of Adam per
    layer, after pooling. All that a pooled or distilled decoder loses is conversion damage. told: hears of every
    layer and step, so that a long computation is not taken to hang.
    """
    if method not in METHODS:
        raise no_such("conversion of KV heads", method, METHODS)
    exact = method == "expand" or num_kv_heads == decoder.config.num_kv_heads
    if distil_steps < 0 or distil_steps and exact:
        raise ValueError(f"distil_steps={distil_steps} with {method} to {num_kv_heads} of {decoder.config.num_kv_heads}"
                         " KV heads; allowed: 0 for an exact conversion, which has nothing to learn, else 0 and above")
    if distil_steps and ids is None:
        raise ValueError("distillation needs ids, token ids of a text that is not evaluated")
    if method == "expand":
        return expand_kv_heads(decoder, num_kv_heads)
    pooled = pool_kv_heads(decoder, num_kv_heads, method, ids, told=told)
    return distil(pooled, decoder, ids, distil_steps, told=told) if distil_steps else pooled


def expand_kv_heads(decoder: Decoder, num_kv_heads: int) -> Decoder:
    """The same function with more KV heads: each is repeated for the query heads that read it.

    num_kv_heads must be a multiple of the present number and divide the query heads.
    """
    c = decoder.config
    allowed = [n for n in range(c.num_kv_heads, c.num_q_heads + 1)
               if n % c.num_kv_heads == 0 and c.num_q_heads % n == 0]
    _check(num_kv_heads, allowed, f"expanding {c.num_kv_heads} KV heads below {c.num_q_heads} query heads")
    repeats = num_kv_heads // c.num_kv_heads
    changed = {name: _by_head(w, c.head_dim).repeat_interleave(repeats, 0).flatten(0, 1)
               for name, w in _kv(decoder)}
    return _named(decoder, num_kv_heads, "expand", changed)


def pool_kv_heads(decoder: Decoder, num_kv_heads: int, method: str = "mean", ids: Tensor | None = None, *,
                  told: Callable[[str], None] = lambda stage: None) -> Decoder:
    """Fewer KV heads, each made of a group of consecutive ones: their mean, the first, or the mean once aligned.

    aligned: align_kv_heads on the calibration text ids, then the mean. num_kv_heads must divide the present number.
    Source: Ainslie et al. 2023, arXiv 2305.13245, section 2.1, for mean and first.
    """
    c = decoder.config
    if method not in POOLINGS:
        raise no_such("pooling of KV heads", method, POOLINGS)
    _check_pooling(decoder, num_kv_heads)
    if method == "aligned":
        if ids is None:
            raise ValueError("aligned pooling needs ids, token ids of a text that is not evaluated")
        decoder = align_kv_heads(decoder, num_kv_heads, ids, told=told)
    changed = {}
    for name, w in _kv(decoder):
        w_KJD = _by_head(w, c.head_dim).unflatten(0, (num_kv_heads, -1))
        changed[name] = (w_KJD[:, 0] if method == "first" else w_KJD.mean(1)).flatten(0, 1).contiguous()
    return _named(decoder, num_kv_heads, method, changed)


@torch.no_grad()
def align_kv_heads(decoder: Decoder, num_kv_heads: int, ids: Tensor, *,
                   told: Callable[[str], None] = lambda stage: None) -> Decoder:
    """The same function in another basis, in which the KV heads of each of num_kv_heads groups agree the most.

    V of a head is turned by an orthogonal matrix, which the output projection of its query heads undoes. K may only be
    turned as RoPE turns it, within pairs of channels, and its query heads turn along. The rotations minimise the
    squared distance of K and V to their group's mean over the tokens of ids. On SmolLM2-135M, 3 to 1 KV heads, this
    leaves a KL of 3.6 nat where rotations found from the projections' weights leave 5.4 to 6.7, and none 6.2.
    Raises ValueError for a decoder with QK-norm, whose weights differ within the pairs.
    Source: Schönemann 1966 for two heads, Gower 1975 for more (Procrustes problems).
    """
    c = decoder.config
    _check_pooling(decoder, num_kv_heads)
    if c.qk_norm:
        raise ValueError(f"{decoder.name or 'this decoder'} normalises each head of q and k (QK-norm) with weights "
                         "that do not commute with rotations; pool it by mean or first")
    if torch.as_tensor(ids).numel() < 2 * c.head_dim:
        raise ValueError(f"ids holds {torch.as_tensor(ids).numel()} tokens, and finding rotations of {c.head_dim} "
                         f"channels takes at least {2 * c.head_dim}; give a longer calibration text")
    changed: dict[str, Tensor] = {}

    def observe(layer, q_TQD, k_TKD, v_TKD):
        told(f"aligning layer {layer}")
        turn_k, turn_v = (side(x.double().transpose(0, 1).unflatten(0, (num_kv_heads, -1))).flatten(0, 1)
                          for side, x in ((_pairwise_turns, k_TKD), (_turns, v_TKD)))
        changed.update(_turned(decoder, layer, turn_k, turn_v))
    decoder.hidden([ids], decoder.teacher(), observe=observe)
    return decoder.renamed(decoder.name, changed)


def _turns(x_KJTD: Tensor) -> Tensor:
    """Orthogonal matrices [K, J, D, D] for the heads of each group."""
    return _agreeing(torch.einsum("kitd,kjte->kijde", x_KJTD, x_KJTD))


def _pairwise_turns(x_KJTD: Tensor) -> Tensor:
    """The same of rotations within pairs of channels: after RoPE or before makes no difference, since it cancels."""
    z_KJTR = torch.complex(*x_KJTD.chunk(2, -1))
    turn_KRJ = _agreeing(torch.einsum("kitr,kjtr->krij", z_KJTR, z_KJTR.conj())[..., None, None])[..., 0, 0]
    turn_KJR = turn_KRJ.transpose(1, 2)
    cos_KJRR, sin_KJRR = turn_KJR.real.diag_embed(), turn_KJR.imag.diag_embed()
    return torch.cat((torch.cat((cos_KJRR, -sin_KJRR), -1), torch.cat((sin_KJRR, cos_KJRR), -1)), -2)


def _agreeing(moments: Tensor, sweeps: int = 100) -> Tensor:
    """Unitary matrices [..., J, D, D] that bring J vectors closest to their mean; the first vector stays as it is.

    moments: [..., J, J, D, D], the sums of x_i x_j^H over samples. One vector after the other is turned to the sum of
    the others, which is the best for it (a singular value decomposition), until their agreement no longer grows.
    """
    J, D = moments.shape[-3], moments.shape[-1]
    turns = torch.eye(D, dtype=moments.dtype, device=moments.device).expand(*moments.shape[:-4], J, D, D).clone()
    agreement = 0.0
    for sweep in range(sweeps if J > 2 else 1):             # of two, the first turn is already the best
        for j in range(1, J):
            others = [i for i in range(j if sweep == 0 else J) if i != j]
            u, _, vh = torch.linalg.svd(sum(turns[..., i, :, :] @ moments[..., i, j, :, :] for i in others))
            turns[..., j, :, :] = u @ vh
        now = torch.einsum("...ide,...ijef,...jdf->", turns, moments, turns.conj()).real
        if now - agreement <= 1e-9 * now:
            break
        agreement = now
    return turns


def _turned(decoder: Decoder, layer: int, turn_k: Tensor, turn_v: Tensor) -> dict[str, Tensor]:
    """A layer's projections with K and its query heads turned by turn_k, V by turn_v [K, D, D], the output undone."""
    c, at = decoder.config, f"model.layers.{layer}.self_attn."
    group = c.num_q_heads // c.num_kv_heads
    turns = dict(q=turn_k.repeat_interleave(group, 0), k=turn_k, v=turn_v)
    changed = {}
    for side, turn in turns.items():
        for name in (f"{at}{side}_proj.weight", f"{at}{side}_proj.bias"):
            if (w := decoder.weights.get(name)) is not None:
                rows = _by_head(w.double(), c.head_dim)
                changed[name] = torch.einsum("hed,hd...->he...", turn, rows).flatten(0, 1).to(w.dtype)
    o = decoder.weights[f"{at}o_proj.weight"]
    o_HQD = o.double().unflatten(1, (c.num_q_heads, -1))
    changed[f"{at}o_proj.weight"] = torch.einsum(
        "hqd,qed->hqe", o_HQD, turn_v.repeat_interleave(group, 0)).flatten(1).to(o.dtype)
    return changed


def _kv(decoder: Decoder):
    """(name, tensor) of every projection to K and V, and of its bias."""
    for layer in range(decoder.config.num_layers):
        for side in "kv":
            for kind in ("weight", "bias"):
                name = f"model.layers.{layer}.self_attn.{side}_proj.{kind}"
                if name in decoder.weights:
                    yield name, decoder.weights[name]


def _by_head(rows: Tensor, head_dim: int) -> Tensor:
    return rows.unflatten(0, (-1, head_dim))


def _check(num_kv_heads: int, allowed: list[int], doing: str) -> None:
    if type(num_kv_heads) is not int or num_kv_heads not in allowed:
        raise ValueError(f"num_kv_heads={num_kv_heads!r} is impossible for {doing}; allowed: "
                         f"{', '.join(map(str, allowed))}")


def _check_pooling(decoder: Decoder, num_kv_heads: int) -> None:
    have = decoder.config.num_kv_heads
    _check(num_kv_heads, [n for n in range(1, have + 1) if have % n == 0], f"pooling {have} KV heads")


def _named(decoder: Decoder, num_kv_heads: int, method: str, changed: dict[str, Tensor]) -> Decoder:
    name = f"{decoder.name}, {num_kv_heads} KV head{'s' if num_kv_heads > 1 else ''} ({method})"
    return decoder.renamed(name, changed, num_kv_heads=num_kv_heads)
