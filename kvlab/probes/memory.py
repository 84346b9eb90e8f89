"""Memory that a first call takes beyond its inputs: the score matrix, workspaces that are then kept, the output."""
from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvlab.probes._base import Bench
from kvlab.record.reading import Reading

RESOLUTION = 2**20          # bytes; pages, arenas and the interpreter move this much by themselves


@dataclass(frozen=True)
class Memory:
    """Peak bytes of planning and a first call above those before, its output included; and bytes kept for gradients.

    CUDA: the allocator's own peak. Linux with glibc: the kernel's high-water mark (VmHWM), reset before the call
    after free memory was handed back. Elsewhere: resident bytes sampled by psutil during the call (a lower bound).
    """
    name: ClassVar[str] = "memory"
    metrics: ClassVar[dict[str, str]] = {"peak_extra_bytes": "B", "gradient_bytes": "B"}
    needs: ClassVar[tuple[str, ...]] = ("kernel_error",)
    rotates: ClassVar[bool] = False

    def why_not(self, trial):
        return None

    def measure(self, bench: Bench):
        for trial in list(bench.trials):
            with bench.on(trial):
                inputs = bench.inputs_of(trial)[:1]
                saved = gradient_bytes(trial.prepare(inputs)[0])      # also the warm-up: what libraries keep is made
                extra, method, resolution = peak_extra(lambda one=trial, given=inputs: one.prepare(given)[0](),
                                                       trial.device)
                note = f"below resolution ({RESOLUTION:,} bytes)" if resolution and extra < RESOLUTION else ""
                bound = None if method.startswith("sensor") else extra + resolution
                yield trial, Reading("peak_extra_bytes", extra, "B", "measured", method=method, source=self.name, n=1,
                                     low=max(0, extra - resolution), high=bound, note=note)
                yield trial, Reading("gradient_bytes", saved, "B", "measured", method="counter:saved_tensors", n=1,
                                     source=self.name, note="bytes torch kept for a backward pass; run under no_grad, "
                                                            "as inference is")


def gradient_bytes(call) -> int:
    """Bytes of tensors that autograd saved during the call."""
    import torch
    saved = 0

    def count(tensor):
        nonlocal saved
        saved += tensor.nbytes
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        call()
    return saved


def peak_extra(call, device: str) -> tuple[int, str, int]:
    """(peak bytes above those before the call, how it was found, its resolution)."""
    gc.collect()
    if device.startswith("cuda"):
        import torch
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before, "counter:cuda_allocator", 0
    if sys.platform == "linux" and _trim() and _reset_high_water():
        before = _status("VmRSS")
        kept = call()
        extra = _status("VmHWM") - before
        del kept
        return max(0, extra), "counter:VmHWM", RESOLUTION
    return _sampled(call), "sensor:psutil_rss", RESOLUTION


def _trim() -> bool:
    """Hand free memory back to the system, so that the call's own allocations show. Only glibc can."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        return True
    except (AttributeError, OSError):
        return False


def _reset_high_water() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return True
    except OSError:
        return False


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")


def _sampled(call) -> int:
    """Resident bytes at their highest, looked at every half millisecond from a second thread."""
    import psutil
    process, running = psutil.Process(os.getpid()), True
    before = highest = process.memory_info().rss

    def watch():
        nonlocal highest
        while running:
            highest = max(highest, process.memory_info().rss)
            time.sleep(5e-4)
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        kept = call()
        highest = max(highest, process.memory_info().rss)
    finally:
        running = False
        thread.join()
    del kept
    return highest - before
