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
from kvlab.folders import remove
from kvlab.record.store import RunStore, read_table
from kvlab.shapes import AttentionShape, Workload
from kvlab.studies import _slurm, _slurm_job, _slurm_submit, soak
from kvlab.studies._run import run
from kvlab.studies._worker import UNREADY

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
            (taken,) = (store.path / "slurm").glob(f"board-*/taken/{name.removeprefix('slurm-')}")
            until = time.monotonic() + 60
            while not list(taken.glob("*.json")):
                assert time.monotonic() < until, "it has answered all before anyone looked"
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


def board_of(tmp_path, n):
    board = _slurm._Board(tmp_path / "slurm", _slurm.Job("soak", tmp_path), [soak.Tiny(i) for i in range(n)], 60.0)
    board.feed()
    return board


def answer(board, number, text=None):
    rows = [dict(comparison_id=f"tiny-{number:07d}")]
    (board.folder / "answers" / f"{number}.json").write_text(json.dumps(rows) if text is None else text)


def taken(board, job_id, number):
    own = board.folder / "taken" / job_id
    own.mkdir(exist_ok=True)
    return (board.folder / "todo" / f"{number}.json").rename(own / f"{number}.json")


def test_a_case_whose_job_always_dies_is_a_failed_row_that_says_what_the_job_said(tmp_path, capsys):
    board = board_of(tmp_path, 3)
    for attempt in range(_slurm.ATTEMPTS):
        taken(board, str(attempt), 1)
        took, given_up = board.back(str(attempt), "No such file")
        assert took and bool(given_up) == (attempt == _slurm.ATTEMPTS - 1)
    assert given_up[0][0]["error"] == "the Slurm job that ran it ended 3 times; the last said: No such file"
    assert board.open == {0, 2} and capsys.readouterr().err.count("tried again") == 2 and board.feed() == 2


def test_answers_that_a_killed_runner_did_not_read_are_read_and_its_jobs_end(tmp_path, monkeypatch):
    board = board_of(tmp_path, 4)
    answer(board, 0)
    for number, text in [(2, "{torn"), (3, '{"no": "list"}')]:
        answer(board, number, text)
    ended = []
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(_slurm.subprocess, "run", lambda command, **how: ended.append(command))
    (own := board.folder / "taken" / "7").mkdir()
    mine = _slurm_job._taken(board.folder, own)
    assert next(mine).parent == own
    (board.folder / "workers" / "7.json").write_text('{"cpu": "one"}')
    met = []
    left = _slurm._left(tmp_path / "slurm", lambda *of: met.append(of))
    assert [rows[0]["comparison_id"] for rows in left] == ["tiny-0000000"] and met == [("slurm-7", {"cpu": "one"})]
    assert ended == [["scancel", "--quiet", "--name", f"kvlab-{board.folder.name}"]]
    assert list(mine) == [] and [file.name for file in (tmp_path / "slurm").iterdir()] == ["logs"]


def test_a_late_answer_of_another_runner_or_of_a_job_that_was_taken_for_dead_counts_for_nothing(tmp_path):
    board, later = board_of(tmp_path, 2), board_of(tmp_path, 1)
    answer(board, 0)
    assert not list(later.answered()), "its case 0 is another one"
    assert len(list(board.answered())) == 1
    answer(board, 0)                                                     # the second job, to which it was given
    answer(board, 1, "damaged")
    for number in board.cases:
        taken(board, "8", number)
    assert list(board.answered()) == [] and not list((board.folder / "answers").iterdir())
    assert board.open == {1} and board.feed() == 1, "asked again"
    assert board.found_again() == [] and board.tries[1] == 2


def test_what_no_job_is_left_for_is_tried_again(tmp_path, capsys):
    board = board_of(tmp_path, 2)
    taken(board, "9", 0)                                                 # and the listing of its folder is out of date
    answer(board, 1)
    remove(board.folder / "todo" / "1.json")
    assert board.found_again() == [] and board.feed() == 1
    assert "tiny-0000000: its answer is missing; tried again, 2 of 3" in capsys.readouterr().err


def test_the_folder_holds_few_cases_ahead_however_many_there_are(tmp_path, monkeypatch):
    monkeypatch.setattr(_slurm, "AHEAD", 10)
    board = board_of(tmp_path, 25)
    for _ in range(3):
        waiting = list((board.folder / "todo").iterdir())
        assert len(waiting) == board.feed() <= 10
        for file in waiting:
            file.unlink()
        board.feed()
    assert len(waiting) == 5 and board.feed() == 0


def test_jobs_find_new_cases_while_the_runner_commits_what_they_answered(tmp_path, monkeypatch):
    monkeypatch.setattr(_slurm, "AHEAD", 3)
    board = board_of(tmp_path, 6)
    assert board.feed() == 3
    for number in range(3):
        taken(board, "7", number)
        answer(board, number)
    waiting = []
    for _ in board.answered():
        waiting.append({file.stem for file in (board.folder / "todo").iterdir()} - {"0", "1", "2"})
    assert waiting == [set(), {"3"}, {"3", "4"}]
    board._write(0)                                                      # one more is tried again, so more than enough
    assert board.feed() == 4


@pytest.mark.parametrize(("why", "again"), [("sbatch: error: invalid partition specified: gpu", 0),
                                            ("sbatch: error: Socket timed out on send/recv operation", 1)])
def test_a_cluster_that_takes_no_job_is_said_and_ends_the_run(tmp_path, monkeypatch, capsys, why, again):
    monkeypatch.setattr(_slurm, "LOOK_S", 0.0)

    def refuse():
        raise RuntimeError(f"{why}\nsrun: bye")
    with pytest.raises(ValueError, match=f"Slurm takes no job: {why}"):
        list(_slurm._answers(board_of(tmp_path, 1), [], refuse, 1, lambda *of: None))
    assert capsys.readouterr().err.count("tried again") == again


def test_a_cluster_that_has_taken_jobs_may_refuse_one_as_invalid_for_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(_slurm, "LOOK_S", 0.0)
    monkeypatch.setattr(_slurm, "REFUSED", 7)
    tries = []

    def start():
        tries.append(None)
        if len(tries) > 1:
            raise RuntimeError("sbatch: error: Invalid account or account/partition combination specified")
        return SimpleNamespace(done=lambda: True, job_id="7", stderr=lambda: "bye")
    with pytest.raises(ValueError, match="Slurm takes no job: .*Invalid account"):
        list(_slurm._answers(board_of(tmp_path, 1), [], start, 1, lambda *of: None))
    assert len(tries) == 8


def test_a_node_on_which_no_worker_starts_ends_the_run_and_costs_no_case(tmp_path, monkeypatch):
    monkeypatch.setattr(_slurm, "LOOK_S", 0.0)
    board = board_of(tmp_path, 1)
    taken(board, "7", 0)
    dead = SimpleNamespace(done=lambda: True, job_id="7", stderr=lambda: f"ValueError: {UNREADY} on this machine: …\n")
    with pytest.raises(ValueError, match="Slurm job 7: ValueError: no worker process starts on this machine"):
        list(_slurm._answers(board, [dead], lambda: dead, 1, lambda *of: None))


def test_jobs_that_never_take_a_case_end_the_run_with_what_they_said(tmp_path):
    dead = SimpleNamespace(done=lambda: True, job_id="7", stderr=lambda: (
        "…\nNo module named 'kvlab'\nsrun: error: node3: task 0: Exited with exit code 1\n"))
    with pytest.raises(ValueError, match="3 Slurm jobs in a row ended before they took a case; .* said: No mod"):
        list(_slurm._answers(board_of(tmp_path, 1), [], lambda: dead, 1, lambda *of: None))


@pytest.mark.parametrize(("text", "words"), [
    ("gpu", "must be options of sbatch, such as .*; 'gpu' is none"), ("a b=1", "'a b' is none"),
    ("jobs=many", "jobs=many must be a whole number"), ("jobs=0", "at least 1"), 
    ("nodes=2", "is one process, so nodes"), ("cluster=local,foo=1", "hands no option 'foo' to sbatch; it does: "),
    ("cluster=local,timeoutmin=1", "no option 'timeoutmin' to sbatch; near it: timeout_min"),
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
    assert _slurm_submit.needs([soak.Tiny(0)]) == {}
    assert _slurm_submit.needs([soak.Tiny(0), SimpleNamespace()]) == {"exclusive": True}
    assert _slurm_submit.needs([SimpleNamespace(device="cuda:1")]) == {"gpus_per_node": 1}
    assert _slurm_submit.needs([SimpleNamespace(device="cuda")], ["gres", "partition"]) == {}, "said by the user"
    assert asdict(soak.Tiny(3)) == dict(index=3, work_s=0.0, take_bytes=0)
