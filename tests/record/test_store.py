"""A run survives kills, damage and full disks: committed comparisons exactly, the rest not at all."""
import errno
import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlab.record import store as store_module
from kvlab.record.environment import Manifest
from kvlab.record.export import StoreError, atomic_write, write_parquet
from kvlab.record.reading import (
    COLUMNS,
    CONTEXT,
    KINDS,
    SCHEMA_VERSION,
    STATUSES,
    Reading,
    complete,
    failed,
    missing,
    table,
)
from kvlab.record.store import RunStore, find_run, read_table


def new_store(parent, **fields):
    return RunStore.create(parent, "memory_wall", Manifest(study="memory_wall", environment={}, **fields))


def rows_of(name, count=2):
    """A comparison's rows with a number, text that is not ASCII, and a missing reading."""
    readings = [Reading("latency_s", 1.5 + i, "s", "measured", n=30, note="µs") for i in range(count - 1)]
    return [{"case_id": f"{name}-{i}", "kv_len": 4096, **asdict(reading)}
            for i, reading in enumerate([*readings, missing("power", "W", "no sensor")])]


def written(store, name, **options):
    """The complete rows as they must come back."""
    own = {"run_id": store.manifest.run_id, "study": "memory_wall", "comparison_id": name}
    return [complete({**own, **row}) for row in rows_of(name, **options)]


def test_a_run_directory_and_what_comes_back(tmp_path):
    store = new_store(tmp_path / "profiles")
    assert store.path.parent == tmp_path / "profiles" / "memory_wall" and store.path.name == store.manifest.run_id
    assert sorted(file.name for file in store.path.iterdir()) == ["manifest.json", "readings.jsonl"]
    store.append("c1", rows_of("c1"))
    store.append("c2", [{"run_id": "", "comparison_id": None, **row} for row in rows_of("c2")])
    store.append("empty", [])
    again = RunStore.open(store.path)
    assert again.manifest == store.manifest and again.problems == []
    assert again.committed == store.committed == {"c1", "c2", "empty"}
    assert again.rows() == store.rows() == written(store, "c1") + written(store, "c2")
    assert (store.artifacts / "samples").is_dir() and (store.path / "traces").is_dir()
    assert store.artifacts == store.path                                 # a second use finds them there


def test_each_line_is_json_without_nan_and_without_nulls(tmp_path):
    store = new_store(tmp_path)
    store.append("c1", [{**row, "low": float("nan")} for row in rows_of("c1")])
    def refuse(constant):
        raise AssertionError(constant)
    lines = [json.loads(line, parse_constant=refuse)
             for line in (store.path / "readings.jsonl").read_bytes().splitlines()]
    assert [set(line) for line in lines] == [{"row", "crc"}, {"row", "crc"}, {"commit", "crc"}]
    assert lines[0]["row"]["value"] == 1.5 and "value" not in lines[1]["row"]
    assert all(value not in (None, "") for line in lines[:2] for value in line["row"].values())
    assert lines[2]["commit"] == {"comparison_id": "c1", "count": 2, "rows": lines[2]["commit"]["rows"]}


def test_append_refuses_before_anything_is_written(tmp_path):
    store = new_store(tmp_path)
    store.append("c1", rows_of("c1"))
    before = (store.path / "readings.jsonl").read_bytes()
    good = rows_of("c2")[0]
    for rows, error, words in [
        ([{**good, "kvlen": 1}], KeyError, "Did you mean 'kv_len'"),
        ([{**good, "comparison_id": "other"}], ValueError, "comparison 'other' was given with 'c2'"),
        ([good, {**good, "value": float("nan")}], ValueError, "does not go with value None"),
        ([good, {**good, "kind": "guessed"}], ValueError, "kind 'guessed'"),
        ([good, {**good, "unit": "ms"}], ValueError, "has unit 'ms', and 's' elsewhere"),
        ([good, {**good, "high": float("inf")}], ValueError, "infinite"),
    ]:
        with pytest.raises(error, match=words):
            store.append("c2", rows)
    for twice in ("c1", ""):
        with pytest.raises(ValueError, match="already committed"):
            store.append(twice, rows_of("c1"))
    with pytest.raises(ValueError, match="has unit 'ms', and 's' elsewhere"):
        RunStore.open(store.path).append("c2", [{**good, "unit": "ms"}])
    assert (store.path / "readings.jsonl").read_bytes() == before
    with pytest.raises(ValueError, match="plain name"):
        RunStore.create(tmp_path, "../up", Manifest(study="../up", environment={}))


text = st.text(max_size=12)
number = st.floats(allow_nan=False, allow_infinity=False)
context = {name: text if COLUMNS[name] == "string" else st.none() | st.integers(-2**63, 2**63 - 1)
           for name in CONTEXT if name not in ("run_id", "study", "comparison_id")}
details = {"method": text, "source": text, "cache_state": text, "artifact": text, "low": st.none() | number,
           "high": st.none() | number, "window_s": st.none() | number, "n": st.none() | st.integers(0, 2**40)}
name = st.sampled_from(["latency_s", "power", "kl"])
full = st.text(min_size=1, max_size=12)
reading = st.one_of(
    st.builds(lambda metric, value, kind, more: Reading(metric, value, "u", kind, **more), name, number,
              st.sampled_from(KINDS[:-1]), st.fixed_dictionaries({}, optional=details)),
    st.builds(lambda metric, why, more: missing(metric, "u", why, **more), name, full,
              st.fixed_dictionaries({}, optional=details)),
    st.builds(lambda metric, why, status: failed(metric, "u", why, status), name, full,
              st.sampled_from(STATUSES[1:])))
row = st.builds(lambda known, reading: {**known, **asdict(reading)}, st.fixed_dictionaries({}, optional=context),
                reading)


comparisons = st.dictionaries(full, st.lists(row, max_size=4), max_size=4)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(comparisons)
def test_rows_come_back_identical(tmp_path_factory, comparisons):
    store = new_store(tmp_path_factory.mktemp("run"))
    for comparison_id, rows in comparisons.items():
        store.append(comparison_id, rows)
    own = {"run_id": store.manifest.run_id, "study": "memory_wall"}
    expected = [complete({**own, "comparison_id": comparison_id, **row})
                for comparison_id, rows in comparisons.items() for row in rows]
    again = RunStore.open(store.path)
    assert (again.rows(), again.committed, again.problems) == (expected, set(comparisons), [])


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(comparisons)
def test_a_closed_run_gives_the_table_of_the_open_one(tmp_path_factory, comparisons):
    store = new_store(tmp_path_factory.mktemp("run"))
    for comparison_id, rows in comparisons.items():
        store.append(comparison_id, rows)
    live = store.table()
    pd.testing.assert_frame_equal(live, table(store.rows()))
    pd.testing.assert_frame_equal(read_table(store.path), live)
    store.close()
    pd.testing.assert_frame_equal(read_table(store.path), live)


def test_resume_after_damage_repeats_the_damaged_comparison_only(tmp_path):
    store = new_store(tmp_path)
    for name in ("c1", "c2", "c3"):
        store.append(name, rows_of(name))
    store.close()
    path = store.path / "readings.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[4] = lines[4].replace(b"no sensor", b"on sensor")
    path.write_bytes(b"".join(lines) + b'{"row":{"metr')
    damaged = path.read_bytes()
    again = RunStore.open(store.path)
    assert again.committed == {"c1", "c3"}
    assert "line 5 is damaged" in again.problems[0] and "comparison 'c2' counts as not committed" in again.problems[0]
    assert len(again.problems) == 2 and "as a kill in mid-run leaves them" in again.problems[1]
    assert path.read_bytes() == damaged                                  # opening changes nothing
    (store.path / "readings.parquet").unlink()
    with pytest.warns(UserWarning) as warned:
        assert len(read_table(store.path)) == 4
    assert [str(warning.message).partition("/")[2] for warning in warned] == again.problems
    again.append("c2", rows_of("c2"))
    last = RunStore.open(store.path)
    assert last.problems == [] and last.committed == {"c1", "c2", "c3"}
    assert last.rows() == written(store, "c1") + written(store, "c3") + written(store, "c2")
    again.close()
    assert sorted(file.name for file in store.path.iterdir()) == [".lock", "manifest.json", "readings.jsonl",
                                                                  "readings.parquet"]


def test_a_closed_run_may_go_on_and_its_old_parquet_is_not_read(tmp_path):
    store = new_store(tmp_path)
    store.append("c1", rows_of("c1"))
    store.close()
    assert len(read_table(store.path)) == 2
    again = RunStore.open(store.path)
    assert (store.path / "readings.parquet").exists()
    again.append("c2", rows_of("c2"))
    assert len(read_table(store.path)) == 4
    again.close()
    again.append("c3", rows_of("c3"))                                    # even the same object, after close
    assert len(read_table(store.path)) == 6
    assert RunStore.open(store.path).problems == []


def test_a_journal_that_another_process_went_on_with_is_left_alone(tmp_path):
    store = new_store(tmp_path)
    first, second = RunStore.open(store.path), RunStore.open(store.path)
    first.append("c1", rows_of("c1"))
    first.close()
    with pytest.raises(ValueError, match="another process wrote to it.*open the run again"):
        second.append("c1", rows_of("c1"))
    assert RunStore.open(store.path).rows() == written(store, "c1")


def test_killed_before_the_journal_existed(tmp_path):
    store = new_store(tmp_path)
    (store.path / "readings.jsonl").unlink()
    again = RunStore.open(store.path)
    assert (again.committed, again.problems) == (set(), [])
    again.append("c1", rows_of("c1"))
    assert RunStore.open(store.path).rows() == written(store, "c1")


CHILD = """
import sys
from dataclasses import asdict
from kvlab.record.reading import Reading
from kvlab.record.store import RunStore
store = RunStore.open(sys.argv[1])
for i in range(100_000):
    if f"c{i}" not in store.committed:
        store.append(f"c{i}", [{"case_id": str(k), **asdict(Reading("latency_s", i + k, "s", "measured"))}
                               for k in range(50)])
        print(i, flush=True)
"""


def test_a_writer_killed_at_any_moment_loses_nothing_committed(tmp_path):
    store = new_store(tmp_path)
    seen = set()
    for round_ in range(8):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(store.path)], stdout=subprocess.PIPE, text=True)
        printed = [int(child.stdout.readline())]
        time.sleep(random.Random(round_).uniform(0, 0.05))
        child.kill()
        printed += [int(line) for line in child.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
        child.wait()
        child.stdout.close()
        assert child.returncode != 0
        assert not seen & {f"c{i}" for i in printed}                     # a resumed run repeats none
        seen |= {f"c{i}" for i in printed}
        again = RunStore.open(store.path)
        assert seen <= again.committed and len(again.committed - seen) <= 1
        seen = again.committed
        rows = again.rows()
        assert len(rows) == 50 * len(seen)
        assert all(row["value"] == int(row["comparison_id"][1:]) + int(row["case_id"]) for row in rows)


@pytest.mark.parametrize(("number", "words"), [
    (errno.ENOSPC, "no space left"), (errno.EACCES, "not writable"), (errno.EROFS, "read-only"),
    (errno.EIO, os.strerror(errno.EIO))])
def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, number, words):
    def refuse(*args, **kwargs):
        raise OSError(number, os.strerror(number))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        with pytest.raises(StoreError, match=words) as refused:
            new_store(tmp_path)
    assert str(tmp_path) in str(refused.value) and "choose" in str(refused.value)
    assert refused.value.errno == number and "\n" not in str(refused.value)
    store = new_store(tmp_path)
    store.append("c1", rows_of("c1"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(StoreError, match=words):
            store.append("c2", rows_of("c2"))
        with pytest.raises(StoreError, match=words):
            store.close()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        with pytest.raises(StoreError, match=words):
            _ = store.artifacts
    assert store.committed == {"c1"}
    store.append("c2", rows_of("c2"))                                    # space was made: the same run goes on
    again = RunStore.open(store.path)
    assert again.problems == [] and again.rows() == written(store, "c1") + written(store, "c2")


class FullDisk(io.FileIO):
    """A file whose disk takes `space` more bytes, a few at a time; stuck: and then it cannot even be cut."""
    space, stuck = 0, False

    def truncate(self, size):
        if self.stuck:
            raise OSError(errno.EIO, "Input/output error")
        return super().truncate(size)

    def write(self, data):
        if FullDisk.space == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = super().write(data[:min(FullDisk.space, 100)])
        FullDisk.space -= taken
        return taken


@pytest.mark.parametrize("stuck", [False, True])
@pytest.mark.parametrize("space", [0, 1, 150, 500])
def test_a_disk_that_fills_up_in_the_middle_of_a_comparison(tmp_path, monkeypatch, space, stuck):
    store = new_store(tmp_path)
    store.append("c1", rows_of("c1"))
    monkeypatch.setattr(FullDisk, "space", space)
    monkeypatch.setattr(FullDisk, "stuck", stuck)
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "open", lambda path, mode, buffering: FullDisk(path, "r+"), raising=False)
        with pytest.raises(StoreError, match="no space left"):
            store.append("c2", rows_of("c2", count=4))
    half = RunStore.open(store.path)                                     # as after a kill at this moment
    assert half.rows() == written(store, "c1") and len(half.problems) == (space > 0 and stuck)
    if half.problems:
        with pytest.raises(ValueError, match="open the run again"):
            store.append("c3", rows_of("c3"))
        store = half
    store.append("c3", rows_of("c3"))
    again = RunStore.open(store.path)
    assert again.problems == [] and again.rows() == written(store, "c1") + written(store, "c3")


def test_a_file_or_nothing_where_the_folder_should_be(tmp_path):
    (tmp_path / "file").write_text("x")
    for parent, words in [("file", "a file stands where a folder"), ("file/x", "a file stands where a folder"),
                          ("no/such", "the folder above it does not exist")]:
        with pytest.raises(StoreError, match=words):
            new_store(tmp_path / parent)
    store = new_store(tmp_path)
    (store.path / "samples").write_text("x")
    with pytest.raises(StoreError, match="samples: a file stands"):
        _ = store.artifacts
    with pytest.raises(StoreError, match="file stands"):
        atomic_write(tmp_path / "file" / "x.csv", b"")


def test_what_read_table_accepts_and_refuses(tmp_path):
    store = new_store(tmp_path)
    store.append("c1", rows_of("c1"))
    pd.testing.assert_frame_equal(read_table(store.path), store.table())                    # not closed: the journal
    pd.testing.assert_frame_equal(read_table(str(store.path / "readings.jsonl")), store.table())
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.csv").write_text("x,metric\n1,2\n")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    pd.DataFrame({"x": [1]}).to_parquet(tmp_path / "b.parquet")
    write_parquet(store.table(), tmp_path / "c.parquet")
    arrow = pyarrow.parquet.read_table(tmp_path / "c.parquet")
    for file, version in (("future", "99"), ("odd", "x")):
        metadata = {**arrow.schema.metadata, b"kvlab.schema_version": version}
        pyarrow.parquet.write_table(arrow.replace_schema_metadata(metadata), tmp_path / f"{file}.parquet")
    for file, error, words in [
        ("gone", StoreError, "there are no results at"), ("a.txt", ValueError, "is no result table"),
        ("a.csv", ValueError, "missing or unknown columns .*case_id"), ("empty.csv", ValueError, "read as CSV"),
        ("a.parquet", ValueError, "read as Parquet"), ("b.parquet", ValueError, "schema version 'unknown'"),
        ("future.parquet", ValueError, "schema version 99, and this kvlab reads version 1 to"),
        ("odd.parquet", ValueError, "schema version 'x'"), (".", StoreError, "is no run directory"),
    ]:
        with pytest.raises(error, match=words) as refused:
            read_table(tmp_path / file)
        assert "\n" not in str(refused.value).strip()


def test_a_run_of_another_schema_version_is_refused(tmp_path):
    store = new_store(tmp_path)
    path = store.path / "manifest.json"
    path.write_text(path.read_text().replace(f'"schema_version": {SCHEMA_VERSION}', '"schema_version": 7'))
    for reader in (RunStore.open, read_table):
        with pytest.raises(ValueError, match="schema version 7, and this kvlab reads version 1 to"):
            reader(store.path)


def test_an_unreadable_journal_is_said(tmp_path):
    store = new_store(tmp_path)
    (store.path / "readings.jsonl").unlink()
    (store.path / "readings.jsonl").mkdir()
    with pytest.raises(StoreError, match="readings.jsonl cannot be read"):
        RunStore.open(store.path)


def test_find_run(tmp_path):
    one = new_store(tmp_path, run_id="20260101T000000Z-abc123").path
    two = new_store(tmp_path, run_id="20260102T000000Z-abd456").path
    assert find_run(str(one), tmp_path / "elsewhere") == one
    for words, run in [("20260101", one), ("abc", one), ("abd456", two), ("20260102T000000Z-abd456", two)]:
        assert find_run(words, tmp_path) == run
    for words, message in [("ab", "could be any of 20260101T000000Z-abc123, 20260102T000000Z-abd456"),
                           ("abc124", "Did you mean 'abc123'"), ("20260101T000000Z-abc124", "Did you mean '20260101T"),
                           ("", "no run named ''"), (str(tmp_path), "no run named")]:
        with pytest.raises(KeyError, match=message):
            find_run(words, tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="signals to oneself")
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_waits_until_the_comparison_is_on_disk(tmp_path, monkeypatch, sign):
    store, fsync, arrived = new_store(tmp_path), os.fsync, []
    found = signal.signal(sign, signal.default_int_handler)             # of SIGTERM, as kvlab's command has it

    def interrupted(descriptor):
        signal.raise_signal(sign)
        fsync(descriptor)
        arrived.append(descriptor)                                       # reached: nothing was raised in the middle
    store.hold()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.append("c1", rows_of("c1"))
    assert len(arrived) == 1 and signal.signal(sign, found) is signal.default_int_handler
    assert store.committed == RunStore.open(store.path).committed == {"c1"}
    assert RunStore.open(store.path).problems == []
    store.append("c2", rows_of("c2"))                                    # nothing is left over of it
    assert RunStore.open(store.path).rows() == written(store, "c1") + written(store, "c2")


def test_a_thread_commits_as_well(tmp_path):
    store = new_store(tmp_path)
    thread = threading.Thread(target=store.append, args=("c1", rows_of("c1")))
    thread.start()
    thread.join()
    assert RunStore.open(store.path).committed == {"c1"}
