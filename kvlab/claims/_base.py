"""A claim of the article, the evidence that bears on it, and the verdict that the evidence gives.

A claim is two functions. `evidence` reads results, the catalogue or quoted facts and yields Evidence; `judge` looks at
that evidence and nothing else, and returns a Verdict. So a verdict follows from its evidence: change a number and it
changes. Evidence that is missing makes a claim that needs it "untestable here", with the reason.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from kvlab.lang import Text
from kvlab.record.reading import KINDS, weakest

if TYPE_CHECKING:
    from kvlab.claims._results import Results

WORDS = ("supported", "conditional", "refuted", "outdated", "inconclusive", "untestable here")


@dataclass(frozen=True, slots=True)
class Evidence:
    """One number that bears on a claim. about: what it is, in each language.

    unit: as in the result table; "share" is shown per cent, "yes/no" is 1 or 0. kind: one of KINDS; a missing number
    has value None and a `note` that says why and what to run. source: whose number it is (a run, a file's source).
    """
    name: str
    about: Text
    value: float | None
    unit: str
    kind: str
    low: float | None = None
    high: float | None = None
    n: int | None = None
    source: str = ""
    note: Text | None = None

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"{self.name}: kind {self.kind!r} is unknown; allowed: {', '.join(KINDS)}")
        if (self.kind == "missing") != (self.value is None) or (self.kind == "missing") != (self.note is not None):
            raise ValueError(f"{self.name}: a missing number, and no other, has value None and a note")
        if self.kind != "missing" and not self.source:
            raise ValueError(f"{self.name}: a number needs a source")

    def above(self, bound: float) -> bool | None:
        """Whether it is above the bound: None where the interval holds the bound."""
        low, high = self._ends()
        return True if low > bound else False if high <= bound else None

    def below(self, bound: float) -> bool | None:
        """Whether it is below the bound: None where the interval holds the bound."""
        low, high = self._ends()
        return True if high < bound else False if low >= bound else None

    def _ends(self) -> tuple[float, float]:
        if self.value is None:
            raise ValueError(f"{self.name} is missing and is compared with nothing; ask for it with found[...]")
        return (self.value if self.low is None else self.low, self.value if self.high is None else self.high)


class Known(Evidence):
    """Evidence that is there, as a judge sees it: its value is a number. A type only, none is ever made."""
    __slots__ = ()
    value: float


def absent(name: str, about: Text, en: str, zh: str) -> Evidence:
    """Evidence that is not to be had, with the reason and what would give it."""
    return Evidence(name, about, None, "count", "missing", note=Text(en, zh))


@dataclass(frozen=True, slots=True)
class Verdict:
    """One of WORDS, why, and (inconclusive: the sample that would decide; untestable: what it takes) `needs`."""
    word: str
    because: Text
    needs: Text | None = None

    def __post_init__(self):
        if self.word not in WORDS:
            raise ValueError(f"verdict {self.word!r} is unknown; allowed: {', '.join(WORDS)}")
        if (self.word in WORDS[4:]) != (self.needs is not None):
            raise ValueError(f"a verdict {self.word!r} says what it needs if and only if it is one of {WORDS[4:]}")


def supported(en: str, zh: str) -> Verdict:
    return Verdict("supported", Text(en, zh))


def conditional(en: str, zh: str) -> Verdict:
    """It holds where the text says, and not elsewhere."""
    return Verdict("conditional", Text(en, zh))


def refuted(en: str, zh: str) -> Verdict:
    return Verdict("refuted", Text(en, zh))


def outdated(en: str, zh: str) -> Verdict:
    """It held once; the text says since when it does not."""
    return Verdict("outdated", Text(en, zh))


def inconclusive(en: str, zh: str, needs: Text) -> Verdict:
    return Verdict("inconclusive", Text(en, zh), needs)


def untestable(en: str, zh: str, needs: Text) -> Verdict:
    return Verdict("untestable here", Text(en, zh), needs)


class _Absent(Exception):
    """The judge asked for evidence that is missing."""


class Found(Mapping[str, Known]):
    """A claim's evidence by name, as its judge sees it: found["x"] where the verdict needs x, found.get("x") else.

    get gives None for missing evidence. What was looked at decides the verdict's kind.
    """

    def __init__(self, evidence: Iterable[Evidence]):
        self._all: dict[str, Evidence] = {}
        for one in evidence:
            if one.name in self._all:
                raise ValueError(f"evidence {one.name!r} is there twice")
            self._all[one.name] = one
        self.looked_at: dict[str, Evidence] = {}

    def __getitem__(self, name: str) -> Known:
        one = self.looked_at[name] = self._all[name]
        if one.kind == "missing":
            raise _Absent
        return cast(Known, one)                          # what is not missing has a number: Evidence refuses else

    def get(self, name: str, default=None):
        there = name in self._all and self._all[name].kind != "missing"
        return self[name] if there else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


@dataclass(frozen=True)
class Claim:
    """One claim of the article, in kvlab's own words. said: the article's number or name, as short as it goes.

    evidence: what bears on it, the headline first. judge: the verdict of that evidence. studies: whose rows are read.
    figure: of `kvlab ls figures`. command: what shows the evidence that no study gives.
    """
    id: str
    text: Text
    said: str
    evidence: Callable[[Results], Iterable[Evidence]]
    judge: Callable[[Found], Verdict]
    studies: tuple[str, ...] = ()
    figure: str | None = None
    command: str = ""
    section: Text = field(default=Text("", ""), compare=False)

    @property
    def commands(self) -> tuple[str, ...]:
        """What a reader runs to see the evidence come about; none where all of it is quoted: its sources are given."""
        return (*((self.command,) if self.command else ()), *(f"kvlab run {study}" for study in self.studies))


@dataclass(frozen=True)
class Judged:
    """A claim with its evidence and its verdict. kind: the weakest of the evidence that the judge looked at.

    only_quoted: nothing but what others say stands behind it.
    """
    claim: Claim
    verdict: Verdict
    evidence: tuple[Evidence, ...]
    kind: str
    only_quoted: bool

    @property
    def label(self) -> str:
        """The verdict's word, "(quoted)" where it is only_quoted."""
        return f"{self.verdict.word} (quoted)" if self.only_quoted else self.verdict.word


def judged(claim: Claim, evidence: Iterable[Evidence]) -> Judged:
    """The verdict that this evidence gives: of missing evidence that the judge needs, "untestable here"."""
    found = Found(evidence)
    try:
        verdict = claim.judge(found)
    except _Absent:
        lacking = [one for one in found.looked_at.values() if one.kind == "missing"][-1]
        verdict = untestable(f"there is no evidence on: {lacking.about.en}", f"缺少证据：{lacking.about.zh}",
                             lacking.note or lacking.about)
    used = [one.kind for one in found.looked_at.values()]
    if not used:
        raise ValueError(f"{claim.id}: a verdict that looked at no evidence is none")
    return Judged(claim, verdict, tuple(found._all.values()), weakest(used), set(used) == {"quoted"})
