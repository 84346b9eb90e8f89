"""A small decoder for associative recall, as many models at once as there are seeds, and the task's batches.

Legend: Z = seed (each a model of its own), B = sequence, P = pair, S = kv token, T = query token, Q = query head,
K = kv head, D = head_dim, C = width of the model, N = sequences of all seeds (Z · B).
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kvlab.attention import Inputs, Trial, VariantRef
from kvlab.kernels.folded_sdpa import folded_sdpa
from kvlab.kv.cache import KVCache, Layout
from kvlab.kv.formats import KVFormat, kv_format
from kvlab.shapes import AttentionShape, Workload

ROPE_THETA = 10_000.0
# attend(layer, q_NTQD, k_NSKD, v_NSKD, causal) -> [N, T, Q, D]; not causal: every query token sees every token
Attend = Callable[[int, Tensor, Tensor, Tensor, bool], Tensor]


class Batch(NamedTuple):
    """Pairs of distinct keys with values, and queries for some of the keys with the values that answer them."""
    keys_ZBP: Tensor
    values_ZBP: Tensor
    query_ZBT: Tensor
    answer_ZBT: Tensor


def draw(cell, pairs: int, sequences: int, generators: Sequence[torch.Generator]) -> Batch:
    """One batch per seed, each from that seed's own generator."""
    parts = []
    for g in generators:
        keys_BP = torch.rand(sequences, cell.num_keys, generator=g, device=g.device).argsort(1)[:, :pairs]
        values_BP = torch.randint(cell.num_values, (sequences, pairs), generator=g, device=g.device)
        asked_BT = torch.randint(pairs, (sequences, cell.queries), generator=g, device=g.device)
        parts.append((keys_BP, values_BP, keys_BP.gather(1, asked_BT), values_BP.gather(1, asked_BT)))
    return Batch(*map(torch.stack, zip(*parts)))


def init(cell) -> dict[str, Tensor]:
    """Weights [seeds, …] of a cell, each seed's from its own generator. Embeddings are standard normal, matrices have
    the deviation 1 / sqrt(3 · inputs) of torch's own linear layers."""
    C, wide, narrow = cell.width, cell.num_q_heads * cell.head_dim, cell.num_kv_heads * cell.head_dim
    sizes = {"key": (cell.num_keys, C), "value": (cell.num_values, C)}
    for layer in range(cell.layers):
        sizes |= {f"{layer}.q": (C, wide), f"{layer}.k": (C, narrow), f"{layer}.v": (C, narrow),
                  f"{layer}.o": (wide, C), f"{layer}.up": (C, cell.mlp_width), f"{layer}.down": (cell.mlp_width, C)}
    sizes["head"] = (C, cell.num_values)
    weights = {name: [] for name in sizes}
    for seed in cell.seeds:
        g = torch.Generator().manual_seed(seed)
        for name, size in sizes.items():
            scale = 1.0 if name in ("key", "value") else 1 / math.sqrt(3 * size[0])
            weights[name].append(torch.randn(size, generator=g) * scale)
    return {name: torch.stack(of).to(cell.device) for name, of in weights.items()}


def logits(cell, weights: dict[str, Tensor], batch: Batch, attend: Attend | None = None) -> Tensor:
    """[Z, B, T, num_values] for the queries, each asked alone as the token that follows the pairs.

    Task "pair": a pair is one token (the sum of its key's and its value's embedding) and there is one layer.
    Task "two_token": a key and its value are two tokens in a row and there are two layers. The first has positions
    (RoPE), so that a value can find the key before it; the second looks up by content and has none, so that a context
    beyond the trained one is not hard because of positions.
    """
    attend = attend or _attend
    key_ZBSC, value_ZBSC = _embed(weights["key"], batch.keys_ZBP), _embed(weights["value"], batch.values_ZBP)
    x_ZBSC = key_ZBSC + value_ZBSC if cell.task == "pair" else torch.stack([key_ZBSC, value_ZBSC], 3).flatten(2, 3)
    y_ZBTC = _embed(weights["key"], batch.query_ZBT)
    S = x_ZBSC.shape[2]
    for layer in range(cell.layers):
        last = layer == cell.layers - 1
        positions = (torch.arange(S + 1, device=x_ZBSC.device) if cell.task == "two_token" and not last else None)
        here = _norm(x_ZBSC)
        k, v = (_heads(_linear(here, weights[f"{layer}.{side}"]), cell.num_kv_heads) for side in "kv")
        if positions is not None:
            k = _rotate(k, positions[:S])
        y_ZBTC = _block(cell, weights, layer, y_ZBTC, k, v, attend, positions if positions is None else positions[S:])
        if not last:
            x_ZBSC = _block(cell, weights, layer, x_ZBSC, k, v, attend,
                            positions if positions is None else positions[:S], causal=True)
    return _linear(_norm(y_ZBTC), weights["head"])


def _block(cell, weights, layer, x_ZBTC, k_NSKD, v_NSKD, attend, positions=None, causal=False) -> Tensor:
    """One layer's residual update of some tokens: attention to K and V, then the MLP."""
    q_NTQD = _heads(_linear(_norm(x_ZBTC), weights[f"{layer}.q"]), cell.num_q_heads)
    if positions is not None:
        q_NTQD = _rotate(q_NTQD, positions)
    out_NTQD = attend(layer, q_NTQD, k_NSKD, v_NSKD, causal)
    x_ZBTC = x_ZBTC + _linear(out_NTQD.flatten(2).view(*x_ZBTC.shape[:3], -1), weights[f"{layer}.o"])
    return x_ZBTC + _linear(F.gelu(_linear(_norm(x_ZBTC), weights[f"{layer}.up"])), weights[f"{layer}.down"])


def _attend(layer, q_NTQD, k_NSKD, v_NSKD, causal) -> Tensor:
    return folded_sdpa(q_NTQD, k_NSKD.transpose(1, 2), v_NSKD.transpose(1, 2), dict(is_causal=True) if causal else {})


def _embed(table_ZIC: Tensor, index_ZBS: Tensor) -> Tensor:
    Z, ids, _ = table_ZIC.shape
    first_Z11 = torch.arange(0, Z * ids, ids, device=table_ZIC.device)[:, None, None]
    return F.embedding(index_ZBS + first_Z11, table_ZIC.flatten(0, 1))


def _linear(x_ZBTC: Tensor, weight_ZCO: Tensor) -> Tensor:
    return torch.bmm(x_ZBTC.flatten(1, 2), weight_ZCO).unflatten(1, x_ZBTC.shape[1:3])


def _norm(x: Tensor) -> Tensor:
    """LayerNorm without weights of its own: the matrix that follows can do their work."""
    return F.layer_norm(x, x.shape[-1:])


def _heads(x_ZBTC: Tensor, heads: int) -> Tensor:
    return x_ZBTC.flatten(0, 1).unflatten(-1, (heads, -1))


def _rotate(x_NTHD: Tensor, positions_T: Tensor) -> Tensor:
    """Rotary position embedding on the two halves of each head. Source: Su et al. 2021 (arXiv 2104.09864)."""
    half = x_NTHD.shape[-1] // 2
    frequency = ROPE_THETA ** (-torch.arange(half, device=x_NTHD.device, dtype=torch.float64) / half)
    angle_T1H = (positions_T[:, None].double() * frequency)[:, None]
    cos, sin = angle_T1H.cos().float(), angle_T1H.sin().float()
    a, b = x_NTHD[..., :half], x_NTHD[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class CachedAttention:
    """Attention of a Variant over K and V as a KVCache holds them, one contiguous block per sequence."""

    def __init__(self, cell, name: str, variant: VariantRef):
        self.cell, self.name, self.variant = cell, name, variant
        self.formats: list[KVFormat] = [kv_format(name)] * cell.layers
        self.calibrating = self.formats[0].static

    def __call__(self, layer: int, q_NTQD: Tensor, k_NSKD: Tensor, v_NSKD: Tensor, causal: bool) -> Tensor:
        if self.calibrating:
            self.formats[layer] = kv_format(self.name).calibrate(k_NSKD.flatten(0, 1), v_NSKD.flatten(0, 1))
        N, T, Q, D = q_NTQD.shape
        S, K = k_NSKD.shape[1:3]
        if causal:
            workload = Workload.prefill(AttentionShape(Q, K, D), batch_size=N, q_len=T)
            return self._attend(layer, workload, q_NTQD.flatten(0, 1), k_NSKD, v_NSKD).view(N, T, Q, D)
        # query tokens that all see the same tokens are as many more query heads of one decode step
        workload = Workload.decode(AttentionShape(Q * T, K, D), batch_size=N, kv_len=S)
        q_NQD = q_NTQD.transpose(1, 2).reshape(N, Q * T, D)
        return self._attend(layer, workload, q_NQD, k_NSKD, v_NSKD).view(N, Q, T, D).transpose(1, 2)

    def _attend(self, layer, workload, q_XQD, k_NSKD, v_NSKD) -> Tensor:
        fmt, device = self.formats[layer], self.cell.device
        trial = Trial(self.variant, workload, self.name, Layout(), device=device, threads=self.cell.threads)
        if why := trial.why_not():
            raise ValueError(f"{self.variant.label} cannot attend to this cache: {why}")
        group = fmt.token_group(workload.shape)
        N, S = k_NSKD.shape[:2]
        cache = KVCache(workload.shape, fmt, N, -(-S // group) * group, device=device, sequences=N)
        for b in range(N):
            cache.write(fmt.encode(k_NSKD[b], v_NSKD[b]), [b], b)
        table = torch.arange(N, device=device)[:, None]
        inputs = Inputs(q_XQD.contiguous(), workload.q_lens, workload.kv_lens, cache, table, 0)
        return trial.prepare([inputs])[0]()
