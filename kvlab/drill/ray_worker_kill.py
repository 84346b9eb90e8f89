"""Ray's processes that measure are killed (SIGKILL): their cases are run again elsewhere, and the run completes."""
from __future__ import annotations

import contextlib
import time

import psutil

from kvlab.drill._base import Broken, NotRun, Place, ending

TIMES = 10
CASES, A_CASE_S = 700, 0.2


def strike(place: Place) -> None:
    """Kill processes of one Ray of this machine, one at a time, at random moments."""
    if place.number:                                        # one Ray is enough for a machine
        return
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise NotRun(f"ray is not installed ({error})") from None
    rng = place.rng
    chain = place.chain(place.tinies(CASES, work_s=A_CASE_S), may_fail=True)
    victim = chain.start(engine="ray")
    with ending(victim):
        if not victim.wait_told(1):
            if "did not start" in (victim.end or ""):
                raise NotRun(victim.end)
            raise Broken(f"a run on Ray ended before its first case: {victim.end}")
        while place.next():
            if not victim.wait_told(len(victim.told) + rng.randrange(1, 15)):
                raise Broken(f"a run on Ray ended when its processes were killed: {victim.end}")
            time.sleep(rng.random() * A_CASE_S)
            if hands := [child for child in victim.children() if _title(child).startswith("ray::Hand")]:
                with contextlib.suppress(psutil.Error):
                    rng.choice(hands).kill()
                    place.tally.hit += 1
        if (end := victim.wait_end()) != "":
            raise Broken(f"a run on Ray did not complete after its processes were killed: {end}")
    chain.check(victim, whole=True)
    if chain.failed:
        raise Broken(f"{len(chain.failed)} cases failed whose Ray process was killed once; they are to be run again")


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error, IndexError):
        return process.cmdline()[0]
    return ""
