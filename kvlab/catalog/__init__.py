"""What is known of models and accelerators: readers of data/ and of models' own files, each with its source.

No torch, no pandas. `kvlab.catalog.resolve.model` takes whatever a person gives for a model.
"""
from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from kvlab.registry import no_such


class Named(Protocol):
    """An entry of the catalogue: whatever it is, it has a name."""
    @property
    def name(self) -> str: ...


Entry = TypeVar("Entry", bound=Named)


def data_dir() -> Path:
    """The folder of the data files: inside an installed package, or at the top of a source checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / "_data", package.parent / "data"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError("kvlab's data files are missing: neither kvlab/_data nor data/ beside the package exists; "
                            "install kvlab again, or run it from a complete checkout")


def rows(filename: str) -> list[dict[str, str]]:
    """The lines of one CSV file of data/ as text; an empty cell means unknown."""
    with open(data_dir() / filename, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def number(text: str, scale: float = 1) -> float | None:
    """A cell as a number times scale, None where it is empty: unknown is never 0."""
    return float(text) * scale if text else None


def integer(text: str, scale: int = 1) -> int | None:
    """A cell as a whole number times scale, None where it is empty."""
    return round(float(text) * scale) if text else None


def find(what: str, name: str, entries: Mapping[str, Entry], short: Mapping[str, list[Entry]]) -> Entry:
    """The entry of that name in any case, or the only one that the short form stands for.

    entries: by full name. short: by short form in lower case, each with every entry it could mean.
    An unknown name is a KeyError with a near match and the list, an ambiguous one a KeyError with what it could be.
    """
    wanted = name.lower()
    for known, entry in entries.items():
        if known.lower() == wanted:
            return entry
    candidates = short.get(wanted, [])
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise KeyError(f"{what} {name!r} could be any of: {', '.join(entry.name for entry in candidates)}; "
                       "give the full name")
    raise no_such(what, name, entries)
