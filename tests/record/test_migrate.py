"""What kvlab of each past schema version wrote is read, resumed and exported by this one."""
import shutil
from pathlib import Path

import pandas as pd
import pyarrow.parquet
import pytest

from kvlab.record.environment import Manifest
from kvlab.record.export import export
from kvlab.record.migrate import ADDED, check_schema_version, migrated, version_of
from kvlab.record.reading import COLUMNS, SCHEMA_VERSION
from kvlab.record.store import RunStore, read_table

PAST = Path(__file__).parent / "past"
VERSIONS = range(1, SCHEMA_VERSION)


@pytest.fixture(params=VERSIONS, ids=lambda version: f"v{version}")
def past(request, tmp_path):
    """A copy of the run that kvlab of a past version wrote: three comparisons of 2, 1 and 0 rows."""
    shutil.copytree(PAST / f"v{request.param}", tmp_path / "run")
    return request.param, tmp_path / "run"


def expected():
    """What was measured in each of those runs, in the columns that every version has."""
    table = pd.DataFrame(dict(comparison_id=["c1", "c1", "c2"], metric=["latency_s", "power", "latency_s"],
                              value=[1.25e-3, None, None], kind=["measured", "missing", "missing"],
                              status=["ok", "ok", "oom"], variant=["sdpa", "sdpa", "paged"],
                              note=["µs, 第一行", "no sensor", "it was killed"]))
    return table.astype({name: COLUMNS[name] for name in table})


def check(table):
    assert list(table.columns) == list(COLUMNS) and dict(table.dtypes.astype(str)) == COLUMNS
    pd.testing.assert_frame_equal(table[list(expected())], expected())
    assert list(table["block_size"].fillna(0)) == [0, 0, 16] and set(table["worker"]) == {""}


def test_every_past_version_has_a_run_here():
    assert sorted(folder.name for folder in PAST.iterdir()) == [f"v{version}" for version in VERSIONS]
    assert set(ADDED) == set(range(2, SCHEMA_VERSION + 1)), "each version says what it added"
    for version in VERSIONS:
        metadata = pyarrow.parquet.read_schema(PAST / f"v{version}" / "readings.parquet").metadata
        assert metadata[b"kvlab.schema_version"] == b"%d" % version
        assert Manifest.read(PAST / f"v{version}").schema_version == version


@pytest.mark.parametrize("what", [".", "readings.parquet", "readings.jsonl", "table.csv"])
def test_a_past_run_is_read_in_every_form(past, what):
    check(read_table(past[1] / what))


def test_a_past_run_is_resumed_and_is_one_of_today_then(past):
    version, path = past
    before = (path / "manifest.json").read_bytes()
    store = RunStore.open(path)
    assert store.committed == {"c1", "c2", "empty"} and store.problems == []
    assert (path / "manifest.json").read_bytes() == before                  # reading changes nothing
    row = {"case_id": "c3-a", "worker": "3fa2c1/gpu0", "metric": "latency_s", "value": 2.0, "unit": "s",
           "kind": "measured", "status": "ok"}
    store.append("c3", [row])
    store.close()
    again = RunStore.open(path)
    assert again.manifest.schema_version == SCHEMA_VERSION and again.problems == []
    assert again.manifest.model_copy(update={"schema_version": version}) == Manifest.read(PAST / f"v{version}")
    table = read_table(path)
    check(table.iloc[:3])
    assert list(table["worker"]) == ["", "", "", "3fa2c1/gpu0"]


def test_a_past_run_is_exported_as_one_of_today(past, tmp_path):
    for form in ("csv", "parquet"):
        check(read_table(export(past[1], form, tmp_path)))


def test_a_version_that_is_not_known_is_said_in_one_sentence():
    assert [check_schema_version(version, "here") for version in (1, SCHEMA_VERSION)] == [1, SCHEMA_VERSION]
    known = f"and this kvlab reads version 1 to {SCHEMA_VERSION}; "
    for got, todo in [(SCHEMA_VERSION + 1, "a newer kvlab wrote them: upgrade"), (0, "read them with the kvlab that"),
                      ("unknown", "or run the study again"), (None, "or run"), (True, "or run"), (1.0, "or run")]:
        with pytest.raises(ValueError) as refused:
            check_schema_version(got, "profiles/x")
        assert f"profiles/x has results of schema version {got!r}, {known}" in str(refused.value)
        assert todo in str(refused.value)


def test_columns_say_the_version_where_nothing_else_does():
    assert version_of(set(COLUMNS)) == SCHEMA_VERSION
    assert version_of(set(COLUMNS) - {"worker"}) == 1
    old = pd.DataFrame({"value": [1.0]})
    assert list(migrated(old, 1)["worker"]) == [""] and list(migrated(old, SCHEMA_VERSION)) == ["value"]
