"""What a program that counts (ncu, callgrind) is pointed at: a case as JSON, run again in a process of its own."""
from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from kvlab.registry import case_from


def write(case, path: Path, **settings) -> Path:
    """The case (a Comparison or an Operation) and settings, as a file that `read` takes."""
    kind = type(case)
    path.write_text(json.dumps(dict(type=f"{kind.__module__}:{kind.__qualname__}", case=asdict(case),
                                    settings=settings)))
    return path


def read(path: Path) -> tuple[object, dict]:
    """(the case, the settings)."""
    told = json.loads(path.read_text())
    return case_from(told["type"], told["case"]), told["settings"]


def command(module: str, path: Path) -> list[str]:
    """This Python on one of kvlab's modules and that file."""
    return [sys.executable, "-m", module, str(path)]


def targets(case, copies: int = 1) -> Iterator[tuple[str, list[Callable]]]:
    """(case_id, one call per input copy) of each trial of a comparison, or of the operation itself."""
    if not hasattr(case, "trials"):
        yield case.case_id, case.calls(copies)
        return
    inputs = case.inputs(copies)
    for trial in case.trials:
        yield trial.case_id, trial.prepare(inputs[trial.kv_format, trial.layout])
