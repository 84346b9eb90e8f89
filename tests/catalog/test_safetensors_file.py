"""Safetensors headers: counts and stored bytes, and headers that lie."""
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.catalog._files import CONFIG_LIMIT, INDEX_LIMIT
from kvlab.catalog.safetensors_file import INDEX, has_weights, read_weights


def write(path, header, data=0, length=None):
    """A file with that header (a dict or bytes) and so many bytes of data; `length` lies about the header's length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(data))
    return path


def tensor(dtype, shape, begin, end):
    return dict(dtype=dtype, shape=shape, data_offsets=[begin, end])


def test_a_file_the_library_wrote(tmp_path):
    pytest.importorskip("safetensors")
    np = pytest.importorskip("numpy")
    from safetensors.numpy import save_file
    save_file({"a": np.zeros((3, 5), np.float16), "b": np.zeros(7, np.float32)}, tmp_path / "model.safetensors",
              metadata={"format": "pt"})
    assert has_weights(tmp_path) and read_weights(tmp_path) == (3 * 5 + 7, 3 * 5 * 2 + 7 * 4)


def test_shards_add_up(tmp_path):
    write(tmp_path / "one.safetensors", {"a": tensor("BF16", [4, 2], 0, 16)}, 16)
    write(tmp_path / "two.safetensors", {"b": tensor("F32", [], 0, 4), "c": tensor("F32", [0, 9], 4, 4)}, 4)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors",
                                                             "c": "two.safetensors"}}))
    assert read_weights(tmp_path) == read_weights(tmp_path / INDEX) == (9, 20)
    write(tmp_path / "two.safetensors", {"a": tensor("F32", [], 0, 4)}, 4)
    with pytest.raises(ValueError, match="tensor 'a' is in two shards"):
        read_weights(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(ValueError, match="two.safetensors cannot be read"):
        read_weights(tmp_path)


@pytest.mark.parametrize("dtype, params", [("F8_E4M3", None), ("U8", None), ("I32", None), ("BF16", 4), ("F64", 4)])
def test_elements_of_quantised_files_are_not_called_parameters(tmp_path, dtype, params):
    bits = {"F8_E4M3": 8, "U8": 8, "I32": 32, "BF16": 16, "F64": 64}[dtype]
    nbytes = 4 * bits // 8
    path = write(tmp_path / "a.safetensors", {"a": tensor(dtype, [4], 0, nbytes),
                                              "b.position_ids": tensor("I64", [1], nbytes, nbytes + 8)}, nbytes + 8)
    assert read_weights(path) == (params, nbytes + 8)


GOOD = {"a": tensor("F32", [2, 2], 0, 16), "b": tensor("F32", [2], 16, 24)}


@pytest.mark.parametrize("header, data, length, message", [
    (GOOD, 24, 2**50, "its header would be 1,125,899,906,842,624 bytes long"),
    (GOOD, 24, 0, "its header would be 0 bytes"),
    (b"", 0, None, "its header would be 0 bytes"),
    (GOOD, 24, 30, "is not JSON"),
    (GOOD, 23, None, "cut short: 'b' would end at byte 24 of 23"),
    (GOOD | {"b": tensor("F32", [2], 8, 16)}, 24, None, "'b' begins at byte 8 instead of 16: tensors overlap"),
    (GOOD | {"b": tensor("F32", [2], 20, 28)}, 28, None, "leave a gap"),
    (GOOD | {"b": tensor("F32", [3], 16, 24)}, 24, None, "bytes do not fit its shape"),
    (GOOD | {"b": tensor("F32", [2**62, 2**62], 16, 24)}, 24, None, "bytes do not fit its shape"),
    (GOOD | {"b": tensor("F32", [-2], 16, 24)}, 24, None, "not one of a safetensors file"),
    (GOOD | {"b": tensor("F32", [True], 16, 20)}, 24, None, "not one of a safetensors file"),
    (GOOD | {"b": tensor("Q99", [2], 16, 24)}, 24, None, "not one of a safetensors file"),
    (GOOD | {"b": tensor("F32", [2], 24, 16)}, 24, None, "cut short"),
    (GOOD | {"b": tensor(["F32"], [2], 16, 24)}, 24, None, "not one of a safetensors file"),
    (GOOD | {"b": 5}, 24, None, "the entry of tensor 'b'"),
    (b"[1, 2]", 0, None, "holds a list"),
    (b"\xff\xfe\xfd", 0, None, "is not UTF-8"),
])
def test_headers_that_lie_are_refused_in_one_sentence(tmp_path, header, data, length, message):
    path = write(tmp_path / "a.safetensors", header, data, length)
    with pytest.raises(ValueError, match=message) as error:
        read_weights(path)
    assert "\n" not in str(error.value)


def test_a_header_beyond_the_formats_limit_is_not_read(tmp_path):
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 200 * 2**20))
        file.truncate(300 * 2**20)
    with pytest.raises(ValueError, match="headers have at most 104,857,600"):
        read_weights(path)


@pytest.mark.parametrize("index, message", [
    ({"weight_map": {"a": "../secret.safetensors"}}, "names a shard '../secret.safetensors', which is not a file name"),
    ({"weight_map": {"a": "/etc/passwd"}}, "not a file name beside it"),
    ({"weight_map": {"a": 5}}, "has no weight_map"),
    ({"weight_map": {}}, "has no weight_map"),
    ({}, "has no weight_map"),
])
def test_an_index_that_points_elsewhere_is_refused(tmp_path, index, message):
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        read_weights(tmp_path)


@given(st.binary(max_size=300), st.integers(0, 400))
def test_any_bytes_are_refused_or_counted(tmp_path_factory, data, length):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(struct.pack("<Q", length) + data)
    try:
        assert (read_weights(path).nbytes or 0) <= len(data) <= CONFIG_LIMIT
    except ValueError as error:
        assert str(path) in str(error)


def test_an_index_may_be_larger_than_a_config(tmp_path):
    """DeepSeek-V3's index of 91,991 tensors has 9 MB."""
    weights = {f"model.layers.{n}.mlp.experts.{n}.down_proj.weight_scale_inv": "a-00001-of-000001.safetensors"
               for n in range(60_000)}
    header = json.dumps({"a": dict(dtype="F16", shape=[2], data_offsets=[0, 4])}).encode()
    (tmp_path / "a-00001-of-000001.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weights}))
    assert index.stat().st_size > CONFIG_LIMIT and read_weights(index).params == 2
    with index.open("ab") as file:
        file.truncate(INDEX_LIMIT + 1)
    with pytest.raises(ValueError, match="larger than the 67,108,864 bytes"):
        read_weights(index)


def test_a_file_without_tensors_has_unknown_weights(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    assert read_weights(tmp_path) == (None, None)
