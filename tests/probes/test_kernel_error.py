"""The worst row is judged by a tolerance from the data, twice, and a wrong trial loses every later number."""
import pytest
import torch
from made_variants import SMALL, compare, honest, made

from kvlab.attention import Comparison, reference, trial
from kvlab.attention.naive import Naive
from kvlab.kv.cache import Layout
from kvlab.probes import measure
from kvlab.probes._base import Bench
from kvlab.probes._expected import SAMPLED_ROWS, Expected, decisive, overwrite
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
    assert 0 < rows[0]["value"] and "tolerance of the worst row" in rows[0]["note"]
    assert rows[1]["error"].startswith("an output row is off by") and "exceeds the tolerance" in rows[1]["error"]


@pytest.mark.parametrize("dtype, kv_format, kv_len, floor", [
    ("fp32", "fp32", 64, True), ("bf16", "bf16", 8, True), ("bf16", "int8/token", 64, True),
    ("fp32", "bf16", 64, True), ("fp32", "fp32", 8192, False)])
def test_the_exact_side_decodes_to_fp32_and_the_plain_side_to_the_dtype_of_the_trial(dtype, kv_format, kv_len, floor):
    workload = Workload.decode(AttentionShape(2, 2, 128), kv_len=kv_len)           # one query head to each KV head
    one = trial(honest(), workload, kv_format=kv_format, dtype=dtype, data="outlier", layout=Layout())
    bench = bench_of(Comparison((one,)))
    inputs = bench.inputs_of(one)[0]

    def stored(decoded_to):
        k, v = one.format.decode(inputs.cache.gather([0], kv_len), workload.shape, decoded_to)
        return [k], [v]
    exact, _, tolerance = Expected(bench).of(one)
    assert torch.equal(exact, reference(workload, inputs.q_BTQD, *stored(torch.float32)))
    rounded = reference(workload, inputs.q_BTQD, *stored(one.torch_dtype))
    assert torch.equal(exact, rounded) == (kv_format != "int8/token")
    plain = reference(workload, inputs.q_BTQD, *stored(one.torch_dtype), dtype=one.torch_dtype).double()
    worst = max(float((p - e).norm() / e.norm()) for p, e in zip(plain[0], exact[0]))
    least = (32 if dtype == "fp32" else 8) * torch.finfo(one.torch_dtype).eps
    assert tolerance == pytest.approx(max(4 * worst, least)) and (4 * worst < least) == floor


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_head_of_one_query_token_is_enough_to_be_wrong(dtype):
    def call(honest_call, inputs):
        output = honest_call()
        output[70, 3] *= 1.2
        return output
    comparison = compare(made("one_row", call), workload=Workload.prefill(AttentionShape(8, 2, 16), q_len=128),
                         dtype=dtype)
    (row,) = measure(comparison, [KernelError()])
    assert row["status"] == "failed" and "off by 0.2 of its length" in row["error"]
    bench = bench_of(comparison)
    exact, _, tolerance = Expected(bench).of(comparison.trials[0])
    scaled_row = exact.clone()
    scaled_row[70, 3] *= 1.2
    assert dtype == "fp32" or (scaled_row - exact).norm() / exact.norm() < tolerance            # the mean would hide it


def losing(name, lost):
    """Attends to all visible tokens of each sequence but lost(first visible, kv_len)."""
    def prepare(trial, inputs):
        w = trial.workload

        def call():
            out = []
            for b, (q_TQD, S) in enumerate(zip(inputs.q_BTQD, w.kv_lens)):
                k_KSD, v_KSE = inputs.decode(*inputs.stored(b), S)
                first = w.first_visible(b)
                kept = [t for t in range(first, S) if t != lost(first, S)]
                out.append(Naive().attend(q_TQD, k_KSD[:, kept], v_KSE[:, kept], None, None))
            return torch.cat(out)
        return call
    return made(name, prepare=prepare)


LOST = {"newest": lambda first, S: S - 1, "first": lambda first, S: first, "middle": lambda first, S: (first + S) // 2,
        "block_end": lambda first, S: (S - 1) // 16 * 16 - 1}


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("kv_len", [250, 256, 4096])
def test_a_single_lost_token_is_found_even_where_bf16_would_hide_it(kv_len, window):
    workload = Workload.decode(AttentionShape(4, 2, 64, window=window), kv_len=kv_len)
    trials = [trial(v, workload, layout=Layout(), dtype="bf16")
              for v in (losing("nothing", lambda first, S: -1), *(losing(name, lost) for name, lost in LOST.items()))]
    paged = trial("paged", workload, layout=Layout(block_size=16), dtype="bf16")
    status = {r["variant"]: (r["status"], r["error"]) for r in measure(Comparison((*trials, paged)), [KernelError()])}
    assert status.pop("nothing") == status.pop("paged") == ("ok", "")
    assert set(status) == set(LOST) and {found for found, _ in status.values()} == {"failed"}
    if kv_len == 4096 and window is None:                            # where the first judgement let all of them pass
        assert all(error.startswith("wrong where single tokens decide") for _, error in status.values())


def test_zeroed_tail_rows_of_a_long_prefill_are_found_though_their_share_of_the_whole_is_small():
    workload = Workload.prefill(AttentionShape(2, 1, 16), q_len=2048)

    def call(honest_call, inputs):
        output = honest_call()
        output[-8:] = 0
        return output
    comparison = compare(made("tail", call), workload=workload, dtype="bf16")
    (row,) = measure(comparison, [KernelError()])
    assert row["status"] == "failed" and "off by 1 of its length" in row["error"]
    inputs = bench_of(comparison).inputs_of(comparison.trials[0])[0]
    exact = reference(workload, inputs.q_BTQD, inputs.k, inputs.v)
    assert exact[-8:].norm() / exact.norm() < Expected(bench_of(comparison)).of(comparison.trials[0])[2]


@pytest.mark.parametrize("what", [float("nan"), float("inf")])
def test_an_output_must_be_finite_where_it_is_not_sampled_as_well(what):
    comparison = compare(honest(), workload=LONG)
    first = Expected(bench_of(comparison)).rows("cpu")[0].tolist()
    unsampled = next(row for row in range(300) if row not in first)
    spoiled = made("spoiled", lambda call, inputs: call().index_fill(0, torch.tensor(unsampled), what))
    (row,) = measure(compare(spoiled, workload=LONG), [KernelError()])
    assert row["status"] == "failed" and row["error"] == "the output holds NaN or infinity"


def state(inputs):
    return [inputs.q_TQD, *inputs.cache.k_arrays, *inputs.cache.v_arrays]


@pytest.mark.parametrize("v_in_k", [False, True])
def test_the_second_judgement_sees_other_tokens_and_all_inputs_come_back_bit_by_bit(v_in_k):
    shape = AttentionShape(4, 2, 32, 16, v_in_k=True) if v_in_k else AttentionShape(4, 2, 32)
    workload, seen = Workload(shape, q_lens=(1, 1), kv_lens=(75, 64), shared_prefix=32), []

    def watching(call, inputs):
        seen.append(inputs.cache.k_arrays[0].clone())
        return call()
    paged = [trial("paged", workload, kv_format=f, layout=Layout(16, "random", order, share), dtype="bf16")
             for f in ("bf16", "int8/token", "int8/block16") for order, share in (("head", True), ("token", False))]
    comparison = Comparison((trial(made("watching", watching), workload, layout=Layout(), dtype="bf16"), *paged))
    bench, fresh = bench_of(comparison, copies=2), comparison.inputs(2)
    found = list(KernelError().measure(bench))
    assert [one for one, _ in found] == list(comparison.trials) and not bench.failures
    before, during = seen
    changed = (before != during).any(-1).any(1)                      # tokens of each sequence
    assert sorted(changed[0].nonzero().flatten().tolist()) == [16, 37, 63, 74]
    assert sorted(changed[1].nonzero().flatten().tolist()) == [16, 32, 47, 63]
    for key, copies in bench.inputs.items():
        for got, wanted in zip(copies, fresh[key]):
            assert all(torch.equal(a, b) for a, b in zip(state(got), state(wanted), strict=True))


def test_a_prefix_that_sequences_share_stays_shared_and_is_decided_too():
    workload = Workload.decode(AttentionShape(4, 2, 32), batch_size=3, kv_len=96, shared_prefix=48)
    comparison = Comparison(tuple(trial("paged", workload, layout=Layout(16, share_prefix=share), dtype="bf16")
                                  for share in (True, False)))
    bench = bench_of(comparison)
    shared = bench.inputs_of(comparison.trials[0])[0]
    k, v = decisive(shared, workload, {16})
    assert all(torch.equal(k[b][:48], k[0][:48]) for b in range(3)) and v is shared.v
    differs = [(planted != kept).any(-1).any(-1).nonzero().flatten().tolist() for planted, kept in zip(k, shared.k)]
    assert differs == [[24, 48, 79, 95]] * 3
    assert [r["status"] for r in measure(comparison, [KernelError()])] == ["ok", "ok"]
    long = Workload.decode(AttentionShape(4, 2, 32), batch_size=2, kv_len=4096, shared_prefix=2048)
    lost = trial(losing("prefix", lambda first, S: 1024), long, dtype="bf16",
                 layout=Layout())
    (row,) = measure(Comparison((lost,)), [KernelError()])
    assert row["status"] == "failed" and row["error"].startswith("wrong where single tokens decide")


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
    assert dispatched(lambda: 1) == (1, "none that torch dispatched (compiled, or a library's)")


def test_an_honest_variant_is_honest_for_v_in_k():
    workload = Workload.decode(AttentionShape(8, 1, 24, 16, v_in_k=True), kv_len=50)
    row, = measure(compare(made("mla", prepare=Naive().prepare), workload=workload), [KernelError()])
    assert row["status"] == "ok"
