"""Hostile inputs: real ones changed by bytes, by numbers, by structure, and patterns that make memory or time grow.

One source of chance for all, a random.Random: hypothesis seeds it, and so does atheris.
"""
from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

MOST = 2**16                    # bytes of an input; those of `large` are longer
LARGE = 2**20
INTEGERS = (0, -1, 1, 2, 3, 7, 8, 127, 128, 255, 1000, 4096, 65535, 2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**63 - 1,
            2**63, -2**63, 2**64 - 1, 2**64, 10**19, 10**29, 10**60)
FLOATS = (0.0, -0.0, 0.5, 1.5, -1.5, 1e-9, 1e-320, 1e15, 1e18, 1e300, math.inf, -math.inf, math.nan)
TEXTS = ("", " ", "a", "0", "1", "-1", "1e999", "nan", "inf", "None", "null", "true", "\x1b[31m", "\x00", "\x7f\x9b",
         "\u202eevil", "\u2028", "\ud800", "é", "当", "😀", "../../etc/passwd", "/etc/passwd", "C:\\x", "~", "%s%n",
         "{0}", "{x}", "'", '"', "\\", "<script>", "\r\n", "__class__", "9" * 40, "9" * 5000, "a" * 3000, "=1+1", ",",
         ";", "\t")
PIECES = (b"\xef\xbb\xbf", b"\xff\xfe", b"\x00", b"\r\n", b"\r", b"\n", b"\x1b[2J", b"\x80", b"\xed\xa0\x80", b"NaN",
          b"\\ud800", b"Infinity", b"-", b"1e999", b"null", b"true", b"{}", b"[]", b"{", b"}", b"[", b"]", b'"', b"'",
          b",", b":", b"=", b"#", b"%", b"$(", b"`", b"--", b"\t", b"\xe2\x80\xae", b"\xf0\x9f\x98\x80", b"\x0c",
          b"\xc2\x85")
_NUMBER, _WORD = re.compile(rb"-?\d+(?:\.\d+)?"), re.compile(rb"[A-Za-z_][\w.:/-]*")


def words(seeds: Sequence[bytes]) -> list[bytes]:
    """The names that stand in the seeds, so that a change may put one where another was."""
    return sorted({word for seed in seeds for word in _WORD.findall(seed) if len(word) < 60})[:3000] or [b"a"]


def changed(chance: Random, body: bytes, seeds: Sequence[bytes], known: Sequence[bytes]) -> bytes:
    """A body with one to eight changes, by structure where it is JSON, at most MOST bytes long."""
    if chance.random() < 0.75 and (found := _restructured(chance, body, known)) is not None:
        body = found
        if chance.random() < 0.85:
            return body[:MOST]
    for _ in range(chance.choice((1, 1, 1, 2, 2, 3, 5, 8))):
        body = chance.choice(_CHANGES)(chance, body, seeds, known)[:MOST]
    return body


def _place(chance: Random, body: bytes, most: int = 64) -> tuple[int, int]:
    start = chance.randrange(len(body) + 1)
    return start, min(len(body), start + chance.randrange(most + 1))


def _flip(chance: Random, body: bytes, seeds, known) -> bytes:
    if not body:
        return b"\x00"
    at = chance.randrange(len(body))
    return body[:at] + bytes([body[at] ^ 1 << chance.randrange(8)]) + body[at + 1:]


def _byte(chance: Random, body: bytes, seeds, known) -> bytes:
    at = chance.randrange(len(body) + 1)
    return body[:at] + bytes([chance.randrange(256)]) + body[at + chance.randrange(2):]


def _cut(chance: Random, body: bytes, seeds, known) -> bytes:
    return body[:chance.randrange(len(body) + 1)]


def _without(chance: Random, body: bytes, seeds, known) -> bytes:
    start, stop = _place(chance, body, chance.choice((4, 64, 1024)))
    return body[:start] + body[stop:]


def _again(chance: Random, body: bytes, seeds, known) -> bytes:
    start, stop = _place(chance, body, chance.choice((2, 16, 300)))
    return body[:stop] + body[start:stop] * chance.choice((1, 1, 2, 10, 300, 5000)) + body[stop:]


def _spliced(chance: Random, body: bytes, seeds, known) -> bytes:
    other = chance.choice(seeds)
    return body[:chance.randrange(len(body) + 1)] + other[chance.randrange(len(other) + 1):]


def _piece(chance: Random, body: bytes, seeds, known) -> bytes:
    start, stop = _place(chance, body, chance.choice((0, 0, 8)))
    return body[:start] + chance.choice((chance.choice(PIECES), chance.choice(known))) + body[stop:]


def _in_front(chance: Random, body: bytes, seeds, known) -> bytes:
    return chance.choice(PIECES) + body


def _number(chance: Random, body: bytes, seeds, known) -> bytes:
    found = list(_NUMBER.finditer(body[:8192]))
    if not found:
        return _binary(chance, body, seeds, known)
    one = chance.choice(found)
    value = chance.choice((*INTEGERS, *FLOATS, 10**chance.randrange(300), b"9" * 5000))
    return body[:one.start()] + (value if isinstance(value, bytes) else str(value).encode()) + body[one.end():]


def _word(chance: Random, body: bytes, seeds, known) -> bytes:
    found = list(_WORD.finditer(body[:8192]))
    if not found:
        return _piece(chance, body, seeds, known)
    one, text = chance.choice(found), chance.choice(TEXTS).encode("utf-8", "surrogatepass")
    return body[:one.start()] + chance.choice((text, chance.choice(known))) + body[one.end():]


def _binary(chance: Random, body: bytes, seeds, known) -> bytes:
    """A length or an offset that lies: four or eight bytes of an extreme number."""
    width, at = chance.choice((4, 8)), chance.randrange(len(body) + 1)
    value = chance.choice(INTEGERS) % 2**(8 * width)
    return body[:at] + value.to_bytes(width, chance.choice(("little", "big"))) + body[at + width:]


def _deep(chance: Random, body: bytes, seeds, known) -> bytes:
    at, times = chance.randrange(len(body) + 1), chance.choice((3, 100, 300, 3000, 20_000))
    piece = chance.choice((b"[", b'{"a":', b"(", b"{", b"[[],", b"-", b"not ", b"<", b"  "))
    return body[:at] + piece * times + body[at:]


def _line_ends(chance: Random, body: bytes, seeds, known) -> bytes:
    return body.replace(b"\n", chance.choice((b"\r\n", b"\r", b"\n\n", b"\\\n", b"")))


def _recoded(chance: Random, body: bytes, seeds, known) -> bytes:
    code = chance.choice(("utf-16", "utf-32", "utf-8-sig", "cp1252"))
    return body.decode("utf-8", "replace").encode(code, "replace")


def _lines(chance: Random, body: bytes, seeds, known) -> bytes:
    """Lines in another order, doubled, or one of another seed among them."""
    rows = body.split(b"\n")
    rows += chance.choice(seeds).split(b"\n")[:chance.randrange(4)]
    for _ in range(chance.randrange(1, 5)):
        rows.insert(chance.randrange(len(rows) + 1), chance.choice(rows))
    if chance.random() < 0.3:
        chance.shuffle(rows)
    return b"\n".join(rows)


_CHANGES = (_flip, _byte, _cut, _without, _again, _spliced, _piece, _in_front, _number, _number, _word, _word, _binary,
            _deep, _line_ends, _recoded, _lines, _lines)


def _restructured(chance: Random, body: bytes, known: Sequence[bytes]) -> bytes | None:
    """JSON, or a line of it, with values, keys and nesting changed; None where the body is none."""
    try:
        return _dumped(chance, _tree(chance, json.loads(body), known))
    except (ValueError, RecursionError):
        pass
    rows = body.split(b"\n")
    at = chance.randrange(len(rows))
    try:
        rows[at] = _dumped(chance, _tree(chance, json.loads(rows[at]), known))
    except (ValueError, RecursionError):
        return None
    return b"\n".join(rows)


def _dumped(chance: Random, data: Any) -> bytes:
    text = json.dumps(data, ensure_ascii=chance.random() < 0.8)
    if chance.random() < 0.1 and isinstance(data, dict) and data:                   # a key given twice
        name = chance.choice(list(data))
        text = f'{text[:-1]}, {json.dumps(name)}: {json.dumps(value(chance))}}}'
    return text.encode("utf-8", chance.choice(("replace", "surrogatepass")))


def _tree(chance: Random, data: Any, known: Sequence[bytes]) -> Any:
    for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
        if not isinstance(data, (dict, list)) or not data:
            return value(chance)
        holder = data
        for _ in range(100):                                                        # not to the ground of a deep one
            inside = holder.values() if isinstance(holder, dict) else holder
            below = [one for one in inside if isinstance(one, (dict, list)) and one]
            if not below or chance.random() < 0.3:
                break
            holder = chance.choice(below)
        at = chance.choice(list(holder)) if isinstance(holder, dict) else chance.randrange(len(holder))
        what = chance.randrange(8)
        if what == 0:
            del holder[at]
        elif what == 1 and isinstance(holder, dict):
            holder[chance.choice(known).decode("latin1")] = holder.pop(at)
        elif what == 2 and isinstance(holder, dict):
            holder[chance.choice(known).decode("latin1")] = value(chance)
        elif what == 3 and isinstance(holder, list):
            holder[at:at] = [holder[at]] * chance.choice((1, 2, 50, 1001))
        elif what == 4:
            holder[at] = chance.choice(([holder[at]], {"a": holder[at]}, str(holder[at])[:200], holder))
            if holder[at] is holder:
                holder[at] = json.loads(json.dumps({**holder, at: None} if isinstance(holder, dict) else holder[:at]))
        elif what == 5 and isinstance(holder[at], (int, float)):
            old = holder[at]
            holder[at] = chance.choice((old + 1, -old, old * 2, float(old), str(old)))
        else:
            holder[at] = value(chance)
    return data


def value(chance: Random) -> Any:
    """Any value of JSON, and what Python's reader takes beyond it."""
    return chance.choice((
        lambda: chance.choice(INTEGERS), lambda: chance.choice(FLOATS), lambda: chance.choice(TEXTS),
        lambda: chance.choice((None, True, False, [], {}, [[]], [{}], {"": {}}, [None])),
        lambda: [value(chance) for _ in range(chance.randrange(4))],
        lambda: {chance.choice(TEXTS): value(chance) for _ in range(chance.randrange(3))},
        lambda: [chance.choice(INTEGERS)] * chance.choice((1, 32, 1001)), lambda: chance.randrange(-5, 300)))()


def large(seeds: Sequence[bytes], wrap: Callable[[Random, bytes], bytes], size: int = LARGE) -> list[bytes]:
    """Inputs of about `size` bytes that cost most memory and time for their length; the same at each call."""
    chance, bodies = Random(0), []
    for piece in (b"{},", b"[],", b'"ab",', b"1.5,", b"[", b'{"a":', b"\n", b" ", b"a", b"0", b"a,b\n", b"{}\n",
                  b"a: - b\n", b"\\", b"\xf0\x9f\x98\x80", b"'''", b"a(", b"{", b"--a ", b"#\n", b"$a "):
        bodies.append(piece * (size // len(piece)))
    for seed in seeds[:3]:
        bodies.append((seed.rstrip(b"\n") + b"\n") * (size // (len(seed) + 1) + 1))
        try:
            data = json.loads(seed)
        except ValueError:
            continue
        for name, old in list(data.items())[:12] if isinstance(data, dict) else ():
            if isinstance(old, (list, dict)):
                fill = ([{}] * (size // 4), ["ab"] * (size // 6), [[1]] * (size // 5),
                        {f"k{i}": i for i in range(size // 14)})
                first = list(old.values())[:1] if isinstance(old, dict) else old[:1]
                fill += tuple([one] * (size // (len(json.dumps(one)) + 2)) for one in first)
                bodies += [json.dumps({**data, name: one}).encode() for one in fill]
    return [wrap(chance, body[:2 * size]) for body in bodies]
