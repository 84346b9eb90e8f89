"""Distillation of converted attention: it computes what the decoder does, learns, repeats itself, stops at NaN."""
import sys

import pytest
import torch
from torch.nn.functional import linear

from kvlab.model import rope
from kvlab.model.config import DecoderConfig
from kvlab.model.decoder import Decoder
from kvlab.model.distil import _log_probabilities, distil
from kvlab.model.heads import pool_kv_heads

torch.set_num_threads(1)
KNOBS = dict(window=16, batch=2)
module = sys.modules[distil.__module__]


def made(**changed):
    given = dict(vocab_size=50, hidden_size=24, intermediate_size=32, num_layers=2, num_q_heads=6, num_kv_heads=2,
                 head_dim=8, context=64)
    decoder = Decoder.random(DecoderConfig(**{**given, **changed}))
    decoder.name = "tiny"
    return decoder


def ids(n=128, seed=1):
    return torch.randint(50, (n,), generator=torch.Generator().manual_seed(seed))


def kl(student, teacher):
    """Mean over the windows that were trained on: random weights and tokens have nothing that would generalise."""
    def log_probabilities(d):
        return torch.cat([d.logits(d.hidden([text], d.teacher())).log_softmax(-1) for text in ids().split(16)])
    found, goal = log_probabilities(student), log_probabilities(teacher)
    return float((goal.exp() * (goal - found)).sum(-1).mean())


@pytest.mark.parametrize("changed", [
    {}, dict(tied=True), dict(qkv_bias=True, o_bias=True, num_kv_heads=1), dict(qk_norm=True, num_kv_heads=6),
    dict(windows=(None, 5), rope_theta=100.0)])
def test_the_differentiable_forward_pass_is_the_decoders(changed):
    decoder = made(**changed)
    for name in list(decoder.weights):
        if name.endswith("bias"):
            decoder.weights[name] = 10 * decoder.weights[name]
    text = ids(48).view(2, 24)
    found = _log_probabilities(decoder.config, decoder.weights, text, rope.tables(decoder.config, 24))
    for one, found_TV in zip(text, found.split(24)):
        goal_TV = decoder.logits(decoder.hidden([one], decoder.teacher())).log_softmax(-1)
        assert torch.allclose(found_TV, goal_TV, atol=1e-4)


def test_layer_by_layer_brings_the_student_closer_and_touches_nothing_else():
    teacher = made(qkv_bias=True)
    student = pool_kv_heads(teacher, 1)
    given = [*teacher.weights.values(), *student.weights.values()]
    before = [w.clone() for w in given]
    taught = distil(student, teacher, ids(), 60, learning_rate=1e-2, **KNOBS)
    assert kl(taught, teacher) < 0.5 * kl(student, teacher)
    changed = {name for name, w in taught.weights.items() if w is not student.weights[name]}
    assert changed == {name for name in teacher.weights if "self_attn" in name}
    assert all(torch.equal(w, same) and not w.requires_grad for w, same in zip(given, before))
    assert not any(w.requires_grad for w in taught.weights.values())
    assert taught.name == "tiny, 1 KV head (mean), distilled 60 steps a layer"
    assert taught.config == student.config


def test_each_layer_learns_on_what_reaches_it_in_the_teacher(monkeypatch):
    """The inputs of every layer's attention are the teacher's own: all of the block before, its residual too."""
    teacher, given, true = made(qkv_bias=True, num_layers=3), {}, module._attention

    def attention(config, layer, w, h_NH, *rest):
        given.setdefault(layer, linear(h_NH, w[f"model.layers.{layer}.self_attn.v_proj.weight"],
                                       w[f"model.layers.{layer}.self_attn.v_proj.bias"]))
        return true(config, layer, w, h_NH, *rest)
    monkeypatch.setattr(module, "_attention", attention)
    distil(pool_kv_heads(teacher, 1), teacher, ids(), 1, **KNOBS)
    seen = {layer: [] for layer in range(3)}
    for text in ids().split(16):
        teacher.hidden([text], teacher.teacher(), observe=lambda layer, q, k, v: seen[layer].append(v.flatten(1)))
    for layer, values in seen.items():
        assert torch.allclose(given[layer], torch.cat(values), atol=1e-4), layer


def test_the_learning_rate_falls_linearly_to_0_in_both_stages(monkeypatch):
    rates = []

    class Adam(torch.optim.Adam):
        def step(self, *args, **more):
            rates.append(self.param_groups[0]["lr"])
            return super().step(*args, **more)
    monkeypatch.setattr(torch.optim, "Adam", Adam)
    teacher = made()
    distil(pool_kv_heads(teacher, 1), teacher, ids(), 4, kd_steps=2, learning_rate=0.01, kd_learning_rate=0.1, **KNOBS)
    layer = [0.01, 0.0075, 0.005, 0.0025]
    assert rates == pytest.approx([*layer, *layer, 0.1, 0.05])


def test_end_to_end_brings_the_student_closer_also_where_gradients_are_off():
    teacher = made()
    student = pool_kv_heads(teacher, 1)
    with torch.no_grad():
        taught = distil(student, teacher, ids(), 0, kd_steps=40, kd_learning_rate=1e-2, **KNOBS)
    assert kl(taught, teacher) < 0.5 * kl(student, teacher)
    assert taught.name == "tiny, 1 KV head (mean), distilled 40 steps end to end"
    assert taught.weights["model.layers.0.mlp.up_proj.weight"] is teacher.weights["model.layers.0.mlp.up_proj.weight"]


def test_both_stages_follow_one_another():
    teacher = made()
    student = pool_kv_heads(teacher, 1)
    both = distil(student, teacher, ids(), 10, kd_steps=10, **KNOBS)
    assert both.name.endswith("distilled 10 steps a layer, distilled 10 steps end to end")
    first = distil(student, teacher, ids(), 10, **KNOBS)
    again = distil(first, teacher, ids(), 0, kd_steps=10, **KNOBS)
    assert all(torch.equal(w, again.weights[name]) for name, w in both.weights.items())


def test_every_step_of_both_stages_is_announced():
    teacher, told = made(), []
    distil(pool_kv_heads(teacher, 1), teacher, ids(), 3, kd_steps=2, told=told.append, **KNOBS)
    assert told == [*(f"distilling layer {layer}, step {i}" for layer in range(2) for i in range(3)),
                    *(f"distilling end to end, step {i}" for i in range(2))]


def test_it_repeats_itself_and_the_seed_decides_the_order_of_windows():
    teacher = made()
    student = pool_kv_heads(teacher, 1)
    torch.manual_seed(0)
    one = distil(student, teacher, ids(), 3, **KNOBS)
    torch.manual_seed(1)
    two = distil(student, teacher, ids(), 3, **KNOBS)
    other = distil(student, teacher, ids(), 3, seed=1, **KNOBS)
    name = "model.layers.1.self_attn.v_proj.weight"
    assert torch.equal(one.weights[name], two.weights[name])
    assert not torch.equal(one.weights[name], other.weights[name])


def test_a_loss_that_is_not_finite_stops_with_layer_and_step():
    teacher = made()
    name = "model.layers.1.self_attn.o_proj.weight"
    broken = teacher.renamed("broken", {name: torch.full_like(teacher.weights[name], float("nan"))})
    with pytest.raises(ValueError, match="layer 1, step 0: .* nan"):
        distil(pool_kv_heads(broken, 1), broken, ids(), 2, **KNOBS)
    with pytest.raises(ValueError, match="end to end, step 0: .* nan"):
        distil(pool_kv_heads(broken, 1), broken, ids(), 0, kd_steps=2, **KNOBS)
    with pytest.raises(ValueError, match="layer 0, step [1-9]: .* lower learning rate"):
        distil(pool_kv_heads(teacher, 1), teacher, ids(), 9, learning_rate=1e30, **KNOBS)


@pytest.mark.parametrize("wrong, said", [
    (lambda s, t: distil(s, t, ids(31), **KNOBS), "31 tokens.*at least 32"),
    (lambda s, t: distil(s, t, ids(), window=65, batch=1), "beyond the model's context of 64"),
    (lambda s, t: distil(s, t, ids(), -1, **KNOBS), "steps=-1"),
    (lambda s, t: distil(s, t, ids(), learning_rate=0, **KNOBS), " learning_rate=0"),
    (lambda s, t: distil(s, t, ids(), kd_learning_rate=-1, **KNOBS), "kd_learning_rate=-1"),
    (lambda s, t: distil(s, made(head_dim=4), ids(), **KNOBS), "differ only in num_kv_heads"),
])
def test_what_is_impossible_is_refused(wrong, said):
    teacher = made()
    with pytest.raises(ValueError, match=said):
        wrong(pool_kv_heads(teacher, 1), teacher)


def test_a_student_keeps_its_dtype():
    teacher = made().to("cpu", torch.bfloat16)
    taught = distil(pool_kv_heads(teacher, 1), teacher, ids(), 2, kd_steps=1, **KNOBS)
    assert {w.dtype for w in taught.weights.values()} == {torch.bfloat16}
