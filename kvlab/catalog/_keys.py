"""Which keys of a config could change what layers cache: those that are off are taken out, those not known refused."""
from __future__ import annotations

from collections.abc import Mapping

from kvlab.catalog._facts import LONGEST, NAMES, OF_KIND, Facts, plain
from kvlab.catalog._kinds import READERS

READ = {*(name for names in NAMES.values() for name in names), *READERS, "num_kv_shared_layers", "use_cla", "use_mla",
        *(name for facts in OF_KIND.values() for names in facts.values() for name in names),
        "kv_lora_rank", "compress_ratios", "attn_config", "attention_other_setting", "per_layer_config",
        "ssm_inner_size"}

_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_WINDOW = NAMES["window"]
_WIDTHS = {*NAMES["head_dim"], *NAMES["v_head_dim"], *(name for facts in OF_KIND.values() for fact in (
    "head_dim", "v_head_dim") for name in facts.get(fact, ()))}

# Keys that count for nothing where the switch is false.
SWITCHES = {"use_mla": _LATENT, "use_sliding_window": _WINDOW, "use_swa": _WINDOW, "use_cla": ("cla_share_factor",)}
# What a switch that is not known could switch off: parts of its name, and the keys.
_TOPICS = ((("mla", "latent"), _LATENT), (("sliding", "window", "swa", "local_att"), _WINDOW),
           (("chunked", "chunk_att"), NAMES["chunk"]),
           (("kv_shar", "share_kv", "shared_kv", "kv_reuse"), ("num_kv_shared_layers",)))

# Parts of names that sound like another kind of cache.
_SOUNDS = """
    layer_type block_type layers_block pattern window sliding swa local global chunk _kv key_value key_head
    value_head head_dim linear_ mamba ssm ssd conv recurren rwkv lru cla_ yoco compress latent lora_rank cross_att
    attn_type attention_type attn_layer full_attn period interval delta hyena mla attention_groups layer_group
    attn_every attention_every depth_attention memory loop cycle reuse block_configs per_layer_config
""".split()

# Names that sound so and say nothing of what a layer caches, or only together with a key that is read.
_HARMLESS = set("""
    use_cache cache_implementation chunk_size_feed_forward cross_attention_hidden_size add_cross_attention
    layer_norm_type residual_in_fp32 key_multiplier value_multiplier hidden_size_per_layer_input compression_config
    kv_cache_dtype kv_cache_scheme
    multi_query multi_query_attention new_decoder_architecture attention_k_eq_v q_lora_rank o_lora_rank qk_head_dim
    qk_nope_head_dim qk_rope_head_dim use_bidirectional_attention add_swa_attention_sink_bias
    add_full_attention_sink_bias
    max_window_layers use_sliding_window use_swa attn_layer_offset cla_share_factor
    sparse_attention_config dense_attention_every_n_layers
    use_conv_bias use_mamba_kernels chunk_size short_conv_kernel_size full_attn_alpha_factor full_attn_beta_factor
    linear_num_heads linear_head_dim linear_num_key_heads linear_num_value_heads linear_key_head_dim
    linear_value_head_dim linear_lower_bound linear_attn_alpha_factor linear_attn_beta_factor
""".split())
# … by their beginning: numerics, other parts of the model, the sparse attention that stores everything, states' sizes
_HARMLESS_STARTS = ("local_files", "layernorm_", "qkv_", "num_shared_", "shared_", "mtp_", "num_mtp_", "vocab_size",
                    "mla_use_", "mla_scale_", "activation_", "index_", "indexer_", "blocksparse_", "mamba", "ssm",
                    "lru", "conv", "linear_conv", "linear_a_log", "linear_dt_", "linear_allow")
_HARMLESS_WORDS = {"rope", "mrope", "rotary", "expert", "experts", "moe", "mlp", "vision", "image", "audio", "video"}
# … with one value only
_HARMLESS_VALUES = {"full_attn_mod": (1,), "block_type": ("sequential", "llama"), "compression_ratio": (1,)}


def without_off(facts: Facts) -> Facts:
    """The same facts, with null for what is off: a window of -1 or 0, a width of 0, keys whose own switch is false.

    Refuses keys longer than LONGEST or more than 10,000 of them, and a switch that is off, is not known and may belong
    to a key that is on.
    """
    if len(facts.config) > 10_000 or any(len(key) > LONGEST for key in facts.config):
        raise facts.wrong(f"it has more than 10,000 keys, or one of more than {LONGEST} characters; no model's config "
                          "has that")
    off = {key for switch, keys in SWITCHES.items() if facts.flag(switch) is False for key in keys}
    off |= {key for names, nothing in (((*_WINDOW, *NAMES["chunk"]), (0, -1)), (_WIDTHS, (0,))) for key in names
            if type(facts.get(key)) in (int, bool) and facts.get(key) in nothing}
    config = {**facts.config, **{key: None for key in off if key in facts.config or key in _LATENT}}
    for key, value in config.items():
        if value is False and key not in SWITCHES and (key.startswith(("use_", "enable_", "is_", "with_"))
                                                       or key.endswith("_enabled")):
            on = [name for words, names in _TOPICS if any(word in key for word in words) for name in names
                  if config.get(name)]
            if on:
                raise facts.wrong(f"{plain(key)} is false, and kvlab does not know whether it switches {on[0]} off")
    found = Facts(config, facts.name)
    found.assumed = facts.assumed
    return found


def unknown_keys(config: Mapping[str, object]) -> list[str]:
    """Keys that are on, sound like another kind of cache and are not read."""
    return sorted(key for key, value in config.items()
                  if not (value is None or value is False or value in (0, "", "none", [], {}))
                  and key not in READ and _sounds(key) and not _harmless(key, value))


def _sounds(key: str) -> bool:
    return (key.startswith("kv") or any(part in key for part in _SOUNDS)
            or "share" in key and any(part in key for part in ("layer", "factor", "cache", "kv")))


def _harmless(key: str, value: object) -> bool:
    return (key in _HARMLESS or key.startswith(_HARMLESS_STARTS) or not _HARMLESS_WORDS.isdisjoint(key.split("_"))
            or value in _HARMLESS_VALUES.get(key, ()))
