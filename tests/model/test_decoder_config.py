"""What a config.json becomes, against transformers' own reading of the same keys, and what is refused."""
import pytest

from kvlab.model.config import DecoderConfig, RopeScaling
from kvlab.shapes import AttentionShape

LLAMA = dict(model_type="llama", vocab_size=64, hidden_size=48, intermediate_size=96, num_hidden_layers=3,
             num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=512, rms_norm_eps=1e-5,
             rope_theta=10_000.0, tie_word_embeddings=True, hidden_act="silu")
QWEN2 = {**LLAMA, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 16, "max_window_layers": 2}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 16, "attention_bias": False}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 32}


def read(config, **changes):
    return DecoderConfig.from_config({**config, **changes}, "config.json")


def test_llama():
    config = read(LLAMA)
    assert config.shape(0) == AttentionShape(6, 2, 8)
    assert (config.tied, config.qkv_bias, config.o_bias, config.qk_norm) == (True, False, False, False)
    assert (config.num_layers, config.context, config.rms_eps, config.rope_theta) == (3, 512, 1e-5, 1e4)
    assert read(LLAMA, head_dim=20).head_dim == 20
    assert read({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}).num_kv_heads == 6


def test_biases_norms_and_ties_of_the_four():
    assert (read(LLAMA, attention_bias=True).qkv_bias, read(LLAMA, attention_bias=True).o_bias) == (True, True)
    assert (read(QWEN2).qkv_bias, read(QWEN2).o_bias, read(QWEN2).qk_norm) == (True, False, False)
    assert (read(QWEN3).qkv_bias, read(QWEN3).qk_norm, read(QWEN3).head_dim) == (False, True, 16)
    assert read(QWEN3, attention_bias=True).o_bias
    assert not read(MISTRAL, attention_bias=True).qkv_bias             # a key that mistral does not have
    assert not read({k: v for k, v in LLAMA.items() if k != "tie_word_embeddings"}).tied


def test_windows():
    assert read(LLAMA, sliding_window=32).windows == (None,) * 3       # a key that llama does not have
    assert read(MISTRAL).windows == (32,) * 3
    assert read(MISTRAL, sliding_window=None).windows == (None,) * 3
    assert read(QWEN2).windows == (None,) * 3
    assert read(QWEN2, use_sliding_window=True).windows == (None, None, 16)
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    assert read(QWEN2, use_sliding_window=True, layer_types=kinds).windows == (16, None, None)
    assert read(QWEN3, layer_types=["full_attention"] * 3).windows == (None,) * 3
    assert read(MISTRAL).shape(1).window == 32


@pytest.mark.parametrize("keys, scaling", [
    (dict(rope_scaling=None), None),
    (dict(rope_scaling=dict(type="linear", factor=2)), RopeScaling(kind="linear", factor=2)),
    (dict(rope_parameters=dict(rope_type="linear", factor=2, rope_theta=1e4)), RopeScaling(kind="linear", factor=2)),
    (dict(rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                            original_max_position_embeddings=64)),
     RopeScaling(kind="llama3", factor=8, original_context=64, low_freq_factor=1, high_freq_factor=4)),
    (dict(rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=128, attention_factor=1.5)),
     RopeScaling(kind="yarn", factor=4, original_context=128, attention_factor=1.5)),
    (dict(rope_scaling=dict(type="yarn", original_max_position_embeddings=512, factor=None)),
     RopeScaling(kind="yarn", factor=1, original_context=512, attention_factor=1)),
])
def test_rope_of_old_and_new_files(keys, scaling):
    assert read(LLAMA, **keys).rope_scaling == scaling


def test_yarn_stretches_the_context():
    """Qwen2.5 states the context before it is stretched, Qwen3 and others the one that comes of it."""
    yarn = dict(type="yarn", factor=4.0, original_max_position_embeddings=512)
    assert read(QWEN2, rope_scaling=yarn).context == 2048
    assert read(QWEN2, rope_scaling=dict(yarn, original_max_position_embeddings=128)).context == 512
    assert read(QWEN2, max_position_embeddings=4096, rope_scaling=yarn).context == 4096
    assert read(QWEN2, max_position_embeddings=2048, rope_scaling=dict(yarn, factor=None)).context == 2048
    assert read(LLAMA, rope_scaling=dict(type="yarn", factor=2.5)).context == 1280
    assert read(LLAMA, rope_scaling=dict(type="linear", factor=4.0)).context == 512


def test_theta_of_old_and_new_files_and_its_default():
    bare = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    assert read(bare).rope_theta == 10_000
    assert read(bare, rope_parameters=dict(rope_type="default", rope_theta=5e5)).rope_theta == 5e5
    assert read(LLAMA, rope_theta=2e4, rope_scaling=dict(type="linear", factor=2)).rope_theta == 2e4


@pytest.mark.parametrize("config, changes, words", [
    (LLAMA, dict(model_type="gpt2"), "model_type gpt2 is no decoder that kvlab runs; supported: llama, mistral, qwen2"),
    (LLAMA, dict(model_type=None), "model_type is missing"),
    (LLAMA, dict(model_type=["llama"]), "must be text"),
    (LLAMA, dict(hidden_act="gelu"), "'gelu' is not supported; supported: silu"),
    (LLAMA, dict(mlp_bias=True), "no biases in its MLP"),
    (LLAMA, dict(vocab_size=None), "vocab_size is missing"),
    (LLAMA, dict(rms_norm_eps=None), "rms_norm_eps is missing"),
    (LLAMA, dict(rms_norm_eps="small"), "must be a number above 0"),
    (LLAMA, dict(rms_norm_eps=float("nan")), "must be a number above 0"),
    (LLAMA, dict(num_hidden_layers=10**9), "whole number of 1 to 1,000"),
    (LLAMA, dict(num_hidden_layers=3.0), "whole number"),
    (LLAMA, dict(num_attention_heads=0), "whole number"),
    (LLAMA, dict(num_key_value_heads=4), "not a multiple of num_kv_heads=4"),
    (LLAMA, dict(num_key_value_heads=0), "whole number"),
    (LLAMA, dict(hidden_size=50), "not a multiple of num_attention_heads"),
    (LLAMA, dict(head_dim=7), "must be even"),
    (LLAMA, dict(rope_theta=0), "must be a number above 0"),
    (LLAMA, dict(rope_theta=True), "must be a number above 0"),
    (LLAMA, dict(rope_scaling=dict(type="dynamic", factor=2)), "would have to be rotated again; supported: default"),
    (LLAMA, dict(rope_scaling=dict(type="longrope", factor=2)), "longrope is not supported; supported: default"),
    (LLAMA, dict(rope_scaling=dict(type="linear")), "factor is missing"),
    (LLAMA, dict(rope_scaling=dict(type="llama3", factor=2)), "low_freq_factor is missing"),
    (LLAMA, dict(rope_scaling=[2]), "must hold keys and values"),
    (LLAMA, dict(rope_parameters=dict(full_attention=dict(rope_theta=1e4))), "from layer kind to layer kind"),
    (LLAMA, dict(partial_rotary_factor=0.5), "rotates the whole head"),
    (LLAMA, dict(quantization_config=dict(bits=4)), "its weights are quantised"),
    (LLAMA, dict(layer_types=["sliding_attention"] * 3), "contradict each other"),
    (MISTRAL, dict(layer_types=["full_attention"] * 3), "contradict each other"),
    (QWEN3, dict(layer_types=["linear_attention"] * 3), "supported: full_attention, sliding_attention"),
    (QWEN3, dict(layer_types=["full_attention"]), "1 entries for 3 layers"),
    (QWEN2, dict(use_sliding_window=True, max_window_layers=None), "max_window_layers is missing"),
    (QWEN2, dict(use_sliding_window="yes"), "must be true or false"),
])
def test_what_is_refused_is_said_in_one_sentence_that_names_the_file(config, changes, words):
    with pytest.raises(ValueError) as error:
        read(config, **changes)
    assert words in str(error.value) and str(error.value).startswith("config.json")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("config, key", [(MISTRAL, "sliding_window"), (MISTRAL, "num_key_value_heads"),
                                         (QWEN3, "head_dim"), (QWEN2, "num_key_value_heads")])
def test_a_default_of_the_architecture_is_not_guessed(config, key):
    with pytest.raises(ValueError, match=f"{key} is missing, for which {config['model_type']} has a number of its own"):
        read({k: v for k, v in config.items() if k != key})


@pytest.mark.parametrize("changes, words", [
    (dict(windows=(None,)), "1 entries for 2 layers"), (dict(head_dim=5), "even"), (dict(rms_eps=0), "rms_eps"),
    (dict(num_kv_heads=3), "multiple"), (dict(activation="gelu"), "silu"), (dict(vocab_size=0), "vocab_size"),
    (dict(rope_theta=1.0), "rope_theta"),
])
def test_a_config_made_by_hand_is_checked_too(changes, words):
    fields = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=2, num_q_heads=2, num_kv_heads=1,
                  head_dim=4, context=16)
    assert DecoderConfig(**fields).windows == (None, None)
    with pytest.raises(ValueError, match=words):
        DecoderConfig(**{**fields, **changes})


@pytest.mark.parametrize("changes, words", [
    (dict(kind="ntk", factor=2), "supported: linear, llama3, yarn"), (dict(kind="linear", factor=0), "above 0"),
    (dict(kind="yarn", factor=2), "needs original_context"),
    (dict(kind="llama3", factor=2, original_context=8, low_freq_factor=4), "below high_freq_factor"),
    (dict(kind="yarn", factor=2, original_context=8, beta_slow=64), "at most beta_fast"),
])
def test_a_scaling_made_by_hand_is_checked_too(changes, words):
    with pytest.raises(ValueError, match=words):
        RopeScaling(**changes)


@pytest.mark.parametrize("config", [LLAMA, {**LLAMA, "attention_bias": True, "tie_word_embeddings": False}, QWEN2,
                                    QWEN3, MISTRAL])
def test_names_and_shapes_of_the_weights_are_transformers(config):
    transformers = pytest.importorskip("transformers", reason="the reference for names and shapes of weights")
    made = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(made)
    theirs = {name: tuple(weight.shape) for name, weight in model.named_parameters()}     # tied ones are listed once
    assert read(config).tensor_shapes() == theirs
    assert DecoderConfig.from_config(made.to_dict(), "x") == read(config)       # as transformers 5 would write it
