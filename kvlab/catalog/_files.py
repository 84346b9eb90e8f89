"""Files from others, opened with care: regular ones only, up to a size; anything else is one sentence."""
from __future__ import annotations

import json
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


def read_json(path: Path, what: str = "a model's config.json", limit: int = CONFIG_LIMIT) -> dict:
    """The JSON object in a file of at most `limit` bytes. Refuses what is larger, not UTF-8 or not an object."""
    with opened(path, what) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path} is larger than the {limit:,} bytes that kvlab reads of one; give {what}")
    return parse_json(data, str(path), what)


def parse_json(data: bytes, name: str, what: str) -> dict:
    """One JSON object from UTF-8 bytes. Refuses text that is none, and keys given twice with different values."""
    try:
        found = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_once, parse_int=_whole)
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text; give {what}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON ({error.msg} in line {error.lineno}); give {what}") from error
    except RecursionError as error:
        raise ValueError(f"{name} is nested too deeply to be {what}") from error
    except ValueError as error:                     # of _once or _whole
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
