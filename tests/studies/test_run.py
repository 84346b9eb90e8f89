"""A run keeps what it committed, repeats none of it, and refuses to go on with something else."""
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvlab
from kvlab.attention import Comparison, least_cost, trial
from kvlab.attention.naive import Naive
from kvlab.record.environment import Manifest
from kvlab.record.reading import Reading
from kvlab.record.store import RunStore, StoreError, read_table
from kvlab.registry import no_such
from kvlab.shapes import AttentionShape, Workload
from kvlab.studies import _run
from kvlab.studies._run import Job, in_process, run

WORKLOAD = Workload.decode(AttentionShape(4, 2, 16), kv_len=32)


@dataclass(frozen=True)
class Step:
    """A case that is no comparison."""
    number: int

    @property
    def comparison_id(self):
        return f"step{self.number}"

    def columns(self):
        return dict(kv_len=self.number)


class Studies(dict):
    def __missing__(self, name):
        raise no_such("study", name, self)


class Stub:
    """A study of `count` numbered cases; `at` is called with each number before its row is made."""
    SIZES = ("smoke", "small")

    def __init__(self, count=4, at=lambda number: None):
        self.count, self.at, self.ran = count, at, []

    def cases(self, size, *, device, variants, model):
        yield from (Step(i) for i in range(self.count))
        for ref in variants or ():
            yield Comparison((trial(ref, WORKLOAD, device=device, seed=7),))

    def run(self, case, *, artifacts=None, watch=None):
        if isinstance(case, Comparison):
            rows = [dict(case_id=t.case_id, **t.columns()) for t in case.trials]
        else:
            self.at(case.number)
            rows = [dict(case_id=case.comparison_id, **case.columns())]
        self.ran.append(case.comparison_id)
        reading = asdict(Reading("latency_s", 1.0 + len(self.ran) / 7, "s", "measured", note="load 0.1"))
        return [{"comparison_id": case.comparison_id, **row, **reading} for row in rows]


@pytest.fixture
def install(monkeypatch):
    def put(stub):
        monkeypatch.setattr(_run, "studies", Studies(stub=stub, other=Stub()))
        return stub
    return put


def go(out, each=in_process, progress=False, **options):
    return run("stub", out=out, each=each, progress=progress, **options)


def fail_at(number, error):
    def at(got):
        if got == number:
            raise error
    return at


def drive(out):
    """What the driver process of the SIGKILL test does: commit three cases, then wait to be killed."""
    _run.studies = Studies(stub=Stub(6, at=lambda number: time.sleep(3600) if number == 3 else None))
    go(Path(out))


def test_each_case_is_committed_when_it_is_done_and_the_run_is_closed(tmp_path, install):
    seen = []
    stub = install(Stub(3, at=lambda number: seen.append(len(store.committed))))
    store = None

    def begun(new):
        nonlocal store
        store = new
        assert (new.path / "manifest.json").exists() and not new.committed
    done = go(tmp_path, size="smoke", begun=begun)
    assert seen == [0, 1, 2] and done is store and stub.ran == ["step0", "step1", "step2"]
    assert (done.path / "readings.parquet").exists() and done.path.parent == tmp_path / "stub"
    frame = read_table(done.path)
    assert list(frame["comparison_id"]) == stub.ran and set(frame["study"]) == {"stub"}
    assert done.manifest.options == dict(size="smoke", device="cpu", variants=None, model=None)


def test_the_size_is_small_unless_said_and_a_model_is_in_every_row(tmp_path, install):
    install(Stub(2))
    store = go(tmp_path, model="some/model")
    assert store.manifest.size == "small" and store.manifest.models == ["some/model"]
    assert {r["model"] for r in store.rows()} == {"some/model"}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the machine is on fire")])
def test_an_interrupted_run_keeps_its_cases_and_a_resumed_one_repeats_none(tmp_path, install, error):
    install(Stub(5, at=fail_at(2, error)))
    with pytest.raises(type(error)):
        go(tmp_path, size="smoke")
    (path,) = (tmp_path / "stub").iterdir()
    assert list(read_table(path)["comparison_id"]) == ["step0", "step1"] and (path / "readings.parquet").exists()
    before = (path / "readings.jsonl").read_bytes()
    again = install(Stub(5))
    store = go(tmp_path, resume=path)
    assert store.path == path and again.ran == ["step2", "step3", "step4"] and store.manifest.size == "smoke"
    assert (path / "readings.jsonl").read_bytes().startswith(before)
    assert list(read_table(path)["comparison_id"]) == [f"step{i}" for i in range(5)]


def test_resuming_a_complete_run_measures_nothing(tmp_path, install):
    install(Stub(2))
    path = go(tmp_path).path
    stub = install(Stub(2))
    assert go(tmp_path, resume=path).committed == {"step0", "step1"} and stub.ran == []


@pytest.mark.parametrize("damage", ["torn", "flipped"])
def test_a_damaged_journal_loses_the_damaged_case_only_and_says_so(tmp_path, install, capsys, damage):
    install(Stub(4))
    path = go(tmp_path).path
    journal = path / "readings.jsonl"
    data = journal.read_bytes()
    if damage == "torn":
        journal.write_bytes(data[:-9])
    else:
        where = data.index(b'"step3"')
        journal.write_bytes(data[:where + 5] + b"X" + data[where + 6:])
    stub = install(Stub(4))
    store = go(tmp_path, resume=path)
    assert stub.ran == ["step3"] and store.committed == {f"step{i}" for i in range(4)}
    assert path.name in capsys.readouterr().err
    assert RunStore.open(path).problems == [] and len(read_table(path)) == 4


@pytest.mark.parametrize("other", [dict(size="small"), dict(device="cuda"), dict(model="x"), dict(variants=["sdpa"]),
                                   dict(variants=["naive", "sdpa"])])
def test_other_options_are_refused(tmp_path, install, other):
    install(Stub(2))
    path = go(tmp_path, size="smoke", variants=["naive"]).path
    with pytest.raises(ValueError, match="resume with the same options"):
        go(tmp_path, resume=path, **other)
    assert go(tmp_path, resume=path, size="smoke", variants=["naive"]).path == path


@dataclass(frozen=True)
class Knobbed(Naive):
    name = "knobbed"
    tile: int = 16


def test_knobs_are_kept_for_the_resumed_run_and_other_knobs_refused(tmp_path, install):
    install(Stub(1, at=fail_at(0, KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, variants=[Knobbed(tile=8)])
    (path,) = (tmp_path / "stub").iterdir()
    install(Stub(1))
    with pytest.raises(ValueError, match="resume with the same options"):
        go(tmp_path, variants=[Knobbed(tile=32)], resume=path)
    store = go(tmp_path, resume=path)
    assert {r["variant"] for r in store.rows()} == {"", "knobbed(tile=8)"} and store.manifest.seeds == [7]


def test_another_studys_run_and_a_folder_that_is_none_are_refused(tmp_path, install):
    install(Stub(1))
    path = go(tmp_path).path
    with pytest.raises(ValueError, match="is a run of 'stub', not of 'other'"):
        run("other", resume=path, each=in_process, progress=False)
    with pytest.raises(StoreError, match="is no run directory"):
        go(tmp_path, resume=tmp_path)


def test_a_users_file_is_in_the_manifest_and_a_changed_one_is_refused(tmp_path, install, monkeypatch):
    monkeypatch.chdir(tmp_path)
    install(Stub(1))
    file = tmp_path / "mine.py"
    file.write_text("class Mine:\n    name = 'mine'\n")
    store = go(tmp_path / "runs", variants=[f"{file}:Mine"])
    (source,) = store.manifest.variants
    assert source.source == file.read_text() and len(source.sha256) == 64
    assert source.ref == "mine.py:Mine" and str(tmp_path) not in store.manifest.model_dump_json()
    file.write_text("class Mine:\n    name = 'mine'  # better\n")
    with pytest.raises(ValueError, match="mine.py:Mine changed since"):
        go(tmp_path, variants=[f"{file}:Mine"], resume=store.path)


def test_a_class_of_this_process_is_run_here_by_default_and_its_rows_and_source_say_so(tmp_path, install):
    class Local(Naive):
        name = "local"

        def cost(self, trial, cache_bytes=0):
            return least_cost(trial)
    stub = install(Stub(1))
    store = run("stub", out=tmp_path, variants=[Local], progress=False)
    assert len(stub.ran) == 2 and all(r["note"] == "load 0.1; measured in the calling process" for r in store.rows())
    (source,) = store.manifest.variants
    assert source.ref.startswith("cell:") and "least_cost(trial)" in source.source and len(source.sha256) == 64


def test_a_class_without_text_has_no_source(tmp_path, install):
    typed = type("Typed", (Naive,), {"name": "typed", "__qualname__": "prompt.Typed", "__module__": "builtins"})
    install(Stub(0))
    assert go(tmp_path, variants=[typed]).manifest.variants[0].sha256 == ""


def test_variants_of_files_and_names_go_to_a_worker(tmp_path, install, monkeypatch):
    from kvlab.studies import _worker
    asked = []

    def worker_each(patience_s):
        asked.append(patience_s)
        return in_process
    monkeypatch.setattr(_worker, "worker_each", worker_each)
    install(Stub(1))
    run("stub", out=tmp_path, variants=["naive"], progress=False, patience_s=12.0)
    assert asked == [12.0]


def test_each_may_map_the_cases_in_any_way(tmp_path, install):
    install(Stub(4))
    jobs = []

    def chunks(job, cases):
        jobs.append(job)
        return map(job, cases)                                       # a map has no close()
    store = go(tmp_path, each=chunks)
    assert len(store.committed) == 4 and jobs == [Job("stub", store.path)]


def test_each_that_gives_too_little_is_no_complete_run_and_keeps_what_it_gave(tmp_path, install):
    install(Stub(4))
    with pytest.raises(RuntimeError, match="gave no rows of 2 of 4 cases; complete the run with resume=") as caught:
        go(tmp_path, each=lambda job, cases: map(job, cases[1:3]))
    (path,) = (tmp_path / "stub").iterdir()
    assert str(caught.value).endswith(f"resume={path}")
    assert list(read_table(path)["comparison_id"]) == ["step1", "step2"] and (path / "readings.parquet").exists()
    stub = install(Stub(4))
    assert len(go(tmp_path, resume=path).committed) == 4 and stub.ran == ["step0", "step3"]


def test_each_may_yield_the_cases_in_any_order(tmp_path, install):
    stub = install(Stub(4))
    store = go(tmp_path, each=lambda job, cases: map(job, cases[::-1]))
    assert stub.ran == ["step3", "step2", "step1", "step0"] == [r["comparison_id"] for r in store.rows()]
    assert {r["comparison_id"]: r["kv_len"] for r in store.rows()} == {f"step{i}": i for i in range(4)}
    assert store.committed == {f"step{i}" for i in range(4)}


@pytest.mark.parametrize("what, value", [("cpu", "Another CPU"), ("gpus", ["H200"]), ("torch", "1.0.0")])
def test_another_machine_is_refused_in_one_sentence(tmp_path, install, what, value):
    install(Stub(2, at=fail_at(1, KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path)
    (path,) = (tmp_path / "stub").iterdir()
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["checksum"] = ""                                            # another run's, not a damaged one
    here, manifest["environment"][what] = manifest["environment"][what], value
    (path / "manifest.json").write_text(json.dumps(manifest))
    stub = install(Stub(2))
    with pytest.raises(ValueError) as caught:
        go(tmp_path, resume=path)
    assert str(caught.value) == (f"{path} was measured elsewhere ({what} {value!r}, here {here!r}); "
                                 "numbers of two machines are two runs")
    manifest["environment"] |= {what: here, "hostname": "elsewhere", "python": "3.0"}       # what decides no number
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert go(tmp_path, resume=path).committed == {"step0", "step1"} and stub.ran == ["step1"]


def test_the_mapping_is_closed_when_the_run_ends_early(tmp_path, install):
    install(Stub(3))
    closed = []

    def each(job, cases):
        try:
            for case in cases:
                yield job(case)
        finally:
            closed.append(True)
    store = go(tmp_path, each=each)
    assert closed == [True] and len(store.committed) == 3
    install(Stub(3, at=fail_at(1, KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt) as kept:                   # `kept` holds the traceback, as a notebook does
        go(tmp_path, each=each)
    assert closed == [True, True] and kept


@pytest.mark.parametrize("options, error, words", [
    (dict(size="huge"), ValueError, "stub has no size 'huge'; allowed: smoke, small"),
    (dict(variants=["sdpaa"]), KeyError, "Did you mean 'sdpa'"),
    (dict(variants=["nowhere.py:Mine"]), KeyError, "cannot read"),
])
def test_wrong_names_are_refused_before_anything_is_written(tmp_path, install, options, error, words):
    install(Stub(1))
    with pytest.raises(error, match=words):
        go(tmp_path / "runs", **options)
    assert not (tmp_path / "runs").exists()


def test_an_unknown_study_has_a_near_match():
    with pytest.raises(KeyError, match="Did you mean 'memory_wall'"):
        run("memory_wal")


def test_progress_is_shown_on_stderr_only_when_asked_for(tmp_path, install, capsys):
    install(Stub(2))
    go(tmp_path)
    assert capsys.readouterr().err == ""
    go(tmp_path, progress=True)
    captured = capsys.readouterr()
    assert "stub" in captured.err and "2/2" in captured.err and captured.out == ""


def test_the_front_door_gives_a_table_that_knows_its_run(tmp_path, install):
    install(Stub(2))
    table = kvlab.run("stub", out=tmp_path, each=in_process, progress=False)
    assert list(table["comparison_id"]) == ["step0", "step1"]
    assert Manifest.read(Path(table.attrs["run"])).study == "stub"


def test_a_job_without_a_study_runs_probes_by_name():
    comparison = Comparison((trial("naive", WORKLOAD),))
    assert {r["metric"] for r in Job(probes=("kernel_error",))(comparison)} == {"kernel_error"}
    with pytest.raises(KeyError, match="no probe named 'clock'"):
        Job(probes=("clock",))(comparison)


def test_a_study_that_measures_nothing_leaves_an_empty_table(tmp_path, install):
    install(Stub(0))
    assert read_table(go(tmp_path).path).empty


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_killed_run_keeps_its_committed_cases_byte_for_byte(tmp_path, install):
    here, root = Path(__file__).parent, Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(here), os.environ.get("PYTHONPATH", "")])
    code = "import sys, test_run; test_run.drive(sys.argv[1])"
    driver = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env={**os.environ, "PYTHONPATH": path})
    try:
        deadline = time.monotonic() + 300
        while not (found := [p for p in tmp_path.glob("stub/*/*.jsonl") if p.read_bytes().count(b'"commit"') == 3]):
            assert driver.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        driver.send_signal(signal.SIGKILL)
    finally:
        driver.kill()
        driver.wait()
    (journal,) = found
    before = journal.read_bytes()
    rows = RunStore.open(journal.parent).rows()
    stub = install(Stub(6))
    store = go(tmp_path, resume=journal.parent)
    assert stub.ran == ["step3", "step4", "step5"] and journal.read_bytes().startswith(before)
    assert store.rows()[:3] == rows and [r["comparison_id"] for r in store.rows()] == [f"step{i}" for i in range(6)]


def test_a_case_that_came_to_nothing_is_one_row():
    (row,) = _run.failed_case(Step(3), "it rained", "oom")
    assert row["status"] == "oom" and row["error"] == "it rained" and row["kv_len"] == 3 and row["value"] is None
    assert row["case_id"] == row["comparison_id"] == "step3" and row["scope"] == "comparison"


def test_rows_that_are_not_measured_are_not_said_to_be_measured_here():
    job = lambda case: [dict(kind="modelled", note=""), dict(kind="measured", note="")]  # noqa: E731
    (rows,) = in_process(job, [SimpleNamespace()])
    assert [r["note"] for r in rows] == ["", "measured in the calling process"]
