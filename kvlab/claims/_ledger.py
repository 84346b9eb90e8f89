"""All claims in the article's order, and their verdicts on given results."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import cache

from kvlab.claims._base import Claim, Evidence, Judged, judged
from kvlab.claims._results import Results
from kvlab.lang import Text
from kvlab.registry import Registry

SECTIONS = {1: Text("The bottleneck", "性能瓶颈"), 2: Text("Sizing the cache", "显存计算"),
            3: Text("GQA and MQA", "GQA 与 MQA"), 4: Text("Flash and Paged Attention", "Flash 与 Paged Attention"),
            5: Text("Quantisation", "量化"),
            6: Text("Continuous batching", "连续批处理"), 7: Text("Serving frameworks", "推理框架"),
            8: Text("Monitoring and capacity", "监控与容量规划")}
# module -> section of the article; a module holds CLAIMS, a tuple
modules = Registry("module of claims", "kvlab.claims")


@cache
def claims() -> dict[str, Claim]:
    """Every claim by its id, in the article's order."""
    found = {}
    for name in modules:
        for claim in modules[name].CLAIMS:
            if claim.id in found:
                raise ValueError(f"claim {claim.id} is there twice")
            found[claim.id] = replace(claim, section=SECTIONS[modules[name].SECTION])
    return dict(sorted(found.items()))


def no_claim(name: str, known: Iterable[str]) -> KeyError:
    """The error for a claim that is not among the known ones, which are in the article's order."""
    first, *_, last = [*known] * 2
    return KeyError(f"no claim named {name!r}; there are {first} … {last}, listed by: kvlab claims")


def chosen(ids: Iterable[str] = (), section: int | None = None) -> list[Claim]:
    """The claims of those ids (all by default) and that section. Raises KeyError or ValueError with what there is."""
    if section is not None and section not in SECTIONS:
        listed = ", ".join(f"{number} {text.en}" for number, text in SECTIONS.items())
        raise ValueError(f"section {section} is none of the article's; allowed: {listed}")
    wanted = {text.upper(): text for text in ids}
    if unknown := [text for one, text in wanted.items() if one not in claims()]:
        raise no_claim(unknown[0], claims())
    return [claim for claim in claims().values() if (not wanted or claim.id in wanted)
            and (section is None or claim.section == SECTIONS[section])]


def as_row(one: Judged) -> dict:
    """A verdict as plain data, in both languages: claim, verdict, the headline number, and all evidence."""
    claim, verdict, first = one.claim, one.verdict, one.evidence[0]
    needs = verdict.needs or Text("", "")
    return dict(id=claim.id, section=claim.section.en, section_zh=claim.section.zh, claim=claim.text.en,
                claim_zh=claim.text.zh, said=claim.said, verdict=one.label, because=verdict.because.en,
                because_zh=verdict.because.zh, needs=needs.en, needs_zh=needs.zh, what=first.about.en,
                what_zh=first.about.zh, value=first.value, unit=first.unit, low=first.low, high=first.high, n=first.n,
                kind=one.kind, figure=claim.figure or "", commands=list(claim.commands),
                evidence=[_plain(each) for each in one.evidence])


def _plain(one: Evidence) -> dict:
    note = one.note or Text("", "")
    return {**asdict(one), "about": one.about.en, "about_zh": one.about.zh, "note": note.en, "note_zh": note.zh}


def ledger(results: Results | None = None, *, ids: Iterable[str] = (), section: int | None = None) -> list[Judged]:
    """The verdict on each claim from stored results (default: the reference runs that kvlab ships)."""
    results = results or Results()
    return [judged(claim, claim.evidence(results)) for claim in chosen(ids, section)]
