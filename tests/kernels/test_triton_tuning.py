"""Choosing a configuration: with a stand-in for the GPU's clock, so that nothing here depends on a time."""
import pytest

from kvlab.attention import Comparison, trial
from kvlab.attention.triton_flash import TritonFlash
from kvlab.attention.triton_paged import TritonPaged
from kvlab.kernels import triton_tuning
from kvlab.kernels.triton_tuning import Config, pick, power, told
from kvlab.kv.cache import Layout
from kvlab.libraries import library
from kvlab.shapes import AttentionShape, Workload

MILLISECONDS = triton_tuning._milliseconds                      # the real one; tests of choosing replace it
SLOW, FAST, LARGE = Config(16, 64, 4, 3), Config(16, 128, 8, 2), Config(64, 128, 8, 5)
TIMES = {SLOW: 3.0, FAST: 2.0}


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """The configurations that were launched; the clock reads what the launch returns."""
    found = []
    monkeypatch.setattr(triton_tuning, "_chosen", {})
    monkeypatch.setattr(triton_tuning, "_milliseconds", lambda launch: launch())
    return found


@pytest.fixture
def launch(launched):
    def one(config):
        launched.append(config)
        if config is LARGE:
            raise RuntimeError("out of resource: shared memory")
        return TIMES[config]
    return one


def test_the_fastest_is_found_once_and_told(launch, launched):
    assert pick("a", (SLOW, FAST), launch, True) == FAST
    assert pick("a", (SLOW, FAST), launch, True) == FAST and launched == [SLOW, FAST]
    assert told("a") == "tile of 16 queries by 128 tokens, 8 warps, 2 stages; chosen among 2 by measuring"
    assert told("b") == ""


def test_another_key_is_another_choice(launch, launched):
    pick("a", (SLOW, FAST), launch, True)
    TIMES_THERE = {SLOW: 1.0, FAST: 2.0}
    assert pick("b", (SLOW, FAST), lambda config: TIMES_THERE[config], True) == SLOW
    assert pick("a", (SLOW, FAST), launch, True) == FAST


@pytest.mark.parametrize("time, chosen", [(2.95, SLOW), (2.93, FAST)])
def test_the_default_is_replaced_where_another_is_more_than_2_percent_faster(time, chosen):
    assert pick("a", (SLOW, FAST), {SLOW: 3.0, FAST: time}.get, True) == chosen
    assert told("a").endswith("chosen among 2 by measuring")


@pytest.mark.parametrize("variant, new", [(TritonPaged(), lambda n: 1), (TritonFlash(), lambda n: n // 4)])
def test_a_length_that_grows_is_measured_once_per_power_of_two(monkeypatch, variant, new):
    if why := library("triton").why_not:
        pytest.skip(why)
    measured = []
    monkeypatch.setattr(triton_tuning, "_fastest",
                        lambda candidates, launch: (measured.append(1) or candidates[1], "measured"))

    def planned(n, q_heads=4, batch=2):
        one = trial(variant, Workload(AttentionShape(q_heads, 2, 64), (new(n),) * batch, (n,) * batch), dtype="bf16",
                    kv_format="bf16", layout=Layout(16))
        variant.prepare(one, next(iter(Comparison((one,)).inputs().values()))[0])
        assert variant.ran(one).endswith("; measured")
        return len(measured)
    assert [planned(n) for n in (70, 71, 100, 127, 128)] == [1] * 5 and len(triton_tuning._chosen) == 1
    assert planned(129) == 2
    assert planned(128, q_heads=8) == 3 and planned(128, batch=3) == 4


def test_blocks_are_other_candidates_than_none():
    def key(n):
        return TritonFlash()._key(trial(TritonFlash(), Workload(AttentionShape(4, 2, 64), (1,), (n,)),
                                        layout=Layout(48)))
    assert key(40) != key(50) == key(60)


@pytest.mark.parametrize("lens, found", [((1,), 1), ((2,), 2), ((3, 64), 64), ((65, 3), 128)])
def test_the_power_of_two_is_that_of_the_longest(lens, found):
    assert power(lens) == found


def test_without_tuning_the_first_is_taken_and_nothing_is_launched(launch, launched):
    assert pick("a", (SLOW, FAST), launch, False) == SLOW and launched == []
    assert told("a") == "tile of 16 queries by 64 tokens, 4 warps, 3 stages; default"


def test_one_candidate_needs_no_measuring(launch, launched):
    assert pick("a", (LARGE,), launch, True) == LARGE and launched == []
    assert told("a").endswith("default")


def test_a_candidate_that_cannot_be_launched_is_left_out_and_said(launch):
    assert pick("a", (LARGE, SLOW, FAST), launch, True) == FAST
    assert told("a").endswith("chosen among 2 by measuring, 1 could not be launched")


def test_where_none_can_be_launched_the_error_is_raised_and_nothing_is_remembered(launch):
    with pytest.raises(RuntimeError, match="out of resource: shared memory"):
        pick("a", (LARGE, LARGE), launch, True)
    assert told("a") == ""


def test_the_clock_is_the_median_of_launches_that_find_an_empty_cache(monkeypatch):
    import torch
    now, log = [0.0], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = now[0]
            log.append("event")

        def elapsed_time(self, end):
            return end.at - self.at

    def launch():
        log.append("launch")
        now[0] += 50.0 if log.count("launch") in (1, 4) else 2.0        # the first compiles, one is disturbed
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(triton_tuning, "Flush", lambda device: lambda: log.append(f"flush {device}"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("ahead"), raising=False)
    assert MILLISECONDS(launch) == 2.0
    each = ["flush 3", "event", "launch", "event"]
    assert log == ["launch", "wait", "ahead", *each * triton_tuning.LAUNCHES, "wait"]
