"""Result files of load generators: what is read of each, what hostile ones come to, and how two are compared."""
import csv
import json
import math
import shutil
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.cli import main
from kvlab.comparing import compare, default_metrics
from kvlab.record.export import write_parquet
from kvlab.record.reading import schema
from kvlab.record.reading import table as result_table
from kvlab.serving import bench_files
from kvlab.serving._bench_case import Case, interval, rounds
from kvlab.serving._bench_vllm import result
from kvlab.serving.bench_files import DEFAULT_METRICS, is_bench, read_bench

SAMPLES = Path(__file__).parent / "bench_samples"
FILES = ["aiperf", "aiperf/profile_export.jsonl", "aiperf/profile_export_aiperf.json",
         "aiperf/profile_export_aiperf.csv",
         "guidellm", "guidellm/benchmarks.json", "guidellm/benchmarks.csv", "vllm/detailed.json", "vllm/plain.json",
         "vllm/appended.json"]
DETAILED = json.loads((SAMPLES / "vllm/detailed.json").read_text())
RECORDS = (SAMPLES / "aiperf/profile_export.jsonl").read_text().splitlines()


def value(bench, metric, column="value"):
    """One metric's value of a file with one benchmark."""
    table = bench.table()
    return table[table["metric"] == metric][column].iloc[0]


@pytest.mark.parametrize("name", FILES)
def test_every_file_becomes_a_valid_result_table(name):
    bench = read_bench(SAMPLES / name)
    table = bench.table()
    schema().validate(table)
    assert is_bench(SAMPLES / name)
    assert set(DEFAULT_METRICS) <= set(table["metric"]) and set(table["kind"]) == {"measured"}
    assert all(source.startswith(bench.tool) for source in table["source"])
    times = table[table["unit"] == "s"]
    assert (times["value"] < 1).all() and (times["value"] > 0.005).all()        # seconds, whatever the file's unit
    known = times["low"].notna()
    assert (times["low"] <= times["value"])[known].all() and (times["value"] <= times["high"])[known].all()
    assert known.any() == bool(bench.samples())
    assert (times["note"] != "")[~known].all()
    assert any("no single requests" in remark for remark in bench.remarks) != known.any()


def test_aiperf_in_its_three_forms_says_the_same():
    folder, records, summary, table = (read_bench(SAMPLES / name) for name in FILES[:4])
    for time in ("ttft", "tpot", "itl", "e2e"):
        for stat in ("mean", "p50", "p90", "p99"):
            metric = f"{time}_{stat}_s"
            assert value(records, metric) == value(folder, metric)
            assert value(records, metric) == pytest.approx(value(summary, metric), rel=1e-4)
            assert value(table, metric) == pytest.approx(value(summary, metric), rel=2e-3)      # two digits there
    assert folder.version == summary.version == "0.13.0" and records.version == ""
    assert value(folder, "ttft_p50_s", "n") == 12           # the two warm-up requests are left out
    assert value(folder, "requests_per_s") == value(table, "requests_per_s") == 18.5
    about = [json.loads(line) for line in RECORDS[2:]]
    span = max(one["metadata"]["request_end_ns"] for one in about) - about[0]["metadata"]["request_start_ns"]
    assert value(records, "requests_per_s") == pytest.approx(12e9 / span)


def test_guidellm_in_its_two_forms_says_the_same():
    limit = csv.field_size_limit()
    report, table = (read_bench(SAMPLES / name) for name in FILES[5:7])
    assert csv.field_size_limit() == limit, "a limit of the whole process was changed"
    assert report.version == table.version == "0.8.1"
    assert report.cases[0].load == table.cases[0].load == "concurrent@8"
    assert report.cases[0].stats.keys() == table.cases[0].stats.keys() == {"ttft", "tpot", "e2e"}
    for time, stats in report.cases[0].stats.items():
        assert table.cases[0].stats[time] == pytest.approx(stats)
    assert report.cases[0].rates == table.cases[0].rates
    assert value(report, "ttft_mean_s") == pytest.approx(report.cases[0].stats["ttft"]["mean"])
    assert "1 requests failed" in report.remarks[0]


def test_vllm_leaves_failed_requests_out_and_counts_them():
    bench = read_bench(SAMPLES / "vllm/detailed.json")
    assert (bench.model, bench.cases[0].load) == ("meta-llama/Llama-3.1-8B", "rate inf, concurrency 8")
    assert {time: len(samples) for time, samples in bench.cases[0].samples.items()} == dict(
        ttft=11, tpot=11, e2e=11, itl=sum(map(len, DETAILED["itls"])))
    for time, name in (("ttft", "ttft"), ("tpot", "tpot"), ("e2e", "e2el"), ("itl", "itl")):
        assert value(bench, f"{time}_mean_s") == pytest.approx(DETAILED[f"mean_{name}_ms"] / 1000)
    assert bench.remarks[0] == "1 requests failed and are not counted"
    late = json.loads(changed(latencies=[9.0 if error else 0.2 for error in DETAILED["errors"]]))
    case, _, _ = result(late)
    assert case.samples["e2e"] == [0.2] * 11                # one that failed after a while is none either
    assert value(read_bench(SAMPLES / "vllm/plain.json"), "e2e_p50_s") == pytest.approx(
        DETAILED["median_e2el_ms"] / 1000)


def test_requests_of_vllm_without_latencies_have_them_by_their_gaps(tmp_path):
    """Files of versions that keep ttfts, itls, output_lens and start_times alone."""
    path = tmp_path / "a.json"
    path.write_text(json.dumps({name: value for name, value in DETAILED.items() if name != "latencies"}))
    ours, whole = read_bench(path), read_bench(SAMPLES / "vllm/detailed.json")
    assert ours.cases[0].samples.keys() == whole.cases[0].samples.keys()
    wanted = sorted(first + sum(gaps) for first, gaps, error in zip(DETAILED["ttfts"], DETAILED["itls"],
                                                                    DETAILED["errors"]) if not error)
    assert sorted(ours.cases[0].samples["e2e"]) == pytest.approx(wanted)
    assert ours.cases[0].samples["tpot"] == pytest.approx(whole.cases[0].samples["tpot"], rel=0.2)
    assert value(ours, "e2e_p50_s", "n") == 11 and not any("no single requests" in said for said in ours.remarks)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_two_simulations_are_compared(tmp_path, suffix):
    from kvlab.serving.request import Request
    from kvlab.serving.scheduler_config import SchedulerConfig
    from kvlab.serving.simulator import simulate
    from kvlab.serving.step_time import Linear
    arriving = [Request(str(i), 0.05 * i, 100 + i, 20) for i in range(200)] + [Request("long", 11.0, 10**6, 5)]
    paths = [tmp_path / f"{name}.{suffix}" for name in "ab"]
    for path, seconds in zip(paths, (0.01, 0.015)):
        done = simulate(arriving, SchedulerConfig(), num_blocks=5000,
                        step_time=Linear(seconds, 0, 0, 0, "x", "y", "modelled"))
        getattr(done.requests(), f"to_{suffix}")(path, index=False)
    assert all(map(is_bench, paths)) and default_metrics(*map(str, paths)) == list(DEFAULT_METRICS)
    bench, table = read_bench(paths[0]), done.requests()
    assert set(bench.table()["kind"]) == {"simulated"} and bench.tool == "kvlab simulate"
    assert bench.remarks == ["1 requests were rejected and are not counted"]
    assert read_bench(paths[1]).cases[0].samples["queue"] == pytest.approx(table["queue_s"].dropna().tolist())
    assert value(read_bench(paths[1]), "ttft_mean_s") == pytest.approx(table["ttft_s"].mean())
    assert value(read_bench(paths[1]), "requests_per_s") == pytest.approx(200 / done.makespan_s, rel=0.01)
    schema().validate(bench.table())
    for metric, ratio in (("tpot_p50_s", 1.5), ("e2e_p50_s", 1.5)):
        row = compare(*map(str, paths), metric=metric).iloc[0]
        assert row["ratio"] == pytest.approx(ratio, rel=0.05)
        assert (row["kind"], row["verdict"]) == ("simulated", "SLOWER")
    assert compare(*map(str, paths), metric="queue_p50_s")["kind"].tolist() == ["simulated"]
    measured = compare(str(paths[0]), str(SAMPLES / "vllm/detailed.json"), metric="ttft_p50_s")
    assert measured.empty and "simulated in A, measured in B" in measured.attrs["kinds_differ"][0]


@pytest.mark.parametrize("row,why", [("a,0,1,1,0,x,0,1,0,0,", "no number"), ("a,0,1,1,0,-1,0,1,0,0,", "below 0"),
                                     ("a,0,1,1,0,inf,0,1,0,0,", "not finite"), ("a,0,1,1,,,,,0,0,full", "no latency")])
def test_a_simulation_that_cannot_be_is_one_sentence(tmp_path, row, why):
    path = tmp_path / "a.csv"
    path.write_text("id,arrival_s,prompt_tokens,output_tokens,queue_s,ttft_s,tpot_s,e2e_s,preemptions,cached_tokens,"
                    f"rejected\n{row}\n")
    with pytest.raises(ValueError, match=why):
        read_bench(path)


def test_appended_results_are_told_apart_by_their_load(tmp_path):
    bench = read_bench(SAMPLES / "vllm/appended.json")
    assert [case.load for case in bench.cases] == ["rate inf, concurrency 8", "rate 4"]
    assert bench.table()["case"].nunique() == 2
    text = json.dumps(json.loads((SAMPLES / "vllm/plain.json").read_text()))
    for name in ("twice.json", "twice.jsonl"):
        path = tmp_path / name
        path.write_text(f"{text}\n{text}")
        assert [case.load for case in read_bench(path).cases] == [f"rate inf, concurrency 8 (run {i})" for i in (1, 2)]


@pytest.fixture
def runs(tmp_path):
    """Writes a vLLM result with single requests whose times are scaled, and returns its path."""
    def write(name, scale=1.0, count=400, seed=0, **changes):
        rng = np.random.default_rng(seed)
        ttfts = (0.05 * scale * np.exp(0.1 * rng.standard_normal(count))).tolist()
        data = {key: DETAILED[key] for key in ("duration", "request_throughput", "output_throughput", "model_id",
                                               "request_rate", "max_concurrency")}
        data |= dict(completed=count, failed=0, ttfts=ttfts, latencies=[t + 0.2 * scale for t in ttfts],
                     output_lens=[21] * count, errors=[""] * count, start_times=list(range(count)))
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(data | changes))
        return path
    return write


def test_two_files_with_single_requests_are_compared_with_an_interval(runs):
    base, same, slow, fast = runs("base"), runs("same", seed=1), runs("slow", 1.3), runs("fast", 0.7)
    for other, said in ((same, "SAME"), (slow, "SLOWER"), (fast, "FASTER")):
        row = compare(str(base), str(other), metric="ttft_p50_s").iloc[0]
        assert row["verdict"] == said and row["low"] < row["ratio"] < row["high"]
    assert compare(str(base), str(slow), metric="ttft_p50_s").iloc[0]["note"] == ""     # from samples, not intervals
    mean = compare(str(base), str(slow), metric="ttft_mean_s").iloc[0]
    assert mean["verdict"] == "SLOWER" and "stored intervals" in mean["note"]
    rate = compare(str(base), str(runs("more", request_throughput=99.0)), metric="requests_per_s").iloc[0]
    assert rate["verdict"] == "AMBIGUOUS" and rate["b"] == 99 and "without an interval" in rate["note"]


def test_files_of_the_same_name_are_not_taken_for_one_run(runs, tmp_path):
    one = runs("one")
    (tmp_path / "other").mkdir()
    two = Path(shutil.copy(one, tmp_path / "other" / "one.json"))
    row = compare(str(one), str(two), metric="ttft_p50_s").iloc[0]
    assert row["low"] < 1 < row["high"]
    assert read_bench(one).table()["run_id"][0] != read_bench(two).table()["run_id"][0]


@pytest.fixture
def kvlab(capsys, monkeypatch):
    """Runs a command line that must end well, and returns what it prints."""
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvlab", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        return capsys.readouterr().out
    return run


def test_without_single_requests_both_are_printed_and_nothing_is_said(kvlab):
    said = kvlab("compare", SAMPLES / "vllm/plain.json", SAMPLES / "aiperf/profile_export_aiperf.csv",
                 "--metric", "ttft_p50_s")
    assert "42.2 ms" in said and "37 ms" in said and "1 AMBIGUOUS" in said
    assert "A: plain.json has no single requests" in said and "measure with --save-detailed" in said
    assert "B: profile_export_aiperf.csv has no single requests" in said


def test_compare_of_two_tools_without_a_metric_takes_all_that_both_have(kvlab):
    sides = [str(SAMPLES / "aiperf"), str(SAMPLES / "guidellm")]
    assert default_metrics(*sides) == list(DEFAULT_METRICS)
    said = kvlab("compare", *sides)
    assert all(f"{metric} of B (guidellm) against A (aiperf)" in said for metric in DEFAULT_METRICS)
    assert "ttft_p50_s of B (guidellm) against A (aiperf): 1 SLOWER" in said
    assert said.count("B: concurrent@8: 1 requests failed") == 1        # once, not with every metric
    found = json.loads(kvlab("compare", *sides, "--json"))
    assert [one["metric"] for one in found] == list(DEFAULT_METRICS)


def test_another_model_or_load_is_said(runs):
    found = compare(str(runs("a")), str(runs("b", model_id="other", max_concurrency=16)), metric="ttft_p50_s")
    assert "model differs: meta-llama/Llama-3.1-8B / other" in found.attrs["warnings"]
    assert "load differs: rate inf, concurrency 8 / rate inf, concurrency 16" in found.attrs["warnings"]


def test_requests_that_resemble_their_neighbours_give_a_wider_interval():
    """A slow drift: taken one by one the interval of the mean would be as narrow as of the shuffled requests."""
    drift = np.linspace(1, 2, 500)
    shuffled = np.random.default_rng(0).permutation(drift)
    widths = [high - low for low, high, _ in (interval(list(one), "mean") for one in (drift, shuffled))]
    assert widths[0] > 2 * widths[1]
    assert [len(part) for part in rounds(range(23))] == [6, 6, 6, 5]


@pytest.mark.parametrize("count, stat, there", [(9, "mean", False), (10, "p50", True), (49, "p90", False),
                                                (50, "p90", True), (499, "p99", False), (500, "p99", True)])
def test_an_interval_needs_enough_requests(count, stat, there):
    low, _, note = interval([1 + i / count for i in range(count)], stat)
    assert (low is not None) == there == (note == "")


def changed(**changes):
    return json.dumps(DETAILED | changes)


@pytest.mark.parametrize("name, content, why", [
    ("a.json", "", "not JSON"), ("a.json", "[1]", "holds a list"), ("a.json", '{"a": 1}', "no load generator"),
    ("a.json", b"\xff\xfe{", "not UTF-8"), ("a.json", "[" * 100_000, "nested too deeply"),
    ("a.json", '{"metadata": {"guidellm_version": "1"}, "benchmarks": [7]}', "benchmark 1 has no metrics"),
    ("a.json", '{"metadata": {"guidellm_version": "1"}, "benchmarks": []}', "no latency and no throughput"),
    ("a.json", '{"aiperf_version": "0.13.0", "request_latency": {"unit": "fortnights", "avg": 3}}',
     "no latency and no throughput"),
    ("a.json", '{"aiperf_version": "0.13.0", "request_latency": {"unit": "ms", "avg": NaN}}', "no latency"),
    ("a.json", changed() + "\n{}", "line 2 is no result of vllm"),
    ("a.jsonl", RECORDS[2] + "\nnonsense\n", "line 2 is not JSON"),
    ("a.jsonl", RECORDS[2] + '\n{"metadata": {}}\n', "line 2 is no record of aiperf"),
    ("a.jsonl", RECORDS[0], "no latency and no throughput"),
    ("a.jsonl", RECORDS[2].replace('"request_start_ns":1', '"request_start_ns":-1'), "no request_start_ns"),
    ("a.csv", "Metric,avg,p50\n", "no latency and no throughput"),
    ("a.csv", "Run Info,Run Info\nRun ID\n", "three header lines"),
    ("a.csv", b"Metric,avg,\xff\n", "cannot be read as CSV"),
])
def test_a_broken_or_hostile_file_is_refused_in_one_sentence(tmp_path, name, content, why):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=why) as refused:
        read_bench(path)
    assert str(refused.value).startswith(str(path)) and "\n" not in str(refused.value)


@pytest.mark.parametrize("changes", [
    dict(ttfts=["x"] * 12), dict(ttfts=None), dict(itls=[1, 2]), dict(latencies=[math.nan] * 12), dict(errors="none"),
    dict(output_lens=[10**400] * 12), dict(model_id=["a"]), dict(mean_ttft_ms="fast"), dict(request_rate={}),
    dict(start_times=[None] * 12), dict(median_ttft_ms=-1), dict(model_id="\x1b[2J\n" * 99)])
def test_values_of_the_wrong_kind_are_missing_and_never_numbers(tmp_path, changes):
    path = tmp_path / "a.json"
    text = changed(**{name: v for name, v in changes.items() if name != "output_lens"})
    if "output_lens" in changes:
        text = text.replace('"output_lens": [20', '"output_lens": [1e400')
    path.write_text(text)
    bench = read_bench(path)
    schema().validate(bench.table())
    assert bench.model.isprintable() and len(bench.model) <= 100


def test_a_file_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_files, "LARGEST_FILE", 1000)
    for name in ("vllm/detailed.json", "guidellm/benchmarks.csv", "vllm/appended.json"):
        with pytest.raises(ValueError, match="larger than the 1,000 bytes"):
            read_bench(SAMPLES / name)


def test_more_times_between_chunks_than_are_read_are_left_out_and_said(monkeypatch):
    monkeypatch.setattr("kvlab.serving._bench_aiperf.MOST_SAMPLES", 50)
    bench = read_bench(SAMPLES / "aiperf/profile_export.jsonl")
    assert set(bench.cases[0].samples) == {"ttft", "tpot", "e2e"} and "itl_p50_s" not in set(bench.table()["metric"])
    assert any("times between chunks are more than the 50" in remark for remark in bench.remarks)


@settings(max_examples=40, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=4) | st.integers(),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                        st.sampled_from(["unit", "avg", "metrics", "successful", "percentiles", "count", "requests",
                                         "config", "strategy", "mean"]), inner, max_size=4), max_leaves=20))
def test_no_json_raises_anything_but_a_sentence(tmp_path_factory, inner):
    path = tmp_path_factory.mktemp("b") / "any.json"
    for data in ({"aiperf_version": inner, "request_latency": inner, "run_info": inner, "input_config": inner},
                 {"metadata": {"guidellm_version": inner}, "benchmarks": [inner, {"metrics": {"request_latency": inner,
                  "request_totals": inner}, "requests": inner, "config": inner}]},
                 DETAILED | {"ttfts": inner, "itls": inner, "errors": inner, "max_concurrency": inner}):
        path.write_text(json.dumps(data))
        try:
            schema().validate(read_bench(path).table())
        except ValueError as error:
            assert str(error).startswith(str(path))


def test_kvlabs_own_files_are_not_taken_for_others(tmp_path):
    for name, content in (("a.csv", "run_id,comparison_id\n"), ("a.jsonl", '{"commit": "x"}\n'), ("a.parquet", "PAR1"),
                          ("a.csv", ""), ("a.jsonl", "\x00")):
        (tmp_path / name).write_text(content)
        assert not is_bench(tmp_path / name)
    assert not is_bench(tmp_path) and not is_bench(tmp_path / "none.json")
    assert {field.name for field in fields(Case)} >= {"load", "stats", "samples"}


def test_two_watches_are_compared_by_their_medians_over_the_scrapes(tmp_path):
    """kvlab watch --out has a case per scrape, named by its time, so that none would be in common."""
    for name, usage in (("a", 0.4), ("b", 0.8)):
        rows = [dict(study="watch", case=f"{name}{i}", case_id=str(i), metric="kv_usage", unit="ratio", kind="measured",
                     method="counter", source="vllm", status="ok", value=usage + i / 1000) for i in range(30)]
        write_parquet(result_table(rows), tmp_path / f"{name}.parquet")
    row = compare(str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet"), metric="kv_usage").iloc[0]
    assert (row["a"], row["b"], row["verdict"]) == (pytest.approx(0.4145), pytest.approx(0.8145), "MORE")
