"""Languages: English, and Chinese for the readers of the article.

Sentences are made once, in English, beside the numbers; data/zh.csv says how they and their parts read in Chinese.
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

LANGUAGES = ("en", "zh")
DICTIONARY = "zh.csv"
LONGEST = 2000                  # characters of a sentence; what is longer is somebody else's text, such as a traceback
# marks between clauses, then those within one, of the widest reach first, and what stands there in Chinese
_MARKS = {" · ": " · ", "; ": "；", ": ": "："}, {", ": "，", " and ": " 和 "}
_ENDS = {".": "。", "?": "？", "!": "！"}
_HAN, _FULL = "\u4e00-\u9fff", "，。：；？！（）"
_PAIRS = {"(": ")", "[": "]", "“": "”"}
_WHOLE = r"\((?:[^()]|\([^()]*\))*\)|\[[^\[\]]*\]|“[^”]*”"              # a bracket or quotation, with all it holds
_PLAIN = "[^()\\[\\]“”]"
_NUMBER = r"[+\-−±]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
_HOLES = {"{#}": f"({_NUMBER}(?:, {_NUMBER})*)", "{*}": f"((?:{_PLAIN}|{_WHOLE})+?)",
          "{}": f"((?:(?![;:] ){_PLAIN}|{_WHOLE})+?)", "{-}": f"((?:(?![,;:] | and ){_PLAIN}|{_WHOLE})+?)"}
_HOLE = re.compile(r"\{[#*-]?\}")


class Text(NamedTuple):
    """One text in each language: `text.en`, `text.zh`, or `text.of(lang)`."""
    en: str
    zh: str

    def of(self, lang: str) -> str:
        return getattr(self, checked(lang))


def checked(lang: str) -> str:
    """The language as given; ValueError with what there is for any other."""
    if lang not in LANGUAGES:
        raise ValueError(f"language {lang!r} is not there; allowed: {', '.join(LANGUAGES)}")
    return lang


def translated(text: str, lang: str) -> str:
    """The text in that language; names, numbers and what the dictionary does not know stay as they are.

    Looked for in turn: the whole phrase, its sentences, a template that fits one, the parts between marks. Refused: an
    unknown language (ValueError).
    """
    if checked(lang) == "en" or (found := _chinese(text)) == text:
        return text
    return _spaced(found)


def _spaced(text: str) -> str:
    """A space between Chinese and Latin letters or digits, none beside full-width marks or between Chinese."""
    text = re.sub(f"(?<=[{_FULL}]) (?! )|(?<! ) (?=[{_FULL}])|(?<=[{_HAN}]) (?=[{_HAN}])", "", text)
    return re.sub(f"(?<=[{_HAN}])(?=[A-Za-z0-9])|(?<=[A-Za-z0-9])(?=[{_HAN}])", " ", text)


@lru_cache(maxsize=20_000)
def _chinese(text: str) -> str:
    if not re.search("[A-Za-z]", text):
        return text
    if (core := text.strip()) != text:
        before, _, after = text.partition(core)
        return before + _chinese(core) + after
    for way in (_phrase, _lines, _sentences, _filled, _clauses, _bracketed, _items):
        if (found := way(text)) is not None:
            return found
    return text


def _starts(text: str) -> tuple[str, ...]:
    """The text, and as it would stand within a sentence."""
    small = text[0].lower() + text[1:]
    return (text,) if small == text else (text, small)


def _phrase(text: str) -> str | None:
    phrases = _dictionary().phrases
    return next((phrases[one] for one in _starts(text) if one in phrases), None)


def _lines(text: str) -> str | None:
    """Lines one by one, if they are no phrase that was broken to fit."""
    if "\n" not in text:
        return None
    line = text.replace("\n", " ")
    return _phrase(line) or _filled(line) or "\n".join(map(_chinese, text.split("\n")))


def _sentences(text: str) -> str | None:
    ends = [at for end in _ENDS for at, _ in _outside(text, f"{end} ")]
    cuts = sorted({*(at + 1 for at in ends), len(text)})
    if len(cuts) == 1 and text[-1] not in _ENDS:
        return None
    said, began, changed = "", 0, False
    for cut in cuts:
        core, end = text[began:cut].strip(), ""
        if core[-1:] in _ENDS:
            core, end = core[:-1], core[-1]
        found = _chinese(core)
        said += found + (_ENDS.get(end, "") if found != core else f"{end} ")
        began, changed = cut, changed or found != core
    return said.rstrip() if changed else text


def _filled(text: str) -> str | None:
    """The first template that fits; what stands in its holes is translated in turn."""
    if len(text) > LONGEST:
        return None
    return next((found for template in _dictionary().near(text) for one in _starts(text)
                 if (found := template.filled(one)) is not None), None)


def _clauses(text: str) -> str | None:
    return _split(text, _MARKS[0])


def _items(text: str) -> str | None:
    return _split(text, _MARKS[1])


def _split(text: str, marks: dict[str, str]) -> str | None:
    """The parts at the first of the marks that the text has, each in turn."""
    for mark, instead in marks.items():
        if not (cuts := _outside(text, mark)):
            continue
        begins, ends = [0, *(end for _, end in cuts)], [*(at for at, _ in cuts), len(text)]
        parts = [text[begin:end] for begin, end in zip(begins, ends)]
        found = [_chinese(part) if part else part for part in parts]
        names = mark == " and " and not any(" " in part for part in parts)
        return instead.join(found) if names or found != parts else text     # a list of names keeps its commas
    return None


def _bracketed(text: str) -> str | None:
    """What stands in quotation marks, or before and in the bracket that ends the text."""
    if text[0] == "“" and text[-1] == "”":
        return f"“{_chinese(text[1:-1])}”"
    for opening in re.finditer(r" \(", text) if text[-1] == ")" else ():
        before, inside = text[:opening.start()], text[opening.end():-1]
        if before and inside and _even(before) and _even(inside):
            found = _chinese(before), _chinese(inside)
            return text if found == (before, inside) else "{}（{}）".format(*found)
    return None


def _outside(text: str, mark: str) -> list[tuple[int, int]]:
    """(begin, end) of a mark wherever it stands outside of brackets and quotation marks, and not first."""
    if mark not in text:
        return []
    found = re.finditer(f"{_WHOLE}|{re.escape(mark)}", text)
    return [one.span() for one in found if one.group() == mark and one.start()]


def _even(text: str) -> bool:
    """Whether every bracket and quotation that the text opens is closed in it, and none other."""
    depth = 0
    for letter in text:
        depth += (letter in _PAIRS) - (letter in _PAIRS.values())
        if depth < 0:
            return False
    return depth == 0


@dataclass(frozen=True)
class _Template:
    """A sentence with holes; in Chinese `{}` in turn, or `{0}`, `{1}` … in another order.

    `{#}` holds numbers, `{}` words within a clause, `{-}` such words without a comma or an "and", `{*}` clauses too.
    """
    en: str
    zh: str

    @property
    def word(self) -> str:
        """Its longest word; "" where it has none."""
        return max(re.findall("[a-z]{2,}", self.en.lower()), key=len, default="")

    @cached_property
    def pattern(self) -> re.Pattern:
        found, began = "", 0
        for hole in _HOLE.finditer(self.en):
            before, kind = self.en[:hole.start()], hole.group()
            inside = kind == "{}" and before.count("(") > before.count(")")      # a bracket may hold clauses
            found += re.escape(self.en[began:hole.start()]) + _HOLES["{*}" if inside else kind]
            began = hole.end()
        return re.compile(found + re.escape(self.en[began:]))

    def filled(self, text: str) -> str | None:
        match = self.pattern.fullmatch(text)
        return None if match is None else self.zh.format(*map(_chinese, match.groups()))


class _Dictionary:
    """Phrases, and templates by the longest word of each, so that few of them are tried on a text."""

    def __init__(self, lines: list[dict[str, str]]):
        self.phrases = {line["en"]: line["zh"] for line in lines if "{" not in line["en"]}
        self._templates = sorted((_Template(line["en"], line["zh"]) for line in lines if "{" in line["en"]),
                                 key=lambda one: (one.en[0] == "{", -len(_HOLE.sub("", one.en))))
        self._places: dict[str, list[int]] = {}
        for place, one in enumerate(self._templates):
            self._places.setdefault(one.word, []).append(place)

    def near(self, text: str) -> list[_Template]:
        """Templates whose longest word is in the text: those that begin with words, then those that say most first."""
        words = {*re.findall("[a-z]{2,}", text.lower()), ""}
        return [self._templates[place] for place in sorted(
            place for word in words for place in self._places.get(word, ()))]


@lru_cache(maxsize=1)
def _dictionary() -> _Dictionary:
    from kvlab.catalog import rows
    return _Dictionary(rows(DICTIONARY))
