"""attach against transformers' own attention and cache, on tiny random models of weights large enough to matter."""
import copy
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5.0 or later")

from kvlab.attention import VariantRef, ideal_traffic  # noqa: E402
from kvlab.kv.cache import Layout  # noqa: E402
from kvlab.kv.formats import kv_format  # noqa: E402
from kvlab.model.transformers import attach  # noqa: E402
from kvlab.record.reading import READING, Reading, schema, table  # noqa: E402
from kvlab.shapes import AttentionShape, Workload  # noqa: E402

BASE = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, pad_token_id=0)
GEMMA = dict(head_dim=16, sliding_window=6, layer_types=["sliding_attention", "full_attention"],
             query_pre_attn_scalar=11)
KINDS = {"Llama": {}, "Qwen2": {}, "Qwen3": dict(head_dim=16), "Gemma3": GEMMA, "Mistral": dict(sliding_window=6)}
SHAPE = AttentionShape(4, 2, 8)                             # of the Llama and Qwen2 models
PADDED = (torch.arange(19) > 2).long().expand(2, -1)
PACKED = torch.cat([torch.arange(19), torch.arange(9), torch.arange(10)]).view(2, -1)       # the second sequence only
IDS = torch.randint(3, 61, (2, 19), generator=torch.Generator().manual_seed(3))
CALIBRATION = torch.randint(3, 61, (40,), generator=torch.Generator().manual_seed(4))


def make(kind, **config):
    torch.manual_seed(7)
    name = "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config"
    made = getattr(transformers, name)(**BASE, **KINDS[kind], **config)
    model = getattr(transformers, f"{kind}ForCausalLM")(made).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("_proj.bias"):
                weight.normal_(0, 0.5)
    return model


def cache_of(output):
    return output.cache if "cache" in output else output.past_key_values


def forward(model, ids, cache=None, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)                # past_key_values was renamed in 5.2x
        return model(ids, past_key_values=cache, use_cache=True, **options)


def in_steps(model, ids, lengths, cache=None):
    """(logits, cache) of the text in pieces of those lengths."""
    logits = []
    for piece in ids.split(lengths, 1):
        output = forward(model, piece, cache)
        cache = cache_of(output)
        logits.append(output.logits)
    return torch.cat(logits, 1), cache


@torch.no_grad()
def own(model, ids=IDS):
    return model(ids).logits


def generated(model, ids=IDS, **options):
    return model.generate(ids, max_new_tokens=14, do_sample=False, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_fp32_gives_the_models_own_logits_and_tokens(kind):
    model = make(kind)
    want, tokens = own(model), generated(model)
    with torch.no_grad():
        hidden = model.base_model(IDS)[0]
    with attach(model):
        torch.testing.assert_close(model(IDS).logits, want, rtol=0, atol=1e-4)
        torch.testing.assert_close(model(IDS, use_cache=False).logits, want, rtol=0, atol=1e-4)
        torch.testing.assert_close(in_steps(model, IDS, [9, 1, 1, 3, 1, 4])[0], want, rtol=0, atol=1e-4)
        torch.testing.assert_close(model.base_model(IDS)[0], hidden, rtol=0, atol=1e-4)
        assert torch.equal(generated(model), tokens)
    assert want.std() > 0.3


@pytest.mark.parametrize("kind", ["Llama", "Gemma3"])
@pytest.mark.parametrize("variant, layout", [("paged", Layout(4, "random")), ("paged", Layout(8, order="token")),
                                             ("naive", None)])
def test_other_variants_and_layouts(kind, variant, layout):
    model = make(kind)
    want, tokens = own(model), generated(model)
    with attach(model, variant, layout=layout) as attached:
        torch.testing.assert_close(in_steps(model, IDS, [9, 1, 3, 6])[0], want, rtol=0, atol=1e-4)
        assert torch.equal(generated(model), tokens)
    assert {row["variant"] for row in attached.rows()} == {variant}
    assert {row["block_size"] for row in attached.rows()} == {layout and layout.block_size}


def test_a_soft_capped_model_is_computed_or_refused():
    torch.manual_seed(0)
    config = transformers.Gemma2Config(**BASE, head_dim=16, sliding_window=6, attn_logit_softcapping=2.0)
    model = transformers.Gemma2ForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    want = own(model)
    with attach(model, "naive"):
        torch.testing.assert_close(model(IDS).logits, want, rtol=0, atol=1e-4)
    with attach(model), pytest.raises(ValueError, match="layer 0: sdpa on fp32: .*no soft-capping; use naive or flash"):
        model(IDS)


def test_bf16():
    model = make("Llama").to(torch.bfloat16)
    want = own(model).float()
    with attach(model, kv_format="bf16") as attached:
        got = in_steps(model, IDS, [9, 1, 3, 6])[0]
    assert got.dtype is torch.bfloat16
    assert (got.float() - want).norm() < 0.05 * want.norm()
    assert {(row["dtype"], row["format_path"]) for row in attached.rows()} == {("bf16", "native")}


def by_hand(fmt):
    """An attention function that rounds K and V to the format, written without kvlab's cache and variants."""
    def attention(module, query, key, value, attention_mask, **options):
        rounded = [fmt.decode(fmt.encode(k.transpose(0, 1), v.transpose(0, 1)), SHAPE, torch.float32)
                   for k, v in zip(key, value)]
        key, value = (torch.stack(side).transpose(1, 2).repeat_interleave(2, 1) for side in zip(*rounded))
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return out.transpose(1, 2), None
    return attention


@pytest.mark.parametrize("name", ["int8/token", "fp8_e4m3", "int4/token"])
def test_a_format_costs_what_rounding_k_and_v_by_hand_costs(name):
    model = make("Qwen2")
    want = own(model)
    transformers.AttentionInterface.register("by_hand", by_hand(kv_format(name)))
    try:
        model.set_attn_implementation("by_hand")
        rounded = own(model)
    finally:
        transformers.AttentionInterface._global_mapping.pop("by_hand")
        model.set_attn_implementation("sdpa")
    with attach(model, kv_format=name):
        got = [model(IDS).logits, in_steps(model, IDS, [9, 1, 3, 6])[0]]
    for logits in got:
        torch.testing.assert_close(logits, rounded, rtol=0, atol=2e-4)
    assert (rounded - want).abs().max() > 10 * 2e-4


@pytest.mark.parametrize("name", ["int4/channel/g4", "kivi4/g4/r8", "int8/token+int4/channel/g4",
                                  "int8/token+kivi4/g4/r8"])
def test_a_prompt_of_a_grouped_format_is_attended_in_full_and_stored_in_the_format(name):
    model, fmt = make("Llama"), kv_format(name)
    want, full = own(model), transformers.DynamicCache()
    with torch.no_grad():
        forward(model, IDS, full)
    with attach(model, "paged", name, Layout(4)) as attached:
        output = forward(model, IDS)
        torch.testing.assert_close(output.logits, want, rtol=0, atol=1e-4)
        store = cache_of(output).layers[0].store
        kept = store.cache.gather(store.tables[1], 19, 1)
        layer = full.layers[0]
        encoded = fmt.encode(layer.keys[1].transpose(0, 1), layer.values[1].transpose(0, 1))
        for got, expected in zip(fmt.decode(kept, SHAPE, torch.float32), fmt.decode(encoded, SHAPE, torch.float32)):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
        later = in_steps(model, IDS, [12, 7])[0]                      # the second piece meets the first as it is stored
        torch.testing.assert_close(later[:, :12], want[:, :12], rtol=0, atol=1e-4)
        assert (later[:, 12:] - want[:, 12:]).abs().max() > 1e-2
        alone = in_steps(model, IDS, [12, 1, 6])[0]
        torch.testing.assert_close(alone[:, :12], want[:, :12], rtol=0, atol=1e-4)
        assert (alone[:, 12] - want[:, 12]).abs().max() > 1e-2
    notes = {row["note"] for row in attached.rows() if row["metric"] == "latency_s" and row["phase"] == "prefill"}
    assert f"layer 1; own tokens attended in fp32, then kept in {name}" in notes
    assert {row["kv_format"] for row in attached.rows()} == {name}


def test_a_later_token_changes_nothing_before_it():
    model, changed = make("Llama"), IDS.clone()
    changed[:, 15] = 5
    for name in ("int8/token", "int4/channel/g4", "kivi4/g4/r8"):
        with attach(model, kv_format=name):
            assert torch.equal(model(IDS).logits[:, :15], model(changed).logits[:, :15])


def test_static_scales_are_those_of_the_calibration_text():
    model, fmt, seen = make("Llama"), kv_format("int8/head"), transformers.DynamicCache()
    with torch.no_grad():
        forward(model, CALIBRATION[None], seen)
    with attach(model, kv_format=["int8/head", "fp32"], calibration=CALIBRATION.tolist()) as attached:
        logits = model(IDS).logits
    k, v = (x[0].transpose(0, 1) for x in (seen.layers[0].keys, seen.layers[0].values))
    expected = fmt.calibrate(k, v)
    packed = [one.encode(k, v) for one in (attached.formats[0], expected)]
    for got, wanted in zip(packed[0].k + packed[0].v, packed[1].k + packed[1].v):
        assert torch.equal(got, wanted)
    with attach(model, kv_format=[expected, "fp32"]):
        assert torch.equal(model(IDS).logits, logits)
    assert 1e-3 < (logits - own(model)).abs().max()
    assert [len(attached.calls), attached.formats[1].name] == [2, "fp32"]


def state(model):
    """All that attach may touch."""
    configs = [model.config, *(m.config for m in model.modules() if hasattr(m, "config"))]
    return dict(implementations=[c._attn_implementation for c in configs],
                configs=copy.deepcopy([c.to_dict() for c in configs]),
                hooks=[(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()],
                attributes=[sorted(vars(m)) for m in model.modules()],
                functions=dict(transformers.AttentionInterface._global_mapping),
                masks=dict(transformers.AttentionMaskInterface._global_mapping),
                grad=torch.is_grad_enabled(), training=model.training)


def test_everything_is_undone_also_after_an_exception(capfd):
    model = make("Gemma3")
    model.generation_config.pad_token_id = 0
    before, want = state(model), own(model)
    with attach(model, "paged", "int8/tensor", calibration=CALIBRATION):
        assert state(model) != before and not torch.is_grad_enabled()
        generated(model)
    assert state(model) == before
    with pytest.raises(KeyboardInterrupt), attach(model):
        model(IDS)
        raise KeyboardInterrupt
    assert state(model) == before
    with pytest.raises(ValueError, match="layer 0"), attach(model, "flash_attn"):
        model(IDS)
    assert state(model) == before
    with pytest.raises(ValueError, match="is attached already"), attach(model), attach(model):
        pass
    assert state(model) == before
    with pytest.raises(ValueError, match="vocab|index|range|K holds"), attach(model):
        model(inputs_embeds=torch.full((1, 3, 32), float("nan")))
    assert state(model) == before
    assert torch.equal(own(model), want)
    model(IDS).logits.sum().backward()
    said = capfd.readouterr()
    assert said.out == said.err == ""


def test_a_cache_of_the_users_own_is_filled_and_refused_outside():
    model, cache = make("Llama"), transformers.DynamicCache()
    want = own(model)
    with attach(model, kv_format="int8/token"):
        got, after = in_steps(model, IDS, [9, 10], cache)
        assert after is cache and cache.get_seq_length() == 19
        assert (got - want).abs().max() < 0.5
    with torch.no_grad(), pytest.raises(ValueError, match="inside a kvlab.attach that has ended"):
        forward(model, IDS[:, :1], cache)
    with attach(model):
        with pytest.raises(ValueError, match="another kvlab.attach"):
            forward(model, IDS[:, :1], cache)
        fresh = cache_of(forward(model, IDS))
        fresh.reset()
        torch.testing.assert_close(in_steps(model, IDS, [9, 10], fresh)[0], want, rtol=0, atol=1e-4)
        for method, given in (("crop", -1), ("reorder_cache", torch.tensor([1, 0])), ("batch_repeat_interleave", 2),
                              ("batch_select_indices", torch.tensor([0]))):
            with pytest.raises(ValueError, match="neither reordered"):
                getattr(fresh, method)(given)
        with pytest.raises(ValueError, match="neither reordered"):
            copy.deepcopy(fresh)
        model(IDS, None, None, given := transformers.DynamicCache())
        assert given.get_seq_length() == 19


def test_two_models_may_be_attached_at_once():
    llama, mistral = make("Llama"), make("Mistral")
    with attach(llama, "naive") as first, attach(mistral) as second:
        llama(IDS)
        assert not second.calls
        torch.testing.assert_close(mistral(IDS).logits, own(make("Mistral")), rtol=0, atol=1e-4)
    assert [len(first.calls), len(second.calls)] == [2, 2]


def test_a_layer_whose_k_or_window_is_not_what_it_says_is_refused(monkeypatch):
    model = make("Gemma3")
    model.model.layers[0].self_attn.sliding_window = 3
    with attach(model), pytest.raises(ValueError, match="layer 0 says that its window is 3, .* shows .* 6 of"):
        model(IDS)
    model = make("Llama")
    with attach(model) as attached:
        cache = cache_of(forward(model, IDS))
        attached.pending = torch.zeros(1), cache.layers[0].store      # as a call that broke off would leave it
        model(IDS, use_cache=False)
        update = type(cache.layers[0]).update
        monkeypatch.setattr(type(cache.layers[0]), "update", lambda *given, **more: [2 * x for x in update(*given)])
        with pytest.raises(ValueError, match="layer 0 changes K between its cache and its attention"):
            model(IDS)


def bidirectional(model):
    attention = model.model.layers[0].self_attn
    attention.is_causal = False
    try:
        model(IDS)
    finally:
        attention.is_causal = True


@pytest.mark.parametrize("what, call, sentence", [
    ("padding", lambda m: m(IDS, attention_mask=PADDED), "has zeros .a padded"),
    ("padding in generate", lambda m: generated(m, attention_mask=PADDED), "zeros"),
    ("a 4D mask", lambda m: m(IDS, attention_mask=torch.zeros(2, 1, 19, 19)), "a 4D mask"),
    ("packed", lambda m: m(IDS, position_ids=PACKED, use_cache=False), "packed sequences"),
    ("beams", lambda m: generated(m, num_beams=2), "neither reordered"),
    ("static cache", lambda m: m(IDS, use_cache=True, past_key_values=transformers.StaticCache(m.config, 32)),
     "neither causal|an empty plain DynamicCache, not StaticCache"),
    ("static generate", lambda m: generated(m, cache_implementation="static"), "neither causal|DynamicCache"),
    ("offloaded", lambda m: generated(m, cache_implementation="offloaded"), "offload|DynamicCache"),
    ("other batch", lambda m: in_steps(m, IDS[:1], [19], cache_of(forward(m, IDS))), "2 sequences and gets 1"),
    ("gradients", lambda m: torch.enable_grad()(m)(IDS), "layer 0: attach computes no gradients"),
    ("dropout", lambda m: m.train()(IDS), "dropout in its attention; call model.eval"),
    ("sinks", lambda m: m(IDS, s_aux=torch.ones(4)), "layer 0 asks attention for s_aux, which no kvlab variant"),
    ("bidirectional", lambda m: bidirectional(m), "layer 0 asks for cross or bidirectional attention; attach takes"),
    ("weights", lambda m: m(IDS, output_attentions=True), "output_attentions|eager"),
    ("NaN", lambda m: m(inputs_embeds=torch.full((1, 3, 32), float("nan"))), "layer 0: K holds NaN"),
])
def test_what_would_be_silently_wrong_is_refused(what, call, sentence):
    model = make("Llama", attention_dropout=0.1)
    with attach(model):
        with pytest.raises(ValueError, match=sentence):
            call(model)
        model.eval()
        assert torch.isfinite(model(IDS).logits).all()                # and the next call is not the worse for it


def test_a_cache_that_was_filled_before_is_refused():
    model, cache = make("Llama"), transformers.DynamicCache()
    with torch.no_grad():
        forward(model, IDS, cache)
    with attach(model), pytest.raises(ValueError, match="was filled before the model was attached"):
        forward(model, IDS[:, :1], cache)


def test_another_model_of_the_same_config_is_refused():
    model = make("Llama")
    twin = transformers.LlamaForCausalLM(model.config).eval()
    with attach(model):
        with pytest.raises(ValueError, match="shares the attached model's config"):
            twin(IDS)
        with pytest.raises(ValueError, match="is attached already"), attach(twin):
            pass


@pytest.mark.parametrize("options, error, sentence", [
    (dict(variant="spda"), KeyError, "sdpa"), (dict(kv_format="int8/tokn"), KeyError, "int8/token"),
    (dict(kv_format=["fp32"]), ValueError, "has 1 entries and the model 2 layers"),
    (dict(kv_format="int8/tensor"), ValueError, "int8/tensor has static scales: give calibration=token ids"),
    (dict(kv_format="int8/tensor", calibration=[]), ValueError, "calibration must be token ids.* not empty"),
    (dict(kv_format="int8/tensor", calibration=torch.zeros(1, 2, 3).long()), ValueError, "calibration must be"),
    (dict(kv_format="int8/tensor", calibration=[0.5]), ValueError, "calibration must be token ids"),
    (dict(layout=Layout(4, share_prefix=True)), ValueError, "share_prefix"),
])
def test_bad_arguments(options, error, sentence):
    model = make("Llama")
    before = state(model)
    with pytest.raises(error, match=sentence), attach(model, **options):
        pass
    assert state(model) == before


@pytest.mark.parametrize("options, sentence", [
    (dict(kv_format="nvfp4"), "layer 0: sdpa on nvfp4: kvlab knows how large nvfp4 is"),
    (dict(layout=Layout(4)), "layer 0: sdpa on fp32: reads contiguous caches only"),
    (dict(variant="paged", kv_format="int4/channel/g4", layout=Layout(6)), "layer 0: .*not a multiple of int4/chan"),
])
def test_a_variant_or_format_that_cannot_do_it_names_the_layer(options, sentence):
    model = make("Llama")
    with attach(model, **options), pytest.raises(ValueError, match=sentence):
        model(IDS)


def test_models_and_versions_that_attach_cannot_take(monkeypatch):
    with pytest.raises(ValueError, match="takes a Hugging Face transformers model, got Linear"), \
            attach(torch.nn.Linear(2, 2)):
        pass
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=61, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(ValueError, match="attach takes decoders only"), attach(t5):
        pass
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1,
                                                          num_attention_heads=2, intermediate_size=16)).eval()
    with attach(bert), pytest.raises(ValueError, match="neither causal nor a plain window|no layer_idx|bidirectional"):
        bert(IDS)
    model = make("Llama")
    monkeypatch.setattr("transformers.__version__", "4.57.1")        # by name: transformers replaces its own module
    with pytest.raises(ValueError, match="needs transformers 5.0 or later, 4.57.1 is installed"), attach(model):
        pass
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="5.9.0"))
    with pytest.raises(ValueError, match="needs transformers 5.0 or later.*5.9.0 is installed"), attach(model):
        pass
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="pip install 'transformers>=5'"), attach(model):
        pass


def test_rows_make_a_result_table():
    model = make("Mistral")
    with attach(model, kv_format="int8/token", errors=True) as attached:
        in_steps(model, IDS, [12] + [1] * 7)
    rows = attached.rows()
    schema().validate(table(rows))
    for row in rows:
        Reading(**{name: row[name] for name in READING if name in row})
    found = table(rows)
    assert set(found["metric"]) == {"latency_s", "ideal_bytes", "kv_bytes", "kernel_error", "format_error"}
    assert (found["model"] == "MistralForCausalLM").all() and (found["kv_format"] == "int8/token").all()
    assert found.groupby(["case_id", "metric"]).size().eq(1).all() and found["case_id"].nunique() == 4
    decode = found[(found["phase"] == "decode") & found["note"].str.startswith("layer 1")].set_index("metric")
    shape, fmt = AttentionShape(4, 2, 8, window=6), kv_format("int8/token")
    assert decode["value"]["kv_bytes"] == 2 * fmt.nbytes(19, shape, first=13) == 2 * fmt.nbytes(6, shape)
    ideal = ideal_traffic(Workload(shape, (1, 1), (16, 16)), fmt, 4)
    assert decode["value"]["ideal_bytes"] == ideal.read_bytes + ideal.write_bytes
    assert decode["note"]["latency_s"] == "layer 1; kv_len 13 … 19"
    latency = decode.loc["latency_s"]
    assert (latency["n"], latency["batch_size"], latency["method"]) == (7, 2, "timer:thread_cpu")
    assert 0 < latency["low"] <= latency["value"] <= latency["high"] < 1
    assert decode["value"]["kernel_error"] < 1e-6 < 1e-3 < decode["value"]["format_error"] < 0.05


def test_the_errors_are_those_of_the_oracle():
    """Layer 0 sees the same K and V whatever the format: its errors can be had from the model's own cache."""
    model, fmt, full = make("Llama"), kv_format("int4/token"), transformers.DynamicCache()
    with attach(model, kv_format="int4/token", errors=True) as attached:
        model(IDS)
    with torch.no_grad():
        forward(model, IDS, full)
    taken = []
    hook = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda m, given: taken.append(given[0]))
    own(model)
    with attach(model, kv_format="int4/token"):
        model(IDS)
    hook.remove()
    exact, rounded = taken
    expected = float((rounded - exact).norm() / exact.norm())
    (found,) = (r["value"] for r in attached.rows() if r["metric"] == "format_error" and r["note"] == "layer 0")
    assert found == pytest.approx(expected, rel=1e-3)
    assert fmt.nbytes(19, SHAPE) * 2 == next(r["value"] for r in attached.rows() if r["metric"] == "kv_bytes")


def test_outlier_channels_of_k_cost_int4_per_token_more_than_per_channel():
    """Two large channels of K, as Qwen2's biases make them, stretch a token's scale and not those of other channels."""
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{
        **BASE, "hidden_size": 128, "num_attention_heads": 8, "initializer_range": 0.1})).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias.normal_(0, 0.3).view(2, 16)
            bias[:, 6:8] *= 30
    ids, errors = torch.randint(3, 61, (1, 72)), {}
    for name in ("int8/token", "fp8_e4m3/token", "int4/token", "kivi4/g8/r8"):
        with attach(model, kv_format=name, errors=True) as attached:
            in_steps(model, ids, [64] + [1] * 8)
        errors[name] = [r["value"] for r in attached.rows() if r["metric"] == "format_error" and r["q_len"] == 1]
    for layer in range(2):
        int8, fp8, int4, kivi = (errors[name][layer] for name in errors)
        assert int8 < fp8 < int4 and 5 * int8 < int4 and 1.5 * kivi < int4, errors


def test_a_variant_of_the_users_own_is_called_as_kvlab_calls_it():
    seen = []

    class Spy(type(VariantRef.of("sdpa").load())):
        name = "spy"

        def prepare(self, trial, inputs):
            seen.append((trial.workload, inputs.kv_lens, tuple(inputs.q_TQD.shape), inputs.cache.format.name))
            return super().prepare(trial, inputs)

    model = make("Gemma3")
    with attach(model, Spy, "int8/token") as attached:
        in_steps(model, IDS, [18, 1])
    shapes = [AttentionShape(4, 2, 16, window=6), AttentionShape(4, 2, 16)]
    assert seen == [(Workload(s, (n, n), (m, m)), (m, m), (2 * n, 4, 16), "int8/token")
                    for n, m in ((18, 18), (1, 19)) for s in shapes]
    assert {row["variant"] for row in attached.rows()} == {"spy"}
