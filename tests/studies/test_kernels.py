"""The cases are those of the question, the ratios are true of known times, and each finding turns with its evidence."""
import json

import pytest
from fake_cuda import fake_cuda
from made_kernels import (
    FORMATS,
    NO_CUDA,
    PAGED,
    PREFILL,
    decode,
    formats,
    made,
    memory,
    on_cpu,
    on_gpu,
    paging,
    prefill,
    share,
    steps,
    timed,
    unknown_weights,
)

from kvlab.attention import Comparison, VariantRef, trial
from kvlab.attention._variant import variants
from kvlab.catalog.models import model
from kvlab.kv.cache import Layout
from kvlab.probes import _base
from kvlab.probes.ceilings import Ceilings
from kvlab.record.reading import table
from kvlab.registry import case_from
from kvlab.studies import _kernels_steps, kernels
from kvlab.studies._kernels_findings import findings
from kvlab.studies._kernels_ratios import with_ratios
from kvlab.studies._kernels_steps import Steps
from kvlab.studies._run import failed_case
from kvlab.studies._run import run as run_study
from kvlab.studies.kernels import CUDA_CAP_S, METRICS, Prompt, SideBySide, cases

EIGHT_MINUTES = 8 * 60
NAME = model("Qwen/Qwen2-72B").name                     # as the catalogue calls it


def found(rows, name):
    """The one finding of that name, or None."""
    chosen = [f for f in findings(made(rows)) if f.name == name or f.name.startswith(name + ":")]
    assert len(chosen) < 2, [f.name for f in chosen]
    return chosen[0] if chosen else None


def refs(case):
    return [t.variant.ref for t in case.trials]


def heads_and_tokens(case):
    w = case.workload
    return w.shape.num_kv_heads, max(w.kv_lens)


def sorted_by_question(size, **options):
    """(side by side: decode, prompts), pages, formats, memory, whole steps."""
    every = list(cases(size, **options))
    assert len({case.comparison_id for case in every}) == len(every)
    side = [c for c in every if isinstance(c, SideBySide)]
    rest = [c for c in every if type(c) is Comparison]
    pages = [c for c in rest if len({t.kv_format for t in c.trials}) == 1]
    return ([c for c in side if c.workload.phase == "decode"], [c for c in side if c.workload.phase == "prefill"],
            pages, [c for c in rest if c not in pages], [c for c in every if isinstance(c, Prompt)],
            [c for c in every if isinstance(c, Steps)])


def test_small_on_a_cpu_is_the_issues_numbers(monkeypatch):
    monkeypatch.setattr(kernels.os, "cpu_count", lambda: 2)
    decoding, prompts, (pages,), by_format, remembered, whole = sorted_by_question("small")
    assert [(heads_and_tokens(c), c.trials[0].dtype, c.trials[0].threads) for c in decoding] == [
        ((32, 4096), "fp32", 2), ((8, 8192), "fp32", 2), ((1, 65536), "fp32", 2), ((1, 65536), "fp32", 1),
        ((8, 16384), "bf16", 2)]
    for case in decoding:
        assert {"naive", "sdpa", "sdpa_enable_gqa", "paged", "paged_gather", "c_decode", "triton_paged",
                "flash_attn", "flashinfer"} == set(refs(case))
        assert {t.layout for t in case.trials if t.variant.ref == "paged"} == {Layout(), Layout(16, "random")}
    assert set(refs(prompts[0])) == {"naive", "flash", "sdpa", "triton_flash", "flash_attn"}
    own = [t for t in pages.trials if t.variant.ref == "paged"]
    layouts = {t.layout for t in own}
    assert {(n, order) for n in (1, 16, 64, 128, 256) for order in ("in_order", "random")} == {
        (one.block_size, one.page_order) for one in layouts if one.block_size}
    assert Layout(16, "random", "token") in layouts and [t.layout for t in own if t.replica] == [Layout()]
    assert [heads_and_tokens(c)[1] for c in by_format] == [1024, 4096, 16384]
    assert {t.kv_format for t in by_format[0].trials if t.variant.ref == "paged"} == set(FORMATS)
    assert {t.layout for t in by_format[0].trials if t.variant.ref == "paged"} == {Layout(16, "random")}
    assert [heads_and_tokens(c)[1] for c in remembered] == [2048, 4096, 8192, 16384]
    assert set(refs(remembered[0])) == {"naive", "flash", "sdpa"}
    assert [(c.model, c.kv_format) for c in whole] == [(NAME, "fp8_e4m3"), (NAME, "int8/token")]


def test_no_trial_is_in_two_questions():
    ids = [t.case_id for case in cases("large") if isinstance(case, Comparison) for t in case.trials]
    assert len(ids) == len(set(ids))


def test_smoke_is_short_on_one_thread_and_large_is_longer():
    every = [c for c in cases("smoke") if isinstance(c, Comparison)]
    assert {t.threads for c in every for t in c.trials} == {1}
    assert max(max(c.workload.kv_lens) for c in every) <= 1024
    assert len(sorted_by_question("large")[3]) == 6 > len(sorted_by_question("small")[3])


def test_one_core_does_not_measure_one_thread_twice(monkeypatch):
    monkeypatch.setattr(kernels.os, "cpu_count", lambda: 1)
    assert len(sorted_by_question("small")[0]) == 4


@pytest.mark.parametrize("size", kernels.SIZES)
def test_a_gpu_gets_bf16_the_libraries_and_ends_within_eight_minutes(size):
    """Of a trial: calls, warm calls and graphs within 1.5 × the cap; a counter's windows take 4 s."""
    decoding, prompts, (pages,), by_format, remembered, _ = sorted_by_question(size, device="cuda")
    timed_ones = [*decoding, *prompts, pages, *by_format]
    assert {t.dtype for c in timed_ones for t in c.trials} == {"bf16"}
    assert {"triton_paged", "flash_attn", "flashinfer", "sdpa_flash"} <= set(refs(decoding[0]))
    assert {"triton_paged", "flash_attn", "flashinfer", "sdpa"} == set(refs(pages)) == set(refs(by_format[0]))
    assert all("triton_flash" in refs(c) for c in [*prompts, *remembered])
    budget = sum(1.5 * CUDA_CAP_S * len(c.trials) for c in timed_ones)
    budget += sum(4.0 * len(c.trials) for c in [*decoding, *prompts])
    assert budget < 0.6 * EIGHT_MINUTES, "what is left is for inputs, compiling and the oracle"
    if size != "smoke":
        assert (decoding[0].workload.batch_size, *heads_and_tokens(decoding[0])) == (16, 8, 32768)
        assert {"int8/token", "fp8_e4m3/token"} <= {t.kv_format for t in by_format[-1].trials}
        assert max(pages.nbytes(2), by_format[-1].nbytes(3)) < 120 * 2**30


def test_own_variants_take_the_place_of_the_studys_everywhere():
    mine = VariantRef("sdpa_math")
    every = [c for c in cases("smoke", variants=(mine,)) if isinstance(c, Comparison)]
    assert {name for c in every for name in refs(c)} == {"sdpa_math"} and len(every) == 8


def test_a_model_changes_whole_steps_and_nothing_else_and_an_unknown_one_is_refused():
    other = list(cases("smoke", model="meta-llama/Llama-3.1-8B"))
    usual = list(cases("smoke"))
    assert [a.comparison_id == b.comparison_id for a, b in zip(usual, other)] == [True] * 8 + [False] * 2
    with pytest.raises(KeyError, match="Did you mean 'Qwen/Qwen2-72B'"):
        list(cases("smoke", model="Qwen/Qwen2-73B"))
    with pytest.raises(ValueError, match="allowed: smoke, small, large"):
        run_study("kernels", size="tiny")


def test_a_case_is_known_again_from_its_columns_in_a_worker():
    side, whole = next(iter(cases("smoke"))), list(cases("smoke"))[-1]
    for case in (side, whole):
        kind = f"{type(case).__module__}:{type(case).__qualname__}"
        again = case_from(kind, json.loads(case.columns()["case"]))
        assert type(again) is type(case) and again.comparison_id == case.comparison_id
    (row,) = failed_case(whole, "the worker died")
    assert row["kv_format"] == "int8/token" and table([row])["status"].iloc[0] == "failed"


# ratios

def times_of(*chosen):
    """Rows of trials of one comparison with known times: (variant, layout, kv_format, seconds)."""
    rows = []
    for variant, layout, kv_format, seconds in chosen:
        one = trial(variant, decode(), layout=layout, kv_format=kv_format)
        rows += timed(one, "one", seconds, ideal=8e6 * one.format.nbytes(1, one.workload.shape))
    return rows


def broken(row, why):
    return {**row, "value": None, "low": None, "high": None, "kind": "missing", "status": "failed", "note": why,
            "error": why}


def ratios_of(rows):
    return {(r["metric"], r["kv_format"], r["block_size"], json.loads(r["case"])["layout"]["order"]): r
            for r in with_ratios(rows)[len(rows):] if r["variant"] == "paged"}


def test_each_ratio_is_to_the_trial_it_names_and_carries_both_intervals():
    rows = times_of(("paged", Layout(), "fp32", 2.0), ("paged", Layout(16, "random"), "fp32", 3.0),
                    ("paged", Layout(16, "random", "token"), "fp32", 6.0),
                    ("paged", Layout(16, "random"), "bf16", 1.5), ("sdpa", None, "fp32", 4.0),
                    ("sdpa_enable_gqa", None, "fp32", 8.0))
    got = ratios_of(rows)
    assert {key[0]: sum(k[0] == key[0] for k in got) for key in got} == {
        "to_contiguous": 2, "to_head_order": 1, "to_peer": 4, "format_speedup": 1, "format_bytes_ratio": 1}
    paged = got["to_contiguous", "fp32", 16, "head"]
    assert paged["value"] == 1.5 and paged["kind"] == "measured"
    assert (paged["low"], paged["high"]) == pytest.approx((1.5 * 0.98 / 1.02, 1.5 * 1.02 / 0.98))
    assert got["to_contiguous", "fp32", 16, "token"]["value"] == 3.0
    assert got["to_head_order", "fp32", 16, "token"]["value"] == 2.0
    assert got["to_peer", "fp32", 16, "head"]["value"] == 0.75 and "sdpa," in got["to_peer", "fp32", 16, "head"][
        "denominator"]
    assert got["to_peer", "bf16", 16, "head"]["value"] == 0.375, "against the library's own format"
    faster, fewer = got["format_speedup", "bf16", 16, "head"], got["format_bytes_ratio", "bf16", 16, "head"]
    assert faster["value"] == 2.0 and fewer["value"] == 2.0 and fewer["kind"] == "modelled"
    assert set(METRICS) >= {key[0] for key in got}
    made(with_ratios(rows))


def test_what_a_ratio_needs_and_is_not_there_is_missing_with_its_reason():
    rows = times_of(("paged", Layout(16, "random"), "fp32", 3.0))
    assert ratios_of(rows) == {}, "no such trial was asked for"
    gone = trial("paged", decode(), layout=Layout(), kv_format="fp32")
    rows.append(broken(timed(gone, "one", 1.0)[0], "it broke"))
    (row,) = ratios_of(rows).values()
    assert row["kind"] == "missing" and row["metric"] == "to_contiguous"
    assert row["note"] == "no time of paged, fp32, contiguous: it broke"


def test_a_contiguous_cache_in_the_same_order_is_preferred_and_an_aa_pair_is_no_base():
    rows = times_of(("flashinfer", Layout(), "fp32", 1.0), ("flashinfer", Layout(order="token"), "fp32", 2.0),
                    ("flashinfer", Layout(16, "random", "token"), "fp32", 3.0))
    (row,) = [r for r in with_ratios(rows) if r["metric"] == "to_contiguous"]
    assert row["value"] == 1.5
    again = trial("flashinfer", decode(), layout=Layout(order="token"), replica=1)
    assert [r["value"] for r in with_ratios([*timed(again, "one", 9.0), *rows]) if r["metric"] == "to_contiguous"
            ] == [1.5]


# whole steps

def test_whole_steps_are_the_formula_and_meet_the_quoted_number_where_it_says():
    rows = Steps("Qwen/Qwen2-72B", "fp8_e4m3").rows()
    at = {(r["metric"], r.get("batch_size"), r.get("kv_len"), r["kind"]): r["value"] for r in rows}
    for batch, expected in ((1, 1.002), (16, 1.069), (64, 1.228), (256, 1.542)):
        kv_len = 2048 if batch == 1 else 4096
        assert at["step_speedup", batch, kv_len, "modelled"] == pytest.approx(expected, abs=5e-4)
    assert at["step_speedup", None, None, "quoted"] == 1.08
    assert at["batch_to_quoted", None, 4096, "modelled"] == 19, "C47: +8.2 % at 19 x 4096"
    assert {r["metric"] for r in rows} == set(_kernels_steps.METRICS)
    assert len({r["case_id"] for r in rows if r["metric"] == "step_speedup"}) == 26
    (quoted,) = [r for r in rows if r["kind"] == "quoted"]
    assert quoted["method"] == "cite:C47" and "no model, batch" in quoted["note"]
    table(rows)


def test_a_smaller_gain_is_quoted_for_int8_and_its_scales_cost_a_little():
    fp8, int8 = (Steps("Qwen/Qwen2-72B", name).rows() for name in ("fp8_e4m3", "int8/token"))
    (quoted,) = [r for r in int8 if r["kind"] == "quoted"]
    assert (quoted["value"], quoted["method"]) == (1.05, "cite:C48")
    fp8, int8 = ([r["value"] for r in rows if r["metric"] == "step_speedup" and r["kind"] == "modelled"]
                 for rows in (fp8, int8))
    assert all(small < large for small, large in zip(int8, fp8))


def test_a_model_without_a_parameter_count_says_so_and_the_quoted_number_stays(monkeypatch):
    monkeypatch.setattr(_kernels_steps, "weight_bytes", lambda spec: None)
    rows = Steps("Qwen/Qwen2-72B", "fp8_e4m3").rows()
    assert [r["kind"] for r in rows] == ["quoted"] + ["missing"] * 4
    assert "not in the catalogue; choose another --model" in rows[1]["note"]
    assert found(rows, "article") is None


def test_a_quoted_number_that_bytes_never_allow_is_met_nowhere(monkeypatch):
    monkeypatch.setitem(_kernels_steps.QUOTED, "fp8_e4m3", (2.5, "C47"))
    rows = Steps("Qwen/Qwen2-72B", "fp8_e4m3").rows()
    assert {r["kind"] for r in rows if r["metric"] == "batch_to_quoted"} == {"missing"}
    finding = found(rows, "article")
    assert "+150 % is met nowhere" in finding.sentence and finding.kind == "missing" and finding.value is None


# findings

def test_a_whole_run_is_told_in_few_sentences_the_verdict_first():
    for rows in (on_cpu(), on_gpu()):
        every = findings(made(rows))
        assert every[0].name == "verdict" and len(every) <= 13
        assert max(len(f.sentence) for f in every) < 400
        assert all(f.sentence.endswith(".") and ".." not in f.sentence for f in every)
        assert len({f.name for f in every}) == len(every)
    assert {"pages", "order", "formats", "memory", "article"} <= {f.name.partition(":")[0] for f in every}


def test_the_verdict_turns_with_the_shares():
    good = share({"sdpa": 0.5, "paged": 0.8})
    assert found(good, "verdict").sentence.startswith(
        "Do kernels reach their roof? Yes: the fastest of each decode shape that is no library's is at 80 % of the "
        "nearer ceiling, of reads or of products, the fastest libraries at 50 %.")
    poor = share({"sdpa": 0.5, "paged": 0.3}, kv_len=4096)
    assert "? No: " in found(poor, "verdict").sentence
    both = found(good + poor, "verdict")
    (flops,) = (r["value"] for r in poor if r["metric"] == "flops_share" and r["variant"] == "paged")
    assert 0.3 < flops < 0.75, "arithmetic is the nearer limit of the second, and that is what is said"
    assert "? In 1 of 2 shapes: " in both.sentence and f"is at {100 * flops:.0f} to 80 % of" in both.sentence
    assert both.value == pytest.approx(flops) and both.low < both.value < both.high
    assert "Above 100 %" in found(share({"sdpa": 0.5, "paged": 1.2}), "verdict").sentence
    assert "Above 100 %" not in found(good, "verdict").sentence
    almost = share({"sdpa": 0.5, "paged": 0.755})
    assert "? No: " in found(almost, "verdict").sentence, "its interval reaches below"


def test_a_shape_names_the_fastest_and_the_ratio_to_the_library():
    won = found(share({"sdpa": 0.5, "paged": 0.8, "naive": 0.2}), "share:decode").sentence
    assert "paged (blocks of 16) is fastest at 80 % [78, 82] of the read ceiling; sdpa reaches 50 %" in won
    assert won.endswith("paged (blocks of 16) takes 0.62 × [0.60, 0.65] the time of sdpa.")
    lost = found(share({"sdpa": 0.5, "paged": 0.4}), "share:decode").sentence
    assert "sdpa is fastest at 50 %" in lost and "paged (blocks of 16) takes 1.25 ×" in lost
    even = found(share({"sdpa": 0.5, "paged": 0.5}), "share:decode").sentence
    assert even.endswith("which is no difference that can be told.")


def test_a_library_with_a_knob_is_still_a_library():
    rows = share({"sdpa": 0.5, "paged": 0.4})
    for row in rows:
        row["variant"] = {"sdpa": "flash_attn(version=2)"}.get(row["variant"], row["variant"])
    assert "flash_attn(version=2) is fastest at 50 %" in found(rows, "share:decode").sentence
    assert "fastest libraries at 50 %" in found(rows, "verdict").sentence


def test_arithmetic_is_named_where_it_is_the_nearer_limit():
    one = trial("paged", decode(1, 65536), threads=2)
    sentence = found(timed(one, "mqa", 16e-3, flops=1e9), "share:decode").sentence
    assert "20 % [20, 20] of the read ceiling and 48 % of the matmul ceiling, the nearer limit" in sentence
    assert "nearer" not in found(timed(one, "mqa", 16e-3, flops=0.3e9), "share:decode").sentence
    assert "nearer" not in found(timed(one, "mqa", 16e-3, flops=9e9), "share:decode").sentence, "no roof of this kernel"


def test_a_prompt_is_held_against_the_matmul_ceiling():
    sentence = found(prefill(), "share:prefill").sentence
    assert "sdpa is fastest at 60 % [59, 61] of the matmul ceiling; flash reaches 40 %" in sentence
    assert "flash is fastest at 90 %" in found(prefill({**PREFILL, "flash": (0.9, 1.0, 8e6)}), "share:prefill").sentence


def test_pages_cost_time_or_not_within_what_the_same_trial_differs_by():
    costs = found(paging(again=1.01), "pages")
    assert costs.sentence.startswith("Do pages cost time? Yes. paged takes 1.20 × [1.15, 1.25] the time of a "
                                     "contiguous cache in blocks of 16 in random order, 1.10 × in order; in random "
                                     "blocks 2.00 × at 1, 1.04 × at 64")
    assert costs.sentence.endswith("The same trial twice differs by 1.010 ×.") and costs.value == 1.2
    noisy = found(paging(again=1.2), "pages").sentence
    assert "No effect found. paged takes 1.20 ×" in noisy, "1.20 × is what the same trial differs by"
    flat = {**PAGED, (16, "random", "head"): 1.01}
    assert "No effect found. paged takes 1.01 ×" in found(paging(flat), "pages").sentence
    assert "No, they save it." in found(paging({**PAGED, (16, "random", "head"): 0.8}), "pages").sentence


def test_token_order_is_told_apart_from_head_order_or_not():
    assert found(paging(), "order").sentence == ("Token order takes 1.50 × [1.44, 1.56] the time of head order (paged "
                                                 "(blocks of 16)).")
    flat = {**PAGED, (16, "random", "token"): 1.21}
    assert "no difference that can be told" in found(paging(flat), "order").sentence


def test_time_saved_is_held_against_bytes_saved():
    partly = found(formats(), "formats").sentence
    assert partly.startswith("Do fewer bytes save as much time? Not in full. Speed-up of paged over fp32 at "
                             "32,768 tokens (bytes saved): int8/token 3.10 × [2.98, 3.22] (3.90 ×)")
    assert " Slower: int4/token/g32. All are" in partly
    assert partly.endswith("All are decoded by torch first. int8/token by context: 3.10 × at 2,048, 3.10 × at 32,768.")
    some = formats()
    for row in some:
        row["format_path"] = "decoded" if row["kv_format"] == "int4/token/g32" else "native"
    assert " Decoded by torch first: int4/token/g32. " in found(some, "formats").sentence
    half = {name: both for name, both in FORMATS.items() if name != "int4/token/g32"}
    assert "time? Not in full. " in found(formats(half), "formats").sentence
    assert "Slower" not in found(formats(half), "formats").sentence
    worse = {"fp32": (1.0, 1.0), "int4/token/g32": FORMATS["int4/token/g32"]}
    assert "time? No. " in found(formats(worse), "formats").sentence
    full = {"fp32": (1.0, 1.0), "int8/token": (3.8, 3.9)}
    finding = found(formats(full), "formats")
    assert "time? Yes. " in finding.sentence and finding.value == 3.8 and finding.low < 3.8 < finding.high


def test_exponents_carry_intervals_and_are_those_of_the_points():
    finding = found(memory(), "memory")
    assert "n^2.00 [" in finding.sentence and "for naive, n^0.90 [" in finding.sentence
    assert finding.sentence.endswith("to 16,384 tokens.") and finding.low < 2.0 < finding.high
    assert "n^1.00" in found(memory({"naive": 1.0}), "memory").sentence
    assert found(memory(lengths=(2048, 4096)), "memory") is None, "two points make no exponent"


def test_flash_saves_bytes_and_not_useful_work_unless_the_bytes_are_equal():
    finding = found(prefill(), "flops")
    assert finding.sentence.startswith("flash saves bytes, not useful work: 20 GFLOP are useful in either, of which "
                                       "naive executes 2.00 × (the masked half too) and flash 1.10 ×; naive moves "
                                       "62.5 × the bytes (modelled)")
    assert "; it takes 0.25 × [0.24, 0.26] the time." in finding.sentence and finding.kind == "modelled"
    same = {**PREFILL, "flash": (0.4, 1.1, 500e6)}
    assert found(prefill(same), "flops").sentence.startswith("flash saves neither bytes nor useful work")
    counted = prefill()
    for row in [r for r in counted if r["metric"] == "hbm_bytes"]:
        counted.append({**row, "value": 3 * row["value"], "kind": "measured", "source": "gpm"})
    assert "(measured)" in found(counted, "flops").sentence, "a counter goes before a formula"


def test_threads_are_told_where_a_shape_was_timed_on_fewer():
    rows = []
    for threads, seconds in ((1, 6e-3), (2, 3.5e-3)):
        for variant, by in (("paged", 1.0), ("sdpa", 2.0 if threads == 1 else 3.0)):
            rows += timed(trial(variant, decode(1, 65536), threads=threads), f"mqa-{threads}", seconds * by)
    finding = found(rows, "threads")
    assert finding.value == pytest.approx(6 / 3.5) and finding.kind == "measured"
    assert "paged is 1.71 × [1.65, 1.78] as fast on 2 threads as on 1, sdpa 1.14 ×" in finding.sentence
    assert "decode, 32/1" in found(rows, "share:decode").sentence, "the shape itself is told once, on all threads"
    assert found(rows[:len(rows) // 2], "threads") is None


def test_the_articles_numbers_are_quoted_beside_what_bytes_allow():
    finding = found(steps(), "article")
    assert "+8 % for fp8_e4m3 and +5 % for int8/token (quoted) depend on batch × context" in finding.sentence
    assert "gain +0.2 % (batch 1, 2,048 tokens) to +90.4 % (batch 256, 32,768 tokens)" in finding.sentence
    assert "+8 % takes a batch of 38 at 2,048 tokens and 3 at 32,768 tokens" in finding.sentence
    assert (finding.value, finding.kind) == (38, "modelled")
    light = found(steps(weights=14.5e9), "article")
    assert light.value == 4 and "takes a batch of 4 at 2,048 tokens" in light.sentence
    assert found(unknown_weights(), "article") is None


def test_what_is_missing_is_told_with_its_reason_and_failures_by_name():
    assert found(on_cpu(), "absent").sentence == (
        "No time here of flashinfer (skipped: FlashInfer has CUDA kernels only, and this is device cpu); flash_attn "
        "(skipped: FlashAttention has CUDA kernels only, and this is device cpu).")
    rows = share({"sdpa": 0.5, "paged": 0.8}, absent={"flashinfer": NO_CUDA}) + share({"sdpa": 0.5}, kv_len=4096)
    broke = timed(trial("paged", decode(kv_len=4096), threads=2), "share-cpu-4-4096", 1.0)[0]
    rows.append(broken(broke, "wrong by a mile"))
    assert found(rows, "failed").sentence == "paged failed at 32/4 heads, 4,096 tokens, fp32, fp32: wrong by a mile."


def test_an_empty_run_says_so():
    (finding,) = findings(made([]))
    assert finding.kind == "missing" and finding.value is None
    assert [f.name for f in findings(made(share({}, absent={"flashinfer": NO_CUDA})))] == ["none", "absent"]


# real runs

def test_a_tiny_comparison_runs_for_real_and_its_findings_are_of_its_rows(monkeypatch):
    monkeypatch.setattr(_base, "last_level_cache", lambda: (2**18, "test"))           # few copies of the inputs
    chosen = [("naive", None), ("sdpa", None), ("paged", Layout()), ("paged", Layout(16, "random")),
              ("flashinfer", None)]
    case = kernels._compared(SideBySide, decode(kv_len=96), chosen)
    rows = kernels.run(case)
    result = table([{**row, "run_id": "r", "study": "kernels"} for row in rows])
    assert {"latency_s", "bandwidth_share", "to_contiguous", "to_peer"} <= set(result[result["kind"] != "missing"][
        "metric"])
    assert set(result[result["variant"] == "flashinfer"]["status"]) == {"skipped"}
    assert len(result[(result["metric"] == "to_contiguous")]) == 1
    assert not any("sm_utilization" in row["metric"] for row in rows), "no counter of a GPU on a CPU"
    names = [f.name for f in findings(result)]
    assert names[0] == "verdict" and "absent" in names
    prompt = next(c for c in cases("smoke") if isinstance(c, Prompt))
    extra = [row for row in kernels.run(prompt) if row["metric"] == "peak_extra_bytes"]
    assert [row["variant"] for row in extra] == ["naive", "flash", "sdpa"] and all(row["value"] is not None
                                                                                  for row in extra)


def test_the_script_for_a_gpu_is_dry_run_question_by_question(monkeypatch):
    """torch's variants compute; what needs a real GPU leaves a row with its reason for each of its trials."""
    monkeypatch.setattr(kernels, "CUDA_CAP_S", 0.01)
    product = Ceilings._matmul                                       # 8192 rows take a CPU minutes
    monkeypatch.setattr(Ceilings, "_matmul", lambda *given: product(*given[:-1], 64))
    with fake_cuda(l2=2**14):
        every = list(cases("smoke", device="cuda"))
        prompts = [case for case in every if isinstance(case, Prompt)]
        every = [case for case in every if case not in prompts[1:]]  # they differ in length only
        by_case = [(case, kernels.run(case)) for case in every]
    result = table([{**row, "run_id": "r", "study": "kernels"} for _, rows in by_case for row in rows])
    for case, rows in by_case:
        wanted = "peak_extra_bytes" if isinstance(case, Prompt) else "latency_s"
        if isinstance(case, Comparison):
            assert {r["case_id"] for r in rows if r["metric"] == wanted} == {t.case_id for t in case.trials}
            own = {r["variant"]: r for r in rows if r["metric"] == wanted}
            assert own["sdpa"]["value"] is not None, own["sdpa"]["note"]
    assert "sm_utilization" in set(result["metric"]), "counters are asked where variants stand side by side"
    assert findings(result)[0].name == "verdict"


def test_every_variant_that_the_study_names_exists():
    named = {name for kind in ("cpu", "cuda") for name, _ in (*kernels.DECODE[kind], *kernels.BESIDE[kind])}
    named |= {*kernels.PREFILL, *kernels.MEMORY["cuda"], *kernels.OWN.values()}
    assert named <= set(variants.names())
