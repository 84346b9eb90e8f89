"""What the claims on the group ratio read: the study's numbers, a census, longer contexts where there are any."""
import pytest

from kvlab.claims import _ratio_census, group_ratio, long_contexts, ratio_choice
from kvlab.claims._base import judged
from kvlab.claims._results import Results

CLAIMS = {claim.id: claim for claim in (*group_ratio.CLAIMS, *long_contexts.CLAIMS, *ratio_choice.CLAIMS)}


@pytest.fixture(scope="module")
def results():
    return Results()


def evidence(results, name):
    return {one.name: one for one in CLAIMS[name].evidence(results)}


def longer(results, tokens=9216):
    """The same results as if the narrow cells had been wide ones and scored at `tokens` instead of 128."""
    table = results.rows("group_ratio")
    table = table[~((table["head_dim"] == 64) & table["metric"].isin(["recall", "nll"]))].copy()
    scored = (table["head_dim"] == 4) & table["metric"].isin(["recall", "nll"])
    table.loc[scored & (table["kv_len"] == 128), "kv_len"] = tokens
    table.loc[scored, "head_dim"] = 64
    made = Results()
    made._tables["group_ratio"] = table
    return made


def test_the_knee_is_the_one_that_the_study_finds(results):
    from kvlab.studies._group_ratio_knees import knees
    study = {one.name: one for one in knees(group_ratio.grid(results))}
    found = evidence(results, "C23")
    for name in ("knee", "knee_nll"):
        own = study[f"{name}:head_dim4"]
        assert (found[name].value, found[name].low, found[name].high) == pytest.approx((own.value, own.low, own.high))
    assert found["knees"].value == study["knee_by_n:head_dim4"].value and found["knees"].n == 5


def test_a_rise_is_the_difference_of_the_means_over_seeds(results):
    scores = group_ratio.grid(results).scores(4, 64, "nll").mean()
    found = evidence(results, "C23")
    assert found["narrow"].value == pytest.approx(scores[32] - scores[16]) and found["narrow"].n == 5
    assert found["trained_longer"].value < found["trained"].value and found["trained_longer"].n == 3


def test_the_census_counts_grouped_models_with_long_contexts_and_leaves_the_rest_out():
    shipped = _ratio_census.shipped()
    assert shipped["nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16"] == (32, 262_144)
    assert shipped["meta-llama/Meta-Llama-3.1-405B"] == (16, 131_072)
    for left_out in ("tiiuae/falcon-180B", "deepseek-ai/DeepSeek-V3", "Qwen/Qwen-72B", "google/gemma-3-1b-it"):
        assert left_out not in shipped                          # 2,048 tokens; MLA; MHA; MQA
    counts = [one.value for one in _ratio_census.census()]
    assert sum(counts) == len(shipped) >= 55 and counts[3] == sum(r > 16 for r, _ in shipped.values())


def test_longer_contexts_decide_once_there_are_any(results):
    assert judged(CLAIMS["C24"], CLAIMS["C24"].evidence(results)).verdict.word == "untestable here"
    made = longer(results)
    steps, safer = evidence(made, "C24")["beyond"], evidence(made, "C25")["more"]
    assert steps.value == pytest.approx(evidence(results, "C24")["narrow_longer"].value)
    gaps = evidence(results, "C25")
    assert safer.value == pytest.approx(gaps["longer"].value - gaps["short"].value) and safer.n == 5
    assert long_contexts._beyond(longer(results, 8192), "beyond", 16, 32).kind == "missing"


@pytest.mark.parametrize("name", ["--num-kv-heads", "num_key_value_heads", "n_head_kv", "group_ratio", "--gqa"])
def test_settings_of_kv_heads_would_be_found(name):
    assert ratio_choice.KV_HEADS.search(name)


@pytest.mark.parametrize("name", ["--kv-cache-dtype", "kv_transfer_config", "dsa_paged_mqa_logits_backend",
                                  "--override-kv"])
def test_other_settings_are_not_taken_for_one(name):
    assert not ratio_choice.KV_HEADS.search(name)


def test_the_flags_that_replace_a_configs_fields_are_still_there(results):
    found = evidence(results, "C26")
    assert found["any_field"].value == len(ratio_choice.ANY_FIELD) and found["setters"].n > 1000
