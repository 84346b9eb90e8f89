"""A GGUF's weights, dequantised once into a Hugging Face folder in the user's cache: written whole or not at all.

The folder is <cache>/models/<sha256 of the GGUF>-<CONVERSION>, with config.json, model.safetensors (fp32),
tokenizer.json, and beside each its SHA-256 as `sha256sum -c` reads it. It is written elsewhere and renamed, so that a
killed run or a full disk leaves nothing half.
"""
from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import BinaryIO

import numpy as np

from kvlab.folders import cache_folder, passing, remove, settle
from kvlab.model._gguf_weights import GgufModel

CONVERSION = 2                  # of what is written: a later kvlab that converts otherwise counts on
WEIGHTS, TOKENIZER, CONFIG = "model.safetensors", "tokenizer.json", "config.json"


class Damaged(ValueError):
    """A converted copy, or a part of one, is not what was written, and must be made again."""


def place(sha256: str) -> Path:
    """Where the converted copy of the GGUF with this hash lies, or will."""
    return cache_folder("models", f"{sha256}-{CONVERSION}")


def write(model: GgufModel, sha256: str) -> Path:
    """Dequantise into the cache and return the folder. OSError where it cannot be written; nothing is left then.

    At most some 100 MB are held in memory at once: tensors are dequantised and written some rows at a time. Copies of
    the same file that earlier versions of the conversion made are removed.
    """
    folder = place(sha256)
    with passing(folder.parent) as made:
        whole = made / "copy"
        whole.mkdir()
        (whole / CONFIG).write_text(json.dumps(model.hf_config, indent=2), encoding="utf-8")
        _note_hash(whole / CONFIG)
        with (whole / WEIGHTS).open("wb") as file:
            hashed = _Hashing(file)
            _stream(hashed, model.config.tensor_shapes(), model.rows, _about(model, sha256))
        _note_hash(whole / WEIGHTS, hashed.hash.hexdigest())
        settle(whole, folder)
    for number in range(1, CONVERSION):
        for older in [cache_folder("models", f"{sha256}-{number}"), *folder.parent.glob(f"{sha256}-{number}.*.part")]:
            remove(older)
    return folder


def write_tokenizer(folder: Path, tokenizer) -> None:
    """Keep a tokenizer beside the converted weights: a GGUF's vocabulary takes longer to build one from."""
    with passing(folder.parent) as made:
        try:
            tokenizer.save(str(made / TOKENIZER))
        except OSError:
            raise
        except Exception as error:              # the library raises plain Exception, for want of room too
            raise OSError(str(error)) from error
        noted = _note_hash(made / TOKENIZER)
        settle(noted, folder / noted.name)      # first: a tokenizer without its hash counts as damaged
        settle(made / TOKENIZER, folder / TOKENIZER)


def check(path: Path) -> None:
    """Raise Damaged where a file of a copy is missing or not what was written.

    Its bytes are hashed once per process and change of the file (538 MB in 0.4 s of CPU time where the processor has
    instructions for SHA-256, some 1.5 s elsewhere); every further load compares its size and time of change alone.
    """
    try:
        written = _noted(path).read_text(encoding="utf-8")[:64]
        stat = path.stat()
        found = _digest(path, stat.st_size, stat.st_mtime_ns)
    except (OSError, UnicodeDecodeError) as error:
        raise Damaged(f"{path.name} or its SHA-256 cannot be read: {error}") from None
    if found != written:
        raise Damaged(f"the SHA-256 of {path.name} is not what was written")


@lru_cache(maxsize=64)
def _digest(path: Path, size: int, changed_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _noted(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _note_hash(path: Path, digest: str = "") -> Path:
    digest = digest or hashlib.sha256(path.read_bytes()).hexdigest()
    _noted(path).write_text(f"{digest}  {path.name}\n", encoding="utf-8")
    return _noted(path)


class _Hashing:
    """A file whose SHA-256 is found while it is written."""

    def __init__(self, file: BinaryIO):
        self.file, self.hash = file, hashlib.sha256()

    def write(self, data) -> None:
        self.hash.update(data)
        self.file.write(data)


def _about(model: GgufModel, sha256: str) -> dict[str, str]:
    try:
        own = version("kvlab")
    except PackageNotFoundError:
        own = "unknown"
    return {"source": model.path.name, "source_sha256": sha256, "quantisation": model.quantisation, "kvlab": own,
            "format": "pt"}


def _stream(file: _Hashing, shapes: Mapping[str, tuple[int, ...]], rows, metadata: Mapping[str, str]) -> None:
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


def _write_parts(file: _Hashing, parts: Iterable[np.ndarray]) -> None:
    for part in parts:
        file.write(np.ascontiguousarray(part, "<f4").data)
