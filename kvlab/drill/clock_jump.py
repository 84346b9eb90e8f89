"""The time of day jumps by hours, years and decades, forwards and back, while a run goes on, is locked, and ends."""
from __future__ import annotations

import re
from itertools import count

from kvlab.drill._base import Broken, Place, ending

TIMES = 20
CASES, A_CASE_S = 1000, 0.4    # more than is done while a second run waits
SHOWN = re.compile(rb"soak: +\d+%.*case")                   # the line of progress


def strike(place: Place) -> None:
    """Runs whose clocks jump all the time: they are refused, killed, gone on with and completed all the same."""
    rng, seeds = place.rng, count()
    chain = None
    while place.next():
        if chain is None:
            chain = place.chain(place.tinies(CASES, work_s=A_CASE_S))
        victim = chain.start(workers=place.workers(), clock=next(seeds))
        with ending(victim):
            victim.wait_told(rng.randrange(1, 12))
            victim.wait_jumps(2)
            if not victim.over and rng.random() < 0.3:
                second = chain.other(clock=next(seeds))
                with ending(second):
                    if f"by process {victim.pid} since" not in ((end := second.wait_end()) or ""):
                        raise Broken(f"where clocks jump, a second run was not refused with its owner: {end}")
            hit = not victim.over
        place.tally.hit += hit
        place.tally.note = "by ± 1 hour to ± 28 years"
        chain.check(victim)
        if not SHOWN.search((chain.out / f"victim-{victim.pid}.log").read_bytes()):
            raise Broken("a run whose clock jumped showed no progress")
        if rng.random() < 0.2:
            chain.complete(clock=next(seeds))
            chain = None
    if chain is not None:
        chain.complete(clock=next(seeds))
