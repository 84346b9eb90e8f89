"""The benchmark gates: when one is met, missed or ambiguous, and what the command writes. No time is asserted."""
import json
from itertools import islice
from pathlib import Path

import pytest
import torch

from kvlab import bench, bench_kernels, bench_models, bench_serving, bench_simulator
from kvlab.bench import Gate
from kvlab.bench_inputs import OPERATORS, events
from kvlab.kv.block_pool import BlockPool
from kvlab.libraries import Library
from kvlab.model.config import DecoderConfig
from kvlab.model.decoder import Decoder
from kvlab.record.trace import trace_of
from kvlab.record.trace_summary import summary


@pytest.mark.parametrize("goal, low, high, met", [
    ("<= 1.0", 0.5, 1.0, True), ("<= 1.0", 0.9, 1.1, None), ("<= 1.0", 1.1, 1.2, False),
    (">= 12", 12, 20, True), (">= 12", 11, 13, None), (">= 12", 2, 11.9, False),
    ("within 0.98 1.02", 0.99, 1.01, True), ("within 0.98 1.02", 0.97, 1.0, None),
    ("within 0.98 1.02", 1.03, 1.05, False), ("within 0.98 1.02", 0.9, 0.97, False),
    ("includes 1", 0.99, 1.01, True), ("includes 1", 1.01, 1.02, None), ("includes 1", 1.03, 1.05, False),
    ("includes 1", 0.9, 0.97, False),
])
def test_a_gate_is_met_only_if_the_whole_interval_clears(goal, low, high, met):
    assert Gate("", "ratio", goal, None).met(low, high) is met


def test_an_ambiguous_gate_is_run_again_and_a_broken_one_is_missed_with_the_reason():
    answers = [(1.0, 0.9, 1.1), (1.0, 0.9, 1.1), (0.8, 0.7, 0.9)]
    row = bench._measured(Gate("g", "s", "<= 1.0", lambda: answers.pop(0)))
    assert (row["met"], row["value"], answers) == (True, 0.8, [])
    row = bench._measured(Gate("g", "s", "<= 1.0", lambda: (1.0, 0.9, 1.1)))
    assert row["met"] is None
    row = bench._measured(Gate("g", "s", "<= 1.0", lambda: 1 / 0))
    assert (row["met"], row["value"]) == (False, None) and "ZeroDivisionError" in row["error"]


@pytest.mark.parametrize("low, code", [(0.5, 0), (2.0, 1)])
def test_the_table_is_written_and_the_exit_code_says_whether_all_are_met(tmp_path, monkeypatch, capsys, low, code):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "gates", lambda: [Gate("one", "s", "<= 1.0", lambda: (low, low, low)),
                                                 Gate("two", "s", "<= 9.0", lambda: (1.0, 1.0, 1.0))])
    assert bench.main() == code
    rows = json.loads((tmp_path / "profiles" / "bench" / "bench.json").read_text())
    assert [row["name"] for row in rows] == ["one", "two"]
    assert all({"name", "value", "low", "high", "goal", "met"} <= set(row) for row in rows)
    assert ("met" if code == 0 else "MISSED") in capsys.readouterr().out


def test_the_trace_of_the_gate_is_one_that_torch_could_have_written():
    made = list(islice(events(), 490))
    found = summary(trace_of({"traceEvents": made}))
    assert found.calls == 10 and found.problems == () and found.not_counted == {}
    kernels = [event for event in made if event.get("cat") == "kernel"]
    assert sum(row["count"] for row in found.kernels) == len(kernels) == 60
    assert {row["operator"] for row in found.kernels} == {f"aten::{inner}" for _, inner, _ in OPERATORS}
    shapes = {str(event["args"]["Input Dims"]) for event in made if event.get("cat") == "cpu_op"}
    assert len(shapes) == 6 * 10 and json.loads(json.dumps(made)) == made


def test_every_gate_measures_an_interval_around_its_value(monkeypatch):
    monkeypatch.setattr(bench, "PAIRS", 3)
    for name, value in dict(ROUNDS=2, STEPS=100, LONG=500).items():
        monkeypatch.setattr(bench_simulator, name, value)
    monkeypatch.setattr(bench_kernels, "SWEEP", (512, 1024, 2048))
    longer = ("32768", "figure", "export", "trace", "doctor", "SmolLM2", "RSS", "vLLM", "prompt, flash", "65536",
              "whole command", "16384", "fp8", "int8/token", "sdpa ÷ paged", "paged, block 16")          # and no other
    for gate in bench.gates():
        if any(word in gate.name for word in longer):
            continue
        value, low, high = gate.measure()
        assert low <= value <= high and value >= 0, gate.name


@pytest.mark.parametrize("mix", bench_serving.MIXES)
def test_the_operations_of_the_pool_gate_fill_a_pool_and_leave_nothing_behind(mix):
    pool = BlockPool(bench_serving.NUM_BLOCKS, bench_serving.BLOCK_SIZE)
    operations = bench_serving._operations(mix)
    assert operations == bench_serving._operations(mix) and len(operations) > bench_serving.OPERATIONS
    for _ in range(2):
        bench_serving._ours(pool, operations)
    pool.check([])
    assert (pool.evictions > 0) == (mix == "hashes and hits")


def test_without_vllm_its_gates_are_not_run(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv("KVLAB_VLLM", raising=False)
    for _, _, measure in bench_serving.gates():
        with pytest.raises(bench_models.NotRun, match="KVLAB_VLLM"):
            measure()


@pytest.mark.parametrize("absent, measure, said", [
    ("gguf", bench_models.paged_against_contiguous, "gguf is not installed; pip install 'kvlab[models]'"),
    ("transformers", bench_models.scoring_against_transformers, "transformers is not installed")])
def test_a_gate_whose_package_is_absent_is_not_run_and_fails_nothing(monkeypatch, tmp_path, capsys, absent, measure,
                                                                     said):
    def library(module):
        return Library(module, None, f"{module} is not installed" if module == absent else None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvlab.libraries.library", library)
    if absent == "transformers":
        monkeypatch.setattr(bench_models, "_decoder", lambda: None)
    for made in ("_decoder", "_in_transformers"):               # nothing that another test left behind
        monkeypatch.setattr(bench_models, made, getattr(getattr(bench_models, made), "__wrapped__",
                                                        getattr(bench_models, made)))
    monkeypatch.setattr(bench, "gates", lambda: [Gate("model", "ratio", ">= 1", measure)])
    assert bench.main() == 0
    (row,) = json.loads((tmp_path / "profiles" / "bench" / "bench.json").read_text())
    assert (row["met"], row["value"]) == (None, None) and row["error"].startswith(f"not run: {said}")
    assert "not run" in capsys.readouterr().out


@pytest.fixture
def tiny(monkeypatch):
    """The gates on a decoder of two layers, over few tokens."""
    decoder = Decoder.random(DecoderConfig(vocab_size=1000, hidden_size=24, intermediate_size=32, num_layers=2,
                                           num_q_heads=6, num_kv_heads=2, head_dim=8, context=128, tied=True))
    monkeypatch.setattr(bench_models, "_decoder", lambda: decoder)
    monkeypatch.setattr(bench_models, "_in_transformers", bench_models._in_transformers.__wrapped__)
    for name, value in dict(TOKENS=20, KV_LEN=40, SCORINGS=3, STEPS=3).items():
        monkeypatch.setattr(bench_models, name, value)
    return decoder


def test_scoring_is_held_against_transformers_on_the_same_weights(tiny, monkeypatch):
    pytest.importorskip("transformers", reason="compares with transformers")
    value, low, high = bench_models.scoring_against_transformers()
    assert 0 < low <= value <= high
    theirs = bench_models._in_transformers()
    theirs.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(-theirs.model.layers[1].mlp.up_proj.weight)
    monkeypatch.setattr(bench_models, "_in_transformers", lambda: theirs)
    with pytest.raises(RuntimeError, match="disagree"):
        bench_models.scoring_against_transformers()


def test_a_step_from_a_paged_cache_is_held_against_the_same_from_a_contiguous_one(tiny, monkeypatch):
    caches = []
    filled = bench_models._filled
    monkeypatch.setattr(bench_models, "_filled", lambda *given: caches.append(filled(*given)) or caches[-1])
    value, low, high = bench_models.paged_against_contiguous()
    assert 0 < low <= value <= high
    assert [cache.layout.block_size for cache in caches] == [None, 16]
    assert all(cache.kv_lens == [40 + 3 + 1] for cache in caches)           # so each step was at the same length


def test_the_peak_of_scoring_is_read_from_a_process_of_its_own(tmp_path):
    pytest.importorskip("safetensors", reason="reads a model from safetensors")
    if not Path("/proc/self/status").exists():
        pytest.skip("there is no /proc here")
    from safetensors.torch import save_file
    facts = dict(model_type="llama", vocab_size=1000, hidden_size=24, intermediate_size=16, num_hidden_layers=1,
                 num_attention_heads=1, num_key_value_heads=1, head_dim=8, max_position_embeddings=128,
                 rms_norm_eps=1e-5, rope_theta=1e4, hidden_act="silu", tie_word_embeddings=False)
    (tmp_path / "config.json").write_text(json.dumps(facts))
    save_file(Decoder.random(DecoderConfig.from_config(facts, "made")).weights, tmp_path / "model.safetensors")
    assert 50e6 < bench_models._peak(str(tmp_path), 20) < 700e6                 # torch and pandas are most of it
