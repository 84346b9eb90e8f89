"""The budget against start-up logs, and what a pool holds against arithmetic by hand and by brute force."""
import csv
import json
from dataclasses import asdict, replace
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_data import shared_data

from kvlab.catalog import rows
from kvlab.catalog.gpus import gpu, gpus
from kvlab.catalog.models import model, models
from kvlab.serving import _budget
from kvlab.serving._lengths import length_rows
from kvlab.serving._settings import blocks_of, requests, requests_in, shared_blocks
from kvlab.serving._weights import parameters, weights
from kvlab.serving.capacity import (
    DoesNotFit,
    Settings,
    check_logs,
    gpus_for,
    longest_context,
    longest_option,
    plan,
)
from kvlab.shapes import LayerSpec, ModelSpec
from kvlab.units import GiB

LLAMA = model("meta-llama/Meta-Llama-3.1-8B")
QWEN = model("Qwen/Qwen2-72B-Instruct")
DEEPSEEK = model("deepseek-ai/DeepSeek-V3")
A100 = "A100 SXM4 80GB"
REAL = Settings(util=0.9, max_len=32768, max_batched_tokens=2048, max_num_seqs=256, graphs_gib=0)


# the budget

def test_the_terms_add_up_and_each_says_what_it_is():
    found = plan(LLAMA, "RTX 4090", 1, REAL)
    vram, *taken = found.terms
    assert found.pool.value == int(0.9 * vram.value) - sum(term.value for term in taken)
    assert [term.name for term in found.terms] == ["VRAM", "weights", "non-torch", "activation peak", "CUDA graphs"]
    for term in (*found.terms, found.pool):
        assert term.low <= term.value <= term.high
        assert term.kind in ("quoted", "modelled") and term.how
        assert term.source or term is found.pool
    assert (vram.value, vram.kind) == (25_250_627_584, "quoted")
    assert taken[0].value == 8_030_261_248 * 2
    assert taken[2].value == 256 * 128_256 * 38


def test_the_real_engine_on_a_4090_lies_in_the_interval_and_the_naive_count_does_not():
    meta = json.loads((shared_data("engine_runs/rtx4090_llama-3.1-8b") / "meta.json").read_text())
    asked = meta["engine_kwargs"]
    found = plan(LLAMA, "RTX 4090", 1, Settings(
        util=meta["kv_cache"]["gpu_memory_utilization"], max_len=asked["max_model_len"], graphs_gib=0,
        max_batched_tokens=asked["max_num_batched_tokens"], max_num_seqs=asked["max_num_seqs"]))
    real = meta["kv_cache"]["num_gpu_blocks"]
    low, high = (end // found.block_bytes for end in (found.pool.low, found.pool.high))
    assert low <= real <= high
    assert abs(found.blocks / real - 1) < 0.05
    naive = (found.terms[0].value * 0.9 - found.terms[1].value) / found.block_bytes
    assert naive / real > 1.15
    assert found.terms[0].value == meta["hardware"]["device_total_memory_bytes"]


def test_every_start_up_log_is_within_three_percent_of_the_gpus_budget():
    found = check_logs()
    assert len(found) >= 14
    assert all(abs(row["of_util"]) < 0.03 for row in found), [row["id"] for row in found if abs(row["of_util"]) >= 0.03]
    unseen = [row for row in found if not row["fitted"]]
    assert len(unseen) >= 8 and median(abs(row["of_util"]) for row in unseen) < 0.015
    assert {row["id"] for row in found if not row["inside"]} == {"a100-llama2-7b", "80g-llama3-8b"}   # older vLLM
    for row in found:
        if row["logged_activation_gib"]:
            assert row["activation_gib"] == pytest.approx(row["logged_activation_gib"], rel=0.3)


def test_the_logs_that_come_from_the_shared_table_say_what_it_says():
    with open(shared_data("server_logs.csv"), encoding="utf-8", newline="") as file:
        logged = list(csv.DictReader(file))
    compared = 0
    for row in rows("engine_budgets.csv"):
        pool = float(row["pool_gib"])
        same = [one for one in logged if one["source"] == row["source"] and (
            one["kv_cache_gib"] and abs(float(one["kv_cache_gib"]) - pool) < 0.01)]
        compared += bool(same)
        for one in same:
            assert (one["tp"], one["gpu_memory_utilization"] or row["util"]) == (row["tp"], row["util"])
            if one["weights_gib"]:
                assert float(one["weights_gib"]) == pytest.approx(float(row["weights_gib"]), abs=1e-3)
    assert compared >= 6


def test_refused_starts_are_foretold():
    heavy = Settings(weights_gib=65.9651, util=0.9, graphs_gib=0, max_len=8192)
    with pytest.raises(ValueError, match=r"does not fit: weights 65\.97 .* needs at least 2 GPUs \(--tp 2\)"):
        plan(model("openai/gpt-oss-120b"), "H100 SXM5", 1, heavy)


def test_the_peak_is_the_larger_of_a_forward_pass_and_the_sampler():
    of = _budget.widths(LLAMA)
    forward = _budget.activation(of, _budget.Load(1, 1, 29_000))
    assert forward.value == 29_000 * (4096 + 14336) * 6 and "forward" in forward.how
    assert forward.value / GiB == pytest.approx(17.98 - 14.9888, abs=0.01)         # vllm#10517
    split = _budget.activation(of, _budget.Load(2, 1, 29_000))
    assert split.value == 29_000 * (4096 + 7168) * 6
    sampler = _budget.activation(of, _budget.Load(8, 1024, 2048))
    assert sampler.value == 1024 * 128_256 * 38 and "sampler" in sampler.how


def test_unknown_widths_are_assumed_and_widen_the_interval():
    unknown = replace(LLAMA, name="somebody/new-8b")
    known, assumed = _budget.widths(LLAMA), _budget.widths(unknown)
    assert (assumed.hidden, assumed.ffn, assumed.known, known.known) == (4096, 14336, False, True)
    assert "assumed" in assumed.source
    load = _budget.Load(1, 256, 2048)
    wide, narrow = _budget.activation(assumed, load), _budget.activation(known, load)
    assert wide.high - wide.low > narrow.high - narrow.low
    assert "assumed" in wide.how and "assumed" not in narrow.how


def test_vram_is_as_reported_or_a_modelled_share_of_the_sheet():
    for name, spec in gpus().items():
        if spec.memory_bytes is None:
            continue
        term = _budget.device_memory(spec)
        assert term.low <= term.value <= term.high <= spec.memory_bytes / 10**9 * GiB
        reported = name in {row["gpu"] for row in rows("device_memory.csv")}
        assert term.kind == ("quoted" if reported else "modelled")
    assert {row["gpu"] for row in rows("device_memory.csv")} <= set(gpus())
    assert {row["model"] for row in rows("model_widths.csv")} <= set(models())
    assert _budget.device_memory(gpu("A10G")).kind == "modelled"


def test_weights_are_split_and_half_of_them_is_what_two_ranks_log():
    assert weights(model("meta-llama/Meta-Llama-3-8B"), 1).value / GiB == pytest.approx(14.96, abs=0.005)
    half = weights(model("meta-llama/Meta-Llama-3-8B"), 2)
    assert half.value / GiB == pytest.approx(7.48, abs=0.005)
    assert half.high > half.value == half.low and "÷ tp 2" in half.how
    stored = replace(LLAMA, weight_bytes=5 * GiB)
    assert weights(stored, 1).kind == "quoted" and weights(stored, 1).value == 5 * GiB


@pytest.mark.parametrize("spec", [DEEPSEEK, model("openai/gpt-oss-120b"), replace(LLAMA, name="x/Llama-8B-AWQ"),
                                  replace(LLAMA, name="x/Llama-8B-w8a8"), replace(LLAMA, params=None)])
def test_weights_that_are_not_known_are_asked_for(spec):
    with pytest.raises(ValueError, match="--weights-gib"):
        plan(spec, "H200", 8, Settings(max_len=4096))
    assert plan(spec, "H200", 8, Settings(max_len=4096, weights_gib=600)).terms[1].value == 600 * GiB // 8


def test_weights_of_so_many_bits_are_counted_from_parameters():
    eight = weights(DEEPSEEK, 1, bits=8)
    assert (eight.value, eight.kind) == (671_026_419_200, "modelled") and "scales and unquantised" in eight.how
    assert eight.low == eight.value and eight.value * 1.1 < eight.high < eight.value * 1.11
    assert weights(LLAMA, 1, bits=16) == replace(weights(LLAMA, 1), how=f"{LLAMA.params:,} parameters × 16 bits")
    # hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4: 5.73 GB of safetensors; openai/gpt-oss-120b: 65.25 GB
    for spec, stored in ((LLAMA, 5.73e9), (model("openai/gpt-oss-120b"), 65.25e9)):
        four = weights(spec, 1, bits=4)
        assert four.low < stored < four.high
    assert weights(DEEPSEEK, 8, bits=8).value == round(eight.value / 8)
    with pytest.raises(ValueError, match="one of them"):
        Settings(weights_gib=5, weight_bits=8)
    with pytest.raises(ValueError, match="needs the parameters"):
        weights(replace(LLAMA, params=None), 1, bits=4)


@pytest.mark.parametrize("name, billions", [("openai/gpt-oss-120b", 116.8), ("openai/gpt-oss-20b", 20.9)])
def test_parameters_of_a_mixture_are_counted_from_its_widths(name, billions):
    assert parameters(model(name)) / 1e9 == pytest.approx(billions, abs=0.05)


def test_parameters_counted_so_are_those_that_the_catalogue_has():
    for name in ("Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-v0.1"):
        assert parameters(replace(model(name), params=None)) == pytest.approx(model(name).params, rel=0.005)


def test_an_error_about_weights_says_the_bits_that_are_published():
    for spec, bits in ((DEEPSEEK, 8), (model("openai/gpt-oss-120b"), 4), (replace(LLAMA, name="x/Llama-8B-GPTQ"), 4),
                       (replace(LLAMA, name="x/Llama-8B-FP8"), 8)):
        with pytest.raises(ValueError, match=f"add --weight-bits {bits} "):
            plan(spec, "H200", 8, Settings(max_len=4096))
        assert plan(spec, "H200", 8, Settings(max_len=4096, weight_bits=bits)).starts


def test_weights_must_fit_beside_a_pool_that_is_given():
    with pytest.raises(DoesNotFit, match=r"weights of 14.96 GiB on each of 1 L4 .* needs at least 2 GPUs \(--tp 2\)"):
        plan(LLAMA, "L4", 1, Settings(blocks=6000))
    assert plan(LLAMA, "L4", 2, Settings(blocks=6000, tp=2)).blocks == 6000
    with pytest.raises(DoesNotFit, match="at least 312.47 GiB .4 bits a parameter. .* needs at least 4 GPUs"):
        plan(DEEPSEEK, "H200", 1, Settings(blocks=40_000))
    assert plan(DEEPSEEK, "H200", 8, Settings(blocks=40_000, tp=8)).replicas == 1
    with pytest.raises(ValueError, match="say its --tp"):
        plan(DEEPSEEK, "H200", 8, Settings(blocks=40_000))
    with pytest.raises(ValueError, match="say its --tp"):
        longest_context(DEEPSEEK, "H200", 8, 1, Settings(blocks=40_000))
    assert longest_context(LLAMA, "L4", 1, 1, Settings(blocks=6000)) == 0


@pytest.mark.parametrize("asked", [Settings(pool_gib=300), Settings(blocks=300_000)])
@pytest.mark.parametrize("name", ["L4", "Apple M1"])
def test_a_pool_larger_than_the_gpu_is_refused(asked, name):
    with pytest.raises(DoesNotFit, match="does not fit: a pool of"):
        plan(LLAMA, name, 1, asked)


def test_what_software_makes_of_a_device_is_noted():
    half = plan(LLAMA, "MI250X", 1, Settings(max_len=4096))
    assert half.terms[0].high == 64 * GiB and any("2 GPUs to software" in note for note in half.notes)
    assert plan(LLAMA, "MI210", 1, Settings(max_len=4096)).terms[0].value == half.terms[0].value
    old = plan(LLAMA, "T4", 2, Settings(max_len=4096))
    assert any("--dtype half" in note for note in old.notes)
    assert not any("--dtype half" in note for note in plan(LLAMA, "A10", 1, Settings(max_len=4096)).notes)
    assert any("multiples of 16" in one for one in plan(LLAMA, "A10", 1, Settings(max_len=4096, block_size=7)).notes)
    assert not any("multiples" in one for one in plan(LLAMA, "A10", 1, Settings(max_len=4096, block_size=48)).notes)


def test_a_context_that_was_not_set_is_said():
    assert "whole context, 131,072 tokens (see --max-len)" in plan(LLAMA, "H200").notes[0]


def test_the_longest_context_says_its_tp():
    tokens, reached = longest_option(QWEN, A100, 4, 1, Settings())
    assert tokens == longest_context(QWEN, A100, 4) and (reached.tp, reached.replicas) == (4, 1)
    assert longest_option(QWEN, "RTX 4090", 1) == (0, None)


def test_a_pool_that_is_given_replaces_the_sum_and_needs_no_weights():
    found = plan(LLAMA, "RTX 4090", 1, replace(REAL, blocks=2588))
    assert (found.blocks, found.tokens, found.pool.kind) == (2588, 41408, "quoted")
    assert found.least == found.requests == found.most == 1
    assert len(found.terms) == 5 and found.article is not None
    bare = plan(DEEPSEEK, "H200", 8, Settings(max_len=4096, pool_gib=40, tp=8))
    assert bare.terms == () and bare.article is None
    assert bare.blocks == 40 * GiB // bare.block_bytes


def test_defaults_are_those_of_vllm_by_the_gpus_memory():
    def of(name):
        found = plan(LLAMA, name, 1, Settings(max_len=8192))
        return found.max_num_seqs, found.max_batched_tokens
    assert of("H200") == of("H100 SXM5") == (1024, 8192)
    assert of(A100) == of("RTX 4090") == (256, 2048)
    assert of("B200") == (1024, 16384)
    assert plan(LLAMA, "H200").max_len == LLAMA.context


# blocks and requests

def test_blocks_requests_and_tokens_by_hand():
    found = plan(LLAMA, A100, 2, Settings(tp=1, max_len=8192, blocks=5121, max_num_seqs=8))
    assert found.block_bytes == 16 * 32 * 2 * 8 * 128 * 2
    assert (found.blocks_per_request, found.requests, found.tokens) == (512, 10, 5121 * 16)
    assert (found.live, found.live_total, found.tokens_total, found.binds) == (8, 16, 2 * 5121 * 16, "cap")
    assert found.concurrency == 5121 / 512
    assert plan(LLAMA, A100, 2, Settings(tp=1, max_len=8192, blocks=5121, max_num_seqs=10)).binds == "pool"
    one_less = plan(LLAMA, A100, 2, Settings(tp=1, max_len=8192, blocks=5120, max_num_seqs=100))
    assert (one_less.requests, one_less.binds) == (9, "pool")            # the null block holds nothing


def test_a_shared_prefix_is_stored_once_while_its_sharers_live():
    found = plan(LLAMA, A100, 1, Settings(max_len=8192, blocks=5121, prefix_share=0.5))
    assert (found.shared_blocks, found.requests) == (256, (5120 - 256) // 256)
    several = 19
    assert 256 + several * 256 == 5120 and found.requests == several
    saving = 1 - (256 + several * 256) / (several * 512)
    assert saving == pytest.approx(0.5 * (several - 1) / several)
    blocks = blocks_of(LLAMA, Settings(tp=1, max_len=100, max_num_seqs=1, max_batched_tokens=1))
    assert shared_blocks(blocks, 100, 0.5) == 3


def test_windows_keep_nothing_of_a_prefix():
    gemma = model("google/gemma-3-1b-it")
    full = blocks_of(gemma, Settings(tp=1, max_len=8192, max_num_seqs=1, max_batched_tokens=2048))
    assert 0 < shared_blocks(full, 8192, 1.0) == sum(8192 // g.block_size for g in full.groups if g.kind == "full")


@given(blocks=st.integers(0, 5000), per=st.integers(1, 300), share=st.floats(0, 0.99))
@settings(deadline=None)
def test_requests_are_the_most_that_fit(blocks, per, share):
    shared = int(share * per)
    found = requests(blocks, per, shared)
    if found:
        assert shared + found * (per - shared) <= blocks - 1
    assert shared + (found + 1) * (per - shared) > blocks - 1


@given(gib=st.floats(1, 100), length=st.integers(1, 40_000), name=st.sampled_from(
    ["meta-llama/Meta-Llama-3.1-8B", "openai/gpt-oss-20b", "deepseek-ai/DeepSeek-V3", "google/gemma-3-27b-it"]))
@settings(deadline=None, max_examples=40)
def test_more_pool_or_shorter_requests_never_hold_fewer(gib, length, name):
    spec = model(name)
    asked = Settings(tp=1, max_len=length, max_num_seqs=64, max_batched_tokens=2048)
    here = requests_in(blocks_of(spec, asked), int(gib * GiB), 0)
    assert requests_in(blocks_of(spec, asked), int((gib + 1) * GiB), 0) >= here
    assert requests_in(blocks_of(spec, replace(asked, max_len=length + 100)), int(gib * GiB), 0) <= here


def test_the_article_on_eight_a100_and_qwen2_72b():
    """It says that 8 × A100 can hardly carry 16 requests of 4,096 tokens; they carry hundreds."""
    found = plan(QWEN, A100, 8, Settings(max_len=4096, tp=8, util=0.9))
    assert found.least > 16 * 15 and (found.binds, found.live_total) == ("cap", 256)
    assert plan(QWEN, A100, 4, Settings(max_len=4096, tp=4, util=0.9)).least > 100


def test_a_latent_lies_whole_on_every_rank_and_the_formula_does_not_know():
    found = plan(DEEPSEEK, "H200", 8, Settings(max_len=4096, weights_gib=642))
    assert found.tp == 8 and found.block_bytes == 16 * 61 * 576 * 2
    assert found.article.high < found.concurrency / 5
    each, true = 2 * 61 * 128 * 128 * 2 * 4096, 8 * 61 * 576 * 2 * 4096
    said = f"is {each / true:.2f} times the {true / GiB:.2f} GiB of blocks on 8 ranks: it takes heads for what is one"
    assert f"{said} latent" in found.article.errs[1]


def test_the_factor_that_would_have_been_right():
    found = plan(LLAMA, A100, 1, Settings(max_len=8192, util=0.9))
    free = found.terms[0].value - found.terms[1].value
    assert found.article.needed == pytest.approx(free / (found.concurrency * GiB), rel=1e-6)
    assert found.article.low == pytest.approx(free / GiB / 1.5)
    split = plan(QWEN, A100, 4, Settings(max_len=4096, tp=4))
    assert split.article.high == pytest.approx(4 * (split.terms[0].value - split.terms[1].value) / (1.25 * GiB * 1.3))
    assert len(split.article.errs) == 1                                 # its KV formula is right for this model


def test_formats_on_old_and_new_units():
    def words(name):
        return {row.kv_format: row.word for row in plan(LLAMA, name, 1, Settings(max_len=2048)).formats}
    assert (words(A100)["fp8_e4m3"], words("H200")["fp8_e4m3"]) == ("storage-only", "native")
    assert (words(A100)["nvfp4"], words("B200")["nvfp4"]) == ("unsupported", "native")
    rows_of = {row.kv_format: row for row in plan(LLAMA, "H200", 1, Settings(max_len=2048, kv_format="k16v8")).formats}
    assert list(rows_of)[0] == "k16v8" and rows_of["k16v8"].word == "native"
    assert rows_of["bf16"].requests * 2 <= rows_of["fp8_e4m3"].requests <= rows_of["bf16"].requests * 2 + 2


def test_a_format_that_the_block_size_splits_has_no_number_and_says_why():
    found = plan(LLAMA, "H200", 1, Settings(max_len=2048, block_size=16))
    assert all(row.requests is not None for row in found.formats)
    with pytest.raises(ValueError, match="splits the scale groups"):
        plan(LLAMA, "H200", 1, Settings(max_len=2048, kv_format="int4/channel/g32"))


def test_lengths_of_a_trace_by_brute_force():
    asked = Settings(tp=1, max_len=1000, max_num_seqs=1, max_batched_tokens=2048)
    blocks = blocks_of(LLAMA, asked)
    lengths = [(100, 20), (30, 10), (500, 100), (900, 101)]
    found = {row.name: row for row in length_rows(blocks, 1001, 0.0, lengths)}
    per = [-(-n // 16) for n in (120, 40, 600)]
    assert found["mean, complete"].blocks == pytest.approx(sum(per) / 3)
    assert found["mean, complete"].requests == int(1000 // (sum(per) / 3))
    assert found["mean, half-way through the output"].blocks == pytest.approx((7 + 3 + 35) / 3)    # 110, 35, 550 tokens
    assert [found[name].tokens for name in ("p50, complete", "p90, complete", "longest")] == [120, 600, 600]
    assert found["longest"].requests == 1000 // 38
    shared = {row.name: row for row in length_rows(blocks, 1001, 0.5, lengths)}
    assert shared["longest"].requests == (1000 - 15) // (38 - 15)
    note = plan(LLAMA, "H200", 1, replace(asked, max_num_seqs=None), lengths).notes
    assert any("1 of 4 requests are longer" in one for one in note)
    assert length_rows(blocks, 1001, 0.0, [(2000, 1)]) == ()


# what does not go

@pytest.mark.parametrize("asked, words", [
    (dict(util=0), "util"), (dict(util=1.2), "util"), (dict(util=float("nan")), "util"), (dict(tp=0), "tp"),
    (dict(prefix_share=1.1), "prefix_share"), (dict(prefix_share=-0.1), "prefix_share"),
    (dict(weights_gib=0), "weights_gib"),
    (dict(pool_gib=float("nan")), "pool_gib"), (dict(graphs_gib=-1), "graphs_gib"), (dict(block_size=0), "block_size"),
    (dict(activation_gib=float("inf")), "activation_gib"), (dict(blocks=5, pool_gib=1), "one of them"),
    (dict(max_len=True), "max_len")])
def test_wrong_settings_are_one_sentence(asked, words):
    with pytest.raises(ValueError, match=words):
        Settings(**asked)


def test_gpus_and_tp_that_do_not_go_together():
    with pytest.raises(ValueError, match="3 GPUs are no multiple of tp=2"):
        plan(LLAMA, "H200", 3, Settings(tp=2))
    with pytest.raises(ValueError, match="does not fit the heads.*allowed tp"):
        plan(LLAMA, "H200", 5, Settings(tp=5))
    with pytest.raises(KeyError, match="H100 SXM5"):
        plan(LLAMA, "H100")
    with pytest.raises(ValueError, match="context of .* is not known; give --max-len"):
        plan(replace(LLAMA, context=None), "H200")


def test_weights_beyond_the_budget_name_the_gpus_that_are_enough():
    with pytest.raises(ValueError, match=r"does not fit: .* needs at least 4 GPUs \(--tp 4\)") as refused:
        plan(QWEN, "H100 SXM5", 2, Settings(max_len=4096))
    assert "util × VRAM = 0.92 × 79.11" in str(refused.value)
    assert plan(QWEN, "H100 SXM5", 4, Settings(max_len=4096)).tp == 4
    with pytest.raises(ValueError, match="no tp that fits the heads is enough"):
        plan(LLAMA, "T4", 1, Settings(max_len=4096, weights_gib=9000))
    with pytest.raises(ValueError, match="not one block"):
        plan(LLAMA, "H200", 1, Settings(pool_gib=1e-6))


def test_a_pool_without_room_for_one_request_is_shown_and_said():
    found = plan(LLAMA, "RTX 4090", 1, replace(REAL, max_len=131072))
    assert not found.starts and found.requests == found.live_total == 0
    said = "does not start: one request of 131,072 tokens takes 8,192 blocks"
    assert any(note.startswith(said) for note in found.notes)
    beyond = plan(LLAMA, "H200", 1, Settings(max_len=200_000))
    assert any("beyond the model's context" in note for note in beyond.notes)


# the other way round

def test_the_least_tp_is_taken_and_the_better_one_named():
    found = plan(QWEN, A100, 8, Settings(max_len=4096))
    assert found.tp == 2 and found.replicas == 4
    assert found.notes[0] == "tp 2 is the least that fits; --tp 8 holds most, 256 requests at once in all"
    assert plan(QWEN, A100, 8, Settings(max_len=4096, tp=4)).live_total < 256


def test_gpus_for_a_load_agrees_with_plan():
    found = gpus_for(QWEN, 64, Settings(max_len=8192))
    assert [(o.gpus, o.memory_gib) for o in found] == sorted((o.gpus, o.memory_gib) for o in found)
    assert {o.gpu for o in found} <= set(gpus()) and not any(o.gpu.startswith(("CPU", "Apple", "TPU")) for o in found)
    for option in found[::5]:
        assert plan(QWEN, option.gpu, option.gpus, Settings(max_len=8192, tp=option.tp)).live_total == option.live >= 64
        for fewer in (n for n in (1, 2, 4) if n < option.gpus):
            try:
                for tp in (1, 2, 4):
                    if fewer % tp == 0:
                        assert plan(QWEN, option.gpu, fewer, Settings(max_len=8192, tp=tp)).live_total < 64
            except ValueError as error:
                assert "does not fit" in str(error)
    assert gpus_for(QWEN, 10**9, Settings(max_len=8192)) == []
    with pytest.raises(ValueError, match="belongs to one GPU"):
        gpus_for(QWEN, 1, Settings(pool_gib=1))
    with pytest.raises(ValueError, match="--weights-gib"):
        gpus_for(DEEPSEEK, 1, Settings())


@pytest.mark.parametrize("spec, name, count, need, asked", [
    (LLAMA, "RTX 4090", 1, 1, Settings()), (LLAMA, "RTX 4090", 1, 3, Settings(kv_format="fp8_e4m3")),
    (DEEPSEEK, "H200", 8, 16, Settings(weights_gib=642)), (QWEN, A100, 4, 20, Settings(tp=4))])
def test_the_longest_context_fits_and_one_token_more_does_not(spec, name, count, need, asked):
    longest = longest_context(spec, name, count, need, asked)
    live = max(plan(spec, name, count, replace(asked, max_len=longest, tp=tp)).live_total
               for tp in ([asked.tp] if asked.tp else [count]))
    assert live >= need
    if longest < spec.context:
        more = plan(spec, name, count, replace(asked, max_len=longest + 1, tp=asked.tp or count))
        assert more.live_total < need


def test_nothing_fits_at_any_length():
    assert longest_context(QWEN, "RTX 4090", 1) == 0
    assert longest_context(LLAMA, "H200", 1, 10, Settings(max_num_seqs=5)) == 0


def test_a_model_of_a_file_plans_as_one_of_the_catalogue():
    own = ModelSpec("mine", (LayerSpec("full", 32, 32, 8, 128),), 32, 8, 128, context=4096, params=8_030_261_248)
    ours, theirs = (plan(spec, "H200", 1, Settings(max_len=4096, activation_gib=1)) for spec in (own, LLAMA))
    assert (ours.blocks, ours.requests) == (theirs.blocks, theirs.requests)
    assert json.dumps(asdict(ours))
