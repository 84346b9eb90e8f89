"""Nsight Compute as a probe: what it counts, what it says when it cannot, and what its child does in which order."""
import json
import sys
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from fake_cuda import fake_cuda
from fake_ncu import install
from made_variants import SMALL, honest, of

from kvlab.attention import Comparison, ideal_traffic, trial
from kvlab.probes import _ncu_child, _ncu_run, _target, measure
from kvlab.probes._base import Bench
from kvlab.probes._known import Operation
from kvlab.probes._ncu_run import PASSES, counted, program, read_passes
from kvlab.probes.ncu import Ncu, label, readings
from kvlab.record.reading import Reading
from kvlab.shapes import AttentionShape, Workload

NAIVE, SDPA = (trial(name, SMALL, device="cuda") for name in ("naive", "sdpa"))
BOTH = Comparison((NAIVE, SDPA))
IDEAL = ideal_traffic(SMALL, NAIVE.format, NAIVE.itemsize).read_bytes


# an ncu that really runs the program it is given, and counts nothing
CALLS_THE_CHILD = """
import subprocess, sys
if "--version" in sys.argv:
    print("Version 2025.3.1.0 (build 1)")
    sys.exit()
at = sys.argv.index("--log-file")
code = subprocess.run(sys.argv[at + 2:]).returncode
print(f"==ERROR== The application returned an error code ({code}).", file=open(sys.argv[at + 1], "w"))
sys.exit(code)
"""


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """install(mode, **settings) puts the fake first on PATH."""
    return lambda mode="ok", read=IDEAL, **settings: install(tmp_path, monkeypatch, mode, read=read, **settings)


def by_metric(case, found, cache_bytes=2**12):
    return {r.metric: r for r in readings(case, {name: of[case.case_id] for name, of in found.items()}, cache_bytes)}


def reasons(found, case):
    """What stands in place of the kernels, over all passes."""
    return {of[case.case_id] if isinstance(of[case.case_id], str) else None for of in found.values()}


def test_bytes_shares_and_kernels_of_a_call(ncu):
    ncu()
    found = by_metric(NAIVE, counted(BOTH))
    assert {name: r.unit for name, r in found.items()} == Ncu.metrics
    value = {name: r.value for name, r in found.items()}
    assert value["hbm_read_bytes"] == IDEAL and value["hbm_write_bytes"] == 128      # two kernels of 64
    writes = NAIVE.variant.load().cost(NAIVE, 2**12).write_bytes
    assert 128 < writes and found["hbm_bytes"].low == IDEAL + 128
    assert found["hbm_bytes"].high == IDEAL + 128 + min(writes, 2**12), "what L2 may still hold to write"
    assert value["hbm_bytes"] == IDEAL + 128 and value["kernels_per_call"] == 2
    assert value["read_amplification"] == value["cold_share"] == 1
    assert value["kernel_cold_read_bytes"] == 2 * IDEAL and value["kernel_cold_write_bytes"] == 128
    assert value["sm_utilization"] == 0.75 and value["sm_occupancy"] == pytest.approx(0.405)
    assert value["tensor_utilization"] == pytest.approx(0.155) and value["l2_hit_rate"] == 0.625   # 20 and 15 µs
    assert {r.kind for r in found.values()} == {"measured"} and {r.source for r in found.values()} == {"ncu"}
    assert found["hbm_bytes"].method == "counter" and found["read_amplification"].method == "derived"
    assert found["hbm_bytes"].cache_state == "cold (verified: ncu read 100 % of the ideal)"
    assert found["kernel_cold_read_bytes"].cache_state.startswith("cold (ncu empties")


def test_the_command_line_leaves_clocks_alone_and_counts_bytes_in_one_replay(ncu, tmp_path):
    ncu(seen=tmp_path / "seen")
    counted(BOTH)
    traffic, cold, activity = (tmp_path / "seen").read_text().splitlines()
    for line in (traffic, cold, activity):
        assert line.startswith("C ")                                 # the locale, for the thousands separator
        for option in ("--clock-control none", "--replay-mode kernel", "--profile-from-start off", "--nvtx", "--csv",
                       "--page raw", "--print-units base"):
            assert f" {option} " in line
        assert "-m kvlab.probes._ncu_child" in line
    assert "--cache-control none" in traffic and "--cache-control all" in cold and "--cache-control all" in activity
    assert "--metrics dram__bytes_read.sum,dram__bytes_write.sum --" in traffic     # more would need a second replay
    assert "lts__t_sector_hit_rate.pct" in activity


@pytest.mark.parametrize("mode, why", [
    ("permission", "NVreg_RestrictProfilingToAdminUsers=0"), ("library", "gVisor"), ("subscribers", "another profiler"),
    ("concurrent", "dcgmi profile --pause"), ("stub", "LD_LIBRARY_PATH"), ("option", "update Nsight Compute"),
    ("none", "No kernels were profiled"), ("cut:600", "cut"), ("cut:1", None)])
def test_each_way_to_fail_is_a_reason_and_is_tried_once(ncu, mode, why):
    ncu(mode)
    heard = []
    found = counted(BOTH, heard=heard)
    if why is None:                                                  # only the line's end was lost
        assert reasons(found, NAIVE) == {None}
        return
    assert len(heard) == 1 and set(found) == set(PASSES)
    for case in BOTH.trials:
        (reason,) = reasons(found, case)
        assert why in reason
    rows = by_metric(NAIVE, found)
    assert set(rows) == set(Ncu.metrics) and {r.kind for r in rows.values()} == {"missing"}
    assert all(why in r.note for r in rows.values())


def test_a_metric_that_this_ncu_does_not_know_costs_itself_only(ncu):
    ncu("unknown:pipe_tensor")
    heard = []
    found = by_metric(NAIVE, counted(BOTH, heard=heard))
    assert len(heard) == 4
    assert "2025.3.1.0 does not know sm__pipe_tensor_cycles" in found.pop("tensor_utilization").note
    assert {r.kind for r in found.values()} == {"measured"}


def test_kbytes_are_no_bytes(ncu):
    ncu("kbyte")
    found = by_metric(NAIVE, counted(BOTH))
    for metric in ("hbm_read_bytes", "hbm_bytes", "cold_share", "kernel_cold_read_bytes"):
        assert "'Kbyte' where --print-units base" in found[metric].note
    assert found["sm_utilization"].value == 0.75


@pytest.mark.parametrize("cell", ["n/a", "nan", "1.048.576", "1\u202f048"])
def test_a_cell_that_is_no_number_is_a_reason(ncu, cell):
    ncu(f"cell:{cell}")
    found = by_metric(NAIVE, counted(BOTH))
    assert found["hbm_write_bytes"].kind == found["sm_occupancy"].kind == "missing"
    assert f"ncu gave {cell!r} instead of a number" in found["hbm_write_bytes"].note
    assert found["l2_hit_rate"].value == 0.625


def test_a_share_above_one_is_refused(ncu):
    ncu("cell:4050")
    assert "as 40.5 of 1, which cannot be" in by_metric(NAIVE, counted(BOTH))["sm_occupancy"].note


@pytest.mark.parametrize("mode, why", [
    ("crash:naive", "its process did not survive it: it ended with exit code 11"), ("failed:naive", "odd head_dim"),
    ("sticky:naive", "odd head_dim")])
def test_a_trial_that_goes_wrong_costs_no_other_and_is_not_run_again(ncu, mode, why):
    ncu(mode)
    heard = []
    found = counted(BOTH, heard=heard, timeout_s=60)
    (reason,) = reasons(found, NAIVE)
    assert why in reason and reasons(found, SDPA) == {None}
    assert by_metric(SDPA, found)["hbm_read_bytes"].value == IDEAL
    assert [NAIVE.case_id in record["targets"] for record in heard] == [True] + [False] * (len(heard) - 1)


def hanging(monkeypatch):
    """Runs that a trial brought down are told as runs that were still going on when their time was over."""
    real = _ncu_run.run
    monkeypatch.setattr(_ncu_run, "run", lambda *a: (r := real(*a)) | {"code": None if r["code"] else 0})


def test_a_trial_that_hangs_uses_up_its_pass_and_the_next_passes_leave_it_out(ncu, monkeypatch):
    ncu("crash:naive")
    hanging(monkeypatch)
    heard = []
    found = counted(BOTH, heard=heard, timeout_s=60)
    (reason,) = reasons(found, NAIVE)
    assert "did not survive it: it did not answer within 60 s; " in reason and reason.endswith("allow more (timeout_s)")
    assert "this trial had not begun; allow more (timeout_s)" in found["traffic"][SDPA.case_id]
    assert by_metric(SDPA, found)["kernel_cold_read_bytes"].value == 2 * IDEAL
    assert [record["pass"] for record in heard] == list(PASSES)
    assert [NAIVE.case_id in record["targets"] for record in heard] == [True, False, False]


def test_what_ran_before_the_time_was_over_is_lost_and_says_so(ncu, monkeypatch):
    ncu("crash:sdpa")
    hanging(monkeypatch)
    found = counted(BOTH)["traffic"]
    assert "it prints its table at its end, so that the counts of this trial, which had run, are lost" in found[
        NAIVE.case_id]
    assert "did not survive it" in found[SDPA.case_id]


def test_runs_after_a_crash_share_the_time_of_their_pass(ncu, monkeypatch):
    ncu("crash:naive")
    now, real, limits = [0.0], _ncu_run.run, []

    def run(*given):
        limits.append(given[-1])
        now[0] += 25
        return real(*given)
    monkeypatch.setattr(_ncu_run, "run", run)
    monkeypatch.setattr(_ncu_run.time, "monotonic", lambda: now[0])
    found = counted(BOTH, timeout_s=40)
    assert limits == [40, 15, 40, 40] and reasons(found, SDPA) == {None}
    limits.clear()
    found = counted(BOTH, timeout_s=25)
    assert "the 25 s of the pass traffic went to runs that a trial brought down" in found["traffic"][SDPA.case_id]
    assert limits == [25]


def test_a_call_that_the_driver_only_copies_has_no_kernel_and_says_which_those_are(ncu):
    ncu(copies="naive")
    found = counted(BOTH)
    (reason,) = reasons(found, NAIVE)
    assert reason.startswith("ncu saw no kernel in the call (the driver's copies and fills, memcpy and memset, are ")
    assert reasons(found, SDPA) == {None}
    assert "copies and fills by the driver (memcpy, memset; clone()" in by_metric(SDPA, found)["hbm_bytes"].note


@pytest.mark.parametrize("passes, state", [
    (1, "cold (verified: ncu read 100 % of the ideal)"), (2, "cold (unverified: ncu ran each kernel 2 times)"),
    (0, "cold (unverified: ncu did not say how often it ran each kernel)")])
def test_a_second_replay_leaves_the_bytes_and_verifies_nothing(ncu, passes, state):
    ncu(passes=passes)
    found = by_metric(NAIVE, counted(BOTH))
    assert found["hbm_read_bytes"].value == IDEAL
    for metric in ("hbm_read_bytes", "cold_share"):
        assert found[metric].cache_state == state
        assert ("the label is not verified" in found[metric].note) is (passes != 1)


def test_an_ncu_that_hangs_is_ended(ncu):
    ncu("hang")
    found = counted(BOTH, timeout_s=0.5)
    (reason,) = reasons(found, SDPA)
    assert "did not answer within 0.5 s" in reason and "timeout_s" in reason


def test_without_ranges_one_trial_has_all_kernels_and_several_have_none(ncu):
    ncu("noranges")
    (reason,) = reasons(counted(BOTH), NAIVE)
    assert "NVTX" in reason and "one trial at a time" in reason
    assert by_metric(NAIVE, counted(Comparison((NAIVE,))))["hbm_read_bytes"].value == IDEAL


def test_what_was_heard_is_read_again_to_the_same_and_names_no_host_and_no_path(ncu, tmp_path):
    ncu("sticky:naive")
    heard = []
    found = counted(BOTH, heard=heard)
    text = json.dumps(heard)
    replayed = read_passes(json.loads(text))
    assert {name: of[SDPA.case_id] for name, of in replayed.items()} == {n: of[SDPA.case_id] for n, of in found.items()}
    assert replayed["traffic"][NAIVE.case_id] == found["traffic"][NAIVE.case_id]
    assert "odd head_dim in x.py" in found["traffic"][NAIVE.case_id]
    assert "gpu-host-7" not in text and "someone" not in text and str(tmp_path) not in text and "/" not in "".join(
        heard[0]["command"])
    assert heard[-1]["version"] == "2025.3.1.0" and heard[-1]["code"] == 0


def test_no_ncu_an_old_one_a_broken_one(ncu, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(_ncu_run, "_places", lambda: iter(()))
    assert "ncu was not found; install" in Ncu().why_not(NAIVE)
    script = ncu(version="2021.3.0.0")
    assert "2021.3.0.0 is older than 2022.4" in Ncu().why_not(NAIVE)
    _ncu_run._version.cache_clear()
    script.write_text("#!/no/such/interpreter\n")
    assert "it cannot be started" in Ncu().why_not(NAIVE)
    _ncu_run._version.cache_clear()
    script.write_text("#!/bin/sh\necho nothing of use\n")
    assert "told no version (nothing of use" in Ncu().why_not(NAIVE)


def test_ncu_is_found_where_installers_put_it(tmp_path, monkeypatch):
    script = install(tmp_path, monkeypatch)
    (tmp_path / "bin").mkdir()
    script.rename(tmp_path / "bin" / "ncu")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert program().path == str(tmp_path / "bin" / "ncu") and program().version == "2025.3.1.0"


def test_ncu_does_not_run_under_a_profiler(ncu, monkeypatch):
    ncu()
    assert Ncu().why_not(NAIVE) is None
    monkeypatch.setenv("NV_COMPUTE_PROFILER_PERFWORKS_DIR", "/x")
    assert "runs under Nsight" in Ncu().why_not(NAIVE)


def test_what_has_no_gpu_or_no_file_has_a_reason(ncu):
    ncu()
    assert "NVIDIA GPUs, not on the device cpu" in Ncu().why_not(trial("naive", SMALL))
    assert "put it into a .py file" in Ncu().why_not(trial(honest(), SMALL, device="cuda"))


def test_an_operation_is_counted_as_a_trial_is(ncu):
    ncu(read=2**22)
    op = Operation("copy", 2**22, device="cuda")
    with fake_cuda(l2=2**20):
        found = {r.metric: r for r in Ncu().operation(op)}
    assert set(found) == set(Ncu.metrics)
    assert found["hbm_read_bytes"].value == 2**22 and found["read_amplification"].value == 1
    cpu = Ncu().operation(Operation("copy", 2**22))
    assert {r.kind for r in cpu} == {"missing"} and {r.metric for r in cpu} == set(Ncu.metrics)


@pytest.mark.parametrize("share, state", [
    (1.3, "cold (verified: ncu read 130 % of the ideal)"), (0.12, "warm (ncu read only 12 % of the ideal)")])
def test_the_label_of_the_timer_and_of_what_inherits_it_is_what_ncu_saw(ncu, share, state):
    ncu(read=round(share * IDEAL))
    unverified, graph = "cold (unverified)", "warm (the same input again)"
    bench = Bench(BOTH, [NAIVE], {}, readings=[
        (t, Reading(metric, 1.0, "s", "measured", source=source, cache_state=label))
        for t, metric, source, label in ((NAIVE, "latency_s", "timer", unverified), (SDPA, "latency_s", "timer",
                                                                                    unverified),
                                         (NAIVE, "latency_warm_s", "timer", graph),
                                         (NAIVE, "bandwidth_share", "roofline", unverified))])
    with fake_cuda(l2=2**10):
        found = {r.metric: r.cache_state for _, r in Ncu().measure(bench)}
    got = {(t, r.metric): r.cache_state for t, r in bench.readings}
    assert got[NAIVE, "latency_s"] == got[NAIVE, "bandwidth_share"] == state
    assert found["hbm_bytes"] == found["cold_share"] == state
    assert got[SDPA, "latency_s"] == unverified and got[NAIVE, "latency_warm_s"] == graph


def test_a_variant_of_this_process_has_its_reason_and_the_others_their_numbers(ncu):
    ncu()
    mine = trial(honest(), SMALL, device="cuda")
    with fake_cuda(l2=2**10):
        rows = measure(Comparison((mine, NAIVE)), [Ncu()])
    (ours,), (counted_,) = of(rows, "cold_share", "honest"), of(rows, "cold_share", "naive")
    assert "put it into a .py file" in ours["note"] and counted_["value"] == 1
    assert len(rows) == 2 * len(Ncu.metrics)


def test_reads_below_the_variants_own_formula_verify_nothing():
    prompt = trial("naive", SMALL, device="cuda")
    ideal, formula = IDEAL, prompt.variant.load().cost(prompt, 0).read_bytes
    assert formula > ideal / 0.9
    assert label(prompt, formula, 0).startswith("cold (verified")
    assert label(prompt, ideal, 0).startswith("cold (unverified: ncu read 100 % of the ideal, and ")
    assert label(prompt, formula - 0.09 * ideal, 0).startswith("cold (verified")
    assert label(prompt, 0.89 * ideal, 0) == "warm (ncu read only 89 % of the ideal)"
    wide = trial("naive_repeat", Workload.decode(AttentionShape(32, 1, 16), kv_len=64), device="cuda")
    formula = wide.variant.load().cost(wide, 0).read_bytes
    ideal = ideal_traffic(wide.workload, wide.format, wide.itemsize).read_bytes
    assert formula - ideal > 0.9 * formula, "K and V are a small part of what repeated heads read"
    assert label(wide, formula - ideal, 0).startswith("cold (unverified")


@contextmanager
def _noted(told, name):
    told.append(f"{name} begins")
    yield
    told.append(f"{name} ends")


@pytest.fixture
def child(monkeypatch, tmp_path, capsys):
    """run(case) -> (what happened in the child, in order, what it said), with torch's own parts noted."""
    told = []
    monkeypatch.setattr(_ncu_child, "Flush", lambda device: lambda: told.append("flush"))

    def watched(case):
        for case_id, calls in _target.targets(case):
            yield case_id, [lambda call=call: told.append("call") or call() for call in calls]
    monkeypatch.setattr(_ncu_child, "targets", watched)

    def run(case):
        with fake_cuda():
            with mock.patch.object(torch.cuda.profiler, "profile", lambda: _noted(told, "profiler")), mock.patch.object(
                    torch.cuda.nvtx, "range", lambda name: _noted(told, name)), mock.patch.object(
                    torch.cuda, "_sleep", lambda cycles: told.append("last kernel")):
                _ncu_child.main(str(_target.write(case, tmp_path / "case.json")))
        said = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
        return told, said
    return run


def test_the_child_flushes_before_the_range_and_calls_once_within(child):
    told, said = child(BOTH)
    expected = []
    for one in BOTH.trials:
        name = f"kvlab-{one.case_id}"
        expected += ["call", "flush", "profiler begins", f"{name} begins", "call", f"{name} ends", "profiler ends"]
    assert told == [*expected, "profiler begins", "last kernel", "profiler ends"]
    assert said == [{word: one.case_id} for one in BOTH.trials for word in ("began", "done")]


def test_the_child_runs_an_operation(child):
    op = Operation("read", 2**16, device="cuda")
    told, said = child(op)
    assert told[:4] == ["call", "flush", "profiler begins", f"kvlab-{op.case_id} begins"]
    assert said == [{"began": op.case_id}, {"done": op.case_id}]


def test_a_trial_that_raises_in_the_child_is_said_and_the_next_one_runs(child, tmp_path):
    file = tmp_path / "odd.py"
    file.write_text("from kvlab.attention.naive import Naive\nclass Odd(Naive):\n    name = 'odd'\n"
                    "    def prepare(self, trial, inputs):\n        raise SystemExit('odd head_dim')\n")
    odd = trial(f"{file}:Odd", SMALL, device="cuda")
    told, said = child(Comparison((odd, NAIVE)))
    assert said == [{"began": odd.case_id}, {"failed": odd.case_id, "error": "SystemExit: odd head_dim"},
                    {"began": NAIVE.case_id}, {"done": NAIVE.case_id}]
    assert told.count("call") == 2 and told[-2] == "last kernel"


def test_the_flush_reads_twice_the_cache():
    from kvlab.kernels.flush import Flush
    with fake_cuda(l2=2**16):
        flush = Flush("cuda")
        assert flush._buffer.nbytes == 2 * 2**16 and flush() is None
        before = flush._buffer.clone()
        flush()
        assert torch.equal(before, flush._buffer)                    # it writes nothing


def test_a_child_that_sees_no_gpu_says_so(ncu, tmp_path):
    script = ncu()
    script.write_text(f"#!{sys.executable}\n" + CALLS_THE_CHILD)
    (reason,) = reasons(counted(BOTH), SDPA)
    assert "under ncu torch sees no CUDA device" in reason and "application returned an error code (1)" in reason
