"""Two processes want one run directory: the second is refused with who has it and since when, and changes nothing."""
from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

from kvlab.drill._base import Broken, Chain, Place, ending
from kvlab.drill._victim import Victim

TIMES = 20
CASES, A_CASE_S = 3000, 0.1    # more than an owner does meanwhile
REFUSED = r"is being written by process {pid} since \S+Z \(\d+ (min|h)\)"
SOON_S = 30.0                   # a refusal takes 2 s where the machine has time
STALE = (b"", b"\0" * 60, b'{"pid": 1, "since": "2001-01-01T00:00:00Z"}', b'{"pid": 999999999, "since": "2099-01-01T',
         b'{"pid": "x", "since": 5}', b"[]")


def strike(place: Place) -> None:
    """Refuse a second one; let the next take over when the owner was killed; let two race for what nobody holds."""
    rng = place.rng
    chain = place.chain(place.tinies(CASES, work_s=A_CASE_S))
    owner = chain.start()
    owners = [owner]
    try:
        while place.next():
            at = len(owner.told) + rng.randrange(1, 12)
            if not owner.wait_told(at):
                raise Broken(f"the owner of a run ended: {owner.end}")
            place.tally.hit += 1
            way = rng.choice((_second, _second, _stopped, _takes_over, _race))
            owner = way(chain, owner, rng)
            owners.append(owner)
    finally:
        for one in owners:
            one.kill()
    chain.check(owner)
    chain.complete()


def _second(chain: Chain, owner: Victim, rng) -> Victim:
    manifest = (chain.path / "manifest.json").read_bytes()
    second = chain.other()
    with ending(second):
        began = time.monotonic()
        _refused(second, owner)
        if time.monotonic() - began > SOON_S:
            raise Broken(f"a second run was refused after {time.monotonic() - began:.0f} s only")
    if json.loads((chain.path / "owner.json").read_bytes())["pid"] != owner.pid:
        raise Broken("a run that was refused changed owner.json")
    if (chain.path / "manifest.json").read_bytes() != manifest:
        raise Broken("a run that was refused changed manifest.json")
    return owner


def _stopped(chain: Chain, owner: Victim, rng) -> Victim:
    """One that sleeps has the run still; nothing in it changes now, so that a change would be the second's."""
    os.kill(owner.pid, signal.SIGSTOP)
    try:
        before = _contents(chain.path)
        second = chain.other()
        with ending(second):
            _refused(second, owner)
        if (after := _contents(chain.path)) != before:
            changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
            raise Broken(f"a run that was refused changed {', '.join(changed)}")
    finally:
        os.kill(owner.pid, signal.SIGCONT)
    return owner


def _takes_over(chain: Chain, owner: Victim, rng) -> Victim:
    _killed(chain, owner)
    if rng.random() < 0.7:
        (chain.path / "owner.json").write_bytes(rng.choice(STALE))
    following = chain.start()
    if not following.wait_told(1):
        raise Broken(f"the next run could not take over from one that was killed: {following.end}")
    return following


def _race(chain: Chain, owner: Victim, rng) -> Victim:
    _killed(chain, owner)
    both = [chain.start(), chain.other()]
    try:
        both[0].wait_until(lambda: both[0].over or bool(both[0].told) or bool(both[1].told) or both[1].over)
        both[1].wait_until(lambda: both[1].over or bool(both[1].told) or bool(both[0].told))
        first, second = both if both[0].told else both[::-1]
        if not first.wait_told(1):
            raise Broken(f"neither of two runs went on: {first.end}; {second.end}")
        _refused(second, first)
    except BaseException:
        for one in both:
            one.kill()
        raise
    return first


def _killed(chain: Chain, owner: Victim) -> None:
    owner.kill()
    chain.check(owner)


def _refused(second: Victim, owner: Victim) -> None:
    end = second.wait_end()
    if second.told or not end or not re.search(REFUSED.format(pid=owner.pid), end):
        raise Broken(f"a second run was not refused with its owner ({owner.pid}): {end}; {len(second.told)} cases told")


def _contents(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
