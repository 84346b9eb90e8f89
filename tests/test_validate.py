"""kvlab validate-gpu end to end on fakes: what it settles and writes; a break, or too little time, costs a step."""
import json
import os
import re
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import fake_ncu
import pandas as pd
import pytest
from fake_cuda import UUID, fake_cuda
from fake_nvml import compiled, loaded
from fake_traffic import told
from virtual_time import virtual_time

from kvlab import cli, validate_job
from kvlab import validate as module
from kvlab.probes import _gpm, gpm
from kvlab.probes._gpm import Calibration, counted, edge_of, per_call
from kvlab.probes._ncu_run import read_passes
from kvlab.probes._nvml import Replayed, Unavailable
from kvlab.probes.ceilings import Ceilings
from kvlab.probes.ncu import readings
from kvlab.record.store import read_table
from kvlab.studies import counters
from kvlab.validate import Validation, anonymous, validate
from kvlab.validate_answers import changes, shortest, summary, verdicts
from kvlab.validate_cases import Sizes, comparisons, operations, trials_of

TINY = Sizes(copy_bytes=2**22, matmul_bytes=2**17, q_heads=4, kv_heads=(2, 1, 4), head_dim=32, batch=2, kv_len=2048,
             prefill_heads=(4, 1), prefill_batch=1, prefill_len=512, sweep_s=(0.01, 0.1, 1.0), times=2, budget_s=1e4)
FILES = {"validate.json", "nvml.json", "ncu.json", "counters.parquet"}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("nvml"))


def dry(out, library, patch, sizes=TINY, mode="ok", **switches):
    """A validation on the fakes: (what it is, what it said)."""
    patch.setattr(gpm, "_calibrated", {})
    patch.setenv("KVLAB_CACHE", str(out.parent))                     # its lock: other tests have the same fake GPU
    fake_ncu.install(out.parent, patch, mode)
    product, said = Ceilings._matmul, []                             # 8192 rows take a CPU minutes
    patch.setattr(Ceilings, "_matmul", lambda self, torch, trial, seconds, n: product(self, torch, trial, seconds, 64))
    with fake_cuda(l2=2**18), loaded(library, **switches) as fake, virtual_time(fake), told(fake):
        return validate(out, sizes=sizes, say=said.append), said


@pytest.fixture(scope="module")
def whole(library, tmp_path_factory):
    """One dry run of all steps, for all who look at what it left."""
    out = tmp_path_factory.mktemp("dry") / "found"
    with pytest.MonkeyPatch.context() as patch:
        job, said = dry(out, library, patch, kappa=0.96)
    return job, said, out


def read(out, name):
    return json.loads((out / name).read_text())


def test_every_step_runs_and_every_question_is_answered(whole):
    job, said, out = whole
    assert [name for name, step in job.steps.items() if "error" in step] == []
    assert [v.question for v in job.verdicts if v.answered] == [
        "κ of GPM", "who may count", "size of the L2", "shortest trusted window of GPM",
        "granularity of the energy counter", "ncu ÷ model", "GPM ÷ ncu", "naive_repeat moves the bytes of MHA"]
    assert set(job.steps["window sweep"]["dram_utilization"]) == {"0.01", "0.1", "1"}
    kappa = next(v for v in job.verdicts if v.question.startswith("κ"))
    assert kappa.numbers["kappa"] == pytest.approx(0.96, rel=1e-6) and str(kappa).startswith("answered: 0.9")
    names = [line.split("] ")[1].split(": takes")[0] for line in said if line.startswith("[")]
    assert names == list(job.steps) == [name for name, *_ in job.plan()] and len(said) == 2 * len(names)
    assert any("nvml: takes about" in line for line in said) and job.steps["nvml"]["numbers"] >= 12
    assert any(" numbers; missing: GPM counts reads and writes together" in line for line in said)


def test_files_are_few_small_and_say_nothing_of_the_machine(whole):
    _, _, out = whole
    assert {p.name for p in out.iterdir()} == FILES
    texts = [(out / name).read_text() for name in FILES - {"counters.parquet"}]
    texts.append(pd.read_parquet(out / "counters.parquet").to_csv())
    for text in texts:
        assert len(text) < 3_000_000
        assert UUID not in text and not re.search(r"(GPU|MIG)-[0-9a-f]{8}", text)
        assert not re.search(r"(?<![\w-])" + re.escape(socket.gethostname()) + r"(?![\w-])", text)
        for place in (str(out.parent), str(Path(__file__).parents[1]), os.path.expanduser("~") + "/", "/home/", "/tmp/",
                      "gpu-host-7"):
            assert place not in text


def test_the_rows_are_a_result_table_of_the_study_counters(whole):
    job, _, out = whole
    table = read_table(out / "counters.parquet")
    assert set(table["study"]) == {"counters"} and set(table["hardware"]) == {"FAKE GPU of kvlab's tests"}
    assert list(table["error"].unique()) == [""] and len(table) == len(job.rows)
    assert {"copy", "read", "matmul", "sdpa", "naive", "naive_repeat"} == set(table["variant"]) - {""}
    by = table[table["metric"] == "traffic_to_model"]
    assert by[by["source"] == "gpm"]["value"].to_list() == 13 * [pytest.approx(1, rel=1e-6)]
    assert len(by[(by["source"] == "ncu") & (by["kind"] == "measured")]) == 13
    assert table[(table["source"] == "timer") & (table["metric"] == "latency_s")]["cache_state"].str.contains(
        "verified: ncu").any()
    assert len(table[table["metric"] == "kernel_cold_read_bytes"]) == 3
    lines = summary(job.rows)
    assert len(lines) == 13 and {line["GPM SM"] for line in lines} == {0.985}
    assert {line["case"] for line in lines} >= {"copy", "naive_repeat decode 4:1", "sdpa prefill 4:1"}


def test_recordings_replayed_through_the_real_parsers_give_the_same_numbers(whole):
    job, _, out = whole
    recording = read(out, "nvml.json")
    seen = []
    for place, entry in enumerate(recording):
        if entry["call"] == "Window":
            one = Replayed(recording[entry["began"]:place])
            one.heard = None
            before = edge_of(one)
            seen.append(counted(one, before, edge_of(one), **entry["answer"]))
    idle, copy, read_ = seen[0], seen[1:3], seen[3:5]
    known = Calibration(idle, *(cost / per_call(*pair, idle) for cost, pair in (
        (2 * TINY.copy_bytes, copy), (TINY.copy_bytes, read_))))
    kappa = read(out, "validate.json")["answers"]["κ of GPM"]["kappa"]
    assert known.kappa == pytest.approx(kappa, rel=1e-9)
    table = read_table(out / "counters.parquet")
    bytes_of_copy = table[(table["source"] == "gpm") & (table["metric"] == "hbm_bytes")]["value"].iloc[0]
    assert per_call(*seen[5:7], idle, known.kappa) == pytest.approx(bytes_of_copy, rel=1e-9)

    records = read(out, "ncu.json")
    case = job.comparisons[0].trials[0]
    record = next(r for r in records if case.case_id in r["targets"] and r["pass"] == "traffic")
    (again,) = [r for r in readings(case, {"traffic": read_passes([record])["traffic"][case.case_id]}, 2**18)
                if r.metric == "hbm_read_bytes"]
    stored = table[(table["case_id"] == case.case_id) & (table["source"] == "ncu")
                   & (table["metric"] == "hbm_read_bytes")]["value"]
    assert again.value == stored.iloc[0]


def test_the_command_ends_with_a_line_per_case_and_a_verdict_per_question(whole, monkeypatch, capsys):
    job, _, out = whole
    monkeypatch.setattr(module, "validate", lambda folder, device: job)
    assert cli.validate_gpu(out) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["case", "ncu"] and len(lines) == 1 + 13 + 8
    assert lines[1].split()[0] == "copy" and lines[14].startswith("κ of GPM: answered: 0.9")
    assert any(line.startswith("GPM ÷ ncu: answered: copy ") for line in lines)


def test_what_a_driver_answered_is_recorded_as_it_was(whole):
    _, _, out = whole
    recording = read(out, "nvml.json")
    one = Replayed(recording)
    assert one.ask("DeviceGetMemoryBusWidth") == 6144 and one.ask("DeviceGetClockInfo", 2) == 3201
    assert one.ask("DeviceGetUtilizationRates") == {"gpu": 100, "memory": 37} and one.field(186) == 350000
    assert read(out, "validate.json")["steps"]["environment"]["driver"] == "999.99.fake"


def test_a_step_that_breaks_is_told_and_the_next_goes_on(library, tmp_path, monkeypatch):
    def broken(self):
        raise RuntimeError(f"cannot open /home/someone/{UUID}/x on {socket.gethostname()}")
    monkeypatch.setattr(Validation, "environment", broken)
    monkeypatch.setattr(Validation, "plan", lambda self: [("environment", 0, self.environment), ("nvml", 0,
                                                                                               self.responses)])
    job, said = dry(tmp_path / "found", library, monkeypatch)
    error = read(tmp_path / "found", "validate.json")["steps"]["environment"]["error"]
    assert error.startswith("RuntimeError: cannot open ") and "someone" not in error and UUID not in error
    assert "error" not in job.steps["nvml"] and len(said) == 4
    assert not any(v.answered for v in job.verdicts)


def test_no_time_is_said_for_each_step_and_each_question(library, tmp_path, monkeypatch):
    job, _ = dry(tmp_path / "found", library, monkeypatch, sizes=replace(TINY, budget_s=0.0))
    assert all("not begun" in step["error"] for step in job.steps.values())
    assert all(str(v).startswith("not answered: ") and "not begun" in v.words for v in job.verdicts[:4])
    assert {p.name for p in (tmp_path / "found").iterdir()} == FILES - {"counters.parquet"}


def test_a_gpu_without_gpm_and_an_ncu_without_leave_answer_why(library, tmp_path, monkeypatch):
    keep = ("environment", "kappa", "gpm copy", "ncu copy", "window sweep", "L2")
    plan = Validation.plan
    monkeypatch.setattr(Validation, "plan", lambda self: [step for step in plan(self) if step[0] in keep])
    job, _ = dry(tmp_path / "found", library, monkeypatch, mode="permission", gpm=0)
    by = {v.question: v for v in job.verdicts}
    assert not any(v.answered for v in job.verdicts if v.question != "who may count")
    assert "needs Hopper or newer" in by["κ of GPM"].words and "ERR_NVGPUCTRPERM" in by["ncu ÷ model"].words
    assert by["who may count"].numbers == {"gpm": False, "ncu": False}
    assert "needs Hopper or newer" in by["who may count"].words and "CAP_SYS_ADMIN" in by["who may count"].words


@pytest.mark.parametrize("means, found", [
    ({0.02: 0.3, 0.1: 0.49, 0.5: 0.51, 1.0: 0.50}, 0.1), ({0.02: 0.5, 0.1: 0.3, 0.5: 0.51, 1.0: 0.50}, 0.5),
    ({0.1: 0.2, 1.0: 0.5}, None), ({0.02: 0.5, 0.1: None, 0.5: 0.51, 1.0: 0.50}, 0.5),
    ({0.1: 0.5, 1.0: None}, None)])
def test_the_shortest_trusted_window_has_only_trusted_ones_above_it(means, found):
    assert shortest(means) == found


def test_verdicts_of_nothing_are_all_open():
    assert [v.answered for v in verdicts([], {})] == [False] * 8
    odd = verdicts([], {"L2": dict(from_memory={"x": "y"}), "environment": dict(root=True)})
    assert len(odd) == 8 and "cannot be read: KeyError" in odd[2].words


def test_without_a_gpu_it_is_one_sentence_and_exit_code_2(tmp_path):
    done = subprocess.run([sys.executable, "-m", "kvlab", "validate-gpu", "--out", str(tmp_path / "found")],
                          capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2 and done.stdout == "" and not (tmp_path / "found").exists()
    assert done.stderr.startswith("kvlab: validate-gpu counts on an NVIDIA GPU, and there is none")
    assert len(done.stderr.strip().splitlines()) == 1


def test_texts_lose_paths_host_and_identity_and_keep_the_rest(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node17")
    text = anonymous(f"GPU-{UUID} on node17, 98 % of 4.8 TB/s, node17b, file /data/secret/x.csv")
    assert text == "uuid on host, 98 % of 4.8 TB/s, node17b, file x.csv"


def only(monkeypatch, *names):
    """The plan with these steps alone."""
    plan = Validation.plan
    monkeypatch.setattr(Validation, "plan", lambda self: [step for step in plan(self) if step[0] in names])


def test_a_table_that_cannot_be_written_costs_no_other_file_and_no_step(library, tmp_path, monkeypatch):
    def refused(table, path):
        raise ImportError(f"no pandera in /home/someone on {socket.gethostname()}")
    only(monkeypatch, "environment", "gpm copy", "nvml responses")
    real = validate_job.write_parquet
    monkeypatch.setattr(validate_job, "write_parquet", refused)
    job, said = dry(tmp_path / "found", library, monkeypatch)
    assert set(job.steps) == {"environment", "gpm copy", "nvml responses"}
    assert {p.name for p in (tmp_path / "found").iterdir()} == FILES - {"counters.parquet"} | {"rows.json"}
    rows = read(tmp_path / "found", "rows.json")
    assert {row["metric"] for row in rows} >= {"hbm_bytes", "gpm_kappa"} and len(rows) == len(job.rows)
    (told_,) = [line for line in said if "could not be written" in line]
    assert told_.startswith("counters.parquet could not be written: ImportError: no pandera") and "/home" not in told_
    monkeypatch.setattr(validate_job, "write_parquet", real)
    job.save()
    assert {p.name for p in (tmp_path / "found").iterdir()} == FILES                 # the next one took its place


def test_a_step_that_hangs_ends_the_process_with_all_before_it_saved(library, tmp_path, monkeypatch):
    over, seen = threading.Event(), []

    def ended(code):
        seen.append((code, read(tmp_path / "found", "validate.json")["steps"]))
        over.set()
    monkeypatch.setattr(validate_job, "GRACE_S", 0.05)
    monkeypatch.setattr(os, "_exit", ended)
    monkeypatch.setattr(Validation, "plan", lambda self: [("environment", 0, self.environment),
                                                          ("stuck", -1e9, lambda: dict(ended=over.wait(60)))])
    job, said = dry(tmp_path / "found", library, monkeypatch, sizes=replace(TINY, budget_s=0.5))
    ((code, steps),) = seen
    assert code == 1 and "hangs: the process is ended" in steps["stuck"]["error"]
    assert any(line.startswith("stuck: it hangs") for line in said)
    assert any(line.startswith("κ of GPM: not answered") for line in said)
    assert job.steps["stuck"]["ended"]


def test_nothing_is_ended_where_all_steps_end(library, tmp_path, monkeypatch):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(validate_job, "GRACE_S", 5.0)
    monkeypatch.setattr(Validation, "plan", lambda self: [])
    dry(tmp_path / "found", library, monkeypatch, sizes=replace(TINY, budget_s=0.0))
    guards = [thread for thread in threading.enumerate() if thread.name == "kvlab-guard" and thread.is_alive()]
    for thread in guards:
        thread.join(30)
    assert codes == []


def test_the_shortest_window_of_a_steady_gpu_is_the_shortest_that_was_tried(library, tmp_path, monkeypatch):
    only(monkeypatch, "window sweep")
    job, _ = dry(tmp_path / "found", library, monkeypatch, dram_util=50)
    verdict = next(v for v in job.verdicts if "shortest" in v.question)
    assert verdict.answered and verdict.numbers == {"seconds": 0.01} and "10 ms" in verdict.words


def test_a_length_without_a_number_is_not_trusted_and_the_longer_ones_go_on(library, tmp_path, monkeypatch):
    seen, real = [], _gpm.Meter.from_idle

    def short_ones_fail(meter, loop, calls):
        seen.append(calls)
        if len(seen) == 2:                                           # the second of the shortest
            raise Unavailable("NVML gave no number (NaN)")
        return real(meter, loop, calls)
    only(monkeypatch, "window sweep")
    monkeypatch.setattr(_gpm.Meter, "from_idle", short_ones_fail)
    job, _ = dry(tmp_path / "found", library, monkeypatch, dram_util=50)
    assert job.steps["window sweep"]["dram_utilization"]["0.01"] == [0.5, "NVML gave no number (NaN)"]
    verdict = next(v for v in job.verdicts if "shortest" in v.question)
    assert verdict.numbers == {"seconds": 0.1} and "no number at 10 ms (NVML gave no number (NaN))" in verdict.words


def test_a_gpu_whose_samples_lag_has_no_short_trusted_window(library, tmp_path, monkeypatch):
    only(monkeypatch, "window sweep")
    job, _ = dry(tmp_path / "found", library, monkeypatch, delay_ms=100,
                 sizes=replace(TINY, sweep_s=(0.02, 0.4), times=1))
    assert job.steps["window sweep"]["dram_utilization"]["0.4"][0] > 0
    verdict = next(v for v in job.verdicts if "shortest" in v.question)
    assert not verdict.answered and "no window shorter than 0.4 s" in verdict.words


def test_how_often_a_sensor_changes():
    found = changes([(0.00, 5), (0.01, 5), (0.10, 8), (0.15, 8), (0.20, 12), (0.30, 15)])
    assert found == dict(reads=6, changes=3, every_s=pytest.approx(0.1), step=3, seconds=pytest.approx(0.3))
    assert changes([(0.0, 5), (0.5, 5)]) == dict(reads=2, changes=0, every_s=None, step=None, seconds=0.5)
    assert changes([])["changes"] == 0


@pytest.mark.parametrize("switches, said", [(dict(field_status="83=3"), "NotSupported"),
                                            (dict(energy="still"), "changed 0 times")])
def test_an_energy_counter_that_tells_nothing_is_said(library, tmp_path, monkeypatch, switches, said):
    only(monkeypatch, "sensors")
    job, _ = dry(tmp_path / "found", library, monkeypatch, **switches)
    verdict = next(v for v in job.verdicts if "energy" in v.question)
    assert not verdict.answered and said in verdict.words
    assert job.steps["sensors"]["power"]["reads"] > 0


def test_the_cases_are_those_of_the_study_counters_so_that_their_rows_meet():
    own = {one.case_id for case in [*operations(Sizes(), "cuda"), *comparisons(Sizes(), "cuda")]
           for one in trials_of(case)}
    theirs = {one.case_id for case in counters.cases("medium", device="cuda") for one in trials_of(case)}
    assert own - theirs == set()


def test_one_run_of_ncu_may_take_what_is_left_and_no_more_than_45_s(library, tmp_path, monkeypatch):
    limits = []
    monkeypatch.setattr(module, "counted", lambda case, passes, timeout_s, heard: limits.append(timeout_s) or {})
    only(monkeypatch, "ncu copy", "ncu copy activity")
    dry(tmp_path / "found", library, monkeypatch)
    dry(tmp_path / "again", library, monkeypatch, sizes=replace(TINY, budget_s=20.0))
    assert limits[:2] == [45.0, 45.0] and all(5 <= limit <= 20 for limit in limits[2:]) and len(limits) >= 3


def test_a_buffer_that_is_not_counted_costs_no_other_of_the_l2(library, tmp_path, monkeypatch):
    seen, real = [], _gpm.Meter.window

    def first_fails(meter, loop, calls):
        seen.append(calls)
        if len(seen) == 5:                                           # behind the pairs of copy and read
            raise Unavailable("NVML gave no number (NaN)")
        return real(meter, loop, calls)
    only(monkeypatch, "L2")
    monkeypatch.setattr(_gpm.Meter, "window", first_fails)
    job, _ = dry(tmp_path / "found", library, monkeypatch)
    assert job.steps["L2"]["refused"] == {str(2**16): "NVML gave no number (NaN)"}
    assert len(job.steps["L2"]["from_memory"]) == 6
    assert next(v for v in job.verdicts if "L2" in v.question).answered
