"""One line of the diagnosis, and how a command or a child process is asked without being waited for endlessly."""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock

STATUSES = ("ok", "note", "problem")
PATIENCE_S = 6                          # for each child process; the whole diagnosis is to take less than 8 s
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


def read(path: str) -> str:
    """A file below ROOT; "" where there is none."""
    try:
        return (ROOT / path).read_text(errors="replace")
    except OSError:
        return ""


def output(*command: str, stderr: bool = False) -> str:
    """What a command prints. Raises OSError or subprocess.SubprocessError where it fails or takes too long."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PATIENCE_S, check=True,
                          stdin=subprocess.DEVNULL)
    return (done.stdout + (done.stderr if stderr else "")).strip()


def python(code: str) -> tuple[str, str]:
    """(what a child with this process's path prints, "" or how it ended): a crash costs the child alone."""
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    try:
        done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, errors="replace",
                              timeout=PATIENCE_S, stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path})
    except subprocess.TimeoutExpired:
        return "", f"it did not answer within {PATIENCE_S} s"
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        return done.stdout, f"{how}{': ' + last[0] if last else ''}"
    return done.stdout, ""
