"""The disk is full at a random byte, and has more room when the run is gone on with."""
from __future__ import annotations

import contextlib

from kvlab.drill._base import Broken, Place, ending
from kvlab.drill._mounts import KiB, enlarge, may_mount, small_disk

TIMES = 20
ENOUGH = 64 * KiB * KiB


def strike(place: Place) -> None:
    """Fill the disk of a run several times, each time with a little more room."""
    rng, mount = place.rng, may_mount()
    place.tally.note = "a tmpfs of a random size" if mount else "a limit on a file's size (RLIMIT_FSIZE): not root"
    while place.next():
        chain = place.chain(place.tinies(600))
        size, more, left = rng.randrange(4, 200) * KiB, True, rng.randrange(1, 7)
        with small_disk(chain.out, size) if mount else contextlib.nullcontext():
            while more:
                victim = chain.start(workers=place.workers(), largest=None if mount else size)
                with ending(victim):
                    end = victim.wait_end()
                chain.check(victim)
                if end == "":                               # there was room for the rest
                    break
                if end is None or not any(word in end for word in ("no space left", "too large")):
                    raise Broken(f"a full disk was not said: {end}")
                place.tally.hit += bool(victim.told)
                left -= 1
                size += rng.randrange(1, 200) * KiB + rng.randrange(2) * rng.randrange(4 * KiB)
                if mount:
                    enlarge(chain.out, size)
                more = left > 0 and place.next()
            if mount:
                enlarge(chain.out, ENOUGH)
            chain.complete()
