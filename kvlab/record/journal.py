"""The text of a journal: one checksummed line per reading, then one commit line per comparison.

    {"row":{…},"crc":"9a3b01ff"}          crc: CRC-32 (hex) of the JSON text between "row": and ,"crc"
    {"commit":{"comparison_id":"…","count":2,"rows":"5c02…"},"crc":"…"}     rows: CRC-32 of its row lines, in order

Only a comparison whose commit line is whole and agrees with its rows exists; all else is dropped and said. The first
journals of kvlab had no "rows" in their commit lines.
"""
from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from kvlab.record.reading import BLANK, checked

_ROW, _COMMIT, _CRC = b'{"row":', b'{"commit":', b',"crc":"'
_TAIL = len(_CRC) + 8 + 2                                                   # ,"crc":"xxxxxxxx"}
_LONG = 80                                                                  # characters of one of their names
_NAMED = 5                                                                  # lines or comparisons that a sentence lists
_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class Committed(NamedTuple):
    """A comparison that counts: its id, what its rows say and its lines as they stand in the journal."""
    comparison_id: str
    said: list[dict[str, Any]]                                              # without the blank columns: far smaller
    lines: list[bytes]

    @property
    def rows(self) -> Iterator[dict[str, Any]]:
        """Its rows, each with every column."""
        return ({**BLANK, **one} for one in self.said)


def _line(start: bytes, content: dict[str, Any]) -> bytes:
    body = _to_json(content).encode()
    return b"%s%s%s%08x\"}\n" % (start, body, _CRC, zlib.crc32(body))


def encode(comparison_id: str, rows: Iterable[dict[str, Any]]) -> bytes:
    """The lines of one comparison, commit line last; blank columns ("" and None) are left out."""
    lines = [_line(_ROW, {name: value for name, value in row.items() if value is not None and value != ""})
             for row in rows]
    commit = {"comparison_id": comparison_id, "count": len(lines), "rows": _sum(lines)}
    return b"".join(lines) + _line(_COMMIT, commit)


def _sum(lines: Iterable[bytes]) -> str:
    return f"{zlib.crc32(b''.join(lines)):08x}"


def _decode(line: bytes) -> tuple[bytes, Any] | None:
    """The content of a line with its start: what a row says, or (comparison_id, count, checksum of its rows or None).

    None if any byte of it is not as it was written, or if it was not written by kvlab.
    """
    start = _ROW if line.startswith(_ROW) else _COMMIT
    body, tail = line[len(start):-_TAIL], line[-_TAIL:]
    if not line.startswith(start) or tail != b"%s%08x\"}" % (_CRC, zlib.crc32(body)):
        return None
    try:                                                                    # a checksum can agree by chance, or intent
        content = json.loads(body)
        if start == _ROW:
            return start, checked(content)
        name, count = content["comparison_id"], content["count"]
        return (start, (name, count, content.get("rows"))) if type(name) is str and type(count) is int else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def read(lines: Iterable[bytes], problems: list[str]) -> Iterator[Committed]:
    """The committed comparisons of a journal, one after another; into `problems` one sentence per thing dropped.

    lines: as a binary file gives them. No more than one comparison is held at a time.
    """
    seen: set[str] = set()
    pending: dict[str, list[dict[str, Any]]] = {}                           # rows since the last commit line
    kept: dict[str, list[bytes]] = {}                                       # and their lines
    damaged: list[int] = []                                                 # numbers of the first bad lines since then
    more = 0                                                                # how many came after those
    torn = False
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            torn = True
            break
        decoded = _decode(line[:-1])
        if decoded is None:
            if len(damaged) < _NAMED:
                damaged.append(number)
            else:
                more += 1
            continue
        start, content = decoded
        if start == _ROW:
            name = content.get("comparison_id", "")
            pending.setdefault(name, []).append(content)
            kept.setdefault(name, []).append(line)
            continue
        name, count, rows_sum = content
        rows, own = pending.pop(name, []), kept.pop(name, [])
        if name in seen:
            problems.append(f"readings.jsonl line {number}: comparison {name!r} is committed a second time; "
                            "the first is kept")
        elif len(rows) != count or rows_sum not in (None, _sum(own)):    # a line lost, doubled or moved
            pending[name] = rows
        if damaged or pending:
            problems.append(_dropped(damaged, more, list(pending), f"line {number}"))
        if name not in seen and name not in pending:
            seen.add(name)
            yield Committed(name, rows, [*own, line])
        pending, kept, damaged, more = {}, {}, [], 0
    if damaged or pending or torn:
        problems.append(_dropped(damaged, more, list(pending), "its end"))


def _dropped(damaged: list[int], more: int, names: list[str], where: str) -> str:
    what = f"comparison {_some(list(map(repr, names)))}" if names else "the comparison there"
    if damaged:
        why = f"line {_some(list(map(str, damaged)), more)} is damaged (checksum does not agree)"
    else:
        why = f"at {where} there are readings without their whole commit, as a kill in mid-run leaves them"
    return f"readings.jsonl: {why}, so {what} counts as not committed and is measured again on --resume"


def _some(names: list[str], more: int = 0) -> str:
    more += len(names[_NAMED:])
    shown = [name if len(name) <= _LONG else f"{name[:_LONG]}…" for name in names[:_NAMED]]
    return ", ".join(shown) + (f" and {more} more" if more else "")
