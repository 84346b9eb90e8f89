"""Text for LaTeX: special characters made harmless, and what pdfLaTeX lacks written with what it has."""
from __future__ import annotations

import re

_SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
            **{one: f"\\{one}" for one in "&%$#_{}"}}
_SIGNS = {"×": r"\times", "÷": r"\div", "±": r"\pm", "−": "-", "≤": r"\le", "≥": r"\ge", "≠": r"\ne", "≈": r"\approx",
          "→": r"\to", "←": r"\leftarrow", "↔": r"\leftrightarrow", "∞": r"\infty", "√": r"\surd", "·": r"\cdot",
          "∝": r"\propto", "∑": r"\sum", "µ": r"\mu", "μ": r"\mu", "²": "^2", "³": "^3", "⁻": "^-", "¹": "^1",
          "Δ": r"\Delta", "α": r"\alpha", "β": r"\beta", "σ": r"\sigma", "…": r"\ldots", "∈": r"\in", "½": r"\frac12"}
_QUOTES = {"–": "--", "—": "---", "“": "``", "”": "''", "‘": "`", "’": "'", "\xa0": "~", "\u202f": r"\,",
           "°": r"\textdegree{}", "<": r"\textless{}", ">": r"\textgreater{}",
           "|": r"\textbar{}", '"': r"\textquotedbl{}"}
_WRITTEN = str.maketrans({**_SPECIAL, **{one: rf"\ensuremath{{{sign}}}" for one, sign in _SIGNS.items()}, **_QUOTES})


def escaped(text: str) -> str:
    """Text as LaTeX prints it, the same in pdfLaTeX, XeLaTeX and LuaLaTeX; line ends become spaces."""
    return one_line(text).translate(_WRITTEN)


def one_line(text) -> str:
    """The text with every run of blanks and line ends as one space."""
    return re.sub(r"[ \t\r\n\f\v]+", " ", str(text)).strip()
