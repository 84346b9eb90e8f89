"""Multi-head latent attention the expanding way: latents become K and V of every query head in memory, then attention.

Legend: T = query token, S = kv token, Q = query head, K = kv head, G = query heads per kv head, D = head_dim,
E = v_head_dim (of a latent: what is not rope), X = D + E, F = 2 E (of K and of V).
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from kvlab.attention._oracle import least_cost, not_found
from kvlab.attention._sdpa import sdpa_why_not, under_a_mask
from kvlab.attention._variant import Cost
from kvlab.kernels.folded_sdpa import visible_rule
from kvlab.shapes import Workload

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MlaExpand:
    """Expanded MLA: K = [rope, c·U] and V = c·W of every query head are written, and multi-head attention reads them.

    It is what absorbing spares, but no model's: a model's U and W are narrow, and no narrow ones compute what an
    arbitrary absorbed q asks for. Here they are square and orthogonal, q is turned by U and the output back by W, and
    the result is the absorbed form's to rounding. So its bytes are not DeepSeek's either. Per token and query head it
    writes head_dim + v_head_dim numbers (576 + 512) with 2 · 512 · (512 + 512) operations; DeepSeek-V2, with the same
    latents (d_c = 512, d_h^R = 64 of rope) and heads of d_h = 128, would write (d_h + d_h^R) + d_h = 320 with
    2 · d_c · (d_h + d_h). Source: arXiv 2405.04434, sections 2.1 and 3.1.2, for the sizes and the formula.
    """
    name: ClassVar[str] = "mla_expand"

    def why_not(self, trial):
        if not trial.workload.shape.v_in_k:
            return ("expands latents, of which V is a view of K, and this shape stores V apart; use sdpa, or a shape "
                    "with v_in_k, --latent on the command line")
        return sdpa_why_not(trial)

    def ran(self, trial) -> str:
        if _attended_width(trial) == trial.workload.shape.v_dim:
            return "expanded, then torch's attention"
        return "expanded, then torch's attention with V read as wide as K, since a CPU fuses one width only"

    def prepare(self, trial, inputs):
        import torch
        from torch.nn.functional import scaled_dot_product_attention as sdpa
        w, shape = trial.workload, trial.workload.shape
        Q, G, D, E = shape.num_q_heads, shape.group_ratio, shape.head_dim, shape.v_dim
        rope, wide = D - E, _attended_width(trial)
        firsts = [w.first_visible(b) for b in range(w.batch_size)]
        rules = [visible_rule(q_len, kv_len, shape.window, trial.device, first)
                 for q_len, kv_len, first in zip(w.q_lens, w.kv_lens, firsts)]
        most = max(kv_len - first for kv_len, first in zip(w.kv_lens, firsts))
        space_QSX = inputs.workspace("expanded", Q, most, D + E, dtype=trial.torch_dtype)
        turn_QEF = _matrices(trial, inputs)
        to_k_QEE, to_v_QEE = turn_QEF[..., :E], turn_QEF[..., E:]

        def expand(latent_KSD):
            """[Q, S, X]: rope, K's other channels, V's: one product per head makes the last two."""
            kv_QSX = space_QSX[:, :latent_KSD.shape[1]]
            for k, latent_SD in enumerate(latent_KSD):
                group = slice(k * G, k * G + G)
                kv_QSX[group, :, :rope] = latent_SD[:, E:]
                torch.bmm(latent_SD[:, :E].expand(G, -1, -1), turn_QEF[group], out=kv_QSX[group, :, rope:])
            return kv_QSX

        def call():
            out_TQE = torch.empty(sum(w.q_lens), Q, E, dtype=trial.torch_dtype, device=trial.device)
            for b, (q_TQD, own_TQE) in enumerate(zip(inputs.q_BTQD, out_TQE.split(w.q_lens))):
                kv_QSX = expand(inputs.decode(*inputs.stored(b), w.kv_lens[b], firsts[b])[0])
                q_QTD = q_TQD.transpose(0, 1)
                q_QTD = torch.cat([q_QTD[..., E:], torch.bmm(q_QTD[..., :E], to_k_QEE)], dim=-1)
                # V's channels are the last ones: those before them, read for the width, give columns that are dropped
                turned = sdpa(q_QTD[None], kv_QSX[None, ..., :D], kv_QSX[None, ..., -wide:], **rules[b])[0]
                own_TQE.copy_(torch.bmm(turned[..., -E:], to_v_QEE.transpose(1, 2)).transpose(0, 1))
            return out_TQE
        return call

    def cost(self, trial, cache_bytes=0) -> Cost:
        """Latents and matrices are read, K and V of all heads written and read back, q and the output turned.

        The product of each head walks its latent again, unless that stays beside the head's matrices and result.
        """
        w, s, size = trial.workload, trial.workload.shape, trial.itemsize
        Q, D, E, wide = s.num_q_heads, s.head_dim, s.v_dim, _attended_width(trial)
        heads = replace(w, shape=replace(s, num_kv_heads=Q, v_head_dim=E, v_in_k=False))
        cost = under_a_mask(least_cost(trial, cache_bytes), replace(trial, workload=heads), cache_bytes)
        half = Q * E * E * size                                          # the matrices of K, or those of V
        for b, (q_len, kv_len) in enumerate(zip(w.q_lens, w.kv_lens)):
            tokens = kv_len - w.first_visible(b)
            expanded, latent = Q * tokens * (D + E) * size, tokens * D * size
            read = not_found(2 * half, expanded, cache_bytes) if b else 2 * half
            if latent + (expanded + 2 * half) // Q > cache_bytes:
                read += (Q - s.num_kv_heads) * latent
            read += not_found(expanded, half, cache_bytes)               # by attention, behind the turn of q
            read += not_found(half, half + expanded, cache_bytes) + not_found(half, expanded, cache_bytes)
            turned, joined, attended, out = (q_len * Q * n * size for n in (E, D, wide, E))
            read += (not_found(turned, turned, cache_bytes) + not_found(joined, expanded, cache_bytes)
                     + not_found(attended, half, cache_bytes) + not_found(out, half, cache_bytes))
            pairs = Workload(s, (q_len,), (kv_len,)).visible_pairs()
            cost = cost.plus(read=read, write=expanded + turned + joined + attended + out,
                             flops=4 * Q * E * E * (tokens + q_len) + 2 * Q * (wide - E) * pairs)
        return cost


def _attended_width(trial) -> int:
    """Channels of V that attention reads: on a CPU as many as of K, or torch would not run its fused kernel."""
    shape = trial.workload.shape
    return shape.v_dim if trial.device.startswith("cuda") else shape.head_dim


def _matrices(trial, inputs) -> Tensor:
    """U and W of every query head side by side, [Q, E, F]: reflections along random directions, fixed by the seed.

    A reflection is orthogonal to rounding and needs no factorisation. The input copies share them.
    """
    import torch
    Q, E = trial.workload.shape.num_q_heads, trial.workload.shape.v_dim
    key = "matrices", trial.seed, Q, E
    if key not in inputs.scratch:
        generator = torch.Generator().manual_seed(trial.seed)
        along = torch.nn.functional.normalize(torch.randn(2, Q, E, 1, generator=generator), dim=2)
        reflections = torch.eye(E) - 2 * along @ along.transpose(2, 3)
        inputs.scratch[key] = torch.cat(list(reflections), dim=-1).to(trial.device, trial.torch_dtype)
    return inputs.scratch[key]
