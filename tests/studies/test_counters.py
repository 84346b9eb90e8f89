"""What the study asks for, and that its findings say what the rows hold: each is turned red by rows that say other."""
import pytest
from made_counters import NO_GPU, absent, behind, bytes_of, context, made, on_cpu, on_gpu, row, timed

from kvlab.attention import Comparison, VariantRef, trial
from kvlab.probes._known import Operation
from kvlab.probes._traffic import TRAFFIC
from kvlab.record.counters import group_of
from kvlab.record.reading import Reading, missing
from kvlab.shapes import AttentionShape, Workload
from kvlab.studies import counters
from kvlab.studies._counters_findings import findings, verdict
from kvlab.studies.counters import Behind, cases

H200_L2 = 60 * 2**20


def said(table, name):
    """The sentences of findings of that name, and below it."""
    return [f.sentence for f in findings(table) if f.name == name or f.name.startswith(name + ":")]


def names(case):
    return [t.variant.ref for t in case.trials]


def attention(size, **options):
    return [case for case in cases(size, **options) if isinstance(case, Comparison)]


def ratios(comparisons):
    return {case.workload.shape.group_ratio for case in comparisons}


def test_smoke_is_four_calls_of_c_kernels_and_nothing_slow():
    every = list(cases("smoke"))
    assert [name for case in every for name in names(case)] == ["c_decode", "c_decode", "c_naive", "c_flash"]


def test_small_has_operations_c_kernels_at_three_ratios_and_torch_apart():
    assert [case.name for case in cases("small") if isinstance(case, Operation)] == ["copy", "read", "matmul"]
    every = attention("small")
    in_c = [case for case in every if all(group_of(name) == "C kernels" for name in names(case))]
    in_torch = [case for case in every if not any(group_of(name) == "C kernels" for name in names(case))]
    assert len(in_c) + len(in_torch) == len(every), "no comparison mixes them"
    for name in ("c_decode", "c_naive", "c_flash"):
        assert ratios(case for case in in_c if name in names(case)) == {1, 4, 8}
    assert {"naive", "naive_repeat", "sdpa", "paged"} <= {name for case in in_torch for name in names(case)}
    assert len({case.comparison_id for case in cases("small")}) == len(list(cases("small")))


def test_a_gpu_gets_torchs_variants_in_bf16_with_reads_of_twice_its_cache():
    every = attention("small", device="cuda")
    assert ratios(case for case in every if case.workload.phase == "decode") == {1, 4, 8, 32}
    assert {t.dtype for case in every for t in case.trials} == {"bf16"}
    for case in every:
        reads = sum(t_bytes for t_bytes in list(case.touched_bytes().values())[:1])
        queries = sum(case.workload.q_lens) * case.workload.shape.num_q_heads * case.workload.shape.head_dim * 2
        assert reads + queries >= 2 * H200_L2
        assert any(t.layout.block_size == 16 for t in case.trials) == ("paged_gather" in names(case))
    assert all(op.dtype == "bf16" and op.device == "cuda" for op in cases("small", device="cuda")
               if isinstance(op, Operation))


def test_own_variants_take_the_place_of_the_studys_and_a_model_is_refused():
    for device in ("cpu", "cuda"):
        assert {name for case in attention("small", device=device, variants=(VariantRef("flash"),))
                for name in names(case)} == {"flash"}
    with pytest.raises(ValueError, match="leave --model out"):
        list(cases("small", model="Qwen/Qwen2-72B"))


def test_the_c_shapes_keep_away_from_the_swept_sizes_but_for_two_and_torch_is_swept_too():
    def step(case, by):
        return any(len({t.variant.load().cost(t, int(case.cache_bytes * f))[:2] for f in (1 / by, by)}) > 1
                   for t in case.comparison.trials)
    swept = [case for case in cases("small") if isinstance(case, Behind)]
    in_c = [case for case in swept if group_of(names(case.comparison)[0]) == "C kernels"]
    assert {case.cache_bytes for case in in_c} == {2**n for n in range(16, 23)}
    near = [case for case in in_c if step(case, 1.2)]
    assert [(case.comparison.workload.q_lens[0], case.cache_bytes) for case in near] == [(76, 2**19), (80, 2**19)]
    assert all(step(case, 1.05) for case in near), "there the reader sees the slide"
    torchs = {(name, case.comparison.workload.phase, case.cache_bytes) for case in swept if case not in in_c
              for name in names(case.comparison)}
    for name, phase in (("naive", "decode"), ("paged", "decode"), ("naive", "prefill"), ("sdpa", "prefill")):
        assert {size for *of, size in torchs if of == [name, phase]} >= {2**18, 2**22}, "1 MiB is the study's own"


class Counts:
    """A counter that gives one number, refuses one device and breaks on a product."""
    name, metrics = "counts", dict(TRAFFIC)

    def why_not(self, case):
        return None if case.device == "cpu" else "counts looks at CPUs"

    def operation(self, op):
        if op.name == "matmul":
            raise OSError("the counter fell off")
        return [Reading("hbm_bytes", 7.0, "B", "measured", source="counts"),
                missing("hbm_read_bytes", "B", "not told apart", source="counts")]


def test_an_operation_gets_rows_of_every_counter_reasons_and_failures_included(monkeypatch):
    monkeypatch.setattr(counters, "COUNTERS", (Counts(),))
    rows = counters.run(Operation("copy", 2**16))
    by = {r["metric"]: r for r in rows}
    assert by["ideal_bytes"]["value"] == 2**17 and by["ideal_bytes"]["kind"] == "modelled"
    assert by["hbm_bytes"]["value"] == 7.0 and by["hbm_read_bytes"]["note"] == "not told apart"
    assert {r["case_id"] for r in rows} == {r["comparison_id"] for r in rows} == {Operation("copy", 2**16).case_id}
    assert {r["variant"] for r in rows} == {"copy"} and all(r["hardware"] for r in rows)
    broken = [r for r in counters.run(Operation("matmul", 2**16)) if r["source"] == "counts"]
    assert {r["metric"] for r in broken} == set(TRAFFIC) and {r["status"] for r in broken} == {"failed"}
    assert "OSError: the counter fell off" in broken[0]["error"]
    Counts.why_not, was = lambda self, op: "counts is asleep", Counts.why_not
    try:
        asleep = [r for r in counters.run(Operation("copy", 2**16)) if r["source"] == "counts"]
    finally:
        Counts.why_not = was
    assert {r["note"] for r in asleep} == {"counts is asleep"} and {r["kind"] for r in asleep} == {"missing"}
    made(rows + broken)


@pytest.mark.parametrize("low, high, tolerance, expected", [
    (0.96, 1.04, 0.05, "agree"), (1.06, 1.2, 0.05, "differ"), (0.5, 0.94, 0.05, "differ"), (1.04, 1.06, 0.05, "open"),
    (0.9, 1.2, 0.05, "open")])
def test_agreement_needs_the_whole_interval(low, high, tolerance, expected):
    assert verdict(low, high, tolerance) == expected


def test_c_kernels_that_agree_are_said_to_and_one_that_does_not_is_named():
    (sentence,) = said(made(on_cpu()), "agreement callgrind C kernels")
    assert sentence == ("callgrind ÷ formula lies between 1.00 and 1.04 over 3 cases of C kernels (simulated): within "
                        "± 5 % 3 agree.")
    worse = on_cpu() + bytes_of(context("c_flash", "prefill", 4), "callgrind", 1.3)
    first, named = said(made(worse), "agreement callgrind C kernels")
    assert "between 1.00 and 1.30 over 4 cases" in first and "3 agree, 1 differ" in first
    assert named.startswith("c_flash, prefill, group ratio 4, q_len 64, kv_len 4096: 1.30 × the formula")
    assert "7.44 MiB read, 2.48 MiB written, the formula says 7.63 MiB in all" in named


def test_torchs_variants_have_a_wider_tolerance_and_the_outlier_is_named():
    first, named = said(made(on_cpu()), "agreement callgrind torch variants")
    assert "between 1.10 and 1.42 over 2 cases of torch variants (simulated): within ± 15 % 1 agree, 1 differ" in first
    assert named.startswith("naive_repeat, decode, group ratio 8, kv_len 4096: 1.42 × the formula")


def test_an_interval_across_the_tolerance_is_neither_agreement_nor_difference():
    rows = bytes_of(context("sdpa"), "ncu", 1.15, kind="measured", rel=0.05)
    first, named = said(made(rows), "agreement ncu torch variants")
    assert "1 cannot be told" in first and "agree." not in first and "cannot be told from agreement" in named


def test_gpms_agreement_on_what_calibrates_it_is_no_evidence():
    sentences = said(made(on_gpu()), "agreement gpm operations")
    assert "over 1 case of operations" in sentences[0] and sentences[1].startswith("matmul: 1.30 ×")


def test_the_answer_counts_sources_and_says_where_none_contradicts():
    (answer,) = said(made(on_cpu()), "answer")
    assert "1 of 4 sources counted bytes here: callgrind (simulated). Counts that agree" in answer
    assert "formula: 1 of 1 of operations, 3 of 3 of C kernels, 1 of 2 of torch variants" in answer
    assert "no second source of bytes is there to contradict it" in answer
    (answer,) = said(made(on_gpu()), "answer")
    assert "2 of 4 sources counted bytes here: ncu (measured), gpm (measured)" in answer
    assert "contradict" not in answer
    nothing = [r for r in on_cpu() if r["kind"] == "missing"]
    (finding,) = [f for f in findings(made(nothing)) if f.name == "answer"]
    assert "cannot be told" in finding.sentence and finding.kind == "missing" and finding.value is None


SWEPT = trial("c_naive", Workload.prefill(AttentionShape(4, 1, 16), q_len=104, kv_len=1408))


def test_a_sweep_over_caches_is_counted_and_each_exception_is_held_against_the_working_sets():
    """94 KiB are one head's K and a row of scores: 0.73 × 128 KiB and far from 64 KiB; 666 KiB are 1.3 × 512 KiB."""
    (sentence,) = said(made(behind("c_naive", [1.0, 1.01, 0.97], trial=SWEPT)), "sweep")
    assert sentence == ("c_naive, prefill, behind simulated caches of 64 KiB to 256 KiB, group ratios 4: within ± 5 % "
                        "of its formula at 3 of 3 (0.97 to 1.01 ×).")
    (sentence,) = said(made(behind("c_naive", [1.0, 1.2, 1.0, 1.0, 0.8], trial=SWEPT)), "sweep")
    assert "at 3 of 5 (0.80 to 1.20 ×); 128 KiB at group ratio 4 and q_len 64: 1.20 ×, no working set lies" in sentence
    near = trial("c_naive", Workload.prefill(AttentionShape(4, 1, 16), q_len=16, kv_len=1800))
    (sentence,) = said(made(behind("c_naive", [1.0, 1.2, 1.0], trial=near)), "sweep")
    assert "128 KiB at group ratio 4 and q_len 64: 1.20 ×, a working set lies within 1.25 × of the cache." in sentence
    assert not said(made(on_cpu()), "sweep"), "one size is no sweep"


def test_a_swept_case_that_does_not_agree_is_named_with_its_cache():
    _, named = said(made(behind("c_naive", [1.0, 1.2, 1.0], trial=SWEPT)), "agreement callgrind C kernels")
    assert named.startswith("c_naive, prefill, group ratio 4, q_len 64, kv_len 1408, behind 128 KiB: 1.20 × the")
    assert "(no working set lies within 1.25 × of the cache)" in named


def test_a_case_behind_a_cache_has_rows_of_that_simulation_under_ids_of_its_own(monkeypatch):
    asked = []

    def measured(comparison, probes, *, watch):
        asked.append(probes[-1].cache_bytes)
        return [dict(comparison_id=comparison.comparison_id, case_id=t.case_id, metric="m") for t in comparison.trials]
    monkeypatch.setattr(counters, "measure", measured)
    behind_64, behind_128 = (Behind(Comparison((SWEPT,)), n * 1024) for n in (64, 128))
    rows = [row for case in (behind_64, behind_128) for row in counters.run(case)]
    assert asked == [64 * 1024, 128 * 1024]
    assert len({r["case_id"] for r in rows} | {SWEPT.case_id}) == 3
    assert [r["comparison_id"] for r in rows] == [behind_64.comparison_id, behind_128.comparison_id]
    assert '"cache_bytes": 65536' in behind_64.columns()["case"]


def test_repeated_heads_stand_against_their_group_ratio_and_their_absence_is_said():
    (sentence,) = said(made(on_cpu()), "repeated")
    assert "At group ratio 8 naive_repeat reads 9.20 × what is needed at the least, 1.15 × its group ratio" in sentence
    assert "naive beside it 1.05 ×" in sentence and "(callgrind, simulated)" in sentence
    (sentence,) = said(made(on_gpu()), "repeated")
    assert "1.01 × its group ratio (ncu, measured)" in sentence and "naive beside" not in sentence
    without = [r for r in on_cpu() if r["variant"] != "naive_repeat"]
    (sentence,) = said(made(without), "repeated")
    assert "no source gave the reads of naive_repeat" in sentence


def test_busy_sms_stand_beside_useful_flops():
    first, *each = said(made(on_gpu()), "utilisation")
    assert "below 10 % in 3 of them" in first and "SMs had work for 95 to 97 % of the time (gpm, measured)" in first
    assert each[0] == ("sdpa, decode, group ratio 1, kv_len 4096: SMs busy 97 %, useful flops 2.0 % of the matmul "
                       "ceiling.")
    first, *_ = said(made(on_gpu(share=0.4, sm=0.3)), "utilisation")
    assert "below 10 % in 0 of them" in first and "28 to 30 %" in first


def test_a_share_whose_interval_reaches_the_claim_is_not_below_it():
    rows = timed(context("sdpa"), 0.098)
    assert "below 10 % in 0 of them" in said(made(rows), "utilisation")[0]


def test_without_sm_counters_the_reasons_stand_in_their_place():
    (sentence,) = said(made(on_cpu()), "utilisation")
    assert "5.0 to 5.0 %" in sentence and "over 2 decode cases of torch variants" in sentence, "no C kernels"
    assert "on this CPU; the claim is about GPUs" in sentence
    assert not any("on this CPU" in one for one in said(made(on_gpu()), "utilisation"))
    assert f"SM utilisation is missing (gpm: {NO_GPU}; ncu: ncu is not installed)" in sentence
    assert "SMs had work" not in sentence
    assert not said(made(bytes_of(context("c_decode"), "callgrind", 1.0)), "utilisation"), "no time, no share, no claim"


def test_the_cold_label_is_verified_only_by_a_count():
    (sentence,) = said(made(on_cpu()), "cold")
    assert "of 5 times 0 are verified by a count of reads, 5 are not." in sentence
    assert "The label is unverified here: ncu is not installed" in sentence
    (sentence,) = said(made(on_gpu()), "cold")
    assert "of 3 times 3 are verified by a count of reads, 0 are not." in sentence
    assert "ncu read 1.00 to 1.02 × the ideal, called as the timer calls (3 trials)" in sentence
    uncounted = [r for r in on_gpu() if r["metric"] != "cold_share"]
    (sentence,) = said(made(uncounted), "cold")
    assert "0 are verified" in sentence and "3 of them say that they are, and no row holds the count" in sentence
    assert "unverified here: no source was asked" in sentence
    (sentence,) = said(made(on_gpu(label="cold (unverified: ncu read 50 % of the ideal reads)")), "cold")
    assert "0 are verified by a count of reads, 3 are not." in sentence
    (sentence,) = said(made(on_gpu(label="warm (too few input copies)")), "cold")
    assert "0 are verified by a count of reads, 0 are not, 3 are warm." in sentence


def test_gpm_against_ncu_and_a_case_that_is_apart():
    (sentence,) = said(made(on_gpu()), "gpm_to_ncu")
    assert "GPM ÷ ncu lies between 1.05 and 1.05 over 3 cases: within ± 10 % 3 agree, 0 differ" in sentence
    first, *each = said(made(on_gpu(gpm=1.4)), "gpm_to_ncu")
    assert "0 agree, 3 differ" in first and len(each) == 3 and "GPM is 1.40 × ncu" in each[0]
    assert not said(made(on_cpu()), "gpm_to_ncu")


def test_absent_sources_are_named_with_their_commonest_reason_and_present_ones_are_not():
    sentences = said(made(on_cpu()), "absent")
    assert sentences == ["ncu gave no bytes on this machine: ncu is not installed.",
                         f"gpm gave no bytes on this machine: {NO_GPU}.", "perf gave no bytes on this machine: no PMU."]
    assert not said(made(on_gpu()), "absent"), "who was never asked is not absent"
    odd = on_cpu() + absent(context("naive"), "perf", "another", "hbm_bytes")
    assert "no PMU" in said(made(odd), "absent")[-1]


def test_findings_are_in_the_order_of_the_question_and_carry_kinds():
    found = findings(made(on_cpu()))
    assert found[0].name == "answer" and found[0].kind == "simulated"
    assert {f.kind for f in found if f.value is None} == {"missing"}
    assert all(f.low is None or f.low <= f.value <= f.high for f in found if f.value is not None)
    assert findings(made([row(missing("case", "count", "nothing ran"))]))[0].kind == "missing"
