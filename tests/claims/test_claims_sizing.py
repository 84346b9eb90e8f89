"""The numbers that claims of section 2 rest on, against arithmetic by hand."""
import pytest

from kvlab.catalog.models import model
from kvlab.claims import sixteen_requests, sizing
from kvlab.claims._results import Results

CLAIMS = {claim.id: claim for claim in (*sizing.CLAIMS, *sixteen_requests.CLAIMS)}


def evidence(claim, results=None):
    return {one.name: one for one in CLAIMS[claim].evidence(results or Results())}


@pytest.mark.parametrize(("name", "ratio"), [
    ("Qwen/Qwen2-72B-Instruct", 1), ("deepseek-ai/DeepSeek-V3", 56.89), ("moonshotai/Kimi-K2-Instruct", 28.44),
    ("google/gemma-3-27b-it", 5.96), ("openai/gpt-oss-120b", 2.0)])
def test_the_formula_over_the_bytes_at_131072_tokens(name, ratio):
    assert sizing.over_truth(model(name), 131_072) == pytest.approx(ratio, rel=2e-3)


def test_what_the_formula_leaves_out():
    found = evidence("C08")
    assert found["copies"].value == 2 and found["scales"].value == pytest.approx(1 + 4 / 128)
    assert found["state"].value == 69 * 96 * 128 * 128 * 4
    assert found["kimi_k3"].value == pytest.approx(93 * 96 * 128 * 2 * 2 / (24 * 576 * 2))
    assert found["exact"].value + found["far_off"].value < 1 and found["exact"].n == found["far_off"].n > 100
    assert found["blocks"].kind == "simulated" and found["blocks"].low < found["blocks"].value < found["blocks"].high


def test_the_example_in_bytes_and_in_both_units():
    found, units = evidence("C11"), evidence("C12")
    assert found["bytes"].value == found["in_blocks"].value == 2 * 80 * 4096 * 128 * 8 * 2
    assert (units["gb"].value, units["gib"].value) == (1.34217728, 1.25)
    assert evidence("C10")["fp16"].value == 2 and evidence("C14")["params"].value == 72_706_203_648
    assert evidence("C14")["gb"].value == pytest.approx(145.412, abs=1e-3)
    assert evidence("C14")["gib"].value == pytest.approx(135.426, abs=1e-3)


def test_sixteen_requests_at_full_length_and_at_the_lengths_of_a_trace():
    found = evidence("C13")
    assert found["gib"].value == 20 and found["gb"].value == pytest.approx(21.4748, abs=1e-4)
    table = Results().rows("paging")
    share = table[(table["metric"] == "used_share") & table["case"].str.contains('"reserved": "max_model_len"')]
    tokens = share["value"].item() * 8192
    assert found["live"].value == pytest.approx(16 * tokens * 327_680 / 2**30) and found["live"].n == 5


def test_what_servers_hold_beside_the_weights():
    found = evidence("C15")
    assert found["needed"].value == pytest.approx((145.412 + 21.475) / 640, rel=1e-3)
    held = [found[f"on_{count}"] for count in (8, 4, 2)]
    for one, by_hand in zip(held, (333, 112, 2), strict=True):     # 0.9 of the memory less 3 GiB per GPU
        assert one.value == pytest.approx(by_hand, rel=0.03, abs=1) and one.low <= one.value <= one.high
