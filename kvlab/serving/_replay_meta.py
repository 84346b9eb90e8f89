"""Values of a run's meta.json, typed and with where they come from; what cannot be meant is refused by name.

A value may stand as itself or as text ("2", "true"), as some recorders write it.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

from kvlab.serving._replay_run import Run

RESOLVED = "resolved_config"
MOST = 10**7                    # of tokens, sequences, ranks and blocks
_WORDS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class Fact:
    """A value and where it comes from: the run's meta.json, an argument, a default, or a model of it."""
    value: object
    source: str


def whole(run: Run, facts: dict[str, Fact], name: str, default: int | None, *places: str,
          source: str = "default", most: int = MOST) -> int | None:
    """A whole number from 1 to `most`; the default, if there is one, becomes a fact too."""
    given = value = run.get(*places)
    if value is None:
        if default is not None:
            facts[name] = Fact(default, source)
        return default
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit() and len(value) < 20:
        value = int(value)
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{run.path}: {name} = {given!r:.80} in meta.json is no whole number from 1 to {most:,}")
    facts[name] = Fact(value, "meta")
    return value


def flag(run: Run, facts: dict[str, Fact], name: str, default: bool, *places: str) -> bool:
    """True or false."""
    value = run.get(*places)
    if value is None:
        facts[name] = Fact(default, "default of vLLM")
        return default
    found = value if isinstance(value, bool) else _WORDS.get(str(value).strip().lower())
    if found is None:
        raise ValueError(f"{run.path}: {name} = {value!r:.80} in meta.json is neither true nor false")
    facts[name] = Fact(found, "meta")
    return found


def share(run: Run, name: str, default: float, *places: str) -> float:
    """A number from 0 to 1."""
    value = run.get(*places)
    if value is None:
        return default
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not 0 <= found <= 1:
        raise ValueError(f"{run.path}: {name} = {value!r:.80} in meta.json is no number from 0 to 1")
    return found


def word(run: Run, name: str, default: str, *places: str) -> str:
    """A text, in lower case."""
    value = run.get(*places)
    if value is None:
        return default
    if not isinstance(value, str) or len(value) > 100:
        raise ValueError(f"{run.path}: {name} = {value!r:.80} in meta.json is no text")
    return value.strip().lower()
