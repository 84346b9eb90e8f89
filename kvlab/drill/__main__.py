"""`python -m kvlab.drill [CLASS…] [--count N] [--seed S]`: harm runs, and see that nothing is lost.

One line per class of faults. Exits 1 if anything was lost, doubled or half read, a run did not go on, or a class was
not run for another reason than that this machine cannot do it.
"""
from __future__ import annotations

import argparse
import secrets
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

from kvlab.drill._base import WRONG, Tally, carried_out, classes
from kvlab.registry import no_such

HEADS = ("class", "faults", "in mid-run", "committed", "lost", "doubled", "half", "resumed", "s", "")


def main(words: list[str] | None = None) -> int:
    """Run the classes that are named, all by default; 0 only if nothing went wrong."""
    parser = argparse.ArgumentParser(prog="python -m kvlab.drill", description=__doc__.partition("\n\n")[0])
    parser.add_argument("classes", nargs="*", metavar="CLASS", help=f"any of: {', '.join(classes)}; default: all")
    parser.add_argument("--count", type=int, help="faults of each class; default: 50 kills, 20 of the others")
    parser.add_argument("--seed", type=int, help="of all chance, to do the same again as far as times allow")
    given = parser.parse_args(words)
    for name in given.classes:
        if name not in classes.names():
            parser.error(no_such(classes.what, name, classes).args[0])
    if given.count is not None and given.count < 1:
        parser.error("--count takes a number from 1 on")
    if sys.platform == "win32":
        print("not run: Windows has no SIGKILL, and its processes cannot fork; use Linux or macOS")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)       # so that what is mounted is taken away again
    seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    began, tallies = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="kvlab-drill-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")                     # of journals' torn ends, which are what is drilled
        for name in given.classes or classes:
            module = classes[name]
            tallies.append(carried_out(name, module, given.count or module.TIMES, seed, Path(folder)))
            print(f"{name}: {tallies[-1].seconds:.0f} s", file=sys.stderr)
    show(tallies)
    bad = [tally.name for tally in tallies if tally.bad()]
    said = f"wrong in {', '.join(bad)}" if bad else "nothing lost, doubled or half written"
    print(f"{said}; {time.monotonic() - began:.0f} s, seed {seed}")
    return 1 if bad else 0


def show(tallies: list[Tally]) -> None:
    """The table, and below it a sentence for each thing that must not be."""
    from rich.console import Console
    from rich.table import Table
    table = Table(*HEADS, box=None, pad_edge=False)
    for tally in tallies:
        if tally.not_run:
            table.add_row(tally.name, *[""] * (len(HEADS) - 2), f"not run: {tally.not_run}")
            continue
        numbers = (tally.times, tally.hit, tally.committed, tally.lost, tally.doubled, tally.half, tally.resumed,
                   round(tally.seconds))
        table.add_row(tally.name, *(f"{number:,}" for number in numbers), "WRONG" if tally.bad() else tally.note)
    Console(width=140).print(table)
    for tally in tallies:
        for sentence in tally.wrong[:WRONG]:
            print(f"{tally.name}: {sentence}")
        if len(tally.wrong) > WRONG:
            print(f"{tally.name}: and {len(tally.wrong) - WRONG} more")


if __name__ == "__main__":
    sys.exit(main())
