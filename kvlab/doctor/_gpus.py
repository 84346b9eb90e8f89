"""NVIDIA's GPUs as their management library sees them now: clocks, modes, counters, and who else is on them."""
from __future__ import annotations

from collections.abc import Callable, Iterator

from kvlab.doctor._check import Check
from kvlab.probes._device import locked_now, others
from kvlab.probes._nvml import Gpu, Unavailable, opened

HELD_BACK = {0x4: "power limit", 0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}
ABSENT = (None, 12)                     # no nvidia-ml-py, or no driver at all: nothing is broken
LOST, NOT_SUPPORTED = 15, 3                         # codes of NVML


def nvml() -> Check:
    """Whether NVIDIA's management library answers, and if not, why and what to do."""
    try:
        with opened() as library:
            return Check("software", "NVML", "ok", f"{library.nvmlSystemGetNVMLVersion()}, driver "
                                                   f"{library.nvmlSystemGetDriverVersion()}")
    except Unavailable as why:
        if why.code in ABSENT:
            return Check("software", "NVML", "note", str(why))
        return Check("software", "NVML", "problem", *_remedy(why))


def _remedy(why: Unavailable) -> tuple[str, str]:
    """(what is wrong, what to do): a reason ends with the remedy where there is one."""
    words, _, step = str(why).rpartition(": ")
    return (words, step) if ": " in words else (str(why), "")


def gpus() -> Iterator[Check]:
    """Lines of each GPU; a GPU that is lost says so in all of them."""
    try:
        with opened() as library:
            for i in range(library.nvmlDeviceGetCount()):
                try:
                    one = Gpu(library, library.nvmlDeviceGetHandleByIndex(i))
                except library.NVMLError as error:
                    yield Check("machine", f"GPU {i}", "problem", f"it cannot be opened: {error}")
                    continue
                for what, ask in (("clock", _clock), ("modes", _modes), ("GPM", _gpm), ("processes", _processes)):
                    yield _asked(f"GPU {i} {what}", ask, one)
    except Unavailable:
        return                                                       # its own line says why


def _asked(name: str, ask: Callable, one: Gpu) -> Check:
    try:
        status, found, step = ask(one)
    except Unavailable as why:
        status, (found, step) = "problem" if why.code == LOST else "note", _remedy(why)
    return Check("machine", name, status, found, step)


def _clock(one: Gpu) -> tuple[str, str, str]:
    """Clocks now, and whether they are held back."""
    clocks = {name: (one.ask("DeviceGetClockInfo", which), one.ask("DeviceGetMaxClockInfo", which))
              for name, which in (("SM", one.nvml.NVML_CLOCK_SM), ("memory", one.nvml.NVML_CLOCK_MEM))}
    text = ", ".join(f"{name} {now} of {most} MHz" for name, (now, most) in clocks.items())
    zero = [name for name, (now, _) in clocks.items() if not now]
    if zero:
        return "note", f"{text}; a clock of 0 is none: what is derived from it is missing", ""
    try:
        mask = one.ask("DeviceGetCurrentClocksEventReasons")
    except Unavailable:                                              # its name before driver 535
        mask = one.ask("DeviceGetCurrentClocksThrottleReasons")
    why = [name for bit, name in HELD_BACK.items() if mask & bit]
    return "note" if why else "ok", text + (f"; held back now: {', '.join(why)}" if why else ""), ""


def _modes(one: Gpu) -> tuple[str, str, str]:
    """Slices (MIG), and errors of the memory (ECC)."""
    mig = _state(one, "DeviceGetMigMode")
    ecc, errors = _state(one, "DeviceGetEccMode"), 0
    if ecc == "on":
        errors = one.ask("DeviceGetTotalEccErrors", 1, 0)
        ecc += f", {errors} uncorrected errors since the driver was loaded"
    step = "reset or replace the GPU: its results cannot be trusted" if errors else (
        "kvlab measures the slice that CUDA_VISIBLE_DEVICES names; its power and clocks are the whole GPU's"
        if mig == "on" else "")
    return "problem" if errors else "note" if mig == "on" else "ok", f"MIG {mig}; ECC {ecc}", step


def _state(one: Gpu, function: str) -> str:
    try:
        return "on" if one.ask(function)[0] else "off"
    except Unavailable as why:
        if why.code == LOST:
            raise
        return "not offered"


def _gpm(one: Gpu) -> tuple[str, str, str]:
    """Whether the counters that NVML itself reads are there, and may be read: one sample is tried."""
    if _state(one, "DeviceGetMigMode") == "on":
        return "ok", "read for the slice that is measured", ""
    try:
        one.free(one.gpm_sample())
    except Unavailable as why:
        if why.code != NOT_SUPPORTED:
            raise
        return "note", "this GPU has none: Hopper and newer have", "DRAM traffic and SM utilisation come from ncu here"
    return "ok", "there, and may be read", ""


def _processes(one: Gpu) -> tuple[str, str, str]:
    """Who else is on the GPU: processes of others, and another kvlab that measures."""
    one.ask("DeviceGetComputeRunningProcesses")                      # what it refuses is told with the remedy
    count, _ = others(one, present=False)
    found = [f"{count or 'no'} other {'process' if count == 1 else 'processes'} on it"]
    locked = locked_now(one.ask("DeviceGetUUID"))
    if locked:
        found.append("locked: a kvlab measures on it now, and another one waits until it ends")
    return ("note" if locked or count else "ok", "; ".join(found),
            "rows measured meanwhile say `contended`; end it, or choose a GPU by CUDA_VISIBLE_DEVICES" if count else "")
