"""What is captured is what the model computed, layer by layer, of Decoders and of transformers models."""
import hashlib
import json
from dataclasses import replace

import pytest
import torch

from kvlab.attention import Comparison, reference, trial
from kvlab.model.capture import capture
from kvlab.model.config import DecoderConfig
from kvlab.model.decoder import Decoder
from kvlab.probes import measure
from kvlab.probes.format_error import FormatError
from kvlab.probes.kernel_error import KernelError
from kvlab.shapes import AttentionShape, Workload

pytest.importorskip("safetensors", reason="captured tensors are safetensors files")
from safetensors import safe_open  # noqa: E402

CONFIG = DecoderConfig(vocab_size=90, hidden_size=32, intermediate_size=48, num_layers=3, num_q_heads=4, num_kv_heads=2,
                       head_dim=8, context=512, windows=(None, 16, None), qkv_bias=True)
TEXT = torch.randint(90, (60,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "captured"


@pytest.fixture(scope="module")
def decoder():
    return Decoder.random(CONFIG)


def stored(captured):
    with safe_open(captured.path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["kvlab"])


def test_the_files_hold_what_each_layer_computed_and_say_where_it_is_from(decoder, cache):
    seen = {}
    decoder.hidden([TEXT], decoder.cache(60),
                   observe=lambda layer, *qkv: seen.update({layer: [x.clone() for x in qkv]}))
    found = capture(decoder, TEXT, "all")
    assert [one.layer for one in found] == [0, 1, 2] and all(one.tokens == 60 for one in found)
    for one in found:
        tensors, about = stored(one)
        assert all(torch.equal(tensors[name], x) for name, x in zip("qkv", seen[one.layer], strict=True))
        assert one.shape == CONFIG.shape(one.layer) and about["layer"] == one.layer
        assert about["window"] == CONFIG.windows[one.layer] and about["tokens"] == 60 and about["model"] == "random"
        assert one.path == cache / f"{one.data[5:]}.safetensors"
        assert hashlib.sha256(one.path.read_bytes()).hexdigest() == one.data[5:]
    assert capture(decoder, TEXT, "all") == found, "the same run has the same name"
    assert capture(decoder, TEXT + 0, [2, 0]) == [found[0], found[2]] and capture(decoder, TEXT, 1) == [found[1]]


def test_attention_over_a_captured_layer_is_the_decoders_own(decoder):
    """A variant's output, and the oracle's, on the whole captured text is what the layer went on with."""
    outputs, store = [], decoder.cache(60)
    attend = store.attend
    store.attend = lambda *args: outputs.append(attend(*args)) or outputs[-1]
    decoder.hidden([TEXT], store)
    for one, out_TQD in zip(capture(decoder, TEXT, "all"), outputs, strict=True):
        made = trial("sdpa", Workload.prefill(one.shape, q_len=60), data=one.data)
        inputs = Comparison((made,)).inputs(1)["fp32", made.layout][0]
        assert made.why_not() is None
        assert torch.allclose(made.prepare([inputs])[0](), out_TQD, atol=1e-5)
        assert torch.allclose(reference(made.workload, inputs.q_BTQD, inputs.k, inputs.v).float(), out_TQD, atol=1e-5)


def test_a_captured_layer_is_measured_like_any_other_data(decoder):
    (one,) = capture(decoder, TEXT, 1, dtype="fp16")
    trials = tuple(trial(name, Workload(one.shape, (1,), (60,)), kv_format="int8/token", data=one.data)
                   for name in ("naive", "paged"))
    rows = measure(Comparison(trials), [KernelError(), FormatError()])
    assert [row["status"] for row in rows] == ["ok"] * 4, [row["error"] for row in rows]
    assert all(0 < row["value"] < 0.1 for row in rows if row["metric"] == "format_error")
    no_window = trial("naive", Workload(replace(one.shape, window=None), (1,), (60,)), data=one.data)
    assert "has window=16, and the workload's shape window=None" in no_window.why_not()


def test_the_model_runs_no_further_than_the_last_layer_chosen(decoder):
    begun = []
    watched = Decoder(decoder.config, decoder.weights)
    watched.block = lambda layer, *args: begun.append(layer) or Decoder.block(watched, layer, *args)
    capture(watched, TEXT, [0, 1])
    assert begun == [0, 1]


def test_a_string_is_encoded_by_the_decoders_tokenizer(decoder):
    tokenizers = pytest.importorskip("tokenizers", reason="encodes text")
    letters = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate("abcdefghĠ")}, []))
    letters.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = tokenizers.decoders.ByteLevel()
    reads = Decoder(decoder.config, decoder.weights, letters, "reader", "5" * 64)
    (one,) = capture(reads, "a bad cab", 0)
    tensors, about = stored(one)
    same, _ = stored(capture(decoder, torch.tensor([0, 8, 1, 0, 3, 8, 2, 0, 1]), 0)[0])
    assert all(torch.equal(tensors[name], same[name]) for name in "qkv")
    assert about["text_sha256"] == hashlib.sha256(b"a bad cab").hexdigest()
    assert about["model"] == "reader" and about["model_sha256"] == "5" * 64


def test_calibration_is_the_first_tokens_of_another_text(decoder):
    other = torch.randint(90, (300,), generator=torch.Generator().manual_seed(2))
    (wanted,) = capture(decoder, other, 1, tokens=256)
    with_it, without = (capture(decoder, TEXT, 1, calibration=c)[0] for c in (other, None))
    tensors, _ = stored(with_it)
    for name in "kv":
        assert torch.equal(tensors[f"calibration_{name}"], stored(wanted)[0][name])
    assert all(torch.equal(tensors[name], x) for name, x in stored(without)[0].items())
    one = trial("naive", Workload.decode(with_it.shape, kv_len=60), data=with_it.data, kv_format="int8/channel")
    (row,) = measure(Comparison((one,)), [KernelError()])
    assert row["status"] == "ok", row["error"]
    with pytest.raises(ValueError, match="the calibration text has 60 tokens; 256 are needed"):
        capture(decoder, other, 1, calibration=TEXT)
    for text, shared in ((other[:20], 20), (other, 32), (other[1:], 32), (torch.cat([TEXT, other[224:]]), 32),
                         (torch.cat([TEXT[:30], other[100:140]]), 32)):
        with pytest.raises(ValueError, match=f"is the text itself, or shares {shared} tokens in a row with it"):
            capture(decoder, text, 1, calibration=other)
    for text in (torch.cat([TEXT, other[100:131]]), torch.cat([TEXT, other[226:]]), other[256:]):
        assert capture(decoder, text, 1, calibration=other)[0].tokens == len(text), "31 tokens, or beyond the 256 used"


def test_out_gets_copies_to_pass_on(decoder, tmp_path, cache):
    (one,) = capture(decoder, TEXT, 0, tmp_path / "new" / "folder")
    assert one.path == tmp_path / "new" / "folder" / f"{one.data[5:]}.safetensors"
    again = cache / one.path.name
    assert one.path.read_bytes() == again.read_bytes()
    again.unlink()
    workload = Workload.decode(one.shape, kv_len=30)
    assert "are not here" in trial("naive", workload, data=one.data).why_not()
    assert trial("naive", workload, data=one.path).data == one.data and again.exists()


@pytest.mark.parametrize("dtype, wanted", [("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_the_files_dtype_is_chosen(decoder, dtype, wanted):
    tensors, _ = stored(capture(decoder, TEXT, 0, tokens=5, dtype=dtype)[0])
    assert {x.dtype for x in tensors.values()} == {wanted} and {len(x) for x in tensors.values()} == {5}


def test_one_layer_of_a_broken_model_is_named(decoder):
    broken = decoder.renamed("broken", {"model.layers.1.self_attn.k_proj.bias": torch.full((16,), float("inf"))})
    with pytest.raises(ValueError, match="layer 1 cannot be captured: it holds NaN or infinity in k, first at token 0"):
        capture(broken, TEXT, "all")


@pytest.mark.parametrize("text, layers, more, sentence", [
    (TEXT, 3, {}, 'layer 3 is not in this model; allowed: 0 to 2, or "all"'),
    (TEXT, [0, -1], {}, "layer -1 is not in this model"),
    (TEXT, [True], {}, "layer True is not in this model"),
    (TEXT, "first", {}, "layer 'f' is not in this model"),
    (TEXT, 1.5, {}, "layer 1.5 is not in this model"),
    (TEXT, [], {}, "no layer was chosen"),
    (TEXT, 0, {"dtype": "fp8"}, "allowed: fp32, fp16, bf16"),
    (TEXT, 0, {"tokens": 61}, "tokens=61, and the text has 60"),
    (TEXT, 0, {"tokens": 0}, "tokens=0"),
    (TEXT[:0], 0, {}, "the text has no tokens"),
    (TEXT.view(6, 10), 0, {}, "in one dimension"),
    (TEXT.float(), 0, {}, "whole numbers"),
    (TEXT + 60, 0, {}, "outside the vocabulary of 90"),
    (TEXT.repeat(10), 0, {}, "600 tokens are beyond the 512 of context"),
    ("some words", 0, {}, "without a tokenizer"),
], ids=str)
def test_wrong_wishes_are_refused(decoder, text, layers, more, sentence):
    with pytest.raises(ValueError, match=sentence):
        capture(decoder, text, layers, **more)


def test_something_that_is_no_model_is_refused():
    with pytest.raises(ValueError, match="cannot capture from Linear; give a kvlab Decoder"):
        capture(torch.nn.Linear(2, 2), TEXT, 0)


# -------------------------------------------------------------------------------------------------------- transformers

SIZES = dict(vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=128, sliding_window=16)


@pytest.mark.parametrize("kind, implementation, more, shape", [
    ("Llama", "sdpa", {}, AttentionShape(4, 2, 8)), ("Qwen3", "eager", {}, AttentionShape(4, 2, 8)),
    ("Mistral", "sdpa", {}, AttentionShape(4, 2, 8, window=16)),
    ("Gemma3", "sdpa", dict(query_pre_attn_scalar=23, layer_types=["sliding_attention", "full_attention"]),
     AttentionShape(4, 2, 8, window=16)),
    ("Gemma2", "eager", dict(attn_logit_softcapping=0.5), AttentionShape(4, 2, 8, window=16, softcap=0.5)),
])
def test_a_transformers_model_shows_the_attention_that_it_computes(kind, implementation, more, shape):
    """Plain attention over the file's tensors is what the model's own output projection was given."""
    transformers = pytest.importorskip("transformers", reason="captures from its models")
    text = {"Gemma3": "Gemma3Text"}.get(kind, kind)
    config = getattr(transformers, f"{text}Config")(**SIZES | more, attn_implementation=implementation)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    given = []
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda module, x: given.append(x[0].detach()))
    before = dict(transformers.AttentionInterface._global_mapping)
    one, last = capture(model, TEXT, "all")
    assert one.shape == shape and stored(last)[1]["layer"] == 1
    assert {name: stored(one)[1][name] for name in ("window", "softcap")} == dict(window=shape.window,
                                                                                  softcap=shape.softcap)
    whole = trial("sdpa" if shape.softcap is None else "naive", Workload.prefill(one.shape, q_len=60), data=one.data)
    inputs = Comparison((whole,)).inputs(1)["fp32", whole.layout][0]
    exact = reference(whole.workload, inputs.q_BTQD, inputs.k, inputs.v)
    assert torch.allclose(exact.float().flatten(1), given[0][0], atol=1e-5)
    assert transformers.AttentionInterface._global_mapping == before
    assert model.config._attn_implementation == implementation


def made(transformers, kind, **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | more)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def bidirectional(model):
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    return model


def masked(model, change):
    """The model, its second layer under a mask of its own making."""
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def changed(*args, attention_mask=None, **more):
        return forward(*args, attention_mask=change(torch.ones(60, 60).tril().bool())[None, None], **more)
    attention.forward = changed
    return model


@pytest.mark.parametrize("make, layers, sentence", [
    (lambda t: made(t, "GptOss", num_local_experts=2, num_experts_per_tok=1, attn_implementation="eager"), 1,
     "layer 0 asks attention for s_aux, which no kvlab variant computes"),
    (lambda t: bidirectional(made(t, "Llama")), 0, "layer 0 asks for cross or bidirectional attention; capture takes"),
    (lambda t: made(t, "Llama", attention_dropout=0.1).train(), 0, "layer 0 asks for dropout in its attention"),
    (lambda t: masked(made(t, "Llama"), lambda seen: seen.tril(3).triu(-9)), "all", "layer 1 .* neither causal nor"),
    (lambda t: masked(made(t, "Mistral"), lambda seen: seen.triu(-14)), 1, "layer 1 .* neither causal nor"),
    (lambda t: masked(made(t, "Llama"), lambda seen: seen[:, :50]), 1, "layer 1 .* neither causal nor"),
], ids=["sinks", "bidirectional", "dropout", "chunks", "another window", "other tokens"])
def test_attention_that_the_tensors_would_not_give_again_is_refused(make, layers, sentence, cache):
    transformers = pytest.importorskip("transformers", reason="captures from its models")
    with pytest.raises(ValueError, match=sentence):
        capture(make(transformers), TEXT, layers)
    assert not cache.exists() or layers == "all"


def test_a_plain_mask_of_the_models_own_is_taken():
    transformers = pytest.importorskip("transformers", reason="captures from its models")
    for kind, own in (("Llama", lambda seen: seen), ("Llama", lambda seen: torch.where(seen, 0.0, -1e30)),
                      ("Mistral", lambda seen: seen.triu(-15))):
        (one,) = capture(masked(made(transformers, kind), own), TEXT, 1)
        assert all(torch.equal(x, stored(capture(made(transformers, kind), TEXT, 1)[0])[0][name])
                   for name, x in stored(one)[0].items())


def test_transformers_attention_is_restored_after_an_error():
    transformers = pytest.importorskip("transformers", reason="captures from its models")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attn_implementation="eager"))
    model.model.layers[0].self_attn.v_proj.weight.data[3] = float("nan")
    before = dict(transformers.AttentionInterface._global_mapping)
    with pytest.raises(ValueError, match="layer 0 cannot be captured: it holds NaN or infinity in v"):
        capture(model, TEXT, "all")
    assert transformers.AttentionInterface._global_mapping == before
    with pytest.raises(ValueError, match="encode the text and give its token ids"):
        capture(model, "some words", 0)
