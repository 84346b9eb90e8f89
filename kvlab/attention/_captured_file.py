"""The files of captured tensors: one layer of one model over one text, a safetensors file named by its SHA-256.

A file holds q [S, Q, D], k [S, K, D], v [S, K, E] of one sequence, positions already encoded; for formats with static
scales also calibration_k, calibration_v of another text; and in its header which model, layer and text they are from.
It lies in the cache folder. What such a file holds was written by others: it is checked, once per process.

Legend: S = kv token, Q = query head, K = kv head, D = head_dim, E = v_head_dim, H = any head, W = any width.
"""
from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.folders import cache_folder, passing, settle

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = {"F32", "F16", "BF16"}
INSTALL = "captured tensors need the package safetensors: pip install 'kvlab[models]'"
CALIBRATION_TOKENS = 256
CALIBRATION = ("calibration_k", "calibration_v")
ABOUT = "kvlab"                 # the header's one key: of several, the library's order is not the same every time


@dataclass(frozen=True)
class Facts:
    """What a checked file holds. largest: greatest |x| of q, k and v. calibrates: whether it has tokens of another text
    for static scales. about: what its header says of the tensors' origin."""
    tokens: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    largest: tuple[float, float, float]
    calibrates: bool
    about: Mapping[str, object]


def write(q_TQD: Tensor, k_SKD: Tensor, v_SKE: Tensor, about: Mapping[str, object],
          calibration: tuple[Tensor, Tensor] | None = None) -> tuple[str, Path]:
    """Keep one layer's tensors of one sequence; returns (data, path). `about` goes into the header as JSON.

    calibration: k [256, K, D] and v [256, K, E] of another text's first tokens, for formats with static scales.
    ValueError for NaN or infinity, which names the tensor, and for sizes that are not those of one sequence.
    """
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise ValueError(INSTALL) from None
    tensors = dict(q=q_TQD, k=k_SKD, v=v_SKE)
    if calibration is not None:
        tensors |= dict(zip(CALIBRATION, calibration))
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    with new_file() as fresh:
        save_file(tensors, fresh, metadata={ABOUT: json.dumps(dict(about), sort_keys=True)})
        try:
            read(fresh)
        except ValueError as error:
            raise ValueError(f"layer {about.get('layer', '?')} cannot be captured: it {error}") from None
        return keep(fresh)


def facts_of(data: str) -> Facts:
    """What the file of that name holds; ValueError, one sentence, where it is not here, damaged or no such file."""
    path, digest = place(data), data.removeprefix("file:")
    try:
        stat = path.stat()
    except OSError:
        raise ValueError(f"the captured tensors {data[:17]}… are not here: put the file at {_short(path)}, give its "
                         "path as data once, or capture them again with kvlab.capture") from None
    if _digest(path, stat.st_mtime_ns, stat.st_size) != digest:
        raise ValueError(f"{_short(path)} is damaged: its SHA-256 is not its name; delete it and capture it again "
                         "with kvlab.capture")
    try:
        return _facts(path, stat.st_mtime_ns, stat.st_size)
    except ValueError as error:
        raise ValueError(f"{_short(path)} {error}") from None


@lru_cache(maxsize=256)
def _digest(path: Path, changed_ns: int, size: int) -> str:             # once per process: every trial asks
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@lru_cache(maxsize=256)
def _facts(path: Path, changed_ns: int, size: int) -> Facts:
    return read(path)


def read(path: Path) -> Facts:
    """The file's facts; a ValueError goes on from "<file> …"."""
    with opened(path) as file:
        if missing := sorted({"q", "k", "v"} - set(file.keys())):
            raise ValueError(f"holds no tensor named {', '.join(missing)}; captured tensors are q [tokens, query "
                             "heads, head_dim], k and v [tokens, KV heads, width]")
        calibrates = not set(CALIBRATION).isdisjoint(file.keys())
        if calibrates and (missing := set(CALIBRATION) - set(file.keys())):
            raise ValueError(f"holds one of {' and '.join(CALIBRATION)}, and no {missing.pop()}")
        names = [*"qkv", *(CALIBRATION if calibrates else ())]
        sizes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
        for name, size in sizes.items():
            if (dtype := file.get_slice(name).get_dtype()) not in DTYPES:
                raise ValueError(f"holds {name} as {dtype}; allowed: F32, F16, BF16")
            if len(size) != 3 or 0 in size:
                raise ValueError(f"holds {name} of size {size}; it must be [tokens, heads, width], none of them 0")
        q, k, v, *others = sizes.values()
        if not q[0] == k[0] == v[0] or k[1] != v[1] or q[2] != k[2]:
            raise ValueError(f"holds tensors that do not fit together: q {q}, k {k}, v {v}; they must be [S, Q, D], "
                             "[S, K, D], [S, K, E]")
        if others and others != [(CALIBRATION_TOKENS, *size[1:]) for size in (k, v)]:
            raise ValueError(f"holds {' and '.join(CALIBRATION)} of sizes {others}; they must be those of k and v with "
                             f"{CALIBRATION_TOKENS} tokens")
        largest = [_largest(file.get_tensor(name), name) for name in names]
        return Facts(q[0], q[1], k[1], k[2], v[2], tuple(largest[:3]), calibrates, _about(file.metadata()))


def _largest(x_SHW: Tensor, name: str) -> float:
    largest = float(x_SHW.abs().max())                                  # NaN if there is one anywhere
    if not largest < float("inf"):
        bad = (~x_SHW.isfinite()).flatten(1).any(1).nonzero()
        raise ValueError(f"holds NaN or infinity in {name}, first at token {int(bad[0])} of {x_SHW.shape[0]}")
    return largest


def _about(header: Mapping[str, str] | None) -> dict:
    try:
        about = json.loads((header or {}).get(ABOUT, "{}"))
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict):
        raise ValueError(f"has a header whose {ABOUT!r} is not a JSON object")
    return about


@contextmanager
def opened(path: Path):
    """The file as safetensors reads it, memory-mapped; ValueError, to go on from "<file> …", where it cannot."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ValueError(INSTALL) from None
    try:
        file = safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"is no whole safetensors file ({' '.join(str(error).split())})") from None
    with file as tensors:
        yield tensors


def place(data: str) -> Path:
    """Where the file of that name lies, or would lie."""
    return cache_folder("captured", f"{data.removeprefix('file:')}.safetensors")


@contextmanager
def new_file() -> Iterator[Path]:
    """A file of a passing name in the folder of captured tensors; gone afterwards unless it was kept."""
    with passing(cache_folder("captured")) as folder:
        yield folder / "captured.safetensors"


def keep(fresh: Path) -> tuple[str, Path]:
    """(data, path) of a checked file, moved to its place."""
    data = f"file:{_digest.__wrapped__(fresh, 0, 0)}"
    settle(fresh, place(data))
    return data, place(data)


def _short(path: Path) -> str:
    """The path without the name of the home folder: the sentence goes into rows and reports."""
    return str(path).replace(str(Path.home()), "~")
