"""One line of the diagnosis, and what all its checks share: one deadline, and answers that are found once."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from time import monotonic

STATUSES = ("ok", "note", "problem")
PATIENCE_S = 6                          # for all child processes together; the whole diagnosis takes less than 8 s
ROOT = Path("/")                        # of /proc and /sys; tests look elsewhere


@dataclass(frozen=True)
class Check:
    """What was found about one thing. note: worth knowing, nothing is broken; problem: something kvlab needs is.

    next_step: what to do about it, or what a better source would need; may be empty.
    """
    group: str
    name: str
    status: str
    found: str
    next_step: str = ""

    def __post_init__(self):
        if self.status not in STATUSES:
            raise ValueError(f"{self.name}: status {self.status!r}; allowed: {', '.join(STATUSES)}")


class Once:
    """A function's answer, found once for all checks: those that ask at the same time wait for the first."""

    def __init__(self, function: Callable[[], dict]):
        self._lock, self._found = Lock(), cache(function)

    def __call__(self) -> dict:
        with self._lock:
            return self._found()

    def forget(self) -> None:
        self._found.cache_clear()


class Deadline:
    """When all that was asked must have answered: several that hang take no longer than one."""

    def __init__(self):
        self._until: float | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        self._until = monotonic() + PATIENCE_S
        try:
            yield
        finally:
            self._until = None

    def left(self) -> float:
        """Seconds; all of them where no diagnosis runs."""
        return PATIENCE_S if self._until is None else max(0.01, self._until - monotonic())


deadline = Deadline()


def read(path: str) -> str:
    """A file below ROOT; "" where there is none."""
    try:
        return (ROOT / path).read_text(errors="replace")
    except OSError:
        return ""
