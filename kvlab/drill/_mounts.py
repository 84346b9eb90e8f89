"""Folders whose file system is full or read-only: real ones where this process may mount, else what comes near."""
from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

KiB = 1024


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """A file system of so many bytes in the folder, in main memory."""
    _mount("-t", "tmpfs", "-o", f"size={size}", "kvlab-drill", str(folder))
    try:
        yield
    finally:
        _unmount(folder)


def enlarge(folder: Path, size: int) -> None:
    """Give the small disk another size."""
    _mount("-o", f"remount,size={size}", str(folder))


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nothing can be opened for writing below the folder any more; what is open stays so."""
    if may_mount():
        # another mount over it: the file system itself cannot turn read-only while a log in it is open
        _mount("--bind", str(folder), str(folder))
        try:
            while not _mounted("-o", "remount,bind,ro", str(folder)):
                _unmount(folder)                            # something was opened through it in between
                _mount("--bind", str(folder), str(folder))
            yield
        finally:
            _unmount(folder)
        return
    inside = [folder, *(path for path in folder.rglob("*") if not path.is_symlink())]
    modes = {path: path.stat().st_mode for path in inside}
    for path, mode in modes.items():
        path.chmod(mode & ~0o222)
    try:
        yield
    finally:
        for path, mode in modes.items():
            if path.exists():
                path.chmod(mode)


@cache
def may_mount() -> bool:
    """Whether this process may mount: root outside of most containers."""
    import tempfile
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return False
    with tempfile.TemporaryDirectory() as folder:
        if not _mounted("-t", "tmpfs", "-o", "size=64k", "kvlab-drill", folder):
            return False
        _unmount(Path(folder))
    return True


def _mounted(*words: str) -> bool:
    try:
        return subprocess.run(["mount", *words], capture_output=True).returncode == 0
    except OSError:
        return False


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, capture_output=True)


def _unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)
