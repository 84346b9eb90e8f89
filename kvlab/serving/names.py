"""Names that serving engines know: environment variables, flags, keyword arguments and metrics, by version.

data/engine_names/<engine>.csv holds one table per engine. vLLM's, SGLang's and llama.cpp's are extracted from releases
by tools/engine_names.py; TGI's, Triton's and TensorRT-LLM's were copied from the documents that each row names.
A table says which releases were read (rows of kind `release`); `since` and `until` are the first and the last of
those that have a name, blank at either end of what was read.
"""
from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from heapq import nlargest

from kvlab.catalog import data_dir
from kvlab.registry import no_such

KINDS = ("env", "flag", "kwarg", "metric")
NEVER = "never"
SUFFIXES = {"counter": ("", "_total", "_created"), "histogram": ("", "_bucket", "_sum", "_count", "_created"),
            "summary": ("", "_sum", "_count", "_created"), "gauge": ("",),
            "": ("", "_total", "_bucket", "_sum", "_count", "_created")}


@dataclass(frozen=True, slots=True)
class Name:
    """One name of one engine.

    scope: whose it is (a keyword argument's callable; `serve` or `bench` of a flag). type: as the source states it.
    since, until: first and last release read that have it; "" = there from the oldest or to the newest one; an
    `until` of "never" is a name that is often met and that no release has had.
    replaced_by, note: what to use instead, of a name that is gone or going. source: where it was read.
    """
    engine: str
    kind: str
    name: str
    scope: str
    type: str
    since: str
    until: str
    replaced_by: str
    note: str
    source: str

    def exists(self, version: str) -> bool:
        """Whether the release has it; of one that was not read, by its neighbours."""
        return self.until != NEVER and ((not self.since or key(self.since) <= key(version))
                                       and (not self.until or key(version) <= key(self.until)))


def key(version: str) -> tuple[int, ...]:
    """The numbers of a version, for comparing: 0.10.2 is after 0.9.2."""
    return tuple(int(part[:9]) for part in re.findall(r"\d+", version)[:4])    # a tag may have any number of digits


@dataclass(frozen=True)
class Table:
    """All names of one engine. releases: those read, oldest first; the last one is the default to judge against.

    source: where the newest one was read.
    """
    engine: str
    releases: tuple[str, ...]
    source: str
    names: tuple[Name, ...]

    @property
    def newest(self) -> str:
        """The release that the table is about."""
        return self.releases[-1]

    def checked(self, version: str | None) -> str:
        """The version to judge against, newest by default; ValueError outside what was read."""
        if version is None or version == self.newest:
            return self.newest
        if not re.fullmatch(r"[vb]?\d+(\.\d+)*(\.?(post|rc)\d+)?", version):
            raise ValueError(f"{version!r} is no version of {self.engine}; releases read: {', '.join(self.releases)}")
        if len(self.releases) < 2 or not key(self.releases[0]) <= key(version) <= key(self.newest):
            raise ValueError(f"the table of {self.engine} covers {self.releases[0]} to {self.newest}, not {version}; "
                             "leave --version out, or extract that release with tools/engine_names.py")
        return version

    def has(self, kind: str) -> bool:
        """Whether the engine's names of a kind are in the table at all."""
        return kind in _kinds(self.engine)

    def find(self, kind: str, name: str, scopes: Iterable[str] = ()) -> list[Name]:
        """Rows of exactly that name; of those scopes only where scopes are given."""
        wanted = set(scopes)
        return [row for row in _index(self.engine).get((kind, name), ()) if not wanted or row.scope in wanted]

    def known(self, kind: str, version: str, scopes: Iterable[str] = ()) -> list[str]:
        """The names that the version has, sorted."""
        return [name for name, _ in _known(self.engine, kind, version, tuple(scopes))]

    def near(self, kind: str, name: str, version: str, scopes: Iterable[str] = ()) -> str:
        """The most similar name that the version has, or "" if none is similar."""
        return _near(self.engine, kind, name, version, tuple(scopes))


@cache
def tables() -> dict[str, Table]:
    """Every engine's table by name, read once."""
    found = {}
    for path in sorted((data_dir() / "engine_names").glob("*.csv")):
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        releases = {row["name"]: row["source"] for row in rows if row["kind"] == "release"}
        names = tuple(Name(**{column: row[column] for column in Name.__slots__}) for row in rows
                      if row["kind"] in KINDS)
        found[rows[0]["engine"]] = Table(rows[0]["engine"], tuple(releases), [*releases.values()][-1], names)
    return found


def table(engine: str) -> Table:
    """The table of one engine; KeyError with a near match for one that has none."""
    if engine not in tables():
        raise no_such("table of names for engine", engine, tables())
    return tables()[engine]


@cache
def _kinds(engine: str) -> frozenset[str]:
    return frozenset(row.kind for row in table(engine).names)


@lru_cache(maxsize=4096)
def _near(engine: str, kind: str, name: str, version: str, scopes: tuple[str, ...]) -> str:
    """Of the names that share most pairs of letters the most similar one: to compare with all takes 4 ms a name."""
    pairs = _pairs(name[:200])
    sharing = nlargest(10, _known(engine, kind, version, scopes),
                       key=lambda known: len(pairs & known[1]) / max(1, len(pairs) + len(known[1])))
    return next(iter(difflib.get_close_matches(name[:200], [known for known, _ in sharing], 1, cutoff=0.75)), "")


@lru_cache(maxsize=256)
def _known(engine: str, kind: str, version: str, scopes: tuple[str, ...]) -> list[tuple[str, frozenset[str]]]:
    return [(name, _pairs(name)) for name in sorted({
        row.name for row in table(engine).names
        if row.kind == kind and row.exists(version) and (not scopes or row.scope in scopes)})]


def _pairs(name: str) -> frozenset[str]:
    return frozenset(map("".join, zip(name, name[1:], strict=False)))


@cache
def _index(engine: str) -> dict[tuple[str, str], list[Name]]:
    found: dict[tuple[str, str], list[Name]] = {}
    for row in table(engine).names:
        found.setdefault((row.kind, row.name), []).append(row)
    return found


def metric(engine: str, name: str) -> Name | None:
    """The metric that a scraped series belongs to: `…_bucket`, `…_sum` of a histogram, `…_total` of a counter."""
    for suffix in ("", "_total", "_bucket", "_sum", "_count", "_created"):
        if name.endswith(suffix):
            base = name[:len(name) - len(suffix)] if suffix else name
            for row in table(engine).find("metric", base):
                if suffix in SUFFIXES.get(row.type, SUFFIXES[""]):
                    return row
    return None
