"""kvlab validate-gpu end to end on fakes: what it settles and writes; a break, or too little time, costs a step."""
import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fake_ncu
import pandas as pd
import pytest
from fake_cuda import UUID, fake_cuda
from fake_nvml import compiled, loaded
from fake_traffic import told

from kvlab import cli
from kvlab import validate as module
from kvlab.probes import _gpm, gpm
from kvlab.probes._gpm import Calibration, counted, edge_of, per_call
from kvlab.probes._ncu_run import read_passes
from kvlab.probes._nvml import Replayed
from kvlab.probes.ceilings import Ceilings
from kvlab.probes.ncu import readings
from kvlab.record.store import read_table
from kvlab.validate import Validation, anonymous, validate
from kvlab.validate_answers import shortest, summary, verdicts
from kvlab.validate_cases import Sizes

TINY = Sizes(copy_bytes=2**22, matmul_bytes=2**19, q_heads=4, kv_heads=(2, 1, 4), head_dim=32, batch=2, kv_len=2048,
             prefill_heads=(4, 1), prefill_batch=1, prefill_len=512, window_s=0.05, sweep_s=(0.01, 0.02, 0.05), times=2,
             timer_s=0.02, budget_s=1e4)
FILES = {"validate.json", "nvml.json", "ncu.json", "counters.parquet"}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("nvml"))


def dry(out, library, patch, sizes=TINY, mode="ok", **switches):
    """A validation on the fakes: (what it is, what it said)."""
    patch.setattr(_gpm, "LEAD_S", 0.01)
    patch.setattr(gpm, "_calibrated", {})
    patch.setenv("KVLAB_CACHE", str(out.parent))                     # its lock: other tests have the same fake GPU
    fake_ncu.install(out.parent, patch, mode)
    product, said = Ceilings._matmul, []                             # 8192 rows take a CPU minutes
    patch.setattr(Ceilings, "_matmul", lambda self, torch, trial, seconds, n: product(self, torch, trial, seconds, 64))
    with fake_cuda(l2=2**18), loaded(library, **switches) as fake, told(fake):
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
    # a CPU's load decides how steady the sweep is
    assert [v.question for v in job.verdicts if v.answered and "shortest" not in v.question] == [
        "κ of GPM", "who may count", "size of the L2", "ncu ÷ model", "GPM ÷ ncu",
        "naive_repeat moves the bytes of MHA"]
    assert set(job.steps["window sweep"]["dram_utilization"]) == {"0.01", "0.02", "0.05"}
    kappa = next(v for v in job.verdicts if v.question.startswith("κ"))
    assert kappa.numbers["kappa"] == pytest.approx(0.96, rel=0.03) and str(kappa).startswith("answered: 0.9")
    assert len(said) == len(job.steps) == len(list(job.plan()))


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
    assert by[by["source"] == "gpm"]["value"].between(0.9, 1.1).all() and len(by[by["source"] == "gpm"]) == 13
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
    windows = [entry["answer"] for entry in recording if entry["call"] == "Window"]
    one = Replayed(recording)
    one.heard = None
    seen = []
    for window in windows:
        before = edge_of(one)
        seen.append(counted(one, before, edge_of(one), **window))
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
    assert lines[0].split()[:2] == ["case", "ncu"] and len(lines) == 1 + 13 + 7
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
    assert "error" not in job.steps["nvml"] and len(said) == 2
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
    ({0.1: 0.2, 1.0: 0.5}, None)])
def test_the_shortest_trusted_window_has_only_trusted_ones_above_it(means, found):
    assert shortest(means) == found


def test_verdicts_of_nothing_are_all_open():
    assert [v.answered for v in verdicts([], {})] == [False] * 7


def test_without_a_gpu_it_is_one_sentence_and_exit_code_2(tmp_path):
    done = subprocess.run([sys.executable, "-m", "kvlab", "validate-gpu", "--out", str(tmp_path / "found")],
                          capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2 and done.stdout == "" and not (tmp_path / "found").exists()
    assert done.stderr.startswith("kvlab: validate-gpu counts on an NVIDIA GPU, and there is none")
    assert len(done.stderr.strip().splitlines()) == 1


def test_texts_lose_paths_host_and_identity_and_keep_the_rest(monkeypatch):
    monkeypatch.setattr(module.socket, "gethostname", lambda: "node17")
    text = anonymous(f"GPU-{UUID} on node17, 98 % of 4.8 TB/s, node17b, file /data/secret/x.csv")
    assert text == "uuid on host, 98 % of 4.8 TB/s, node17b, file x.csv"
