"""The arithmetic and the look-ups behind the claims on batching, names, frameworks and capacity."""
import pytest

from kvlab.claims import _serving, alarms, batching, frameworks, metric_names, planning, scheduler_names
from kvlab.claims._base import Evidence, Found, judged
from kvlab.claims._results import Results
from kvlab.lang import Text

RESULTS = Results()


def evidence(module, name):
    claim = next(one for one in module.CLAIMS if one.id == name)
    return {one.name: one for one in claim.evidence(RESULTS)}


@pytest.mark.parametrize("module, name, wanted", [
    (scheduler_names, "C53", dict(written_now=0, written_ever=0, flag_now=1, flag_ever=1)),
    (scheduler_names, "C54", dict(written_now=0, written_ever=0, flag_now=1, flag_ever=1)),
    (metric_names, "C63", dict(written_now=0, written_ever=0, colon_now=2, colon_ever=2)),
    (metric_names, "C64", dict(written_now=0, written_ever=0, colon_now=0, colon_ever=1)),
    (metric_names, "C65", dict(written_now=0, written_ever=0, colon_now=0, colon_ever=0)),
    (metric_names, "C66", dict(written_now=0, written_ever=0, colon_now=0, colon_ever=0)),
])
def test_names_are_looked_up_in_every_release_that_was_read(module, name, wanted):
    found = evidence(module, name)
    assert {key: found[key].value for key in wanted} == wanted
    assert "28 releases of vLLM from 0.8.5 to 0.32.0" in found["written_now"].source


@pytest.mark.parametrize("kind, name", [
    ("flag", "--scheduling-policy"), ("flag", "--max-num-batched-tokens"), ("metric", "vllm:num_requests_running"),
    ("metric", "vllm:num_requests_waiting"), ("metric", "vllm:kv_cache_usage_perc"),
    ("metric", "vllm:num_preemptions_total"), ("metric", "vllm:generation_tokens_total")])
def test_what_a_verdict_tells_to_write_instead_is_in_the_newest_release(kind, name):
    now, _ = _serving.by_release("x", kind, (name,), Text(name, f"名字 {name}"))
    assert now.value == 1


def test_a_name_that_the_engine_has_is_found_as_it_is_written():
    now, ever = _serving.by_release("x", "metric", ("vllm:num_preemptions_total", "vllm:gpu_cache_usage_perc"),
                                    Text("two", "两个"))
    assert (now.value, ever.value, now.n, now.name) == (1, 2, 2, "x_now")


def test_sixteen_decoding_sequences_use_a_tenth_of_an_a100():
    share = evidence(batching, "C52")["decode_compute"]
    assert share.value == pytest.approx(16 / (312e12 / 2.039e12), rel=1e-6)


def test_calm_load_keeps_its_interval_and_lies_near_the_offered_share():
    calm = evidence(batching, "C52")["calm_share"]
    assert calm.low < calm.value < calm.high and calm.n == 5 and calm.value == pytest.approx(0.25, abs=0.02)


def test_what_memory_bears_depends_on_the_length_meant():
    assert evidence(batching, "C58")["bounds"].value == pytest.approx(31 / (41408 / 32768))


def test_a_cell_of_engines_that_is_empty_is_missing_and_says_so():
    none = _serving.cell_has("TGI", "offload", "CPU", "x", Text("offloads", "卸载"))
    assert none.kind == "missing" and "data/engines.csv has no cell offload of TGI" in none.note.en
    assert _serving.cell_has("TGI", "status", "maintenance", "x", Text("a", "甲")).value == 1


def test_quoted_numbers_become_a_gain_with_the_sources_of_both():
    found = evidence(frameworks, "C62")
    assert found["gain"].value == pytest.approx(2100 / 1850 - 1) and found["gain"].source.count("(read 2026") == 1
    assert evidence(frameworks, "C61")["start"].value == pytest.approx(1680 / 62)


def test_one_card_holds_a_negative_number_of_requests_of_a_72b_model():
    """(VRAM − weights) ÷ (KV × 1.3) by hand; the article's formula gives −29 to −37 with decimal gigabytes."""
    found = evidence(planning, "C67")
    kv = 2 * 80 * 8 * 128 * 2 * 4096
    assert found["one_card"].value == pytest.approx((79.25 * 2**30 - 145.41e9) / (1.3 * kv), rel=2e-3)
    assert -37 < found["one_card"].value < -29


def test_the_formula_errs_both_ways_beside_the_block_model():
    found = evidence(planning, "C67")
    assert (found["group"].low, found["group"].high) == pytest.approx((96.84 / 118.64, 111.74 / 118.64), rel=1e-3)
    assert found["group"].high < 1 < found["small"].low


def test_a_share_of_few_servers_has_a_wide_exact_interval():
    found = evidence(planning, "C68")
    assert (found["within"].value, found["within"].n) == (1 / 14, 14) and found["enough"].value == 0.5
    # the textbook's Clopper-Pearson limits for 1 of 14 and 7 of 14
    assert (found["within"].low, found["within"].high) == pytest.approx((0.0018, 0.3387), abs=2e-4)
    assert (found["enough"].low, found["enough"].high) == pytest.approx((0.2304, 0.7696), abs=2e-4)
    none, every = (planning._share("x", Text("a", "甲"), hits, 5, "s") for hits in (0, 5))
    assert none.low == 0 < none.high < 1 and every.high == 1 > every.low > 0


def test_an_engines_budget_has_no_gradients_and_about_two_gib_of_the_rest():
    found = evidence(planning, "C69")
    assert found["gradient_terms"].value == 0 and found["gradient_terms"].n == 3
    assert 1.5 < found["temporary"].value / 2**30 < 2.5


def test_the_open_report_is_said_beside_the_verdict_on_truncation():
    claim = next(one for one in alarms.CLAIMS if one.id == "C70")
    said = judged(claim, claim.evidence(RESULTS)).verdict.because
    assert "1 open report (2025, unconfirmed) says otherwise" in said.en and "未关闭的报告" in said.zh


def test_that_nothing_is_cut_off_rests_on_answers_that_were_compared():
    found = evidence(alarms, "C70")
    assert list(found)[0] == "complete" and {found[name].kind for name in ("complete", "same")} == {"measured"}
    assert found["complete"].n == 16 and found["preempted"].value > 0


def test_a_name_as_written_needs_no_colon():
    names = [Evidence("written_now", Text("a", "甲"), 1, "count", "quoted", n=1, source="s")]
    assert _serving.name_judge(Text("b", "乙"))(Found(names)).word == "supported"


def test_a_row_of_a_study_without_results_names_the_run():
    lacking = _serving.row(Results({"batching": None}), "batching", "lever", "cut_share", "x", Text("a", "甲"))
    assert lacking.kind == "missing" and "kvlab run batching" in lacking.note.en
