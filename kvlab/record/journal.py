"""The text of a journal: one checksummed line per reading, then one commit line per comparison.

    {"row":{…},"crc":"9a3b01ff"}          crc: CRC-32 (hex) of the JSON text between "row": and ,"crc"
    {"commit":{"comparison_id":"…","count":2},"crc":"…"}

Only a comparison whose commit line is whole and whose count agrees exists; all else is dropped and said.
"""
from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from typing import Any

from kvlab.record.reading import complete

_ROW, _COMMIT, _CRC = b'{"row":', b'{"commit":', b',"crc":"'
_TAIL = len(_CRC) + 8 + 2                                                   # ,"crc":"xxxxxxxx"}
_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def _line(start: bytes, content: dict[str, Any]) -> bytes:
    body = _to_json(content).encode()
    return b"%s%s%s%08x\"}\n" % (start, body, _CRC, zlib.crc32(body))


def encode(comparison_id: str, rows: Iterable[dict[str, Any]]) -> bytes:
    """The lines of one comparison, commit line last; blank columns ("" and None) are left out."""
    lines = [_line(_ROW, {name: value for name, value in row.items() if value is not None and value != ""})
             for row in rows]
    return b"".join(lines) + _line(_COMMIT, {"comparison_id": comparison_id, "count": len(lines)})


def _decode(line: bytes) -> tuple[bytes, dict[str, Any]] | None:
    """The content of a line with its start; None if any byte of it is not as it was written."""
    start = _ROW if line.startswith(_ROW) else _COMMIT
    body, tail = line[len(start):-_TAIL], line[-_TAIL:]
    if not line.startswith(start) or tail != b"%s%08x\"}" % (_CRC, zlib.crc32(body)):
        return None
    try:
        return start, json.loads(body)
    except ValueError:                                                      # a checksum can agree by chance
        return None


def replay(data: bytes) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """The committed comparisons of a journal with their complete rows, and one sentence per thing dropped."""
    committed: dict[str, list[dict[str, Any]]] = {}
    problems: list[str] = []
    pending: dict[str, list[dict[str, Any]]] = {}                           # rows since the last commit line
    damaged: list[int] = []                                                 # numbers of bad lines since then
    *lines, torn = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        decoded = _decode(line)
        if decoded is None:
            damaged.append(number)
            continue
        start, content = decoded
        if start == _ROW:
            pending.setdefault(content.get("comparison_id", ""), []).append(complete(content))
            continue
        name = content["comparison_id"]
        rows = pending.pop(name, [])
        if name in committed:
            problems.append(f"readings.jsonl line {number}: comparison {name!r} is committed a second time; "
                            "the first is kept")
        elif len(rows) == content["count"]:
            committed[name] = rows
        else:
            pending[name] = rows
        if damaged or pending:
            problems.append(_dropped(damaged, list(pending), f"line {number}"))
        pending, damaged = {}, []
    if damaged or pending or torn:
        problems.append(_dropped(damaged, list(pending), "its end"))
    return committed, problems


def _dropped(damaged: list[int], names: list[str], where: str) -> str:
    what = "comparison " + ", ".join(map(repr, names)) if names else "the comparison there"
    if damaged:
        why = f"line {', '.join(map(str, damaged))} is damaged (checksum does not agree)"
    else:
        why = f"at {where} there are readings without their whole commit, as a kill in mid-run leaves them"
    return f"readings.jsonl: {why}, so {what} counts as not committed and is measured again on --resume"
