"""What a program that counts (ncu, callgrind) is pointed at: a case as JSON, run again in a process of its own."""
from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from kvlab.registry import case_from

# what Nsight Compute, Nsight Systems and Compute Sanitizer set for the program that they start. Undocumented; seen in
# public code that asks for them (FlashMLA, vecmem, traccc)
STARTED_BY = ("NV_COMPUTE_PROFILER_PERFWORKS_DIR", "NV_NSIGHT_INJECTION_PORT_BASE",
              "NV_NSIGHT_INJECTION_TRANSPORT_TYPE", "CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID",
              "NV_SANITIZER_INJECTION_PORT_RANGE_BEGIN")


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


def under_ncu() -> str | None:
    """Why no second profiler may start here: ncu or another of NVIDIA's tools runs this process; None if none does."""
    found = next((name for name in STARTED_BY if os.environ.get(name)), None)
    return found and (f"this process runs under Nsight or another of NVIDIA's tools ({found} is set), and a GPU takes "
                      "one profiler at a time: run kvlab without it")
