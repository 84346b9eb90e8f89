"""Bytes that a CPU's memory controllers counted while the call was looped: the whole machine's, less its idle floor."""
from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import ClassVar

from kvlab._child import run
from kvlab.probes._base import Bench
from kvlab.probes._loop import Loop
from kvlab.probes._traffic import TRAFFIC, model_of, traffic
from kvlab.record.environment import last_level_cache
from kvlab.record.reading import Reading, missing

ROOT = Path("/")                                                     # of /proc and /sys; tests look elsewhere
DEVICES, GROUPS = "sys/bus/event_source/devices", "sys/fs/resctrl/mon_data"
LINE = 64                                                            # bytes of a command that has no unit of its own
UNITS = {"": LINE, "B": 1, "Bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
START_S, TRIED_S = 0.3, 10.0                                         # until perf counts; for a first try
# a unit's name, as perf sums over all its numbers; its events of reads and of writes. Sources: the kernel's
# tools/perf/pmu-events (Intel uncore memory; AMD umc_cas_cmd, RdWrMask). Not AMD before Zen 4: its amd_df has four
# counters for eight channels, so that each would count half of the time
CONTROLLERS = (
    ("uncore_imc_free_running", "uncore_imc_free_running/data_read/", "uncore_imc_free_running/data_write/"),
    ("uncore_imc", "uncore_imc/cas_count_read/", "uncore_imc/cas_count_write/"),
    ("uncore_imc", "uncore_imc/data_reads/", "uncore_imc/data_writes/"),
    ("amd_umc", "amd_umc/event=0x0a,rdwrmask=0x1/", "amd_umc/event=0x0a,rdwrmask=0x2/"),
)
RUNNING = 90.0                                                       # %: of a window an event must have been counted


class CannotCount(Exception):
    """Why a counter gives nothing, in one sentence."""


@dataclass(frozen=True)
class Counted:
    """Bytes so far. read, write: None where the counter does not tell them apart."""
    total: float
    read: float | None = None
    write: float | None = None


class Resctrl:
    """What the kernel's resource control counts of the tasks in its root group: all, unless someone made others."""
    name, unsplit = "resctrl", "resctrl counts reads and writes together"

    def edge(self) -> Counted:
        files = sorted((ROOT / GROUPS).glob("mon_L3_*/mbm_total_bytes"))
        if not files:
            raise CannotCount("the kernel's resctrl has no mbm_total_bytes; as root: mount -t resctrl resctrl "
                              "/sys/fs/resctrl (needs a CPU with bandwidth monitoring, on bare metal)")
        try:
            return Counted(float(sum(int(file.read_text()) for file in files)))
        except (OSError, ValueError) as error:
            raise CannotCount(f"mbm_total_bytes of resctrl cannot be read ({error}); run as root, on bare metal"
                              ) from None


class PerfStat:
    """`perf stat -a` from one edge of a window to the next."""
    unsplit = ""

    def __init__(self, name: str, reads: str, writes: str):
        self.name, self.events = f"perf ({name})", f"{reads},{writes}"
        self.env = {**os.environ, "LC_ALL": "C"}                     # a decimal comma would be one column more
        self.running: subprocess.Popen | None = None
        self.file = tempfile.NamedTemporaryFile(prefix="kvlab-perf-")

    def command(self, file: str) -> list[str]:
        return ["perf", "stat", "-a", "-x", ",", "-o", file, "-e", self.events]

    def edge(self) -> Counted:
        """Starts perf and says 0; at the next edge ends it and says what it counted. No pipes: it may print much."""
        if self.running is None:
            try:
                self.running = subprocess.Popen(self.command(self.file.name), env=self.env, stdin=subprocess.DEVNULL,
                                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            except OSError as error:
                raise CannotCount(f"perf cannot be started ({error.strerror or error})") from None
            time.sleep(START_S)
            return Counted(0.0, 0.0, 0.0)
        self.running.send_signal(signal.SIGINT)
        return self.counted(self._ended())

    def _ended(self) -> str:
        try:
            self.running.wait(TRIED_S)
        except subprocess.TimeoutExpired:
            raise CannotCount(f"perf did not end within {TRIED_S:g} s of being asked to") from None
        finally:
            self.close()
        return Path(self.file.name).read_text(errors="replace")

    def close(self) -> None:
        if self.running is not None and self.running.poll() is None:
            self.running.kill()
            self.running.wait()
        self.running = None

    def tried(self) -> None:
        """Raises CannotCount where perf will not count this, in its own words."""
        try:
            ended = run([*self.command(self.file.name), "sleep", "0.01"], timeout_s=TRIED_S, env=self.env)
        except OSError as error:
            raise CannotCount(f"perf cannot be started ({error.strerror or error})") from None
        if ended.how:
            said = next((line.strip() for line in ended.stderr.splitlines() if line.strip(" :")), "")
            raise CannotCount(f"perf {ended.how.partition(':')[0]} on {self.name}: {said[:200] or 'no word'}")
        self.counted(Path(self.file.name).read_text(errors="replace"))

    def counted(self, text: str) -> Counted:
        """Bytes from the lines `value,unit,event,time,percent of it,…` that perf wrote.

        Source: perf-stat(1), CSV FORMAT.
        """
        rows = [line.split(",") for line in text.splitlines() if line.strip() and not line.startswith("#")]
        found = []
        for row in rows:
            if len(row) < 5:
                raise CannotCount(f"perf's line {','.join(row)[:80]!r} is cut off")
            value, unit = row[0], row[1]
            if value.startswith("<"):
                raise CannotCount(f"perf says {value} of {self.name}: a virtual machine hides it, or another program "
                                  "holds it; needs bare metal")
            if unit not in UNITS:
                raise CannotCount(f"perf gave the unit {unit!r}, which kvlab does not know; it knows bytes to GiB")
            try:
                found.append(float(value) * UNITS[unit])
                running = float(row[4])
            except ValueError:
                raise CannotCount(f"perf's count {value!r}, of {row[4]!r} % of the time, is no number") from None
            if not running >= RUNNING:
                raise CannotCount(f"perf counted {row[2]} for {running:g} % of the time only and guessed the rest: "
                                  "another program holds the controllers' counters; end it")
        if not found or len(found) % 2:                              # a line of reads and one of writes per unit
            raise CannotCount(f"perf wrote {len(found)} counts for 2 events")
        return Counted(sum(found), sum(found[:len(found) // 2]), sum(found[len(found) // 2:]))


def counter() -> Resctrl | PerfStat:
    """The first counter of memory traffic that works here, those before it that tell reads from writes."""
    why, devices = [], ROOT / DEVICES
    there = sorted({d.name for d in devices.iterdir()}) if devices.is_dir() else []
    units = [unit for unit in CONTROLLERS if any(name == unit[0] or name.startswith(f"{unit[0]}_") for name in there)]
    try:
        paranoid = int((ROOT / "proc/sys/kernel/perf_event_paranoid").read_text())
    except (OSError, ValueError):
        paranoid = 2
    if not units:
        why.append(f"the system offers no memory-controller counters under /{DEVICES} (uncore_imc, amd_umc): "
                   "a virtual machine hides them; needs bare metal")
    elif shutil.which("perf") is None:
        why.append("the program perf is not installed (Debian: apt-get install linux-perf)")
    else:
        shut = paranoid > 0 and getattr(os, "geteuid", lambda: 0)() != 0
        for unit in units:
            one = PerfStat(*unit)
            try:
                one.tried()
                return one
            except CannotCount as error:
                why.append(f"{error}; perf_event_paranoid is {paranoid}: counting the whole machine needs root, or, as "
                           "root: sysctl kernel.perf_event_paranoid=0" if shut else str(error))
    try:
        one = Resctrl()
        one.edge()
        return one
    except CannotCount as error:
        raise CannotCount("; ".join(dict.fromkeys([*why, str(error)]))) from None


@dataclass(frozen=True)
class Perf:
    """Bytes per call between this machine's CPU and its memory, from windows of n and of 2n calls.

    The slope between the two leaves the edges out; what the idle machine moved in the same time is taken off. Other
    programs count: scope system. So do the reads of lines that are then written over (write-allocate), which no formula
    has: the interval of traffic_to_model begins where each written line was also read. Prefetched lines count too, so
    nothing here verifies the timer's cold label.
    window_s: of n calls; pairs: how many pairs of windows, whose whole range is the interval.
    """
    window_s: float = 1.0
    pairs: int = 3
    name: ClassVar[str] = "perf"
    on_request: ClassVar[bool] = True
    metrics: ClassVar[dict[str, str]] = TRAFFIC
    needs: ClassVar[tuple[str, ...]] = ("kernel_error", "timer")
    rotates: ClassVar[bool] = True

    def why_not(self, case) -> str | None:
        """case: a Trial or an Operation."""
        if case.device != "cpu":
            return f"perf counts a CPU's memory traffic, and this is device {case.device}; use ncu or gpm there"
        try:
            counter()
        except CannotCount as error:
            return str(error)
        return None

    def measure(self, bench: Bench):
        for trial in list(bench.trials):
            found = []
            with bench.on(trial):
                found = self._counted(trial, trial.prepare(bench.inputs_of(trial)))
            if trial in bench.trials:
                yield from ((trial, reading) for reading in found)

    def operation(self, op) -> list[Reading]:
        """Of the operation as torch computes it, on operands that rotate through five times the last-level cache."""
        if why := self.why_not(op):
            return self._missing(why)
        copies = max(2, -(-5 * last_level_cache()[0] // op.nbytes) + 1)
        return self._counted(op, op.calls(copies))

    def _missing(self, why: str) -> list[Reading]:
        return [missing(metric, unit, why, source=self.name) for metric, unit in self.metrics.items()]

    def _counted(self, case, calls) -> list[Reading]:
        try:
            one = counter()
            try:
                per_call = self._slopes(one, Loop(calls, case.device))
            finally:
                getattr(one, "close", lambda: None)()
        except CannotCount as error:
            return self._missing(str(error))
        totals = [c.total for c in per_call]
        if min(totals) <= 0:
            return self._missing("more calls moved no more bytes: other programs move far more; wait until they rest, "
                                 f"or take windows above {self.window_s:g} s")
        split = {} if per_call[0].read is None else dict(read=median(c.read for c in per_call),
                                                         write=median(c.write for c in per_call))
        found = traffic(case, total=median(totals), low=min(totals), high=max(totals), **split, unsplit=one.unsplit,
                        cache_bytes=last_level_cache()[0], kind="measured", method="counter", source=self.name,
                        scope="system", n=self.pairs, window_s=self.window_s,
                        note=f"{one.name}, the whole machine less its idle floor; a store's own read of its line and "
                             "the prefetcher's reads count")
        return [_without_allocation(case, one) if one.metric == "traffic_to_model" else one for one in found]

    def _slopes(self, one, loop: Loop) -> list[Counted]:
        """Bytes per call, of each pair of windows."""
        began, before = time.perf_counter(), one.edge()
        time.sleep(self.window_s)
        after = one.edge()
        idle, seconds = _less(after, before), time.perf_counter() - began
        n, found = loop.lasting(self.window_s), []
        for _ in range(self.pairs):
            short, long = loop.window(n, one.edge), loop.window(2 * n, one.edge)
            more = _less(_less(long.after, long.before), _less(short.after, short.before))
            found.append(_per(_less(more, idle, (long.seconds - short.seconds) / seconds), n))
        return found


def _without_allocation(case, ratio: Reading) -> Reading:
    """The ratio to the formula with an interval that also holds it if each line written was first read."""
    model = model_of(case, last_level_cache()[0])
    share = model.write_bytes / (model.read_bytes + model.write_bytes)
    return replace(ratio, low=ratio.low - share, note=f"{ratio.note}; the interval begins {share:.2f} lower: so many "
                   "reads, as parts of the formula, stores may have caused, and no formula has them")


def _less(a: Counted, b: Counted, times: float = 1.0) -> Counted:
    """a - times · b."""
    parts = [None if x is None or y is None else x - times * y for x, y in ((a.read, b.read), (a.write, b.write))]
    return Counted(a.total - times * b.total, *parts)


def _per(a: Counted, n: int) -> Counted:
    return Counted(a.total / n, *(None if x is None else x / n for x in (a.read, a.write)))
