"""Anonymous exports: what identifies is gone from every format, what a number is about stays, and it is said."""
from dataclasses import asdict

import pandas as pd
import pytest

from kvlab.record import anonymous
from kvlab.record._latex import latex, uncertain, unit
from kvlab.record.anonymous import Anonymous
from kvlab.record.export import export, write_parquet
from kvlab.record.reading import Reading, missing, table
from kvlab.record.store import read_table

RUN = "20261129T181422Z-8a68e5"
UUID = "GPU-8a68e5a1-1234-5678-9abc-0123456789ab"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SECRETS = {
    "paths": "/home/somebody/work/model.gguf", "device UUIDs": UUID, "git commits": COMMIT,
    "PCI addresses": "00000000:3b:00.0", "serial numbers": "serial number 1650222012345",
    "e-mail addresses": "ann@lab.example.org", "network addresses": "10.1.2.3:8000",
    "URLs of servers": "http://gpu-node7:8000/metrics", "files of variants": "ann/of_the_lab.py:Mine"}
KEPT = ["NVIDIA H200 SXM 141GB", "AMD EPYC, 2 logical cores", "int8/token+int4/token/g32", "sha256 1ff91e93a456",
        "https://github.com/vllm-project/vllm/blob/0123456789abcdef0123456789abcdef01234567/x.py",
        "needs /sys/bus/event_source/devices", "driver 550.54.15", "tokens/s at 99.5 %", "file:" + "ab" * 32]


def rows(note):
    context = dict(run_id=RUN, case_id="c1", variant="naive", phase="decode", kv_len=64, batch_size=1, device="cuda")
    return table([{**context, **asdict(one)} for one in (
        Reading("latency_s", 1e-3, "s", "measured", low=9e-4, high=1.2e-3, n=9, hardware=KEPT[0], note=note),
        missing("power", "W", f"NVML gave nothing: {note}"))])


@pytest.mark.parametrize("what, secret", SECRETS.items())
@pytest.mark.parametrize("format", ["csv", "parquet", "latex"])
def test_what_identifies_is_in_no_format_and_is_counted(what, secret, format, tmp_path):
    write_parquet(rows(f"before {secret} after {RUN}"), tmp_path / "a.parquet")
    cut = Anonymous()
    out = export(tmp_path / "a.parquet", format, tmp_path, anonymous=cut)
    assert out.stem == "anonymous"
    text = out.read_text() if format != "parquet" else read_table(out).to_csv()
    core = secret.split(" ")[-1].partition(":Mine")[0]
    assert core not in text and RUN not in text and "run-1" in text
    assert "run ids (1, now run-1)" in cut.sentence and f"{what} (1)" in cut.sentence and "git commit" in cut.sentence
    if format != "latex":
        assert KEPT[0] in text and "before [" in text and " after run-1" in text


@pytest.mark.parametrize("text", KEPT)
def test_what_a_number_is_about_stays(text):
    cut = Anonymous()
    assert cut.text(text) == text and "dropped nothing" in cut.sentence


def test_names_of_this_machine_go_and_common_ones_stay(monkeypatch):
    monkeypatch.setattr(anonymous.getpass, "getuser", lambda: "aturing")
    monkeypatch.setattr(anonymous.platform, "node", lambda: "bletchley.example.org")
    cut = Anonymous()
    assert cut.text("aturing on bletchley, not aturings") == "[name] on [name], not aturings"
    assert "user and host names (2)" in cut.sentence
    assert cut.text("bletchley.example.org says") == "[name] says", "the domain names the place"
    monkeypatch.setattr(anonymous.getpass, "getuser", lambda: "root")
    assert Anonymous().text("the root of it") == "the root of it"


def test_a_variants_file_goes_and_its_class_stays_and_so_do_cited_pages():
    cut = Anonymous()
    assert cut.text('{"ref": "Ann Other/it.py:Mine"}') == '{"ref": "[file]:Mine"}'
    assert cut.text("http://gpu7.example.org:8000/metrics; https://example.org/x.py:3.") == (
        "[URL] https://example.org/x.py:3.")


def test_runs_keep_apart_and_the_same_over_parts():
    cut = Anonymous()
    first = cut.table(rows("x"))
    second = cut.table(pd.concat([rows("x").assign(run_id="other"), rows("x")]).astype(first.dtypes))
    assert list(second["run_id"].unique()) == ["run-2", "run-1"] and set(first["run_id"]) == {"run-1"}
    pd.testing.assert_frame_equal(first.drop(columns="run_id"), rows("x").drop(columns="run_id"))


def test_an_anonymous_trace_is_refused(tmp_path):
    write_parquet(rows("x"), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="use csv, parquet or latex"):
        export(tmp_path / "a.parquet", "chrome-trace", tmp_path, anonymous=Anonymous())


@pytest.mark.parametrize("value, low, high, written", [
    (1.2344, 1.2094, 1.2444, "1.234(25)"), (2.0, 1.8, 4.0, "2.0(20)"), (3450.0, 3330.0, 3500.0, "3450(120)"),
    (1.25e-7, 1.22e-7, 1.26e-7, "1.250(30)e-7"), (1.5e9, 1.4e9, 1.5e9, "1.50(10)e9"), (5.0, 5.0, 5.0, "5"),
    (5.0, float("nan"), float("nan"), "5"), (float("nan"), 1.0, 2.0, "{--}"), (0.0, -0.5, 0.5, "0.00(50)")])
def test_a_value_carries_the_larger_side_of_its_interval(value, low, high, written):
    assert uncertain(value, low, high) == written


def test_units_are_siunitx_or_text():
    assert unit("s") == r"\unit{\second}" and unit("ratio") == "" and unit("token/s") == "token/s"


def test_a_run_without_calls_is_a_table_of_its_readings():
    context = dict(run_id=RUN, case='{"question": "static", "label": "a_b"}', scope="comparison")
    text = latex(table([{**context, **asdict(one)} for one in (
        Reading("ttft_mean_s", 0.5, "s", "simulated", low=0.4, high=0.55),
        Reading("tokens_per_s", 120.0, "token/s", "simulated"), missing("p99_s", "s", "no requests"))]))
    assert r"ttft\_mean\_s & 0.50(10) & \unit{\second} & simulated \\" in text
    assert r"tokens\_per\_s & 120 & token/s & simulated \\" in text and "% missing: p99_s" in text


def test_readings_that_a_table_of_calls_leaves_out_are_named():
    frame = table([{**dict(run_id=RUN, case_id="c", variant=variant), **asdict(Reading(name, 1.0, unit_, "measured"))}
                   for variant, name, unit_ in (("naive", "latency_s", "s"), ("", "read_ceiling", "B/s"))])
    assert "% not in this table: 1 readings: read_ceiling; csv has them all" in latex(frame)
