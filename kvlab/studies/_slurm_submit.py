"""How a Slurm job is asked for, through submitit: sbatch's options, what the cases need, the job's name."""
from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kvlab.studies._run import Case
from kvlab.studies._slurm_job import take

MINUTES = 24 * 60               # of a job
GENERIC = ("timeout_min", "mem_gb", "gpus_per_node", "cpus_per_task")           # submitit's; all others are sbatch's
ONE = ("nodes", "ntasks", "ntasks_per_node", "tasks_per_node", "array")         # a job is one process of one place


def job_name(board: Path) -> str:
    """The name of a board's jobs in Slurm."""
    return f"kvlab-{board.name}"


def sbatch_options(text: str | None) -> dict[str, str]:
    """sbatch's options as names and values, from "partition=gpu,timeout_min=60"."""
    found = dict(part.strip().partition("=")[::2] for part in (text or "").split(",") if part.strip())
    if wrong := [name for name, value in found.items() if not name.isidentifier() or not value]:
        raise ValueError(f"--address {text!r} must be options of sbatch, such as partition=gpu,timeout_min=60,jobs=8; "
                         f"{wrong[0]!r} is none")
    for name in ("jobs", *GENERIC):
        if name in found and not (found[name].isdecimal() and int(found[name])):
            raise ValueError(f"--address: {name}={found[name]} must be a whole number of at least 1")
    if many := [name for name in ONE if name in found]:
        raise ValueError(f"--address: a job of kvlab is one process, so {many[0]} is not for it; jobs=N gives N jobs")
    return found


def needs(cases: Iterable[Case], wanted: Iterable[str] = ()) -> dict[str, Any]:
    """What the cases ask of a job: a GPU, unless GPUs are wanted anyway; a node where times are of its CPU."""
    if any(getattr(case, "device", "cpu").startswith("cuda") for case in cases):
        return {} if any(name.startswith(("gres", "gpus")) for name in wanted) else dict(gpus_per_node=1)
    return dict(exclusive=True) if any(getattr(case, "timed", True) for case in cases) else {}


def executor(cluster: str) -> Callable[[Path, dict[str, Any]], Callable[[], Any]]:
    """What makes, for a board and options, the function that starts a job."""
    try:
        import submitit
    except ImportError:
        raise ValueError("--engine slurm needs submitit; install it with: pip install 'kvlab[slurm]'") from None
    if cluster == "slurm" and not shutil.which("sbatch"):
        raise ValueError("there is no sbatch here: start kvlab on a login node of the Slurm cluster, or take "
                         "--engine local or ray")

    def make(board: Path, options: dict[str, Any]) -> Callable[[], Any]:
        try:
            submits = submitit.AutoExecutor(board.parent / "logs", cluster=cluster)
            submits.update_parameters(name=job_name(board), **{
                name if name in GENERIC else f"slurm_{name}": int(value) if name in GENERIC else value
                for name, value in {"timeout_min": MINUTES, **options}.items()})
        except (NameError, AssertionError, ValueError, RuntimeError) as error:
            said = str(error).partition("\n")[0]
            if unknown := re.match(r"Unknown argument '(\w+)'.* Valid arguments: (.*)", said):
                near = get_close_matches(unknown[1], ["jobs", *GENERIC, *unknown[2].split(", ")])
                said = f"submitit hands no option {unknown[1]!r} to sbatch; " + (
                    f"near it: {', '.join(near)}" if near else f"it does: {unknown[2]}")
            raise ValueError(f"--address: {said}") from None
        return lambda: submits.submit(take, str(board))
    return make
