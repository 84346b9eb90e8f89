"""Places that are URLs of fsspec: what is there, in one sentence where that cannot be said, and a journal in pieces."""
from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, TypeGuard

from kvlab.folders import cache_folder
from kvlab.hushed import hushed
from kvlab.record.export import StoreError, atomic_file

FILES = (".parquet", ".csv", ".jsonl")                          # of results, which may be at a URL alone
PIECES = "readings"                                             # the folder of a journal's pieces


def is_url(place: Path | str) -> TypeGuard[str]:
    """Whether a place is an fsspec URL such as s3://bucket/runs, and not a path."""
    return isinstance(place, str) and "://" in place


def local_place(url: str) -> Path:
    """Where the copy of the run at <parent>/<study>/<run_id> lies on this machine, in kvlab's cache folder."""
    parent, *last = url.rstrip("/").rsplit("/", 2)
    if len(last) != 2 or {*last} & {"", ".", ".."} or ":" in "".join(last):
        raise ValueError(f"{url} is no URL of a run: give <out>/<study>/<run_id>")
    study, run_id = last
    digest = hashlib.sha256(parent.encode()).hexdigest()[:16]
    return cache_folder("remote", digest, study, run_id)


def is_piece(name: str) -> bool:
    return re.fullmatch(rf"{PIECES}/\d{{15}}\.jsonl", name, re.ASCII) is not None


def joined(files: dict[str, int]) -> bool:
    """Whether each piece begins where the one before it ends."""
    end = 0
    for name in sorted(filter(is_piece, files)):
        if name != f"{PIECES}/{end:015d}.jsonl":
            return False
        end += files[name]
    return True


def begins_with(journal: Path, fs: Any, root: str, files: dict[str, int]) -> bool:
    """Whether a journal begins with the pieces at a URL, judged by their last, where its name says that it begins.

    (Or, where a piece before it is gone, by where it begins in what is left.)
    """
    pieces = sorted(filter(is_piece, files))
    if not pieces:
        return True
    last = pieces[-1]
    expected = fs.cat_file(f"{root}/{last}")
    with journal.open("rb") as file:
        for begin in {int(PurePosixPath(last).stem), sum(files[name] for name in pieces[:-1])}:
            file.seek(begin)
            if file.read(len(expected)) == expected:
                return True
    return False


def opened(url: str) -> tuple[Any, str]:
    """(file system, path in it) of a URL; ValueError where its protocol is not known or not installed."""
    import fsspec
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{hushed(url)} cannot be opened: {error}; allowed are the URLs of fsspec, such as "
                         "s3://bucket/runs (pip install s3fs), gs:// (gcsfs), sftp:// (paramiko) or file://") from None
    return fs, root.rstrip("/")


def files_at(fs: Any, root: str) -> Iterator[tuple[str, int]]:
    """(name below the run, bytes) of all its files; ValueError for a name that would leave it."""
    fs.invalidate_cache()
    for path, found in sorted(fs.find(root, detail=True).items()):
        name = path[len(root):].lstrip("/")
        if not path.startswith(root) or ".." in PurePosixPath(name).parts or "\\" in name or not name \
                or PureWindowsPath(name).drive:
            raise ValueError(f"{path!r} is not a file of the run at {root!r}; it is not opened")
        yield name, int(found["size"])


def read_json(fs: Any, path: str) -> dict[str, Any]:
    try:
        found = json.loads(fs.cat_file(path))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def explained_at(url: str) -> Iterator[None]:
    """Whatever a file system of fsspec raises about a place, in one sentence: each has errors of its own.

    A password in the URL is left out.
    """
    try:
        yield
    except StoreError as error:
        raise StoreError(error.errno, hushed(str(error))) from None
    except ValueError:
        raise
    except Exception as error:
        what = str(error).strip().partition("\n")[0] or type(error).__name__
        number = getattr(error, "errno", None) or errno.EIO
        raise StoreError(number, hushed(f"{url} cannot be read or written: {what}")) from None


def copied(fs: Any, path: str, place: Path) -> None:
    with fs.open(path, "rb") as there, atomic_file(place) as here:
        shutil.copyfileobj(there, here)
