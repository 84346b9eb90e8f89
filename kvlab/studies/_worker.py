"""One long-lived worker process that measures cases, so that a variant that crashes, hangs or eats all memory
costs its own rows only.

Parent and worker speak lines of JSON over pipes; the worker's printing goes to stderr. The worker is a fresh
interpreter (`python -m kvlab.studies._worker`), never a fork, and does not import the caller's __main__.
"""
from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import psutil

from kvlab.probes._base import Watch
from kvlab.record.environment import free_memory
from kvlab.registry import case_from
from kvlab.studies._run import Case, Each, Job, failed_case
from kvlab.units import GiB

DIED = "the worker process died"
START_S = 60                    # seconds more for what is no trial's: importing torch, inputs, a probe's preparation
TERMINATED = f"{DIED}: it crashed with signal SIGTERM"       # somebody wants an end of it
UNREADY = "no worker process starts"
STARTS = 3                      # of a first worker that is never ready: more would cost every case


def worker_each(patience_s: float) -> Each:
    """An `each` that runs cases one after another in a worker, which is started again whenever it dies.

    Cases that say `timed = False` give no times: they come first, in as many workers as there are cores to run on.
    """
    def each(job: Job, cases: Iterable[Case]) -> Iterator[list[dict]]:
        untimed, timed = apart(cases)
        yield from _beside_each_other(job, untimed, patience_s)
        worker = Worker(patience_s)
        try:
            for case in timed:
                yield worker.rows(job, case)
        finally:
            worker.close()
    return each


def message_of(case: Case) -> dict:
    """A case as a message names it: its class and its fields."""
    kind = type(case)
    return dict(type=f"{kind.__module__}:{kind.__qualname__}", case=asdict(case))


@dataclass(frozen=True)
class Told:
    """A case by its message alone, in a process that hands it on and loads neither its study nor torch."""
    message: dict
    comparison_id: str
    shown: dict

    def columns(self) -> dict:
        return self.shown


def apart(cases: Iterable[Case]) -> tuple[list[Case], list[Case]]:
    """(cases that may run beside each other, cases that need their machine's CPU or GPU for themselves)."""
    untimed: list[Case] = []
    alone: list[Case] = []
    for case in cases:
        beside = not getattr(case, "timed", True) and getattr(case, "device", "cpu") == "cpu"
        (untimed if beside else alone).append(case)
    return untimed, alone


def _beside_each_other(job: Job, cases: list[Case], patience_s: float) -> Iterator[list[dict]]:
    """Rows of one case after another, as they come, of cases that may run at the same time."""
    threads = max((getattr(case, "threads", 1) for case in cases), default=1)
    workers = [Worker(patience_s) for _ in range(min(len(cases), _at_once(threads)))]
    if not workers:
        return
    free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    for worker in workers:
        free.put(worker)

    def rows(case: Case) -> list[dict]:
        worker = free.get()
        try:
            return worker.rows(job, case)
        finally:
            free.put(worker)
    pool = ThreadPoolExecutor(len(workers))
    try:
        waiting = iter(cases)                       # few at a time: the answers of a long run would fill the memory
        running = {pool.submit(rows, case) for case in islice(waiting, 2 * len(workers))}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            running |= {pool.submit(rows, case) for case in islice(waiting, len(done))}
            for one in done:
                yield one.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        with ThreadPoolExecutor(len(workers)) as closing:       # at once: each waits for a worker that is busy
            list(closing.map(Worker.close, workers))            # the pool's threads then see it dead, and end


def cores() -> int:
    """How many CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _at_once(threads: int = 1) -> int:
    """How many workers of so many threads this process may keep busy, each with GiB of memory for itself."""
    return max(1, min(cores() // threads, free_memory() // GiB))


class Worker:
    """The parent's side: sends a case, collects its rows, survives whatever the worker does."""

    def __init__(self, patience_s: float):
        self.patience_s, self.process, self.closed = patience_s, None, False
        self.starts, self.served = 0, False         # whether any was ever ready to take a case
        self.starting = threading.Lock()            # closed by another thread, it starts nothing that none would end

    def rows(self, job: Job, case: Case) -> list[dict]:
        """The case's rows. A trial that brings the worker down gets failed (or oom) rows and the case is run again
        without it; a case that dies outside any trial is one failed row. ValueError: no worker can start here."""
        failures: dict[str, tuple[str, str]] = {}
        while True:
            last, answer = self._ask(job, case, failures)
            if "rows" in answer:
                return answer["rows"]
            status, why = answer["died"]
            if last is None or not last[0] or last[0] in failures:       # in kvlab's own code: no trial is to blame
                return failed_case(case, why, status)
            failures[last[0]] = status, f"{why} in {last[1]}"

    def _ask(self, job, case, failures) -> tuple[tuple[str, str] | None, dict]:
        """(the trial that was running last and in which probe, the answer)."""
        patience_s = self.patience_s
        with self.starting:
            if self.closed:
                return None, {"died": ("failed", "the run was stopped")}
            if self.process is None or self.process.poll() is not None:
                self._start()
                patience_s += START_S
                self.starts += 1
        self._send(dict(study=job.study, artifacts=None if job.artifacts is None else str(job.artifacts),
                        probes=job.probes, also=job.also, failures=failures,
                        **(case.message if isinstance(case, Told) else message_of(case))))
        last = None
        while True:
            try:
                line = self._next(patience_s)
            except queue.Empty:
                self._kill()
                return self._died(job, case, failures, last, (
                    "failed", f"{DIED}: no sign of life for {patience_s:.0f} s, so it was stopped"))
            if line is None:
                code = self.process.wait()
                self._kill()                        # what it started and left behind
                return self._died(job, case, failures, last, _cause_of_death(code))
            message, self.served = json.loads(line), True
            if "ready" in message:
                continue
            if "at" not in message:
                return last, message
            last = tuple(message["at"])
            patience_s = self.patience_s + (0 if last[0] else START_S)

    def _died(self, job, case, failures, last, died: tuple[str, str]) -> tuple[tuple[str, str] | None, dict]:
        """As `_ask`, of a worker that died so; one that was not yet ready was not brought down by the case."""
        if self.served or self.closed or TERMINATED in died[1]:
            return last, {"died": died}
        if self.starts >= STARTS:
            raise ValueError(f"{UNREADY} on this machine: {died[1]}, {STARTS} times in a row before it was ready; its "
                             "error output says what hinders it")
        return self._ask(job, case, failures)

    def _next(self, patience_s: float) -> str | None:
        """The worker's next line; None once it is dead, also where a process that it forked still holds the pipe."""
        end = time.monotonic() + patience_s
        while True:
            dead = self.process.poll() is not None
            try:
                return self.lines.get(timeout=max(0.0, min(1.0, end - time.monotonic())))
            except queue.Empty:
                if dead:
                    return None
                if time.monotonic() >= end:
                    raise

    def _start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [
            str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))}
        self.process = subprocess.Popen([sys.executable, "-m", "kvlab.studies._worker"], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, env=environment, text=True, encoding="utf-8",
                                        start_new_session=True)     # so that what it starts can be ended with it
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._pump, args=(self.process, self.lines), daemon=True).start()

    @staticmethod
    def _pump(process, lines) -> None:
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    def _send(self, message: dict) -> None:
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except (OSError, ValueError):
            pass                                    # it died or was closed just now; reading its lines will say how

    def close(self) -> None:
        """End the worker for good: it stops at once when its input ends, and is killed if it does not."""
        with self.starting:
            self.closed = True
        if self.process is None or self.process.poll() is not None:
            return
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self.process.stdin.close()
            self.process.wait(timeout=2)
        self._kill()

    def _kill(self) -> None:
        """End the worker, dead or alive, with all that it started."""
        started = _below(self.process.pid)          # a counter's program is in a group of its own, to be ended with it
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        else:
            self.process.kill()
        for child in started:
            with contextlib.suppress(psutil.Error):
                child.kill()
        self.process.wait()


def _below(pid: int) -> list[psutil.Process]:
    """All that a process started and what those started, as far as it still lives."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _cause_of_death(code: int) -> tuple[str, str]:
    """(status, what happened) for a worker's exit code; a SIGKILL from outside is nearly always the kernel's."""
    if code == -getattr(signal, "SIGKILL", 9):
        return "oom", f"{DIED}: it was killed (SIGKILL: out of memory, or by hand)"
    if code < 0:
        return "failed", f"{DIED}: it crashed with signal {signal.Signals(-code).name}"
    return "failed", f"{DIED}: it was ended with exit code {code}"


def serve() -> None:
    """The worker's side: read a case, measure it, answer, until the input ends."""
    answers, cases = os.fdopen(os.dup(1), "w", encoding="utf-8"), os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(2, 1)                                   # whatever a variant prints goes to stderr, not into the answers
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)    # and what it asks for is not answered with the next case
    signal.signal(signal.SIGINT, signal.SIG_IGN)    # Ctrl-C is the parent's to handle: it closes our input
    given: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_take, args=(cases, given), daemon=True).start()
    import torch  # noqa: F401                      # now, while the parent waits START_S longer

    def say(message: dict) -> None:
        try:
            answers.write(json.dumps(message) + "\n")
            answers.flush()
        except BrokenPipeError:                     # the parent was killed: nobody is left to tell
            os._exit(0)

    say({"ready": True})
    while True:
        message = json.loads(given.get())
        if message["artifacts"]:                    # a run keeps what its variants print; a single call shows it
            # no case's fault if the disk is full or read-only: the runner says so
            with contextlib.suppress(OSError), open(Path(message["artifacts"]) / "worker.log", "ab") as log:
                os.dup2(log.fileno(), 1)
        job = Job(message["study"], None if message["artifacts"] is None else Path(message["artifacts"]),
                  None if message["probes"] is None else tuple(message["probes"]), tuple(message.get("also", ())))
        watch = Watch(at=lambda case_id, stage: say({"at": [case_id, stage]}),
                      fatal=lambda: os._exit(70), failures={k: tuple(v) for k, v in message["failures"].items()})
        case = case_from(message["type"], message["case"])
        try:
            say({"rows": job(case, watch)})
        except Exception as error:
            status = "oom" if isinstance(error, MemoryError) else "failed"
            say({"rows": failed_case(case, f"{type(error).__name__}: {error}", status)})


def _take(cases: Iterable[str], given: queue.SimpleQueue[str]) -> None:
    """Hand the cases on; when the input ends, the parent is done or dead, and so is this process, whatever it does."""
    for line in cases:
        given.put(line)
    for child in _below(os.getpid()):
        with contextlib.suppress(psutil.Error):
            child.kill()
    os._exit(0)


if __name__ == "__main__":
    serve()
