"""Numbers behind the claims on pages and vLLM's settings, against values worked out by hand."""
import pytest

from kvlab.claims import engine_settings as settings
from kvlab.claims import paged
from kvlab.claims._results import Results
from kvlab.lang import Text
from kvlab.record.asked import asked

ABOUT = Text("a", "甲")


@pytest.fixture(scope="module")
def results():
    return Results()


def test_blocks_of_16_leave_seven_and_a_half_tokens_per_sequence_unused(results):
    """(16 − 1) ÷ 2 tokens, since a last block that is full leaves none."""
    found = paged._waste(results, "pages", ABOUT, "waste_of_tokens", block_size=16)
    rows = asked(results.rows("paging"), "waste")
    rule = rows[(rows["block_size"] == 16) & (rows["kind"] == "modelled")]["value"].iloc[0]
    mean_length = 16 / 2 / rule
    assert found.value * mean_length == pytest.approx(7.5, rel=0.02) and found.n == 5 and found.low < found.value


def test_a_reservation_is_read_of_its_own_rows(results):
    used, waste = (paged._waste(results, "x", ABOUT, metric, reserved="max_model_len")
                   for metric in ("used_share", "waste_of_tokens"))
    assert used.value == pytest.approx(1 / (1 + waste.value), rel=0.01)
    assert paged._waste(results, "x", ABOUT, "used_share", block_size=7).kind == "missing"


def test_the_engine_is_read_at_its_lowest_and_highest_rate(results):
    found = {one.name: one for one in paged._prefixes(results)}
    rows = asked(results.rows("prefix_sharing"), "engine")
    saved = rows[rows["metric"] == "live_memory_saved"].set_index("rate")["value"]
    assert found["few"].value == saved[saved.index.min()] and found["many"].value == saved[saved.index.max()]
    assert f"({saved.index.max():g}/s)" in found["many"].about.en


def test_four_a100_hold_about_112_requests_and_eight_about_333(results):
    found = {one.name: one for one in settings._four_gpus(results)}
    assert found["requests"].value == pytest.approx(112, rel=0.05)
    assert found["twice"].value == pytest.approx(333, rel=0.05)
    assert found["requests"].low <= 112 <= found["requests"].high
    assert found["weights"].value == pytest.approx(145.412e9 / 4, rel=1e-4)


def test_where_the_weights_do_not_fit_no_request_does(monkeypatch):
    assert "does not fit" in settings._plan(1)
    one = settings._requests("requests", ABOUT, 1)
    assert (one.value, one.low, one.high) == (0, 0, 0)
    assert [settings._divides(tp) for tp in (2, 3, 4, 16, 128)] == [True, False, True, True, False]
    monkeypatch.setattr(settings, "TP", 1)
    evidence = {one.name: one for one in settings._share_of_memory(Results())}
    assert evidence["kv"].kind == "missing" and "does not fit" in evidence["kv"].note.en


def test_the_share_of_the_cache_and_all_else_make_up_the_setting(results):
    found = {one.name: one for one in settings._share_of_memory(results)}
    assert found["kv"].value + found["others"].value == pytest.approx(settings.UTIL, abs=1e-6)
    assert found["default"].value == pytest.approx(0.92)


def test_256_sequences_fit_up_to_the_length_that_the_pool_allows(results):
    found = {one.name: one for one in settings._sequences(results)}
    tokens = settings._plan(4).tokens
    assert found["longest"].value <= tokens / 256 < found["longest"].value + 16
