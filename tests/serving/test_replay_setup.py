"""What a recorded run says of itself, in whatever words: model, formats, GPUs, blocks, settings, files."""
import json
import shutil

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st
from made_runs import META, changed, row, write

from kvlab.serving._replay_run import read_run
from kvlab.serving._replay_setup import setup
from kvlab.serving.replay import replay


def facts_of(folder, meta, **given):
    return setup(read_run(write(folder, [row(0)], meta)), **given)


def test_settings_written_as_text_or_null_are_read(tmp_path):
    text = facts_of(tmp_path / "a", changed(engine_kwargs={
        "max_num_seqs": "64", "max_num_batched_tokens": 4096.0, "enable_chunked_prefill": "False",
        "dtype": "torch.float16", "kv_cache_dtype": "FP8"},
        kv_cache={"gpu_memory_utilization": "0.9", "enable_prefix_caching": "true"}))
    assert (text.config.max_num_seqs, text.config.max_num_batched_tokens) == (64, 4096)
    assert text.config.chunked_prefill is False and text.config.prefix_caching is True
    assert text.formats.kv_format == "fp8_e4m3" and text.formats.multiplied == "fp16"
    bare = {"model": META["model"], "engine_kwargs": None, "kv_cache": {"num_gpu_blocks": None}, "hardware": [],
            "resolved_config": "gone"}
    null = facts_of(tmp_path / "b", bare, gpu="H200")
    assert (null.config.max_num_seqs, null.config.max_num_batched_tokens) == (1024, 8192)
    assert null.facts["max_num_seqs"].source.startswith("default") and null.blocks_kind == "capacity"
    (tmp_path / "b" / "meta.json").write_text('{"model": "Qwen/Qwen3-32B", "kv_cache": {"block_size": NaN}, '
                                              '"y": [Infinity]}')
    assert setup(read_run(tmp_path / "b"), gpu="H200").spec.name == "Qwen/Qwen3-32B"
    (tmp_path / "b" / "meta.json").unlink()
    assert setup(read_run(tmp_path / "b"), model="Qwen/Qwen3-32B", gpu="H200").facts["engine"].source == "assumed"


@pytest.mark.parametrize("name,architecture,itemsize", [
    ("/data/model/Qwen3-32B/", "Qwen/Qwen3-32B", 2.0),
    ("C:\\models\\Qwen3-32B", "Qwen/Qwen3-32B", 2.0),
    ("/hub/models--Qwen--Qwen3-32B/snapshots/0123abc", "Qwen/Qwen3-32B", 2.0),
    ("qwen/qwen3-32b-fp8", "Qwen/Qwen3-32B", 1.0),
    ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic", "meta-llama/Meta-Llama-3.1-8B", 1.0),
    ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "meta-llama/Meta-Llama-3.1-8B", 1.0),
    ("somebody/Qwen3-30B-A3B-Instruct-2507-AWQ-4bit", "Qwen/Qwen3-30B-A3B", 0.52),
    ("nvidia/Qwen3-32B-NVFP4", "Qwen/Qwen3-32B", 0.5625),
])
def test_a_fork_that_keeps_the_architecture_is_found_and_said(tmp_path, name, architecture, itemsize):
    found = facts_of(tmp_path / "run", changed(model=name) | {"kv_cache": {}}, gpu="RTX PRO 6000")
    assert found.spec.name == architecture and found.formats.itemsize == itemsize
    assert name in found.facts["model"].source
    assert bool(found.formats.note) == (itemsize < 2) and ("bytes each" in "".join(found.notes)) == (itemsize < 2)
    bf16 = facts_of(tmp_path / "bf16", changed(model=architecture) | {"kv_cache": {}}, gpu="RTX PRO 6000")
    assert (found.blocks > bf16.blocks) == (itemsize < 2)


def test_formats_that_the_run_states_stand_above_its_name(tmp_path):
    meta = changed(model="Qwen/Qwen3-32B-FP8") | {"resolved_config": {"model_config": {"quantization": None}}}
    assert facts_of(tmp_path / "a", meta).formats.itemsize == 2.0
    meta["resolved_config"]["model_config"]["quantization"] = "gptq_marlin"
    assert facts_of(tmp_path / "a", meta).formats.itemsize == 0.52


def test_weights_of_a_tied_model_are_counted_once(tmp_path):
    """Qwen3-0.6B's head is its embedding table: 1.11 GiB in all, not 1.4."""
    from kvlab.serving._replay_setup import _rank_bytes
    for name, gpu_name in (("Qwen/Qwen3-0.6B", "RTX 4090"), ("Qwen/Qwen3-30B-A3B", "RTX PRO 6000")):
        found = facts_of(tmp_path / "run", changed(model=name), gpu=gpu_name)
        assert _rank_bytes(found.spec, 1, 1, found.formats) == 2 * found.spec.params
    half = _rank_bytes(found.spec, 1, 2, found.formats)             # two replicas share the experts alone
    assert half == 2 * (found.spec.params - 48 * 64 * 3 * 2048 * 768)


def test_another_gpu_than_the_runs_is_noted(tmp_path):
    folder = write(tmp_path / "run", [row(0)])
    assert any("meta.json says NVIDIA GeForce RTX 4090; H200" in note for note in replay(folder, gpu="H200").notes)
    assert not any("stands above" in note for note in replay(folder, gpu="RTX 4090").notes)


def test_blocks_of_replicas_are_told_from_their_sum(tmp_path):
    two = changed(model="Qwen/Qwen3-30B-A3B", engine_kwargs={"data_parallel_size": 2},
                  kv_cache={"num_gpu_blocks": 75638})
    assert facts_of(tmp_path / "a", two, gpu="RTX PRO 6000").blocks == 37819
    assert facts_of(tmp_path / "a", two, gpu="RTX PRO 6000", blocks=75638).blocks == 37819
    assert facts_of(tmp_path / "a", two, gpu="RTX PRO 6000", blocks=30000).blocks == 30000
    lone = two | {"kv_cache": {}}
    found = facts_of(tmp_path / "b", lone, gpu="RTX PRO 6000", blocks=75638)      # 119 GB: more than one card has
    assert found.blocks == 37819 and "sum over 2 replicas" in found.facts["blocks"].source
    assert facts_of(tmp_path / "b", lone, gpu="RTX PRO 6000", blocks=37819).blocks == 37819
    tokens = facts_of(tmp_path / "b", two | {"kv_cache": {"num_kv_tokens": 1210208}}, gpu="RTX PRO 6000")
    assert tokens.blocks == 37819 and "sums over its 2" in tokens.facts["blocks"].source
    pool = facts_of(tmp_path / "c", changed(kv_cache={"num_gpu_blocks": None, "kv_cache_memory_bytes": 2**30}))
    assert pool.blocks == 2**30 // (16 * 131_072) and pool.blocks_kind == "capacity"


PLACES = [("model",), ("vllm_version",), ("engine_kwargs",), ("kv_cache",), ("hardware",), ("resolved_config",)] + [
    (section, name) for section, names in {
        "engine_kwargs": ("tensor_parallel_size", "data_parallel_size", "max_num_seqs", "max_model_len", "dtype",
                          "kv_cache_dtype", "quantization", "block_size", "disable_custom_all_reduce"),
        "kv_cache": ("num_gpu_blocks", "num_kv_tokens", "block_size", "gpu_memory_utilization", "kv_cache_memory_bytes",
                     "enable_prefix_caching"),
        "hardware": ("device_name",)}.items() for name in names]
JUNK = st.sampled_from([None, "", "x", -1, 0, 1, 2, 3.5, "2", True, [], {}, 10**30, "\x1b[31m", 1e308, "9" * 5000])


@drawn(st.dictionaries(st.sampled_from(PLACES), JUNK, min_size=1, max_size=3))
def test_whatever_stands_in_meta_is_replayed_or_one_sentence(tmp_path_factory, junk):
    meta = json.loads(json.dumps(META))
    for place, value in sorted(junk.items(), key=lambda item: -len(item[0])):
        meta.setdefault(place[0], {})
        if len(place) == 1:
            meta[place[0]] = value
        else:
            meta[place[0]][place[1]] = value
    folder = write(tmp_path_factory.mktemp("junk"), [row(0)], meta)
    try:
        assert replay(folder).requests == 1
    except (ValueError, KeyError) as error:
        assert 20 < len(str(error.args[0])) < 700 and "\n" not in str(error.args[0])


def test_files_of_other_names_and_a_folder_around_them(tmp_path):
    import gzip
    folder = write(tmp_path / "Llama" / "vllm", [row(0)]) if (tmp_path / "Llama").mkdir() is None else None
    assert read_run(tmp_path / "Llama").path == folder
    for name in ("requests.jsonl", "meta.json"):
        (folder / name).rename(folder / f"rtx4090_{name}")
    assert replay(folder).requests == 1
    packed = write(tmp_path / "packed", [row(0)])
    (packed / "requests.jsonl.gz").write_bytes(gzip.compress((packed / "requests.jsonl").read_bytes()))
    (packed / "requests.jsonl").unlink()
    assert replay(packed).requests == 1
    (packed / "other_requests.jsonl").write_text("")
    with pytest.raises(ValueError, match="more than one that might be: other_requests.jsonl, requests.jsonl.gz"):
        replay(packed)
    write(tmp_path / "Llama" / "again", [row(0)])
    with pytest.raises(ValueError, match="has no requests.jsonl.*give one of again, vllm"):
        replay(tmp_path / "Llama")


def test_a_series_that_counts_from_elsewhere_is_said(tmp_path):
    folder = write(tmp_path / "run", [row(0)], series="t,running\n1787267981,1\n1787267982,1\n")
    assert replay(folder).series_mae == {"running": "its times do not count from the run's start"}


def test_what_was_fitted_on_such_a_run_is_said(tmp_path):
    """Each constant's run, also those of the collectives and of the experts."""
    dense = changed(model="Qwen/Qwen3-32B", engine_kwargs={"tensor_parallel_size": 2})
    for meta, seen in ((dense, "Qwen3-32B"), (changed(model="Qwen/Qwen3-8B"), ""),
                       (changed(model="Qwen/Qwen3-30B-A3B", engine_kwargs={"data_parallel_size": 2}), "Qwen3-30B-A3B")):
        folder = write(tmp_path / "run", [row(0)], meta)
        found = replay(folder, gpu="RTX PRO 6000", blocks=3000).step_time["in_sample"]
        assert seen in found and bool(seen) == bool(found)
    folder = write(tmp_path / "run", [row(0)], META)
    assert replay(folder, constants="RTX PRO 6000 Blackwell Server").step_time["in_sample"] == ""
    assert "this run; the constants" in replay(folder, fit="scalar").step_time["in_sample"]


def test_ranks_that_reduce_by_nccl_alone_take_its_constants(tmp_path):
    meta = changed(model="Qwen/Qwen3-32B", engine_kwargs={"tensor_parallel_size": 2})
    own = replay(write(tmp_path / "run", [row(0)], meta), gpu="RTX PRO 6000")
    meta["engine_kwargs"]["disable_custom_all_reduce"] = True
    nccl = replay(write(tmp_path / "run", [row(0)], meta), gpu="RTX PRO 6000")
    assert nccl.step_time["constants"]["reduce_s"] == own.step_time["constants"]["nccl_s"] != \
        own.step_time["constants"]["reduce_s"]
    assert nccl.simulated["tpot_mean"] < own.simulated["tpot_mean"]


@pytest.mark.parametrize("meta,why", [
    ({}, "does not say its model: give it, kvlab simulate MODEL --replay"),
    (changed(model="no-such/Model-7B"), "Give the model, kvlab simulate MODEL --replay"),
    (changed(hardware={"device_name": "NVIDIA Quantum 9000"}), "no gpu named 'NVIDIA Quantum 9000'"),
    (changed(hardware={"device_name": "NVIDIA A100"}), "could be any of"),
    (changed(engine_kwargs={"pipeline_parallel_size": 2}), "2 pipeline stages"),
    (changed(engine_kwargs={"max_num_seqs": 0}), "max_num_seqs = 0 in meta.json"),
    (changed(engine_kwargs={"max_num_seqs": "many"}), "max_num_seqs = 'many'"),
    (changed(engine_kwargs={"scheduling_policy": "lottery"}), "policy='lottery' is unknown"),
    (changed(engine_kwargs={"kv_cache_dtype": "int3"}), "kv_cache_dtype 'int3'"),
    (changed(engine_kwargs={"quantization": "quip"}), "weights quantized by 'quip'"),
    (changed(model="deepseek-ai/DeepSeek-V3.2-Exp-16L64E"), "Give the model"),   # a cut-down model is another one
    (changed(engine_kwargs={"dtype": "float32"}), "dtype 'float32' is not known"),
    (changed(engine_kwargs={"enable_chunked_prefill": "perhaps"}), "chunked_prefill = 'perhaps' in meta.json is neit"),
    (changed(kv_cache={"gpu_memory_utilization": "most"}), "gpu_memory_utilization = 'most' in meta.json is no numbe"),
    (changed(engine_kwargs={"scheduling_policy": 3}), "policy = 3 in meta.json is no text"),
    (changed(kv_cache={"num_gpu_blocks": 10**9}), "blocks = 1000000000 in meta.json is no whole number from 1 to 10,0"),
    (changed(kv_cache={"num_gpu_blocks": 1}), "1 blocks for 1 replicas are none to serve with"),
    (changed(engine_kwargs={"tensor_parallel_size": 3}), "tp=3"),
])
def test_what_a_run_cannot_have_been_is_refused(tmp_path, meta, why):
    with pytest.raises((ValueError, KeyError), match=why):
        replay(write(tmp_path / "run", [row(0)], meta))


def test_defaults_follow_the_engines_version(tmp_path):
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    folder = write(tmp_path / "run", [row(0)], changed(vllm_version="0.10.2", kv_cache={}) | {"kv_cache": {}})
    old = setup(read_run(folder))
    assert old.config.async_scheduling is False and old.facts["async_scheduling"].source == "default of vLLM"
    assert old.config.prefix_caching and old.blocks_kind == "capacity" and old.facts["block_size"].source == "default"
    new = setup(read_run(write(folder, [row(0)], changed(vllm_version="0.28.0") | {"kv_cache": {}})))
    assert new.config.async_scheduling and new.blocks != old.blocks  # utilisation 0.92, CUDA graphs counted
