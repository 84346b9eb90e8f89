"""What the machine lends to a measurement: memory, disk, load, clocks, counters, tools."""
from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvlab._child import run
from kvlab.doctor import _check
from kvlab.doctor._check import Check, deadline, read
from kvlab.doctor._software import facts
from kvlab.record.environment import free_memory, load_average
from kvlab.units import GiB, display

COMMANDS = {"ncu": "GPU counters", "nsys": "GPU time lines", "nvidia-smi": "the NVIDIA driver",
            "valgrind": "simulated memory traffic", "g++": "compiled kernels", "chromium": "pages in a browser",
            "pdflatex": "LaTeX tables"}
ENOUGH = 2 * GiB                        # of memory for a small study, of disk for some runs


def commands() -> Iterator[Check]:
    """External tools with their versions."""
    with ThreadPoolExecutor(max_workers=len(COMMANDS)) as pool:
        yield from pool.map(_command, COMMANDS.items())


def _command(item: tuple[str, str]) -> Check:
    name, use = item
    where = shutil.which(name)
    if where is None:
        return Check("commands", name, "note", f"not installed ({use})")
    try:
        ended = run([where, "--version"], timeout_s=deadline.left())
    except OSError as error:                                        # no program at all, or one of another machine
        return Check("commands", name, "problem", f"it cannot be started: {error.strerror or error}")
    if ended.how:
        return Check("commands", name, "problem", f"`--version` {ended.how}")
    return Check("commands", name, "ok", next((line.strip() for line in ended.stdout.splitlines()
                                               if re.search(r"\d+\.\d+", line)), "version unknown")[:80])


def processor() -> Check:
    """CPU, caches, huge pages, and whether a hypervisor stands between."""
    import psutil
    found = facts()
    steal = getattr(psutil.cpu_times(), "steal", 0) / max(1.0, sum(psutil.cpu_times()))
    caches = ", ".join(f"{level} {display(size, 'B')}" for level, size in found["caches_bytes"].items())
    virtual = f"; a virtual machine, {100 * steal:.1f} % of its time taken by others since boot" \
        if found["virtual_machine"] else ""
    pages = found["transparent_huge_pages"]
    return Check("machine", "processor", "ok" if steal < 0.02 else "note",
                 f"{found['cpu']}, {found['logical_cores']} logical cores, {caches or 'caches unknown'}"
                 f"{f'; transparent huge pages: {pages}' if pages else ''}{virtual}",
                 "" if steal < 0.02 else "measure with one thread (its own CPU time), or on a quieter machine")


def clocks() -> Check:
    """Clock of the CPU and who sets it."""
    import psutil
    governor = read("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip()
    now = psutil.cpu_freq() if hasattr(psutil, "cpu_freq") else None
    speed = f"{now.current:.0f} MHz now" if now else "clock unknown"
    if governor and governor != "performance":
        return Check("machine", "CPU clock", "note", f"{speed}, governor {governor}: times vary with it")
    return Check("machine", "CPU clock", "ok", f"{speed}, governor {governor or 'not told'}")


def load() -> Check:
    """What else runs: times of several threads are wall times, and other programs lengthen them."""
    cores, now = os.cpu_count() or 1, load_average()
    if now is None:
        return Check("machine", "load", "ok", "the system does not tell")
    busy = now > cores / 2
    return Check("machine", "load", "note" if busy else "ok", f"{now:.1f} runnable on {cores} cores in the last minute",
                 "wait until other programs rest before measuring with several threads" if busy else "")


def memory() -> Check:
    """Free main memory, and a container's limit."""
    import psutil
    free, total = free_memory(), psutil.virtual_memory().total
    limit = next((int(text) for path in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
                  if (text := read(path).strip()).isdigit() and int(text) < total), None)
    bounded = f", of which this container may use {display(limit, 'B')}" if limit else ""
    short = min(free, limit or free) < ENOUGH
    return Check("machine", "memory", "problem" if short else "ok",
                 f"{display(free, 'B')} free of {display(total, 'B')}{bounded}",
                 "free some memory, or keep to --size smoke" if short else "")


def disk() -> Check:
    """Room for runs in the current folder."""
    free = shutil.disk_usage(Path.cwd()).free
    return Check("machine", "disk", "ok" if free > ENOUGH else "problem", f"{display(free, 'B')} free here",
                 "" if free > ENOUGH else "make room, or give another folder by --out")


def writable() -> Check:
    """Whether runs can be written, and configurations of models that are fetched."""
    runs = Path("profiles") if Path("profiles").is_dir() else Path.cwd()
    folders = {"runs": (runs, "give another folder by --out"),
               "the Hugging Face cache": (hub_cache(), "set HF_HOME to a folder that can be written")}
    shut = {name: (folder, why, step) for name, (folder, step) in folders.items() if (why := _shut(folder))}
    if not shut:
        return Check("machine", "folders", "ok", "runs and the Hugging Face cache can be written")
    return Check("machine", "folders", "problem" if "runs" in shut else "note",
                 "; ".join(f"{name} cannot be written to {folder} ({why})" for name, (folder, why, _) in shut.items()),
                 "; ".join(step for *_, step in shut.values()))


def hub_cache() -> Path:
    """Where `kvlab size --download` keeps a config.json. Source: huggingface_hub's environment variables."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    home = os.environ.get("HF_HOME") or Path(base, "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub"))


def _shut(folder: Path) -> str:
    """Why nothing can be written there; the nearest folder that exists is tried, and nothing is left behind."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def counters() -> Iterator[Check]:
    """Who may read the counters of the GPU and of the CPU."""
    root = getattr(os, "geteuid", lambda: 1)() == 0
    admin_only = re.search(r"RmProfilingAdminOnly:\s*(\d)", read("proc/driver/nvidia/params"))
    if admin_only is None:
        yield Check("machine", "GPU counters", "note", "the driver does not tell here who may read them: gpm and ncu "
                    "will say" if facts()["gpus"] else "no NVIDIA driver is loaded")
    elif admin_only[1] == "0" or root:
        yield Check("machine", "GPU counters", "ok", "every user may read them" if admin_only[1] == "0" else
                    "only root may read them, and this is root")
    else:
        yield Check("machine", "GPU counters", "note", "only root may read them (RmProfilingAdminOnly)",
                    "for ncu and gpm: run as root or with CAP_PERFMON, or load the driver with "
                    "NVreg_RestrictProfilingToAdminUsers=0")
    units = _check.ROOT / "sys/bus/event_source/devices"
    paranoid = read("proc/sys/kernel/perf_event_paranoid").strip()
    if not units.is_dir():
        yield Check("machine", "CPU counters", "note", "the system offers none")
    elif not any((units / name).exists() for name in ("cpu", "cpu_core", "armv8_pmuv3_0")):
        yield Check("machine", "CPU counters", "note", "hidden, as in most virtual machines")
    elif paranoid.lstrip("-").isdigit() and int(paranoid) > 2 and not root:
        yield Check("machine", "CPU counters", "note", f"shut to users (perf_event_paranoid {paranoid})",
                    "as root: sysctl kernel.perf_event_paranoid=1")
    else:
        yield Check("machine", "CPU counters", "ok", f"perf_event_paranoid {paranoid or 'unknown'}; the probe perf "
                                                     "reads those of the memory controllers, where they are")
