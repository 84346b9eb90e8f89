"""There is too little memory: for a case, for a worker, or for the runner (limits on a process's data)."""
from __future__ import annotations

import contextlib
import re
import time
from dataclasses import replace
from pathlib import Path

import psutil

from kvlab.drill._base import Broken, Chain, NotRun, Place, ending
from kvlab.drill._victim import Victim
from kvlab.units import GiB, MiB

TIMES = 20
NEVER = 2**46                   # bytes that no machine has
SOME = 40                       # cases that take memory


def strike(place: Place) -> None:
    """Take memory away from a run in one of three ways, then complete it without a limit."""
    try:
        import resource
        resource.prlimit                                    # noqa: B018
    except (ImportError, AttributeError):
        raise NotRun("this system sets no limits on other processes (prlimit)") from None
    while place.next():
        place.rng.choice(WAYS)(place)


def _cases(place: Place) -> None:
    """Cases that no memory holds fail, each with its row, and no other case does."""
    cases = [replace(case, take_bytes=NEVER) if place.rng.random() < 0.1 else case for case in place.tinies(200)]
    chain = place.chain(cases, may_fail={case.comparison_id for case in cases if case.take_bytes})
    chain.complete(workers=place.rng.choice((1, 2)))
    if chain.failed != chain.may_fail:
        raise Broken(f"{len(chain.may_fail)} cases had too little memory, and {len(chain.failed)} say so")
    place.tally.hit += bool(chain.failed)


def _worker(place: Place) -> None:
    """A worker that may not grow loses the case it is at, and the runner goes on."""
    rng = place.rng
    cases = [replace(case, take_bytes=rng.randrange(GiB // 4)) if rng.random() < 0.1 else case
             for case in place.tinies(400)]
    chain = place.chain(cases, may_fail=True)
    victim = chain.start(workers=2)
    with ending(victim):
        victim.wait_told(rng.randrange(1, 40))
        for child in victim.children():
            _limit(child.pid, rng.randrange(64 * MiB) - MiB)
        if victim.wait_end() != "":
            raise Broken(f"a worker had too little memory, and the runner ended: {victim.end}")
    chain.check(victim, whole=True)
    place.tally.hit += bool(chain.failed)


def _runner(place: Place) -> None:
    """A runner that may not grow fails or does not; what it told is there, and the run can be completed."""
    rng = place.rng
    cases = place.tinies(400, work_s=0.002)
    for index in rng.sample(range(len(cases)), SOME):
        cases[index] = replace(cases[index], take_bytes=rng.randrange(64 * MiB))
    chain: Chain = place.chain(cases)
    victim: Victim = chain.start()
    with ending(victim):
        victim.wait_told(rng.randrange(1, 60))
        time.sleep(rng.random() * 0.01)
        _limit(victim.pid, rng.randrange(48 * MiB) - MiB)
        victim.wait_end()
    place.tally.hit += victim.end != ""
    victim.broken = [what for what in victim.broken if "MemoryError" not in what]
    chain.check(victim)
    chain.complete()


def _limit(pid: int, more: int) -> None:
    """Let a process take so many bytes more than it has, and not one beyond."""
    import resource
    with contextlib.suppress(OSError, psutil.Error, ProcessLookupError):
        has = re.search(r"VmData:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        resource.prlimit(pid, resource.RLIMIT_DATA, (max(0, int(has[1]) * 1024 + more), resource.RLIM_INFINITY))


WAYS = (_cases, _worker, _runner, _runner)
