"""Results of past schema versions: what each version added, and how an older table becomes one of today.

A version is never rewritten on disk. tests/record/past/v<N>/ holds a run that kvlab of version N wrote.
"""
from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from kvlab.record.reading import COLUMNS, SCHEMA_VERSION

if TYPE_CHECKING:
    import pandas as pd

ADDED = {2: ("worker",)}        # columns by the version that added them; in older results they are blank


def check_schema_version(got: Any, where: str) -> int:
    """The version, if this kvlab can read it; else ValueError says which it can, and what to do."""
    if type(got) is int and 1 <= got <= SCHEMA_VERSION:
        return got
    newer = "a newer kvlab wrote them: upgrade" if type(got) is int and got > SCHEMA_VERSION else \
        "read them with the kvlab that wrote them, or run the study again"
    raise ValueError(f"{where} has results of schema version {got!r:.40}, and this kvlab reads version "
                     f"1 to {SCHEMA_VERSION}; {newer}")


def version_of(names: Collection[str]) -> int:
    """The newest version whose columns a table of these names may be: what says no version itself (CSV)."""
    lacking = [version for version, added in ADDED.items() if not set(added) <= set(names)]
    return min(lacking) - 1 if lacking else SCHEMA_VERSION


def migrated(frame: pd.DataFrame, version: int) -> pd.DataFrame:
    """The table with the columns that later versions added, blank; the order of columns is the caller's."""
    later = {name: "" if COLUMNS[name] == "string" else None
             for since, added in ADDED.items() if since > version for name in added if name not in frame}
    return frame.assign(**later) if later else frame
