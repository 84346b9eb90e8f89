"""kvlab query and kvlab ls runs: what is printed, exit codes, one sentence for wrong use."""
import json
import re
import sys
from dataclasses import asdict

import pandas as pd
import pytest

from kvlab.cli import main
from kvlab.record.environment import Manifest
from kvlab.record.reading import Reading, failed
from kvlab.record.store import RunStore

SMALL = "SELECT kv_len, value FROM readings WHERE metric = 'latency_s' ORDER BY value"


@pytest.fixture
def kvlab(monkeypatch, capsys, tmp_path):
    """Runs the command in a folder of its own: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvlab", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()
    return run


@pytest.fixture
def make(tmp_path):
    def run(comparisons, when="2026-01-02T03:04:05Z", close=True, device="cpu", **more):
        gpus = [{"name": "NVIDIA H200"}] * 2
        environment = {"cpu": "Intel(R) Xeon(R) CPU @ 2.20GHz", "logical_cores": 8, "gpus": gpus}
        store = RunStore.create(tmp_path / "profiles", "memory_wall", Manifest(
            study="memory_wall", size="small", device=device, created_utc=when, environment=environment, **more))
        for i in range(comparisons):
            store.append(f"c{i}", [asdict(Reading("latency_s", i + 0.5, "s", "measured")) | dict(kv_len=1024 * i),
                                   asdict(failed("power", "W", "no \x1b[31msensor"))])
        if close:
            store.close()
        return store
    return run


def test_the_table_shows_fifty_lines_and_says_how_many_more_there_are(kvlab, make):
    make(53)
    code, out, err = kvlab("query", SMALL)
    lines = out.splitlines()
    assert (code, err) == (0, "") and lines[0].split() == ["kv_len", "value"] and lines[2].split() == ["1,024", "1.5"]
    assert len(lines) == 52 and lines[-1] == "3 more lines: --csv, --json or --out FILE gives all"
    assert kvlab("query", SMALL + " LIMIT 0")[1].splitlines()[-1] == "no line"


def test_a_wide_result_stands_upright_and_cannot_steer_the_terminal(kvlab, make):
    make(2)
    out = kvlab("query", "SELECT * FROM readings WHERE metric = 'power'")[1]
    assert "\x1b" not in out and "no \\x1b[31msensor" in out and "kv_format" not in out
    assert [line.split()[0] for line in out.splitlines()][:3] == ["run_id", "comparison_id", "study"]


def test_csv_json_and_files_hold_all_of_it(kvlab, make, tmp_path):
    make(60)
    whole = pd.DataFrame(dict(kv_len=[1024 * i for i in range(60)], value=[i + 0.5 for i in range(60)]))
    (tmp_path / "a.csv").write_text(kvlab("query", SMALL, "--csv")[1])
    assert kvlab("query", SMALL, "--out", "b.csv")[1] == "b.csv: 60 lines\n"
    assert kvlab("query", SMALL, "--out", "c.parquet")[0] == 0
    for found in (pd.read_csv("a.csv"), pd.read_csv("b.csv"), pd.read_parquet("c.parquet"),
                  pd.DataFrame(json.loads(kvlab("query", SMALL, "--json")[1]))):
        pd.testing.assert_frame_equal(found, whole, check_dtype=False)
    odd = ("SELECT created_utc AS t, 'inf'::DOUBLE AS i, NULL AS n, [1, 2] AS l, 1.5 AS d, sum(3) AS s FROM runs GROUP "
           "BY ALL")
    assert json.loads(kvlab("query", odd, "--json")[1]) == [
        dict(t="2026-01-02T03:04:05", i="inf", n=None, l=[1, 2], d=1.5, s=3)]
    assert kvlab("query", SMALL + " LIMIT 0", "--json")[1] == "[]\n"
    assert kvlab("query", SMALL + " LIMIT 0", "--csv")[1] == '"kv_len","value"\n'
    assert kvlab("query", odd, "--csv")[0] == kvlab("query", odd)[0] == 0


def test_without_sql_the_columns_and_examples_are_listed_and_the_examples_run(kvlab, make):
    code, out, _ = kvlab("query")
    assert code == 0 and "kv_len BIGINT" in out and "created_utc TIMESTAMP" in out
    examples = re.findall('^  kvlab query "(.*)"$', out, re.MULTILINE)
    assert len(examples) == 3
    for sql in examples:
        code, out, err = kvlab("query", sql, "reference")
        assert (code, err) == (0, "") and len(out.splitlines()) > 2, sql


@pytest.mark.parametrize("arguments, says", [
    (["SELECT x FROM readings"], "the SQL does not fit the tables"), (["SELECT 1", "none.parquet"], "no results at"),
    (["SELECT 1", "--memory", "lots"], "512MiB"), (["SELECT 1", "--out", "x.txt"], "must end in"),
    (["reference"], "the SQL comes before it"),
    (["SELECT 1", "--csv", "--json"], "three ways"), (["SELECT 1", "no-such-folder/"], "no run named")])
def test_wrong_use_is_one_sentence_and_2(kvlab, make, arguments, says):
    make(1)
    code, out, err = kvlab("query", *arguments)
    assert code == 2 and out == "" and says in err and len(err.strip().splitlines()) == 1


def test_what_was_left_out_is_said_and_the_exit_code_is_1(kvlab, make):
    make(2)
    (make(1).path / "manifest.json").write_text("{")
    code, out, err = kvlab("query", "SELECT count(*) AS n FROM readings")
    assert code == 1 and out.split() == ["n", "4"] and "is damaged" in err
    assert err.splitlines()[-1] == "kvlab: the result is without the 1 named above"


def test_ls_runs_lists_the_newest_first_with_its_state(kvlab, make, tmp_path):
    closed, cuda = make(2, "2026-01-01T00:00:00Z"), make(1, "2026-01-03T00:00:00Z", device="cuda")
    open_, none = make(3, "2026-01-02T00:00:00Z", close=False), make(0, "2026-01-04T00:00:00Z", close=False)
    open_._held.let_go()
    bad = make(1, "2026-01-05T00:00:00Z")
    (bad.path / "readings.parquet").write_bytes(b"no")
    cuda.met("w/gpu0", {})
    cuda.met("w/gpu1", {})
    code, out, _ = kvlab("ls", "runs", "--json")
    rows = json.loads(out)
    assert code == 0 and [row["run_id"] for row in rows] == [
        store.manifest.run_id for store in (bad, none, cuda, open_, closed)]
    assert [(row["comparisons"], row["readings"], row["failed"]) for row in rows] == [
        (None, None, None), (0, 0, 0), (1, 2, 1), (3, 6, 3), (2, 4, 2)]
    assert [row["state"].partition(":")[0] for row in rows] == [
        "damaged", "unfinished", "closed", "unfinished", "closed"]
    assert "cannot be read as Parquet" in rows[0]["problem"] and not rows[1]["problem"]
    assert rows[2]["workers"] == 2 and rows[3]["workers"] is None
    assert [rows[i]["machine"] for i in (2, 3)] == ["2 × NVIDIA H200", "Intel Xeon, 8 cores"]
    code, out, err = kvlab("ls", "runs", "--out", tmp_path / "profiles")
    assert err.startswith("kvlab: ") and "cannot be read as Parquet" in err and code == 0
    assert out.splitlines()[-1].split()[:7] == [closed.path.name[-6:], "memory_wall", "small", "cpu", "2026-01-01",
                                                "00:00", "2"]
    assert max(map(len, out.splitlines())) <= 200


def test_ls_runs_says_who_writes_to_a_run(kvlab, make):
    store = make(1, close=False)                                            # append holds it until close
    (row,) = json.loads(kvlab("ls", "runs", "--json")[1])
    assert row["state"].startswith("being written by process ") and "min)" in row["state"]
    store.close()
    assert json.loads(kvlab("ls", "runs", "--json")[1])[0]["state"] == "closed"


def test_ls_runs_of_a_folder_without_runs_is_one_sentence(kvlab, tmp_path):
    (tmp_path / "profiles").mkdir()
    for arguments in (("ls", "runs"), ("ls", "runs", "--out", "none/here")):
        code, _, err = kvlab(*arguments)
        assert code == 2 and len(err.splitlines()) == 1 and ("holds no runs" in err or "there is no folder" in err)
