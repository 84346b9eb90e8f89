"""The decoder is the published architectures' function, whatever variant reads its cache and however it is cut up."""
import pytest
import torch

from kvlab.kv.cache import Layout
from kvlab.kv.formats import kv_format
from kvlab.model.config import DecoderConfig
from kvlab.model.decoder import Decoder

SIZES = dict(vocab_size=101, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6,
             num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
KINDS = {
    "llama": ("LlamaConfig", {}), "llama3": ("LlamaConfig", dict(rope_scaling=LLAMA3)),
    "linear": ("LlamaConfig", dict(rope_scaling=dict(rope_type="linear", factor=2.0))),
    "biased": ("LlamaConfig", dict(attention_bias=True)), "tied": ("LlamaConfig", dict(tie_word_embeddings=True)),
    "mistral": ("MistralConfig", dict(sliding_window=9, head_dim=8)),
    "qwen2": ("Qwen2Config", dict(rope_scaling=YARN)),
    "qwen2 windows": ("Qwen2Config", dict(use_sliding_window=True, sliding_window=7, max_window_layers=1)),
    "qwen3": ("Qwen3Config", dict(head_dim=16)),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(**other):
    return DecoderConfig(**{**dict(vocab_size=67, hidden_size=32, intermediate_size=48, num_layers=2, num_q_heads=4,
                                   num_kv_heads=2, head_dim=8, context=128), **other})


def ids(n, seed=0, vocab=67):
    return torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_logits_are_those_of_transformers(name):
    transformers = pytest.importorskip("transformers", reason="compares with transformers, which is not installed")
    config_class, other = KINDS[name]
    config = getattr(transformers, config_class)(**{**SIZES, **other})
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    for key, weight in theirs.named_parameters():                   # fresh models have no biases and norms of one
        weight.mul_(3)
        if "norm" in key or "bias" in key:
            weight.add_(torch.randn_like(weight))
    ours = Decoder(DecoderConfig.from_config(config.to_dict(), name), dict(theirs.state_dict()))
    text = ids(80, vocab=101)
    expected = theirs(text[None]).logits[0]
    assert expected.std() > 0.3
    for cache in (ours.teacher(), ours.cache(80), ours.cache(80, variant="paged", layout=Layout(4, "random"))):
        got = ours.logits(ours.hidden([text], cache))
        assert (got - expected).abs().max() <= 1e-4
        assert (got.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.parametrize("variant", ["sdpa", "naive", "flash", "paged"])
def test_a_text_in_pieces_gives_the_states_of_the_whole(variant):
    decoder, text = Decoder.random(tiny(windows=(None, 7))), ids(40)
    whole = decoder.hidden([text], decoder.teacher())
    cache = decoder.cache(40, variant=variant)
    pieces = torch.cat([decoder.hidden([piece], cache) for piece in text.split([13, 1, 1, 20, 5])])
    assert torch.allclose(pieces, whole, atol=2e-5)
    assert cache.kv_lens == [40]


def test_sequences_of_a_batch_do_not_see_one_another():
    decoder, texts = Decoder.random(tiny()), [ids(9, 1), ids(20, 2), ids(3, 3)]
    cache = decoder.cache(40, sequences=3, variant="paged")
    first = decoder.hidden([t[:-1] for t in texts], cache)
    last = decoder.hidden([t[-1:] for t in texts], cache)
    for b, text in enumerate(texts):
        alone = decoder.hidden([text], decoder.teacher())
        start = sum(len(t) - 1 for t in texts[:b])
        assert torch.allclose(first[start:start + len(text) - 1], alone[:-1], atol=2e-5)
        assert torch.allclose(last[b], alone[-1], atol=2e-5)


def test_random_weights_depend_on_the_seed_alone():
    a, b, c = (Decoder.random(tiny(), seed) for seed in (0, 0, 1))
    assert all(torch.equal(w, b.weights[name]) for name, w in a.weights.items())
    assert not torch.equal(a.weights["model.embed_tokens.weight"], c.weights["model.embed_tokens.weight"])


def test_observe_sees_what_is_stored():
    decoder, seen = Decoder.random(tiny()), {}
    cache = decoder.cache(12)
    decoder.hidden([ids(12)], cache, observe=lambda layer, q, k, v: seen.setdefault(layer, (q, k, v)))
    assert sorted(seen) == [0, 1]
    k_SKD, v_SKD = cache.layers[1].format.decode(cache.layers[1].gather([0], 12), decoder.config.shape(1),
                                                 torch.float32)
    assert torch.equal(k_SKD, seen[1][1]) and torch.equal(v_SKD, seen[1][2])
    assert seen[0][0].shape == (12, 4, 8)


def test_nan_stops_with_layer_and_token_named():
    decoder = Decoder.random(tiny())
    decoder.weights["model.layers.1.mlp.down_proj.weight"][3, 2] = float("nan")
    with pytest.raises(ValueError, match="layer 1 of random gives NaN or infinity, first at new token 0 of 5"):
        decoder.hidden([ids(5)], decoder.teacher())
    decoder = Decoder.random(tiny())
    decoder.weights["model.embed_tokens.weight"][7] = float("inf")
    with pytest.raises(ValueError, match="layer 0: K holds NaN or infinity, first at token 2 of 4"):
        decoder.hidden([torch.tensor([1, 2, 7, 3])], decoder.teacher())
    assert decoder.hidden([torch.tensor([1, 2, 3])], decoder.teacher()).isfinite().all()


@pytest.mark.parametrize("make, match", [
    (lambda d: d.hidden([torch.tensor([67])], d.teacher()), "token id 67 is outside the vocabulary of 67"),
    (lambda d: d.hidden([torch.tensor([-1])], d.teacher()), "token id -1 is outside"),
    (lambda d: d.hidden([ids(129)], d.teacher()), "129 tokens are beyond the 128 of context"),
    (lambda d: d.hidden([ids(3), ids(0)], d.cache(8, sequences=2)), "at least one new token"),
    (lambda d: d.hidden([ids(3), ids(4)], d.cache(8, sequences=2), sequences=[0, 0]), "each one of its own"),
    (lambda d: d.hidden([ids(3)], d.cache(8), sequences=[1]), "each one of its own"),
    (lambda d: d.hidden([ids(3)[None]], d.cache(8)), "in one dimension, got torch.int64 of shape .1, 3."),
    (lambda d: d.hidden([ids(3).float()], d.cache(8)), "got torch.float32"),
    (lambda d: d.hidden([ids(9)], d.cache(8)), "would hold 9 tokens, and this cache was made for 8"),
    (lambda d: d.cache(8, kv_format=["fp32"]), "1 KV formats for 2 layers"),
    (lambda d: d.cache(8, kv_format="int8/tensor"), "int8/tensor has static scales: find them first"),
    (lambda d: d.cache(8, kv_format="nvfp4"), "layer 0 cannot keep its K and V as nvfp4"),
    (lambda d: d.cache(8, num_blocks=4), "num_blocks needs a paged layout"),
    (lambda d: d.cache(40, kv_format="int8/block16", variant="paged", layout=Layout(8)), "not a multiple of"),
    (lambda d: d.hidden([ids(4)], d.cache(8, variant="sdpa", layout=Layout(4))), "sdpa cannot compute this call"),
    (lambda d: Decoder(tiny(), {"model.embed_tokens.weight": torch.zeros(1, dtype=torch.int8)}), "dtype torch.int8"),
])
def test_wrong_use_is_refused_in_words(make, match):
    with pytest.raises(ValueError, match=match):
        make(Decoder.random(tiny()))
    with pytest.raises(KeyError, match="int8/token"):
        Decoder.random(tiny()).cache(8, kv_format="int8/tokens")


def test_weights_keep_their_dtype():
    decoder = Decoder.random(tiny()).to("cpu", torch.bfloat16)
    states = decoder.hidden([ids(6)], decoder.cache(8, kv_format="bf16"))
    assert states.dtype == torch.bfloat16
    exact = Decoder.random(tiny())
    expected = exact.hidden([ids(6)], exact.teacher())
    assert (states.float() - expected).norm() < 0.05 * expected.norm()


def test_renamed_shares_what_is_not_replaced():
    decoder = Decoder.random(tiny())
    other = decoder.renamed("other", {"model.norm.weight": torch.ones(32)}, context=64)
    assert other.name == "other" and other.config.context == 64
    assert other.weights["model.embed_tokens.weight"] is decoder.weights["model.embed_tokens.weight"]
    assert torch.equal(other.weights["model.norm.weight"], torch.ones(32))


def test_bytes_of_a_cache_are_those_of_its_format():
    decoder, shape = Decoder.random(tiny()), tiny().shape(0)
    cache = decoder.cache(20, kv_format="int8/token", sequences=2)
    decoder.hidden([ids(5), ids(11)], cache)
    assert cache.stored_bytes == 2 * sum(kv_format("int8/token").nbytes(n, shape) for n in (5, 11))
    assert cache.nbytes == 2 * 2 * kv_format("int8/token").nbytes(20, shape)
