"""Readings refuse what is not a number with a kind; the table has the columns of the design."""
import dataclasses
import math
import subprocess
import sys

import numpy as np
import pandas as pd
import pandera.errors
import pytest

from kvlab.record.reading import (
    COLUMNS,
    KINDS,
    Reading,
    complete,
    failed,
    missing,
    schema,
    table,
    weakest,
)

GOOD = dict(metric="latency_s", value=0.5, unit="s", kind="measured")


def test_a_reading_is_frozen_and_its_numbers_are_plain_floats():
    reading = Reading("hbm_bytes", np.float32(2), "B", "simulated", low=1, high=np.int64(3), n=5)
    assert (reading.value, reading.low, reading.high, reading.n) == (2.0, 1.0, 3.0, 5)
    assert {type(reading.value), type(reading.low), type(reading.high)} == {float}
    assert reading == Reading("hbm_bytes", 2, "B", "simulated", low=1, high=3, n=5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        reading.value = 1.0


@pytest.mark.parametrize(("change", "words"), [
    (dict(kind="guessed"), "kind 'guessed' is unknown; allowed: measured, simulated, modelled, quoted, missing"),
    (dict(status="maybe"), "status 'maybe' is unknown; allowed: ok, skipped, failed, oom"),
    (dict(value=math.nan), "not a finite number"),
    (dict(value=-math.inf), "not a finite number"),
    (dict(value=True), "not a finite number"),
    (dict(value="3"), "not a finite number"),
    (dict(high=math.nan), "high=nan is not a finite number"),
    (dict(value=None), "does not go with value None"),
    (dict(kind="missing"), "does not go with value 0.5"),
    (dict(kind="missing", value=None), "needs a note"),
    (dict(status="failed", error="boom"), "status 'failed' needs kind 'missing'"),
    (dict(status="oom", kind="missing", value=None, note="why"), "and an error text"),
    (dict(unit=""), "needs a metric and a unit"),
])
def test_what_a_reading_refuses(change, words):
    with pytest.raises(ValueError) as refused:
        Reading(**{**GOOD, **change})
    assert words in str(refused.value)


def test_missing_and_failed_carry_the_reason():
    absent = missing("power", "W", "LibraryNotFound: no NVIDIA driver", source="nvml", scope="comparison")
    assert (absent.value, absent.kind, absent.status, absent.error) == (None, "missing", "ok", "")
    assert (absent.note, absent.source, absent.scope) == ("LibraryNotFound: no NVIDIA driver", "nvml", "comparison")
    broken = failed("latency_s", "s", "killed by the kernel", status="oom")
    assert (broken.kind, broken.status, broken.note, broken.error) == ("missing", "oom") + 2 * ("killed by the kernel",)
    assert failed("latency_s", "s", "raised ValueError").status == "failed"
    with pytest.raises(ValueError, match="needs a note"):
        missing("power", "W", "")


def test_a_derived_number_is_never_stronger_than_its_weakest_input():
    for i, strong in enumerate(KINDS):
        for weak in KINDS[i:]:
            assert weakest([strong, weak]) == weakest([weak, strong, strong]) == weak
    for wrong in ([], ["measured", "guessed"]):
        with pytest.raises(ValueError, match="all of: measured"):
            weakest(wrong)


def test_columns_are_those_of_the_design_in_order():
    assert " ".join(COLUMNS) == (
        "run_id comparison_id case_id study variant device worker dtype kv_format format_path block_size page_order "
        "phase batch_size q_len kv_len num_q_heads num_kv_heads group_ratio head_dim model data threads seed replica "
        "case metric value unit kind method source hardware scope window_s n low high rel_std cache_state denominator "
        "artifact note status error")
    assert (COLUMNS["block_size"], COLUMNS["value"], COLUMNS["note"]) == ("Int64", "float64", "string")


def test_a_table_has_every_column_and_its_dtype_even_with_no_rows():
    one = table([{"case_id": "a", "kv_len": 4096, **dataclasses.asdict(Reading(**GOOD))}])
    for frame in (one, table([])):
        assert list(frame.columns) == list(COLUMNS)
        assert {name: str(dtype) for name, dtype in frame.dtypes.items()} == COLUMNS
    line = one.iloc[0]
    assert (line.kv_len, line.value, line.variant, line.note) == (4096, 0.5, "", "")
    assert pd.isna(line.block_size) and pd.isna(line.low)


def test_rows_are_completed_and_wrong_columns_refused():
    full = complete({"n": np.int64(3), "value": np.float32(1), "low": math.nan, "block_size": None, "error": "\ud800é"})
    assert list(full) == list(COLUMNS)
    assert (full["n"], full["value"], full["low"], full["block_size"], full["error"]) == (3, 1.0, None, None, "?é")
    with pytest.raises(KeyError, match="no result column named 'kvlen'. Did you mean 'kv_len'"):
        complete({"kvlen": 1})
    for wrong, words in [({"kv_len": 1.5}, "takes a whole number, got 1.5"), ({"kv_len": True}, "a whole number"),
                         ({"variant": 3}, "takes text, got 3"), ({"value": "3"}, "takes a number"),
                         ({"high": math.inf}, "infinite")]:
        with pytest.raises(ValueError, match=words):
            complete(wrong)


def frame_of(*changes):
    base = {**dataclasses.asdict(Reading(**GOOD)), "case_id": "a"}
    return table({**base, **change} for change in changes)


def test_the_schema_accepts_good_tables():
    good = frame_of({}, {"kind": "missing", "value": None, "note": "why"},
                    {"metric": "power", "unit": "W", "kind": "missing", "value": None, "note": "w", "error": "w",
                     "status": "oom"})
    assert schema().validate(good).equals(good)
    assert len(schema().validate(table([]))) == 0


@pytest.mark.parametrize(("change", "words"), [
    ({"kind": "guessed"}, "kind"), ({"status": "maybe"}, "status"), ({"value": None}, "the value is null exactly"),
    ({"kind": "missing", "note": "why"}, "the value is null exactly"),
    ({"kind": "missing", "value": None}, "has a note"), ({"status": "failed", "error": "x"}, "status other than ok"),
    ({"unit": "ms"}, "one unit"),
])
def test_the_schema_refuses_bad_rows(change, words):
    with pytest.raises(pandera.errors.SchemaError, match=words):
        schema().validate(frame_of({}, change))


def test_the_schema_refuses_other_columns():
    with pytest.raises(pandera.errors.SchemaErrors, match="'extra' not in"):
        schema().validate(frame_of({}).assign(extra=1))
    with pytest.raises((pandera.errors.SchemaError, pandera.errors.SchemaErrors), match="'note' not in"):
        schema().validate(frame_of({}).drop(columns="note"))


def test_importing_the_room_loads_no_heavy_library():
    code = ("import sys, kvlab.record.reading; heavy = {'torch', 'pandas', 'pyarrow', 'pandera', 'pydantic', 'numpy'};"
            "assert not heavy & set(sys.modules), heavy & set(sys.modules);"
            "import kvlab.record.store, kvlab.record.wide, kvlab.record.export;"
            "heavy = {'torch', 'pandas', 'pyarrow', 'pandera', 'matplotlib'};"
            "assert not heavy & set(sys.modules), heavy & set(sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
