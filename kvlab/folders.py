"""Where kvlab keeps what it can make again: one folder per user; and how something gets there whole or not at all."""
from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PASSING = "writing-"
LEFT_S = 3600.0                 # after so long without a change, what is half written was left by a run that was killed


def cache_folder(*parts: str) -> Path:
    """$KVLAB_CACHE, else $XDG_CACHE_HOME/kvlab, else ~/.cache/kvlab, and `parts` below it. It need not be there yet.

    Everything in it may be deleted: kvlab makes it again, or says how. Worker processes inherit the variables.
    """
    if own := os.environ.get("KVLAB_CACHE"):
        return Path(own).expanduser().joinpath(*parts)
    above = os.environ.get("XDG_CACHE_HOME")
    return (Path(above) if above else Path.home() / ".cache").joinpath("kvlab", *parts)


@contextmanager
def passing(folder: Path) -> Iterator[Path]:
    """An empty folder of a passing name inside `folder`, gone afterwards: for what `settle` then moves to its place.

    What killed runs have left of such folders an hour and more ago is removed. OSError where it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{PASSING}*"):
        if time.time() - _last_change(left) > LEFT_S:
            remove(left)
    made = Path(tempfile.mkdtemp(dir=folder, prefix=PASSING))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def settle(made: Path, place: Path) -> None:
    """Move a finished file or folder to its place in one step, once its bytes are on the disk.

    A file replaces another. Of a folder the first one stays: another process was quicker with the same content.
    OSError where that fails, also because something stands there that is no folder.
    """
    for file in [made] if made.is_file() else sorted(made.rglob("*")):
        if file.is_file():
            with file.open("r+b") as written:
                os.fsync(written.fileno())
    if made.is_file():
        made.replace(place)
        return
    try:
        made.rename(place)
    except OSError:
        if not place.is_dir():
            raise


def remove(path: Path) -> None:
    """Delete a file, a link or a folder with all that is in it, as far as possible; no error where that fails."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        path.unlink(missing_ok=True)
    except OSError:
        pass


def _last_change(folder: Path) -> float:
    """When anything in the folder was last written, in seconds since 1970; now where another run removes it."""
    try:
        return max(path.lstat().st_mtime for path in [folder, *folder.rglob("*")])
    except OSError:
        return time.time()
