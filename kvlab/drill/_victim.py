"""A process that runs a study and is harmed: it tells each case only after it was committed.

Victims are forked from a server that has imported kvlab, so that one starts in a moment.
"""
from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from kvlab.studies.soak import Tiny

INTERRUPTED = "interrupted"     # by SIGINT, as by Ctrl-C
PATIENCE_S = 180.0              # for whatever a victim is waited for: a machine may be busy
PRELOADED = ["kvlab.drill._victim", "kvlab.studies._run", "pandera.pandas", "pyarrow.parquet"]


@dataclass(frozen=True)
class Plan:
    """What a victim is to do.

    out: the folder of runs. resume: the run to go on with. workers: how many processes compute; 0: it does so itself.
    engine: of kvlab run. largest: bytes that a file may have. clock: a seed; the wall clock jumps by years then.
    """
    out: Path
    resume: Path | None
    cases: list[Tiny]
    workers: int = 0
    engine: str = "local"
    largest: int | None = None
    clock: int | None = None


class Victim:
    """The drill's side of a victim.

    told: ids of the cases whose `append` returned, in order. run: its run directory, once it has one. end: "" if the
    run completed, the sentence that it was refused with, None if it ended without a word. broken: what is no sentence.
    failed_on: id of the case whose `append` raised.
    """

    def __init__(self, plan: Plan):
        self.told: list[str] = []
        self.run: Path | None = None
        self.end: str | None = None
        self.broken: list[str] = []
        self.failed_on, self.jumps, self.over, self.began = "", 0, False, time.monotonic()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.words, words = context.Pipe(duplex=False)
        self.process = context.Process(target=LIVE, args=(plan, words), daemon=False)
        self.process.start()
        words.close()                                       # so that its death ends what is heard

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_until(self, ready: Callable[[], bool], patience_s: float = PATIENCE_S) -> bool:
        """Hear what it says until `ready`; False once it is dead."""
        end = time.monotonic() + patience_s
        while not ready():
            if self.over:
                return False
            if time.monotonic() > end:
                self.broken.append(f"a victim hung: nothing that was waited for came within {patience_s:.0f} s")
                self.kill()
                return False
            if self.words.poll(0.05):
                self._hear()
        return True

    def wait_run(self) -> bool:
        """Wait until it has its run directory; False if it ended before."""
        return self.wait_until(lambda: self.run is not None)

    def wait_jumps(self, number: int) -> bool:
        """Wait until its clock jumped so often; False if it ended before."""
        return self.wait_until(lambda: self.jumps >= number)

    def wait_told(self, number: int) -> bool:
        """Wait until it told so many cases; False if it ended before."""
        return self.wait_until(lambda: len(self.told) >= number)

    def wait_end(self) -> str | None:
        """How it ended by itself."""
        self.wait_until(lambda: False)
        self.process.join()
        return self.end

    def _hear(self) -> None:
        try:
            what, said = self.words.recv()
        except (EOFError, OSError):
            self.over = True
            return
        if what == "told":
            self.told.append(said)
        elif what == "run":
            self.run = said
        elif what == "end":
            self.end = said
        elif what == "failed on":
            self.failed_on = said
        elif what == "jumped":
            self.jumps += 1
        else:
            self.broken.append(said)

    def children(self) -> list[psutil.Process]:
        """Its workers and what they started."""
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.Error:
            return []

    def kill(self) -> None:
        """SIGKILL, and hear what it had said before; its workers must end by themselves."""
        started = self.children()
        self.process.kill()
        while not self.over:
            self._hear()
        self.process.join()
        _, alive = psutil.wait_procs(started, timeout=20)
        for child in alive:
            with contextlib.suppress(psutil.Error):
                child.kill()
        if alive:
            self.broken.append(f"{len(alive)} processes that a killed runner had started went on for 20 s")


def live(plan: Plan, words: Connection) -> None:
    """The victim's side."""
    from kvlab.record.store import RunStore
    from kvlab.studies import _run, _worker, soak
    log = os.open(plan.out / f"victim-{os.getpid()}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    said = threading.Lock()
    signal.signal(signal.SIGTERM, signal.default_int_handler)       # as the command has it

    def say(what: str, text) -> None:
        with said:
            words.send((what, text))
    if plan.largest is not None:
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (plan.largest, plan.largest))
    if plan.clock is not None:
        from kvlab.drill._jumps import jump_about
        jump_about(random.Random(plan.clock), lambda by: say("jumped", by))
    soak.cases = lambda *size, **options: iter(plan.cases)
    append = RunStore.append

    def told(store: RunStore, comparison_id: str, rows) -> None:
        try:
            append(store, comparison_id, rows)
        except OSError:
            say("failed on", comparison_id)
            raise
        say("told", comparison_id)
    RunStore.append = told
    _worker._at_once = lambda threads=1: plan.workers
    try:
        _run.run("soak", size="smoke", out=plan.out, resume=plan.resume, engine=plan.engine,
                 each=None if plan.workers or plan.engine != "local" else _run.in_process,
                 progress=plan.clock is not None, begun=lambda store: say("run", store.path))
        say("end", "")
    except (ValueError, KeyError, OSError) as error:
        sentence = error.args[0] if isinstance(error, KeyError) else str(error)
        if "\n" in sentence or not sentence:
            say("broken", traceback.format_exc())
        say("end", sentence)
    except MemoryError:
        say("end", "MemoryError")
    except KeyboardInterrupt:
        say("end", INTERRUPTED)
    except BaseException:
        say("broken", traceback.format_exc())


LIVE = live                                                 # what a victim does
