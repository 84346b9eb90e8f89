"""Runs in a folder of another machine or a bucket (any fsspec URL): a local copy, mirrored while it grows.

<url>/<study>/<run_id>/ holds the files of a run directory, but for the journal: object stores cannot append, so it lies
there in pieces, readings/<first byte>.jsonl, which joined are readings.jsonl.
"""
from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

from kvlab.folders import cache_folder
from kvlab.record.export import StoreError, atomic_file, atomic_write
from kvlab.record.held import LOCK, OWNER, read_owner

JOURNAL, PIECES, HERE = "readings.jsonl", "readings", "remote.json"
EVERY_S = 2.0                   # at least, between two looks at what is new: a bucket takes some 50 ms for each file
SHARE = 20                      # and so many times as long as the last look took
_OWN = {LOCK, OWNER, HERE, JOURNAL}                             # what is not copied as it is
_LOG = "worker.log"


def is_url(place: Path | str) -> TypeGuard[str]:
    """Whether a place is an fsspec URL such as s3://bucket/runs, and not a path."""
    return isinstance(place, str) and "://" in place


def local_place(url: str) -> Path:
    """Where the copy of the run at <parent>/<study>/<run_id> lies on this machine, in kvlab's cache folder."""
    parent, study, run_id = url.rstrip("/").rsplit("/", 2)
    digest = hashlib.sha256(parent.encode()).hexdigest()[:16]
    return cache_folder("remote", digest, study, run_id)


class Mirror:
    """What was written to a run's local copy, on its way to the URL."""

    def __init__(self, path: Path, url: str, token: str):
        self.path, self.url, self.token = path, url.rstrip("/"), token
        self.fs, self.root = opened(self.url)
        self.taken = False
        self._sent = 0                                          # bytes of the journal that are there
        self._copied: dict[str, tuple[int, int]] = {}           # name -> (size, time of change) of files that are
        self._next = float("-inf")                              # when to look again at what is new

    @classmethod
    def of(cls, path: Path) -> Mirror | None:
        """The mirror of a run directory; None where it is no copy of another place."""
        try:
            known = json.loads((path / HERE).read_bytes())
            return cls(path, str(known["url"]), str(known["token"]))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path / HERE} is damaged; delete {path} and give the URL again") from None

    def take(self) -> None:
        """Mark the run as written from here; StoreError where another machine's mark is on it."""
        with _explained(self.url):
            found = _json(self.fs, f"{self.root}/{OWNER}")
            if found and found.get("token") != self.token:
                raise StoreError(errno.EBUSY, f"{self.url} is marked as being written from another machine since "
                                              f"{found.get('since')}; if nothing writes to it any more, delete its "
                                              f"{OWNER} and go on with --resume")
            self._put(OWNER, json.dumps({
                "since": read_owner(self.path).since, "token": self.token}).encode())
            files = dict(_files(self.fs, self.root))
            if not _begins_with(self.path / JOURNAL, self.fs, self.root, files):
                raise StoreError(errno.ESTALE, f"{self.url} went on without its copy {self.path}: give the URL, and "
                                               "the copy is brought up to date")
            self._sent = sum(size for name, size in files.items() if _is_piece(name))
            self._copied = {name: (size, 0) for name, size in files.items() if not _is_piece(name)}
            self.taken = True

    def restart(self) -> None:
        """Take the pieces away, since the journal was written anew without what was damaged in it."""
        with _explained(self.url):
            for name, _ in _files(self.fs, self.root):
                if _is_piece(name):
                    self.fs.rm_file(f"{self.root}/{name}")
            self._sent = 0

    def send(self, now: bool = False) -> None:
        """Copy what is new, files before the rows that name them; unless `now`, only every few seconds.

        What fails is said and tried again; with `now` StoreError says where the run is kept meanwhile.
        """
        begun = time.monotonic()
        if not now and begun < self._next:
            return
        try:
            with _explained(self.url):
                self._send(but=() if now else (_LOG,))          # it changes with each case
        except StoreError as error:
            if now:
                raise StoreError(error.errno, f"{error}; all is kept at {self.path}: complete the copy with --resume "
                                              "and that folder") from None
            print(f"kvlab: {error}; tried again later", file=sys.stderr)
        self._next = time.monotonic() + max(EVERY_S, SHARE * (time.monotonic() - begun))

    def _send(self, but: tuple[str, ...]) -> None:
        end = (self.path / JOURNAL).stat().st_size
        for file in sorted(self.path.rglob("*")):
            name = file.relative_to(self.path).as_posix()
            if name in (*_OWN, *but) or name.endswith(".tmp") or name.startswith("slurm/"):
                continue                                        # what jobs and runner say to each other is theirs
            if not file.is_file() or file.is_symlink():
                continue
            state = (file.stat().st_size, file.stat().st_mtime_ns)
            if self._copied.get(name) != state:
                with contextlib.suppress(FileNotFoundError):    # a temporary one that is gone by now
                    self._put(name, file.read_bytes())
                    self._copied[name] = state
        if end > self._sent:
            with (self.path / JOURNAL).open("rb") as journal:
                journal.seek(self._sent)
                self._put(f"{PIECES}/{self._sent:015d}.jsonl", journal.read(end - self._sent))
            self._sent = end

    def _put(self, name: str, data: bytes) -> None:
        place = f"{self.root}/{name}"
        self.fs.makedirs(place.rpartition("/")[0], exist_ok=True)       # where there are folders at all
        self.fs.pipe_file(place, data)

    def drop(self, name: str) -> None:
        """Take a file away that is out of date."""
        if self._copied.pop(name, None):
            with _explained(self.url):
                self.fs.rm_file(f"{self.root}/{name}")

    def let_go(self) -> None:
        """Copy the rest and take the mark away."""
        self.send(now=True)
        with _explained(self.url):
            self.fs.rm_file(f"{self.root}/{OWNER}")
        self.taken = False


def fetched(url: str) -> Path:
    """The local copy of the run at a URL, brought up to date; a copy that is further than the URL is left as it is."""
    url = url.rstrip("/")
    fs, root = opened(url)
    place = local_place(url)
    with _explained(url):
        files = dict(_files(fs, root))
        if "manifest.json" not in files:
            raise StoreError(errno.ENOENT, f"{url} is no run: it holds no manifest.json; give the URL of a run, "
                                           "<out>/<study>/<run_id>")
        place.mkdir(parents=True, exist_ok=True)
        pieces = sorted(filter(_is_piece, files))
        journal = place / JOURNAL
        if not journal.exists() or not _begins_with(journal, fs, root, files):
            with atomic_file(journal) as file:
                for name in pieces:
                    file.write(fs.cat_file(f"{root}/{name}"))
            (place / "readings.parquet").unlink(missing_ok=True)
        for name, size in files.items():
            local = place / name
            if name in _OWN or name in pieces or local.exists() and local.stat().st_size == size:
                continue
            local.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(local, fs.cat_file(f"{root}/{name}"))
        if not (place / HERE).exists():
            mark(place, url)
    return place


def mark(path: Path, url: str) -> None:
    """Say in a run directory that it is the copy of a run at a URL."""
    atomic_write(path / HERE, json.dumps({"url": url, "token": secrets.token_hex(8)}).encode())


def _is_piece(name: str) -> bool:
    return name.startswith(f"{PIECES}/") and name.endswith(".jsonl")


def _begins_with(journal: Path, fs: Any, root: str, files: dict[str, int]) -> bool:
    """Whether a journal begins with the pieces at a URL, judged by their last: each says where it begins."""
    pieces = sorted(filter(_is_piece, files))
    if not pieces:
        return True
    last = pieces[-1]
    with journal.open("rb") as file:
        file.seek(sum(files[name] for name in pieces[:-1]))
        return file.read(files[last]) == fs.cat_file(f"{root}/{last}")


def opened(url: str) -> tuple[Any, str]:
    """(file system, path in it) of a URL; ValueError where its protocol is not known or not installed."""
    import fsspec
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{url} cannot be opened: {error}; allowed are the URLs of fsspec, such as s3://bucket/runs "
                         "(pip install s3fs), gs:// (gcsfs), sftp:// (paramiko) or file://") from None
    return fs, root.rstrip("/")


def _files(fs: Any, root: str) -> Iterator[tuple[str, int]]:
    """(name below the run, bytes) of all its files; ValueError for a name that would leave it."""
    fs.invalidate_cache()
    for path, found in sorted(fs.find(root, detail=True).items()):
        name = path[len(root):].lstrip("/")
        if not path.startswith(root) or ".." in PurePosixPath(name).parts or "\\" in name or not name:
            raise ValueError(f"{path!r} is not a file of the run at {root!r}; it is not opened")
        yield name, int(found["size"])


def _json(fs: Any, path: str) -> dict[str, Any]:
    try:
        found = json.loads(fs.cat_file(path))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def _explained(url: str) -> Iterator[None]:
    """Whatever a file system of fsspec raises about a place, in one sentence: each has errors of its own."""
    try:
        yield
    except (StoreError, ValueError):
        raise
    except Exception as error:
        what = str(error).strip().partition("\n")[0] or type(error).__name__
        number = getattr(error, "errno", None) or errno.EIO
        raise StoreError(number, f"{url} cannot be read or written: {what}") from None
