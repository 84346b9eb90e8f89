"""How fast a GPU's SMs are clocked, and whether something slows them down, asked between the rounds of the timer."""
from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from kvlab.probes._nvml import Gpu, Unavailable, gpu

SM = 1                                          # NVML_CLOCK_SM
SLOWED = 0x4 | 0x8 | 0x20 | 0x40 | 0x80         # power cap, hardware slowdown, software and hardware heat, power brake
LOW = 0.75                                      # of the fastest clock seen. Source: NVBench's throttle detection


@dataclass(frozen=True)
class Look:
    """One look at the clock. hz: None where NVML does not tell; reasons: its bits for why the clock is not higher."""
    hz: float | None = None
    reasons: int | None = None

    def slowed(self, fastest: float | None) -> bool | None:
        """Whether the GPU was slowed down, the fastest clock seen being that; None where NVML told nothing."""
        if self.reasons is None and not self.hz:
            return None
        return bool((self.reasons or 0) & SLOWED) or bool(self.hz and fastest and self.hz < LOW * fastest)


class SmClock:
    """NVML open on one GPU. Where it is absent, looks are empty and `why` says why."""

    def __init__(self, device: str):
        self._held, self._gpu, self.why = ExitStack(), None, ""
        self.fastest: float | None = None
        try:
            self._gpu: Gpu | None = self._held.enter_context(gpu(device)).whole
        except Unavailable as why:
            self.why = str(why)

    def look(self) -> Look:
        if self._gpu is None:
            return Look()
        mhz = self._ask(("DeviceGetClockInfo", SM))
        reasons = self._ask(("DeviceGetCurrentClocksEventReasons",), ("DeviceGetCurrentClocksThrottleReasons",))
        hz = None if mhz is None else 1e6 * mhz
        self.fastest = max(filter(None, (self.fastest, hz)), default=None)
        return Look(hz, reasons)

    def close(self) -> None:
        self._held.close()

    def _ask(self, *ways):
        """The first answer; older drivers and packages know a thing by its older name."""
        for way in ways:
            try:
                return self._gpu.ask(*way)
            except Unavailable as why:
                self.why = str(why)
        return None
