"""One process at a time writes to a run, and a second one is told which and since when."""
import json
import subprocess
import sys
from dataclasses import asdict

import pytest

from kvlab.record import held
from kvlab.record.environment import Manifest
from kvlab.record.held import Owner, held_by, read_owner
from kvlab.record.reading import Reading
from kvlab.record.store import RunStore, StoreError, read_table
from kvlab.report import write_report

ROW = {"case_id": "a", **asdict(Reading("latency_s", 1.0, "s", "measured"))}
HOLDS = """
import sys
from kvlab.record.store import RunStore
store = RunStore.open(sys.argv[1], hold=True)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(held, "_PATIENCE_S", 0.1)


@pytest.fixture
def run(tmp_path):
    store = RunStore.create(tmp_path, "memory_wall", Manifest(study="memory_wall", environment={}))
    store.append("c1", [ROW])
    store.close()
    return store.path


@pytest.fixture
def other(run):
    """Another process that holds the run."""
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_the_second_process_is_refused_and_may_go_on_when_the_first_is_killed(run, other):
    store = RunStore.open(run)                                           # reading is free
    assert held_by(run).pid == other.pid and store.committed == {"c1"}
    for write in (store.hold, lambda: store.append("c2", [ROW]), lambda: RunStore.open(run, hold=True)):
        with pytest.raises(StoreError, match=rf"is being written by process {other.pid} since 20.*Z \(0 min\); wait"):
            write()
    other.kill()                                                         # its lock goes with it, owner.json stays
    other.wait()
    assert held_by(run) is None and read_owner(run).pid == other.pid
    store.append("c2", [ROW])
    assert held_by(run) is not None, "now this process"
    store.close()
    assert held_by(run) is None and not (run / "owner.json").exists()
    assert RunStore.open(run).committed == {"c1", "c2"}


def test_what_was_appended_before_the_run_was_taken_is_seen(run, other):
    store = RunStore.open(run)
    other.kill()
    other.wait()
    with RunStore_of(run) as quick:
        quick.append("c2", [ROW])
    with pytest.raises(ValueError, match="another process wrote to it"):
        store.append("c2", [ROW])
    store.close()
    taken = RunStore.open(run, hold=True)
    assert taken.committed == {"c1", "c2"}
    taken.hold()                                                         # twice is once
    taken.close()


class RunStore_of:
    def __init__(self, run):
        self.store = RunStore.open(run, hold=True)

    def __enter__(self):
        return self.store

    def __exit__(self, *error):
        self.store.close()


@pytest.mark.parametrize("left", [b"", b"[]", b'{"pid": Infinity, "since": "2026-01-01"}',
                                 b'{"pid": "x", "since": "y"}', b'{"pid": 1}', b"\xff"])
def test_an_owner_that_cannot_be_read_is_another_process(run, other, left):
    (run / "owner.json").write_bytes(left)
    assert str(held_by(run)) == "another process"
    with pytest.raises(StoreError, match="being written by another process; wait"):
        RunStore.open(run).hold()


def test_an_age_is_never_negative_and_in_hours_after_two():
    assert Owner(1, "2999-01-01T00:00:00Z").age() == "0 min"
    assert Owner(1, "2020-01-01T00:00:00Z").age().endswith(" h")


def test_a_run_on_several_machines_knows_their_environments(run):
    store = RunStore.open(run)
    assert store.workers == {}
    store.met("3fa2c1/gpu0", {"cpu": "one"})
    store.met("77b0aa", {"cpu": "two"})
    store.met("77b0aa", {"cpu": "two"})
    assert RunStore.open(run).workers == {"3fa2c1/gpu0": {"cpu": "one"}, "77b0aa": {"cpu": "two"}}
    for left, words in [("{", "is damaged"), ("[]", "must hold environments"), (json.dumps({"a": 1}), "must hold")]:
        (run / "workers.json").write_text(left)
        with pytest.raises(ValueError, match=f"workers.json .*{words}|{words}"):
            _ = store.workers


def test_of_a_run_that_one_may_only_read_it_is_known_whether_somebody_writes_to_it(run, other, monkeypatch):
    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied")
    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    assert held_by(run).pid == other.pid
    other.kill()
    other.wait()
    assert (run / "owner.json").exists() and held_by(run) is None, "what a killed process said is no lock"
    monkeypatch.setattr("filelock.FileLock.acquire", lambda *args, **options: (_ for _ in ()).throw(
        NotImplementedError("no flock")))
    with pytest.raises(StoreError, match="lies on a file system without locks"):
        RunStore.open(run, hold=True)


def test_who_was_only_reading_takes_nothing_from_who_wrote_meanwhile(run):
    """Neither the journal, also where it is to be written anew without its damage, nor the closed table."""
    with open(run / "readings.jsonl", "ab") as journal:
        journal.write(b"damage\n")
    late = RunStore.open(run)
    assert late.problems
    with RunStore_of(run) as quick:
        quick.append("c2", [ROW])
    with pytest.raises(ValueError, match="another process wrote to it"):
        late.append("c3", [ROW])
    late.close()
    assert RunStore.open(run).committed == {"c1", "c2"} and len(read_table(run)) == 2


def test_a_report_of_a_run_that_one_may_only_read_is_written_here(run, other, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.access", lambda path, mode: path != run)
    before = sorted(file.name for file in run.iterdir())
    assert write_report(run).resolve() == tmp_path / f"{run.name}.html"
    assert sorted(file.name for file in run.iterdir()) == before
