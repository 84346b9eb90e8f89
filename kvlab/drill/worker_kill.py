"""Workers are killed (SIGKILL), one or several at once: their cases become rows that say so, and the runner goes on."""
from __future__ import annotations

import contextlib
import time

import psutil

from kvlab.drill._base import Broken, Place, ending

TIMES = 50
WORKERS = 2
CASES, A_CASE_S = 4000, 0.05


def strike(place: Place) -> None:
    """Kill workers of one run at random moments, while they start too."""
    rng = place.rng
    while place.next():
        chain = place.chain(place.tinies(CASES, work_s=A_CASE_S), may_fail=True)
        victim, kills, more = chain.start(workers=WORKERS), 1, True
        with ending(victim):
            while more:
                at = len(victim.told)
                if not victim.wait_told(at + rng.randrange(1, 40)):
                    break
                time.sleep(rng.random() * A_CASE_S)
                targets = victim.children()
                rng.shuffle(targets)
                both = len(targets) > 1 and rng.random() < 0.3 and place.next()
                for target in targets[:1 + both]:
                    with contextlib.suppress(psutil.Error):
                        target.kill()
                more = kills < 12 and place.next()
                kills += both + more
            goes_on = victim.wait_told(len(victim.told) + 20)
        if not goes_on:
            raise Broken(f"the runner did not go on after its workers were killed: {victim.end}")
        chain.check(victim)
        chain.complete()
        place.tally.hit += len(chain.failed)
        if len(chain.failed) > kills:
            raise Broken(f"{kills} workers were killed, and {len(chain.failed)} cases failed")
