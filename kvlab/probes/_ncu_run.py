"""Nsight Compute as a program: found, started on a case in a process of its own, and what it said as a record."""
from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvlab import _child
from kvlab.attention import Comparison
from kvlab.probes._ncu_csv import Kernel, Unreadable, kernels, refused, replays, unknown
from kvlab.probes._target import command, under_ncu, write
from kvlab.record.environment import portable

OLDEST = (2022, 4)
INSTALL = "install NVIDIA Nsight Compute, or add the folder of ncu to PATH"
DRAM = {"dram__bytes_read.sum": "byte", "dram__bytes_write.sum": "byte"}
ACTIVITY = {
    "gpu__time_duration.sum": "ns", "sm__cycles_active.avg": "cycle", "sm__cycles_elapsed.max": "cycle",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "%",
    # not instructions: one of Hopper's keeps the pipe busy for many cycles
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "%", "lts__t_sector_hit_rate.pct": "%"}
# pass -> (what ncu does with the caches before each kernel, metric -> base unit). The two of DRAM should fit one replay
# (ncu says whether they did), or a later one finds what the first left in the caches; those of activity do not, so each
# begins with empty ones.
PASSES = {"traffic": ("none", DRAM), "cold": ("all", DRAM), "activity": ("all", ACTIVITY)}
REPLAYS = "replays"                     # beside a kernel's metrics: how often it was run for them; 0: ncu does not say
NO_KERNEL = ("ncu saw no kernel in the call (the driver's copies and fills, memcpy and memset, are none: clone() of a "
             "contiguous tensor is such a copy)")
Counts = dict[str, dict[str, "list[Kernel] | str"]]         # pass -> case_id -> its kernels, or why there are none


@dataclass(frozen=True)
class Program:
    """Where ncu lies, and its version as it says it."""
    path: str
    version: str


def program() -> Program:
    """The ncu of this machine. Raises Unreadable with the remedy: none, too old, or one that does not answer."""
    if why := under_ncu():
        raise Unreadable(why)
    path = shutil.which("ncu") or next(filter(os.path.isfile, _places()), None)
    if path is None:
        raise Unreadable(f"ncu was not found; {INSTALL}")
    said = _version(path)
    found = re.search(r"Version (\d+)\.(\d+)[\d.]*", said)
    if found is None:
        raise Unreadable(f"ncu --version told no version ({said[:200] or 'it printed nothing'}); {INSTALL}")
    version = found[0].removeprefix("Version ")
    if (int(found[1]), int(found[2])) < OLDEST:
        raise Unreadable(f"ncu {version} is older than {'.'.join(map(str, OLDEST))}, the first for CUDA 12; update "
                         "Nsight Compute")
    return Program(path, version)


def _places() -> Iterable[str]:
    """Where installers put ncu beside PATH, the newest version first."""
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home:
            yield os.path.join(home, "bin", "ncu")
    yield from (str(p) for p in sorted(Path("/opt/nvidia/nsight-compute").glob("*/ncu"), reverse=True))


@cache
def _version(path: str) -> str:
    try:
        ended = _child.run([path, "--version"], timeout_s=20)
    except OSError as error:
        return f"it cannot be started: {error.strerror}"
    return ended.stdout if ended.code == 0 else ended.how


def counted(case, passes: Sequence[str] = tuple(PASSES), timeout_s: float = 120.0, heard: list | None = None,
            alive: Callable[[], None] = lambda: None) -> Counts:
    """The kernels of each trial of a comparison (or of an operation), per pass, each pass in a process of its own.

    A trial that brings its process down is told so and not run again; the others are. timeout_s: for each pass with all
    its runs. When it is over the pass is: ncu prints its table at its end, so that the trials before are lost with the
    one that was running, which the next passes leave out. What else stops one pass altogether stops those after it.
    heard: gets the record of every run of ncu, which read_passes takes. alive: called before each run. Raises
    Unreadable where there is no ncu to run.
    """
    ncu, found, blamed = program(), {}, {}
    for name in passes:
        left, metrics = _without(case, blamed), PASSES[name][1]
        found[name], over, hung = dict(blamed), time.monotonic() + timeout_s, False
        while left is not None:
            if (rest := round(over - time.monotonic(), 1)) <= 0:
                found[name] |= dict.fromkeys(_ids(left), f"the {timeout_s:g} s of the pass {name} went to runs that a "
                                                         "trial brought down; allow more (timeout_s)")
                break
            alive()
            record = run(ncu, left, name, metrics, rest)
            if heard is not None:
                heard.append(record)
            known = {m: unit for m, unit in metrics.items() if m not in unknown(record["log"], tuple(metrics))}
            if known and len(known) < len(metrics):                  # once more without those that it does not know
                metrics = known
                continue
            found[name] |= read_passes([record])[name]
            new = _blamed(record)
            blamed |= new
            hung = record["code"] is None and bool(new)
            left = _without(left, found[name])
        if all(isinstance(why, str) for why in found[name].values()) and not (hung and _without(case, blamed)):
            return {**dict.fromkeys(passes, found[name]), **found}
    return found


def run(ncu: Program, case, name: str, metrics: dict[str, str], timeout_s: float) -> dict:
    """One run of ncu on a case, as plain values without paths or the host's name."""
    with tempfile.TemporaryDirectory(prefix="kvlab-ncu-") as folder:
        log = Path(folder) / "log.csv"                               # what the child prints must not get into it
        asked = [ncu.path, "--nvtx", "--csv", "--page", "raw", "--print-units", "base", "--print-kernel-base",
                 "function", "--clock-control", "none", "--cache-control", PASSES[name][0], "--replay-mode", "kernel",
                 "--profile-from-start", "off", "--metrics", ",".join(metrics), "--log-file", str(log),
                 *command("kvlab.probes._ncu_child", write(case, Path(folder) / "case.json"))]
        # the C locale, so that 1,000 is a thousand
        env = {**os.environ, "LC_ALL": "C", "NV_COMPUTE_PROFILER_DISABLE_STOCK_FILE_DEPLOYMENT": "1",
               "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path)}
        try:
            ended = _child.run(asked, timeout_s=timeout_s, env=env)
        except OSError as error:
            ended = _child.Ended("", f"{ncu.path} cannot be started: {error.strerror}", 127, timeout_s)
        printed = log.read_text(errors="replace") if log.is_file() else f"{ended.stdout}\n{ended.stderr}"
    return {"pass": name, "version": ncu.version, "metrics": metrics, "targets": _ids(case), "code": ended.code,
            "command": [Path(part).name if os.sep in part else part for part in asked], "timeout_s": timeout_s,
            "log": _anonymous(printed), "stdout": "\n".join(map(json.dumps, _told(ended.stdout))),
            "stderr": "\n".join(portable(line) for line in ended.stderr.splitlines()[-20:])}


def read_passes(records: Iterable[dict]) -> Counts:
    """What such records say, in the order in which they were written; a later one replaces an earlier one's word.

    A trial that a record says nothing of, since another brought the process down before it, is not in it.
    """
    found: Counts = {}
    for record in records:
        found.setdefault(record["pass"], {}).update(_read(record))
    return found


def _read(record: dict) -> dict[str, list[Kernel] | str]:
    targets, told = record["targets"], _told(record["stdout"])
    if why := refused(record["log"]):
        return dict.fromkeys(targets, why)
    blamed, done = _blamed(record), {line["done"] for line in told if "done" in line}
    if record["code"] is None:
        fate = {True: "it prints its table at its end, so that the counts of this trial, which had run, are lost",
                False: "this trial had not begun"}
        return {t: f"ncu gave no counts; {_how(record)}; {fate[t in done]}; allow more (timeout_s), or measure fewer "
                   "trials at a time" for t in targets} | blamed
    try:
        table = kernels(record["log"], record["metrics"])
    except Unreadable as why:
        return blamed or dict.fromkeys(targets, "; ".join(filter(None, ["ncu gave no counts", _how(record), str(why)])))
    named = set(table) - {""}
    if table and not named:
        if len(targets) > 1:
            return dict.fromkeys(targets, "ncu printed no NVTX ranges, so that the kernels of several trials cannot be "
                                          "told apart; measure one trial at a time") | blamed
        table = {targets[0]: table[""]}                              # a single trial's: nothing else was profiled
    unasked = {m: f"ncu {record['version']} does not know {m} on this GPU" for m in PASSES[record["pass"]][1]
               if m not in record["metrics"]}
    more = {**unasked, REPLAYS: replays(record["log"])}
    return {t: [{**more, **kernel} for kernel in table[t]] if t in done and t in table else NO_KERNEL
            for t in targets} | blamed


def _blamed(record: dict) -> dict[str, str]:
    """The trials that failed in the child, and the one during which it ended."""
    told = _told(record["stdout"])
    blamed = {line["failed"]: f"it failed under ncu: {line.get('error')}" for line in told if "failed" in line}
    over = {line.get("done", line.get("failed")) for line in told}
    running = [line["began"] for line in told if "began" in line and line["began"] not in over]
    if running and not refused(record["log"]):
        blamed[running[-1]] = f"ncu gave no counts of it, its process did not survive it: {_how(record)}" + (
            "; allow more (timeout_s)" if record["code"] is None else "")
    return blamed


def _how(record: dict) -> str:
    """How the run ended, with the last of what ncu calls errors."""
    said = [line.partition("== ")[2] for line in record["log"].splitlines() if line.startswith("==ERROR==")]
    ended = _child.Ended("", record["stderr"], record["code"], record["timeout_s"])
    return "; ".join(dict.fromkeys(filter(None, [ended.how and f"it {ended.how}", *said[-2:]])))


def _told(stdout: str) -> list[dict]:
    """The child's lines, without absolute paths; what a variant printed between them is left out."""
    found = []
    for line in stdout.splitlines():
        try:
            one = json.loads(line)
        except ValueError:
            continue
        if isinstance(one, dict) and one.keys() & {"began", "done", "failed"}:
            found.append({name: portable(str(value)) for name, value in one.items()})
    return found


def _ids(case) -> list[str]:
    return [trial.case_id for trial in case.trials] if isinstance(case, Comparison) else [case.case_id]


def _without(case, said: Iterable[str]):
    """The case without trials of which something was said already; None where none is left."""
    if isinstance(case, Comparison):
        trials = tuple(t for t in case.trials if t.case_id not in said)
        return Comparison(trials) if trials else None
    return None if case.case_id in said else case


def _anonymous(log: str) -> str:
    """The log without the host's name and without absolute paths; its table is left as it is otherwise."""
    lines = log.splitlines()
    header = next((line for line in lines if line.startswith('"ID"')), "").split('","')
    if "Host Name" in header:
        at = header.index("Host Name")
        hosts = {cells[at] for line in lines if len(cells := line.split('","')) > at and line.startswith('"')}
        for host in hosts - {"", "Host Name"}:
            log = log.replace(f'"{host}"', '"host"')
    return "\n".join(portable(re.sub(r"process \d+ \(.*\)", "process", line)) if line.startswith("==") else line
                     for line in log.split("\n"))
