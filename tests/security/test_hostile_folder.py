"""A stranger's run directory: nothing outside of it is read into what is written, and nothing outside is changed."""
import gzip
import json
import os
import time

import hostile
import pytest

from kvlab.comparing import compare
from kvlab.record.environment import Manifest
from kvlab.record.export import atomic_write, export
from kvlab.record.reading import COLUMNS
from kvlab.record.store import RunStore, StoreError, read_table
from kvlab.report import write_report

PRIVATE = "the-user's-own-words"


@pytest.fixture
def user(tmp_path):
    """A file of the user's outside of any run, which must stay as it is and unread."""
    file = tmp_path / "private" / "notes.txt"
    file.parent.mkdir()
    file.write_text(PRIVATE)
    yield file
    assert file.read_text() == PRIVATE and list(file.parent.iterdir()) == [file]


@pytest.fixture
def run(tmp_path):
    (tmp_path / "runs").mkdir()
    return hostile.run(tmp_path / "runs", "plain")


def with_artifact(run, artifact):
    frame = read_table(run)
    frame["artifact"] = artifact
    (run / "readings.parquet").unlink()
    hostile.as_parquet(frame.astype(COLUMNS), run / "readings.parquet")
    return run


def listing(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("artifact", ["traces/../../../../private/t.json", "traces/link.json", "traces/folder/t.json"])
def test_a_trace_outside_of_the_run_is_not_exported(run, user, artifact, tmp_path):
    trace = json.dumps({"traceEvents": [dict(ph="X", name=PRIVATE, ts=0, dur=1, pid=1, tid=1)]})
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "t.json").write_text(trace)
    (run / "traces").mkdir(exist_ok=True)
    (run / "traces" / "link.json").symlink_to(outside / "t.json")
    (run / "traces" / "folder").symlink_to(outside)
    with pytest.raises(ValueError, match="names a trace outside of itself"):
        export(with_artifact(run, artifact), "chrome-trace", tmp_path / "out.json.gz")
    assert not (tmp_path / "out.json.gz").exists()


@pytest.mark.parametrize("artifact", ["/etc/passwd", "../../../private/notes.txt", "samples/link.parquet", "\x00",
                                      "samples/../../../../private/notes.txt", "file:///etc/passwd", "C:\\win.ini"])
def test_samples_outside_of_the_run_are_never_opened_nor_shown(run, user, artifact, tmp_path):
    (run / "samples").mkdir(exist_ok=True)
    (run / "samples" / "link.parquet").symlink_to(user)
    with_artifact(run, artifact)
    page = write_report(run, tmp_path / "r.html").read_text(encoding="utf-8")
    found = compare(run, run)
    texts = [page, str(found.attrs), found.to_csv()]
    texts += [export(run, form, tmp_path).read_bytes().decode("latin1") for form in ("csv", "parquet", "latex")]
    assert not [text for text in texts if PRIVATE in text or "root:" in text]


def test_ids_and_names_of_a_manifest_are_no_paths(tmp_path, user):
    run = hostile.run(tmp_path / "runs" if (tmp_path / "runs").mkdir() else tmp_path / "runs", "plain")
    manifest = json.loads((run / "manifest.json").read_text())
    manifest.update(run_id="../../../private/x", study="../../private/y", checksum="")
    (run / "manifest.json").write_text(json.dumps(manifest))
    frame = read_table(run).assign(run_id="../../../private/x", study="../../private/y", case_id="../private/z")
    hostile.as_parquet(frame.astype(COLUMNS), run / "readings.parquet")
    out = tmp_path / "out"
    out.mkdir()
    before = listing(tmp_path / "runs")
    made = [export(run, form, out) for form in ("csv", "parquet", "latex")] + [write_report(run, out)]
    assert {path.parent for path in made} == {out} and listing(tmp_path / "runs") == before
    for study in ("../x", "/abs", "a/b", "a\\b", "", "a\x00b"):
        with pytest.raises(ValueError):
            RunStore.create(out, study, Manifest(study=study))


@pytest.mark.parametrize("name", ["report.html.tmp", "report.html", "readings.parquet.tmp", "owner.json.tmp",
                                  "workers.json", "workers.json.tmp"])
def test_links_that_wait_in_a_run_are_not_written_through(run, user, name):
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(user)
    write_report(run)
    if name != "workers.json":                                  # it is read first, and is no such file
        store = RunStore.open(run, hold=True)
        store.met("w", {"cpu": "x"})
        store.close()
    assert user.read_text() == PRIVATE


def test_a_lock_that_is_a_link_empties_no_file(run, user):
    (run / ".lock").unlink(missing_ok=True)
    (run / ".lock").symlink_to(user)
    with pytest.raises(OSError):
        RunStore.open(run, hold=True)


@pytest.mark.parametrize("name", ["samples", "traces", "figures", "worker.log"])
def test_a_run_whose_folders_are_links_is_not_gone_on_with(run, user, name):
    if (run / name).is_dir():
        (run / name).rmdir()
    (run / name).symlink_to(user if name == "worker.log" else user.parent)
    with pytest.raises(StoreError, match=f"{name} is a link, and kvlab writes to none in a run"):
        RunStore.open(run).artifacts  # noqa: B018


def test_a_file_is_replaced_also_where_an_old_half_is_left(tmp_path):
    (tmp_path / "a.tmp").write_text("half")
    atomic_write(tmp_path / "a", b"whole")
    assert (tmp_path / "a").read_bytes() == b"whole" and not (tmp_path / "a.tmp").exists()


# --- files that cost more than they are -----------------------------------------------------------

def test_a_trace_that_unpacks_without_end_is_refused(tmp_path, monkeypatch):
    from kvlab.record import trace
    bomb = tmp_path / "t.json.gz"
    bomb.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * 50_000_000))
    with pytest.raises(ValueError, match="holds more than 1,000,000 bytes of JSON"):
        trace.load(bomb, 1_000_000)
    assert trace.MOST_BYTES <= 2**28


def test_samples_beyond_what_is_read_are_none(run, tmp_path, monkeypatch):
    from kvlab.comparing import _ratio
    import pandas as pd  # isort: skip
    (run / "samples").mkdir(exist_ok=True)
    pd.DataFrame({"case_id": ["c0"] * 9, "round": 1, "seconds": 1e-3}).to_parquet(run / "samples" / "s.parquet")
    monkeypatch.setattr(_ratio, "LARGEST_SAMPLES", 10)
    assert _ratio._read(run / "samples" / "s.parquet", 0) is None


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are Unix's")
def test_a_pipe_in_place_of_a_models_file_is_refused_not_waited_for(tmp_path):
    from kvlab.catalog.resolve import model
    os.mkfifo(tmp_path / "config.json")
    began = time.monotonic()
    with pytest.raises(ValueError, match="is not a regular file"):
        model(str(tmp_path))
    assert time.monotonic() - began < 10


def test_a_parquet_of_few_bytes_and_many_rows_is_read_in_parts(tmp_path):
    """10 million equal rows take a few kB; nothing but a part of them is held at a time."""
    import pyarrow
    import pyarrow.parquet

    from kvlab.record.store import read_parts
    frame = hostile.any_table()
    part = pyarrow.Table.from_pandas(frame.loc[frame.index.repeat(2**14)], preserve_index=False)
    from kvlab.record.reading import SCHEMA_VERSION
    part = part.replace_schema_metadata({"kvlab.schema_version": str(SCHEMA_VERSION), "kvlab.units": "{}"})
    path = tmp_path / "bomb.parquet"
    with pyarrow.parquet.ParquetWriter(path, part.schema, compression="zstd") as writer:
        for _ in range(10):
            writer.write_table(part)
    assert path.stat().st_size < 2**20
    first = next(read_parts(path, lines=1000))
    assert len(first) == 1000
