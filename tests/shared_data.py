"""Traces and engine runs that are read where they lie and never shipped: in KVLAB_TRACES, else beside the checkout."""
import os
from pathlib import Path

import pytest

BESIDE = Path(__file__).parents[2] / "shared" / "data"


def shared_data(name: str) -> Path:
    """The path of traces/…, engine_runs/… or a file of that folder; the test is skipped, saying so, where it is not."""
    path = Path(os.environ.get("KVLAB_TRACES") or BESIDE) / name
    if not path.exists():
        pytest.skip(f"{name} is not here: KVLAB_TRACES names no folder that holds it")
    return path
