"""What a config's model_type means beyond its keys. Facts of the architectures' public code, one table per question."""
from __future__ import annotations

from kvlab.catalog._facts import NAMES

# Decoders in which every layer keeps all tokens unless a key that kvlab reads says otherwise.
PLAIN = frozenset("""
    apertus arcee arctic baichuan bailing_moe bloom bitnet chatglm codegen cohere codeshell dbrx deepseek deci
    deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5 ernie4_5_moe exaone falcon flex_olmo gemma glm glm4 glm4_moe
    glm_moe_dsa gpt2 gpt_bigcode gpt_neox gptj granite granitemoe granitemoeshared grok-1 helium hunyuan
    hunyuan_v1_dense hunyuan_v1_moe internlm internlm2 internlm3 jais jetmoe kimi_k2 llama longcat_flash mimo
    minicpm minicpm3 minimax_m2 minimax_m3 mpt nemotron nemotron-nas olmo olmo2 olmoe openelm opt orion persimmon
    phi phixtral qwen qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm stablelm_epoch step3_text xverse yi
    qwen2_vl_text qwen2_5_vl_text qwen3_vl_text qwen3_vl_moe_text glm4v_text glm4v_moe_text
""".split())

# sliding_window alone means: every layer has it.
ALL_SLIDE = frozenset({"mistral", "mixtral", "phi3", "phimoe", "phi4_multimodal", "phi4mm", "starcoder2", "ministral"})

# sliding_window means nothing unless use_sliding_window is true; then from layer max_window_layers on.
SWITCHED = ("qwen2", "qwen3", "mimo", "dots1")

# Local and global layers by turns where the config has no key for it: every n-th layer is global.
GLOBAL_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2, "cohere2": 4, "olmo3": 4}

KNOWN = PLAIN | ALL_SLIDE | set(GLOBAL_EVERY) | {"mamba", "mamba2", "falcon_mamba", "falcon_h1"}

# What a nested text config leaves out because it is the class's own default.
DEFAULTS = {
    "llama": dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000,
                  max_position_embeddings=2048),
    "mistral": dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
                    vocab_size=32000, max_position_embeddings=131072, sliding_window=4096),
    "gemma": dict(hidden_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=16, head_dim=256,
                  vocab_size=256000, max_position_embeddings=8192),
    "gemma2": dict(hidden_size=2304, num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4, head_dim=256,
                   vocab_size=256000, max_position_embeddings=8192, sliding_window=4096),
    "gemma3_text": dict(hidden_size=2304, num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4,
                        head_dim=256, sliding_window=4096, max_position_embeddings=131072),
}

# Keys that the class of a type fills in with a number of its own: (types, keys of which one must be there).
NEEDED = (
    (r"gemma4", ("global_head_dim", "per_layer_config")),
    (r"gemma4", ("attention_k_eq_v", "per_layer_config")),
    (r"gemma4", ("num_global_key_value_heads", "per_layer_config")),
    (r"mimo_v2", ("v_head_dim",)),
    (r"kimi_linear", ("linear_attn_config", "layer_types")),
    (r"nemotron-nas", ("block_configs",)),
    (r"mimo_v2", ("swa_num_key_value_heads", "per_layer_config")),
    (r"gemma3n", ("num_kv_shared_layers",)),
    (r"llama4", ("attention_chunk_size",)),
    (r"falcon$|gpt_bigcode", ("multi_query", "num_key_value_heads")),
    (r"falcon$", ("new_decoder_architecture", "num_key_value_heads")),
    (r"minimax(_text_01)?$", ("layer_types", "attn_type_list")),
    (r"axk[12]|deepseek_v[23]|glm4_moe_lite|glm_moe_dsa|kimi_k2|longcat_flash|minicpm3", ("kv_lora_rank",)),
    (r"afmoe|cohere2|cwm|exaone4|gemma[234]|gpt_oss|granite(moe)?_swa|laguna|mimo_v2|ministral$|mistral$|olmo3|vaultgemma",
     NAMES["window"]),
    (r"bamba|bitnet|ernie4_5|exaone|falcon_h1|gemma[234]|glm|gpt_oss|internlm3|jamba|laguna|lfm2|llama4|mimo_v2|minimax"
     r"|ministral|mistral|mixtral|nemotron_h|phi4_multi|phimoe|qwen3_|seed_oss|smollm3|starcoder2|vaultgemma",
     NAMES["kv_heads"]),
    (r"afmoe|cwm|deepseek_v4|ernie4_5$|gemma|glm4?$|gpt_oss|helium|internlm3|laguna|llama4|mimo_v2|minimax_m|ministral3"
     r"|nemotron_h|qwen3(_next|_5|_vl|$)|seed_oss|vaultgemma", NAMES["head_dim"]),
)

# Refused however plain their keys look: patterns of model types, and what they are.
REFUSED = {
    r"bert|^(clip|siglip)|^(data2vec-text|electra|ernie|ernie_m|flaubert|funnel|layoutlm\w*|longformer|mpnet|vit|xlm"
    r"|xmod)$":
        "an encoder, which keeps no KV cache",
    r"bart|pegasus|^(blenderbot\S*|m2m_100|marian|u?m?t5\S*|musicgen\S*|seamless_m4t\S*|whisper)$":
        "an encoder-decoder, whose cross-attention cache kvlab does not size",
    r"rwkv|^xlstm": "a recurrent model whose state kvlab does not know",
    r"^(phi4flash|plamo[23]|zamba2?|zaya\S*|hymba|minicpm_sala)$":
        "a hybrid whose layers share or mix caches in a way kvlab does not know",
}
