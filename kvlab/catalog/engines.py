"""What serving engines do with their KV cache, from data/engines.csv: one cell per engine and question, each sourced.

An empty cell means that no source was at hand, not that an engine lacks it. What is said is quoted from the engine's
own source or documentation of the version beside it; nothing here was measured.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from kvlab.catalog import find, rows

ASPECTS = {
    "block_size": "tokens per block or page, by default",
    "prefix_cache": "whether prompts are reused by default, and how they are found",
    "eviction": "which cached blocks go first",
    "under_pressure": "what happens to requests when no block is free",
    "policies": "orders in which requests are taken",
    "admission": "what must hold before a request starts",
    "kv_formats": "how K and V may be stored",
    "memory_fraction": "what the memory setting is a fraction of",
    "offload": "where KV goes beyond the GPU",
    "metrics": "where metrics are read",
    "status": "whether it is being developed",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One answer. what: "" = unknown. version: of the engine. source: URL. read: the day the source was read."""
    what: str
    version: str
    source: str
    read: str


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine with an answer per aspect of ASPECTS, unknown ones included."""
    name: str
    version: str
    cells: Mapping[str, Cell] = field(hash=False)


@cache
def _by_name() -> dict[str, Engine]:
    found: dict[str, dict[str, Cell]] = {}
    for row in rows("engines.csv"):
        found.setdefault(row["engine"], {})[row["aspect"]] = Cell(row["what"], row["version"], row["source"],
                                                                  row["read"])
    return {name: Engine(name, cells["status"].version, cells) for name, cells in found.items()}


def engines() -> dict[str, Engine]:
    """Every engine of the table by name, in the file's order."""
    return dict(_by_name())


def engine(name: str) -> Engine:
    """The engine of that name, in any case, or the only one whose name begins with it.

    Refuses an unknown or ambiguous name with KeyError, a near match and the list.
    """
    begins = [known for known in _by_name().values() if known.name.lower().startswith(name.lower())]
    return find("engine", name, _by_name(), {name.lower(): begins})
