"""A decoder's config and weights from a Hugging Face folder: config.json and safetensors, whole or in shards.

Weights in fp32 stay memory-mapped: they are read when first used, and several processes share them. Those in bf16 and
fp16 are converted to fp32, since the arithmetic of a CPU is, and the decoder wants one dtype.
"""
from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from kvlab.catalog._facts import plain
from kvlab.catalog._files import INDEX_LIMIT, opened, read_json
from kvlab.catalog.safetensors_file import INDEX, has_weights, read_weights
from kvlab.model.config import DecoderConfig

_DTYPES = ("F32", "BF16", "F16")
_UNUSED = ("rotary_emb.inv_freq", "self_attn.masked_bias", "self_attn.bias")     # buffers of older checkpoints
_AT_A_TIME = 64 * 2**20         # bytes read through one mapping: what was read through it counts as resident


def read_config(folder: Path) -> DecoderConfig:
    """The decoder of a folder's config.json. ValueError where there is none, or one that kvlab cannot run."""
    path = folder / "config.json"
    if not path.exists():
        raise ValueError(f"{folder} has no config.json; give a folder with config.json and model.safetensors, or a "
                         ".gguf file")
    return DecoderConfig.from_config(read_json(path), str(path))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, sorted. ValueError where there is none or one is missing or cut short."""
    if not has_weights(folder):
        raise ValueError(f"{folder} has neither model.safetensors nor {INDEX}; other formats of weights are not read, "
                         "pickled ones least of all")
    read_weights(folder)                        # refuses headers that lie
    if not (folder / INDEX).exists():
        return [folder / "model.safetensors"]
    shards = read_json(folder / INDEX, "an index of safetensors shards", INDEX_LIMIT)["weight_map"]
    return [folder / name for name in sorted(set(shards.values()))]


def read_tensors(files: list[Path], config: DecoderConfig) -> dict[str, Tensor]:
    """The decoder's weights in fp32 by name. ValueError: one is missing, of another shape or dtype, or not used."""
    shapes, weights = config.tensor_shapes(), {}
    for path in files:
        for batch in _batches(path):
            with _open(path) as file:
                for name in batch:
                    if name in shapes:
                        _check(path, name, file.get_slice(name), shapes[name])
                        weights[name] = file.get_tensor(name).float()
                    elif not name.endswith(_UNUSED) and not (name == "lm_head.weight" and config.tied):
                        raise ValueError(f"{path} has a tensor {plain(name)}, for which its config.json has no use; "
                                         "the two do not belong together")
    missing = [name for name in shapes if name not in weights]
    if missing:
        raise ValueError(f"{files[0].parent} lacks {len(missing)} of {len(shapes)} weights, {missing[0]} the first; "
                         "its config.json and its safetensors do not belong together")
    return weights


def sha256(files: list[Path]) -> str:
    """The SHA-256 of the files' bytes, one after the other (1 GB takes about a second)."""
    found = hashlib.sha256()
    for path in files:
        with opened(path, "a file of weights") as file:
            while block := file.read(2**20):
                found.update(block)
    return found.hexdigest()


def metadata(path: Path) -> Mapping[str, str]:
    """What a safetensors file says about itself beside its tensors."""
    with _open(path) as file:
        return file.metadata() or {}


def _batches(path: Path) -> Iterator[list[str]]:
    """The names of a file's tensors, in groups of about _AT_A_TIME bytes; a file in fp32 is one group."""
    with _open(path) as file:
        names, batch, size = list(file.keys()), [], 0
        for name in names:
            part = file.get_slice(name)
            batch.append(name)
            if part.get_dtype() != "F32":
                size += 2 * torch.Size(part.get_shape()).numel()
            if size > _AT_A_TIME:
                yield batch
                batch, size = [], 0
        yield batch


def _check(path: Path, name: str, part, shape: tuple[int, ...]) -> None:
    if part.get_dtype() not in _DTYPES:
        raise ValueError(f"{path}: {name} is stored as {part.get_dtype()}; kvlab reads {', '.join(_DTYPES)}")
    if tuple(part.get_shape()) != shape:
        raise ValueError(f"{path}: {name} is {part.get_shape()}, and config.json asks for {list(shape)}")


def library():
    """The package safetensors, or a sentence that says what to install."""
    try:
        import safetensors
    except ImportError:
        raise ValueError("safetensors files are read by the package safetensors, which is not installed; "
                         "pip install 'kvlab[models]'") from None
    return safetensors


def _open(path: Path):
    return library().safe_open(path, framework="pt", device="cpu")
