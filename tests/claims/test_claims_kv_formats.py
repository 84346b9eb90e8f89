"""The arithmetic behind the claims about KV formats, held against numbers worked out by hand."""
import csv
import re

import pytest

from kvlab.catalog import data_dir
from kvlab.claims import kv_formats
from kvlab.claims._base import Evidence, judged
from kvlab.claims._kv_evidence import interval
from kvlab.claims._results import Results
from kvlab.lang import Text

OWN = re.compile(r"c(4\d|50)_")


@pytest.fixture(scope="module")
def evidence():
    results = Results()
    return {claim.id: {one.name: one for one in claim.evidence(results)} for claim in kv_formats.CLAIMS}


def test_the_articles_request_is_1_25_gib_and_scales_add_a_32nd(evidence):
    sizes = evidence["C46"]
    assert sizes["fp16"].value == 2 * 80 * 4096 * 128 * 8 * 2 == 1_342_177_280
    assert sizes["fp8"].value == sizes["int8"].value == sizes["fp16_half_length"].value == 671_088_640
    assert sizes["int8_token"].value == 2 * 80 * 4096 * 8 * (128 + 4)       # an fp32 scale beside 128 codes


def test_a_scale_weighs_most_beside_the_shortest_heads(evidence):
    halved = evidence["C40"]
    assert halved["fp8"].value == 0.5 and halved["fp8_token"].value == (128 + 4) / 256
    assert halved["worst"].value == (64 + 4) / 128 and halved["worst"].n > 100


def test_fp8_products_begin_behind_ampere(evidence):
    units = evidence["C42"]
    assert units["ampere"].value == 0 and units["later"].value == 1 and units["lowest"].value == 8.9
    assert units["ampere"].n > 5 and units["later"].n > 10


def test_h100_multiplies_what_mi300_converts(evidence):
    assert (evidence["C44"]["h100"].value, evidence["C44"]["mi300"].value) == (1, 0)


def test_scores_say_which_model_they_are_of_and_how_many_tokens(evidence):
    for name in ("plain", "tensor", "token"):
        one = evidence["C41"][name]
        assert "smollm2-135m" in one.about.en and one.n == 1022 and one.low < one.value < one.high


def test_a_claim_with_too_few_tokens_says_that_more_would_tell(evidence):
    claim = next(claim for claim in kv_formats.CLAIMS if claim.id == "C44")
    from dataclasses import replace
    open_ = {"mi300": replace(evidence["C44"]["mi300"], value=1.0),
             "plain": replace(evidence["C44"]["plain"], value=0.001, low=-0.004, high=0.006)}
    verdict = judged(claim, (evidence["C44"] | open_).values()).verdict
    assert verdict.word == "inconclusive" and "tokens_needed" in verdict.needs.en


def test_an_interval_is_shown_with_its_ends_and_n():
    one = Evidence("x", Text("a", "甲"), 0.00264, "share", "measured", -0.00212, 0.00707, 1022, "s")
    assert interval(one) == ("+0.26 % [-0.21, +0.71] (n = 1,022)", "+0.26 % [-0.21, +0.71]（n = 1022）")
    assert interval(Evidence("x", Text("a", "甲"), 0.01, "share", "measured", source="s")).en == "+1.00 %"


def facts():
    with open(data_dir() / "facts.csv", encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if OWN.match(row["key"])]


@pytest.mark.parametrize("row", facts(), ids=lambda row: row["key"])
def test_a_quoted_ratio_or_difference_is_that_of_the_numbers_it_names(row):
    """In both languages; a fact without two numbers is itself one that its source states."""
    number = r"([\d,]*\d(?:\.\d+)?)"
    for text in (row["about"], row["about_zh"]):
        if pair := re.search(rf"{number} ÷ {number}", text):
            above, below = (float(one.replace(",", "")) for one in pair.groups())
            assert float(row["value"]) == pytest.approx(above / below, rel=1e-5)
        elif pair := re.search(rf"{number} − {number}", text):
            above, below = map(float, pair.groups())
            assert float(row["value"]) == pytest.approx((above - below) / 100, abs=1e-9)
        else:
            assert row["unit"] != "ratio" or row["key"] == "c45_a100_fp8_8_requests"    # stated as a ratio
    assert row["source"].startswith("https://") and re.fullmatch(r"\d{4}-\d\d-\d\d", row["read"])
