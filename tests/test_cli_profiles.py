"""Profiles taken out: `kvlab export`, `kvlab trace`, and --trace of measure and run."""
import gzip
import json
import sys
from dataclasses import asdict

import pytest

from kvlab.cli import main
from kvlab.record.environment import Manifest
from kvlab.record.reading import Reading
from kvlab.record.store import RunStore, read_table
from kvlab.studies import _run


@pytest.fixture
def run_here(monkeypatch, capsys, tmp_path):
    """(exit code, stdout, stderr) of a command in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def called(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvlab", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()
    return called


def x(name, ts, dur, cat="cpu_op", **args):
    return dict(ph="X", name=name, ts=ts, dur=dur, cat=cat, pid=1, tid=1, args=args)


EVENTS = [x("kvlab:call naive", 0, 100, "user_annotation"), x("aten::bmm", 10, 60, **{
    "Input Dims": [[8, 1, 64], [8, 64, 512]], "Input type": ["float", "float"]}), x("aten::[odd]", 80, 5)]


@pytest.fixture
def run(run_here, tmp_path):
    """A run directory below profiles/ with one call, and its trace."""
    store = RunStore.create(tmp_path / "profiles", "memory_wall", Manifest(study="memory_wall"))
    row = dict(comparison_id="c", case_id="abc", variant="naive", kv_len=64, phase="decode",
               **asdict(Reading("latency_s", 1.5e-3, "s", "measured", artifact="traces/abc.json.gz")))
    store.append("c", [row])
    store.close()
    path = store.artifacts / "traces" / "abc.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": EVENTS, "kvlab": {
        "variant": "naive", "trial": {"kv_format": "fp32", "workload": {"kv_lens": [64]}}}}).encode()))
    return store.path


def test_trace_prints_operators_gaps_and_bytes(run_here, run):
    path = run / "traces" / "abc.json.gz"
    for given in (str(path), str(run), run.name, run.name[-6:]):
        code, out, err = run_here("trace", given)
        assert not code and err == "" and "naive, 1 call, 100 µs under the profiler" in out
    lines = out.splitlines()
    assert lines[2].split() == ["aten::bmm", "1", "60", "µs", "60.0", "%", "60", "µs", "1.02", "MiB"]
    assert lines[3].startswith("aten::[odd]")
    assert "no operator for 35 µs (35.0 %); the largest gap, 15 µs, is between aten::[odd] and the end" in out
    assert "modelled bytes: 1.02 MiB, 1.02 MiB per call" in out
    assert "and 1 operators more, 5 µs together" in run_here("trace", str(path), "--top", "1")[1]


def test_trace_as_json(run_here, run):
    code, out, _ = run_here("trace", str(run), "--json")
    found = json.loads(out)
    assert not code and found["about"]["variant"] == "naive" and found["calls"] == 1
    assert [row["name"] for row in found["operators"]] == ["aten::bmm", "aten::[odd]"]
    assert found["bytes"] == found["operators"][0]["bytes"] == 4 * (8 * 64 + 8 * 64 * 512 + 8 * 512)


def test_a_run_with_several_traces_lists_them(run_here, run):
    (run / "traces" / "def.json.gz").write_bytes((run / "traces" / "abc.json.gz").read_bytes())
    code, out, _ = run_here("trace", str(run))
    assert not code and out.startswith("2 traces; name one:")
    assert "def.json.gz   naive, fp32, decode, batch 1, kv_len 64" in out


def test_a_damaged_trace_is_read_and_said(run_here, tmp_path):
    (tmp_path / "half.json").write_text(json.dumps(EVENTS)[:-30])
    code, out, err = run_here("trace", "half.json")
    assert not code and "aten::bmm" in out and "the 2 whole events before are read" in err


def test_text_of_a_file_or_an_error_does_not_reach_the_terminal_raw(run_here, tmp_path):
    evil = "\x1b]0;owned\x07\u202e"
    (tmp_path / "evil.json").write_text(json.dumps({"kvlab": {"variant": evil}, "traceEvents": [
        x("kvlab:call", 0, 9, "user_annotation"), x(evil, 0, 5)]}))
    code, out, _ = run_here("trace", "evil.json")
    assert not code and out.count("\\x1b]0;owned\\x07\\u202e") == 3 and not set(out) & set(evil[:1] + evil[-2:])
    for arguments in (["trace", evil + ".json"], ["export", evil, "--format", "csv"]):
        code, _, err = run_here(*arguments)
        assert code == 2 and "\\x1b]0;owned\\x07\\u202e" in err and "\x1b" not in err


@pytest.mark.parametrize("format, name", [("csv", ".csv"), ("parquet", ".parquet"), ("latex", ".tex"),
                                          ("chrome-trace", ".trace.json.gz")])
def test_export_of_a_run_into_this_folder(run_here, run, tmp_path, format, name):
    code, out, err = run_here("export", run.name[-6:], "--format", format)
    written = tmp_path / (run.name + name)
    assert not code and out.strip() == written.name and err == "" and written.stat().st_size > 0
    if format in ("csv", "parquet"):
        assert read_table(written).equals(read_table(run))
    if format == "chrome-trace":
        assert "1 call, 100 µs under the profiler" in run_here("trace", out.strip())[1]
    assert run_here("export", str(run), "--format", format, "--out", "x.y")[1].strip() == "x.y"


def test_export_wide(run_here, run, tmp_path):
    code, out, _ = run_here("export", str(run), "--format", "csv", "--wide")
    assert not code and "latency_s_kind" in (tmp_path / out.strip()).read_text().splitlines()[0]


@pytest.mark.parametrize("arguments, sentence", [
    (["trace", "nothing.json"], "there is no trace file nothing.json"),
    (["trace", "nothing"], "no run named 'nothing'"),
    (["trace", "bad.json"], "bad.json is no Chrome trace"),
    (["trace", "bad.json", "--top", "0"], "must be at least 1"),
    (["trace", "empty"], "has no traces; make them with kvlab run STUDY --trace"),
    (["export", "nothing", "--format", "csv"], "no run named 'nothing'"),
    (["export", "bad.csv", "--format", "cvs"], "Did you mean 'csv'"),
    (["export", "bad.csv", "--format", "parquet"], "missing or unknown columns"),
    (["export", "bad.csv"], "--format"),
    (["export", "no.csv", "--format", "csv"], "there are no results at no.csv"),
    (["measure", "--variant", "naive", "--kv-len", "64", "--trace", "no/such"], "create it first"),
    (["measure", "--variant", "naive", "--kv-len", "64", "--also", "callgrin"], "Did you mean 'callgrind'"),
    (["run", "memory_wall", "--also", "nsu"], "Did you mean 'ncu'"),
])
def test_wrong_use_is_one_sentence_and_exit_code_2(run_here, tmp_path, arguments, sentence):
    (tmp_path / "bad.json").write_text("hello")
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    (tmp_path / "empty" / "traces").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run_here(*arguments)
    assert code == 2 and sentence in err and out == ""
    assert err.startswith("kvlab: ") and len(err.strip().splitlines()) == 1 and sorted(tmp_path.rglob("*")) == before


def test_measure_with_a_trace(run_here, tmp_path):
    code, out, _ = run_here("measure", "--variant", "naive", "--kv-len", "64", "--q-heads", "4", "--kv-heads", "2",
                            "--head-dim", "16", "--trace", "t")
    assert code == 0 and "largest_operator_share" in out and "profiler_overhead" in out
    (path,) = (tmp_path / "t" / "traces").iterdir()
    assert f"Next: kvlab trace t/traces/{path.name}" in out.replace("\\", "/")
    assert "naive, 3 calls" in run_here("trace", "t")[1]


def test_a_study_is_run_with_traces_where_asked(run_here, monkeypatch, tmp_path):
    asked = []

    def run(study, **options):
        asked.append(options["also"])
        raise ValueError("enough")
    monkeypatch.setattr(_run, "run", run)
    for arguments in ([], ["--trace"], ["--also", "ncu", "--trace", "--also", "callgrind", "--also", "ncu"]):
        assert run_here("run", "memory_wall", *arguments)[0] == 2
    assert asked == [(), ("torch_profile",), ("ncu", "callgrind", "torch_profile")]


def test_measure_with_a_probe_on_request_has_its_rows_beside_the_others(run_here):
    code, out, _ = run_here("measure", "--variant", "naive", "--kv-len", "64", "--q-heads", "4", "--kv-heads", "2",
                            "--head-dim", "16", "--also", "ncu", "--json")
    rows = [row for row in json.loads(out) if row["source"] == "ncu"]
    assert code == 0 and {"hbm_bytes", "cold_share", "sm_utilization"} <= {row["metric"] for row in rows}


def test_the_list_of_probes_marks_what_runs_on_request(run_here):
    rows = {row["name"]: row for row in json.loads(run_here("ls", "probes", "--json")[1])}
    assert {name for name, row in rows.items() if row["runs"] == "on request"} == {
        "torch_profile", "ncu", "callgrind", "perf"}
    assert "on request" in run_here("ls", "probes")[1]
