"""What holds of every claim: its verdict follows from its evidence, and says what is missing where some is."""
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from kvlab.claims import as_row, claims, ledger
from kvlab.claims._base import WORDS, Evidence, absent, judged
from kvlab.claims._ledger import chosen, modules
from kvlab.claims._results import Results
from kvlab.claims._words import shown
from kvlab.lang import Text
from kvlab.show_claims import print_claim

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def shipped():
    return {one.claim.id: one for one in ledger(Results())}


def flips():
    """id -> [(changed evidence, the word it must give)], of every file flips_*.py beside this one."""
    found = {}
    for path in sorted(HERE.glob("flips_*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert not found.keys() & module.FLIPS.keys()
        found |= module.FLIPS
    return found


FLIPS = flips()


def changed(evidence, changes):
    """The evidence with some numbers replaced: a value, (value, low, high), or None for missing."""
    assert changes.keys() <= {one.name for one in evidence}, "a flip names evidence that the claim does not have"
    for one in evidence:
        if one.name not in changes:
            yield one
        elif (new := changes[one.name]) is None:
            yield absent(one.name, one.about, "left out by a test", "测试中略去")
        else:
            value, low, high = new if isinstance(new, tuple) else (new, None, None)
            kind = "measured" if one.kind == "missing" else one.kind
            yield replace(one, value=float(value), low=low, high=high, kind=kind, note=None,
                          source=one.source or "test")


def test_every_claim_of_the_article_is_there_once_and_has_a_flip():
    assert list(claims()) == [f"C{number:02}" for number in range(1, 73)]
    assert sorted(FLIPS) == list(claims())


@pytest.mark.parametrize("name", claims())
def test_a_verdict_says_what_it_rests_on_in_two_languages(name, shipped):
    one = shipped[name]
    assert one.verdict.word in WORDS and one.evidence and one.claim.text.en != one.claim.text.zh
    texts = [one.claim.text, one.verdict.because, one.claim.section, *(e.about for e in one.evidence),
             *(e.note for e in one.evidence if e.note), *([one.verdict.needs] if one.verdict.needs else [])]
    for text in texts:
        assert text.en.isascii() or not any("\u4e00" <= letter <= "\u9fff" for letter in text.en), text
        assert any("\u4e00" <= letter <= "\u9fff" for letter in text.zh), text
    assert all(e.source for e in one.evidence if e.kind != "missing")
    assert len(one.claim.text.en) <= 120 and len(one.claim.said) <= 40


@pytest.mark.parametrize("name", FLIPS)
def test_other_evidence_gives_another_verdict(name, shipped):
    one, words = shipped[name], set()
    for changes, word in FLIPS[name]:
        got = judged(one.claim, changed(one.evidence, changes)).verdict
        assert got.word == word, (changes, got)
        words.add(word)
    assert words - {one.verdict.word, "untestable here"}, "no number, only a missing one, changes the shipped verdict"


@pytest.mark.parametrize("name", claims())
def test_without_any_evidence_a_claim_is_untestable_and_says_what_to_do(name, shipped):
    one = shipped[name]
    nothing = [absent(e.name, e.about, f"run {e.name}", f"运行 {e.name}") for e in one.evidence]
    verdict = judged(one.claim, nothing).verdict
    assert verdict.word == "untestable here" and verdict.needs.en.startswith("run ")


@pytest.mark.parametrize("name", [name for name in claims() if claims()[name].studies])
def test_without_the_studies_results_a_claim_says_which_to_run(name, monkeypatch):
    results = Results()
    results.paths = {}
    claim = claims()[name]
    evidence = list(claim.evidence(results))
    notes = [one.note.en for one in evidence if one.kind == "missing"]
    for study in claim.studies:
        assert any(f"kvlab run {study}" in note for note in notes), (study, notes)
    judged(claim, evidence)


def test_every_study_and_figure_that_a_claim_names_is_there():
    from kvlab.figures import figures
    from kvlab.studies._run import studies
    for claim in claims().values():
        assert set(claim.studies) <= set(studies) and (claim.figure is None or claim.figure in figures)


def test_a_wrong_id_or_section_is_answered_with_what_there_is():
    with pytest.raises(KeyError, match="no claim named 'c99'"):
        chosen(["c99"])
    with pytest.raises(ValueError, match="section 9 is none of the article's; allowed: 1 The bottleneck"):
        chosen((), 9)
    assert [claim.id for claim in chosen(["c03"])] == ["C03"] and chosen((), 1)[0].id == "C01"


@pytest.mark.parametrize(("value", "unit", "text"), [
    (0.99971, "share", "99.97 %"), (1, "share", "100 %"), (0.00462, "share", "0.462 %"), (1808, "token", "1,808 token"),
    (2023, "year", "2023"), (443_763, "count", "443,763"), (1, "yes/no", "yes"), (None, "count", "–")])
def test_numbers_are_shown_in_full_and_shares_are_not_rounded_up_to_all(value, unit, text):
    assert shown(value, unit) == text


def test_a_source_is_printed_once_and_what_nothing_reproduces_names_no_command(shipped, capsys):
    rows = {name: as_row(shipped[name]) for name in ("C03", "C38")}
    print_claim(rows["C03"], "en")
    told = capsys.readouterr().out
    assert told.count(rows["C03"]["evidence"][0]["source"]) == 1 and "reproduce: kvlab size" in told
    print_claim(rows["C38"], "zh")
    told = capsys.readouterr().out
    assert "结论：已过时（引用）" in told and "复现" not in told and rows["C38"]["commands"] == []


def test_evidence_that_says_nothing_is_refused():
    about = Text("a", "甲")
    with pytest.raises(ValueError, match="kind 'known' is unknown"):
        Evidence("x", about, 1.0, "B", "known", source="s")
    with pytest.raises(ValueError, match="has value None and a note"):
        Evidence("x", about, None, "B", "missing")
    with pytest.raises(ValueError, match="needs a source"):
        Evidence("x", about, 1.0, "B", "measured")


def test_no_verdict_is_stored_anywhere():
    """The modules name sections and claims; what is true of them is nowhere but in the evidence."""
    assert {modules[name].SECTION for name in modules} <= set(range(1, 9))
    data = {path.name for path in (HERE.parents[1] / "data").glob("*.csv")}
    assert "claims.csv" not in data
