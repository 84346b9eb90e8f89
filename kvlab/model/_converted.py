"""A GGUF's weights, dequantised once into a Hugging Face folder in the user's cache: written whole or not at all.

The folder is <cache>/models/<sha256 of the GGUF>-<CONVERSION>, with config.json, model.safetensors (fp32) and
tokenizer.json. It is written elsewhere and renamed, so that a killed run or a full disk leaves nothing half.
"""
from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import BinaryIO

import numpy as np
import psutil

from kvlab.folders import cache_folder
from kvlab.model._gguf_weights import GgufModel

CONVERSION = 1                  # of what is written: a later kvlab that converts otherwise counts on


def place(sha256: str) -> Path:
    """Where the converted copy of the GGUF with this hash lies, or will."""
    return cache_folder("models", f"{sha256}-{CONVERSION}")


def write(model: GgufModel, sha256: str) -> Path:
    """Dequantise into the cache and return the folder. OSError where it cannot be written; nothing is left then.

    At most some 100 MB are held in memory at once: tensors are dequantised and written some rows at a time.
    """
    folder = place(sha256)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    made = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    made.mkdir()
    try:
        (made / "config.json").write_text(json.dumps(model.hf_config, indent=2), encoding="utf-8")
        with (made / "model.safetensors").open("wb") as file:
            _stream(file, model.config.tensor_shapes(), model.rows, _about(model, sha256))
            file.flush()
            os.fsync(file.fileno())
        _put(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def write_tokenizer(folder: Path, tokenizer) -> None:
    """Keep a tokenizer beside the converted weights: a GGUF's vocabulary takes longer to build one from."""
    made = folder / f"tokenizer.json.{os.getpid()}.part"
    try:
        tokenizer.save(str(made))
        made.replace(folder / "tokenizer.json")
    except OSError:
        made.unlink(missing_ok=True)
        raise
    except Exception as error:                  # the library raises plain Exception, for want of room too
        made.unlink(missing_ok=True)
        raise OSError(str(error)) from error


def _about(model: GgufModel, sha256: str) -> dict[str, str]:
    try:
        own = version("kvlab")
    except PackageNotFoundError:
        own = "unknown"
    return {"source": model.path.name, "source_sha256": sha256, "quantisation": model.quantisation, "kvlab": own,
            "format": "pt"}


def _stream(file: BinaryIO, shapes: Mapping[str, tuple[int, ...]], rows, metadata: Mapping[str, str]) -> None:
    """A safetensors file of fp32 tensors whose values come part by part; the library's writer takes them all at once.

    Source: the format, 8 bytes of header length, a JSON header padded to 8 bytes, the data without gaps.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in shapes:
        _write_parts(file, rows(name))


def _write_parts(file: BinaryIO, parts: Iterable[np.ndarray]) -> None:
    for part in parts:
        file.write(part.astype("<f4", copy=False).data)


def _put(made: Path, folder: Path) -> None:
    """Rename the finished folder into place, unless another process was quicker with the same content."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.exists():
            raise


def _sweep(folder: Path) -> None:
    """Remove what killed runs have left of this conversion."""
    for left in folder.parent.glob(f"{folder.name}.*.part"):
        owner = re.search(r"\.(\d+)\.part$", left.name)
        if owner and (int(owner[1]) == os.getpid() or not psutil.pid_exists(int(owner[1]))):
            shutil.rmtree(left, ignore_errors=True)
