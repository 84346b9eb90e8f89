"""Recall models: exact arithmetic, seeds that do not see each other, scores through the cache, and what is refused."""
import math
from dataclasses import replace

import pytest
import torch

from kvlab.accuracy import recall
from kvlab.accuracy._recall_model import draw, init, logits
from kvlab.accuracy.recall import RecallCell, evaluate, rows, train
from kvlab.kv.formats import format_names
from kvlab.record.reading import schema, table

TINY = RecallCell(2, 4, num_q_heads=4, seeds=(0, 1), pairs=(2, 4), evaluated=(4, 6), num_keys=16, num_values=8,
                  queries=32, batch_size=6, steps=6, width=16)
TWO = replace(TINY, task="two_token")


@pytest.fixture(scope="module")
def learnt():
    return train(replace(TINY, num_kv_heads=4, head_dim=8, seeds=(3,), steps=150, batch_size=16, lr=1e-2, width=32))


@pytest.mark.parametrize("cell", [TINY, TWO], ids=["pair", "two_token"])
def test_a_seed_comes_out_the_same_whichever_others_train_beside_it(cell):
    both, one = train(cell), train(replace(cell, seeds=(1,)))
    for name, weight in one.weights.items():
        assert torch.equal(both.seed(1)[name], weight), name
        assert not torch.equal(both.seed(0)[name], weight), name
    assert evaluate(both, 1, 4) == evaluate(one, 1, 4)


def test_training_again_gives_the_same_and_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    a, b = train(TINY), train(TINY)
    assert all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)
    evaluate(a, 0, 4, "int8/token")
    assert torch.equal(torch.get_rng_state(), state)


def test_a_batch_is_a_question_with_its_answer():
    batch = draw(TINY, 5, 7, [torch.Generator().manual_seed(s) for s in (0, 1)])
    assert batch.keys_ZBP.shape == (2, 7, 5) and batch.query_ZBT.shape == (2, 7, 32)
    assert all(len(set(keys.tolist())) == 5 for keys in batch.keys_ZBP.flatten(0, 1))
    at = (batch.keys_ZBP[:, :, None] == batch.query_ZBT[..., None]).int().argmax(-1)
    assert torch.equal(batch.values_ZBP.gather(2, at), batch.answer_ZBT)
    assert not torch.equal(batch.keys_ZBP[0], batch.keys_ZBP[1])


@pytest.mark.parametrize("use", [recall._TRAINING, recall._EVALUATION, recall._CALIBRATION])
def test_every_seed_use_and_n_has_batches_of_its_own(use):
    def batch(seed, use, pairs=0):
        return draw(TINY, 5, 7, [recall._generator(TINY, seed, use, pairs)])
    mine = batch(1, use)
    others = [batch(0, use), batch(2, use), batch(1, use % 3 + 1), batch(1, use, 4), batch(1 + 2**31, use)]
    for other in others:
        assert not torch.equal(mine.keys_ZBP, other.keys_ZBP) and not torch.equal(mine.values_ZBP, other.values_ZBP)
    assert torch.equal(mine.answer_ZBT, batch(1, use).answer_ZBT)
    seen = {recall._generator(TINY, seed, use, pairs).initial_seed() for seed in range(20) for pairs in range(20)}
    assert len(seen) == 400 and max(seen) < 2**32       # torch's generator of the CPU drops what stands above


def test_questions_differ_between_seeds_in_training_and_in_scores(monkeypatch):
    drawn = []
    monkeypatch.setattr(recall, "draw", lambda *args: drawn.append(draw(*args)) or drawn[-1])
    trained = train(replace(TINY, steps=1))
    assert not torch.equal(drawn[0].keys_ZBP[0], drawn[0].keys_ZBP[1])
    for seed in (0, 1):
        evaluate(trained, seed, 4)
    assert not torch.equal(drawn[1].keys_ZBP, drawn[2].keys_ZBP)


@pytest.mark.parametrize("task", ["pair", "two_token"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_logits_are_those_of_attention_written_out(task, kv_heads):
    """Every query head by itself, with softmax and matrices; positions by complex numbers."""
    cell = replace(TINY, task=task, num_kv_heads=kv_heads, seeds=(5,))
    w = {name: x[0].double() for name, x in init(cell).items()}
    batch = draw(cell, 3, 1, [torch.Generator().manual_seed(9)])
    keys, values, queries = (x[0, 0] for x in (batch.keys_ZBP, batch.values_ZBP, batch.query_ZBT))
    if task == "pair":
        x = w["key"][keys] + w["value"][values]
    else:
        x = torch.stack([w["key"][keys], w["value"][values]], 1).flatten(0, 1)
    y, S = w["key"][queries], len(x)

    def norm(t):
        return (t - t.mean(-1, keepdim=True)) / (t.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()

    def turned(t, positions):
        half = t.shape[-1] // 2
        angle = positions[:, None] * 10_000.0 ** (-torch.arange(half).double() / half)
        z = torch.complex(t[:, :half], t[:, half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([z.real, z.imag], -1)

    def block(t, layer, at, seen):
        """t after attention to the pairs' tokens of which seen [T, S] says who sees what, and after the MLP."""
        rotary = task == "two_token" and layer == 0
        out = []
        for head in range(4):
            own = slice(head * 4, head * 4 + 4)
            shared = slice(head * kv_heads // 4 * 4, head * kv_heads // 4 * 4 + 4)
            q, k, v = (norm(t) @ w[f"{layer}.q"][:, own], norm(x) @ w[f"{layer}.k"][:, shared],
                       norm(x) @ w[f"{layer}.v"][:, shared])
            if rotary:
                q, k = turned(q, at), turned(k, torch.arange(S))
            out.append((q @ k.T / 2).masked_fill(~seen, -torch.inf).softmax(-1) @ v)
        t = t + torch.cat(out, -1) @ w[f"{layer}.o"]
        return t + torch.nn.functional.gelu(norm(t) @ w[f"{layer}.up"]) @ w[f"{layer}.down"]

    everything = torch.ones(len(y), S, dtype=torch.bool)
    for layer in range(cell.layers):
        y = block(y, layer, torch.full((len(y),), S), everything)
        if layer < cell.layers - 1:
            x = block(x, layer, torch.arange(S), torch.ones(S, S, dtype=torch.bool).tril())
    got = logits(cell, init(cell), batch)[0, 0]
    torch.testing.assert_close(got.double(), norm(y) @ w["head"], atol=1e-5, rtol=1e-5)


def test_something_is_learnt_and_evaluated_on_enough_questions_it_has_not_seen(learnt):
    score = evaluate(learnt, 3, 4)
    assert score.queries >= 2000 and score.recall > 0.9 > learnt.cell.chance and score.nll < 0.5
    assert abs(evaluate(train(replace(TINY, steps=1)), 0, 4).recall - TINY.chance) < 0.1
    assert abs(evaluate(train(replace(TINY, steps=1)), 0, 4).nll - math.log(8)) < 0.7


@pytest.mark.parametrize("cell", [TINY, TWO], ids=["pair", "two_token"])
def test_every_variant_reads_the_same_from_the_cache_and_chunks_do_not_matter(cell, monkeypatch):
    trained = train(cell)
    want = evaluate(trained, 0, 6)
    for variant in ("naive", "flash"):
        got = evaluate(trained, 0, 6, variant=variant)
        assert got.recall == pytest.approx(want.recall, abs=2e-3) and got.nll == pytest.approx(want.nll, abs=1e-4)
    monkeypatch.setattr(recall, "CHUNK_TOKENS", 100)
    assert evaluate(trained, 0, 6).nll == pytest.approx(want.nll, abs=1e-5)


def test_a_coarser_cache_costs_more_and_static_scales_come_from_other_sequences(learnt):
    exact, int8, int2 = (evaluate(learnt, 3, 4, name) for name in ("fp32", "int8/token", "int2/token/g4"))
    assert abs(int8.nll - exact.nll) < 0.02 and int2.nll > exact.nll + 10 * abs(int8.nll - exact.nll)
    static = evaluate(learnt, 3, 4, "int8/head")
    assert static.nll != exact.nll and abs(static.nll - exact.nll) < 0.05
    two = train(TWO)
    assert evaluate(two, 0, 4, "int8/head").nll == pytest.approx(evaluate(two, 0, 4).nll, abs=0.02)


def test_the_matched_arm_has_the_parameters_of_mha_and_the_count_is_that_of_the_tensors():
    for task in recall.TASKS:
        full = replace(TINY, num_kv_heads=4, task=task)
        for heads in (1, 2):
            cell = replace(full, num_kv_heads=heads, parameter_matched=True)
            assert cell.parameters == full.parameters > replace(cell, parameter_matched=False).parameters
            assert cell.parameters == sum(w[0].numel() for w in init(cell).values())
    assert TINY.kv_floats_per_token == 2 * 2 * 4 and TWO.kv_floats_per_token == 2 * TINY.kv_floats_per_token


def test_rows_are_a_valid_table_with_one_case_per_seed_length_and_format():
    cell = replace(TINY, kv_formats=("fp32", "int4/token"))
    stages = []
    found = table(rows(cell, stages.append, hardware="A CPU"))
    schema().validate(found)
    assert found["case_id"].nunique() == 2 * 2 * 2 and set(found["comparison_id"]) == {cell.comparison_id}
    assert set(found["metric"]) == set(recall.METRICS) and set(found["kind"]) == {"measured", "modelled"}
    assert set(found["group_ratio"]) == {2} and set(found["kv_len"]) == {4, 6} and set(found["seed"]) == {0, 1}
    assert stages[:cell.steps] == list(range(cell.steps)) and len(stages) >= cell.steps + 8
    assert (found[found["metric"] == "recall"]["n"] >= 2000).all()


def test_a_row_can_be_run_again_from_its_case_and_gives_the_same_number():
    import json
    found = table(rows(TWO))
    one = found[(found["metric"] == "nll") & (found["seed"] == 1) & (found["kv_len"] == 12)].iloc[0]
    again = RecallCell(**json.loads(one["case"]))
    assert again.seeds == (1,) and again.evaluated == (6,)
    (same,) = [r for r in rows(again) if r["metric"] == "nll"]
    assert same["value"] == one["value"] and same["seed"] == 1


def test_a_seed_that_diverges_is_a_failed_row_and_the_other_goes_on(monkeypatch):
    real = recall.init

    def poisoned(cell):
        weights = real(cell)
        weights["head"][cell.seeds.index(0), 0, 0] = math.nan
        return weights
    monkeypatch.setattr(recall, "init", poisoned)
    both = train(TINY)
    assert both.diverged == {0: 0}
    assert all(bool(w.isfinite().all()) for w in both.seed(1).values())
    found = table(rows(TINY))
    lost = found[found["status"] == "failed"]
    assert set(lost["seed"]) == {0} and set(lost["metric"]) == {"recall", "nll"}
    assert lost["error"].str.contains("loss of seed 0 is not finite at step 0 of 6; take a smaller lr").all()
    assert (found[(found["seed"] == 1) & (found["metric"] == "recall")]["kind"] == "measured").all()
    with pytest.raises(ValueError, match="diverged"):
        evaluate(both, 0, 4)


def test_training_stops_where_every_seed_has_diverged():
    stages = []
    trained = train(replace(TINY, lr=1e30, steps=40), stages.append)
    assert set(trained.diverged) == {0, 1} and len(stages) < 40


def test_more_than_8192_tokens_are_trained_on_and_scored_in_pieces(monkeypatch):
    monkeypatch.setattr(recall, "QUERIES", 8)
    cell = replace(TINY, pairs=(2, 8200), evaluated=(8200,), num_keys=8200, steps=2, batch_size=1, seeds=(0,), width=8)
    found = table(rows(cell))
    assert set(found["kv_len"]) == {8200} and set(found["status"]) == {"ok"}
    two = replace(cell, task="two_token", pairs=(2,), evaluated=(4100,))
    assert set(table(rows(two))["kv_len"]) == {8200}


def test_threads_are_put_back():
    before = torch.get_num_threads()
    rows(replace(TINY, threads=2, seeds=(0,), evaluated=(4,), steps=1))
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("wrong, error, said", [
    (dict(num_kv_heads=3), ValueError, "not a multiple"), (dict(task="copy"), ValueError, "pair, two_token"),
    (dict(seeds=()), ValueError, "seeds is empty"), (dict(seeds=(1, 1)), ValueError, "repeat"),
    (dict(seeds=(-1,)), ValueError, "whole numbers from 0"), (dict(seeds=(2**32,)), ValueError, "whole numbers from 0"),
    (dict(pairs=(17,)), ValueError, "num_keys=16"), (dict(evaluated=(0,)), ValueError, "pairs=0"),
    (dict(lr=0.0), ValueError, "lr=0.0"), (dict(steps=0), ValueError, "steps=0"),
    (dict(kv_formats=("int9",)), KeyError, "int9"),
    (dict(kv_formats=(format_names(sizes_only=True)[0],)), ValueError, "does not compute"),
    (dict(task="two_token", head_dim=5), ValueError, "even")])
def test_a_wrong_cell_is_refused_in_one_sentence(wrong, error, said):
    with pytest.raises(error, match=said):
        replace(TINY, **wrong)


def test_a_device_or_variant_that_cannot_is_refused(learnt):
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no CUDA device"):
            train(replace(TINY, device="cuda"))
    with pytest.raises(ValueError, match="flash_attn cannot attend"):
        evaluate(learnt, 3, 4, variant="flash_attn")
    with pytest.raises(KeyError, match="Did you mean"):
        evaluate(learnt, 3, 4, variant="sdp")


def test_training_flops_are_the_matrix_products_of_a_forward_pass_three_times():
    cell = replace(TINY, pairs=(4,), batch_size=1, steps=1, seeds=(0,))
    from torch.utils.flop_counter import FlopCounterMode
    batch = draw(cell, 4, 1, [torch.Generator().manual_seed(0)])

    def attend(layer, q, k, v, causal):
        k, v = (x.repeat_interleave(2, 2).transpose(1, 2) for x in (k, v))
        return ((q.transpose(1, 2) @ k.mT).softmax(-1) @ v).transpose(1, 2)
    with FlopCounterMode(display=False) as counter:
        logits(cell, init(cell), batch, attend)
    head = 2 * cell.queries * cell.width * cell.num_values
    assert cell.training_flops() == pytest.approx(3 * (counter.get_total_flops() - head), rel=1e-3)
