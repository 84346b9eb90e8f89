"""What NVIDIA's management library says while the call is looped: busy fraction and power. Not SM utilisation."""
from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import ClassVar

from kvlab.probes._base import Bench
from kvlab.record.reading import Reading, missing

NOT_SM = ("utilization.gpu says that some kernel ran, not how many SMs did; SM utilisation needs SM-activity counters "
          "(GPM on Hopper and newer, or Nsight Compute), which this probe does not read")


@dataclass(frozen=True)
class Nvml:
    """gpu_busy_fraction and power over a window of looped calls. Absent library or device: missing, with the reason.

    window_s: length of the loop; NVML refreshes its samples every 1/6 to 1 s, shorter windows say nothing.
    """
    window_s: float = 2.0
    name: ClassVar[str] = "nvml"
    metrics: ClassVar[dict[str, str]] = {"sm_utilization": "ratio", "gpu_busy_fraction": "ratio", "power": "W"}
    needs: ClassVar[tuple[str, ...]] = ("kernel_error",)
    rotates: ClassVar[bool] = False

    def why_not(self, trial):
        import pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            reason = type(error).__name__.removeprefix("NVMLError_")
            return f"{reason}: no NVIDIA driver answers on this machine ({error})"
        pynvml.nvmlShutdown()
        return None if trial.device.startswith("cuda") else f"NVML watches NVIDIA GPUs, not the device {trial.device}"

    def measure(self, bench: Bench):
        import pynvml
        pynvml.nvmlInit()
        try:
            try:
                handle = _handle(pynvml, bench.comparison.device)
            except pynvml.NVMLError as error:                        # a slice of a GPU (MIG) may have none
                reason = type(error).__name__.removeprefix("NVMLError_")
                for trial, (metric, unit) in product(bench.trials, self.metrics.items()):
                    yield trial, missing(metric, unit, f"{reason}: NVML has no handle of this device ({error})",
                                         source=self.name)
                return
            for trial in list(bench.trials):
                with bench.on(trial):
                    call = trial.prepare(bench.inputs_of(trial)[:1])[0]
                    for reading in self._window(pynvml, handle, call):
                        yield trial, reading
        finally:
            pynvml.nvmlShutdown()

    def _window(self, pynvml, handle, call):
        import torch
        readers = {"gpu_busy_fraction": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
                   "power": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3}
        seen, errors, running = {metric: [] for metric in readers}, {}, True

        def watch():                                                 # from a second thread, while the GPU is busy
            time.sleep(self.window_s / 2)                            # NVML's own period lies in the first half
            while running:
                for metric, read in readers.items():
                    try:
                        seen[metric].append(read())
                    except pynvml.NVMLError as error:
                        errors[metric] = type(error).__name__.removeprefix("NVMLError_")
                time.sleep(0.1)
        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        began = time.perf_counter()
        try:
            while time.perf_counter() - began < self.window_s:
                for _ in range(10):
                    call()
                torch.cuda.synchronize()
        finally:
            running = False
            thread.join()
        yield missing("sm_utilization", "ratio", NOT_SM, source=self.name)
        for metric, values in seen.items():
            if values:
                yield Reading(metric, fmean(values), self.metrics[metric], "measured", method="sensor",
                              source=self.name, scope="device", window_s=self.window_s, n=len(values),
                              low=min(values), high=max(values))
            else:
                yield missing(metric, self.metrics[metric], errors.get(metric, "NVML gave no sample in the window"),
                              source=self.name)


def _handle(pynvml, device: str):
    """NVML's handle of torch's device, by UUID: NVML counts devices that CUDA_VISIBLE_DEVICES hides."""
    import torch
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
