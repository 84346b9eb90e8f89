"""Cases on a Slurm cluster: jobs that take one case after another from a folder that all nodes see.

<run>/slurm/ holds job.json (how a case is run), todo/<n>.json (cases), taken/<job>/<n>.json (moved there by the job
that runs it), answers/<n>.json (its rows, written whole), workers/<job>.json (the job's environment) and logs/
(submitit's). What kvlab reads there is JSON. Answers that a killed runner has not read are read by the next one.
"""
from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvlab.folders import remove
from kvlab.record.environment import environment
from kvlab.record.export import atomic_write, explained
from kvlab.registry import case_from
from kvlab.studies._run import Case, Each, Job, failed_case
from kvlab.studies._worker import DIED, Worker

JOBS, MINUTES, ATTEMPTS = 8, 24 * 60, 3                 # of Slurm at most, and at a time each; tries of a case
LOOK_S, QUEUE_S = 1.0, 10.0                             # between two looks at the folder, and at Slurm's queue
LAST_S = 3.0                                            # in which a job whose worker was killed ends itself, if it does
GENERIC = ("timeout_min", "mem_gb", "gpus_per_node", "cpus_per_task", "nodes")  # submitit's; all others are sbatch's


def slurm_each(options: str | None, patience_s: float, met: Callable[[str, dict], None]) -> Each:
    """An `each` that runs cases in Slurm jobs, one measuring process each.

    options: of sbatch, such as "partition=gpu,gres=gpu:h200:1,timeout_min=120,jobs=8" (jobs: how many at once).
    Refused: submitit not installed, no Slurm here, an option that neither knows (ValueError).
    """
    wanted = _options(options)
    jobs = int(wanted.pop("jobs", JOBS))
    make = _executor(wanted.pop("cluster", "slurm"))
    with TemporaryDirectory() as folder:
        make(Path(folder), wanted)                      # refuses an option before there is a run

    def each(job: Job, cases: Iterable[Case]) -> Iterator[list[dict]]:
        todo = {case.comparison_id: case for case in cases}
        folder = job.artifacts / "slurm"
        for rows in _left(folder):
            if todo.pop(rows[0]["comparison_id"], None) is not None:
                yield rows
        if not todo:
            return
        board = _Board(folder, job, list(todo.values()), patience_s)
        start = make(folder / "logs", {**_needs(todo.values()), **wanted})
        running: list = []
        try:
            yield from _answers(board, running, start, jobs, met)
        finally:
            for one in running:
                one.cancel()
            board.clear()
    return each


def _answers(board: _Board, running: list, start: Callable[[], Any], jobs: int,
             met: Callable[[str, dict], None]) -> Iterator[list[dict]]:
    """The rows of one case after another; jobs are started as long as there are cases, and again where some died."""
    ended = _Ended()
    idle = 0                                            # jobs that ended in a row without having taken a case
    while board.open:
        for name, found in board.met():
            met(name, found)
        yield from board.answered()
        for one in ended(running):
            running.remove(one)
            took, given_up = board.back(one.job_id)
            yield from given_up
            idle = 0 if took or board.said_hello(one.job_id) else idle + 1
            if idle >= ATTEMPTS:
                raise ValueError(f"{idle} Slurm jobs in a row ended before they took a case; the last said: "
                                 f"{_last_line(one)}")
        while len(running) < min(jobs, board.waiting()):
            running.append(start())
        if board.open:
            time.sleep(LOOK_S)


class _Ended:
    """Which jobs have ended: by submitit's records, and by Slurm's own queue where the cluster keeps no accounts."""

    def __init__(self):
        self._next = time.monotonic() + QUEUE_S

    def __call__(self, jobs: list) -> list:
        if time.monotonic() < self._next or not any(hasattr(job, "_cancel_command") and job._cancel_command == "scancel"
                                                    for job in jobs):
            return [job for job in jobs if job.done()]
        self._next = time.monotonic() + QUEUE_S
        asked = subprocess.run(["squeue", "--me", "--noheader", "--format", "%A"], capture_output=True, text=True)
        if asked.returncode:
            return [job for job in jobs if job.done()]
        return [job for job in jobs if job.done() or job.job_id.partition("_")[0] not in asked.stdout.split()]


class _Board:
    """The folder through which the runner and its jobs speak."""

    def __init__(self, folder: Path, job: Job, cases: list[Case], patience_s: float):
        self.folder, self.cases, self.tries = folder, dict(enumerate(cases)), Counter()
        self.open = set(self.cases)                     # numbers of cases without an answer
        self._met: set[str] = set()
        with explained(folder):
            for name in ("todo", "taken", "answers", "workers", "logs"):
                (folder / name).mkdir(parents=True, exist_ok=True)
            atomic_write(folder / "job.json", json.dumps(dict(
                study=job.study, artifacts=str(job.artifacts), also=job.also, patience_s=patience_s)).encode())
            for number, case in self.cases.items():
                kind = type(case)
                (folder / "todo" / f"{number}.json").write_text(json.dumps(dict(
                    type=f"{kind.__module__}:{kind.__qualname__}", case=asdict(case))), encoding="utf-8")

    def waiting(self) -> int:
        """How many cases nobody has taken."""
        return sum(1 for _ in (self.folder / "todo").glob("*.json"))

    def met(self) -> Iterator[tuple[str, dict]]:
        """Jobs that have said what machine they are on, once each."""
        for file in (self.folder / "workers").glob("*.json"):
            if file.stem not in self._met:
                self._met.add(file.stem)
                yield f"slurm-{file.stem}", json.loads(file.read_bytes())

    def said_hello(self, job_id: str) -> bool:
        """Whether a job came so far as to say where it runs."""
        return (self.folder / "workers" / f"{job_id}.json").exists()

    def answered(self) -> Iterator[list[dict]]:
        """Rows of the cases that were answered since."""
        for file in sorted((self.folder / "answers").glob("*.json")):
            rows = json.loads(file.read_bytes())
            self.open.discard(int(file.stem))
            yield rows
            file.unlink()                               # committed: the caller came back for more

    def back(self, job_id: str) -> tuple[bool, list[list[dict]]]:
        """(whether a job that ended left cases, rows of those that were tried too often); the others wait again."""
        given_up: list[list[dict]] = []
        left = sorted((self.folder / "taken" / job_id).glob("*.json"))
        for file in left:
            number = int(file.stem)
            if number not in self.open or (self.folder / "answers" / file.name).exists():
                continue
            self.tries[number] += 1
            case = self.cases[number]
            if self.tries[number] < ATTEMPTS:
                print(f"kvlab: {case.comparison_id}: its Slurm job {job_id} ended; tried again, "
                      f"{self.tries[number] + 1} of {ATTEMPTS}", file=sys.stderr)
                file.rename(self.folder / "todo" / file.name)
            else:
                self.open.discard(number)
                given_up.append(failed_case(case, f"the Slurm job that ran it ended {ATTEMPTS} times"))
        return bool(left), given_up

    def clear(self) -> None:
        """Take the folder away but for the logs: jobs that are still there find nothing to do."""
        for name in ("todo", "taken", "workers", "job.json", *(() if self.open else ("answers",))):
            remove(self.folder / name)
        for file in (self.folder / "logs").glob("*.pkl"):   # submitit's own, which nobody needs any more
            remove(file)


def _left(folder: Path) -> Iterator[list[dict]]:
    """Answers that a runner which was killed has not read; the rest of what it left is removed."""
    for file in sorted((folder / "answers").glob("*.json")):
        try:
            rows = json.loads(file.read_bytes())
        except ValueError:
            rows = []
        if rows:
            yield rows
    shutil.rmtree(folder, ignore_errors=True)


def take(folder: str) -> None:
    """What a Slurm job does: take a case, run it in a worker, answer, until none is left or the runner is gone."""
    import submitit
    board, job_id = Path(folder), submitit.JobEnvironment().job_id
    job = json.loads((board / "job.json").read_bytes())
    own = board / "taken" / job_id
    own.mkdir(parents=True, exist_ok=True)
    atomic_write(board / "workers" / f"{job_id}.json", json.dumps(environment()).encode())
    how = Job(job["study"], Path(job["artifacts"]), also=tuple(job["also"]))
    worker = Worker(job["patience_s"])
    try:
        while waiting := sorted((board / "todo").glob("*.json"), key=lambda file: int(file.stem)):
            try:
                file = waiting[0].rename(own / waiting[0].name)
            except OSError:                             # another job was quicker
                continue
            given = json.loads(file.read_bytes())
            rows = worker.rows(how, case_from(given["type"], given["case"]))
            if any(f"{DIED}: it crashed with signal SIGTERM" in row["error"] for row in rows):
                return                                  # the job is being cancelled: the case is tried in another
            if any(DIED in row["error"] for row in rows):
                time.sleep(LAST_S)                      # killed with the whole job, it would not answer either
            answer = [{**row, "worker": f"slurm-{job_id}"} for row in rows]
            atomic_write(board / "answers" / file.name, json.dumps(answer).encode())
            file.unlink(missing_ok=True)
    finally:
        worker.close()


def _options(text: str | None) -> dict[str, str]:
    """sbatch's options as names and values, from "partition=gpu,timeout_min=60"."""
    found = dict(part.strip().partition("=")[::2] for part in (text or "").split(",") if part.strip())
    if wrong := [name for name, value in found.items() if not name.isidentifier() or not value]:
        raise ValueError(f"--address {text!r} must be options of sbatch, such as partition=gpu,timeout_min=60,jobs=8; "
                         f"{wrong[0]!r} is none")
    for name in ("jobs", *GENERIC):
        if name in found and not found[name].isdigit():
            raise ValueError(f"--address: {name}={found[name]} must be a whole number")
    return found


def _needs(cases: Iterable[Case]) -> dict[str, Any]:
    """What the cases ask of a job: a GPU; a node for themselves where times are taken on its CPU."""
    devices = {getattr(case, "device", "cpu") for case in cases}
    if "cuda" in devices:
        return dict(gpus_per_node=1)
    return dict(exclusive=True) if any(getattr(case, "timed", True) for case in cases) else {}


def _executor(cluster: str) -> Callable[[Path, dict[str, Any]], Callable[[], Any]]:
    """What makes, for a folder of logs and options, the function that starts a job."""
    try:
        import submitit
    except ImportError:
        raise ValueError("--engine slurm needs submitit; install it with: pip install 'kvlab[slurm]'") from None
    if cluster == "slurm" and not shutil.which("sbatch"):
        raise ValueError("there is no sbatch here: start kvlab on a login node of the Slurm cluster, or take "
                         "--engine local or ray")

    def make(logs: Path, options: dict[str, Any]) -> Callable[[], Any]:
        try:
            executor = submitit.AutoExecutor(logs, cluster=cluster)
            executor.update_parameters(name="kvlab", **{
                name if name in GENERIC else f"slurm_{name}": int(value) if name in GENERIC else value
                for name, value in {"timeout_min": MINUTES, **options}.items()})
        except (NameError, AssertionError, ValueError, RuntimeError) as error:
            raise ValueError(f"--address: {str(error).partition(chr(10))[0]}") from None
        return lambda: executor.submit(take, str(logs.parent))
    return make


def _last_line(job: Any) -> str:
    """The last thing that a job printed to its error output."""
    lines = (job.stderr() or "").strip().splitlines()
    return lines[-1] if lines else "nothing"
