"""The oracle's tolerance comes from the data, long prefills are sampled, and a wrong trial loses every later number."""
import pytest
import torch
from made_variants import SMALL, compare, honest, made

from kvlab.attention import Comparison, reference, trial
from kvlab.attention.naive import Naive
from kvlab.probes import measure
from kvlab.probes._base import Bench
from kvlab.probes._expected import SAMPLED_ROWS, Expected, overwrite
from kvlab.probes.format_error import FormatError
from kvlab.probes.kernel_error import KernelError, dispatched
from kvlab.probes.memory import Memory
from kvlab.probes.roofline import Roofline
from kvlab.shapes import AttentionShape, Workload

LONG = Workload((shape := AttentionShape(2, 1, 8)), q_lens=(300, 5, 1), kv_lens=(320, 9, 40))


def bench_of(comparison, copies=1):
    return Bench(comparison, list(comparison.trials), comparison.inputs(copies))


def scaled(factor):
    return made(f"scaled{factor}", lambda call, inputs: call() * factor)


@pytest.mark.parametrize("dtype, low, high", [("fp32", 4e-7, 1e-5), ("bf16", 0.03, 0.1), ("fp16", 4e-3, 2e-2)])
def test_the_tolerance_is_a_multiple_of_the_error_of_plain_attention_in_that_dtype(dtype, low, high):
    comparison = compare(honest(), dtype=dtype)
    _, places, tolerance = Expected(bench_of(comparison)).of(comparison.trials[0])
    assert low < tolerance < high and places is None


def test_the_tolerance_grows_with_data_that_are_harder_to_add_up():
    def tolerance(kv_len):
        comparison = compare(honest(), workload=Workload.decode(AttentionShape(4, 1, 16), kv_len=kv_len))
        return Expected(bench_of(comparison)).of(comparison.trials[0])[2]
    assert tolerance(8192) > 1.2 * tolerance(8)


@pytest.mark.parametrize("dtype, passes, fails", [("fp32", 1 + 1e-7, 1 + 1e-4), ("bf16", 1.004, 1.2)])
def test_an_output_inside_the_tolerance_passes_and_one_outside_does_not(dtype, passes, fails):
    rows = measure(compare(scaled(passes), scaled(fails), dtype=dtype), [KernelError()])
    assert [r["status"] for r in rows] == ["ok", "failed"]
    assert 0 < rows[0]["value"] and "tolerance" in rows[0]["note"] and "exceeds the tolerance" in rows[1]["error"]


def test_a_long_prefill_is_checked_on_sampled_rows_with_both_ends():
    comparison = compare(honest(), workload=LONG)
    expected = Expected(bench_of(comparison))
    first, *short = expected.rows("cpu")
    assert [r.tolist() for r in short] == [[0, 1, 2, 3, 4], [0]]
    assert first[0] == 0 and first[-1] == 299 and len(set(first.tolist())) == len(first) == SAMPLED_ROWS // 3
    exact, places, _ = expected.of(comparison.trials[0])
    assert places[:2].tolist() == [0, first[1]] and places[-6:].tolist() == [300, 301, 302, 303, 304, 305]
    inputs = bench_of(comparison).inputs_of(comparison.trials[0])[0]
    full = reference(LONG, inputs.q_BTQD, inputs.k, inputs.v)
    torch.testing.assert_close(exact, full[places])


@pytest.mark.parametrize("wrong_row", [0, 299, 304, 305])
def test_a_wrong_end_of_a_long_sequence_is_found(wrong_row):
    def call(honest_call, inputs):
        return honest_call().index_fill(0, torch.tensor(wrong_row), 0.5)
    row, = measure(compare(made("ends", call), workload=LONG), [KernelError()])
    assert row["status"] == "failed"


def test_short_batches_are_checked_whole():
    comparison = compare(honest(), workload=Workload.prefill(shape, batch_size=2, q_len=SAMPLED_ROWS // 2))
    assert Expected(bench_of(comparison)).rows("cpu") is None


def test_a_wrong_trial_has_failed_rows_of_every_later_probe_and_others_do_not():
    rows = measure(compare(scaled(2), honest()), [Memory(), Roofline(), FormatError(), KernelError()])
    wrong = [r for r in rows if r["variant"].endswith("scaled2")]
    assert {r["metric"] for r in wrong} == {
        "kernel_error", *Memory.metrics, *Roofline.metrics, *FormatError.metrics} and len(wrong) == len(
        {r["metric"] for r in wrong})
    assert {r["status"] for r in wrong} == {"failed"} and len({r["error"] for r in wrong}) == 1
    assert all(r["status"] == "ok" for r in rows if r["variant"].endswith("honest"))


def test_each_format_has_its_own_oracle_so_that_quantising_is_no_kernel_error():
    trials = [trial("naive", SMALL, kv_format=f) for f in ("fp32", "bf16", "int8/token", "int8/block16")]
    rows = measure(Comparison(tuple(trials)), [KernelError()])
    assert {r["status"] for r in rows} == {"ok"} and all(r["value"] < 1e-6 for r in rows)


def test_a_variant_that_writes_into_its_inputs_spoils_them_for_nobody():
    def scales_q(honest_call, inputs):
        inputs.q_TQD.mul_(0.25)
        return honest_call()

    def shifts_kv(trial, inputs):                                   # already when it plans, and then it raises
        inputs.cache.k_arrays[0].mul_(-1)
        raise RuntimeError("cannot")
    rows = measure(compare(honest("before"), made("q", scales_q), honest("between"), made("kv", prepare=shifts_kv),
                           honest("after")), [KernelError()])
    by = {r["variant"]: r for r in rows}
    assert [by[name]["status"] for name in ("before", "between", "after")] == ["ok"] * 3
    assert "writes into its inputs (q)" in by["q"]["error"] and "cannot" in by["kv"]["error"]


def test_kv_can_be_overwritten_behind_any_block_table():
    comparison = Comparison((trial("paged", Workload.decode(AttentionShape(4, 2, 16), batch_size=2, kv_len=40),
                                   kv_format="int8/token"),))
    bench = bench_of(comparison)
    inputs, one = bench.inputs_of(comparison.trials[0])[0], comparison.trials[0]
    before = Expected(bench).of(one)[0]
    overwrite(inputs, inputs.k, [-v for v in inputs.v])
    torch.testing.assert_close(Expected(bench).of(one)[0], -before)


def test_the_note_names_the_operators_that_torch_ran():
    rows = measure(compare("sdpa", "naive"), [KernelError()])
    assert "attention" in rows[0]["note"] and rows[1]["note"].endswith("operators: bmm")
    assert dispatched(lambda: 1) == (1, "none of torch's")


def test_an_honest_variant_is_honest_for_v_in_k():
    workload = Workload.decode(AttentionShape(8, 1, 24, 16, v_in_k=True), kv_len=50)
    row, = measure(compare(made("mla", prepare=Naive().prepare), workload=workload), [KernelError()])
    assert row["status"] == "ok"
