"""What was damaged on disk is refused in one sentence or left out and said: no file is read as another one."""
import json
import random
from dataclasses import asdict

import pyarrow.parquet
import pytest

from kvlab.record.environment import Manifest
from kvlab.record.export import sealed, unsealed
from kvlab.record.query import query
from kvlab.record.reading import Reading, missing
from kvlab.record.store import RunStore, read_table

ROWS = [{"case_id": "a", "note": "µs", **asdict(Reading("latency_s", 1.0, "s", "measured"))},
        {"case_id": "b", **asdict(missing("power", "W", "no sensor"))}]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A closed run of twenty comparisons, with the environment of one worker."""
    store = RunStore.create(tmp_path_factory.mktemp("runs"), "memory_wall", Manifest(
        study="memory_wall", environment={"cpu": "one", "memory_bytes": 2**36}, options={"size": "small", "x": 0.1}))
    for number in range(20):
        store.append(f"c{number}", ROWS)
    store.met("3fa2c1/gpu0", {"cpu": "two", "load_average": 0.25})
    store.close()
    return store.path


def copy_of(run, parent):
    copied = parent / run.name
    copied.mkdir()
    for path in run.glob("*.*"):
        (copied / path.name).write_bytes(path.read_bytes())
    return copied


def flipped(data, rng):
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1:]


@pytest.mark.parametrize("name, read", [
    ("manifest.json", Manifest.read), ("workers.json", lambda run: RunStore.open(run).workers),
    ("readings.parquet", lambda run: read_table(run).to_dict("list")),
    ("readings.parquet", lambda run: query("SELECT * FROM readings", run).to_dict("list"))])
def test_a_flipped_bit_is_refused_in_a_sentence_or_changes_nothing(run, tmp_path, name, read):
    here, rng, refused = copy_of(run, tmp_path), random.Random(1), 0
    data, right = (run / name).read_bytes(), read(run)
    for _ in range(80):
        (here / name).write_bytes(flipped(data, rng))
        try:
            assert str(read(here)) == str(right)
        except ValueError as error:
            refused += 1
            assert "\n" not in str(error) and run.name in str(error)
    assert refused > 30


def unsealed_table(run):
    """The readings as kvlab wrote them before their file had a checksum."""
    path = run / "readings.parquet"
    table = pyarrow.parquet.read_table(path)
    about = {name: said for name, said in table.schema.metadata.items() if name != b"kvlab.seal"}
    pyarrow.parquet.write_table(table.replace_schema_metadata(about), path, write_page_checksum=True)
    return path


def test_a_table_without_a_checksum_is_read_whole_or_refused(run, tmp_path):
    path = unsealed_table(copy_of(run, tmp_path))
    data, right, said = path.read_bytes(), str(read_table(run).to_dict("list")), []
    head = pyarrow.parquet.read_metadata(path).row_group(0).column(0).data_page_offset
    name = data.index(b"case_id", len(data) - 8 - int.from_bytes(data[-8:-4], "little"))
    for at in (*range(head, head + 32), *range(name, name + 7)):
        for bit in range(8):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1:])
            try:
                assert str(read_table(path).to_dict("list")) == right
            except ValueError as error:
                said.append(str(error))
    assert all(str(path) in one and "\n" not in one for one in said)
    assert any("(40 rows fewer than its footer says)" in one for one in said)
    assert any("codec can't decode" in one for one in said)


def test_a_table_that_someone_wrote_again_is_theirs(run, tmp_path):
    path = copy_of(run, tmp_path) / "readings.parquet"
    table = pyarrow.parquet.read_table(path)
    pyarrow.parquet.write_table(table.slice(0, 4), path)                 # the old checksum goes with the metadata
    assert b"kvlab.seal" in table.schema.metadata and len(read_table(path)) == 4


def test_a_changed_number_in_a_manifest_is_said(run, tmp_path):
    path = copy_of(run, tmp_path) / "manifest.json"
    path.write_text(path.read_text().replace("68719476736", "68719476737"))
    with pytest.raises(ValueError, match="manifest.json is damaged: its checksum does not agree: .*; the readings"):
        RunStore.open(path.parent)
    content = json.loads(path.read_text())
    del content["checksum"]                                              # as the first manifests were
    path.write_text(json.dumps(content))
    assert RunStore.open(path.parent).manifest.environment["memory_bytes"] == 68719476737


def test_what_is_sealed_comes_back_in_any_order_of_its_keys():
    content = {"b": [1, 0.1, None, "µ\ud800"], "a": {"y": True, "x": 1e300}}
    again = json.loads(sealed(content))
    assert unsealed(again) == content == unsealed(dict(reversed(again.items())))
    assert unsealed(content) == content


def test_a_run_that_is_gone_on_with_is_left_clean_also_where_nothing_was_missing(run, tmp_path):
    here = copy_of(run, tmp_path)
    journal = here / "readings.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole * 2)
    store = RunStore.open(here)
    assert len(store.committed) == 20 and len(store.problems) == 20
    store.close()
    assert journal.read_bytes() == whole * 2, "whoever does not hold a run leaves its journal alone"
    store = RunStore.open(here, hold=True)
    store.close()
    assert journal.read_bytes() == whole and RunStore.open(here).problems == []
