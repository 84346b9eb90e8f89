"""Which keys of a config could change what layers cache. Those that are on and not read make the reader refuse."""
from __future__ import annotations

import re
from collections.abc import Mapping

from kvlab.catalog._facts import NAMES, OF_KIND
from kvlab.catalog._kinds import READERS

READ = {*(name for names in NAMES.values() for name in names), *READERS, "num_kv_shared_layers", "use_cla",
        *(name for facts in OF_KIND.values() for names in facts.values() for name in names),
        "kv_lora_rank", "compress_ratios", "attn_config", "attention_other_setting", "per_layer_config",
        "ssm_inner_size"}

# Parts of names that sound like another kind of cache.
_SOUNDS = re.compile("|".join((
    "layer_types?$", "block_types?$", "layers_block", "pattern", "window", "sliding", "local", "global", "chunk",
    "(^|_)kv", "key_value", "key_head", "value_head", "head_dim", "linear_", "mamba", "ssm", "ssd", "conv", "recurren",
    "rwkv", "lru", "cla_", "share.*(layer|factor|cache|kv)", "yoco", "compress", "latent", "lora_rank", "cross_att",
    "attn_type", "attention_type", "attn_layer", "full_attn", "period", "interval", "delta", "hyena", "mla",
    "attention_groups", "layer_group", "(attn|attention)_every", "depth_attention", "memory", "loop", "cycle",
    "block_configs", "per_layer_config")))

# Names that sound so and say nothing of what a layer caches, or only together with a key that is read.
_HARMLESS = re.compile("|".join((
    # switches, numerics and training
    "use_cache|cache_implementation|chunk_size_feed_forward|cross_attention_hidden_size|add_cross_attention|local_files\\w*",
    "layer_norm_type|layernorm_compute\\w*|residual_in_fp32|kv_cache_(dtype|scheme)|qkv_\\w+|(key|value)_multiplier",
    # positions, experts, other modalities, further-token prediction
    "\\w*rope\\w*|partial_rotary\\w*|\\w*(expert|moe|mlp|vision|image|audio|video)\\w*|num_shared_\\w+|shared_\\w+|(num_)?mtp_\\w+",
    "vocab_size\\w*|hidden_size_per_layer_input",
    # heads and latents: read elsewhere, or not cached
    "multi_query(_attention)?|new_decoder_architecture|attention_k_eq_v|q_lora_rank|o_lora_rank|qk_(nope|rope)?_?head_dim",
    "mla_use_\\w+|use_bidirectional_attention|add_(swa|full)_attention_sink_bias|activation_\\w+",
    # which layers: read with another key
    "max_window_layers|use_sliding_window|attn_layer_offset|cla_share_factor",
    # sparse attention stores everything
    "index_head_dim|index_local_blocks|indexer_types|sparse_attention_config",
    # sizes of recurrent states and convolutions: read with the layers that have them
    "(mamba|ssm|lru|conv|linear_conv)_?\\w*|use_conv_bias|use_mamba_kernels|chunk_size",
    "linear_(num_heads|head_dim|num_key_heads|num_value_heads|key_head_dim|value_head_dim|lower_bound|a_log\\w*|dt_\\w*"
    "|allow\\w*)|short_conv_kernel_size|(full|linear)_attn_(alpha|beta)_factor")))


def unknown_keys(config: Mapping[str, object]) -> list[str]:
    """Keys that are on, sound like another kind of cache and are not read."""
    return sorted(key for key, value in config.items()
                  if not (value is None or value is False or value in (0, "", "none", [], {}))
                  and key not in READ and _SOUNDS.search(key) and not _HARMLESS.fullmatch(key))
