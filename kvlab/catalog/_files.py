"""Files from others, opened with care: regular ones only, up to a size; anything else is one sentence."""
from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

CONFIG_LIMIT = 4 * 2**20        # the largest config.json known, of a model with 1,000 labels and lists, has 0.2 MB

INDEX_LIMIT = 64 * 2**20        # of an index of shards, with a line per tensor: DeepSeek-V3's has 9 MB


@contextmanager
def opened(path: Path, what: str) -> Iterator[BinaryIO]:
    """The file, open for reading. A folder, pipe, device, symlink loop or unreadable file is refused before opening.

    what: what the file should be ("a GGUF file"), for the sentence. A pipe or device may block or never end.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError(f"{path} is not a regular file; give {what}")
        file = path.open("rb")
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); give {what}") from error
    with file:
        yield file


def bytes_of(path: Path, what: str, limit: int) -> bytes:
    """All of a file of at most `limit` bytes; ValueError for what is larger.

    No more is taken from memory than the file has: `read(limit)` alone would ask for all of it.
    """
    with opened(path, what) as file:
        data = file.read(min(limit, os.fstat(file.fileno()).st_size) + 1)
    if len(data) > limit:
        raise ValueError(f"{path} is larger than the {limit:,} bytes that kvlab reads of one; give {what}")
    return data


def read_json(path: Path, what: str = "a model's config.json", limit: int = CONFIG_LIMIT) -> dict:
    """The JSON object in a file of at most `limit` bytes. Refuses what is larger, not UTF-8 or not an object."""
    return parse_json(bytes_of(path, what, limit), str(path), what)


def too_dense(text: str) -> bool:
    """Whether JSON has more lists and objects for its length than files have: of nothing else it could take 25 times
    its bytes. Counted are 192 bytes for an object and 72 for a list, of ten times its length and 1 MiB."""
    return 192 * text.count("{") + 72 * text.count("[") > 10 * len(text) + 2**20


def parse_json(data: bytes, name: str, what: str) -> dict:
    """One JSON object from UTF-8 bytes. Refuses text that is none, and keys given twice with different values."""
    try:
        text = data.decode("utf-8-sig")
        if too_dense(text):
            raise ValueError("it is nested too deeply, or holds little but empty lists and objects")
        found = json.loads(text, object_pairs_hook=_once, parse_int=_whole)
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text; give {what}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON ({error.msg} in line {error.lineno}); give {what}") from error
    except RecursionError as error:
        raise ValueError(f"{name} is nested too deeply to be {what}") from error
    except ValueError as error:                     # of _once or _whole, or too dense
        raise ValueError(f"{name} cannot be used: {error}; give {what}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{name} holds {'a list' if isinstance(found, list) else 'a single value'} instead of keys "
                         f"and values; give {what}")
    return found


def _whole(digits: str) -> int:
    if len(digits) > 30:
        raise ValueError(f"a number in it has {len(digits):,} digits")
    return int(digits)


def _once(pairs: list[tuple[str, object]]) -> dict:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            raise ValueError(f"the key {key!r:.80} stands there twice, with different values")
        found[key] = value
    return found
