"""A ModelSpec from a model's config.json, layer kind by layer kind, read by name and never guessed. No transformers.

A key that says how layers cache and that is not known here is refused in words; a fact that is left out is either
derived by a rule that the spec names in `assumed`, or asked for.
"""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kvlab.catalog._facts import LIMITS, NAMES, Facts, plain
from kvlab.catalog._files import read_json
from kvlab.catalog._heads import Heads
from kvlab.catalog._keys import unknown_keys, without_off
from kvlab.catalog._kinds import READERS, kinds
from kvlab.catalog._states import state_bytes
from kvlab.catalog._types import DEFAULTS, KNOWN, NEEDED, REFUSED
from kvlab.shapes import LayerSpec, ModelSpec

NESTED = ("text_config", "llm_config", "language_config", "language_model_config", "thinker_config", "llm",
          "text_model", "decoder")


def read_config(path: Path) -> ModelSpec:
    """The model of a config.json.

    Refuses in one sentence what is not one, contradicts itself or is not known.
    Source: the file's own keys; what each means: the public code of the architectures, kind by kind.
    """
    return spec_of(read_json(path), str(path))


def spec_of(config: Mapping[str, object], name: str) -> ModelSpec:
    """The model that a config's keys and values describe; `name` stands in sentences and as the spec's name."""
    facts = without_off(_text_facts(Facts(config, name)))
    _refuse(facts)
    layers = _layer_count(facts)
    if facts.get("compress_ratios") is not None:
        return _compressed(facts, layers)
    pattern = kinds(facts, layers)
    heads = Heads(facts, layers, {"full", "sliding", "chunked", "both"} & set(pattern))
    groups = Counter(_layer(facts, heads, kind, layer) for layer, kind in enumerate(pattern))
    found = tuple(replace(layer, count=count) for layer, count in groups.items())
    _note_states(facts, found)
    _note_type(facts)
    return ModelSpec(name, found, heads.one("q_heads"), heads.one("kv_heads"), heads.one("head_dim"),
                     context=_context(facts), attention_type=attention_type(found), source=_source(facts),
                     assumed=tuple(facts.assumed))


def _layer_count(facts: Facts) -> int:
    if facts.text("model_type").startswith("longcat_flash"):
        if number := facts.number("num_layers", 1, LIMITS["layers"] // 2):
            return 2 * number                           # two attentions each; num_hidden_layers is that, or twice it
    layers = facts.fact("layers")
    if layers is None:
        block_types = facts.get("layers_block_type")    # configs of Nemotron 3 give the list alone
        if isinstance(block_types, list) and 0 < len(block_types) <= LIMITS["layers"]:
            return len(block_types)
    if not isinstance(layers, int):
        raise facts.wrong(f"the number of layers is missing; it needs one of: {', '.join(NAMES['layers'])}")
    return layers


def _source(facts: Facts) -> str:
    return f"{facts.name}, model_type {plain(facts.text('model_type')) or 'not given'}"


def _text_facts(facts: Facts) -> Facts:
    """The part of the config that describes the text decoder: nested under one of NESTED, or the config itself."""
    for _ in range(3):
        inside = [key for key in NESTED if isinstance(facts.get(key), dict) and facts.get(key)]
        if facts.flag("is_encoder_decoder") or not inside:
            break
        if len(inside) > 1:
            raise facts.wrong(f"it nests more than one text model ({', '.join(inside)}); give the config of one")
        if facts.get("talker_config"):
            facts.assume("the cache of the talker, a second decoder, is not counted")
        if (inner := facts.table(inside[0])) is None:
            break
        kind = inner.text("model_type")
        missing = {key: value for key, value in DEFAULTS.get(kind, {}).items() if key not in inner.config}
        for key, value in missing.items():
            if key != "vocab_size":
                inner.assume(f"{key} = {value} ({kind}'s own default, which a nested config leaves out)")
        inner.config = {**missing, **inner.config}
        facts = inner
    return _with_attn_config(facts)


def _with_attn_config(facts: Facts) -> Facts:
    """MPT and DBRX nest the KV heads under attn_config, and MPT a window, -1 for none."""
    attention = facts.table("attn_config")
    if attention is None:
        return facts
    if attention.get("sliding_window_size") not in (None, -1):
        raise attention.wrong("sliding_window_size is on, which kvlab does not know here")
    kv_heads = 1 if attention.text("attn_type") == "multiquery_attention" else attention.number("kv_n_heads")
    facts.config = {**facts.config, **({"kv_n_heads": kv_heads} if kv_heads else {})}
    return facts


def _refuse(facts: Facts) -> None:
    kind = facts.text("model_type")
    why = next((why for name, why in REFUSED.items() if re.search(name, kind)), None)
    if why:
        raise facts.wrong(f"model_type {plain(kind)} is {why}")
    if facts.flag("is_encoder_decoder"):
        raise facts.wrong("it is an encoder-decoder (is_encoder_decoder), whose cross-attention cache kvlab does not "
                          "size; give the config of a decoder")
    if "vocab_size" not in facts.config and ("patch_size" in facts.config or "image_size" in facts.config):
        raise facts.wrong("it describes images (patch_size, image_size) and no text; give the config of a text decoder")
    for types, keys in NEEDED:
        if re.match(types, kind) and not any(key in facts.config for key in keys):
            raise facts.wrong(f"{keys[0]} is missing, for which {plain(kind)} has a number of its own that kvlab does "
                              f"not guess; it needs one of: {', '.join(keys)}")
    if facts.flag("use_mla") and not facts.number("kv_lora_rank", 0):
        raise facts.wrong("use_mla is true, and kv_lora_rank is missing; add it, or set use_mla to false")
    latent = [key for key in ("qk_rope_head_dim", "qk_nope_head_dim") if facts.number(key, 0)]
    if latent and not facts.number("kv_lora_rank", 0) and facts.get("compress_ratios") is None:
        raise facts.wrong(f"it has {latent[0]}, a part of latent attention, and no kv_lora_rank; add the other part")
    unknown = unknown_keys(facts.config)
    if unknown:
        raise facts.wrong(f"it has {', '.join(map(plain, unknown[:5]))}, which may change what layers cache and which "
                          "kvlab does not know; its layers are not guessed")


def _layer(facts: Facts, heads: Heads, kind: str, layer: int) -> LayerSpec:
    """The cache of one layer."""
    if kind == "none":
        return LayerSpec("linear", 1)
    if kind == "linear":
        return LayerSpec("linear", 1, state_bytes=state_bytes(facts))
    q_heads, kv_heads, head_dim = (heads.at(fact, kind, layer) or 0 for fact in ("q_heads", "kv_heads", "head_dim"))
    v_head_dim = heads.at("v_head_dim", kind, layer)
    state = state_bytes(facts) if kind == "both" else 0
    latent = facts.number("kv_lora_rank", 0)
    if latent:
        if kind != "full":
            raise facts.wrong(f"a {kind} layer with a latent (kv_lora_rank) is a kind that kvlab does not know")
        return LayerSpec("mla", 1, q_heads, 1, latent + facts.need("qk_rope_head_dim", 0), latent)
    if not kv_heads:                                    # a list of heads has 0 where there is no attention
        return LayerSpec("linear", 1, state_bytes=0)
    window = None
    if kind in ("sliding", "chunked"):
        window = facts.fact("window" if kind == "sliding" else "chunk", heads.layers)
        window = window[layer] if isinstance(window, list) else window
        if not window:
            raise facts.wrong(f"layer {layer} is {kind}, but the window is missing or switched off; "
                              f"give {NAMES['window' if kind == 'sliding' else 'chunk'][0]} in tokens")
    try:
        return LayerSpec("full" if kind == "both" else kind, 1, q_heads, kv_heads, head_dim,
                         None if v_head_dim == head_dim else v_head_dim, window, state)
    except ValueError as error:
        raise facts.wrong(f"layer {layer}: {error}") from error


def _compressed(facts: Facts, layers: int) -> ModelSpec:
    """DeepSeek-V4: a shared latent of head_dim, of which each layer keeps one token in `ratio`, and a window."""
    heads = Heads(facts, layers, {"full"})
    ratios, width, window = facts.numbers("compress_ratios", layers), heads.values["head_dim"], facts.fact("window")
    q_heads = heads.one("q_heads")
    if not ratios or not isinstance(width, int) or not isinstance(window, int) or heads.values["kv_heads"] != 1:
        raise facts.wrong("compress_ratios needs head_dim, sliding_window and one KV head")
    if any(ratio and (width % ratio or width < ratio) for ratio in ratios):
        raise facts.wrong(f"compress_ratios must divide head_dim {width}")
    groups = Counter(
        LayerSpec("mla", 1, q_heads, 1, width // ratio, width // ratio, state_bytes=window * width * 2)
        if ratio else LayerSpec("linear", 1, state_bytes=window * width * 2) for ratio in ratios)
    return ModelSpec(facts.name, tuple(replace(layer, count=count) for layer, count in groups.items()),
                     q_heads, 1, width, context=_context(facts),
                     attention_type="MQA-latent + compressed-sparse", source=_source(facts),
                     assumed=tuple(facts.assumed),
                     approximate="the compressed KV is written as a latent divided by the ratio, the window of "
                     f"{window} tokens as constant bf16 state; the indexer's cache is not counted")


def _context(facts: Facts) -> int | None:
    found = facts.fact("context")
    return found if isinstance(found, int) else None


def _note_states(facts: Facts, layers: tuple[LayerSpec, ...]) -> None:
    if any(layer.state_bytes for layer in layers):
        facts.assume("convolution states of a few tokens are not counted")
    if facts.number("index_head_dim", 0):
        facts.assume("the sparse-attention indexer's own cache "
                     f"({facts.number('index_head_dim')} elements per token and layer) is not counted")


def _note_type(facts: Facts) -> None:
    kind = facts.text("model_type")
    if kind not in KNOWN and not any(facts.get(key) is not None for key in READERS):
        facts.assume(f"a plain decoder in all layers (model_type {plain(kind) or 'is missing'}: not known to kvlab, "
                     "and no key says otherwise)")


def attention_type(layers: tuple[LayerSpec, ...]) -> str:
    """MHA, GQA, MQA or MLA, with what windows, chunks and recurrent states stand beside it."""
    attending = [layer for layer in layers if layer.kind != "linear"]
    named = dict.fromkeys("MLA" if layer.kind == "mla" else "MQA" if layer.num_kv_heads == 1 < layer.num_q_heads
                          else "MHA" if layer.num_kv_heads == layer.num_q_heads else "GQA" for layer in attending)
    parts = [" / ".join(named)] if named else []
    parts += [name for kind, name in (("sliding", "SWA"), ("chunked", "chunked")) if any(
        layer.kind == kind for layer in layers)]
    if any(layer.state_bytes for layer in layers):
        parts.append("recurrent state")
    return " + ".join(parts) or "no attention"
