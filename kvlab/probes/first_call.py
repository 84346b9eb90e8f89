"""What a variant costs before it runs at full speed: compilation, autotuning, loading of kernels."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvlab.probes._base import Bench
from kvlab.record.reading import Reading


@dataclass(frozen=True)
class FirstCall:
    """Wall seconds of planning and the first call in this process, which kernel_error makes; no later clock sees them.

    One sample, with torch's operators watched (some µs each). Source: tritonbench's compile_time.
    """
    name: ClassVar[str] = "first_call"
    metrics: ClassVar[dict[str, str]] = {"first_call_s": "s"}
    needs: ClassVar[tuple[str, ...]] = ("kernel_error",)
    rotates: ClassVar[bool] = False

    def why_not(self, trial):
        return None

    def measure(self, bench: Bench):
        for trial in bench.trials:
            if trial in bench.first_call_s:
                yield trial, Reading("first_call_s", bench.first_call_s[trial], "s", "measured", method="timer:wall",
                                     n=1, source=self.name, note="planning and first call in this process; what an "
                                                                 "earlier trial or run compiled may be reused")
