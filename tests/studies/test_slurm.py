"""The Slurm engine with submitit's jobs on this machine: cases are answered once, also where a job is killed."""
import json
import shutil
import sys
import time
from dataclasses import asdict
from types import SimpleNamespace

import psutil
import pytest

from kvlab.attention import Comparison, trial
from kvlab.record.store import RunStore, read_table
from kvlab.shapes import AttentionShape, Workload
from kvlab.studies import _slurm, soak
from kvlab.studies._run import run

HERE = "cluster=local,jobs=2"
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="submitit starts jobs on POSIX systems only")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setattr(_slurm, "LOOK_S", 0.1)


def soaked(tmp_path, monkeypatch, cases, **options):
    monkeypatch.setattr(soak, "cases", lambda size, **given: iter(cases))
    return run("soak", size="smoke", out=tmp_path, progress=False, engine="slurm", address=HERE, **options)


def check(store, cases):
    """Every case once, with the right checksum."""
    table = read_table(store.path)
    sums = table[table["metric"] == "checksum"]
    assert sorted(table["comparison_id"].unique()) == sorted(case.comparison_id for case in cases)
    assert sorted(sums["seed"]) == [case.index for case in cases]
    assert all(value == soak.checksum(index) for index, value in zip(sums["seed"], sums["value"]))
    return table


def test_jobs_share_the_cases_and_a_killed_one_loses_none(tmp_path, monkeypatch, capsys):
    cases = [soak.Tiny(index, work_s=0.05) for index in range(60)]
    killed = []

    def met(store, name, found):
        """Kill the first job that has said hello, while it works on something."""
        if not killed:
            killed.append(name)
            taken = store.path / "slurm" / "taken" / name.removeprefix("slurm-")
            while not list(taken.glob("*.json")):
                time.sleep(0.005)
            for process in psutil.Process(int(name.removeprefix("slurm-"))).children(recursive=True):
                if "kvlab.studies._worker" not in process.cmdline():
                    process.kill()                                       # the job; its worker ends by itself
        meet(store, name, found)
    meet = RunStore.met
    monkeypatch.setattr(RunStore, "met", met)
    store = soaked(tmp_path, monkeypatch, cases)
    table = check(store, cases)
    said = capsys.readouterr().err
    assert f"its Slurm job {killed[0].removeprefix('slurm-')} ended; tried again, 2 of 3" in said
    assert set(table["worker"]) <= set(store.workers) and len(store.workers) >= 2
    assert all(found["logical_cores"] for found in store.workers.values())
    assert [file.name for file in (store.path / "slurm").iterdir()] == ["logs"]
    assert not list((store.path / "slurm" / "logs").glob("*.pkl"))


def test_a_measured_comparison_brings_its_samples(tmp_path, monkeypatch):
    one = Comparison((trial("naive", Workload.decode(AttentionShape(2, 1, 8), kv_len=16)),))
    monkeypatch.setattr("kvlab.studies.memory_wall.cases", lambda size, **given: [one])
    store = run("memory_wall", size="smoke", out=tmp_path, progress=False, engine="slurm", address=HERE)
    table = store.table()
    (row,) = table[table["metric"] == "latency_s"].to_dict("records")
    assert row["kind"] == "measured" and (store.path / row["artifact"]).is_file()


def test_a_case_whose_job_always_dies_is_a_failed_row_and_unread_answers_are_read(tmp_path, capsys):
    cases = [soak.Tiny(index) for index in range(3)]
    job = _slurm.Job("soak", tmp_path)
    board = _slurm._Board(tmp_path / "slurm", job, cases, 60.0)
    for attempt in range(_slurm.ATTEMPTS):
        own = tmp_path / "slurm" / "taken" / str(attempt)
        own.mkdir()
        (tmp_path / "slurm" / "todo" / "1.json").rename(own / "1.json")
        took, given_up = board.back(str(attempt))
        assert took and bool(given_up) == (attempt == _slurm.ATTEMPTS - 1)
    assert given_up[0][0]["error"] == "the Slurm job that ran it ended 3 times" and board.open == {0, 2}
    assert capsys.readouterr().err.count("tried again") == 2 and board.waiting() == 2
    (tmp_path / "slurm" / "answers" / "0.json").write_text(json.dumps([dict(comparison_id="tiny-0000000")]))
    (tmp_path / "slurm" / "answers" / "2.json").write_text("{torn")
    board.clear()
    assert [rows[0]["comparison_id"] for rows in _slurm._left(tmp_path / "slurm")] == ["tiny-0000000"]
    assert not (tmp_path / "slurm").exists()


def test_jobs_that_never_take_a_case_end_the_run_with_what_they_said(tmp_path):
    board = _slurm._Board(tmp_path / "slurm", _slurm.Job("soak", tmp_path), [soak.Tiny(0)], 60.0)
    dead = SimpleNamespace(done=lambda: True, job_id="7", stderr=lambda: "…\nNo module named 'kvlab'\n")
    with pytest.raises(ValueError, match="3 Slurm jobs in a row ended before they took a case; .* said: No mod"):
        list(_slurm._answers(board, [], lambda: dead, 1, lambda *of: None))


@pytest.mark.parametrize(("text", "words"), [
    ("gpu", "must be options of sbatch, such as .*; 'gpu' is none"), ("a b=1", "'a b' is none"),
    ("jobs=many", "jobs=many must be a whole number"), ("cluster=local,foo=1", "Unknown argument 'foo'"),
    ("cluster=moon", "--address: ")])
def test_options_that_nobody_knows_are_refused_before_there_is_a_run(tmp_path, text, words):
    with pytest.raises(ValueError, match=words):
        run("soak", size="smoke", out=tmp_path, engine="slurm", address=text)
    assert not list(tmp_path.iterdir())


def test_without_slurm_or_submitit_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="there is no sbatch here: start kvlab on a login node"):
        _slurm.slurm_each(None, 1.0, print)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ValueError, match=r"pip install 'kvlab\[slurm\]'"):
        _slurm.slurm_each(None, 1.0, print)


def test_what_cases_ask_of_a_job():
    assert _slurm._needs([soak.Tiny(0)]) == {}
    assert _slurm._needs([soak.Tiny(0), SimpleNamespace()]) == {"exclusive": True}
    assert _slurm._needs([SimpleNamespace(device="cuda")]) == {"gpus_per_node": 1}
    assert asdict(soak.Tiny(3)) == dict(index=3, work_s=0.0, take_bytes=0)
