"""Bytes between a simulated cache and memory, by valgrind's callgrind: the program is real, its caches are not."""
from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvlab._child import run
from kvlab.attention import Comparison
from kvlab.attention._c_kernel import SOURCE, shapes
from kvlab.kernels import compiled
from kvlab.probes import _target
from kvlab.probes._base import Bench
from kvlab.probes._traffic import TRAFFIC, traffic
from kvlab.record.reading import Reading, missing
from kvlab.units import display

REGION = SOURCE.with_name("callgrind_region.c")
PROGRAM = dict(sources=(REGION, SOURCE), shared=False, flags=("-DMAIN",))
LIBRARY = dict(sources=(REGION,), shared=True)
IN_C = ("c_naive", "c_flash", "c_decode")
LINE, WAYS, D1 = 64, 16, 32 * 2**10                                  # of the caches that are simulated
CALL, LEFT = "call", "left"                                          # names of the two dumps of a region
NEEDED = ("ILmr", "DLmr", "DLmw", "ILdmr", "DLdmr", "DLdmw")
# one thread; valgrind knows no AVX-512, and what looks for it by itself must be told
LEAN = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


class NoSimulation(Exception):
    """Why valgrind gave no numbers, in one sentence."""


@dataclass(frozen=True)
class Simulated:
    """Bytes of one call. read: data that a load found in no cache; allocate: lines read because a store came first;
    write: dirty lines written back, those left at the end included; code: instructions."""
    read: int
    allocate: int
    write: int
    code: int


@dataclass(frozen=True)
class Callgrind:
    """Reads and write-backs of one call behind a simulated last-level cache of cache_bytes (a power of two).

    The variants c_… run as a program of their own, in seconds. All others run in one Python for the whole comparison,
    which imports torch under valgrind: half a minute and more. timeout_s: of each such process; it is then ended.
    last_level_bytes is that size again: of the cache that was simulated, not of this machine's.
    Reads that stores cause (write-allocate) are apart, in write_allocate_bytes: no algorithm asks for them, a CPU
    makes them unless its stores bypass the cache. Instructions count in the note only: they would be in the cache if
    the call were not the first after a flush. Source: the manual of valgrind 3.19, Callgrind and Cachegrind.
    """
    cache_bytes: int = 2**20
    timeout_s: float = 240.0
    name: ClassVar[str] = "callgrind"
    on_request: ClassVar[bool] = True
    metrics: ClassVar[dict[str, str]] = {**TRAFFIC, "write_allocate_bytes": "B", "last_level_bytes": "B"}
    needs: ClassVar[tuple[str, ...]] = ("kernel_error",)
    rotates: ClassVar[bool] = False

    def __post_init__(self):
        if self.cache_bytes < D1 or self.cache_bytes & (self.cache_bytes - 1):
            raise ValueError(f"cache_bytes={self.cache_bytes} must be a power of two of at least {D1:,}")

    def why_not(self, case) -> str | None:
        """case: a Trial or an Operation."""
        if case.device != "cpu":
            return f"callgrind simulates a CPU's caches, and this is device {case.device}; use ncu or gpm there"
        if shutil.which("valgrind") is None:
            return "valgrind is not installed; install it (Debian: apt-get install valgrind gcc libc6-dev)"
        why = compiled.why_not(**LIBRARY)
        return why and f"{why}; valgrind's headers and a C compiler are needed"

    def measure(self, bench: Bench):
        others = []
        for trial in list(bench.trials):
            bench.watch.at("", self.name)
            if trial.threads != 1:
                yield from self._missing(trial, f"callgrind runs threads one after another; {trial.threads} threads "
                                                "share their caches otherwise, take threads=1")
            elif trial.variant.in_process:
                yield from self._missing(trial, "a class that exists in this process only cannot be run under "
                                                "valgrind; put it into a file")
            elif trial.variant.ref in IN_C:
                yield from ((trial, reading) for reading in self._in_c(trial, self._arguments(trial)))
            else:
                others.append(trial)
        if others:
            bench.watch.at("", self.name)
            yield from self._in_python(others)

    def operation(self, op) -> list[Reading]:
        """The copy, the read or the matrix product in C, fp32; its formula counts each operand once."""
        why = self.why_not(op) or (f"callgrind's operations are written in C for fp32 and one thread, and this is "
                                   f"{op.dtype} on {op.threads}" if (op.dtype, op.threads) != ("fp32", 1) else None)
        if why:
            return [reading for _, reading in self._missing(op, why)]
        if op.name != "matmul":
            return list(self._in_c(op, [op.name, self.cache_bytes, op.nbytes // op.itemsize]))
        rows = max(1, min(64, self.cache_bytes // 4 // (op.side * op.itemsize)))     # of the result, kept in the cache
        return list(self._in_c(op, [op.name, self.cache_bytes, op.side, rows], (
            f"; {rows} rows of the result at a time, so that the second matrix is read {-(-op.side // rows)} times")))

    def _missing(self, case, why: str):
        return [(case, missing(metric, unit, why, source=self.name)) for metric, unit in self.metrics.items()]

    def _arguments(self, trial) -> list:
        """What the program is told of a trial: each sequence's Shape."""
        variant = trial.variant.load()
        tiles = (getattr(variant, "q_tile", 1), getattr(variant, "kv_tile", 1))
        told = [getattr(shape, field) for shape in shapes(trial, tiles) for field, _ in shape._fields_]
        return [trial.variant.ref, self.cache_bytes, int(trial.workload.shape.v_in_k), *told]

    def _in_c(self, case, arguments: list, more: str = ""):
        try:
            program = compiled.compiled(**PROGRAM)
            found, _ = simulate([str(program), *map(str, arguments)], self.cache_bytes, self.timeout_s)
            yield from self._readings(case, region(found), more)
        except (NoSimulation, compiled.CannotCompile) as error:
            yield from (reading for _, reading in self._missing(case, str(error)))

    def _in_python(self, trials):
        """All these trials in one Python under valgrind."""
        with tempfile.TemporaryDirectory() as folder:
            told = _target.write(Comparison(tuple(trials)), Path(folder) / "case.json", cache_bytes=self.cache_bytes,
                                 library=str(compiled.compiled(**LIBRARY)))
            try:
                found, ended = simulate(_target.command("kvlab.probes._callgrind_child", told), self.cache_bytes,
                                        self.timeout_s)
            except NoSimulation as error:
                found, ended = {}, str(error)
        for trial in trials:
            try:
                one = region(found, f"{trial.case_id} ")
            except NoSimulation as error:
                yield from self._missing(trial, ended or str(error))
                continue
            yield from ((trial, reading) for reading in self._readings(trial, one, "; Python's own data is counted"))

    def _readings(self, case, found: Simulated, more: str = ""):
        common = dict(source=self.name, n=1, cache_state="cold", note=(
            f"D1 {display(D1, 'B')} 8-way, last level {display(self.cache_bytes, 'B')} {WAYS}-way, {LINE}-byte lines, "
            "LRU, no prefetcher, one thread; began full of other data, dirty lines left at the end are counted; not "
            f"counted: reads that stores cause (write_allocate_bytes) and {found.code:,} bytes of code{more}"))
        yield from traffic(case, total=found.read + found.write, read=found.read, write=found.write,
                           cache_bytes=self.cache_bytes, kind="simulated", method="cache simulator", **common)
        yield Reading("write_allocate_bytes", found.allocate, "B", "simulated", method="cache simulator", **common)
        yield Reading("last_level_bytes", self.cache_bytes, "B", "simulated", method="setting", **common)


def simulate(command: Sequence[str], cache_bytes: int, timeout_s: float) -> tuple[dict[str, dict[str, int]], str]:
    """({name of a dump: event: count}, "" or how the program ended) of a program that asks for dumps.

    Raises NoSimulation where there is no dump at all.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            ended = run(["valgrind", "--tool=callgrind", "--cache-sim=yes", "--simulate-wb=yes", "--instr-atstart=no",
                         f"--I1={D1},8,{LINE}", f"--D1={D1},8,{LINE}", f"--LL={cache_bytes},{WAYS},{LINE}",
                         "--vgdb=no", "--num-transtab-sectors=48", f"--callgrind-out-file={folder}/out",
                         *command], timeout_s=timeout_s, env={**os.environ, **LEAN})
        except OSError as error:
            raise NoSimulation(f"valgrind cannot be started ({error.strerror or error}); install it anew") from None
        found = dict(filter(None, map(dump, sorted(Path(folder).iterdir()))))
    said = [line for line in ended.stderr.splitlines() if line and not line.startswith(("==", "--"))]
    how = ended.how and f"under valgrind the call {ended.how.partition(':')[0]}{': ' + said[-1][:200] if said else ''}"
    if ended.code is None:
        how += f"; take a smaller workload, or Callgrind(timeout_s=…) above {timeout_s:g}"
    if not found:
        raise NoSimulation(how or "callgrind wrote no dump: this valgrind ignores client requests")
    return found, how


def dump(path: Path) -> tuple[str, dict[str, int]] | None:
    """(the name that the program gave the dump, its counts) of a callgrind file; None of one that it did not ask for.

    `totals:` holds the numbers: `summary:` of the same file is 0 or wraps below zero where collection was switched.
    """
    name, events, totals = "", [], []
    try:
        for line in path.read_text(errors="replace").splitlines():
            key, _, rest = line.partition(":")
            if key == "desc" and "Client Request: " in rest:
                name = rest.partition("Client Request: ")[2].strip()
            elif key == "events":
                events = rest.split()
            elif key == "totals":
                totals = [int(n) for n in rest.split()]
    except (OSError, ValueError):
        return None
    totals += [0] * (len(events) - len(totals))                      # zeros at the end are left out
    counts = dict(zip(events, totals))
    return (name, counts) if name and set(NEEDED) <= set(counts) else None


def region(found: dict[str, dict[str, int]], prefix: str = "") -> Simulated:
    """Bytes of the region whose two dumps have these names. NoSimulation where one is missing."""
    try:
        call, left = found[prefix + CALL], found[prefix + LEFT]
    except KeyError:
        raise NoSimulation("callgrind's files of this call are missing or cut off; run it again") from None
    back = ("ILdmr", "DLdmr", "DLdmw")
    return Simulated(LINE * call["DLmr"], LINE * call["DLmw"],
                     LINE * sum(one[event] for one in (call, left) for event in back), LINE * call["ILmr"])
