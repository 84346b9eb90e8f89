"""A call run back to back over its rotating inputs, so that a device is busy with nothing else for a whole window."""
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any


@dataclass(frozen=True)
class Window:
    """What was read at the two edges of a window of calls, and what lay between them."""
    before: Any
    after: Any
    calls: int
    seconds: float                      # wall time between the edges


class Loop:
    """Calls over rotating inputs. The turn goes on from window to window, so that no window begins on warm inputs."""

    def __init__(self, calls: list[Callable[[], Any]], device: str):
        self.calls, self._turn, self._wait = calls, count(), waits(device)
        self._pace: float | None = None

    def run(self, n: int) -> None:
        """n calls, finished."""
        for _ in range(n):
            self.calls[next(self._turn) % len(self.calls)]()
        self._wait()

    def lasting(self, seconds: float, least: int = 2) -> int:
        """How many calls take that long; at least `least`. The first question warms up and takes 0.2 s or a call."""
        if self._pace is None:
            self.run(2)
            n, spent = 0, 0.0
            began = time.perf_counter()
            while spent < 0.2:
                self.run(max(1, n))                                  # doubling: each wait costs short calls time
                n, spent = max(1, 2 * n), time.perf_counter() - began
            self._pace = spent / n
        return max(least, round(seconds / self._pace))

    def window(self, n: int, edge: Callable[[], Any]) -> Window:
        """n calls between two readings. Two more run before the first, so that the device is awake at it."""
        self.run(2)
        before, began = edge(), time.perf_counter()
        self.run(n)
        seconds = time.perf_counter() - began
        return Window(before, edge(), n, seconds)


def waits(device: str) -> Callable[[], None]:
    """What waits until the device has done all that was asked of it."""
    if not device.startswith("cuda"):
        return lambda: None
    import torch
    return lambda: torch.cuda.synchronize(device)
