"""SQL over many runs: what is in the tables, what a query may not do, and which runs are left out with a sentence."""
import json
import os
import re
import shutil
import warnings
from dataclasses import asdict
from pathlib import Path

import duckdb
import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest

from kvlab.bench_store import synthetic_file, synthetic_runs
from kvlab.record.environment import Manifest
from kvlab.record.query import READINGS, RUNS, opened, query
from kvlab.record.reading import Reading, failed, schema
from kvlab.record.sources import Bad, sources
from kvlab.record.store import RunStore, read_table

PAST = Path(__file__).parent / "past" / "v1"
ENVIRONMENT = {"cpu": "a CPU", "logical_cores": 8, "memory_bytes": 2**35, "torch": "2.13.0", "kvlab": "0.1.0",
               "gpus": [{"name": "NVIDIA H200"}, {"name": "NVIDIA H200"}]}
COUNT = "SELECT count(*) AS n FROM readings"


@pytest.fixture
def make(tmp_path):
    """A run of so many comparisons of two readings each; returns its directory."""
    def run(comparisons=2, close=True, study="memory_wall", **more):
        store = RunStore.create(tmp_path / "profiles", study, Manifest(study=study, environment=ENVIRONMENT, **more))
        for i in range(comparisons):
            store.append(f"c{i}", [asdict(Reading("latency_s", i + 0.5, "s", "measured")) | dict(kv_len=2**i),
                                   asdict(failed("power", "W", "no sensor"))])
        if close:
            store.close()
        return store.path
    return run


def refused(sql, *stores, **more):
    """The one sentence of a query that is refused."""
    with pytest.raises(ValueError) as error:
        query(sql, *stores, **more)
    assert "\n" not in str(error.value)
    return str(error.value)


def rewritten(run, change):
    """A run's Parquet file with another table, the metadata as it was."""
    path = run / "readings.parquet"
    found = pyarrow.parquet.read_table(path)
    pyarrow.parquet.write_table(change(found).replace_schema_metadata(found.schema.metadata), path)


def test_readings_are_the_result_table_of_all_runs_and_runs_say_where_they_are_from(make, tmp_path):
    first, second = make(2), make(1, study="kernels", size="small", device="cuda")
    assert query(COUNT, tmp_path / "profiles").n[0] == 6
    whole = query("SELECT * FROM readings ORDER BY run_id, comparison_id, metric", tmp_path / "profiles")
    theirs = pd.concat([read_table(first), read_table(second)]).sort_values(["run_id", "comparison_id", "metric"])
    pd.testing.assert_frame_equal(whole, theirs.reset_index(drop=True), check_dtype=False)
    assert list(map(str, whole.dtypes)) == list(map(str, theirs.dtypes))
    found = query("SELECT * FROM runs ORDER BY study", first, second)
    assert list(found) == list(RUNS)
    assert found.loc[0, ["study", "size", "device", "state", "gpus", "cpu", "cores", "torch", "path"]].to_list() == [
        "kernels", "small", "cuda", "closed", "2 × NVIDIA H200", "a CPU", 8, "2.13.0", str(second)]
    joined = query("SELECT cpu, count(*) AS n, environment->>'torch' AS torch FROM readings JOIN runs USING (run_id) "
                   "WHERE kind = 'measured' GROUP BY ALL", first, second)
    assert joined.to_dict("records") == [dict(cpu="a CPU", n=3, torch="2.13.0")]


def test_an_unfinished_run_counts_with_what_is_committed_and_damage_in_its_journal_is_said(make):
    run = make(3, close=False)
    journal = run / "readings.jsonl"
    journal.write_bytes(journal.read_bytes()[:-10])                         # the last commit line is torn
    with pytest.warns(UserWarning, match="readings without their whole commit"):
        found = query("SELECT count(*) AS n, any_value(state) AS state FROM readings JOIN runs USING (run_id)", run)
    assert found.to_dict("records") == [dict(n=4, state="unfinished")]


@pytest.mark.parametrize("name", ["", "readings.parquet", "table.csv", "readings.jsonl"])
def test_results_of_version_1_have_the_columns_of_today(make, name):
    now = make(1)
    found = query("SELECT * FROM readings WHERE run_id LIKE '%0a1b2c'", PAST / name, now)
    pd.testing.assert_frame_equal(found, read_table(PAST / name), check_dtype=False)
    assert (found["worker"] == "").all() and len(found) and list(found) == list(READINGS)
    assert len(query("SELECT DISTINCT run_id FROM readings JOIN runs USING (run_id)", PAST / name, now)) == 2


def test_stores_are_runs_ids_folders_files_patterns_and_the_reference(make, tmp_path, monkeypatch):
    run = make(2)
    make(1, study="kernels")
    monkeypatch.chdir(tmp_path)
    for stores, n in (((), 6), (("profiles",), 6), (("profiles/kernels",), 2), ((run, "profiles"), 6),
                      ((run.name[-6:],), 4), (("profiles/*/*",), 6), (("profiles/*/*/*.parquet",), 6),
                      ((run / "readings.jsonl",), 4), ((run, run / "readings.parquet"), 4)):
        assert query(COUNT, *stores).n[0] == n, stores
    shipped = query("SELECT study, count(*) AS n FROM readings JOIN runs USING (run_id, study) WHERE cpu <> '' "
                    "GROUP BY study", "reference").set_index("study").n
    assert len(shipped) == 11 and shipped.memory_wall == 2614


@pytest.mark.parametrize("store, says", [
    ("none/at/all", "no results at none/at/all"), ("x.parquet", "no results at x.parquet"), ("*.csv", "a name like"),
    ("empty", "holds no runs"), ("text.txt", "is no result table"), ("abcdef", "no run named 'abcdef'")])
def test_a_store_that_is_not_there_is_one_sentence(tmp_path, monkeypatch, store, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").touch()
    with pytest.raises((ValueError, OSError, KeyError), match=re.escape(says)):
        query(COUNT, store)


def test_a_run_does_not_count_twice(make, tmp_path):
    run = make(1)
    shutil.copytree(run, tmp_path / "profiles" / "memory_wall" / "copy")
    with pytest.warns(UserWarning, match="would count twice"):
        assert query(COUNT, tmp_path / "profiles").n[0] == 2
    shutil.copy(run / "readings.parquet", tmp_path / "a.parquet")
    assert "would count twice" in refused(COUNT, run, tmp_path / "a.parquet")


@pytest.mark.parametrize("sql, says", [
    ("SELEC 1", "syntax error at or near \"SELEC\""), ("SELECT latency FROM readings", "readings has run_id, "),
    ("SELECT 1 FROM reading", "runs has run_id, "), ("", "0 statements"), ("SELECT 1; SELECT 2", "2 statements"),
    ("SELECT value / 'a' FROM readings", "Could not convert"), ("SELECT sum(2::HUGEINT ** 70)::HUGEINT", "64 bits"),
    ("INSERT INTO runs SELECT * FROM runs", "nothing else is run"), ("DROP TABLE runs", "nothing else is run"),
    ("SET threads = 1", "nothing else is run"), ("ATTACH 'x.db'", "nothing else is run"),
    ("INSTALL httpfs", "nothing else is run"), ("LOAD httpfs", "nothing else is run"),
    ("COPY readings TO 'x.csv'", "nothing else is run"),
    ("WITH x AS (INSERT INTO kept SELECT * FROM kept RETURNING 1) SELECT 1", "has INSERT in it"),
    ("SELECT * FROM query('SELECT 1')", "query(…) is neither"), ("SELECT * FROM glob('/*')", "glob(…) is neither"),
    ("SELECT * FROM read_text('/etc/hosts')", "read_text(…) is neither"),
    ("SELECT * FROM json_execute_serialized_sql('')", "is neither"), ("SELECT * FROM '/etc/hosts.csv'", "disabled"),
    ("SELECT * FROM 'https://example.org/a.parquet'", "disabled"), ("SELECT * FROM outside", "does not exist"),
    ("SELECT " + "(" * 5000 + "1" + ")" * 5000, ""), ("SELECT " + "[" * 900 + "]" * 900, "")])
def test_a_query_is_one_select_that_only_reads(make, sql, says):
    outside = pyarrow.table({"a": [1]})                                     # a variable is no table
    assert says in refused(sql, make(1)) and len(outside) == 1


def test_the_files_that_are_read_cannot_be_written(make):
    """DuckDB lets a SELECT copy to a file that it may read; the query is refused before."""
    run = make(1)
    path, before = run / "readings.parquet", (run / "readings.parquet").read_bytes()
    copy = f"COPY (SELECT 1 AS a) TO '{path}' (USE_TMP_FILE false)"
    for sql in (copy, f"WITH x AS ({copy}) SELECT 1", f"SELECT (WITH x AS ({copy}) SELECT 1)",
                f"SELECT * FROM readings JOIN (WITH x AS ({copy}) SELECT 1 AS one) ON true",
                "SELECT * FROM query($$WITH x AS (" + copy + ") SELECT 1$$)"):
        refused(sql, run)
    assert path.read_bytes() == before and query(COUNT, run).n[0] == 2


def test_the_lock_holds_without_the_look_at_the_sql(make, tmp_path):
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    with opened([make(1)]) as store:
        for sql in (f"SELECT * FROM read_csv('{secret}')", f"COPY runs TO '{tmp_path}/x.csv'", "SET memory_limit='9GB'",
                    "SET enable_external_access=true", "INSTALL httpfs", f"ATTACH '{tmp_path}/x.db'"):
            with pytest.raises(duckdb.Error, match="disabled|locked|Cannot"):
                store._con.execute(sql)
    assert not (tmp_path / "x.csv").exists() and not (tmp_path / "x.db").exists()


def test_memory_is_a_limit_and_what_was_spilled_is_gone(make, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    run, big = make(1), "SELECT count(*) AS n FROM (SELECT DISTINCT i, md5(i::VARCHAR) FROM range(600000) t(i))"
    assert query(big, run, memory="64MiB").n[0] == 600_000
    assert [path.name for path in tmp_path.iterdir()] == ["profiles"]
    assert "--memory" in refused("SELECT list(md5(i::VARCHAR)) FROM range(3000000) t(i)", run, memory="32MiB")
    assert "write it as 512MiB" in refused("SELECT 1", run, memory="much")
    assert "--memory 4GiB" in refused("SELECT 1", run, memory="1MiB")           # not even for the list of runs


def linked(run):
    outside = run.parents[2] / "outside.parquet"
    (run / "readings.parquet").rename(outside)
    (run / "readings.parquet").symlink_to(outside)


def linked_manifest(run):
    (run / "manifest.json").rename(run.parents[2] / "m.json")
    (run / "manifest.json").symlink_to(run.parents[2] / "m.json")


def claims(rows):
    """A footer, whole and consistent, that promises more readings than the file has: thrift's numbers replaced."""
    def damage(run):
        def number(n):
            n, out = 2 * n, b""
            while n >= 128:
                out, n = out + bytes([n % 128 + 128]), n // 128
            return out + bytes([n])
        rewritten(run, lambda table: table.take([0, 1] * 40_000))
        path = run / "readings.parquet"
        data = path.read_bytes()
        length = int.from_bytes(data[-8:-4], "little")
        body, footer = data[:-8 - length], data[-8 - length:-8]
        assert footer.count(number(80_000)) > 40
        footer = footer.replace(number(80_000), number(rows))
        path.write_bytes(body + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    return damage


def about(**change):
    def damage(run):
        path = run / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change | {"checksum": ""}))
    return damage


@pytest.mark.parametrize("damage, says", [
    (linked, "no plain file"), (linked_manifest, "no plain file"), (claims(10**9), "claims 1,000,000,000 readings"),
    (lambda run: rewritten(run, lambda t: t.drop_columns("kv_len")), "kv_len is missing"),
    (lambda run: rewritten(run, lambda t: t.append_column("more", t["kv_len"])), "more is unknown"),
    (lambda run: rewritten(run, lambda t: t.set_column(t.schema.get_field_index("value"), "value", t["metric"])),
     "value holds BYTE_ARRAY instead of float64"),
    (lambda run: rewritten(run, lambda t: t.set_column(
        t.schema.get_field_index("note"), "note", pyarrow.array([["a"], ["b"]]))), "note"),
    (lambda run: (run / "readings.parquet").write_bytes(b"PAR1 and no more"), "cannot be read as Parquet"),
    (lambda run: (run / "readings.parquet").write_bytes(b""), "cannot be read as Parquet"),
    (lambda run: pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), run / "readings.parquet"), "schema version"),
    (about(schema_version=99), "schema version 99"), (about(run_id=5), "damaged at run_id"),
    (about(created_utc="yesterday"), "holds what no kvlab writes"),
    (about(environment={"cpu": float("nan")}), "holds what no kvlab writes"),
    (lambda run: (run / "manifest.json").write_text("[" * 100_000), "damaged"),
    (lambda run: run.rename(run.with_name("a*b")), "takes for a pattern"),
    (lambda run: ((run / "readings.parquet").unlink(), os.mkfifo(run / "readings.parquet")), "no plain file"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_a_hostile_run_is_left_out_with_one_sentence(make, tmp_path, damage, says):
    good, bad = make(2), make(1)
    damage(bad)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert query(COUNT + " JOIN runs USING (run_id)", tmp_path / "profiles").n[0] == 4
    (one,) = said
    assert says in str(one.message) and "\n" not in str(one.message)
    if bad.exists():                                                        # named itself, it may not be left out
        with pytest.raises((ValueError, OSError), match=re.escape(says)):
            query(COUNT, good, bad)


def test_text_of_a_manifest_is_text_whatever_it_holds(make):
    odd = "\ud800 \x1b[31m ' \" \\ -- \x00 中 {}"
    run = make(1)
    about(size=odd, argv=[odd], environment={"cpu": odd, "gpus": [{"name": odd}, 3, "x"], "logical_cores": "many",
                                             "memory_bytes": 2**70}, options={"engine": {"a": [odd]}})(run)
    found = query("SELECT * FROM runs", run).iloc[0]
    assert found["size"] == found["cpu"] == found["gpus"] == odd.replace("\ud800", "?")
    assert pd.isna(found["cores"]) and pd.isna(found["memory_bytes"]) and "many" in found["environment"]


def test_a_run_that_lies_outside_of_the_folder_is_not_read_through_a_link(make, tmp_path):
    run = make(1)
    shutil.move(run, tmp_path / "elsewhere")
    run.symlink_to(tmp_path / "elsewhere")
    make(2)
    (one,) = (one for one in sources((tmp_path / "profiles",)) if isinstance(one, Bad))
    assert "leads out of" in one.why
    assert query(COUNT, run).n[0] == 2                                      # named itself, it is


def test_damage_inside_of_a_file_is_one_sentence_and_the_counts_name_it(make, tmp_path):
    good, bad = make(2), make(1)
    path = bad / "readings.parquet"
    table = pyarrow.parquet.read_table(path)
    pyarrow.parquet.write_table(table.replace_schema_metadata({**table.schema.metadata, b"kvlab.seal": b""}), path)
    data = path.read_bytes()                                                # as of a kvlab that sealed no files
    footer = data[-8 - int.from_bytes(data[-8:-4], "little"):]
    path.write_bytes(data[:4] + b"\xff" * (len(data) - len(footer) - 4) + footer)
    assert "failed" in refused("SELECT metric, count(*) FROM readings GROUP BY ALL", tmp_path / "profiles")
    with opened([tmp_path / "profiles"]) as store:
        assert store.counts() == {good.name: (2, 4, 2)} and [one.path for one in store.bad] == [bad]


def test_the_store_of_the_gates_is_as_kvlab_writes_one(tmp_path):
    synthetic_runs(tmp_path / "runs", 12, 3000)
    synthetic_file(tmp_path / "all.parquet", 12, 3000)
    for found in (tmp_path / "runs", tmp_path / "all.parquet"):
        assert query("SELECT count(DISTINCT run_id) AS r, count(DISTINCT study) AS s, count(*) AS n FROM readings JOIN "
                     "runs USING (run_id, study)", found).iloc[0].to_list() == [12, 11, 36_000]
    run = next((tmp_path / "runs" / "memory_wall").iterdir())
    table = read_table(run)
    schema().validate(table)
    assert Manifest.read(run).run_id == run.name and table.groupby("case_id")["kv_len"].nunique().max() == 1
    assert table.groupby("comparison_id").size().max() < 3000
