"""One GPU for one measurement at a time: a lock between kvlab's processes, and a look for the processes of others."""
from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvlab.folders import cache_folder
from kvlab.probes._nvml import Gpu, Unavailable, gpu

HELD = "KVLAB_LOCKED"                   # tells child processes (ncu's) that their GPU is locked for them
UNLOCKED = "the GPU is not locked against another kvlab: "


def lock_file(uuid: str) -> Path:
    """One per GPU; the name does not tell which GPU it is. torch names a GPU without NVML's prefix."""
    return cache_folder("locks", f"gpu-{hashlib.sha256(uuid.removeprefix('GPU-').encode()).hexdigest()[:16]}.lock")


@contextmanager
def guarded(device: str, tell: Callable[[str], None]) -> Iterator[Callable[[], str]]:
    """`exclusive`, and a look for processes of others at the beginning; a CPU needs neither.

    Yields a function: it looks again and says what the note of every measured reading must say, "" where nothing.
    """
    if not device.startswith("cuda"):
        yield lambda: ""
        return
    import torch
    with exclusive(device, tell) as unlocked:
        try:
            torch.zeros(1, device=device)                            # from here on NVML counts this process, too
        except Exception:
            pass                                                     # a full or broken GPU: its trials will say so
        before = contended(device)

        def beside() -> str:
            looks = before, contended(device)
            n = max(count or 0 for count, _ in looks)
            unknown = next((why for count, why in looks if count is None), "")
            words = f"contended: {n} other {'process' if n == 1 else 'processes'} on the GPU" if n else (
                f"contended: unknown ({unknown})" if unknown else "")
            return "; ".join(filter(None, [words, unlocked]))
        yield beside


@contextmanager
def exclusive(device: str, tell: Callable[[str], None]) -> Iterator[str]:
    """The GPU behind torch's device for this process alone, among kvlab's processes of this user.

    Waits while another holds it, and says so about once a second. Yields why it could not be locked, "" where it is:
    a folder that cannot be written keeps nobody from measuring. The lock ends with the process, however it ends.
    """
    import torch
    from filelock import FileLock, Timeout
    try:
        path = lock_file(str(torch.cuda.get_device_properties(device).uuid))
    except Exception as error:                                       # a GPU that torch cannot open, or of no UUID
        yield f"{UNLOCKED}{type(error).__name__}: {error}"
        return
    if path.name in os.environ.get(HELD, "").split(":"):             # by this process, or by the one that started it
        yield ""
        return
    lock, waited, why = FileLock(path), 0, ""
    while not lock.is_locked and not why:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=1 if waited else 0)
        except Timeout:
            tell(f"waiting for the GPU ({waited} s): another kvlab measures on it")
            waited += 1
        except (OSError, NotImplementedError) as error:              # no such folder, or a file system without locks
            why = f"{UNLOCKED}{getattr(error, 'strerror', '') or error}"
    before = os.environ.get(HELD)
    try:
        if not why:
            os.environ[HELD] = ":".join(filter(None, [before, path.name]))
        yield why
    finally:
        if before is None:
            os.environ.pop(HELD, None)
        else:
            os.environ[HELD] = before
        lock.release()


def locked_now(uuid: str) -> bool:
    """Whether some kvlab of this user measures on that GPU at this moment."""
    from filelock import FileLock, Timeout
    path = lock_file(uuid)
    if not path.exists():
        return False
    try:
        with FileLock(path, timeout=0):
            return False
    except Timeout:
        return True
    except (OSError, NotImplementedError):
        return False


def others(one: Gpu, present: bool = True) -> tuple[int | None, str]:
    """(processes on the GPU that are none of ours, in words); None where NVML cannot see any.

    present: this process works on the GPU. Ours are this process, its children (ncu's) and those that started it. In a
    container NVML tells the host's process numbers, so that ours may bear another number: then one is taken for ours.
    """
    try:
        listed = {process["pid"] for process in one.ask("DeviceGetComputeRunningProcesses")}
    except Unavailable as why:
        return None, str(why)
    if not listed and present:
        return None, "NVML lists no process on the GPU, not even this one: it cannot see them from here"
    foreign = listed - _family()
    if present and foreign == listed:
        return len(foreign) - 1, "this process is not listed by its own number, as in a container: one is taken for it"
    return len(foreign), ""


def _family() -> set[int]:
    import psutil
    try:
        me = psutil.Process()
        return {os.getpid(), *(p.pid for p in me.parents()), *(p.pid for p in me.children(recursive=True))}
    except psutil.Error:
        return {os.getpid()}


def contended(device: str) -> tuple[int | None, str]:
    """(how many processes of others are on the GPU now, ""), or (None, why nobody can tell, in a few words)."""
    try:
        with gpu(device) as one:
            count, words = others(one)
    except Unavailable as why:
        count, words = None, str(why)
    return count, "" if count is not None else words.partition(";")[0].partition(": ")[0]
