"""Files are written whole or not at all, and say their units and schema version."""
import errno
import json
import string
from dataclasses import asdict

import pandas as pd
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlab.record import export
from kvlab.record.export import StoreError, atomic_write, write_csv, write_parquet
from kvlab.record.reading import Reading, missing, table
from kvlab.record.store import read_table

number = st.floats(allow_nan=False, allow_infinity=False)


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    atomic_write(path, b"old")
    def refuse(*args):
        raise OSError(errno.ENOSPC, "full")
    monkeypatch.setattr(export.os, "replace", refuse)
    with pytest.raises(StoreError, match="no space left"):
        atomic_write(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_parquet_carries_units_and_schema_version_and_refuses_bad_tables(tmp_path):
    frame = table(
        asdict(reading) for reading in (Reading("latency_s", 1.5, "s", "measured", note="µs", n=30),
                                        missing("power", "W", "no sensor")))
    write_parquet(frame, tmp_path / "a.parquet")
    metadata = pyarrow.parquet.read_schema(tmp_path / "a.parquet").metadata
    assert json.loads(metadata[b"kvlab.units"]) == {"latency_s": "s", "power": "W"}
    assert metadata[b"kvlab.schema_version"] == b"1"
    pd.testing.assert_frame_equal(read_table(tmp_path / "a.parquet"), frame)
    with pytest.raises(Exception, match="the value is null exactly"):
        write_parquet(frame.assign(value=1.0), tmp_path / "b.parquet")
    assert not (tmp_path / "b.parquet").exists()


printable = st.text(string.printable + "µ≥中", max_size=8)


csv_row = st.fixed_dictionaries({
    "value": st.none() | number, "kv_len": st.none() | st.integers(-2**63, 2**63 - 1),
    "note": printable | st.sampled_from(["NA", "nan", "None", "1", "a\r\nb", '"', ","])})


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(csv_row, max_size=5))
def test_csv_round_trip(tmp_path, rows):
    write_csv(table(rows), tmp_path / "a.csv")
    frame = table({**row, "note": row["note"].replace("\r\n", "\n").replace("\r", "\n")} for row in rows)
    pd.testing.assert_frame_equal(read_table(tmp_path / "a.csv"), frame, check_exact=True)
