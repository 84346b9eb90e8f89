"""A clock that only sleeping moves, for Python and the fake NVML together. Tests only.

No load of the machine changes what is measured under it, and a window of a second costs no second. Each look at it by
the thread that made it takes a microsecond, so that time never stands still; other threads look for nothing. What waits
otherwise (threading.Event, processes) waits in real time.
"""
import threading
import time
from contextlib import contextmanager
from unittest import mock

LOOK_US = 1
TURN_S = 1e-4                   # of real time in each sleep: threads that watch get their turn


class Clock:
    """Microseconds, told to the fake NVML at each change."""

    def __init__(self, fake):
        self.us, self.fake, self.owner, self.rest = 10**9, fake, threading.get_ident(), time.sleep
        fake.clock(self.us)

    def _on(self, us: int) -> None:
        self.us += us
        self.fake.clock(self.us)

    def now(self) -> float:
        if threading.get_ident() == self.owner:
            self._on(LOOK_US)
        return self.us / 1e6

    def sleep(self, seconds: float) -> None:
        if threading.get_ident() == self.owner:
            self._on(round(1e6 * seconds))
            self.rest(TURN_S)
        else:
            self.rest(seconds)


@contextmanager
def virtual_time(fake):
    """time.perf_counter, time.monotonic and time.sleep of Python, and all times of a loaded fake NVML."""
    clock = Clock(fake)
    try:
        with mock.patch.multiple(time, perf_counter=clock.now, monotonic=clock.now, sleep=clock.sleep):
            yield clock
    finally:
        fake.clock(0)
