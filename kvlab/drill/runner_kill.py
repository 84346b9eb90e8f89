"""The runner is killed (SIGKILL) while it starts, computes, writes or closes."""
from __future__ import annotations

import os
import random
import signal
import time

from kvlab.drill._base import Broken, Chain, Place, ending
from kvlab.drill._victim import INTERRUPTED

TIMES = 50


def strike(place: Place) -> None:
    """Kill each runner at a random moment; the next goes on with its run, until that is whole."""
    rng, chain = place.rng, None
    while place.next():
        if chain is None:
            chain = place.chain(place.tinies(rng.choice((30, 300)), work_s=0.01))
            _interrupt(chain, rng)
        victim = chain.start(workers=place.workers())
        with ending(victim):
            if rng.random() < 0.15:
                time.sleep(rng.random())                    # as it starts
            else:
                victim.wait_told(rng.randrange(1, 60))
                time.sleep(rng.random() * rng.choice((0.003, 0.03)))
                if len(victim.told) + len(chain.told) >= len(chain.cases) - 1:
                    time.sleep(rng.random())                # as it closes
        place.tally.hit += victim.end is None
        chain.check(victim)
        if chain.told >= set(chain.cases) and rng.random() < 0.5:
            chain.complete()
            chain = None
    if chain is not None:
        chain.complete()


def _interrupt(chain: Chain, rng: random.Random) -> None:
    """Ctrl-C or SIGTERM: the run is closed with a part of its cases, and its table is out of date once it is gone on.
    """
    victim = chain.start()
    with ending(victim):
        victim.wait_told(rng.randrange(1, 10))
        os.kill(victim.pid, rng.choice((signal.SIGINT, signal.SIGTERM)))
        end = victim.wait_end()
    chain.check(victim)
    if end not in (INTERRUPTED, "") or not (chain.path / "readings.parquet").exists():      # "": it was done before
        raise Broken(f"a run that was interrupted was not closed: {end}")
