"""Who writes to a run directory: one process at a time, known by its number and since when."""
from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvlab.record.environment import opened_file
from kvlab.record.export import StoreError, atomic_write, explained

if TYPE_CHECKING:
    from filelock import BaseFileLock

LOCK, OWNER = ".lock", "owner.json"
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_PATIENCE_S = 2.0               # for one that only looks whether somebody has it, or is just going


class Owner(NamedTuple):
    """The process that holds a run; pid 0 where it has not said so yet. since: as ISO 8601 in UTC."""
    pid: int
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} since {self.since} ({self.age()})" if self.pid else "another process"

    def age(self) -> str:
        """How long it has had the run, in words; a clock that was set back gives no negative age."""
        minutes = max(0.0, (datetime.now(UTC) - datetime.fromisoformat(self.since)).total_seconds()) / 60
        return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"


class Held:
    """The lock of a run directory, which the system lets go when its process ends, however that happens."""

    def __init__(self, run: Path):
        self.run = run
        self._lock: BaseFileLock | None = None

    @property
    def taken(self) -> bool:
        """Whether this object holds the run."""
        return self._lock is not None

    def take(self) -> None:
        """Take the run, if it is not taken already by this object; StoreError says who has it."""
        if self.taken:
            return
        from filelock import FileLock, Timeout
        lock = FileLock(self.run / LOCK)
        with explained(self.run):
            try:
                lock.acquire(timeout=_PATIENCE_S, poll_interval=0.05)
            except NotImplementedError:
                raise StoreError(errno.ENOSYS, f"{self.run} lies on a file system without locks, so that two processes "
                                               "could write to it; choose another folder") from None
            except Timeout:
                owner = read_owner(self.run)
                raise StoreError(errno.EBUSY, f"{self.run} is being written by {owner}; wait for it to end, or stop it "
                                              "(kill), and go on with --resume then") from None
            try:
                now = datetime.now(UTC).strftime(_TIME)
                atomic_write(self.run / OWNER, json.dumps({"pid": os.getpid(), "since": now}).encode())
            except BaseException:
                lock.release()
                raise
        self._lock = lock

    def let_go(self) -> None:
        """Let the run go; nothing happens if it is not held."""
        if self._lock is not None:
            with contextlib.suppress(OSError):              # a folder that cannot be written any more: the lock decides
                (self.run / OWNER).unlink(missing_ok=True)
            self._lock.release()
            self._lock = None


def held_by(run: Path) -> Owner | None:
    """The process that writes to the run at this moment; None where there is none."""
    from filelock import FileLock, Timeout
    if not (run / LOCK).exists():
        return None
    try:
        with FileLock(run / LOCK, timeout=0):
            return None
    except Timeout:
        return read_owner(run)
    except (OSError, NotImplementedError):                  # a folder that only its owner may write to
        return read_owner(run) if _looks_locked(run) else None


def _looks_locked(run: Path) -> bool:
    """Whether somebody holds a run, as far as one sees who may only read it."""
    try:
        import fcntl
        with opened_file(run / LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):                          # nothing to see: what the owner said must do
        return (run / OWNER).exists()
    return False


def read_owner(run: Path) -> Owner:
    """Who said last that it holds the run."""
    for _ in range(2):
        try:
            with opened_file(run / OWNER) as file:
                found = json.load(file)
            since = datetime.fromisoformat(found["since"]).astimezone(UTC).strftime(_TIME)
            return Owner(int(found["pid"]), since)
        except (OSError, ValueError, TypeError, KeyError, ArithmeticError, RecursionError):
            time.sleep(0.05)                                # it has the lock, and writes this next
    return Owner(0, "")
