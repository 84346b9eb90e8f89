"""Random transformers models of a few kilobytes, and the same as GGUF files; skips tests where packages are missing."""
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="reads GGUF files")
pytest.importorskip("safetensors", reason="reads weights")
tokenizers = pytest.importorskip("tokenizers", reason="cuts text")
transformers = pytest.importorskip("transformers", reason="makes the models, and is the reference")
TOKENS = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "lo", "Ġlo", "<|end|>", "<tool>"]
IDS = torch.tensor([5, 11, 7, 200, 3, 5, 90, 259, 0, 17])
SIZES = dict(vocab_size=260, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, max_position_embeddings=128, rms_norm_eps=1e-5)


def tiny(kind, **changes):
    """A random transformers model, with norms and biases that matter."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight += 0.3 * torch.randn_like(weight)
    return model


def logits(decoder, ids=IDS):
    return decoder.logits(decoder.hidden([ids], decoder.cache(len(ids))))


def same(decoder, model, ids=IDS, atol=1e-4):
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    found = logits(decoder, ids)
    assert (found - expected).abs().max() <= atol
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def interleaved(weight, heads):
    """Rows of a head's halves in turn, as llama's GGUF files have Q and K."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def gguf_tensors(model):
    """transformers' weights under GGUF's names and in its order."""
    config, found = model.config, {}
    parts = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "o_proj": "attn_output",
             "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down", "q_norm": "attn_q_norm",
             "k_norm": "attn_k_norm", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v"}
    tops = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, weight in model.named_parameters():
        stem, kind = name.rsplit(".", 1)
        part = stem.rsplit(".", 1)[-1]
        if config.model_type == "llama" and part in ("q_proj", "k_proj"):
            weight = interleaved(weight, config.num_attention_heads if part[0] == "q" else config.num_key_value_heads)
        top = tops.get(stem) or f"blk.{stem.split('.')[2]}.{parts[part]}"
        found[f"{top}.{kind}"] = weight.detach().float().numpy()
    return found


def write_gguf(path, model, *, kind=None, quantised=None, drop=(), tensors=None, metadata=None, pre="smollm",
               tokenizer="gpt2", tokens=TOKENS, endian=gguf.GGUFEndian.LITTLE):
    """The model as a GGUF file. quantised: the type of all matrices. metadata: further keys, {arch} filled in."""
    c, kind = model.config, kind or model.config.model_type
    writer = gguf.GGUFWriter(path, kind, endianess=endian)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    if "key_length" not in drop:
        writer.add_key_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 2) + [3, 4])
    writer.add_token_merges(["l o", "Ġ lo"])
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
        add[type(value)](key.format(arch=kind), value)
    for name, values in {**gguf_tensors(model), **(tensors or {})}.items():
        if name in drop:
            continue
        if quantised and values.ndim == 2:
            stored = gguf.quants.quantize(values, quantised)
            writer.add_tensor(name, stored, raw_dtype=quantised)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
