"""Cases on a Slurm cluster: jobs that take one case after another from a folder that all nodes see.

<run>/slurm/ holds logs/ (submitit's) and the board of each runner, board-<random>/: job.json (how a case is run; a job
ends when it is gone), todo/<n>.json (cases, a few ahead), taken/<job>/<n>.json (moved there by the job that runs it),
answers/<n>.json (its rows, written whole) and workers/<job>.json (the job's environment). What kvlab reads there is
JSON. Answers that a killed runner has not read are read by the next one, which ends the jobs of that one.
"""
from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvlab.folders import remove
from kvlab.record.export import atomic_write, explained
from kvlab.studies._run import Case, Each, Job, failed_case
from kvlab.studies._slurm_job import take
from kvlab.studies._worker import message_of

JOBS, MINUTES, ATTEMPTS = 8, 24 * 60, 3                 # of Slurm at most, and at a time each; tries of a case
LOOK_S, QUEUE_S = 1.0, 10.0                             # between two looks at the folder, and at Slurm's queue
REFUSED = 60                                            # looks in a row at which Slurm may take no job, and none is left
AHEAD = 1000                                            # cases that wait in the folder: each look lists them all
GENERIC = ("timeout_min", "mem_gb", "gpus_per_node", "cpus_per_task")           # submitit's; all others are sbatch's
ONE = ("nodes", "ntasks", "ntasks_per_node", "tasks_per_node", "array")         # a job is one process of one place


def slurm_each(options: str | None, patience_s: float, met: Callable[[str, dict], None]) -> Each:
    """An `each` that runs cases in Slurm jobs, one measuring process each.

    options: of sbatch, such as "partition=gpu,gres=gpu:h200:1,timeout_min=120,jobs=8" (jobs: how many at once).
    Refused: submitit not installed, no Slurm here, an option that neither knows (ValueError).
    """
    wanted = _options(options)
    jobs = int(wanted.pop("jobs", JOBS))
    make = _executor(wanted.pop("cluster", "slurm"))
    with TemporaryDirectory() as folder:
        make(Path(folder) / "board", wanted)            # refuses an option before there is a run

    def each(job: Job, cases: Iterable[Case]) -> Iterator[list[dict]]:
        todo = {case.comparison_id: case for case in cases}
        folder = job.artifacts / "slurm"
        for rows in _left(folder):
            if todo.pop(rows[0]["comparison_id"], None) is not None:
                yield rows
        if not todo:
            return
        board = _Board(folder, job, list(todo.values()), patience_s)
        start = make(board.folder, {**_needs(todo.values(), wanted), **wanted})
        running: list = []
        try:
            yield from _answers(board, running, start, jobs, met)
        finally:
            for one in running:
                one.cancel(check=False)                 # it may have ended by now
            board.clear()
    return each


def _answers(board: _Board, running: list, start: Callable[[], Any], jobs: int,
             met: Callable[[str, dict], None]) -> Iterator[list[dict]]:
    """The rows of one case after another; jobs are started as long as there are cases, and again where some died."""
    ended = _Ended()
    idle = refused = 0                                  # jobs in a row that ended without having taken a case; that
    while board.open:                                   # Slurm did not take
        for name, found in board.met():
            met(name, found)
        yield from board.answered()
        for one in ended(running):
            running.remove(one)
            took, given_up = board.back(one.job_id, _last_line(one))
            yield from given_up
            idle = 0 if took or board.said_hello(one.job_id) else idle + 1
            if idle >= ATTEMPTS:
                raise ValueError(f"{idle} Slurm jobs in a row ended before they took a case; the last said: "
                                 f"{_last_line(one)}")
        waiting = board.feed()
        if not waiting and not running and board.open:
            yield from board.found_again()
        while len(running) < min(jobs, waiting):
            try:
                running.append(start())
                refused = 0
            except Exception as error:                  # submitit's own; a controller that restarts says no for a while
                refused += 1
                if not running and refused >= REFUSED:
                    raise ValueError(f"Slurm takes no job: {_last(str(error))}") from None
                if refused == 1:
                    print(f"kvlab: Slurm takes no job now ({_last(str(error))}); tried again", file=sys.stderr)
                break
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
    """The folder through which a runner and its jobs speak; what it has not heard of a case, it remembers itself."""

    def __init__(self, folder: Path, job: Job, cases: list[Case], patience_s: float):
        self.folder, self.cases = folder / f"board-{secrets.token_hex(4)}", dict(enumerate(cases))
        self.tries: Counter[int] = Counter()
        self.open = set(self.cases)                     # numbers of cases without an answer
        self._unfed = iter(self.cases)
        self._met: set[str] = set()
        with explained(folder):
            (folder / "logs").mkdir(parents=True, exist_ok=True)
            for name in ("todo", "taken", "answers", "workers"):
                (self.folder / name).mkdir(parents=True)
            atomic_write(self.folder / "job.json", json.dumps(dict(
                study=job.study, artifacts=str(job.artifacts), also=job.also, patience_s=patience_s)).encode())

    def feed(self) -> int:
        """Write cases until there are enough ahead; how many nobody has taken."""
        waiting = sum(1 for _ in (self.folder / "todo").glob("*.json"))
        with explained(self.folder):
            for number in islice(self._unfed, AHEAD - waiting):
                self._write(number)
                waiting += 1
        return waiting

    def _write(self, number: int) -> None:
        file = self.folder / "todo" / f"{number}.json"
        half = file.with_suffix(".tmp")                 # jobs look meanwhile
        half.write_text(json.dumps(message_of(self.cases[number])), encoding="utf-8")
        half.replace(file)

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
            number, rows = int(file.stem), _rows(file)
            if number in self.open and rows:            # else a job that was taken for dead answers too: once is enough
                self.open.discard(number)
                yield rows
            remove(file)                                # committed: the caller came back for more
            yield from self._again([number], "its answer is damaged", "nothing")

    def back(self, job_id: str, said: str) -> tuple[bool, list[list[dict]]]:
        """(whether a job that ended left cases, rows of those that were tried too often); the others wait again.

        said: the last thing the job said.
        """
        left = list((self.folder / "taken" / job_id).glob("*.json"))
        numbers = [int(file.stem) for file in left if not (self.folder / "answers" / file.name).exists()]
        given_up = self._again(numbers, f"its Slurm job {job_id} ended", said)
        for file in left:
            remove(file)
        return bool(left), given_up

    def found_again(self) -> list[list[dict]]:
        """Rows of cases that were tried too often, where no job is left and none waits: a listing was out of date."""
        there = {int(file.stem) for file in (self.folder / "answers").glob("*.json")}
        return self._again(sorted(self.open - there), "its answer is missing", "nothing")

    def _again(self, numbers: Iterable[int], why: str, said: str) -> list[list[dict]]:
        given_up = []
        for number in self.open.intersection(numbers):
            self.tries[number] += 1
            case = self.cases[number]
            if self.tries[number] < ATTEMPTS:
                print(f"kvlab: {case.comparison_id}: {why}; tried again, {self.tries[number] + 1} of {ATTEMPTS}",
                      file=sys.stderr)
                self._write(number)
            else:
                self.open.discard(number)
                given_up.append(failed_case(case, f"the Slurm job that ran it ended {ATTEMPTS} times; the last said: "
                                                  f"{said}"))
        return given_up

    def clear(self) -> None:
        """Take the board away, but for answers that nobody has read: jobs that are still there find nothing to do."""
        for name in ("job.json", "todo", "taken", "workers", *(() if self.open else ("",))):
            remove(self.folder / name)
        for file in (self.folder.parent / "logs").glob("*.pkl"):     # submitit's own, which nobody needs any more
            remove(file)


def _left(folder: Path) -> Iterator[list[dict]]:
    """Answers that a runner which was killed has not read; its jobs are ended, and the rest of it is removed."""
    boards = list(folder.glob("board-*"))
    for board in boards:
        remove(board / "job.json")                      # its jobs take nothing more
        if shutil.which("scancel"):
            subprocess.run(["scancel", "--quiet", "--name", _job_name(board)], capture_output=True)
    for board in boards:
        for file in sorted((board / "answers").glob("*.json")):
            if rows := _rows(file):
                yield rows
        remove(board)


def _rows(file: Path) -> list[dict]:
    """The rows of an answer; none where the file holds something else."""
    try:
        rows = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    whole = isinstance(rows, list) and all(isinstance(row, dict) and "comparison_id" in row for row in rows)
    return rows if whole else []


def _job_name(board: Path) -> str:
    """The name of a board's jobs in Slurm."""
    return f"kvlab-{board.name}"


def _options(text: str | None) -> dict[str, str]:
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


def _needs(cases: Iterable[Case], wanted: Iterable[str] = ()) -> dict[str, Any]:
    """What the cases ask of a job: a GPU, unless GPUs are wanted anyway; a node where times are of its CPU."""
    if any(getattr(case, "device", "cpu").startswith("cuda") for case in cases):
        return {} if any(name.startswith(("gres", "gpus")) for name in wanted) else dict(gpus_per_node=1)
    return dict(exclusive=True) if any(getattr(case, "timed", True) for case in cases) else {}


def _executor(cluster: str) -> Callable[[Path, dict[str, Any]], Callable[[], Any]]:
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
            executor = submitit.AutoExecutor(board.parent / "logs", cluster=cluster)
            executor.update_parameters(name=_job_name(board), **{
                name if name in GENERIC else f"slurm_{name}": int(value) if name in GENERIC else value
                for name, value in {"timeout_min": MINUTES, **options}.items()})
        except (NameError, AssertionError, ValueError, RuntimeError) as error:
            raise ValueError(f"--address: {str(error).partition(chr(10))[0]}") from None
        return lambda: executor.submit(take, str(board))
    return make


def _last_line(job: Any) -> str:
    """The last thing that a job itself printed to its error output."""
    try:
        return _last(job.stderr() or "")
    except (OSError, ValueError):                       # not text, or gone
        return "nothing"


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    own = [line for line in lines if not line.startswith(("srun:", "slurmstepd:"))]     # these say that it ended
    return (own or lines or ["nothing"])[-1]
