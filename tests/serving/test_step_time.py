"""Step times by hand: what a roofline, four measured numbers and a constant give for a batch."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.serving.step_time import Batch, Linear, Roofline, Work, fixed

WORK = Work(weight_bytes=1000, flops_per_token=20, kv_bytes_per_token=2, flops_per_pair=1)
DECODE = Batch(decode_seqs=3, kv_tokens=50, sequences=3)
PREFILL = Batch(prefill_tokens=100, kv_tokens=100, prefill_pairs=5050, sequences=1)


def test_a_decode_step_takes_the_time_of_its_bytes():
    step = Roofline(WORK, bandwidth=10, flops=1e9, device="D", source="S", overhead_s=7)
    assert step(DECODE) == 7 + (1000 + 2 * 50) / 10


def test_a_prefill_step_takes_the_time_of_its_flops():
    step = Roofline(WORK, bandwidth=1e9, flops=10, device="D", source="S")
    assert step(PREFILL) == (20 * 100 + 5050) / 10
    assert step(DECODE) == (20 * 3 + 50) / 10                   # one query token per sequence: as many pairs as tokens


def test_a_scale_multiplies_all_of_it_and_says_where_it_is_from():
    step = Roofline(WORK, bandwidth=10, flops=1e9, device="D", source="S", overhead_s=7, scale=2)
    scaled = step.scaled(1.5, "fitted on a run")
    assert scaled(DECODE) == pytest.approx(3 * (7 + 110))
    assert scaled.source == "S; fitted on a run" and scaled.device == "D"


def test_touched_experts_are_a_few_for_one_token_and_all_for_many():
    work = Work(weight_bytes=0, flops_per_token=1, kv_bytes_per_token=0, experts=64, experts_per_token=8,
                expert_bytes=10)
    assert work.touched_experts(1) == pytest.approx(8)
    assert work.touched_experts(2) == pytest.approx(15)         # 64 · (1 − (7/8)²)
    assert work.touched_experts(1000) == pytest.approx(64)
    assert work.bytes(Batch(decode_seqs=2)) == pytest.approx(150)
    assert WORK.touched_experts(5) == 0


def test_four_numbers_add_up():
    assert Linear(1, 2, 3, 4, device="D", source="S")(Batch(10, 5, 7)) == 1 + 20 + 15 + 28
    assert fixed(0.5)(PREFILL) == fixed(0.5)(DECODE) == 0.5


@pytest.mark.parametrize("make", [
    lambda: Roofline(WORK, bandwidth=0, flops=1, device="D", source="S"),
    lambda: Roofline(WORK, bandwidth=1, flops=1, device="D", source="S", overhead_s=-1),
    lambda: Roofline(WORK, bandwidth=1, flops=1, device="D", source="S", scale=0),
    lambda: Roofline(WORK, bandwidth=float("nan"), flops=1, device="D", source="S"),
    lambda: Linear(0, 0, 0, 0, device="D", source="S"), lambda: Linear(1, -1, 0, 0, device="D", source="S"),
    lambda: Linear(1, float("nan"), 0, 0, device="D", source="S"),
    lambda: fixed(0), lambda: fixed(-1), lambda: fixed(float("nan"))])
def test_times_that_cannot_be_are_refused(make):
    with pytest.raises(ValueError):
        make()


@given(st.builds(Batch, *[st.integers(1, 10_000)] * 5), st.integers(1, 1000))
def test_more_work_never_takes_less_time(batch, more):
    step = Roofline(WORK, bandwidth=100, flops=300, device="D", source="S")
    for name in ("prefill_tokens", "decode_seqs", "kv_tokens", "prefill_pairs"):
        larger = Batch(*(getattr(batch, one) + more * (one == name) for one in
                         ("prefill_tokens", "decode_seqs", "kv_tokens", "prefill_pairs", "sequences")))
        assert step(larger) >= step(batch)


def test_four_measured_times_can_be_scaled_as_a_model_of_a_gpu_can():
    one, batch = Linear(1e-3, 2e-5, 3e-5, 4e-9, "here", "timed"), Batch(decode_seqs=4, kv_tokens=1000)
    twice = one.scaled(2.0, "fitted")
    assert twice(batch) == pytest.approx(2 * one(batch)) and twice.source == "timed; fitted"
