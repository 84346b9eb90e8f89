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
from kvlab.studies._slurm_submit import executor, job_name, needs, sbatch_options
from kvlab.studies._worker import UNREADY, message_of

JOBS, ATTEMPTS = 8, 3                                   # jobs at a time, and tries of a case, at most
LOOK_S, QUEUE_S = 1.0, 10.0                             # between two looks at the folder, and at Slurm's queue
REFUSED = 60                                            # looks in a row at which Slurm may take no job, and none runs
AHEAD = 1000                                            # cases that wait in the folder: each look lists them all


def slurm_each(options: str | None, patience_s: float, met: Callable[[str, dict], None]) -> Each:
    """An `each` that runs cases in Slurm jobs, one measuring process each.

    options: of sbatch, such as "partition=gpu,gres=gpu:h200:1,timeout_min=120,jobs=8" (jobs: how many at once).
    Refused: submitit not installed, no Slurm here, an option that neither knows (ValueError).
    """
    wanted = sbatch_options(options)
    jobs = int(wanted.pop("jobs", JOBS))
    make = executor(wanted.pop("cluster", "slurm"))
    with TemporaryDirectory() as folder:
        make(Path(folder) / "board", wanted)            # refuses an option before there is a run

    def each(job: Job, cases: Iterable[Case]) -> Iterator[list[dict]]:
        todo = {case.comparison_id: case for case in cases}
        assert job.artifacts is not None                # a run has a directory
        folder = job.artifacts / "slurm"
        for rows in _left(folder, met):
            if todo.pop(rows[0]["comparison_id"], None) is not None:
                yield rows
        if not todo:
            return
        board = _Board(folder, job, list(todo.values()), patience_s)
        start = make(board.folder, {**needs(todo.values(), wanted), **wanted})
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
    most = ATTEMPTS                                     # Slurm did not take; how many of these are borne
    while board.open:
        for name, found in board.met():
            met(name, found)
        yield from board.answered()
        for one in ended(running):
            running.remove(one)
            if UNREADY in (said := _last_line(one)):
                raise ValueError(f"Slurm job {one.job_id}: {said}")
            took, given_up = board.back(one.job_id, said)
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
                refused, most = 0, REFUSED
            except Exception as error:                  # submitit's own; a controller that restarts says no for a while
                refused += 1
                if not running and (refused >= most or most == ATTEMPTS and "nvalid" in str(error)):
                    raise ValueError(f"Slurm takes no job: {_last(str(error))}") from None
                if refused == 1:
                    print(f"kvlab: Slurm takes no job now ({_last(str(error))}); tried again", file=sys.stderr)
                break
        if board.open:
            time.sleep(LOOK_S)


class _Ended:
    """Which jobs have ended: those that left a result, and those that Slurm's queue no longer has.

    (submitit itself asks sacct, which many clusters do not keep.)
    """

    def __init__(self):
        self._next = time.monotonic() + QUEUE_S

    def __call__(self, jobs: list) -> list:
        if not jobs or getattr(jobs[0], "_cancel_command", "") != "scancel":
            return [job for job in jobs if job.done()]
        ended = [job for job in jobs if job.paths.result_pickle.exists()]
        if time.monotonic() < self._next:
            return ended
        self._next = time.monotonic() + QUEUE_S
        asked = subprocess.run(["squeue", "--me", "--noheader", "--format", "%A"], capture_output=True, text=True)
        gone = [] if asked.returncode else [job for job in jobs if job.job_id not in asked.stdout.split()]
        return list(dict.fromkeys([*ended, *gone]))


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
        return waiting + self._more(max(0, AHEAD - waiting))

    def _more(self, most: int) -> int:
        """Write so many further cases at most; how many were written."""
        written = 0
        with explained(self.folder):
            for number in islice(self._unfed, most):
                self._write(number)
                written += 1
        return written

    def _write(self, number: int) -> None:
        file = self.folder / "todo" / f"{number}.json"
        half = file.with_suffix(".tmp")                 # jobs look meanwhile
        half.write_text(json.dumps(message_of(self.cases[number])), encoding="utf-8")
        half.replace(file)

    def met(self) -> Iterator[tuple[str, dict]]:
        """Jobs that have said what machine they are on, once each."""
        yield from _hellos(self.folder, self._met)

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
                self._more(1)                           # jobs end where none waits, and a thousand answers take a while
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


def _left(folder: Path, met: Callable[[str, dict], None]) -> Iterator[list[dict]]:
    """Answers that a runner which was killed has not read; its jobs are ended, and the rest of it is removed."""
    boards = list(folder.glob("board-*"))
    for board in boards:
        remove(board / "job.json")                      # its jobs take nothing more
        if shutil.which("scancel"):
            subprocess.run(["scancel", "--quiet", "--name", job_name(board)], capture_output=True)
    for board in boards:
        for name, found in _hellos(board):
            met(name, found)
        yield from filter(None, map(_rows, sorted((board / "answers").glob("*.json"))))
        remove(board)


def _hellos(board: Path, known: set[str] | None = None) -> Iterator[tuple[str, dict]]:
    """The jobs that are not yet among the known and have said where they run, with their environments."""
    known = set() if known is None else known
    for file in (board / "workers").glob("*.json"):
        if file.stem not in known:
            known.add(file.stem)
            yield f"slurm-{file.stem}", json.loads(file.read_bytes())


def _rows(file: Path) -> list[dict]:
    """The rows of an answer; none where the file holds something else."""
    try:
        rows = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    whole = isinstance(rows, list) and all(isinstance(row, dict) and "comparison_id" in row for row in rows)
    return rows if whole else []


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
