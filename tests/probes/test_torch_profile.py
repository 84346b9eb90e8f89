"""The operator profile: on request only, in a pass of its own, its trace free of this machine's names."""
import gzip
import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import fake_cuda
from made_variants import SMALL, compare, honest, made, of

import kvlab
from kvlab.attention import Comparison, trial
from kvlab.probes import measure, probes, torch_profile
from kvlab.probes._base import Watch, with_also
from kvlab.probes._target import STARTED_BY
from kvlab.probes.kernel_error import KernelError
from kvlab.probes.timer import Timer
from kvlab.probes.torch_profile import CLASSES, TorchProfile
from kvlab.record._operators import moved
from kvlab.record.reading import table
from kvlab.record.trace import read_trace, trace_of
from kvlab.record.trace_summary import NO_OPERATOR, summary
from kvlab.studies import _run
from kvlab.studies._run import Job, in_process, run
from kvlab.studies._worker import worker_each

PROFILE = [KernelError(), TorchProfile()]


def test_it_runs_on_request_only_and_beside_the_chosen_ones():
    names = {p.name for p in with_also(None, ())}
    asked_for = {name for name in probes if getattr(probes[name], "on_request", False)}
    assert "torch_profile" in asked_for and names == set(probes) - asked_for
    assert {p.name for p in with_also(None, ("torch_profile", "torch_profile"))} == names | {"torch_profile"}
    assert [p.name for p in with_also([KernelError()], ("torch_profile", "kernel_error"))] == [
        "kernel_error", "torch_profile"]
    with pytest.raises(KeyError, match="Did you mean 'torch_profile'"):
        with_also(None, ("torch_profil",))


def test_readings_and_a_trace_that_the_reader_reads(tmp_path):
    comparison = compare("naive", "sdpa")
    rows = measure(comparison, [KernelError(), Timer(cap_s=0.02)], artifacts=tmp_path,
                   watch=Watch(also=("torch_profile",)))
    table(rows)
    for one in comparison.trials:
        own = {r["metric"]: r for r in rows if r["case_id"] == one.case_id and r["source"] == "torch_profile"}
        assert set(own) == set(TorchProfile.metrics) and {r["status"] for r in own.values()} == {"ok"}
        modelled, of_gpus = {"operator_bytes", "profiled_flops"}, {"kernel_launches", "modelled_occupancy"}
        kinds = {"measured": set(own) - modelled - of_gpus, "modelled": modelled, "missing": of_gpus}
        assert {kind: {m for m, r in own.items() if r["kind"] == kind} for kind in kinds} == kinds
        assert {r["artifact"] for r in own.values()} == {f"traces/{one.case_id}.json.gz"}
        assert all(r["method"].startswith("profiler:") for r in own.values() if r["kind"] == "measured")
        found = summary(read_trace(tmp_path / own["operator_bytes"]["artifact"]))
        assert found.calls == 3 == own["operators_per_call"]["n"]
        assert own["operators_per_call"]["value"] == sum(row["calls"] for row in found.operators) / 3
        assert own["operator_bytes"]["value"] == found.bytes / 3
        whole = sum(own[f"{kind}_time_share"]["value"] for kind in CLASSES) + own["operator_gap_share"]["value"]
        assert 0 < whole <= 1 + 1e-9
        assert own["profiler_overhead"]["low"] <= own["profiler_overhead"]["value"] <= own["profiler_overhead"]["high"]
        assert own["profiled_flops"]["value"] == one.variant.load().cost(one).executed_flops > 0
    assert of(rows, "attention_time_share", "sdpa")[0]["value"] > 0
    assert of(rows, "attention_time_share", "naive")[0]["value"] == 0
    assert of(rows, "matmul_time_share", "naive")[0]["value"] > 0


def test_bytes_of_naive_are_the_tensors_it_reads_and_writes():
    workload = kvlab.Workload.decode(kvlab.AttentionShape(4, 4, 16), kv_len=256)
    rows = measure(compare("naive", workload=workload), PROFILE)
    keys, scores, output = 4 * 256 * 16 * 4, 4 * 256 * 4, 4 * 16 * 4
    least = 2 * keys + 2 * scores + 2 * output                       # K, V, the scores there and back, q and the output
    assert least <= of(rows, "operator_bytes")[0]["value"] < 1.5 * least


def test_flops_by_formula_agree_with_the_counter_where_it_counts():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode
    workload = kvlab.Workload.decode(kvlab.AttentionShape(4, 4, 16), kv_len=64)
    one = trial("sdpa", workload)
    (call,) = one.prepare(Comparison((one,)).inputs(1)[one.kv_format, one.layout])
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
        call()
    (row,) = of(measure(Comparison((one,)), PROFILE), "profiled_flops")
    assert row["value"] == counted.get_total_flops() == 2 * 4 * 64 * (16 + 16)


def test_the_trace_names_its_trial_and_nothing_of_this_machine(tmp_path):
    rows = measure(compare("naive"), PROFILE, artifacts=tmp_path)
    text = gzip.decompress((tmp_path / rows[-1]["artifact"]).read_bytes()).decode()
    data = json.loads(text)
    assert data["kvlab"]["version"] == kvlab.__version__ and data["kvlab"]["variant"] == "naive"
    assert json.loads(rows[0]["case"]) == json.loads(json.dumps(data["kvlab"]["trial"]))
    assert not {"host_name", "traceName", "trace_id"} & set(data)
    for name in (socket.gethostname(), os.path.expanduser("~"), str(tmp_path), str(Path.cwd())):
        assert name == "/" or f'"{name}' not in text
    assert [e["args"]["name"] for e in data["traceEvents"] if e["name"] == "process_name"][0] == "kvlab naive"
    assert [p.name for p in (tmp_path / "traces").iterdir()] == [f"{rows[0]['case_id']}.json.gz"]


def test_what_a_profiler_writes_of_paths_and_names_is_cut():
    data = dict(host_name="secret", traceName="/home/secret/t.json", distributedInfo={"rank": 0}, schemaVersion=1,
                traceEvents=[dict(ph="M", name="process_name", args={"name": "python secret.py"}),
                             dict(ph="M", name="thread_name", args={"name": "thread 7 (secret)"}),
                             dict(ph="X", name="triton", args={"kernel_file": "/home/secret/k.py", "shapes": [[1, 2]],
                                                               "Concrete Inputs": ["", "C:\\Users\\secret\\x", "a/b"]}),
                             dict(ph="i", name="end")])
    cleaned = torch_profile._cleaned(data, trial("naive", SMALL))
    assert "secret" not in json.dumps(cleaned) and set(cleaned) == {"schemaVersion", "traceEvents", "kvlab"}
    assert cleaned["traceEvents"][2]["args"] == {"kernel_file": "k.py", "shapes": [[1, 2]],
                                                 "Concrete Inputs": ["", "x", "a/b"]}


def test_without_a_folder_there_are_readings_and_no_trace_and_the_overhead_needs_no_timer():
    rows = measure(compare("naive"), PROFILE)
    assert {r["artifact"] for r in rows} == {""}
    (row,) = of(rows, "profiler_overhead")
    assert row["kind"] == "measured" and row["low"] <= row["value"] <= row["high"]
    assert row["denominator"] == "wall time of the same calls without the profiler"


def test_a_variant_that_breaks_under_the_profiler_costs_its_own_rows():
    def breaks(call, inputs):
        if torch.autograd._profiler_enabled():
            raise RuntimeError("not under a profiler")
        return call()
    rows = measure(compare(made("breaks", breaks), honest()), PROFILE)
    assert {r["status"] for r in rows if r["variant"] == "breaks" and r["source"] == "torch_profile"} == {"failed"}
    assert {r["status"] for r in rows if r["variant"] == "honest"} == {"ok"}


def test_a_large_trace_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_profile, "LARGE", 1000)
    with pytest.warns(UserWarning, match="viewers become slow from 1,000; profile fewer calls"):
        rows = measure(compare("naive"), PROFILE, artifacts=tmp_path)
    assert "bytes of JSON: viewers become slow" in of(rows, "operators_per_call")[0]["note"]


def x(name, ts, dur, cat="cpu_op", tid=1, pid=1, **args):
    return dict(ph="X", name=name, ts=ts, dur=dur, cat=cat, pid=pid, tid=tid, args=args)


def readings(events, device="cpu"):
    """The probe's readings of a trace made by hand, by metric."""
    variant = SimpleNamespace(load=lambda: SimpleNamespace(cost=lambda trial: SimpleNamespace(executed_flops=1)))
    one = SimpleNamespace(device=device, variant=variant)
    found = summary(trace_of({"traceEvents": [x("kvlab:call naive", 0, 100, cat="user_annotation"), *events]}))
    read = {reading.metric: reading for _, reading in TorchProfile()._readings(one, found, [50e-6], "", "")}
    assert set(read) == set(TorchProfile.metrics)
    return read


LAUNCHED = [x("aten::empty", 0, 2), x("launch", 5, 1, cat="cuda_runtime", correlation=1)]


def test_on_a_gpu_kernels_that_no_operator_launched_are_of_the_call_too():
    read = readings([*LAUNCHED, x("flashinfer::decode", 20, 60, cat="kernel", pid=0, tid=7, correlation=1)], "cuda:0")
    assert read["attention_time_share"].value == read["largest_operator_share"].value == 1
    assert read["attention_time_share"].note == "flashinfer::decode"
    assert read["largest_operator_share"].note == NO_OPERATOR and read["operators_per_call"].value == 1
    assert read["operator_bytes"].kind == "missing" and "no operator in the call has" in read["operator_bytes"].note


@pytest.mark.parametrize("kernels, why", [
    ([], "recorded no kernel that the call launched on the GPU"),
    ([x("decode", 20, 60, cat="kernel", pid=0, tid=7, correlation=2)], "1 kernels (60 µs) are left out: their launch"),
    ([x("decode", 20, 0, cat="kernel", pid=0, tid=7, correlation=1)], "recorded no kernel"),
])
def test_on_a_gpu_without_kernels_no_share_is_of_the_cpus_time(kernels, why):
    read = readings([*LAUNCHED, *kernels], "cuda")
    for metric in torch_profile.SHARES:
        assert read[metric].kind == "missing" and read[metric].value is None and why in read[metric].note
    assert read["operators_per_call"].value == 1 and read["profiler_overhead"].value == pytest.approx(2)


def gpu_kernel(name, ts, dur, occupancy=None):
    args = {} if occupancy is None else {"est. achieved occupancy %": occupancy}
    return [x("launch", ts, 1, cat="cuda_runtime", correlation=ts),
            x(name, ts, dur, cat="kernel", pid=0, tid=7, correlation=ts, **args)]


def test_launches_are_kernels_per_call_and_occupancy_is_modelled_by_their_time():
    read = readings([*gpu_kernel("gemm", 10, 30, 50), *gpu_kernel("decode", 45, 10, 10), *gpu_kernel("odd", 60, 5),
                     *gpu_kernel("Memcpy DtoD (Device -> Device)", 70, 5), *gpu_kernel("worse", 80, 10, -100)], "cuda")
    launches, occupancy = read["kernel_launches"], read["modelled_occupancy"]
    assert (launches.value, launches.kind, launches.unit, launches.n) == (4, "measured", "count", 1)
    assert occupancy.value == pytest.approx((30 * 0.5 + 10 * 0.1) / 40) and occupancy.kind == "modelled"
    assert "launch geometry" in occupancy.method and "of 67 % of it" in occupancy.note


@pytest.mark.parametrize("events, device, launches, occupancy", [
    ([], "cpu", "launches no kernels", "launches no kernels"),
    ([], "cuda", "recorded no kernel", "recorded no kernel"),
    (gpu_kernel("gemm", 10, 30), "cuda", None, "estimated the occupancy of no kernel"),
    (gpu_kernel("gemm", 10, 30, "50"), "cuda", None, "estimated the occupancy of no kernel"),
])
def test_launches_and_occupancy_are_missing_with_the_reason(events, device, launches, occupancy):
    read = readings(events, device)
    for metric, why in (("kernel_launches", launches), ("modelled_occupancy", occupancy)):
        assert (read[metric].kind == "missing" and why in read[metric].note) if why else read[metric].value == 1


@pytest.mark.parametrize("variable", STARTED_BY)
def test_it_refuses_to_profile_a_gpu_under_ncu(monkeypatch, variable):
    with fake_cuda():
        assert TorchProfile().why_not(trial("naive", SMALL, device="cuda")) is None
        monkeypatch.setenv(variable, "1")
        (row,) = of(measure(compare("naive", device="cuda"), PROFILE), "operators_per_call")
    assert row["kind"] == "missing" and variable in row["note"] and "one profiler at a time" in row["note"]
    assert TorchProfile().why_not(trial("naive", SMALL)) is None     # on a CPU it is in nobody's way


def test_kernels_that_are_left_out_are_said_beside_every_share():
    kernels = [x("gemm", 20, 60, cat="kernel", pid=0, tid=7, correlation=1),
               x("lost", 90, 5, cat="kernel", pid=0, tid=7, correlation=2)]
    read = readings([*LAUNCHED, *kernels], "cuda")
    assert all("1 kernels (5 µs) are left out" in read[metric].note for metric in torch_profile.SHARES)
    assert read["matmul_time_share"].value == 1


def test_on_a_gpu_shares_are_of_the_time_of_kernels():
    events = [x("aten::bmm", 0, 60),
              x("launch", 5, 1, cat="cuda_runtime", correlation=1), x("aten::_softmax", 60, 5),
              x("launch", 61, 1, cat="cuda_runtime", correlation=2),
              x("gemm", 20, 30, cat="kernel", pid=0, tid=7, correlation=1),
              x("softmax_kernel", 60, 10, cat="kernel", pid=0, tid=7, correlation=2)]
    read = readings(events, "cuda")
    assert read["matmul_time_share"].value == pytest.approx(0.75)
    assert read["softmax_time_share"].value == pytest.approx(0.25)
    assert read["largest_operator_share"].note == "aten::bmm"
    assert read["operator_gap_share"].value == pytest.approx(0.2)
    assert all("CUDA kernels" in read[metric].method for metric in torch_profile.SHARES)


@pytest.mark.parametrize("name, call", [
    ("where", lambda h, f, m: torch.where(m, h, f)), ("where", lambda h, f, m: torch.where(m, h, 1.5)),
    ("gt", lambda h, f, m: f > 0), ("eq", lambda h, f, m: h == f), ("logical_or", lambda h, f, m: f.logical_or(m)),
    ("masked_fill", lambda h, f, m: h.masked_fill(m, -1e4)), ("add", lambda h, f, m: h + h.bfloat16()),
    ("mul", lambda h, f, m: h * 2.5), ("sub", lambda h, f, m: h - f), ("div", lambda h, f, m: f / f.double()),
    ("bitwise_and", lambda h, f, m: m & m), ("add", lambda h, f, m: f.long() + 3), ("exp", lambda h, f, m: h.exp()),
    ("_softmax", lambda h, f, m: h.softmax(-1)), ("mm", lambda h, f, m: f @ f.T), ("mul", lambda h, f, m: f * m),
    ("maximum", lambda h, f, m: torch.maximum(f, f[:1])), ("neg", lambda h, f, m: -f.int()),
])
def test_modelled_output_is_what_torch_returns(tmp_path, name, call):
    half, full = torch.ones(8, 100, dtype=torch.float16), torch.ones(8, 100)
    call(half, full, full > 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiled:
        result = call(half, full, full > 0)
    profiled.export_chrome_trace(str(tmp_path / "a.json"))
    args = [e.args for e in read_trace(tmp_path / "a.json").operators if e.name == f"aten::{name}"][-1]
    found = moved(f"aten::{name}", *(args[key] for key in ("Input Dims", "Input type", "Input Strides",
                                                           "Concrete Inputs")))
    assert found.output == result.nbytes
    assert moved("aten::_softmax", [[8, 100], [], []], ["c10::Half", "Scalar", "Scalar"], None,
                 ["", "-1", "True"]).output == 3200                  # what CUDA does of softmax(dtype=float32)


def test_a_call_without_operators_of_torch_is_missing_with_the_reason():
    found = summary(trace_of({"traceEvents": [x("kvlab:call naive", 0, 100, cat="user_annotation")]}))
    (one,) = compare("naive").trials
    readings = {r.metric: r for _, r in TorchProfile()._readings(one, found, [40e-6, 50e-6, 60e-6], "", "")}
    assert set(readings) == set(TorchProfile.metrics)
    assert readings["largest_operator_share"].kind == "missing" and "no operator" in readings["operator_bytes"].note
    assert readings["profiler_overhead"].value == pytest.approx(2)


def test_in_a_worker_and_in_a_run(tmp_path, monkeypatch):
    (rows,) = worker_each(200.0)(Job(artifacts=tmp_path, probes=("kernel_error",), also=("torch_profile",)),
                                 [compare("naive")])
    assert {r["metric"] for r in rows} == {"kernel_error", *TorchProfile.metrics}
    assert (tmp_path / of(rows, "operator_bytes")[0]["artifact"]).exists()
    with pytest.raises(KeyError, match="Did you mean 'torch_profile'"):
        run("memory_wall", size="smoke", out=tmp_path, also=("torch_profil",))
    assert not (tmp_path / "memory_wall").exists()


def test_a_run_remembers_what_was_asked_for(tmp_path, monkeypatch):
    asked = []

    def rows(case, *, artifacts, watch):
        asked.append(watch.also if watch else ())
        if len(asked) == 2:
            raise KeyboardInterrupt
        return measure(case, [KernelError()], artifacts=artifacts)

    def cases(size, *, device, variants, model):
        return [compare("naive"), compare("sdpa")]
    monkeypatch.setattr(_run, "studies", {"stub": SimpleNamespace(SIZES=("small",), cases=cases, run=rows)})
    begun = []
    with pytest.raises(KeyboardInterrupt):
        run("stub", out=tmp_path, also=("torch_profile",), each=in_process, progress=False, begun=begun.append)
    run("stub", resume=begun[0].path, each=in_process, progress=False)
    assert asked == [("torch_profile",)] * 3 and begun[0].manifest.options["also"] == ["torch_profile"]
    run("stub", out=tmp_path, each=in_process, progress=False, begun=begun.append)
    assert asked[3:] == [(), ()] and "also" not in begun[1].manifest.options
    with pytest.raises(ValueError, match="resume with the same options"):
        run("stub", resume=begun[1].path, also=("torch_profile",), each=in_process, progress=False)


def test_kvlab_measure_takes_it_by_name(tmp_path):
    found = kvlab.measure("naive", SMALL, probes=["kernel_error"], also=("torch_profile",), artifacts=tmp_path / "new")
    assert set(found["metric"]) == {"kernel_error", *TorchProfile.metrics}
    assert len(list((tmp_path / "new" / "traces").iterdir())) == 1
    with pytest.raises(OSError, match="create it first"):
        kvlab.measure("naive", SMALL, artifacts=tmp_path / "no" / "such")
