"""What the classes of faults share: what each counts, a place to work in, a run directory that is harmed again and
again, and the sentences that say what went wrong."""
from __future__ import annotations

import contextlib
import random
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import ModuleType

from kvlab.drill._check import Found, looked_at
from kvlab.drill._victim import Plan, Victim
from kvlab.registry import Registry
from kvlab.studies.soak import Tiny

AT_ONCE = 2                     # victims; each has a worker at times
WRONG = 5                       # sentences of a class that are printed
NUMBERS = ("times", "hit", "committed", "lost", "doubled", "half", "resumed")
MANY = 10                       # faults, of which one at least must come while a run is at work

classes = Registry("class of faults", "kvlab.drill")


class NotRun(Exception):
    """This machine cannot do it: why."""


class Broken(Exception):
    """What must not happen, in a sentence."""


@dataclass
class Tally:
    """What a class of faults found.

    times: faults done. hit: those that came while the run was at work. committed: cases that were seen committed when
    a run was whole again. lost, doubled, half: cases that were promised and are not there, are there twice, or with
    other rows than their own. resumed: runs gone on with. wrong: one sentence for each thing that must not be.
    """
    name: str
    times: int = 0
    hit: int = 0
    committed: int = 0
    lost: int = 0
    doubled: int = 0
    half: int = 0
    resumed: int = 0
    seconds: float = 0.0
    not_run: str = ""
    note: str = ""
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """What was found in another place."""
        for number in NUMBERS:
            setattr(self, number, getattr(self, number) + getattr(other, number))
        self.not_run, self.note = self.not_run or other.not_run, self.note or other.note
        self.wrong += other.wrong

    def bad(self) -> bool:
        """Whether anything is there that must not be."""
        return bool(self.lost or self.doubled or self.half or self.wrong)


class Place:
    """Where a class does its faults: its share of them, its own chance, its own folders.

    next: True while there are faults to be done, which counts one. number: of the places of a class, from 0.
    """

    def __init__(self, number: int, tally: Tally, left: Iterator[int], rng: random.Random, folder: Path):
        self.number, self.tally, self.rng, self.folder = number, tally, rng, folder
        self._left, self._numbers = left, count(1)

    def next(self) -> bool:
        """Take one fault of those that are left."""
        if next(self._left, None) is None:
            return False
        self.tally.times += 1
        return True

    def new_folder(self) -> Path:
        """An empty folder of its own."""
        made = self.folder / f"{next(self._numbers):03d}"
        made.mkdir(parents=True)
        return made

    def workers(self) -> int:
        """How many worker processes the next victim has; 0, most often: it computes itself, and has more to write."""
        return self.rng.choice((0, 0, 1))

    def chain(self, cases: list[Tiny], **checks) -> Chain:
        """A run that is to be harmed and gone on with, again and again."""
        return Chain(self, cases, **checks)

    def tinies(self, number: int, work_s: float = 0.0) -> list[Tiny]:
        """So many cases: nearly no work, some of them up to work_s, so that a fault hits computing as well as writing.
        """
        return [Tiny(index, self.rng.random() * work_s if self.rng.random() < 0.5 else 0.0) for index in range(number)]


class Chain:
    """One run directory, victim after victim: each goes on where the one before was stopped.

    may_fail: cases of which a row that says failed or oom is right too; `True` for all of them.
    """

    def __init__(self, place: Place, cases: list[Tiny], may_fail: bool | set[str] = False):
        self.place, self.cases = place, {case.comparison_id: case for case in cases}
        self.may_fail = set(self.cases) if may_fail is True else may_fail or set()
        self.out, self.told, self.failed = place.new_folder(), set(), set()
        self.lost: set[str] = set()                         # reported already

    @property
    def path(self) -> Path | None:
        """The run directory, once there is one."""
        return next((found.parent for found in self.out.glob("soak/*/manifest.json")), None)

    def start(self, **how) -> Victim:
        """A victim that begins the run, or goes on with it."""
        if self.path is not None:
            self.place.tally.resumed += 1
        return Victim(Plan(self.out, self.path, list(self.cases.values()), **how))

    def other(self, **how) -> Victim:
        """A second victim of the same run, which another one holds."""
        return Victim(Plan(self.out, self.path, list(self.cases.values()), **how))

    def check(self, *victims: Victim, whole: bool = False) -> Found | None:
        """Look at what is on disk once the victims are dead; count what is lost, doubled or half there."""
        tally = self.place.tally
        for victim in victims:
            self.told |= set(victim.told)
            tally.wrong += victim.broken
        if self.path is None:
            if self.told:
                raise Broken(f"{len(self.told)} cases were committed, and their run directory is gone")
            return None
        found = looked_at(self.path, self.cases, self.may_fail)
        lost = self.told - found.committed - self.lost
        self.lost |= lost
        tally.lost += len(lost)
        tally.doubled += len(found.doubled)
        tally.half += len(found.half)
        tally.wrong += found.wrong
        if more := found.committed - self.told - {victim.failed_on for victim in victims}:
            if len(more) > max(1, len(victims)):
                tally.wrong.append(f"{len(more)} cases are committed that no victim told of")
            self.told |= more                               # stopped between its commit and its word
        if whole:
            if missing := set(self.cases) - found.committed - self.lost:
                tally.lost += len(missing)
            tally.committed += len(found.committed)
            tally.wrong += [f"{left.name} is left in a run that was closed" for left in self.path.glob("**/*.tmp")]
            if not found.closed:
                tally.wrong.append("a run that was closed has no readings.parquet")
        self.failed = found.failed
        return found

    def complete(self, **how) -> Found | None:
        """Go on with the run to its end, with nothing in its way and no more work than needed; look at all of it."""
        self.cases = {name: replace(case, work_s=0.0) for name, case in self.cases.items()}
        victim = self.start(**how)
        if (end := victim.wait_end()) != "":
            raise Broken(f"--resume did not complete the run: {end or 'its process ended without a word'}")
        return self.check(victim, whole=True)


def carried_out(name: str, module: ModuleType, times: int, seed: int, folder: Path) -> Tally:
    """All faults of one class, in AT_ONCE places at once."""
    tally, began = Tally(name), time.monotonic()
    left = _shared(times)
    own = [Tally(name) for _ in range(min(AT_ONCE, times))]     # one a thread: sums that two add to can lose a loss

    def work(number: int) -> None:
        found = own[number]
        place = Place(number, found, left, random.Random(f"{seed} {name} {number}"), folder / name / str(number))
        try:
            module.strike(place)
        except NotRun as why:
            found.not_run = str(why)
        except Broken as what:
            found.wrong.append(str(what))
        except Exception:                                   # of the drill itself, or of kvlab where it must not raise
            found.wrong.append(traceback.format_exc())
    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(own))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found in own:
        tally.add(found)
    tally.seconds = time.monotonic() - began
    if not tally.not_run and tally.times < times:
        tally.wrong.append(f"{times - tally.times} of {times} faults were not done")
    elif not tally.not_run and times >= MANY and not tally.hit:
        tally.wrong.append(f"none of {times} faults came in mid-run, so nothing was tried")
    return tally


class _shared:
    """Numbers to be handed out to several threads."""

    def __init__(self, times: int):
        self._numbers, self._lock = iter(range(times)), threading.Lock()

    def __iter__(self):
        return self

    def __next__(self) -> int:
        with self._lock:
            return next(self._numbers)


@contextlib.contextmanager
def ending(*victims: Victim) -> Iterator[None]:
    """Leave no victim alive, whatever happens."""
    try:
        yield
    finally:
        for victim in victims:
            victim.kill()
