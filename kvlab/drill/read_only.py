"""The folder turns read-only while a run writes to it, and is writable again later."""
from __future__ import annotations

import time

from kvlab.drill._base import Broken, Place, ending
from kvlab.drill._mounts import may_mount, read_only

TIMES = 20


def strike(place: Place) -> None:
    """Take the right to write away at a random moment; look at the run while it is so, and go on with it later."""
    rng, mount = place.rng, may_mount()
    place.tally.note = "mounted read-only" if mount else "by chmod: not root"
    chain = None
    while place.next():
        if chain is None or len(chain.told) > 200:
            if chain is not None:
                chain.complete()
            chain = place.chain(place.tinies(3000, work_s=0.05))
        victim = chain.start(workers=place.workers())
        with ending(victim):
            victim.wait_told(rng.randrange(0, 40))
            victim.wait_run()
            time.sleep(rng.random() * 0.01)
            with read_only(chain.path):
                end = victim.wait_end()
                chain.check(victim)                         # a run can be read where it cannot be written
                if not end or "read-only" not in end and "not writable" not in end:
                    raise Broken(f"a folder that cannot be written to was not said: {end}")
                place.tally.hit += bool(victim.told)
                if rng.random() < 0.3:
                    again = chain.other()
                    with ending(again):
                        if not (said := again.wait_end()) or "cannot write" not in said:
                            raise Broken(f"a run in a folder that cannot be written to was gone on with: {said}")
                    chain.check(again)
    if chain is not None:
        chain.complete()
