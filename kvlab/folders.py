"""Where kvlab keeps what it can make again: one folder per user."""
from __future__ import annotations

import os
from pathlib import Path


def cache_folder(*parts: str) -> Path:
    """$KVLAB_CACHE, else $XDG_CACHE_HOME/kvlab, else ~/.cache/kvlab, and `parts` below it. It need not be there yet.

    Everything in it may be deleted: kvlab makes it again, or says how. Worker processes inherit the variables.
    """
    if own := os.environ.get("KVLAB_CACHE"):
        return Path(own).expanduser().joinpath(*parts)
    above = os.environ.get("XDG_CACHE_HOME")
    return (Path(above) if above else Path.home() / ".cache").joinpath("kvlab", *parts)
