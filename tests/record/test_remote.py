"""A run at a URL: its copy here grows, what is committed arrives there, another machine reads it and goes on."""
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import fsspec
import pandas as pd
import pytest

from kvlab.claims._results import runs_of
from kvlab.folders import cache_folder
from kvlab.record import held, remote
from kvlab.record._places import is_url
from kvlab.record.environment import Manifest
from kvlab.record.export import StoreError, export
from kvlab.record.query import query
from kvlab.record.reading import Reading
from kvlab.record.store import RunStore, find_run, read_table
from kvlab.report import write_report
from kvlab.verbs._options import results


def row(value):
    return {"case_id": "a", **asdict(Reading("latency_s", value, "s", "measured"))}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "EVERY_S", 0.0)                          # look at once
    monkeypatch.setattr(remote, "SHARE", 0)
    monkeypatch.setattr(held, "_PATIENCE_S", 0.1)


@pytest.fixture(params=["memory", "file"])
def parent(request, tmp_path):
    """Where runs go: an object store without folders, and a folder by its URL."""
    if request.param == "file":
        yield f"file://{tmp_path}/far/runs"
        return
    yield "memory://bucket/runs"
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


def begun(parent):
    return RunStore.create(parent, "memory_wall", Manifest(study="memory_wall", environment={}))


def there(store):
    """name -> bytes of all files at the run's URL."""
    fs, root = remote.opened(store.place)
    fs.invalidate_cache()
    return {path[len(root):].lstrip("/"): fs.cat_file(path) for path in fs.find(root)}


def elsewhere():
    """What another machine has of all runs: nothing."""
    shutil.rmtree(cache_folder("remote"))


def test_what_is_committed_is_there_and_another_machine_reads_it(parent):
    store = begun(parent)
    assert store.place == f"{parent}/memory_wall/{store.manifest.run_id}" and store.path.is_dir()
    store.append("c1", [row(1.0)])
    (store.artifacts / "samples" / "a.bin").write_bytes(b"samples")
    store.append("c2", [row(2.0), row(3.0)])
    found = there(store)
    assert b"".join(found[name] for name in sorted(found) if name.startswith("readings/")) == (
        store.path / "readings.jsonl").read_bytes()
    assert found["samples/a.bin"] == b"samples" and "readings.parquet" not in found and "owner.json" in found
    expected = store.table()
    elsewhere()                                                          # the machine that measures is gone
    pd.testing.assert_frame_equal(read_table(store.place), expected)
    run = find_run(store.place, "profiles")
    assert (run / "samples" / "a.bin").read_bytes() == b"samples" and run.name == store.manifest.run_id
    with pytest.raises(StoreError, match="marked as being written from another machine since 20.*its owner.json"):
        RunStore.open(store.place, hold=True)
    fs, root = remote.opened(store.place)
    fs.rm_file(f"{root}/owner.json")                                     # as the message says
    again = RunStore.open(store.place, hold=True)
    assert again.committed == {"c1", "c2"} and again.place == store.place
    again.append("c3", [row(4.0)])
    again.close()
    found = there(again)
    assert "owner.json" not in found and found["readings.parquet"][:4] == b"PAR1"
    elsewhere()
    assert list(read_table(again.place)["value"]) == [1.0, 2.0, 3.0, 4.0]
    more = RunStore.open(again.place)                                    # reading marks nothing
    assert "owner.json" not in there(again)
    more.append("c4", [row(5.0)])
    assert "readings.parquet" not in there(more), "it is out of date"
    more.close()
    more.share()
    assert len(read_table(more.path)) == 5


def test_the_same_machine_goes_on_after_a_kill_also_where_the_url_lags(parent, monkeypatch):
    store = begun(parent)
    store.append("c1", [row(1.0)])
    monkeypatch.setattr(remote, "EVERY_S", 1e9)
    store.append("c2", [row(2.0)])                                       # looks once more, and then not again
    store.append("c3", [row(3.0)])
    assert len(there(store)) == 3 and sum(map(len, there(store).values())) < (store.path / "readings.jsonl").stat(
        ).st_size + 2000
    store._held.let_go()                                                 # killed: the system lets the lock go
    again = RunStore.open(store.place, hold=True)
    assert again.committed == {"c1", "c2", "c3"}, "the copy is further than the URL, and is kept"
    again.close()
    elsewhere()
    assert list(read_table(store.place)["value"]) == [1.0, 2.0, 3.0]


def test_a_copy_that_another_machine_overtook_is_brought_up_to_date_or_refused(parent, tmp_path):
    store = begun(parent)
    store.append("c1", [row(1.0)])
    store.close()
    behind = tmp_path / "behind"
    shutil.copytree(store.path, behind)
    store.append("c2", [row(2.0)])
    store.close()
    apart = RunStore.open(behind)                                        # a copy of the copy, or a stranger's
    with pytest.raises(StoreError, match="is a copy of the run at .*: give the URL .* delete the copy's remote.json"):
        apart.append("other", [row(9.0)])
    shutil.rmtree(store.path)
    shutil.copytree(behind, store.path)
    with pytest.raises(StoreError, match="went on without its copy .*give the URL"):
        RunStore.open(store.path, hold=True)                             # by its folder
    assert RunStore.open(store.place).committed == {"c1", "c2"}
    (behind / "remote.json").unlink()                                    # as the message says
    RunStore.open(behind).append("other", [row(9.0)])


def test_pieces_are_few_however_often_it_is_looked_and_one_that_is_gone_is_sent_again(parent, monkeypatch):
    monkeypatch.setattr(remote, "PIECE", 1000)
    store = begun(parent)
    for n in range(30):
        store.append(f"c{n}", [row(float(n))])
    store.close()
    pieces = sorted(name for name in there(store) if name.startswith("readings/"))
    size = (store.path / "readings.jsonl").stat().st_size
    assert len(pieces) == -(-size // 1000) < 30 and pieces[1] == "readings/000000000001000.jsonl"
    fs, root = remote.opened(store.place)
    fs.rm_file(f"{root}/{pieces[2]}")
    again = RunStore.open(store.path, hold=True)
    again.close()
    assert sorted(name for name in there(store) if name.startswith("readings/")) == pieces
    elsewhere()
    assert list(read_table(store.place)["value"]) == [float(n) for n in range(30)]


def test_a_machine_that_was_taken_for_lost_stops_and_harms_nothing(parent, tmp_path):
    store = begun(parent)
    store.append("c1", [row(1.0)])
    shutil.copytree(cache_folder("remote"), tmp_path / "first")          # as this machine has it
    fs, root = remote.opened(store.place)
    fs.pipe_file(f"{root}/owner.json", b'{"since": "2030-01-01T00:00:00Z", "token": "of the second machine"}')
    before = there(store)
    with pytest.raises(StoreError, match="another machine has gone on with .* is kept at "):
        store.append("c2", [row(2.0)])
    with pytest.raises(StoreError, match="another machine has gone on with "):
        store.close()
    assert there(store) == before
    assert RunStore.open(store.path).committed == {"c1", "c2"}


def test_a_run_that_is_written_here_is_not_touched_by_those_who_read_its_url(parent, monkeypatch):
    store = begun(parent)
    store.met("a", {"cpu": "one"})
    store.append("c1", [row(1.0)])
    monkeypatch.setattr(remote, "EVERY_S", 1e9)
    store.append("c2", [row(2.0)])
    store.met("b", {"cpu": "two"})                                       # what the URL has of it is older
    assert len(read_table(store.place)) == 2 and set(store.workers) == {"a", "b"}
    store.append("c3", [row(3.0)])
    store.close()


def test_one_file_of_results_at_a_url_is_a_table_too(tmp_path, parent):
    store = begun("memory://bucket/runs")
    store.append("c1", [row(1.0)])
    store.close()
    fs, root = remote.opened(f"{parent}/table.parquet")
    fs.makedirs(root.rpartition("/")[0], exist_ok=True)
    fs.pipe_file(root, (store.path / "readings.parquet").read_bytes())
    assert list(read_table(f"{parent}/table.parquet")["value"]) == [1.0]
    assert find_run(f"{parent}/table.parquet", "profiles").suffix == ".parquet"
    with pytest.raises(StoreError, match="none.csv cannot be read or written"):
        read_table(f"{parent}/none.csv")
    with pytest.raises(KeyError, match="is not looked for in .*; give the run's URL"):
        find_run("abc123", parent)


def test_damage_is_left_out_there_too(parent):
    store = begun(parent)
    for name in ("c1", "c2"):
        store.append(name, [row(1.0)])
    store.close()
    journal = store.path / "readings.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b"1.0", b"7.0", 1))
    fs, root = remote.opened(store.place)
    for name, data in there(store).items():
        if name.startswith("readings/") and b"1.0" in data and b'"c1"' in data:
            fs.pipe_file(f"{root}/{name}", data.replace(b"1.0", b"7.0", 1))
    again = RunStore.open(store.place, hold=True)
    assert again.committed == {"c2"} and "is damaged" in again.problems[0]
    again.append("c1", [row(1.0)])
    again.close()
    elsewhere()
    assert RunStore.open(store.place).problems == [] and len(read_table(store.place)) == 2


def test_a_place_that_fails_for_a_while_is_said_and_nothing_is_lost(parent, monkeypatch, capsys):
    store = begun(parent)
    store.append("c1", [row(1.0)])
    fs, _ = remote.opened(store.place)

    def refuse(*args, **options):
        raise TimeoutError("the bucket\ndoes not answer")
    with monkeypatch.context() as patch:
        patch.setattr(type(fs), "pipe_file", refuse)
        store.append("c2", [row(2.0)])
        said = capsys.readouterr().err
        assert "cannot be read or written: the bucket; tried again later" in said and said.count("\n") == 1
        with pytest.raises(StoreError, match="all is kept at .*complete the copy with --resume"):
            store.close()
    again = RunStore.open(store.path, hold=True)
    again.close()
    elsewhere()
    assert list(read_table(store.place)["value"]) == [1.0, 2.0]


def test_places_that_cannot_be(tmp_path, monkeypatch):
    for url, words in [("nosuch://x/y", "Protocol not known: nosuch"), ("oci://bucket/runs", "opened: Install ")]:
        with pytest.raises(ValueError, match=words):
            begun(url)
    assert not cache_folder("remote").exists(), "refused before anything is made"
    with pytest.raises(StoreError, match="is no run: it holds no manifest.json"):
        read_table(f"file://{tmp_path}/none/memory_wall/run")
    with pytest.raises(ValueError) as said:
        begun("nosuch://me:secret@server/runs")
    assert "secret" not in str(said.value)
    for url in ("s3://run", "s3://bucket/..", "file:///runs/../x"):
        with pytest.raises(ValueError, match="is no URL of a run"):
            read_table(url)
    assert is_url("s3://bucket/x") and not is_url("profiles/x") and not is_url(tmp_path)


def test_a_listing_that_would_leave_the_folder_is_refused(monkeypatch):
    store = begun("memory://bucket/runs")
    store.append("c1", [row(1.0)])
    store.close()
    fs, root = remote.opened(store.place)
    for name in (f"{root}/../../evil", "/elsewhere/manifest.json", f"{root}/a\\b", root):
        monkeypatch.setattr(type(fs), "find", lambda self, path, detail, name=name: {name: {"size": 1}})
        with pytest.raises(ValueError, match="is not a file of the run"):
            remote.fetched(store.place)


def test_a_mark_that_is_damaged_is_said():
    store = begun("memory://bucket/runs")
    (store.path / "remote.json").write_text("{}")
    with pytest.raises(ValueError, match="remote.json is damaged; delete it, and give the URL again"):
        RunStore.open(store.path)


def test_a_copied_mark_asks_nobody_to_read_and_a_pipe_in_its_place_is_refused(tmp_path):
    """A stranger's run may name any server."""
    store = RunStore.create(tmp_path, "memory_wall", Manifest(study="memory_wall", environment={}))
    store.append("c1", [row(1.0)])
    store.close()
    (store.path / "remote.json").write_text('{"url": "nosuch://server/runs/memory_wall/x", "token": "t"}')
    strange = RunStore.open(store.path)
    assert strange.committed == {"c1"} and len(read_table(store.path)) == 1
    with pytest.raises(StoreError, match="is a copy of the run at nosuch://server"):
        strange.append("c2", [row(2.0)])
    if hasattr(os, "mkfifo"):
        (store.path / "remote.json").unlink()
        os.mkfifo(store.path / "remote.json")
        with pytest.raises(StoreError, match="remote.json cannot be read: it is no regular file"):
            RunStore.open(store.path)


def test_every_verb_takes_a_url(parent, tmp_path, monkeypatch):
    store = begun(parent)
    store.append("c1", [row(1.0)])
    store.close()
    monkeypatch.chdir(tmp_path)
    file = f"{store.place}/readings.parquet"
    assert results(store.place) == store.path and results(file).name == "readings.parquet"
    assert export(store.place, "csv").name == f"{store.path.name}.csv"
    assert write_report(store.place) == Path(f"{store.path.name}.html") and Path(f"{store.path.name}.html").is_file()
    for url in (store.place, file):
        assert query("SELECT count(*) AS n FROM readings", url)["n"].tolist() == [1]
        assert set(runs_of([url])) == {"memory_wall"}
    with pytest.raises(StoreError, match="is no run: .*; give the URL of a run"):
        query("SELECT 1", parent)
