"""A fake libnvidia-ml.so.1, compiled from fake_nvml.c and loaded by the real pynvml. Tests only.

Its C code reads these environment variables at every call, so that one compiled library serves all modes:

FAKE_INIT          code of nvmlInit: 9 driver not loaded, 4 no permission, 18 mismatch (0)
FAKE_ERROR         "DeviceGetPowerUsage=3,GpmSampleGet=4@5,*=15@30": code of a function (name without "nvml") or of all
                   that ask a GPU (*); @k: from the k+1-th call on. `*=15@30` is a GPU that is lost in mid-window
FAKE_GPUS          1 or 2; GPU 0 has fake_cuda's UUID and PCI bus 1, GPU 1 the UUID SECOND and bus 2 (1)
FAKE_MIG           1: the UUID of GPU 0 is that of a MIG slice (GPU instance 7) and no whole GPU's (0)
FAKE_GPM_SAYS      what GpmQueryDeviceSupport says, where that is not so (as FAKE_GPM)
FAKE_REFRESH_MS    samples are as of the last multiple of so many ms (0).  FAKE_DELAY_MS  they lag by so many ms (0)
FAKE_GPM           0: no GPM on this GPU (1).  FAKE_GPM_MAX  first metric number the driver does not know, 98: old (333)
FAKE_GPM_STATUS    "10=3,2=6": status of single GPM metrics
FAKE_SM_UTIL FAKE_SM_OCCUPANCY FAKE_TENSOR_UTIL   percent, or nan (98.5, 24, 41)
FAKE_DRAM_UTIL     percent, or nan. Not set: it follows from the bytes that were told by `fake.traffic(bytes)`, and
                   FAKE_BYTES_PER_SECOND, between the two samples: util = 100 · bytes / (2 · mem_Hz · bits/8 · κ · t)
FAKE_KAPPA         κ of that (1).  FAKE_BUS_BITS (6144)  FAKE_MEM_MHZ (3201)  FAKE_SM_MHZ (1755): 0 is one without value
FAKE_UTIL_GPU FAKE_UTIL_MEMORY   busy fractions in percent (100, 37)
FAKE_POWER_W FAKE_POWER_AVERAGE_W   fields 186 and 185; the second is also DeviceGetPowerUsage (350, 340)
FAKE_ENERGY        rises (at FAKE_POWER_W) | falls (wrapped or reset) | still (rises)
FAKE_FIELD_STATUS  "186=3": status of single fields.  FAKE_THROTTLE "74=0.25,269=0.5": share of time per reason's field
FAKE_TEMPERATURE (45)  FAKE_REASONS bit mask (0)  FAKE_MEMORY_USED bytes (2^30)  FAKE_ECC 0|1 (1)  FAKE_ECC_ERRORS (0)
FAKE_PROCESSES     "own,4242": process ids on the GPU; own is this process (none)

`compiled(folder, old=True)` builds one without GPM, memory v2 and process lists: pynvml finds no such function.
"""
import ctypes
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

UUID = "GPU-00000000-1111-2222-3333-444444444444"
SECOND = "GPU-00000000-1111-2222-3333-555555555555"


def compiled(folder: Path, old: bool = False) -> Path:
    """The library built in a folder (once per folder); skips the test where there is no C compiler."""
    built = Path(folder) / ("old" if old else "new") / "libnvidia-ml.so.1"
    if not built.exists():
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("no C compiler (cc or gcc) to build the fake NVML with")
        built.parent.mkdir(parents=True, exist_ok=True)
        half = built.with_suffix(f".{os.getpid()}")                 # another test process may build it too
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-w", *(["-DOLD_DRIVER"] if old else []),
                        "-o", half, Path(__file__).with_name("fake_nvml.c"), "-lm"], check=True)
        half.rename(built)
    return built


class Fake:
    """The loaded library: what a test may tell it."""

    def __init__(self, library: ctypes.CDLL):
        self.library = library
        library.fake_traffic.argtypes, library.fake_calls.restype = [ctypes.c_double], ctypes.c_long
        library.fake_clock.argtypes = [ctypes.c_ulonglong]

    def traffic(self, nbytes: float) -> None:
        """These bytes went to or from DRAM now."""
        self.library.fake_traffic(nbytes)

    def calls(self) -> int:
        """How often a GPU was asked since the beginning."""
        return self.library.fake_calls()

    def clock(self, us: int) -> None:
        """It is so many microseconds now, and stays so until the next word; 0: real time again."""
        self.library.fake_clock(us)

    def reset(self) -> None:
        """Call counts and traffic begin at 0 again, and time is real."""
        self.library.fake_reset()


@contextmanager
def loaded(library: Path, **switches):
    """pynvml of this process on the fake library; switches are the variables above, without FAKE_, in any case.

    `with loaded(compiled(folder), gpm=0, error="GpmSampleGet=4") as fake:`; other tests find pynvml as it was.
    """
    import pynvml
    real = ctypes.CDLL(str(library))
    fake = Fake(real)
    fake.reset()
    with mock.patch.multiple(pynvml, nvmlLib=real, _nvmlGetFunctionPointer_cache={}), \
            mock.patch.dict(os.environ, variables(switches)):
        yield fake


def variables(switches: dict) -> dict[str, str]:
    return {f"FAKE_{name.upper()}": str(value) for name, value in switches.items()}


def run(library: Path, *command: str, timeout: float = 120, **switches) -> subprocess.CompletedProcess:
    """python with these arguments as a process of its own that finds the fake library where a driver's would be."""
    paths = [str(library.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(paths), **variables(switches)}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=timeout)
