"""A figure in Chinese: a font that has the characters, the texts of a drawn figure, and lines that fit a width."""
from __future__ import annotations

import logging
import re
import textwrap
import unicodedata
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import findSystemFonts, fontManager
from matplotlib.ft2font import FT2Font
from matplotlib.text import Text
from matplotlib.ticker import Formatter

from kvlab.lang import checked, translated

# with TrueType outlines first: only those can stand in a PDF as Type 42
FONTS = ("WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Microsoft YaHei", "SimHei", "PingFang SC", "Heiti SC", "STHeiti",
         "Droid Sans Fallback", "Noto Sans SC", "Arial Unicode MS", "SimSun", "Noto Sans CJK SC", "Source Han Sans SC",
         "Source Han Sans CN", "Hiragino Sans GB")
_FILES = re.compile("wqy|msyh|simhei|simsun|pingfang|heiti|droidsansfallback|noto.*(cjk|sc)|arial.*uni|sourcehan|"
                    "hiragino", re.I)
INSTALL = "Debian, Ubuntu: apt install fonts-wqy-microhei; others: a font named " + ", ".join(FONTS[:4])
_TOKENS = re.compile(r"\s*[（“]*(?:[\u3400-\u9fff]|[^\s\u3400-\u9fff，。：；？！、（）“”]+)?[，。：；？！、）”]*")


def usable(lang: str) -> str:
    """The language that figures can be drawn in: "en" where a Chinese font is lacking, which is said once.

    Refused: an unknown language (ValueError).
    """
    return "en" if checked(lang) == "en" or font() is None else lang


@cache
def font() -> str | None:
    """The family of a font with Chinese characters, one with TrueType outlines before others; None: there is none."""
    found = _listed()
    if not any(map(_outlines, found.values())):         # matplotlib keeps a list of fonts, and may know an old one
        for path in findSystemFonts():
            if _FILES.search(Path(path).name):
                fontManager.addfont(path)
        found = _listed()
    if not found:
        warnings.warn("no font with Chinese characters is installed, so figures keep their English labels; install "
                      f"one ({INSTALL})", stacklevel=4)
        return None
    logging.getLogger("matplotlib.font_manager").addFilter(_said)
    chosen = next((name for name in FONTS if _outlines(found.get(name))), next(filter(found.get, FONTS)))
    if not _outlines(found[chosen]):
        warnings.warn(f"the font {chosen} has no TrueType outlines, so that PDFs cannot hold it as Type 42; install "
                      f"another ({INSTALL})", stacklevel=4)
    return chosen


def _said(record: logging.LogRecord) -> bool:
    """Not that a font has no bold: where Latin letters are bold, Chinese ones are as they are."""
    return "Failed to find font weight" not in record.getMessage()


def _listed() -> dict[str, str]:
    return {one.name: one.fname for one in fontManager.ttflist if one.name in FONTS and Path(one.fname).is_file()}


def _outlines(path: str | None) -> bool:
    """Whether the file holds TrueType outlines (of a collection: its first font), as its table maxp says."""
    profile = FT2Font(path).get_sfnt_table("maxp") if path else None
    return profile is not None and profile["version"] == (1, 0)


def families(lang: str, names: list[str]) -> list[str]:
    """The families to write that language with: the given ones, and behind them the one with Chinese characters."""
    return names if lang == "en" else [*names, *filter(None, [font()])]


def tell(figure: Figure, lang: str) -> None:
    """Put every text of the figure into that language: labels, titles, legends, notes, and ticks that are words."""
    if lang == "en":
        return
    for ax in (*figure.axes, *(child for one in figure.axes for child in one.child_axes)):
        for axis in (ax.xaxis, ax.yaxis):
            for minor, level in ((False, axis.major), (True, axis.minor)):
                if level.formatter is None:
                    continue
                told = _Told(level.formatter, lang)
                places = list(axis.get_ticklocs(minor=minor))
                if told.format_ticks(places) != list(level.formatter.format_ticks(places)):
                    told.set_axis(axis)
                    level.formatter = told
    for text in _texts(figure):
        was = text.get_text()
        found = translated(was, lang)
        if "\n" in was and "\n" not in found:           # a phrase that was broken to fit is as narrow again
            found = "\n".join(wrapped(found, max(map(breadth, was.split("\n")))))
        text.set_text(found)


def _texts(artist: Artist) -> Iterator[Text]:
    """Every text within an artist; of an axis its label only, for ticks are made anew whenever they are drawn."""
    for child in artist.get_children():
        if isinstance(child, Text):
            yield child
        elif isinstance(child, Axis):
            yield child.label
        else:
            yield from _texts(child)


class _Told(Formatter):
    """Another formatter's ticks in a language."""

    def __init__(self, inner: Formatter, lang: str):
        self.inner, self.lang = inner, lang

    def set_axis(self, axis) -> None:
        super().set_axis(axis)
        self.inner.set_axis(axis)

    def set_locs(self, locs) -> None:
        super().set_locs(locs)
        self.inner.set_locs(locs)

    def __call__(self, x, pos=None) -> str:
        return translated(self.inner(x, pos), self.lang)

    def format_ticks(self, values) -> list[str]:
        return [translated(label, self.lang) for label in self.inner.format_ticks(values)]

    def get_offset(self) -> str:
        return self.inner.get_offset()


def breadth(text: str) -> int:
    """How many Latin letters a line is about as broad as: a Chinese character counts as two."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def wrapped(text: str, width: int, *, whole_words: bool = False) -> list[str]:
    """Lines of at most that breadth; Chinese breaks between characters, but not before a mark that ends a part.

    whole_words: a word is never broken, and may stand out.
    """
    if breadth(text) == len(text):
        return textwrap.wrap(text, width, break_long_words=not whole_words, break_on_hyphens=not whole_words)
    lines = [""]
    for piece in filter(None, _TOKENS.findall(text)):
        if lines[-1] and breadth(lines[-1] + piece) > width:
            clause = re.fullmatch("(.*[，；])(.+)", lines[-1])
            if clause and breadth(clause[1]) > width / 2:                   # rather there than within a word
                lines[-1:] = [clause[1], clause[2].lstrip()]
            else:
                lines.append("")
                piece = piece.lstrip()
        lines[-1] += piece
    return lines
