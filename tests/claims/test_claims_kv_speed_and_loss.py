"""The arithmetic of speed-ups and of samples behind the claims C47 to C50, against numbers worked out by hand."""
import pandas as pd
import pytest

from kvlab.claims import kv_speed_and_loss as module
from kvlab.claims._kv_speed import gain, steps
from kvlab.claims._results import Results


@pytest.fixture(scope="module")
def evidence():
    results = Results()
    return {claim.id: {one.name: one for one in claim.evidence(results)} for claim in module.CLAIMS}


def test_a_benchmark_needs_half_a_million_questions_for_a_tenth_of_a_point():
    assert module.questions_needed(0.928, 0.001) == pytest.approx(513_361, rel=1e-4)
    assert module.resolved(0.928, 1319) == pytest.approx(0.01973, rel=1e-3)
    assert module.resolved(0.928, module.questions_needed(0.928, 0.001)) == pytest.approx(0.001)


def test_the_share_assumed_for_a_benchmark_is_that_of_the_published_run():
    assert Results().quoted("c49_gsm8k_16bit").value == module.RIGHT


def test_bytes_alone_come_within_2_5_points_of_the_published_gains(evidence):
    found = evidence["C47"]
    ours = [found[f"l4_{k}k_bytes"].value for k in (2, 8, 16, 32)]
    assert ours == pytest.approx([0.018, 0.070, 0.131, 0.231], abs=0.0006)
    theirs = [found[f"l4_{k}k"].value for k in (2, 8, 16, 32)]
    assert theirs == pytest.approx([0.010, 0.057, 0.110, 0.206], abs=0.0006)
    assert 0.0245 < found["miss"].value < 0.025 and found["miss"].kind == "quoted"


def test_eight_per_cent_is_where_the_bytes_saved_are_a_27th_of_all(evidence):
    found, weights, kv = evidence["C47"], 2 * 72_706_203_648, 2 * 80 * 8 * 128 * 2 * 2048
    assert found["least"].value == pytest.approx((weights + kv) / (weights + kv / 2) - 1, rel=1e-6)
    batch = found["batch_short"].value
    assert (weights + batch * kv) / (weights + batch * kv / 2) >= 1.08
    assert (weights + (batch - 1) * kv) / (weights + (batch - 1) * kv / 2) < 1.08
    assert "batch 1, 2,048 tokens" in found["least"].about.en and "32,768" in found["most"].about.en


def test_the_difference_of_a_published_run_is_smaller_than_its_interval(evidence):
    fp8, int8 = evidence["C49"]["published"], evidence["C50"]["published"]
    assert fp8.value == pytest.approx(0.004) and fp8.high - fp8.value == pytest.approx(1.96 * 0.02291, rel=1e-3)
    assert int8.low < -module.LOSS_INT8[1] and int8.high > module.LOSS_INT8[1] and int8.n == fp8.n == 249


def test_an_open_loss_says_n_of_tokens_and_of_questions(evidence):
    from kvlab.claims._base import judged
    verdict = judged(module.CLAIMS[2], evidence["C49"].values()).verdict
    assert verdict.word == "inconclusive" and "about 170,000 tokens" in verdict.needs.en
    assert "about 510,000 questions" in verdict.needs.en and "(n = 1,022)" in verdict.because.en


def test_a_table_without_the_rows_is_missing_not_wrong(tmp_path):
    results = Results()
    results._tables["kernels"] = results.rows("kernels").iloc[:0]
    found = {one.name: one for one in steps(results, "fp8_e4m3")}
    assert {one.kind for one in found.values()} == {"missing"} and "kvlab run kernels" in found["least"].note.en
    assert gain(found["least"]) is found["least"]


def test_a_gain_keeps_its_interval():
    from kvlab.claims._base import Evidence
    from kvlab.lang import Text
    one = gain(Evidence("x", Text("a", "甲"), 1.25, "ratio", "measured", 1.2, 1.3, source="s"))
    assert (one.value, one.low, one.high, one.unit) == (0.25, pytest.approx(0.2), pytest.approx(0.3), "share")


def test_the_rows_behind_the_order_are_paired_and_of_one_table(evidence):
    table = Results().rows("kv_quant")
    row = table[(table["metric"] == "kl_difference") & (table["kv_format"] == "int8/token")
                & (table["scope"] == "minus fp8_e4m3/token")].iloc[0]
    one = evidence["C50"]["token_minus_fp8"]
    assert not pd.isna(row["n"]) and (one.value, one.n) == (row["value"], row["n"]) and one.high < 0
