"""Which layer's K or V suffers from a format: one at a time, all others in fp32; and a mix under a byte budget.

A layer's V may bear 4 bits where its K does not. The cost of a mix is predicted as the sum of its parts; that is an
assumption, so a chosen mix is scored itself.
Legend: T = token of a window, H = hidden_size.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvlab.accuracy.scoring import CHUNK, Window, kl_divergence, log_probabilities, with_scales
from kvlab.accuracy.statistics import block_bootstrap
from kvlab.kv.formats import KVFormat, kv_format
from kvlab.model import rope

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from kvlab.model.decoder import Decoder

SIDES = ("K", "V")
SIZED_AT = 4096                 # tokens at which bytes per token are stated: tails and started groups count little


def sensitivity(decoder: Decoder, chosen: Sequence[Window], fmt: str, *, layers: Sequence[int] | None = None,
                calibration_ids: Tensor | None = None,
                told: Callable[[str], None] = lambda stage: None) -> pd.DataFrame:
    """KL to the fp32 cache with one layer's K or V in that format and everything else in fp32; a line for each.

    Columns: layer, side, kv_format, kl, low, high, n, bytes_per_token (of that layer's side). Each is computed from the
    hidden state before its layer, since nothing changes earlier. The reference's log-probabilities of one window are
    kept (512 tokens × 49,152: 96 MiB). calibration_ids: [tokens], for a format with static scales.
    Raises ValueError where NaN or infinity turns up, naming window, layer and token.
    """
    import pandas as pd
    if not chosen:
        raise ValueError("there are no windows to score; see windows(document, ids)")
    depth = decoder.config.num_layers
    layers = range(depth) if layers is None else layers
    if wrong := [layer for layer in layers if not 0 <= layer < depth]:
        raise ValueError(f"layer {wrong[0]} is out of range; {decoder.name or 'this decoder'} has layers 0 … "
                         f"{depth - 1}")
    exact, formats = kv_format("fp32"), with_scales(decoder, [fmt] * depth, calibration_ids, chosen)
    values: dict[tuple[int, str], list[float]] = {(layer, side): [] for layer in layers for side in SIDES}
    for one in chosen:
        where = f"{one.document}, window {one.index}"
        before, final_TH = _traced(decoder, one.ids_T, where)
        exact_TV = list(_chunks(decoder, one, final_TH))
        for layer, side in values:
            told(f"{one.document}, layer {layer}, {side}")
            mixed = [*[exact] * layer, one_side(formats[layer], side), *[exact] * (depth - layer - 1)]
            state_TH = _resumed(decoder, before[layer], layer, mixed, f"{where}, {side} of layer {layer} in {fmt}")
            values[layer, side] += [nats for p_CV, q_CV in zip(exact_TV, _chunks(decoder, one, state_TH))
                                    for nats in kl_divergence(p_CV, q_CV).tolist()]
    labels = [(one.document, one.index) for one in chosen for _ in one.ids_T]
    rows = []
    for (layer, side), kl in values.items():
        found = block_bootstrap(kl, [d for d, _ in labels], [w for _, w in labels])
        rows.append(dict(layer=layer, side=side, kv_format=fmt, kl=found.value, low=max(0.0, found.low),
                         high=found.high, n=found.n, bytes_per_token=side_bytes(decoder, layer, side, fmt)))
    return pd.DataFrame(rows)


def one_side(fmt: KVFormat | str, side: str) -> KVFormat:
    """K (or V) in that format, the other in fp32."""
    fmt, exact = kv_format(fmt) if isinstance(fmt, str) else fmt, kv_format("fp32")
    name = fmt.name.partition("+")
    if side == "K":
        return KVFormat(f"{name[0]}+fp32", fmt.k, exact.v)
    return KVFormat(f"fp32+{name[2] or name[0]}", exact.k, fmt.v)


def side_bytes(decoder: Decoder, layer: int, side: str, name: str) -> float:
    """Bytes per token that K or V of one layer takes in that format, at 4096 tokens, scales included."""
    shape = decoder.config.shape(layer)
    other = shape.num_kv_heads * (shape.v_dim if side == "K" else shape.head_dim) * 4
    return one_side(name, side).nbytes(SIZED_AT, shape) / SIZED_AT - other


@dataclass(frozen=True)
class Mix:
    """A format for each layer ("K's+V's"), its bytes per token, and the KL that the sum of its parts predicts."""
    formats: tuple[str, ...]
    bytes_per_token: float
    predicted_kl: float


def mix(measured: pd.DataFrame, bytes_per_token: float) -> Mix:
    """The formats of each layer's K and V within a budget of bytes per token, greedily by KL saved per byte.

    measured: lines of `sensitivity` for two formats or more. All begin in their smallest format; then the change that
    saves most KL per byte among those that still fit is made, until none does. KL of different layers is added: an
    assumption, so score the mix. Refused (ValueError): a budget below the smallest formats', one format alone.
    """
    sites = {site: lines.sort_values("bytes_per_token", kind="stable").to_dict("records")
             for site, lines in measured.groupby(["layer", "side"])}
    if min(map(len, sites.values()), default=0) < 2:
        raise ValueError("a mix needs sensitivities of two formats or more for each layer's K and V")
    now = {site: lines[0] for site, lines in sites.items()}
    used = sum(line["bytes_per_token"] for line in now.values())
    if used > bytes_per_token:
        raise ValueError(f"a budget of {bytes_per_token:g} bytes per token is below the {used:g} that the smallest "
                         "formats take; allow more, or measure a smaller format")
    while True:
        better = [((now[site]["kl"] - line["kl"]) / more, more, site, line) for site, lines in sites.items()
                  for line in lines if (more := line["bytes_per_token"] - now[site]["bytes_per_token"]) > 0
                  and used + more <= bytes_per_token and line["kl"] < now[site]["kl"]]
        if not better:
            break
        _, more, site, line = max(better, key=lambda change: change[0])
        now[site], used = line, used + more
    layers = sorted({layer for layer, _ in now})
    return Mix(tuple(f"{now[layer, 'K']['kv_format']}+{now[layer, 'V']['kv_format']}" for layer in layers), used,
               sum(line["kl"] for line in now.values()))


@torch.no_grad()
def _traced(decoder: Decoder, ids_T: Tensor, where: str) -> tuple[list[Tensor], Tensor]:
    """Hidden states before each layer with an fp32 cache, and the final ones."""
    before: list[Tensor] = []
    x_TH = decoder.weights["model.embed_tokens.weight"][ids_T.to(decoder.device)]
    final_TH = _resumed(decoder, x_TH, 0, ["fp32"] * decoder.config.num_layers, where, before)
    return before, final_TH


@torch.no_grad()
def _resumed(decoder: Decoder, x_TH: Tensor, first: int, formats, where: str,
             before: list[Tensor] | None = None) -> Tensor:
    """Final hidden states from those before layer `first`; `before` is filled with those before each layer."""
    cache = decoder.teacher(formats)
    cache.begin([len(x_TH)], [0])
    cos_TD, sin_TD = rope.tables(decoder.config, len(x_TH), decoder.device)
    for layer in range(first, decoder.config.num_layers):
        if before is not None:
            before.append(x_TH)
        x_TH = decoder.block(layer, x_TH, cos_TD, sin_TD, cache)
        if not bool((finite_TH := x_TH.isfinite()).all()):
            token = int((~finite_TH).any(1).nonzero()[0])
            raise ValueError(f"{where}: layer {layer} of {decoder.name or 'the decoder'} gives NaN or infinity, first "
                             f"at token {token} of {len(x_TH)}; its weights, or the KV format, do not fit")
    return decoder._norm(x_TH, "model.norm")


def _chunks(decoder: Decoder, one: Window, state_TH: Tensor) -> Iterator[Tensor]:
    """Log-probabilities after each token of a window, few tokens at a time."""
    with torch.no_grad():
        for position_C in torch.arange(len(state_TH)).split(CHUNK):
            yield log_probabilities(decoder, one, state_TH, position_C)
