"""Parameter counts and stored bytes of safetensors files, from their headers alone: no tensor is loaded."""
from __future__ import annotations

import math
import re
from pathlib import Path
from typing import NamedTuple, TypeGuard

from kvlab.catalog._files import INDEX_LIMIT, opened, parse_json, read_json

INDEX = "model.safetensors.index.json"
HEADER_LIMIT = 100 * 2**20      # the format's own limit
WHAT = "a safetensors file"
_ITEM_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
              "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
              "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64}
_FLOATS = ("F16", "BF16", "F32", "F64")         # others are quantised: their elements need not be parameters
_BUFFERS = ("position_ids", "position_index", "num_batches_tracked", "inv_freq")     # stored beside parameters


class Weights(NamedTuple):
    """Parameters (None where elements are not parameters, as in quantised files) and bytes as stored; None = none."""
    params: int | None
    nbytes: int | None


def read_weights(path: Path) -> Weights:
    """One .safetensors file, an index of shards, or a folder with either.

    Refuses headers whose length, offsets or shapes lie, shards that are missing, anything that is not safetensors.
    Source: the format, 8 bytes of header length, a JSON header (dtype, shape, data_offsets), then the data.
    """
    if path.is_dir():
        index = path / INDEX
        path = index if index.exists() else path / "model.safetensors"
    if path.name.endswith(".index.json"):
        return _total([_file(path.parent / name) for name in _shards(path)])
    return _total([_file(path)])


def has_weights(folder: Path) -> bool:
    """Whether a folder holds a model's safetensors, whole or in shards."""
    return (folder / INDEX).exists() or (folder / "model.safetensors").exists()


def stated_bytes(folder: Path) -> int | None:
    """Bytes of all weights as the index of shards states them; None where it does not."""
    try:
        metadata = read_json(folder / INDEX, "an index of safetensors shards", INDEX_LIMIT).get("metadata")
    except (ValueError, OSError):
        return None
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return size if type(size) is int and 0 < size < 2**63 else None


def _shards(index: Path) -> list[str]:
    files = read_json(index, "an index of safetensors shards", INDEX_LIMIT).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise ValueError(f"{index} has no weight_map from tensors to files; give an index of safetensors shards")
    names = sorted(set(files.values()))
    for name in names:
        if not re.fullmatch(r"[\w.-]{1,200}\.safetensors", name):
            raise ValueError(f"{index} names a shard {name!r:.80}, which is not a file name beside it")
    return names


def _file(path: Path) -> dict[str, tuple[str, int, int]]:
    """Tensor name -> (dtype, elements, bytes) of one file, checked against the file's size."""
    with opened(path, WHAT) as file:
        size = path.stat().st_size
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= min(size - 8, HEADER_LIMIT):
            raise ValueError(f"{path} is not a safetensors file, or is cut short: its header would be {length:,} bytes "
                             f"long, and the file is {size:,} (headers have at most {HEADER_LIMIT:,})")
        header = parse_json(file.read(length), str(path), WHAT)
    header.pop("__metadata__", None)
    tensors = {name: _tensor(path, name, entry, size - 8 - length) for name, entry in header.items()}
    end = 0
    for name, (begin, stop, _, _) in sorted(tensors.items(), key=lambda item: item[1][:2]):
        if begin != end:
            raise ValueError(f"{path}: {name!r:.80} begins at byte {begin:,} instead of {end:,}: tensors overlap or "
                             "leave a gap, and the file cannot be trusted")
        end = stop
    return {name: (dtype, elements, stop - begin) for name, (begin, stop, dtype, elements) in tensors.items()}


def _tensor(path: Path, name: str, entry: object, size: int) -> tuple[int, int, str, int]:
    """(begin, end, dtype, elements) of one tensor; refused where its bytes do not fit its shape or the file."""
    if isinstance(entry, dict):
        dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
        if isinstance(dtype, str) and dtype in _ITEM_BITS and _whole(shape) and _whole(offsets) and len(offsets) == 2:
            begin, end = offsets
            elements = math.prod(shape)
            if not begin <= end <= size:
                raise ValueError(f"{path} is cut short: {name!r:.80} would end at byte {end:,} of {size:,}")
            if (end - begin) * 8 == elements * _ITEM_BITS[dtype]:
                return begin, end, dtype, elements
    raise ValueError(f"{path}: the entry of tensor {name!r:.80} is not one of a safetensors file, or its bytes do not "
                     "fit its shape")


def _whole(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and len(values) <= 32 and all(type(v) is int and 0 <= v < 2**63 for v in values)


def _total(files: list[dict[str, tuple[str, int, int]]]) -> Weights:
    tensors: dict[str, tuple[str, int, int]] = {}
    for file in files:
        twice = tensors.keys() & file.keys()
        if twice:
            raise ValueError(f"the tensor {min(twice)!r:.80} is in two shards; the files do not belong together")
        tensors |= file
    if not tensors:
        return Weights(None, None)
    counted = [(dtype, elements) for name, (dtype, elements, _) in tensors.items() if not name.endswith(_BUFFERS)]
    whole = all(dtype in _FLOATS for dtype, _ in counted)
    return Weights(sum(elements for _, elements in counted) if whole else None,
                   sum(nbytes for _, _, nbytes in tensors.values()))
