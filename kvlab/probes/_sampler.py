"""Sensors read a few times a second from a second thread, while the device works."""
from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Event, Lock, Thread

PERIOD_S = 0.1                          # NVML refreshes its sensors no oftener
MOST = 20_000                           # samples kept, of all sensors together: minutes


class Sampler:
    """Reads sensors every PERIOD_S while `running`, and whenever `read` is called, as at the edges of a window.

    A sensor that raises is asked no more; why stands in `refused`. The oldest of more than MOST samples are forgotten.
    """

    def __init__(self, sensors: Mapping[str, Callable[[], float]]):
        self.sensors = sensors
        self.samples: deque[tuple[float, str, float]] = deque(maxlen=MOST)      # (time.perf_counter, sensor, value)
        self.refused: dict[str, str] = {}
        self._one_at_a_time = Lock()

    def read(self) -> None:
        with self._one_at_a_time:
            for name, sensor in self.sensors.items():
                if name in self.refused:
                    continue
                try:
                    self.samples.append((time.perf_counter(), name, sensor()))
                except Exception as error:                           # nothing may end the thread unsaid
                    self.refused[name] = str(error) or type(error).__name__

    @contextmanager
    def running(self) -> Iterator[None]:
        ended = Event()

        def watch():
            while not ended.wait(PERIOD_S):
                self.read()
        thread = Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def between(self, name: str, began: float, ended: float) -> list[float]:
        """What a sensor said in a window. Of one too short for the thread, what it said at the window's edges.

        At the edges the device has just finished: they are not like the window, and count only where it has no other.
        """
        mine = [(at, value) for at, sensor, value in self.samples if sensor == name]
        inside = [value for at, value in mine if began <= at < ended]
        if inside:
            return inside
        before, after = ([value for at, value in mine if at < began][-1:], [v for at, v in mine if at >= ended][:1])
        return before + after
