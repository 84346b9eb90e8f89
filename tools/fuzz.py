"""Fuzz kvlab's parsers: `python tools/fuzz.py [TARGET…] [--count 100000]`, all by default, in two processes.

A fifth of a target's inputs come from hypothesis, the rest from atheris, led by the lines of kvlab that they reach
(all from hypothesis where atheris is not installed: `pip install atheris`). What must hold for each stands in
tests/fuzz/fuzz_guard.py. One input of each finding is kept in profiles/fuzz/TARGET/<sha8>/, and read again with
`python tools/fuzz.py TARGET --replay FILE`. Exit code 1 if anything was found.
"""
from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "fuzz"), str(ROOT / "tests"), str(ROOT)]
KEPT = ROOT / "profiles" / "fuzz"
STANDS_STILL_S = 120            # without a new input: C code that no timer interrupts, or a process that is stuck
SHARE = 25_000                  # inputs of one process


class Share:
    """One process' part of a target."""

    def __init__(self, target: str, engine: str, count: int, first: int, place: Path):
        self.target, self.place = target, place
        place.mkdir(parents=True)
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tools" / "fuzz.py"), target, "--count", str(count), "--share", engine,
             str(first), str(place)], stdout=subprocess.DEVNULL, stderr=(place / "said").open("wb"), cwd=place,
            env={**os.environ, "PYTHONHASHSEED": "0"})

    def over(self) -> bool:
        """Whether the process has ended; one that stands still is ended."""
        if self.process.poll() is not None:
            return True
        newest = max((path.stat().st_mtime for path in (self.place, *self.place.glob("in/*"))), default=0)
        if time.time() - newest > STANDS_STILL_S:
            self.process.kill()
        return False

    def tally(self):
        """What it found; a process that ended early found what it was reading then."""
        from fuzz_engine import Tally
        if (self.place / "tally.json").exists():
            return Tally.load(self.place / "tally.json")
        files = list(self.place.glob("in/*"))
        said = (self.place / "said").read_text(errors="replace").strip().splitlines()[-1:] or [""]
        found = f"the process ended with {self.process.returncode} ({said[0]:.300})"
        return Tally(self.target, findings={found: [found, files[0].read_bytes() if files else b"", 1]})


def run(names: list[str], count: int, processes: int = 2) -> list:
    """A tally of each target."""
    from fuzz_engine import Tally
    engines = {"hypothesis": count}
    if find_spec("atheris"):
        engines = {"hypothesis": count // 5, "atheris": count - count // 5}
    found = {name: Tally(name) for name in names}
    memory = Path("/dev/shm")                                   # files in memory, where there is such a folder
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, prefix="kvlab-fuzz-") as folder:
        waiting = []
        for name in names:
            for engine, share in engines.items():
                waiting += [(name, engine, min(SHARE, share - at), at) for at in range(0, share, SHARE)]
        running: list[Share] = []
        while waiting or running:
            while waiting and len(running) < processes:
                name, engine, size, first = waiting.pop(0)
                running.append(Share(name, engine, size, first, Path(folder) / f"{name}-{engine}-{first}"))
            time.sleep(0.2)
            for one in [share for share in running if share.over()]:
                running.remove(one)
                found[one.target].add_all(one.tally())
                shutil.rmtree(one.place)
                if not any(other.target == one.target for other in running) and not any(
                        rest[0] == one.target for rest in waiting):
                    print(line(found[one.target]), file=sys.stderr, flush=True)
                    keep(found[one.target])
    return list(found.values())


HEAD = ("target", "inputs", "refused", "accepted", "findings", "seconds", "inputs/s", "peak ÷ input", "longest s")


def line(tally) -> str:
    """A tally as a line of the table. seconds: of all processes added up."""
    cells = (tally.target, f"{tally.inputs:,}", f"{tally.inputs - tally.accepted:,}", f"{tally.accepted:,}",
             str(len(tally.findings)), f"{tally.seconds:,.0f}", f"{tally.inputs / max(tally.seconds, 1e-9):,.0f}",
             f"{tally.ratio:.1f}", f"{tally.longest_s:.3f}")
    return "".join(cell.ljust(14) if not at else cell.rjust(13) for at, cell in enumerate(cells))


def keep(tally) -> None:
    """One input of each finding, with what is wrong and how to read it again."""
    from fuzz_targets import targets
    for where, (found, data, count) in tally.findings.items():
        folder = KEPT / tally.target / hashlib.sha256(data).hexdigest()[:8]
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / targets()[tally.target].file
        file.write_bytes(data)
        again = f"python tools/fuzz.py {tally.target} --replay {file.relative_to(ROOT)}"
        (folder / "found.txt").write_text(f"{found}\n{where}\n{count} inputs like it\n{again}\n")
        told = found.encode("unicode_escape").decode()
        print(f"! {tally.target}: {told:.300} [{where}; {count} inputs]\n    {again}", flush=True)


def replay(name: str, file: Path) -> int:
    """Read one input again, twice: in time, and for its memory."""
    from fuzz_guard import judge
    from fuzz_targets import targets, warm
    target, data = targets()[name], file.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        warm(target, Path(folder))
        found = [judge(target, data, Path(folder), memory) for memory in (False, True)]
    print(f"{'accepted' if found[0].accepted else 'refused'} in {found[0].seconds:.3f} s, peak {found[1].peak:,} bytes "
          f"for {target.size(data):,}")
    for one in dict.fromkeys(f"{one.found} [{one.where}]" for one in found if one.found):
        print(f"! {one.encode('unicode_escape').decode()}")
    return 1 if any(one.found for one in found) else 0


def main() -> int:
    from fuzz_targets import targets
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("target", nargs="*", help=", ".join(targets()))
    asked.add_argument("--count", type=int, default=100_000, help="inputs of a target (default 100000)")
    asked.add_argument("--replay", type=Path, metavar="FILE", help="read one input again")
    asked.add_argument("--share", nargs=3, metavar=("ENGINE", "FIRST", "PLACE"), help=argparse.SUPPRESS)
    given = asked.parse_args()
    wrong = [name for name in given.target if name not in targets()]
    if wrong or (given.replay and len(given.target) != 1):
        asked.error(f"no target {wrong[0]!r}" if wrong else "--replay needs one TARGET")
    if given.share:
        from fuzz_engine import child
        child(given.target[0], given.share[0], given.count, int(given.share[1]), Path(given.share[2]))
        return 0
    if given.replay:
        return replay(given.target[0], given.replay)
    print("".join(head.ljust(14) if not at else head.rjust(13) for at, head in enumerate(HEAD)), file=sys.stderr)
    found = run(given.target or list(targets()), given.count)
    print("\n" + "".join(head.ljust(14) if not at else head.rjust(13) for at, head in enumerate(HEAD)))
    for tally in found:
        print(line(tally))
    return 1 if any(tally.findings for tally in found) else 0


if __name__ == "__main__":
    sys.exit(main())
