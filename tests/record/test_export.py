"""Files are written whole or not at all, and say their units and schema version."""
import errno
import gzip
import json
import re
import shutil
import string
import subprocess
from dataclasses import asdict

import pandas as pd
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlab.record import export, store
from kvlab.record._latex import escaped, latex
from kvlab.record.export import StoreError, atomic_write, write_csv, write_parquet
from kvlab.record.reading import SCHEMA_VERSION, Reading, missing, table
from kvlab.record.store import read_table
from kvlab.record.trace import read_trace
from kvlab.record.trace_summary import summary

TEX = shutil.which("pdflatex") or shutil.which("tectonic")
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
    assert metadata[b"kvlab.schema_version"] == b"%d" % SCHEMA_VERSION
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


def readings(count=3, **more):
    """A table of `count` calls with four readings each."""
    rows = []
    for i in range(count):
        context = dict(run_id="run_1", case_id=f"{i:012x}", variant=("naive", "50%_of & co")[i % 2], phase="decode",
                       kv_len=2**i % 4096, kv_format="int8/token", batch_size=1, group_ratio=4, **more)
        for reading in (Reading("latency_s", 1e-3 * (i + 1), "s", "measured", low=9e-4 * (i + 1), high=2e-3 * (i + 1)),
                        Reading("ideal_bytes", 2**20 * (i + 1), "B", "modelled"),
                        Reading("kernel_error", 1.25e-7, "ratio", "measured"),
                        missing("format_error", "ratio", "no\nreason, said")):
            rows.append({**context, **asdict(reading)})
    return table(rows)


@pytest.mark.parametrize("format", ["csv", "parquet"])
@pytest.mark.parametrize("source", ["run.parquet", "run.csv"])
def test_what_is_exported_reads_as_what_it_was(tmp_path, monkeypatch, format, source):
    frame = readings(50, case='{"a": [1, "b"]}')
    {".parquet": write_parquet, ".csv": write_csv}[source[3:]](frame, tmp_path / source)
    monkeypatch.setattr(export, "_LINES", 7)                        # several parts, the last of them not whole
    monkeypatch.setattr(store.read_parts, "__defaults__", (16,))
    (tmp_path / "out").mkdir()
    out = export.export(tmp_path / source, format, tmp_path / "out")
    assert out == tmp_path / "out" / f"run.{format}"
    pd.testing.assert_frame_equal(read_table(out), frame, check_exact=True)
    assert export.export(tmp_path / source, format, out) == out     # again: what is there is replaced
    assert [p.name for p in out.parent.iterdir()] == [out.name]


def test_an_empty_table_has_its_columns(tmp_path):
    write_parquet(table([]), tmp_path / "a.parquet")
    for format in ("csv", "parquet"):
        out = export.export(tmp_path / "a.parquet", format, tmp_path / f"b.{format}")
        pd.testing.assert_frame_equal(read_table(out), table([]))


def test_csv_of_any_table_is_what_pandas_reads(tmp_path):
    frame = pd.DataFrame({"a,b": ["x", 'say "y"', None, "line\r\nend"], "whole": [1.0, -2.0, None, 1e300],
                          "part": [0.1, 1e-7, 5e-324, 123456789.0], "n": [1, 2, 3, 4], "yes": [True, False, True, True],
                          "kind": pd.Categorical(["p", "q", "p", ","])})
    write_csv(frame, tmp_path / "a.csv")
    read = pd.read_csv(tmp_path / "a.csv")
    assert list(read.dtypes.astype(str))[1:5] == ["float64", "float64", "int64", "bool"]
    assert list(read["a,b"].fillna("")) == ["x", 'say "y"', "", "line\nend"]
    assert list(read["kind"]) == ["p", "q", "p", ","]
    pd.testing.assert_frame_equal(read[["whole", "part", "n", "yes"]], frame[["whole", "part", "n", "yes"]],
                                  check_exact=True)


@pytest.mark.parametrize("values, written", [
    (pd.Series(["x", None, float("nan"), pd.NA], dtype=object), ['"x"', "", "", ""]),
    (pd.Series(["x", 1, 2.5, None], dtype=object), ['"x"', '"1"', '"2.5"', ""]),
    (pd.Series([1, None, 2.5], dtype=object), ["1", "", "2.5"]),
    (pd.Series([None, None], dtype=object), ["", ""]),
    (pd.Series([2**70, 1], dtype=object), [f'"{2**70}"', '"1"']),
    (pd.Series(["half \ud800", 'q"u,o'], dtype=object), ['"half \\ud800"', '"q""u,o"']),
    (pd.Series([[1, 2], None]), ['"[1, 2]"', ""]),
    (pd.Series([b"\xff", b"x"]), ["\"b'\\xff'\"", "\"b'x'\""]),
    (pd.Series([True, False]), ["true", "false"]), (pd.Series([True, None], dtype="boolean"), ["true", ""]),
    (pd.Series([2**62, None], dtype="Int64"), [str(2**62), ""]),
    (pd.Categorical(["p", None, 'q"r']), ['"p"', "", '"q""r"']), (pd.Categorical([2, 1, None]), ['"2"', '"1"', ""]),
    (pd.to_datetime(pd.Series(["2026-01-02", None])).astype("datetime64[s]"), ["2026-01-02 00:00:00", ""]),
    (pd.Series([], dtype="string"), []),
])
def test_csv_of_a_column(tmp_path, values, written):
    write_csv(pd.DataFrame({'a"b\n': values, "n": range(len(values))}), tmp_path / "a.csv")
    lines = (tmp_path / "a.csv").read_text()
    assert lines == "".join(f"{line}\n" for line in ['"a""b\n","n"', *(f"{one},{n}" for n, one in enumerate(written))])


def test_csv_of_parts(tmp_path):
    part = pd.DataFrame({"a": [1, 2]})
    write_csv([part, pd.DataFrame({"a": [None, 0.5]})], tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text() == '"a"\n1\n2\n\n0.5\n'
    none = pd.DataFrame({"a": pd.Series([None], dtype=object)})
    write_csv([none, pd.DataFrame({"a": ['x,"y"']}), part, none], tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text() == '"a"\n\n"x,""y"""\n"1"\n"2"\n\n'
    for other in (pd.DataFrame({"b": [1]}), pd.DataFrame({"a": [1], "b": [1]}), pd.DataFrame({"a": ["x,y"]})):
        with pytest.raises(ValueError, match="a part of the table has other columns"):
            write_csv([part, other], tmp_path / "b.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]
    write_csv(pd.DataFrame([[1, 2]], columns=["a", "a"]), tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text() == '"a","a"\n1,2\n'


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_the_wide_view_is_one_line_a_case(tmp_path, format):
    write_parquet(readings(5), tmp_path / "a.parquet")
    out = export.export(tmp_path / "a.parquet", format, tmp_path / f"b.{format}", wide=True)
    lines = pd.read_csv(out) if format == "csv" else pd.read_parquet(out)
    assert len(lines) == 5 and list(lines["latency_s"]) == pytest.approx([1e-3 * (i + 1) for i in range(5)])
    assert set(lines["latency_s_kind"]) == {"measured"} and set(lines["format_error_kind"]) == {"missing"}


@pytest.mark.parametrize("count", [3, 60])
def test_latex_is_a_whole_table_with_every_call(tmp_path, count):
    write_parquet(readings(count), tmp_path / "a.parquet")
    text = export.export(tmp_path / "a.parquet", "latex", tmp_path).read_text()
    lines = text.splitlines()
    assert ("longtable" in text) == (count > 40) and "Run run\\_1; phase decode; K/V format int8/token; batch 1" in text
    assert "latency measured, ideal bytes modelled, kernel error measured" in text
    (columns,) = re.findall(r"^\\begin{\w+}{([lS]+)}$", text, re.MULTILINE)
    body = [line for line in lines if line.startswith(("naive &", "50\\%\\_of \\& co &"))]
    assert len(body) == count and {len(re.split(r"(?<!\\)&", line)) for line in body} == {len(columns)}
    assert re.split(r"(?<!\\)& ?", body[1])[:4] == ["50\\%\\_of \\& co ", "2 ", "2.0(20) ", "2 "]
    assert r"{latency / \unit{\milli\second}} & {ideal bytes / \unit{\mebi\byte}} & {kernel error}" in text
    assert "in parentheses: the larger side of the interval" in text
    for command in ("toprule", "midrule", "bottomrule"):
        assert f"\\{command}" in text
    begun, ended = (re.findall(rf"\\{word}{{(\w+)}}", text) for word in ("begin", "end"))
    assert begun == ended[::-1]
    assert f"% missing: format_error of {count} calls" not in text  # no line has one: its column is left out
    assert "nothing for a LaTeX table" in str(pytest.raises(ValueError, latex, readings(1).iloc[3:]).value)


def test_latex_has_a_column_for_what_alone_tells_two_calls_apart():
    frame = readings(2)
    frame["kv_len"], frame["batch_size"] = frame["kv_len"].iloc[0], frame["batch_size"].iloc[0]
    for name in ("variant", "replica"):
        frame[name] = frame[name].iloc[0]
    orders = dict(zip(frame["case_id"].unique(), ("in_order", "random")))
    frame["page_order"] = frame["case_id"].map(orders).astype("string")
    assert "{page order}" in latex(frame) and "random &" in latex(frame)
    assert "{page order}" not in latex(readings(2))


def test_latex_of_hostile_text_stays_within_its_cells():
    frame = readings(2)
    frame["variant"] = pd.array(["\\input{x}~^#$\n% a"] * len(frame), dtype="string")
    frame["run_id"] = pd.array(["a\n}\\end{table}"] * len(frame), dtype="string")
    text = latex(frame)
    assert "\\input" not in text.replace("\\textbackslash input", "") and text.count("\\end{table}") == 1
    assert all(line.startswith("% kvlab") for line in text.splitlines() if line.startswith("%"))
    assert escaped("a_b{c}\\d%\n$&#~^") == (r"a\_b\{c\}\textbackslash{}d\% \$\&\#\textasciitilde{}"
                                            r"\textasciicircum{}")


@pytest.mark.skipif(not TEX, reason="neither pdflatex nor tectonic is installed")
def test_latex_compiles(tmp_path):
    write_parquet(readings(60), tmp_path / "a.parquet")
    text = export.export(tmp_path / "a.parquet", "latex", tmp_path).read_text()
    packages = "".join(f"\\usepackage{{{name}}}" for name in ("booktabs", "siunitx", "longtable"))
    whole = f"\\documentclass{{article}}{packages}\\begin{{document}}{text}\\end{{document}}"
    (tmp_path / "whole.tex").write_text(whole)
    program = [TEX, "-halt-on-error", "-interaction=batchmode"] if "pdflatex" in TEX else [TEX]
    assert subprocess.run([*program, "whole.tex"], cwd=tmp_path, capture_output=True).returncode == 0


def event(name, ts, dur, cat="cpu_op", pid=77, tid=77, **args):
    return dict(ph="X", name=name, ts=ts, dur=dur, cat=cat, pid=pid, tid=tid, args=args)


@pytest.fixture
def traced(tmp_path):
    """Results with two traces beside them, each with a kernel and the arrow to it."""
    frame = readings(2)
    frame["artifact"] = pd.array([f"traces/{case}.json.gz" for case in frame["case_id"]], dtype="string")
    (tmp_path / "traces").mkdir()
    for number, name in enumerate(frame["artifact"].unique(), 1):
        events = [dict(ph="M", name="process_name", pid=77, args=dict(name="python")),
                  dict(ph="M", name="thread_name", pid=77, tid=77, args=dict(name="main")),
                  event("kvlab:call naive", 10**9 * number, 100, "user_annotation"),
                  event("aten::mm", 10**9 * number + 10, 50), event("launch", 10**9 * number + 20, 1, "cuda_runtime",
                                                                      correlation=number),
                  dict(ph="s", id=5, name="ac2g", cat="ac2g", pid=77, tid=77, ts=10**9 * number + 20),
                  event("gemm", 10**9 * number + 30, 20, "kernel", pid=0, tid=7, correlation=number), "junk",
                  event("PyTorch Profiler (0)", 0, 1e12, "Trace", pid="Spans", tid="x"), dict(ph="i", name="end", ts=0)]
        (tmp_path / name).write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    write_parquet(frame, tmp_path / "run.parquet")
    return tmp_path / "run.parquet"


def test_traces_become_one_with_a_process_per_trial(traced):
    out = export.export(traced, "chrome-trace", traced.parent)
    assert out.name == "run.trace.json.gz"
    found = read_trace(out)
    shown = summary(found)
    assert shown.calls == 2 and shown.seconds == pytest.approx(200e-6) and found.problems == ()
    assert [(row["operator"], row["count"]) for row in shown.kernels] == [("aten::mm", 2)]
    events = json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]
    assert [e["args"]["name"][:22] for e in events if e["name"] == "process_name"] == [
        "naive int8/token decod", "50%_of & co int8/token"]
    assert {e["pid"] for e in events} == {1, 2} and min(e["ts"] for e in events if "ts" in e) == 0
    assert {e["id"] for e in events if "id" in e} == {"1.5", "2.5"}      # an arrow stays within its trial
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"main", "0 / 7"}


def test_a_trace_that_says_nonsense_of_itself_is_merged(traced):
    (path, _) = sorted((traced.parent / "traces").iterdir())
    data = json.loads(gzip.decompress(path.read_bytes()))
    data["traceEvents"] += [dict(ph="M", name="thread_name", pid=77, tid=77, args=["main"]),
                            dict(ph="X", name=["x"], ts=1),
                            dict(ph="X", name="x", ts=float("nan"), dur=1), dict(ph="X", name="x", ts=0, dur="long"),
                            dict(ph="s", name="x", ts=0, id={"a": 1}), dict(ph="M", name={}, args=3)]
    path.write_bytes(gzip.compress(json.dumps({**data, "kvlab": ["nonsense"]}).encode()))
    found = read_trace(export.export(traced, "chrome-trace", traced.parent))
    assert summary(found).calls == 2 and len(found.operators) == 2


def test_traces_outside_of_the_run_are_not_read(traced):
    frame = read_table(traced)
    frame["artifact"] = pd.array(["traces/../../secret.json.gz"] * len(frame), dtype="string")
    write_parquet(frame, traced)
    with pytest.raises(ValueError, match="names a trace outside of itself"):
        export.export(traced, "chrome-trace", traced.parent)


def test_what_cannot_be_exported_is_said(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(readings(1), path)
    before = path.read_bytes()
    for format, out, wide, error, sentence in (
            ("chrome-trace", None, False, ValueError, "has no traces; make a run with them: kvlab run STUDY --trace"),
            ("chrome-trace", None, True, ValueError, "--wide is about tables"),
            ("cvs", None, False, KeyError, "Did you mean 'csv'"),
            ("parquet", path, False, ValueError, "is what would be exported"),
            ("csv", tmp_path / "no" / "such.csv", False, StoreError, "does not exist"),
            ("latex", tmp_path / "no" / "such.tex", False, StoreError, "does not exist")):
        with pytest.raises(error, match=sentence):
            export.export(path, format, out or tmp_path, wide=wide)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["a.parquet"]
    with pytest.raises(ValueError, match="each metric has one unit"):
        write_parquet(pd.concat([readings(1), readings(1).assign(unit="B")]), tmp_path / "b.parquet")


def test_a_part_that_cannot_be_written_leaves_the_old_file(tmp_path):
    def parts():
        yield readings(1)
        raise ValueError("half way")
    (tmp_path / "a.csv").write_text("old")
    with pytest.raises(ValueError, match="half way"):
        write_csv(parts(), tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text() == "old" and len(list(tmp_path.iterdir())) == 1
