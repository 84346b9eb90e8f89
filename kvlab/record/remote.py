"""Runs in a folder of another machine or a bucket (any fsspec URL): a local copy, mirrored while it grows.

<url>/<study>/<run_id>/ holds the files of a run directory, but for the journal: object stores cannot append, so it lies
there in pieces, readings/<first byte>.jsonl, which joined are readings.jsonl. The last piece is written anew while it
is small, so that there are few however long the run takes.
"""
from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import secrets
import sys
import time
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from kvlab.folders import cache_folder
from kvlab.record._places import (
    FILES,
    PIECES,
    begins_with,
    copied,
    explained_at,
    files_at,
    is_piece,
    joined,
    local_place,
    opened,
    read_json,
)
from kvlab.record.environment import opened_file
from kvlab.record.export import StoreError, atomic_file, atomic_write
from kvlab.record.held import LOCK, OWNER, Held, read_owner
from kvlab.units import MiB

JOURNAL, HERE = "readings.jsonl", "remote.json"
EVERY_S = 2.0                   # at least, between two looks at what is new: a bucket takes some 50 ms for each file
SHARE = 20                      # and so many times as long as the last look took
PIECE = MiB                     # of the journal, at most
_FEW = ("manifest.json", "workers.json")                        # may change and keep their size
_OWN = {LOCK, OWNER, HERE, JOURNAL}                             # what is not copied as it is
_LOG = "worker.log"


class Mirror:
    """What was written to a run's local copy, on its way to the URL."""

    def __init__(self, path: Path, url: str, token: str):
        self.path, self.url, self.token = path, url.rstrip("/"), token
        self.taken = False
        self._sent = self._piece = 0                            # bytes of the journal there; begin of the last piece
        self._copied: dict[str, tuple[int, int]] = {}           # name -> (size, time of change) of files that are
        self._next = float("-inf")                              # when to look again at what is new

    @classmethod
    def of(cls, path: Path) -> Mirror | None:
        """The mirror of a run directory; None where it is no copy of another place."""
        try:
            with opened_file(path / HERE) as file:
                known = json.load(file)
            local_place(known["url"])
            return cls(path, known["url"], str(known["token"]))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(error.errno, f"{path / HERE} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(f"{path / HERE} is damaged; delete it, and give the URL again") from None

    @cached_property
    def fs(self) -> Any:
        """The file system of the URL, connected to when the run is written to: reading a copy asks nobody."""
        return opened(self.url)[0]

    @cached_property
    def root(self) -> str:
        """The run's path in it."""
        return opened(self.url)[1]

    def take(self) -> None:
        """Mark the run as written from here, if it is not; StoreError where another machine's mark is on it."""
        if self.taken:
            return
        if self.path.resolve() != local_place(self.url).resolve():      # copied, or a stranger's, who names a place
            raise StoreError(errno.EXDEV, f"{self.path} is a copy of the run at {self.url}: give the URL to go on with "
                                          f"that, or delete the copy's {HERE} to go on with it apart")
        with explained_at(self.url):
            self._refuse_others()
            files = dict(files_at(self.fs, self.root))
            if not begins_with(self.path / JOURNAL, self.fs, self.root, files):
                raise StoreError(errno.ESTALE, f"{self.url} went on without its copy {self.path}: give the URL, and "
                                               "the copy is brought up to date")
            self._mark()
            self._refuse_others()                               # two machines may have marked it at once
            self._sent = self._piece = sum(size for name, size in files.items() if is_piece(name))
            if not joined(files):                              # one in between is gone
                self.restart()
            self._copied = {name: (size, 0) for name, size in files.items() if not is_piece(name)}
            self.taken = True

    def _refuse_others(self) -> None:
        found = read_json(self.fs, f"{self.root}/{OWNER}")
        if found and found.get("token") != self.token:
            raise StoreError(errno.EBUSY, f"{self.url} is marked as being written from another machine since "
                                          f"{found.get('since')}; if nothing writes to it any more, delete its {OWNER} "
                                          "and go on with --resume")

    def _mark(self) -> None:
        self._put(OWNER, json.dumps({"since": read_owner(self.path).since, "token": self.token}).encode())

    def restart(self) -> None:
        """Take the pieces away, since the journal was written anew without what was damaged in it."""
        with explained_at(self.url):
            for name, _ in files_at(self.fs, self.root):
                if is_piece(name):
                    self.fs.rm_file(f"{self.root}/{name}")
            self._sent = self._piece = 0

    def send(self, now: bool = False) -> None:
        """Copy what is new, files before the rows that name them; unless `now`, only every few seconds.

        What fails is said and tried again; with `now` StoreError says where the run is kept meanwhile.
        """
        begun = time.monotonic()
        if not now and begun < self._next:
            return
        try:
            with explained_at(self.url):
                self._send(but=() if now else (_LOG,))          # it changes with each case
        except StoreError as error:
            if error.errno == errno.ESTALE:
                raise
            if now:
                raise StoreError(error.errno, f"{error}; all is kept at {self.path}: complete the copy with --resume "
                                              "and that folder") from None
            print(f"kvlab: {error}; tried again later", file=sys.stderr)
        self._next = time.monotonic() + max(EVERY_S, SHARE * (time.monotonic() - begun))

    def _send(self, but: tuple[str, ...]) -> None:
        found = read_json(self.fs, f"{self.root}/{OWNER}")
        if found and found.get("token") != self.token:
            raise StoreError(errno.ESTALE, f"another machine has gone on with {self.url}, since its {OWNER} was "
                                           f"deleted; what was committed here is kept at {self.path}")
        if not found:
            self._mark()
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
                    self.fs.put_file(str(file), self._made(name))
                    self._copied[name] = state
        with (self.path / JOURNAL).open("rb") as journal:
            while self._sent < end:
                if self._sent - self._piece >= PIECE:
                    self._piece = self._sent
                journal.seek(self._piece)
                data = journal.read(min(end - self._piece, PIECE))
                self._put(f"{PIECES}/{self._piece:015d}.jsonl", data)
                self._sent = self._piece + len(data)

    def _made(self, name: str) -> str:
        """The place of a file, with the folder for it where there are folders at all."""
        place = f"{self.root}/{name}"
        self.fs.makedirs(place.rpartition("/")[0], exist_ok=True)
        return place

    def _put(self, name: str, data: bytes) -> None:
        self.fs.pipe_file(self._made(name), data)

    def drop(self, name: str) -> None:
        """Take a file away that is out of date."""
        if self._copied.pop(name, None):
            with explained_at(self.url), contextlib.suppress(FileNotFoundError):
                self.fs.rm_file(f"{self.root}/{name}")

    def let_go(self) -> None:
        """Copy the rest and take the mark away."""
        self.send(now=True)
        with explained_at(self.url):
            self.fs.rm_file(f"{self.root}/{OWNER}")
        self.taken = False


def fetched(url: str) -> Path:
    """The local copy of the run, or of the one file of results, at a URL, brought up to date.

    Left as it is: a copy that is further than the URL, and one that a process of this machine is writing.
    """
    url = url.rstrip("/")
    if PurePosixPath(url).suffix in FILES:
        return _fetched_file(url)
    place = local_place(url)
    fs, root = opened(url)
    with explained_at(url):
        files = dict(files_at(fs, root))
        if "manifest.json" not in files:
            raise StoreError(errno.ENOENT, f"{url} is no run: it holds no manifest.json; give the URL of a run, "
                                           "<out>/<study>/<run_id>")
        place.mkdir(parents=True, exist_ok=True)
        held = Held(place)
        try:
            held.take()
        except StoreError as error:
            if error.errno == errno.EBUSY and (place / "manifest.json").exists():
                return place
            raise
        try:
            _bring(place, fs, root, files)
            if not (place / HERE).exists():
                mark(place, url)
        finally:
            held.let_go()
    return place


def _fetched_file(url: str) -> Path:
    fs, path = opened(url)
    place = cache_folder("remote", hashlib.sha256(url.encode()).hexdigest()[:16], PurePosixPath(url).name)
    with explained_at(url):
        place.parent.mkdir(parents=True, exist_ok=True)
        copied(fs, path, place)
    return place


def _bring(place: Path, fs: Any, root: str, files: dict[str, int]) -> None:
    """Copy what is not there, or not the same, from a URL."""
    pieces = sorted(filter(is_piece, files))
    journal = place / JOURNAL
    if not journal.exists() or not begins_with(journal, fs, root, files):
        with atomic_file(journal) as file:
            for name in pieces:
                file.write(fs.cat_file(f"{root}/{name}"))
        (place / "readings.parquet").unlink(missing_ok=True)
    for name, size in files.items():
        local = place / name
        same = name not in _FEW and local.exists() and local.stat().st_size == size
        if name not in _OWN and name not in pieces and not same:
            local.parent.mkdir(parents=True, exist_ok=True)
            copied(fs, f"{root}/{name}", local)


def mark(path: Path, url: str) -> None:
    """Say in a run directory that it is the copy of a run at a URL."""
    atomic_write(path / HERE, json.dumps({"url": url, "token": secrets.token_hex(8)}).encode())
