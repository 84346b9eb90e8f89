"""Where a figure will stand: how wide a column is there, how large and in which font text is set.

tueplots knows the machine learning conferences and slides; the others are written down here.
"""
from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from matplotlib.font_manager import findSystemFonts, fontManager
from tueplots import figsizes, fonts, fontsizes

from kvlab.registry import no_such

# what LaTeX's times package gives is Times; the last ones are as wide letter by letter or come with matplotlib
STAND_INS = ("Liberation Serif", "STIXGeneral")
TIMES = ("Times New Roman", "Times", "TeX Gyre Termes", "Nimbus Roman", *STAND_INS)
_FILES = re.compile("times|liberation-?serif|libertin", re.I)
PICA, CM = 12 / 72.27, 1 / 2.54                                        # inches


@dataclass(frozen=True)
class Venue:
    """A place for figures. widths: inches of a column, then of the whole page where that has two columns; height:
    inches of text on a page; text, small: points of labels, and of ticks and legends; fonts: families, the first that
    is there is taken; preamble: the LaTeX that gives a pgf picture the venue's font.

    Source: each venue's `source`.
    """
    name: str
    widths: tuple[float, ...]
    height: float
    text: float
    small: float
    fonts: tuple[str, ...]
    preamble: str
    source: str

    def width(self, columns: int) -> float:
        """Inches of a figure over so many columns; ValueError where the venue's page has fewer."""
        if not 1 <= columns <= len(self.widths):
            pages = "one column; leave --columns out" if len(self.widths) == 1 else "two columns; give --columns 1 or 2"
            raise ValueError(f"--columns {columns}: a page of {self.name} has {pages}")
        return self.widths[columns - 1]

    def settings(self) -> dict:
        """What matplotlib is told besides kvlab's own settings."""
        return {"font.family": [*dict.fromkeys((font(self.fonts), "DejaVu Sans"))],
                "font.size": self.text, "axes.labelsize": self.text, "axes.titlesize": self.text,
                "xtick.labelsize": self.small, "ytick.labelsize": self.small, "legend.fontsize": self.small,
                "axes.titlepad": 4, "axes.labelpad": 2, "pgf.rcfonts": False, "pgf.preamble": self.preamble}


def _neurips() -> Venue:
    return _tueplots("neurips", "neurips2024", "neurips2024", 9.0)


def _iclr() -> Venue:
    return _tueplots("iclr", "iclr2024", "iclr2024", 9.0)


def _icml() -> Venue:
    return _tueplots("icml", "icml2024_half", "icml2024", 9.0, "icml2024_full")


def _tueplots(name: str, size: str, year: str, height: float, whole: str | None = None) -> Venue:
    """The sizes and the LaTeX of tueplots; the height of the text is that of the style file."""
    sizes = getattr(fontsizes, year)()
    widths = [getattr(figsizes, one)()["figure.figsize"][0] for one in (size, whole) if one]
    return Venue(name, tuple(widths), height, sizes["font.size"], sizes["legend.fontsize"], TIMES,
                 getattr(fonts, f"{year}_tex")()["text.latex.preamble"],
                 f"tueplots {year} (figsizes, fontsizes, fonts); \\textheight {height:g} in of the style file")


def _acl() -> Venue:
    return Venue("acl", (7.7 * CM, 16 * CM), 24.7 * CM, 9, 7, TIMES, r"\usepackage{times}",
                 "github.com/acl-org/acl-style-files formatting.md: columns 7.7 cm, gap 0.6 cm, height 24.7 cm, "
                 "captions 10 pt, Times Roman; text one point below the caption, as tueplots has it")


def _ieee() -> Venue:
    return Venue("ieee", (21 * PICA, 43 * PICA), 9.25, 8, 7, TIMES, r"\usepackage{times}",
                 "IEEEtran.cls V1.8b: \\textwidth 43pc, \\columnsep 1pc, conference \\textheight 9.25in, captions "
                 "\\footnotesize = 8 pt, Times")


def _acm() -> Venue:
    page, gap = 8.5 - 2 * 54 / 72.27, 2 * PICA
    return Venue("acm", ((page - gap) / 2, page), 8.5, 8, 7, ("Linux Libertine O", "Libertinus Serif", *TIMES),
                 r"\IfFileExists{libertine.sty}{\usepackage{libertine}}{\usepackage{times}}",
                 "acmart.dtx, sigconf: paperwidth 8.5in, inner and outer 54pt, columnsep 2pc, text and captions 9 pt, "
                 "Linux Libertine; the height of the text is about 8.5 in")


def _slides() -> Venue:
    width, height = figsizes.beamer_169(rel_width=1, rel_height=0.9)["figure.figsize"]
    sizes = fontsizes.beamer(default_smaller=2)
    return Venue("slides", (width,), height, sizes["font.size"], sizes["legend.fontsize"], ("DejaVu Sans",), "",
                 "tueplots beamer_169: the text width of a 16 : 9 slide of beamer, nine tenths of its height")


VENUES: dict[str, Callable[[], Venue]] = {"neurips": _neurips, "icml": _icml, "iclr": _iclr, "acl": _acl,
                                          "ieee": _ieee, "acm": _acm, "slides": _slides}


@lru_cache
def venue(name: str) -> Venue:
    """The venue of that name; KeyError with a near match and the list for any other."""
    if name not in VENUES:
        raise no_such("venue", name, VENUES)
    return VENUES[name]()


@lru_cache
def font(families: tuple[str, ...]) -> str:
    """The first of the families that is there as TrueType; one warning where only a stand-in is.

    Others would not do: PDF takes TrueType outlines as Type 42, and journals refuse Type 3.
    """
    if not set(families[:-1]) & _there():                # matplotlib keeps a list of fonts, and may know an old one
        for path in findSystemFonts():
            if _FILES.search(Path(path).name):
                fontManager.addfont(path)
    there = _there()
    found = next((family for family in families if family in there), "DejaVu Sans")
    if found in STAND_INS or found not in families:
        warnings.warn(f"the venue sets its text in {families[0]}, which is not installed here as TrueType; {found} "
                      "stands in for it. Install the font, or take --format pgf, which has the document's own",
                      stacklevel=2)
    return found


def _there() -> set[str]:
    return {one.name for one in fontManager.ttflist if one.fname.lower().endswith(".ttf")}
