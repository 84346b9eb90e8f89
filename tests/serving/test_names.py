"""The tables of names: what releases have, when names came and went, and the script that extracts them."""
import importlib.util
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.serving import names

ROOT = Path(__file__).parents[2]


def test_the_engines_that_have_a_table():
    assert set(names.tables()) == {"vllm", "sglang", "llama.cpp", "tgi", "triton", "tensorrt_llm"}
    assert names.table("vllm").newest == "0.32.0" and names.table("vllm").releases[0] == "0.8.5"
    assert names.table("sglang").newest == "0.5.23"


@pytest.mark.parametrize("engine, kind, scope, least", [
    ("vllm", "env", "documented", 300), ("vllm", "flag", "serve", 240), ("vllm", "kwarg", "LLM", 240),
    ("vllm", "kwarg", "SamplingParams", 30), ("vllm", "metric", "", 100), ("sglang", "env", "documented", 700),
    ("sglang", "flag", "serve", 500), ("sglang", "kwarg", "Engine", 500), ("sglang", "metric", "", 150),
    ("llama.cpp", "flag", "serve", 300), ("llama.cpp", "metric", "", 16), ("tgi", "flag", "serve", 50),
    ("tgi", "metric", "", 21), ("triton", "metric", "", 30), ("tensorrt_llm", "metric", "", 60)])
def test_tables_are_not_half_empty(engine, kind, scope, least):
    table = names.table(engine)
    there = [row for row in table.names if (row.kind, row.scope) == (kind, scope) and row.exists(table.newest)]
    assert len(there) >= least


def test_every_row_is_whole():
    for engine, table in names.tables().items():
        assert len({(row.kind, row.name, row.scope) for row in table.names}) == len(table.names)
        for row in table.names:
            assert row.engine == engine and row.kind in names.KINDS and row.source and row.name == row.name.strip()
            assert row.type == "" or row.kind != "metric" or row.type in names.SUFFIXES
            for version in (row.since, row.until):
                assert version in ("", names.NEVER) or names.key(version)
            if row.since and row.until and row.until != names.NEVER:
                assert names.key(row.since) <= names.key(row.until)


@pytest.mark.parametrize("kind, name, scope", [
    ("flag", "--max-model-len", "serve"), ("flag", "--scheduling-policy", "serve"), ("flag", "--port", "serve"),
    ("env", "VLLM_LOGGING_LEVEL", "documented"), ("kwarg", "gpu_memory_utilization", "LLM"),
    ("kwarg", "top_p", "SamplingParams"), ("kwarg", "enable_log_requests", "AsyncEngineArgs")])
def test_names_everybody_uses_are_there(kind, name, scope):
    assert names.table("vllm").find(kind, name, (scope,))[0].exists("0.32.0")


def test_a_renamed_metric_says_since_when_and_what_instead():
    row = names.table("vllm").find("metric", "vllm:gpu_cache_usage_perc")[0]
    assert row.exists("0.10.2") and row.exists("0.11.2") and not row.exists("0.12.0")
    assert row.replaced_by == "vllm:kv_cache_usage_perc" and "29330" in row.source
    new = names.table("vllm").find("metric", "vllm:kv_cache_usage_perc")[0]
    assert not new.exists("0.8.5") and new.exists("0.11.0") and new.type == "gauge"


def test_a_series_is_found_by_its_metric():
    assert names.metric("vllm", "vllm:num_preemptions_total").type == "counter"
    assert names.metric("vllm", "vllm:time_to_first_token_seconds_bucket").type == "histogram"
    assert names.metric("vllm", "vllm:num_requests_running_total") is None          # a gauge has no _total
    assert names.metric("vllm", "vllm:time_to_first_token_seconds_total") is None
    assert names.metric("llama.cpp", "llamacpp:prompt_tokens_total").type == "counter"


@given(st.tuples(*[st.integers(0, 99)] * 3), st.tuples(*[st.integers(0, 99)] * 3))
def test_versions_compare_as_numbers(a, b):
    assert (names.key(".".join(map(str, a))) < names.key(".".join(map(str, b)))) == (a < b)


def test_a_version_outside_the_table_is_refused():
    assert names.table("vllm").checked("0.10.1") == "0.10.1"                        # between two releases read
    for version in ("0.33.0", "0.1", "newest", "0.32.0; rm"):
        with pytest.raises(ValueError, match="vllm"):
            names.table("vllm").checked(version)
    with pytest.raises(KeyError, match="Did you mean 'vllm'"):
        names.table("vlm")


@pytest.fixture(scope="module")
def extract():
    spec = importlib.util.spec_from_file_location("engine_names", ROOT / "tools" / "engine_names.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def release(folder, metric, field):
    """A release of a small vLLM: what it names lies in the places where the real one has it."""
    (folder / "vllm/engine").mkdir(parents=True)
    (folder / "vllm/envs.py").write_text('environment_variables: dict = {"VLLM_ONE": lambda: 1 / 0}\n')
    (folder / "vllm/engine/arg_utils.py").write_text(
        f"class EngineArgs:\n    model: str = 'm'\n    {field}: int = 0\n    _hidden: int = 0\n"
        "def add(p):\n    p.add_argument('--max-model-len', '-m', type=int)\n    raise SystemExit\n")
    (folder / "vllm/metrics.py").write_text(
        f"Counter(name='{metric}_total')\nself._gauge_cls(name='vllm:one_two')\nx = 'vllm::op_name'\n")
    return folder


def test_extraction_reads_and_never_runs(extract, tmp_path, monkeypatch):
    old = extract.read(release(tmp_path / "a", "vllm:old_name", "gone_field"), "vllm")
    new = extract.read(release(tmp_path / "b", "vllm:new_name", "new_field"), "vllm")
    monkeypatch.setattr(extract, "HERE", tmp_path)
    (tmp_path / "engine_renames.csv").write_text(
        "engine,kind,name,scope,until,replaced_by,note,source\n"
        "vllm,metric,vllm:old_name,,,vllm:new_name,why,https://x\n"
        "vllm,env,VLLM_MYTH,documented,never,--flag,,\n")
    rows = {(r["kind"], r["name"], r["scope"]): r for r in extract.table("vllm", {"0.1": old, "0.2": new})}
    assert rows["env", "VLLM_ONE", "documented"]["since"] == rows["env", "VLLM_ONE", "documented"]["until"] == ""
    assert rows["metric", "vllm:old_name", ""]["until"] == "0.1"
    assert rows["metric", "vllm:old_name", ""]["replaced_by"] == "vllm:new_name"
    assert rows["metric", "vllm:new_name", ""]["since"] == "0.2"
    assert rows["metric", "vllm:new_name", ""]["type"] == "counter"
    assert rows["metric", "vllm:one_two", ""]["type"] == "gauge" and ("metric", "vllm:op_name", "") not in rows
    assert rows["kwarg", "gone_field", "LLM"]["until"] == "0.1" and ("kwarg", "_hidden", "LLM") not in rows
    assert ("flag", "--max-model-len", "serve") in rows and ("flag", "-m", "serve") in rows
    assert rows["env", "VLLM_MYTH", "documented"]["until"] == "never"
    assert [r["name"] for r in rows.values() if r["kind"] == "release"] == ["0.1", "0.2"]


def test_the_wheel_carries_the_tables():
    assert re.search(r'"/data/engine_names/\*\.csv"', (ROOT / "pyproject.toml").read_text())
