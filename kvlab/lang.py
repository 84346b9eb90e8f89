"""Languages: English, and Chinese for the readers of the article."""
from __future__ import annotations

from typing import NamedTuple

LANGUAGES = ("en", "zh")


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
