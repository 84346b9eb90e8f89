"""A config.json of every attention kind, written from public facts, gives the layers that the catalogue has or that
are counted by hand; keys that are off are ignored, and what is not known is refused in words."""
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.catalog._files import CONFIG_LIMIT
from kvlab.catalog._keys import READ
from kvlab.catalog._kinds import KIND_OF
from kvlab.catalog.config import read_config, spec_of
from kvlab.catalog.models import model
from kvlab.kv.sizing import kv_bytes, size, state_bytes
from kvlab.shapes import LayerSpec


def decoder(layers, q_heads, kv_heads, head_dim=None, **more):
    config = dict(num_hidden_layers=layers, hidden_size=q_heads * (head_dim or 128), num_attention_heads=q_heads,
                  num_key_value_heads=kv_heads, head_dim=head_dim, vocab_size=32000, **more)
    return {key: value for key, value in config.items() if value is not None}


def layers_of(spec):
    count = Counter()
    for layer in spec.layers:
        count[layer.kind, layer.num_q_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim, layer.window,
              layer.state_bytes] += layer.count
    return count


def turns(n, layers, one, other):
    """Every n-th layer is `one`, those between are `other`."""
    return [one if (layer + 1) % n == 0 else other for layer in range(layers)]


DEEPSEEK_V3 = dict(model_type="deepseek_v3", num_hidden_layers=61, hidden_size=7168, num_attention_heads=128,
                   num_key_value_heads=128, kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128,
                   qk_rope_head_dim=64, v_head_dim=128, max_position_embeddings=163840, vocab_size=129280,
                   num_nextn_predict_layers=1)
MIMO = decoder(48, 64, 4, 192, model_type="mimo_v2_flash", v_head_dim=128, sliding_window=128, sliding_window_size=128,
               attention_chunk_size=128, swa_num_attention_heads=64, swa_num_key_value_heads=8, swa_head_dim=192,
               swa_v_head_dim=128, max_position_embeddings=262144,
               hybrid_layer_pattern=[0 if layer in (0, 5, 11, 17, 23, 29, 35, 41, 47) else 1 for layer in range(48)])
GEMMA4 = dict(model_type="gemma4", text_config=decoder(
    30, 16, 8, 256, model_type="gemma4_text", global_head_dim=512, num_global_key_value_heads=2, attention_k_eq_v=True,
    num_kv_shared_layers=0, sliding_window=1024, max_position_embeddings=262144,
    layer_types=turns(6, 30, "full_attention", "sliding_attention")))
K3 = dict(model_type="kimi_k3", text_config={
    **DEEPSEEK_V3, "model_type": "kimi_linear", "num_hidden_layers": 93, "num_attention_heads": 96,
    "num_key_value_heads": 96, "max_position_embeddings": 1048576, "mla_use_nope": True, "linear_attn_config": dict(
        full_attn_layers=[*range(4, 93, 4), 93], head_dim=128, num_heads=96, short_conv_kernel_size=4,
        kda_layers=[layer for layer in range(1, 93) if layer % 4])})
QWEN35 = dict(model_type="qwen3_5_moe", text_config=decoder(
    40, 16, 2, 256, model_type="qwen3_5_moe_text", full_attention_interval=4, linear_num_value_heads=32,
    linear_num_key_heads=16, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
    mamba_ssm_dtype="float32", max_position_embeddings=262144,
    layer_types=turns(4, 40, "full_attention", "linear_attention")))
NANO = decoder(52, 32, 2, 128, model_type="nemotron_h", mamba_num_heads=64, mamba_head_dim=64, ssm_state_size=128,
               conv_kernel=4, expand=2, chunk_size=128, sliding_window=None, max_position_embeddings=262144,
               hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME")

# What the catalogue, from other sources, says of the same model.
KINDS = {
    "MHA": ("meta-llama/Llama-2-7b-hf", decoder(32, 32, 32, model_type="llama", max_position_embeddings=4096)),
    "GQA, window off": ("Qwen/Qwen2-72B", decoder(
        80, 64, 8, model_type="qwen2", use_sliding_window=False, sliding_window=131072, max_window_layers=80,
        max_position_embeddings=32768)),
    "MQA": ("tiiuae/falcon-7b", dict(model_type="falcon", n_layer=32, hidden_size=4544, n_head=71, num_kv_heads=71,
                                     multi_query=True, new_decoder_architecture=False, vocab_size=65024)),
    "falcon, new architecture": ("tiiuae/falcon-40b", dict(
        model_type="falcon", num_hidden_layers=60, hidden_size=8192, num_attention_heads=128, n_head_kv=8,
        multi_query=True, new_decoder_architecture=True, vocab_size=65024)),
    "MLA": ("deepseek-ai/DeepSeek-V3", DEEPSEEK_V3),
    "sliding": ("mistralai/Mistral-7B-v0.1", decoder(32, 32, 8, model_type="mistral", sliding_window=4096)),
    "local/global by number": ("google/gemma-3-27b-it", decoder(
        62, 32, 16, 128, model_type="gemma3_text", sliding_window=1024, sliding_window_pattern=6)),
    "local/global by type": ("google/gemma-2-9b", decoder(42, 16, 8, 256, model_type="gemma2", sliding_window=4096)),
    "local/global by list": ("openai/gpt-oss-20b", decoder(
        24, 64, 8, 64, model_type="gpt_oss", sliding_window=128,
        layer_types=turns(2, 24, "full_attention", "sliding_attention"))),
    "local/global, other heads": ("google/gemma-4-26B-A4B", GEMMA4),
    "K ≠ V width, groups of other names": ("XiaomiMiMo/MiMo-V2-Flash", MIMO),
    "chunked": ("meta-llama/Llama-4-Scout-17B-16E-Instruct", dict(model_type="llama4", text_config=decoder(
        48, 40, 8, 128, model_type="llama4_text", attention_chunk_size=8192, no_rope_layers=[]))),
    "hybrid linear": ("Qwen/Qwen3.5-35B-A3B", QWEN35),
    "hybrid SSM by letters": ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", NANO),
    "hybrid KDA + MLA": ("moonshotai/Kimi-K3", K3),
    "compressed sparse": ("deepseek-ai/DeepSeek-V4-Flash", decoder(
        43, 64, 1, 512, model_type="deepseek_v4", sliding_window=128, qk_rope_head_dim=64, num_nextn_predict_layers=1,
        compress_ratios=[0, 0, *[4, 128] * 20, 4, 0])),
    "block-sparse reads": ("MiniMaxAI/MiniMax-M3", decoder(
        60, 64, 4, 128, model_type="minimax_m3", sparse_attention_config=dict(use_sparse_attention=True))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_of_each_kind_gives_the_catalogues_layers(kind):
    name, config = KINDS[kind]
    spec, known = spec_of(json.loads(json.dumps(config)), "it"), model(name)
    assert layers_of(spec) == layers_of(known)
    for kv_len in (1, 129, 4097, 131072):
        for fmt in ("bf16", "int8/token"):
            assert kv_bytes(spec, kv_len, fmt) == kv_bytes(known, kv_len, fmt)
    assert state_bytes(spec) == state_bytes(known) and bool(spec.approximate) == bool(known.approximate)
    if "max_position_embeddings" in json.dumps(config):
        assert spec.context == known.context


# Layers counted by hand: (config, {(kind, KV heads, K width, V width, window, state): layers}).
BY_HAND = {
    "cross-layer sharing": (
        decoder(35, 8, 2, 256, model_type="gemma3n_text", sliding_window=512, num_kv_shared_layers=15,
                layer_types=turns(5, 35, "full_attention", "sliding_attention")),
        {("sliding", 2, 256, None, 512, 0): 16, ("full", 2, 256, None, None, 0): 4,
         ("linear", 0, 0, None, None, 0): 15}),
    "the last layers share": (
        decoder(4, 8, 2, 64, model_type="shares", sliding_window=512, num_kv_shared_layers=2,
                layer_types=["full_attention"] * 2 + ["sliding_attention"] * 2),
        {("full", 2, 64, None, None, 0): 2, ("linear", 0, 0, None, None, 0): 2}),
    "sharing factor on": (decoder(6, 8, 8, 64, model_type="hunyuan", use_cla=True, cla_share_factor=2),
                          {("full", 8, 64, None, None, 0): 3, ("linear", 0, 0, None, None, 0): 3}),
    "sharing factor off": (decoder(6, 8, 8, 64, model_type="hunyuan", use_cla=False, cla_share_factor=2),
                           {("full", 8, 64, None, None, 0): 6}),
    "per-layer heads in a list": (
        dict(model_type="openelm", num_transformer_layers=3, model_dim=1280, num_query_heads=[12, 12, 16],
             num_kv_heads=[3, 3, 4], head_dim=64, vocab_size=32000),
        {("full", 3, 64, None, None, 0): 2, ("full", 4, 64, None, None, 0): 1}),
    "query heads per layer": (
        decoder(2, 48, 8, 128, model_type="laguna", num_attention_heads_per_layer=[48, 64], sliding_window=512,
                layer_types=["full_attention", "sliding_attention"]),
        {("full", 8, 128, None, None, 0): 1, ("sliding", 8, 128, None, 512, 0): 1}),
    "per-layer heads in blocks": (
        dict(model_type="nemotron-nas", num_hidden_layers=3, hidden_size=8192, num_attention_heads=64, vocab_size=9,
             num_key_value_heads=None, block_configs=[
                 dict(attention=dict(n_heads_in_group=ratio, no_op=ratio is None, replace_with_linear=False))
                 for ratio in (8, None, 16)]),
        {("full", 8, 128, None, None, 0): 1, ("full", 4, 128, None, None, 0): 1, ("linear", 0, 0, None, None, 0): 1}),
    "overrides by layer number": (
        decoder(3, 8, 4, 64, model_type="new", per_layer_config={"02": dict(head_dim=128, num_key_value_heads=2)}),
        {("full", 4, 64, None, None, 0): 2, ("full", 2, 128, None, None, 0): 1}),
    "heads of the windowed layers in a group": (
        decoder(4, 64, 8, 128, model_type="step3p5", sliding_window=512, attention_other_setting=dict(
            attention_type="sliding_attention", num_attention_heads=96, num_attention_groups=4, head_dim=128),
                layer_types=turns(4, 4, "full_attention", "sliding_attention")),
        {("full", 8, 128, None, None, 0): 1, ("sliding", 4, 128, None, 512, 0): 3}),
    "windows in a list": (decoder(3, 8, 4, 64, sliding_window=[128, None, 256], model_type="phi3small"),
                          {("sliding", 4, 64, None, 128, 0): 1, ("full", 4, 64, None, None, 0): 1,
                           ("sliding", 4, 64, None, 256, 0): 1}),
    "letters that repeat": (decoder(8, 8, 4, 64, model_type="exaone4", sliding_window=4096,
                                    sliding_window_pattern="LLLG"),
                            {("sliding", 4, 64, None, 4096, 0): 6, ("full", 4, 64, None, None, 0): 2}),
    "pattern of a window that is off": (decoder(8, 8, 4, 64, model_type="exaone4", sliding_window=None,
                                                sliding_window_pattern="LLLG") | {"sliding_window": None},
                                        {("full", 4, 64, None, None, 0): 8}),
    "window from a layer on": (decoder(6, 8, 4, 64, model_type="qwen2", use_sliding_window=True, sliding_window=32,
                                       max_window_layers=4),
                               {("full", 4, 64, None, None, 0): 4, ("sliding", 4, 64, None, 32, 0): 2}),
    "window not switched on": (decoder(6, 8, 4, 64, model_type="qwen2", sliding_window=32, max_window_layers=4),
                               {("full", 4, 64, None, None, 0): 6}),
    "words and repeats": (dict(model_type="gpt_neo", num_layers=4, hidden_size=64, num_heads=4, window_size=256,
                               attention_types=[[["global", "local"], 2]], vocab_size=50257),
                          {("full", 4, 16, None, None, 0): 2, ("sliding", 4, 16, None, 256, 0): 2}),
    "attention by period": (decoder(32, 32, 8, model_type="jamba", attn_layer_period=8, attn_layer_offset=4,
                                    mamba_d_state=16, mamba_expand=2, expert_layer_period=2),
                            {("full", 8, 128, None, None, 0): 4, ("linear", 0, 0, None, None, 2 * 4096 * 16 * 4): 28}),
    "attention by number": (decoder(4, 8, 4, 64, model_type="bamba", attn_layer_indices=[2], mamba_n_heads=16,
                                    mamba_d_head="auto", mamba_expand=2, mamba_d_state=32),
                            {("full", 4, 64, None, None, 0): 1, ("linear", 0, 0, None, None, 1024 * 32 * 4): 3}),
    "attention and SSM in one layer": (
        decoder(4, 8, 4, 64, model_type="falcon_h1", mamba_d_ssm=512, mamba_n_heads=8, mamba_d_head=64,
                mamba_d_state=16), {("full", 4, 64, None, None, 8 * 64 * 16 * 4): 4}),
    "lightning attention": (decoder(8, 8, 4, 64, model_type="minimax_text_01", attn_type_list=[0] * 7 + [1]),
                            {("full", 4, 64, None, None, 0): 1, ("linear", 0, 0, None, None, 8 * 64 * 64 * 4): 7}),
    "recurrent blocks and local attention": (
        decoder(5, 10, 1, 256, model_type="recurrent_gemma", block_types=["recurrent", "recurrent", "attention"],
                attention_window_size=2048, lru_width=2560),
        {("linear", 0, 0, None, None, 2560 * 4): 4, ("sliding", 1, 256, None, 2048, 0): 1}),
    "short convolutions": (decoder(4, 8, 4, 64, model_type="lfm2", full_attn_idxs=[1], conv_L_cache=3),
                           {("full", 4, 64, None, None, 0): 1, ("linear", 0, 0, None, None, 0): 3}),
    "the list is the layer count": (
        dict(model_type="nemotron_h", layers_block_type=["mamba", "moe", "attention"], hidden_size=64, vocab_size=9,
             num_attention_heads=4, num_key_value_heads=2, head_dim=16, mamba_num_heads=2, mamba_head_dim=8,
             ssm_state_size=4, mamba_ssm_cache_dtype="bfloat16"),
        {("full", 2, 16, None, None, 0): 1, ("linear", 0, 0, None, None, 2 * 8 * 4 * 2): 1,
         ("linear", 0, 0, None, None, 0): 1}),
    "no attention at all": (dict(model_type="mamba2", num_hidden_layers=4, hidden_size=64, num_heads=8, head_dim=16,
                                 state_size=32, expand=2, conv_kernel=4, vocab_size=9),
                            {("linear", 0, 0, None, None, 8 * 16 * 32 * 4): 4}),
    "cross-attention layers": (decoder(4, 8, 4, 64, model_type="mllama_text_model", cross_attention_layers=[1]),
                               {("full", 4, 64, None, None, 0): 3, ("linear", 0, 0, None, None, 0): 1}),
    "kv_channels and groups": (
        dict(model_type="chatglm", num_layers=4, hidden_size=4096, num_attention_heads=32, kv_channels=128,
             multi_query_attention=True, multi_query_group_num=2, seq_length=32768, padded_vocab_size=65024),
        {("full", 2, 128, None, None, 0): 4}),
    "groups without multi-query": (
        dict(model_type="chatglm", num_layers=4, hidden_size=4096, num_attention_heads=32, kv_channels=128,
             multi_query_attention=False, multi_query_group_num=2, padded_vocab_size=65024),
        {("full", 32, 128, None, None, 0): 4}),
    "heads in attn_config": (dict(model_type="dbrx", n_layers=4, d_model=6144, n_heads=48, max_seq_len=32768,
                                  vocab_size=100352, attn_config=dict(kv_n_heads=8, clip_qkv=8)),
                             {("full", 8, 128, None, None, 0): 4}),
    "multi-query by name": (dict(model_type="mpt", n_layers=4, d_model=512, n_heads=8, vocab_size=50368,
                                 attn_config=dict(attn_type="multiquery_attention", sliding_window_size=-1)),
                            {("full", 1, 64, None, None, 0): 4}),
    "n_embd": (dict(model_type="gpt2", n_layer=12, n_embd=768, n_head=12, n_positions=1024, n_ctx=1024, vocab_size=9),
               {("full", 12, 64, None, None, 0): 12}),
    "two attentions a layer": ({**DEEPSEEK_V3, "model_type": "longcat_flash", "num_layers": 28,
                                "num_hidden_layers": None, "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
                                "attention_method": "MLA"}, {("mla", 1, 576, 512, None, 0): 56}),
    "two attentions a layer, counted": ({**DEEPSEEK_V3, "model_type": "longcat_flash", "num_layers": 28,
                                         "num_hidden_layers": 56}, {("mla", 1, 576, 512, None, 0): 56}),
    # public configs that were refused
    "Phi-4-mini": (decoder(32, 24, 8, 128, model_type="phi3", full_attn_mod=1, interpolate_factor=1,
                           sliding_window=262144, max_position_embeddings=131072),
                   {("sliding", 8, 128, None, 262144, 0): 32}),
    "DeepSeek-OCR": (dict(model_type="deepseek_vl_v2", hidden_size=1280, kv_lora_rank=None, language_config=dict(
        model_type="deepseek_v2", num_hidden_layers=12, hidden_size=1280, num_attention_heads=10, kv_lora_rank=None,
        num_key_value_heads=10, q_lora_rank=None, qk_nope_head_dim=0, qk_rope_head_dim=0, use_mla=False, v_head_dim=0,
        vocab_size=129280)), {("full", 10, 128, None, None, 0): 12}),
    "a latent that is switched off": (
        decoder(4, 8, 4, 64, model_type="deepseek_v2", use_mla=False, kv_lora_rank=512, qk_rope_head_dim=64,
                qk_nope_head_dim=128, v_head_dim=128), {("full", 4, 64, None, None, 0): 4}),
    "a latent that is switched on": (
        decoder(4, 8, 8, model_type="deepseek_v2", use_mla=1, kv_lora_rank=512, qk_rope_head_dim=64,
                qk_nope_head_dim=128, v_head_dim=128), {("mla", 1, 576, 512, None, 0): 4}),
    "Hunyuan-Large: sharing on, latent off": (
        decoder(64, 80, 8, 128, model_type="hunyuan", use_cla=True, cla_share_factor=2, use_mla=False, kv_lora_rank=512,
                qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128),
        {("full", 8, 128, None, None, 0): 32, ("linear", 0, 0, None, None, 0): 32}),
    "MiniMax-Text-01": (
        decoder(80, 64, 8, 128, model_type="minimax_text_01", attn_type_list=([0] * 7 + [1]) * 10, postnorm=True,
                layernorm_full_attention_alpha=3.5565588200778455, layernorm_full_attention_beta=1.0,
                layernorm_linear_attention_alpha=3.5565588200778455, layernorm_linear_attention_beta=1.0,
                layernorm_mlp_alpha=3.5565588200778455, layernorm_mlp_beta=1.0, shared_intermediate_size=0),
        {("full", 8, 128, None, None, 0): 10, ("linear", 0, 0, None, None, 64 * 128 * 128 * 4): 70}),
    "Grok-2": (decoder(64, 64, 8, 128, model_type="git", sliding_window_size=-1, global_attn_every_n=1,
                       attn_temperature_len=1024), {("full", 8, 128, None, None, 0): 64}),
    "a window of -1": (decoder(4, 8, 4, 64, model_type="mistral", sliding_window=-1),
                       {("full", 4, 64, None, None, 0): 4}),
    "a pattern whose window is switched off": (
        decoder(8, 8, 4, 64, model_type="exaone4", sliding_window=4096, sliding_window_pattern=4,
                use_sliding_window=False), {("full", 4, 64, None, None, 0): 8}),
    "Ring-mini-linear": (
        decoder(22, 16, 4, 128, model_type="bailing_moe_linear", layer_group_size=5, group_norm_size=4,
                linear_silu=False),
        {("full", 4, 128, None, None, 0): 6, ("linear", 0, 0, None, None, 16 * 128 * 128 * 4): 16}),
    "Ling-2.5": ({**DEEPSEEK_V3, "model_type": "bailing_hybrid", "num_hidden_layers": 80, "num_attention_heads": 64,
                  "head_dim": 128, "layer_group_size": 8},
                 {("mla", 1, 576, 512, None, 0): 10, ("linear", 0, 0, None, None, 64 * 128 * 128 * 4): 70}),
    "lightning attention everywhere": (
        {key: value for key, value in decoder(4, 8, 8, 64, model_type="minimax", layer_types=["linear_attention"] * 4
                                              ).items() if key != "head_dim"},
        {("linear", 0, 0, None, None, 8 * 64 * 64 * 4): 4}),
    "OLMo, StableLM, ERNIE: names that only sound so": (
        decoder(4, 8, 4, 64, model_type="olmo", block_type="sequential", use_qkv_bias=True, compression_ratio=1.0,
                index_topk_pattern="FS", layernorm_linear_attention_beta=1.0, compression_config={"format": "int"}),
        {("full", 4, 64, None, None, 0): 4}),
    "a nested Gemma": (dict(model_type="paligemma", text_config=dict(
        model_type="gemma", hidden_size=2048, num_hidden_layers=18, num_attention_heads=8, num_key_value_heads=1)),
        {("full", 1, 256, None, None, 0): 18}),
}


# Keys whose absence is a statement: nothing is shared, overridden, crossed or switched.
ABSENCE_SAYS_SO = {"num_kv_shared_layers", "use_cla", "cross_attention_layers", "per_layer_config", "model_type",
                   "attention_other_setting", "num_attention_heads_per_layer", "multi_query_attention", "use_mla"}
NONE_BY_DEFAULT = {("Phi-4-mini", "sliding_window"), ("a pattern whose window is switched off", "use_sliding_window")}


@pytest.mark.parametrize("kind", BY_HAND)
def test_layers_counted_by_hand(kind):
    config, expected = BY_HAND[kind]
    found = Counter()
    for (name, _, *rest), count in layers_of(spec_of(json.loads(json.dumps(config)), "it")).items():
        found[name, *rest] += count
    assert found == expected


def test_what_the_config_leaves_out_is_named():
    assumed = spec_of(dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=9), "it").assumed
    assert "head_dim = hidden_size / num_attention_heads = 16" in assumed
    assert any("num_key_value_heads = num_attention_heads" in text for text in assumed)
    assert any("plain decoder" in text and "is missing" in text for text in assumed)
    assert spec_of(decoder(2, 8, 4, 16, model_type="llama"), "it").assumed == ()
    assert any("plain decoder" in text for text in spec_of(decoder(2, 8, 4, 16, model_type="brand_new"), "it").assumed)
    assert "recurrent state in fp32" in spec_of(NANO, "it").assumed
    indexed = spec_of({**DEEPSEEK_V3, "index_head_dim": 128}, "it").assumed
    assert any("indexer" in text and "128 elements" in text for text in indexed)


def test_a_nested_config_takes_its_types_defaults_and_says_so():
    spec = spec_of(dict(model_type="gemma3", text_config=dict(
        model_type="gemma3_text", hidden_size=2560, num_hidden_layers=34, sliding_window=1024)), "it")
    assert layers_of(spec) == layers_of(model("google/gemma-3-4b-it"))
    assert any("num_key_value_heads = 4" in text for text in spec.assumed)
    with pytest.raises(ValueError, match="the number of layers is missing"):     # at the top nothing is left out
        spec_of(dict(model_type="llama", vocab_size=9), "it")


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_the_text_decoder_is_found_where_it_is_nested(key):
    inner = decoder(4, 8, 2, 64, model_type="qwen3")
    deeper = dict(thinker_config={key: inner}, talker_config=decoder(2, 2, 2, 8), model_type="omni")
    expected = layers_of(spec_of(inner, "it"))
    assert layers_of(spec_of({key: inner, "vision_config": decoder(9, 9, 9, 9)}, "it")) == expected
    spec = spec_of(deeper, "it")
    assert layers_of(spec) == expected and any("talker" in text for text in spec.assumed)


PLAIN = decoder(4, 8, 4, 64, model_type="llama", max_position_embeddings=4096)


@pytest.mark.parametrize("change, message", [
    (dict(num_hidden_layers=None), "number of layers is missing; it needs one of: num_hidden_layers, n_layer"),
    (dict(num_attention_heads=None), "number of query heads is missing"),
    (dict(num_hidden_layers="4"), "num_hidden_layers holds '4', and must be a whole number"),
    (dict(num_hidden_layers=True), "num_hidden_layers holds True"),
    (dict(num_hidden_layers=4.0), "num_hidden_layers holds 4.0"),
    (dict(num_hidden_layers=[4]), r"num_hidden_layers holds \[4\]"),
    (dict(num_hidden_layers=10**12), "whole number of 1 to 1,000"),
    (dict(num_hidden_layers=-1), "num_hidden_layers holds -1"),
    (dict(num_attention_heads=0), "num_attention_heads holds 0, and must be a whole number of 1 to"),
    (dict(num_key_value_heads=0), "num_key_value_heads holds 0"),
    (dict(num_attention_heads=-8), "num_attention_heads holds -8"),
    (dict(num_attention_heads=0, head_dim=None, model_type="minimax", layer_types=["linear_attention"] * 4),
     "num_attention_heads holds 0"),
    (dict(head_dim=-64), "head_dim holds -64"),
    (dict(use_mla=True), "use_mla is true, and kv_lora_rank is missing"),
    (dict(use_mla="no"), "use_mla is 'no', and must be true or false"),
    (dict(use_local_attention=False, sliding_window=64), "use_local_attention is false, and kvlab does not know"),
    (dict(full_attn_mod=2), "it has full_attn_mod"),
    (dict(layer_group_size=4), "layer_group_size groups its layers in a way"),
    (dict(head_dim=None, sliding_window=64, swa_num_attention_heads=16, layer_types=["sliding_attention"] * 4),
     "the layers differ in their query heads; add head_dim"),
    # as long as these they took regular expressions a minute, lists of windows seconds
    ({"share" * 60_000: 1}, "one of more than 128 characters"),
    ({"x" * 300_000 + "expert": 1}, "one of more than 128 characters"),
    ({f"kv_{n}": 1 for n in range(10_001)}, "more than 10,000 keys"),
    (dict(num_hidden_layers=10_000, sliding_window=[64] * 10_000), "whole number of 1 to 1,000"),
    (dict(num_hidden_layers=1_000, attention_types=[[["global"] * 1_000, 1_000]]), "pairs of a list of words"),
    (dict(num_key_value_heads=-4), "num_key_value_heads holds -4"),
    (dict(num_key_value_heads=3), "num_q_heads=8 is not a multiple of num_kv_heads=3"),
    (dict(num_key_value_heads=10**9), "num_key_value_heads holds 1000000000"),
    (dict(n_head_kv=2), "num_key_value_heads is 4 but n_head_kv is 2; the two contradict"),
    (dict(num_attention_heads=[8] * 3), "num_attention_heads has 3 entries for 4 layers"),
    (dict(head_dim=float("nan")), "head_dim holds nan"),
    (dict(head_dim=float("inf")), "head_dim holds inf"),
    (dict(head_dim=None, hidden_size=511), "head_dim is missing, and is not hidden_size / num_attention_heads"),
    (dict(head_dim={"a": 1}), "head_dim holds {'a': 1}"),
    (dict(layer_types=["full_attention"] * 3), "layer_types has 3 entries for 4 layers"),
    (dict(layer_types=["full_attention"] * 3 + ["magic"]), "layer kind 'magic' that kvlab does not know"),
    (dict(layer_types="full_attention"), "layer_types is 'full_attention', and must be a list"),
    (dict(layer_types=["full_attention", "sliding_attention"] * 2), "layer 1 is sliding, but the window is missing"),
    (dict(layer_types=["full_attention", "sliding_attention"] * 2, sliding_window=64, use_sliding_window=False),
     "missing or switched off"),
    (dict(layer_types=["linear_attention"] * 4), "size of their state is not in the config"),
    (dict(layer_types=["full_attention"] * 4, sliding_window_pattern=2, sliding_window=64), "layer 0 full.*contradict"),
    (dict(sliding_window=64), "nothing says which layers have it"),
    (dict(sliding_window=64, use_sliding_window=True), "max_window_layers is missing"),
    (dict(sliding_window_pattern="LXLG", sliding_window=64), "layer kind 'X'"),
    (dict(hybrid_override_pattern="M*"), "2 letters for 4 layers"),
    (dict(hybrid_layer_pattern=[0, 1, 2, 0], sliding_window=64), "other values than 0 and 1"),
    (dict(attention_chunk_size=64), "no key says which layers"),
    (dict(mamba_d_state=16), "nothing says which layers are recurrent"),
    (dict(num_kv_shared_layers=4), "leaves none of the 4 layers"),
    (dict(kv_lora_rank=512), "qk_rope_head_dim is missing"),
    (dict(kv_lora_rank=512, qk_rope_head_dim=64, layer_types=["sliding_attention"] * 4, sliding_window=9),
     "sliding layer with a latent"),
    (dict(qk_nope_head_dim=128), "a part of latent attention, and no kv_lora_rank"),
    (dict(model_type="falcon_h1", mamba_d_state=16, mamba_n_heads=8, mamba_expand=2), "size of their state is not in"),
    (dict(model_type="gemma4_text", sliding_window=9, global_head_dim=8), "attention_k_eq_v is missing"),
    (dict(attn_config=dict(sliding_window_size=64)), "sliding_window_size is on"),
    (dict(kv_memory_slots=9), "it has kv_memory_slots, which may change what layers cache"),
    (dict(my_sliding_pattern=[1]), "it has my_sliding_pattern"),
    (dict(attn_layer_period=4), "attn_layer_offset is missing"),
    (dict(attn_layer_period=4, attn_layer_offset=4), "must be below attn_layer_period"),
    (dict(linear_attn_config=dict(full_attn_layers=[1], kda_layers=[2, 3])), "name each of the 4 layers once"),
    (dict(attention_types=[[["global"], 10**9]]), "pairs of a list of words and a number"),
    (dict(block_configs=[{}] * 4), "a layer without attention"),
    (dict(per_layer_config={"7": {}}), "'7' is not the number of one of the 4 layers"),
    (dict(per_layer_config={"1": dict(sliding_window=5)}), "changes sliding_window in one layer"),
    (dict(text_config=PLAIN, llm_config=PLAIN), "nests more than one text model"),
    (dict(model_type=5), "model_type is 5, and must be text"),
    (dict(model_type="bert"), "model_type bert is an encoder"),
    (dict(model_type="t5"), "encoder-decoder"),
    (dict(model_type="zamba2"), "in a way kvlab does not know"),
    (dict(model_type="gemma4_text", sliding_window=9), "global_head_dim is missing.*it needs one of: global_head_dim"),
    (dict(model_type="mistral"), "sliding_window is missing, for which mistral has a number of its own"),
    (dict(model_type="qwen3", head_dim=None), "head_dim is missing, for which qwen3 has a number of its own"),
    (dict(model_type="mixtral", num_key_value_heads=None), "num_key_value_heads is missing, for which mixtral"),
    (dict(model_type="llama4_text"), "attention_chunk_size is missing"),
    (dict(model_type="deepseek_v3"), "kv_lora_rank is missing"),
    (dict(is_encoder_decoder=True), "encoder-decoder"),
    (dict(vocab_size=None, patch_size=16), "describes images"),
    (dict(compress_ratios=[3] * 4), "needs head_dim, sliding_window and one KV head"),
])
def test_what_is_wrong_or_not_known_is_refused_in_words(change, message):
    config = {key: value for key, value in {**PLAIN, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=f"^it: .*{message}"):
        spec_of(config, "it")


def test_what_a_file_calls_itself_cannot_steer_the_terminal():
    """Escape sequences, line ends and marks that turn the direction of writing, in keys, names and values."""
    bad = "\x1b[31m\x07\n\u202e\x9b"
    latent = dict(kv_lora_rank=8, qk_rope_head_dim=8)
    for change in ({f"kv_{bad}": 1}, {f"use_mla{bad}": False, **latent}, dict(layer_types=[bad] * 4),
                   dict(head_dim=bad), dict(model_type=f"bert{bad}"),
                   dict(model_type=f"mixtral{bad}", num_key_value_heads=None),
                   dict(per_layer_config={bad: {}}), dict(per_layer_config={"1": {f"kv_{bad}": 1}})):
        config = {key: value for key, value in {**PLAIN, **change}.items() if value is not None}
        with pytest.raises(ValueError) as error:
            spec_of(config, "it")
        assert str(error.value).isprintable()
    spec = spec_of({**PLAIN, "model_type": bad * 60, "num_key_value_heads": 8}, "it")
    assert spec.source.isprintable() and all(text.isprintable() for text in spec.assumed) and len(spec.source) < 1_000


def test_keys_that_are_off_change_nothing():
    off = dict(sliding_window=None, use_sliding_window=False, num_kv_shared_layers=0, kv_lora_rank=None, use_cla=False,
               attention_chunk_size=None, layer_types=None, kv_memory_slots=0, cross_attention_layers=[],
               per_layer_config={}, full_attention_interval=0, v_head_dim=0, sliding_window_size=-1, window_size=0,
               use_mla=False, q_lora_rank=8, swa_head_dim=0, full_attn_mod=1)
    assert spec_of({**PLAIN, **off}, "it") == spec_of(PLAIN, "it")


def test_patterns_may_go_on_for_the_layers_that_predict_further_tokens():
    longer = dict(layer_types=["full_attention"] * 5, num_nextn_predict_layers=1)
    assert spec_of({**PLAIN, **longer}, "it").num_layers == 4


@pytest.mark.parametrize("kind", [*KINDS, *BY_HAND])
def test_a_key_taken_away_is_missed_named_or_without_meaning(kind):
    """No key is replaced in silence: without it the model is refused, the same, or says what was assumed."""
    config = (KINDS.get(kind) or BY_HAND[kind])[1 if kind in KINDS else 0]
    whole = spec_of(config, "it")
    inner = config.get("text_config", config)
    for key in inner:
        if key in ABSENCE_SAYS_SO or (kind, key) in NONE_BY_DEFAULT:
            continue
        less = {name: value for name, value in inner.items() if name != key}
        try:
            spec = spec_of(config | {"text_config": less} if inner is not config else less, "it")
        except ValueError:
            continue
        assert layers_of(spec) == layers_of(whole) or set(spec.assumed) - set(whole.assumed), key


# --- files ---------------------------------------------------------------------------------------------------------

def test_a_file_that_is_no_config_is_refused_in_one_sentence(tmp_path):
    def refused(name, data, message):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(ValueError, match=message) as error:
            read_config(path)
        assert "\n" not in str(error.value) and str(path) in str(error.value)
    refused("binary", bytes(range(256)), "not UTF-8")
    refused("empty", b"", "not JSON .*give a model's config.json")
    refused("half", b'{"num_hidden_layers": 4,', "not JSON")
    refused("list", b"[1, 2]", "holds a list")
    refused("deep", b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply")
    refused("twice", b'{"hidden_size": 1, "hidden_size": 2}', "'hidden_size' stands there twice")
    refused("digits", b'{"hidden_size": ' + b"9" * 6000 + b"}", "6,000 digits")
    refused("large", b" " * (CONFIG_LIMIT + 1), "larger than the 4,194,304 bytes")
    sparse = tmp_path / "sparse.json"
    with sparse.open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(ValueError, match="larger than"):
        read_config(sparse)
    with pytest.raises(ValueError, match="cannot be read"):
        read_config(tmp_path / "absent.json")
    with pytest.raises(ValueError, match="not a regular file"):
        read_config(tmp_path)


def test_a_real_config_has_infinities_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("\ufeff" + json.dumps({**NANO, "time_step_limit": [0.0, float("inf")]}), encoding="utf-8")
    assert layers_of(read_config(path)) == layers_of(spec_of(NANO, "it"))


# --- laws ----------------------------------------------------------------------------------------------------------

numbers = st.sampled_from([0, 1, 2, 4, 8, 64, 128, -1, 10**12, 2**70, 1.5, float("nan"), True, False, None])
words = st.sampled_from([*KIND_OF, "auto", "zz", "MM*-", "LLLG"])
values = st.recursive(numbers | words, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(
    st.sampled_from(["0", "1", "head_dim", "attention", "no_op", "kda_layers", "full_attn_layers"]), inner, max_size=3))
known = sorted(READ | {"model_type", "use_sliding_window", "max_window_layers", "qk_rope_head_dim", "attn_layer_offset",
                       "no_rope_layers", "mamba_d_state", "mamba_expand", "multi_query", "text_config", "kv_slots",
                       "num_nextn_predict_layers", "mamba_ssm_dtype", "is_encoder_decoder", "lru_width"})
real = [json.loads(json.dumps(kinds[name][at])) for kinds, at in ((KINDS, 1), (BY_HAND, 0)) for name in kinds]


def holds(spec):
    """What is true of every model: whole layers of known kinds, and bytes that a plain formula gives too."""
    assert 1 <= spec.num_layers <= 1_000 and all(layer.count >= 1 for layer in spec.layers)
    total = 0
    for layer in spec.layers:
        if layer.kind == "linear":
            assert layer.num_kv_heads == 0 and layer.state_bytes >= 0
            continue
        assert layer.num_q_heads >= layer.num_kv_heads >= 1 and layer.head_dim >= 1
        width = layer.head_dim + (0 if layer.kind == "mla" else layer.v_head_dim or layer.head_dim)
        tokens = 100 if layer.window is None else min(100, layer.window)
        tokens = (99 % layer.window) + 1 if layer.kind == "chunked" else tokens
        total += layer.count * tokens * layer.num_kv_heads * width * 2
    assert size(spec, 100).kv_bytes == total
    assert total > 0 or all(layer.kind == "linear" for layer in spec.layers) and spec.attention_type in (
        "no attention", "recurrent state") or spec.approximate


def judge(config):
    try:
        spec = spec_of(config, "it")
    except ValueError as error:
        assert str(error).startswith("it: ") and str(error).isprintable()
    else:
        holds(spec)


@given(st.sampled_from(real), st.data())
def test_a_real_config_with_a_key_or_two_changed_gives_a_model_or_a_sentence(config, data):
    inside = next((key for key in ("text_config", "language_config") if key in config), None)
    inner = dict(config[inside] if inside else config)
    for key in data.draw(st.lists(st.sampled_from(sorted(inner)), min_size=1, max_size=2)):
        inner[key] = data.draw(values)
    judge({**config, inside: inner} if inside else inner)


@pytest.mark.parametrize("value", [0, -1, 1, 2, None, True, [], "", 10**12, [0], {}])
def test_every_key_of_every_kind_with_a_wrong_value_gives_a_model_or_a_sentence(value):
    for config in real:
        inside = next((key for key in ("text_config", "language_config") if key in config), None)
        inner = config[inside] if inside else config
        for key in inner:
            judge({**config, inside: {**inner, key: value}} if inside else {**inner, key: value})


@given(st.dictionaries(st.sampled_from(known), values, max_size=6), st.sets(st.sampled_from(sorted(PLAIN)), max_size=2))
def test_any_values_give_a_model_or_a_sentence(change, gone):
    judge({**{key: value for key, value in PLAIN.items() if key not in gone}, **change})


@given(st.integers(1, 40), st.integers(1, 12), st.sampled_from([1, 2, 4, 8]), st.sampled_from([32, 64, 256]))
def test_every_nth_layer_by_number_by_words_and_by_letters_is_one_model(layers, n, kv_heads, head_dim):
    base = decoder(layers, 8, kv_heads, head_dim, sliding_window=64)
    by = [spec_of({**base, **pattern}, "it") for pattern in (
        dict(sliding_window_pattern=n), dict(sliding_window_pattern="L" * (n - 1) + "G"),
        dict(layer_types=turns(n, layers, "full_attention", "sliding_attention")),
        dict(hybrid_layer_pattern=turns(n, layers, 0, 1)),
        dict(sliding_window=[int(window) for window in turns(n, layers, 0, 64)]))]
    assert len({frozenset(layers_of(spec).items()) for spec in by}) == 1
    full = sum(layer.count for layer in by[0].layers if layer.kind == "full")
    assert full == layers // n and by[0].num_layers == layers
    assert all(isinstance(layer, LayerSpec) for layer in by[0].layers)
