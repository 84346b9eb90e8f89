"""What a layer of a transformers model asks of its attention function, and what of that kvlab does not compute."""
from __future__ import annotations

from collections.abc import Mapping

# what transformers hands on to attention and what changes nothing here: positions are in q and k already
HARMLESS = {"position_ids", "cache_position", "use_cache"}


def layer_of(module, dropout: float, more: Mapping[str, object], doing: str) -> int:
    """The layer's number. ValueError, one sentence, where it asks for what is not plain causal attention.

    more: the keywords of the attention call beside its scale, window and softcap. doing: whose sentence it is.
    """
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise ValueError(f"{type(module).__name__} has no layer_idx; {doing} takes decoders that number theirs")
    if dropout:
        raise ValueError(f"layer {layer} asks for dropout in its attention; call model.eval() first")
    if False in (more.get("is_causal"), getattr(module, "is_causal", None)) or getattr(module, "is_cross_attention",
                                                                                       False):
        raise ValueError(f"layer {layer} asks for cross or bidirectional attention; {doing} takes causal decoders")
    odd = sorted(name for name, value in more.items()
                 if value is not None and value is not False and name not in HARMLESS | {"is_causal"})
    if odd:
        raise ValueError(f"layer {layer} asks attention for {', '.join(odd)}, which no kvlab variant computes")
    return layer
