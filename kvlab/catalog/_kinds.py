"""Which kind each layer is: every key that public configs say it with, as one list of kinds per model.

Kinds: full, sliding, chunked, linear (a recurrent state and no KV), both (full attention and a recurrent state in one
layer), none (caches nothing: an MLP or expert block, a layer that reuses another's K and V). A value that is not in
the tables here is refused: a guess would be wrong by the whole layer.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

from kvlab.catalog._facts import NAMES, Facts, plain
from kvlab.catalog._types import ALL_SLIDE, GLOBAL_EVERY, SWITCHED

WORDS = {
    "full": ("full_attention", "full", "attention", "global_attention", "global", "*", "G", "indexed_attention",
             "deepseek_sparse_attention", "minimax_m3_sparse"),
    "sliding": ("sliding_attention", "sliding", "sliding_window", "local_attention", "local", "L"),
    "chunked": ("chunked_attention", "chunked"),
    "linear": ("linear_attention", "mamba", "mamba2", "recurrent", "kda", "M"),
    "none": ("moe", "mlp", "conv", "-", "E"),
}
KIND_OF = {word: kind for kind, words in WORDS.items() for word in words}


def kinds(facts: Facts, layers: int) -> list[str]:
    """The kind of every layer, first to last. Refused: unknown values, contradictions, keys that say too little."""
    said = {key: found for key, read in READERS.items() if (found := read(facts, key, layers)) is not None}
    if said:
        key, pattern = next(iter(said.items()))
        for other, found in said.items():
            if found != pattern:
                layer = next(i for i, (a, b) in enumerate(zip(pattern, found)) if a != b)
                raise facts.wrong(f"{key} makes layer {layer} {pattern[layer]}, {other} makes it {found[layer]}; "
                                  "the two contradict each other")
    else:
        pattern = _by_type(facts, layers)
    return _shared(facts, pattern)


def words(facts: Facts, key: str, layers: int) -> list[str] | None:
    """A list with a word per layer."""
    found = facts.items(key, layers)
    return None if found is None else [_kind(facts, key, word) for word in found]


def letters(facts: Facts, key: str, layers: int) -> list[str] | None:
    """A string with a letter per layer: M recurrent, * attention, - and E no cache."""
    found = facts.text(key)
    if not found:
        return None
    if len(found) != layers:
        raise facts.wrong(f"{key} has {len(found):,} letters for {layers:,} layers; one of the two is wrong")
    return [_kind(facts, key, letter) for letter in found]


def turns(facts: Facts, key: str, layers: int) -> list[str] | None:
    """Local and global layers by turns: a number n (every n-th is global), or letters or words that are repeated.

    Without meaning where the window itself is there and switched off.
    """
    value = facts.get(key)
    if "sliding_window" in facts.config and not facts.get("sliding_window"):
        return None
    if isinstance(value, str) or isinstance(value, list) and all(isinstance(word, str) for word in value) and value:
        return repeated(facts, key, [_kind(facts, key, word) for word in value], layers) if value else None
    if isinstance(value, list):                         # GGUF: a truth value per layer
        return flags("sliding", "full")(facts, key, layers)
    return every("sliding")(facts, key, layers)


def every(other: str) -> Callable[[Facts, str, int], list[str] | None]:
    """A number n: layers n, 2n, … are full, those between are of the other kind."""
    def read(facts: Facts, key: str, layers: int) -> list[str] | None:
        n = facts.number(key, 0)
        return ["full" if (layer + 1) % n == 0 else other for layer in range(layers)] if n else None
    return read


def flags(one: str, zero: str) -> Callable[[Facts, str, int], list[str] | None]:
    """A list with 0 or 1 (or false and true) per layer."""
    def read(facts: Facts, key: str, layers: int) -> list[str] | None:
        found = facts.items(key, layers)
        if found is None:
            return None
        if any(value not in (0, 1) for value in found):
            raise facts.wrong(f"{key} holds other values than 0 and 1, whose layer kinds kvlab does not know")
        return [one if value else zero for value in found]
    return read


def repeated(facts: Facts, key: str, turn: Sequence[str], layers: int) -> list[str]:
    return [turn[layer % len(turn)] for layer in range(layers)]


def block_types(facts: Facts, key: str, layers: int) -> list[str] | None:
    """Griffin's turns of recurrent blocks and local attention."""
    found = facts.items(key)
    turn = [_kind(facts, key, word) for word in found or ()]
    return repeated(facts, key, ["sliding" if kind == "full" else kind for kind in turn], layers) if turn else None


def period(facts: Facts, key: str, layers: int) -> list[str] | None:
    """Jamba: layer i is attention where i mod attn_layer_period is attn_layer_offset."""
    n = facts.number(key, 0)
    if not n:
        return None
    offset = facts.need("attn_layer_offset", 0)
    if offset >= n:
        raise facts.wrong(f"attn_layer_offset {offset} must be below attn_layer_period {n}")
    return ["full" if layer % n == offset else "linear" for layer in range(layers)]


def groups(facts: Facts, key: str, layers: int) -> list[str] | None:
    """Ling and Ring: in each whole group of n layers the last attends; layers after the last whole group do all."""
    if not facts.text("model_type").startswith(("bailing_moe_linear", "bailing_hybrid")):
        if facts.get(key):
            raise facts.wrong(f"{key} groups its layers in a way kvlab does not know")
        return None
    n = facts.need(key)
    return ["full" if (layer + 1) % n == 0 or layer >= layers // n * n else "linear" for layer in range(layers)]


def indices(facts: Facts, key: str, layers: int) -> list[str] | None:
    """The numbers of the attention layers, counted from 0."""
    found = facts.numbers(key, most=layers - 1)
    rest = "none" if key == "full_attn_idxs" else "linear"          # LFM2's other layers are short convolutions
    return None if found is None else _marked(found, "full", rest, layers)


def _marked(numbers: list[int], marked: str, rest: str, layers: int) -> list[str]:
    chosen = set(numbers)
    return [marked if layer in chosen else rest for layer in range(layers)]


def crossed(facts: Facts, key: str, layers: int) -> list[str] | None:
    """The numbers of the layers that attend to images only; they cache no token of the text."""
    found = facts.numbers(key, most=layers - 1)
    if not found:
        return None
    facts.assume("the K and V of images, in the cross-attention layers, are not counted")
    return _marked(found, "none", "full", layers)


def kimi(facts: Facts, key: str, layers: int) -> list[str] | None:
    """Kimi Linear: full_attn_layers and kda_layers, counted from 1, share the layers out."""
    inner = facts.table(key)
    if inner is None:
        return None
    full, linear = (inner.numbers(name, least=1, most=layers) for name in ("full_attn_layers", "kda_layers"))
    if full is None or linear is None or sorted([*full, *linear]) != list(range(1, layers + 1)):
        raise inner.wrong(f"full_attn_layers and kda_layers must name each of the {layers:,} layers once")
    return _marked([layer - 1 for layer in full], "full", "linear", layers)


def gpt_neo(facts: Facts, key: str, layers: int) -> list[str] | None:
    """[[["global", "local"], 12]]: words and how often they are repeated."""
    found = facts.items(key)
    if found is None:
        return None
    pattern: list[str] = []
    for part in found:
        if not (isinstance(part, list) and len(part) == 2 and isinstance(part[0], list) and type(part[1]) is int
                and 0 <= part[1] <= layers and len(part[0]) * part[1] <= layers):
            raise facts.wrong(f"{key} must hold pairs of a list of words and a number")
        pattern += [_kind(facts, key, word) for word in part[0]] * part[1]
        if len(pattern) > layers:
            break
    if len(pattern) != layers:
        raise facts.wrong(f"{key} does not describe {layers:,} layers")
    return pattern


def chunks(facts: Facts, key: str, layers: int) -> list[str] | None:
    """Llama 4: layers with rotary positions see their chunk, those without see everything.

    no_rope_layers has 1 for a layer WITH rotary positions; absent or empty, every no_rope_layer_interval-th has none.
    """
    if not facts.number(key, 0) or facts.get("hybrid_layer_pattern") is not None:
        return None
    rotary = facts.numbers("no_rope_layers", most=1)
    if rotary:
        return flags("chunked", "full")(facts, "no_rope_layers", layers)
    n = facts.number("no_rope_layer_interval")
    if n is None:
        if not facts.text("model_type").startswith("llama4"):
            raise facts.wrong(f"{key} says that layers see chunks, and no key says which layers")
        n = 4
        facts.assume("every 4th layer is global (Llama 4's own pattern; the config names none)")
    return ["full" if (layer + 1) % n == 0 else "chunked" for layer in range(layers)]


def blocks(facts: Facts, key: str, layers: int) -> list[str] | None:
    """Nemotron NAS: one entry per layer; attention that was removed or made linear caches nothing."""
    found = facts.items(key, layers)
    if found is None:
        return None
    pattern = []
    for entry in found:
        block = Facts({"attention": entry.get("attention") if isinstance(entry, dict) else None},
                      f"{facts.name}: {key}").table("attention")
        if block is None:
            raise facts.wrong(f"{key} has a layer without attention, which kvlab does not know")
        removed = [block.flag(name) for name in ("no_op", "replace_with_linear")]
        if not any(removed) and (block.get("window_length") or block.get("sparsify")):
            raise facts.wrong(f"{key} has a layer with window_length or sparsify, which kvlab does not know")
        pattern.append("none" if any(removed) else "full")
    return pattern


def windows(facts: Facts, key: str, layers: int) -> list[str] | None:
    """A window per layer, null or 0 for the whole context."""
    if not isinstance(facts.get(key), list):
        return None
    found = facts.items(key, layers)
    if not all(value is None or type(value) is int and -1 <= value <= 2**40 for value in found):
        raise facts.wrong(f"{key} must hold a window in tokens, 0 or null per layer")
    return ["sliding" if value and value > 0 else "full" for value in found]


READERS: dict[str, Callable[[Facts, str, int], list[str] | None]] = {
    "layer_types": words, "layers_block_type": words, "attention_layers": words, "attention_types": gpt_neo,
    "hybrid_override_pattern": letters, "hybrid_layer_pattern": flags("sliding", "full"),
    "attn_type_list": flags("full", "linear"), "block_types": block_types, "_block_types": block_types,
    "sliding_window_pattern": turns, "_sliding_window_pattern": turns,
    "global_attn_every_n_layers": every("sliding"), "global_attn_every_n": every("sliding"),
    "full_attention_interval": every("linear"),
    "attn_layer_period": period, "layer_group_size": groups, "attn_layer_indices": indices, "full_attn_idxs": indices,
    "cross_attention_layers": crossed,
    "linear_attn_config": kimi, "attention_chunk_size": chunks, "block_configs": blocks,
    "sliding_window": windows, "attention_window": windows,
}


# Sizes of a recurrent state: some layer must have it.
RECURRENT = ("mamba_d_state", "mamba_num_heads", "mamba_n_heads", "ssm_state_size", "state_size", "ssm_inner_size",
             "linear_num_value_heads", "linear_num_heads", "lru_width", "conv_L_cache")


def _kind(facts: Facts, key: str, word: object) -> str:
    if not isinstance(word, str) or word not in KIND_OF:
        raise facts.wrong(f"{key} names a layer kind {word!r:.60} that kvlab does not know; it knows "
                          f"{', '.join(w for words_ in WORDS.values() for w in words_)}")
    return KIND_OF[word]


def _by_type(facts: Facts, layers: int) -> list[str]:
    """The pattern that a model type has of its own, for configs without a key for it."""
    kind = facts.text("model_type")
    window = facts.fact("window")
    recurrent = [key for key in RECURRENT if facts.get(key)]
    if recurrent and kind not in ("falcon_h1", "mamba", "mamba2", "falcon_mamba"):
        raise facts.wrong(f"it has {recurrent[0]}, and nothing says which layers are recurrent; add layer_types, a "
                          "word per layer")
    if kind in GLOBAL_EVERY and window:
        n = GLOBAL_EVERY[kind]
        facts.assume(f"one layer in {n} is global ({kind}'s own pattern; the config names none)")
        return ["full" if (layer + 1) % n == 0 else "sliding" for layer in range(layers)]
    if kind == "falcon_h1":
        return ["both"] * layers
    if kind in ("mamba", "mamba2", "falcon_mamba"):
        return ["linear"] * layers
    on = facts.flag("use_sliding_window")               # false has taken the window away
    if on and not any(name in facts.config for name in NAMES["window"]):
        raise facts.wrong("use_sliding_window is true, and sliding_window is missing; add it, in tokens")
    if not window:
        return ["full"] * layers
    if on is None and kind.startswith(SWITCHED):
        facts.assume("sliding_window is switched off (use_sliding_window is not in the config; "
                     f"{plain(kind)}'s own default)")
        return ["full"] * layers
    if on:
        first = facts.need("max_window_layers", 0)
        return ["sliding" if layer >= first else "full" for layer in range(layers)]
    if kind not in ALL_SLIDE:
        raise facts.wrong(f"it has a window of {window} tokens, and nothing says which layers have it; "
                          "add layer_types, a word per layer")
    return ["sliding"] * layers


def _shared(facts: Facts, pattern: list[str]) -> list[str]:
    """Layers that reuse the K and V of an earlier one cache nothing."""
    reused = facts.number("num_kv_shared_layers", 0) or 0
    if reused >= len(pattern):
        raise facts.wrong(f"num_kv_shared_layers {reused:,} leaves none of the {len(pattern):,} layers with a cache")
    if reused:
        pattern = pattern[:-reused] + ["none"] * reused
    if facts.flag("use_cla"):
        n = facts.need("cla_share_factor")
        pattern = [kind if layer % n == 0 else "none" for layer, kind in enumerate(pattern)]
    return pattern
