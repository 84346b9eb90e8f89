"""Cells of a table of server logs: numbers with the rounding that their digits show, engines with their versions.

Nothing is guessed: a cell that holds no number is None.
"""
from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

_NUMBER = re.compile(r"(?<![\w.])(~?)\s*(-?\d{1,3}(?:,\d{3})+(?:\.\d+)?|-?\d+(?:\.\d+)?)(?![\d.]*\d)"
                     r"(?:[eE]([+-]?\d{1,2})(?!\w))?([kKM](?!\w))?")
_DECIMAL_COMMA = re.compile(r"~?\d+,\d{1,2}(?: ?[A-Za-z]+)?")
_SEPARATOR = re.compile(r"(?<=\d)[_'\u00a0\u2009\u202f](?=\d{3}(?!\d))")
_THOUSANDS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6}
_EMPTY = ("", "nan", "none", "null", "n/a", "na", "-", "–", "—", "?", "not stated", "unknown")
_LONGEST, LARGEST = 400, 1e18                              # a longer cell is cut, a larger number is none


@dataclass(frozen=True, slots=True)
class Number:
    """A printed number and half a unit of its last printed digit: what was printed lies within value ± half."""
    value: float
    half: float

    @property
    def low(self) -> float:
        return self.value - self.half

    @property
    def high(self) -> float:
        return self.value + self.half

    def wider(self, half: float) -> Number:
        return Number(self.value, max(self.half, half))


def text(row: Mapping, column: str) -> str:
    """The cell as text; "" where it is absent, empty or not a number (NaN, as pandas reads an empty cell)."""
    value = row.get(column)
    if value is None or isinstance(value, float) and math.isnan(value):
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)                                  # pandas makes floats of whole numbers beside empty cells
    found = " ".join(_SEPARATOR.sub(",", str(value)[:_LONGEST]).split())
    if re.fullmatch(r"\d{1,3}(?: \d{3})+", found):
        found = found.replace(" ", "")
    return "" if found.lower() in _EMPTY else found


def number(row: Mapping, column: str) -> Number | None:
    """The first number of a cell with its rounding: "10.55" is ± 0.005, "~50,000" ± 5,000, "55k" and "5.5e4" ± 500."""
    return next(iter(numbers(row, column)), None)


def numbers(row: Mapping, column: str) -> list[Number]:
    """Every number of a cell, in order; none of one with a decimal comma ("53,29"), which could be two."""
    found, cell = [], text(row, column)
    if _DECIMAL_COMMA.fullmatch(cell):
        return found
    for match in _NUMBER.finditer(cell):
        about, digits, power, suffix = match[1], match[2].replace(",", ""), int(match[3] or 0), match[4] or ""
        scale = _THOUSANDS[suffix] * 10.0**power
        half = 0.5 * 10.0**-len(digits.partition(".")[2]) * scale
        if about and "." not in digits and scale == 1:
            half = 0.5 * 10.0**(len(digits) - len(digits.rstrip("0")))
        if float(digits) * scale <= LARGEST:
            found.append(Number(float(digits) * scale, half))
    return found


def whole(row: Mapping, column: str, least: int = 0) -> int | None:
    """A cell that counts something, or None where it holds no whole number of at least `least`."""
    found = number(row, column)
    if found is None or found.value != int(found.value) or found.value < least or found.half > 0.5:
        return None
    return int(found.value)


ENGINES = (("sglang", r"sglang"), ("trtllm", r"tensorrt|trt-?llm|trtllm"), ("lmdeploy", r"lmdeploy|turbomind"),
           ("llamacpp", r"llama[._-]?(?:cpp|server|cli)|kobold|ollama|\bggml\b|lm ?studio|\bik_llama|llamafile"),
           ("transformers", r"transformers"), ("vllm", r"vllm"))


@dataclass(frozen=True, slots=True)
class Engine:
    """name: vllm, sglang, trtllm, lmdeploy, llamacpp, transformers or "". release: its numbers, () = not printed.

    month: (year, month) printed beside or instead of a release, month 0 where only the year is. generation: "0" or "1"
    where V0 or V1 is named. cell: what was read, in lower case.
    """
    name: str
    release: tuple[int, ...]
    month: tuple[int, int] | None
    generation: str
    cell: str = ""


def engine(cell: str) -> Engine:
    """What a cell such as "vLLM 0.10/0.11 2025-09" or "llama.cpp b5123 2025-05" says. Of two names or releases the
    first."""
    low = cell.lower()
    named = [(found.start(), known) for known, pattern in ENGINES if (found := re.search(pattern, low))]
    name = min(named)[1] if named else ""
    release = re.search(r"(?<![\d.-])v?(\d{1,2})\.(\d{1,3})(?:\.(\d{1,3}))?(?![\d.]*-\d)", low)
    month = re.search(r"(20[12]\d)-(0[1-9]|1[0-2])", low) or re.search(r"(?<![\d.])(20[12]\d)()(?![\d.])", low)
    generation = re.search(r"\bv([01])\b(?!\.)", low)
    return Engine(name, tuple(int(part) for part in release.groups() if part) if release else (),
                  (int(month[1]), int(month[2] or 0)) if month else None, generation[1] if generation else "", low)
