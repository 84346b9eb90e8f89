"""The vocabulary: every mapping on an exposition of cited origin, vLLM's and SGLang's against their own sources."""
import ast
import importlib.util
import math
import os
from pathlib import Path

import pytest

from kvlab.catalog import rows
from kvlab.serving.metrics import MEASURES, PREFIXES, engine_of, mappings, read
from kvlab.serving.scrape import parse

FOLDER = Path(__file__).parent / "expositions"
EXPECTED = {
    "vllm_0.32.0": dict(running=8, waiting=2, kv_usage=0.5, preemptions=4, finished=20, prompt_tokens=4000,
                        generated_tokens=1000, prefix_queried_tokens=4000, prefix_hit_tokens=1000, kv_tokens=2 * 41408,
                        kv_blocks=2 * 2588, block_size=16),
    "vllm_old_names": dict(running=1, waiting=4, kv_usage=0.5, preemptions=2, prefix_queried_tokens=100,
                           prefix_hit_tokens=25),
    # 14 and 2: neither the second rank's copies nor the breakdown by priority are added
    "sglang_0.5.23": dict(running=14, waiting=2, kv_usage=0.6, preemptions=3, finished=20, prompt_tokens=1000,
                          generated_tokens=100, prefix_queried_tokens=1000, prefix_hit_tokens=250, kv_tokens=40000,
                          kv_blocks=40000, block_size=1),
    "tgi_3": dict(running=5, waiting=3, finished=148, prompt_tokens=18000, generated_tokens=12500, kv_tokens=35000),
    "triton_trtllm": dict(running=3, waiting=4, kv_usage=0.25, finished=30, prompt_tokens=9000, generated_tokens=3000,
                          kv_tokens=399_360, kv_blocks=6240, block_size=64),
    "triton_trtllm_old": dict(running=3, waiting=4, kv_usage=1560 / 6240, kv_tokens=399_360, kv_blocks=6240,
                              block_size=64),
    "trtllm_serve": dict(running=6, waiting=1, kv_usage=0.62, finished=42, prompt_tokens=4000, generated_tokens=900,
                         prefix_queried_tokens=4000, prefix_hit_tokens=1000, kv_tokens=32000, kv_blocks=1000,
                         block_size=32),
    # twice the same 5 tokens; the second time 4 were found
    "llamacpp_2026.10": dict(running=0, waiting=0, prompt_tokens=10, generated_tokens=16, prefix_queried_tokens=10,
                             prefix_hit_tokens=4),
    "llamacpp_old": dict(running=2, waiting=1, kv_usage=0.5, prompt_tokens=10, generated_tokens=20),
}
HISTOGRAMS = {"vllm_0.32.0": {"queue_s": 8, "ttft_s": 8, "tpot_s": 8, "itl_s": 392, "e2e_s": 8},
              "vllm_old_names": {"itl_s": 4}, "tgi_3": {"queue_s": 148, "tpot_s": 148, "e2e_s": 148},
              "sglang_0.5.23": {"queue_s": 20, "ttft_s": 20, "tpot_s": 20, "itl_s": 100, "e2e_s": 20},
              "trtllm_serve": {"queue_s": 42, "ttft_s": 42, "tpot_s": 42, "e2e_s": 42}}


def snapshot(text, **more):
    return read(parse(text), 1.0, **more)


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.txt")))
def test_an_exposition_is_read_whole(name):
    text = (FOLDER / f"{name}.txt").read_text()
    assert text.startswith("# Origin: ")
    got = snapshot(text)
    assert name.startswith(got.engine)
    values = {measure: got.value(measure) for measure in MEASURES if got.value(measure) is not None}
    assert values == pytest.approx(EXPECTED[name])
    assert {measure: sum(buckets[-1][1] for buckets in series.values())
            for measure, series in got.histograms.items()} == HISTOGRAMS.get(name, {})
    assert set(got.missing) == set(MEASURES) - set(values) - set(got.histograms) and all(got.missing.values())


@pytest.mark.parametrize("engine", PREFIXES)
def test_every_engine_has_or_lacks_every_measure(engine):
    assert set(mappings(engine)) == set(MEASURES)
    for measure, (known, why) in mappings(engine).items():
        assert known or why, measure
        assert all(mapped.source for mapped in known)
    assert {row["measure"] for row in rows("engine_metrics.csv")} == set(MEASURES)
    for row in rows("engine_metrics.csv"):
        assert row["source"] and (row["metric"] or row["note"]), row


def defined(source):
    """{metric name: "Gauge" | "Counter" | "Histogram"} that a Python file gives to prometheus_client's classes."""
    found = {}
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rsplit(".", 1)[-1].strip("_").removesuffix("_cls").capitalize()
            for keyword in node.keywords:
                if keyword.arg == "name" and isinstance(keyword.value, ast.Constant):
                    found[keyword.value.value] = called
    return found


def engine_source(package, variable, *inside):
    folder, spec = os.environ.get(variable), importlib.util.find_spec(package)
    if not folder and spec and spec.submodule_search_locations:
        folder = spec.submodule_search_locations[0]
    path = Path(folder or ".").joinpath(*inside)
    if not folder or not path.is_file():
        pytest.skip(f"{package} is not installed and {variable} names no folder with {'/'.join(inside)}")
    return path


@pytest.mark.parametrize("engine, inside", [("vllm", ("v1", "metrics", "loggers.py")),
                                            ("sglang", ("srt", "observability", "metrics_collector.py"))])
def test_the_newest_names_are_those_of_the_engine_itself(engine, inside):
    """Of each measure the first mapped name; the folder is the package's, as `site-packages/vllm`."""
    names = defined(engine_source(engine, f"KVLAB_{engine.upper()}_SOURCE", *inside))
    assert len(names) > 40
    for measure, (known, _) in mappings(engine).items():
        for term in known[0].terms:
            if term.number_in:
                continue
            kind = names.get(term.metric) or names.get(term.metric.removesuffix("_total"))
            assert kind == MEASURES[measure].type.capitalize(), (measure, term.metric, kind)


def test_labels_that_carry_numbers_are_those_of_vllms_configuration():
    path = engine_source("vllm", "KVLAB_VLLM_SOURCE", "config", "cache.py")
    fields = {node.target.id for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
              if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    for measure in ("kv_tokens", "kv_blocks", "block_size"):
        assert mappings("vllm")[measure][0][0].terms[0].number_in in fields


def test_the_engine_is_known_by_most_of_the_names():
    assert engine_of(["python_info", "tgi_queue_size", "vllm:x", "vllm:y"]) == "vllm"
    assert engine_of(["nv_inference_count", "nv_trt_llm_request_metrics"]) == "triton"
    with pytest.raises(ValueError, match="none of its 2 metrics is of an engine that kvlab knows.*vllm:"):
        engine_of(["go_info", "up"])
    with pytest.raises(KeyError, match="Did you mean 'sglang'"):
        mappings("slang")


@pytest.mark.parametrize("value, why", [("NaN", "gives nan"), ("+Inf", "gives inf"), ("-1", "gives -1"),
                                        ("1e300", "gives 1e+300"),
                                        ("42.0", r"gives 42.0, which is no share between 0 and 1")])
def test_a_value_that_is_none_is_missing_and_not_zero(value, why):
    got = snapshot(f"vllm:kv_cache_usage_perc {value}\nvllm:num_requests_running 3\n")
    assert got.value("kv_usage") is None and why in got.missing["kv_usage"] and "kv_usage" in got.unreadable
    assert got.value("running") == 3


def test_what_a_server_does_not_export_yet_is_missing_with_the_names():
    got = snapshot("sglang:num_running_reqs 3\n")
    assert got.value("running") == 3                                  # a label that is absent counts as ""
    assert got.missing["prefix_hit_tokens"] == "this server does not export sglang:cached_tokens_total (yet)"
    assert "prefix_hit_tokens" not in got.unreadable
    assert "no metric of its cache's use" in snapshot("tgi_queue_size 1\n").missing["kv_usage"]


def test_labels_that_hold_no_number_yet():
    got = snapshot('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1\n')
    assert got.value("kv_blocks") is None and got.value("block_size") == 16


@pytest.mark.parametrize("lines, why", [
    ('vllm:request_queue_time_seconds_bucket{le="abc"} 1\n', "no bound that is a number"),
    ('vllm:request_queue_time_seconds_bucket{le="0.3"} 1\n', "lacks its last bucket"),
    ('vllm:request_queue_time_seconds_bucket{le="+Inf"} NaN\n', "gives nan")])
def test_broken_histograms(lines, why):
    assert why in snapshot("# TYPE vllm:request_queue_time_seconds histogram\n" + lines).missing["queue_s"]


def test_hostile_labels_are_only_data():
    label = "\x1b[31m" + "x" * 100_000 + "\\n\\\""
    got = snapshot(f'vllm:num_requests_running{{model_name="{label}"}} 2\nvllm:num_requests_waiting{{a="}} 9\\n"}} 1\n')
    assert got.value("running") == 2 and got.value("waiting") == 1


def test_kinds():
    assert snapshot("kvlab_sim:num_requests_running 1\n").kind == "simulated"
    assert snapshot("vllm:num_requests_running 1\n").kind == "measured"
    assert not any(math.isnan(value) for value in EXPECTED["vllm_0.32.0"].values())
