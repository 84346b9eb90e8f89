"""The drill of faults: each class in a small form, and that it says so when a run does lose, double or half read."""
import os
import re
import sys
from pathlib import Path

import pytest

from kvlab.drill import _base, _check, _victim, damage, little_memory, ray_worker_kill, two_runs, worker_kill
from kvlab.drill.__main__ import main
from kvlab.drill._base import Place, classes
from kvlab.drill._check import Found, judge
from kvlab.record import journal, store
from kvlab.record.store import RunStore
from kvlab.studies.soak import Tiny

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
FEW = 80
WITH_WORKERS = {"worker_kill", "little_memory", "ray_worker_kill"}      # 3 s for each worker: torch


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Victims that compute themselves, few cases, and one at a time."""
    tinies = Place.tinies
    monkeypatch.setattr(Place, "tinies", lambda place, n, work_s=0.0: tinies(place, min(n, FEW), work_s))
    monkeypatch.setattr(Place, "workers", lambda place: 0)
    monkeypatch.setattr(two_runs, "A_CASE_S", 0.5)
    monkeypatch.setattr(_base, "AT_ONCE", 1)


@pytest.mark.parametrize("name", sorted(set(classes) - WITH_WORKERS))
def test_nothing_is_lost_in_a_small_drill_of_each_class(name, monkeypatch, capsys):
    monkeypatch.setattr(damage, "COPIES", 4)
    assert main([name, "--count", "2", "--seed", "4"]) == 0, capsys.readouterr().out
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(name))
    times, hit, committed, lost, doubled, half, resumed = (int(word.replace(",", "")) for word in line.split()[1:8])
    assert (times, lost, doubled, half) == (2, 0, 0, 0) and hit and committed and resumed


def test_a_killed_worker_costs_its_case_and_no_other(monkeypatch, capsys):
    monkeypatch.setattr(worker_kill, "WORKERS", 1)
    assert main(["worker_kill", "--count", "1", "--seed", "4"]) == 0, capsys.readouterr().out


def test_a_runner_without_memory_loses_nothing_that_it_told(monkeypatch, capsys):
    if not sys.platform.startswith("linux"):
        pytest.skip("limits on other processes (prlimit)")
    monkeypatch.setattr(little_memory, "WAYS", (little_memory._runner,))
    assert main(["little_memory", "--count", "1", "--seed", "4"]) == 0, capsys.readouterr().out


# What must make it fail: a store that does not keep what it promises.

def promises(plan, words):
    """Tells of a case that it did not write."""
    real = RunStore.append
    RunStore.append = lambda store, name, rows: None if name == "tiny-0000003" else real(store, name, rows)
    _victim.live(plan, words)


def repeats(plan, words):
    """Runs every case again on --resume."""
    real = RunStore.__init__

    def forgets(store, *of, **how):
        real(store, *of, **how)
        store.committed = set()
    RunStore.__init__ = forgets
    _victim.live(plan, words)


def mixes_up(plan, words):
    """Writes a case without its last row."""
    real = RunStore.append
    RunStore.append = lambda store, name, rows: real(store, name, rows[:-1] if name == "tiny-0000005" else rows)
    _victim.live(plan, words)


def lags(plan, words):
    """Leaves the table of a run that was closed beside a journal that goes on."""
    unlink, write = Path.unlink, store.write_parts
    Path.unlink = lambda path, **how: None if path.name == "readings.parquet" else unlink(path, **how)
    store.write_parts = lambda parts, path, units: None if path.exists() else write(parts, path, units)
    _victim.live(plan, words)


@pytest.mark.parametrize("how, column", [(promises, 3), (repeats, 4), (mixes_up, 5), (lags, 5)])
def test_a_store_that_breaks_its_word_makes_the_drill_fail(how, column, monkeypatch, capsys):
    monkeypatch.setattr(_victim, "LIVE", how)
    assert main(["runner_kill", "--count", "1", "--seed", "5"]) == 1
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("runner_kill"))
    assert int(line.split()[1 + column].replace(",", "")) > 0 and line.rstrip().endswith("WRONG")
    assert "wrong in runner_kill" in out


def test_a_replay_that_believes_torn_comparisons_makes_the_drill_fail(monkeypatch, capsys):
    def believes(lines, problems):
        pending: dict = {}
        for line in lines:
            if line.startswith(b'{"row":') and line.endswith(b"\n"):
                row = journal._decode(line[:-1])
                if row:
                    pending.setdefault(row[1]["comparison_id"], []).append(row[1])
        for name, rows in pending.items():
            yield journal.Committed(name, rows, [])
    monkeypatch.setattr(journal, "read", believes)
    monkeypatch.setattr(damage, "COPIES", 4)
    monkeypatch.setattr(damage, "DAMAGES", (damage._cut,))
    monkeypatch.setattr(damage, "FILES", ("readings.jsonl",))
    assert main(["damage", "--count", "1", "--seed", "4"]) == 1
    assert re.search(r"^damage +1 +\d+ +\d+ +\d+ +\d+ +[1-9].*WRONG", capsys.readouterr().out, re.M)


@pytest.mark.parametrize("change, where", [
    (lambda rows: rows, None), (lambda rows: rows[:3], "half"), (lambda rows: rows * 2, "doubled"),
    (lambda rows: [{**rows[0], "value": 1.0}, *rows[1:]], "half"), (lambda rows: [rows[0], *rows[:3]], "half"),
    (lambda rows: [{**row, "seed": 8} for row in rows], "half"), (lambda rows: [], "half"),
    (lambda rows: [{**rows[0], "status": "oom", "error": "killed"}], "half")])
def test_a_case_counts_only_with_its_own_rows_once(change, where):
    case, other = Tiny(7), Tiny(8)
    found = Found(committed={case.comparison_id, other.comparison_id})
    judge(found, [*other.rows(), *change(case.rows())], {c.comparison_id: c for c in (case, other)}, set())
    assert {"half": found.half, "doubled": found.doubled} == {
        name: {case.comparison_id} if name == where else set() for name in ("half", "doubled")}
    assert not found.failed


def test_commits_are_counted_by_the_text_alone(tmp_path):
    line = b'{"commit":{"comparison_id":"c","count":1},"crc":"00000000"}\n'
    (tmp_path / "j").write_bytes(line * 2 + b'{"commit":{"compa\n' + line[:-1])
    assert _check._commits(tmp_path / "j") == {"c": 2}


def test_what_a_machine_cannot_do_is_a_row_with_the_reason_and_no_failure(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["ray_worker_kill", "--count", "1"]) == 0
    assert "not run: ray is not installed" in capsys.readouterr().out


def test_a_class_that_breaks_is_wrong_with_what_happened(monkeypatch, capsys):
    monkeypatch.setattr(ray_worker_kill, "strike", lambda place: 1 / 0)
    assert main(["ray_worker_kill", "--count", "2"]) == 1
    out = capsys.readouterr().out
    assert "ZeroDivisionError" in out and "2 of 2 faults were not done" in out


@pytest.mark.parametrize("hit, code", [(0, 1), (1, 0)])
def test_faults_that_never_come_in_mid_run_are_wrong(hit, code, monkeypatch, capsys):
    def strike(place):
        while place.next():
            place.tally.hit += hit
    monkeypatch.setattr(ray_worker_kill, "strike", strike)
    assert main(["ray_worker_kill", "--count", "10"]) == code
    assert ("none of 10 faults came in mid-run" in capsys.readouterr().out) == bool(code)


def test_a_name_that_is_none_gets_a_near_match(capsys):
    with pytest.raises(SystemExit):
        main(["runner_kil"])
    assert "Did you mean 'runner_kill'" in capsys.readouterr().err
