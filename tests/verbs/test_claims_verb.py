"""kvlab claims: what it prints, in both languages, and what it refuses."""
import json
import re
import sys
from pathlib import Path

import pytest

from kvlab.claims import Results, as_row, claims, ledger
from kvlab.cli import main


@pytest.fixture
def kvlab(monkeypatch, capsys):
    """Run `kvlab claims …` in this process: (exit code, stdout, stderr)."""
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvlab", "claims", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code, out, err
    return run


def test_the_table_has_a_line_a_claim_and_ends_with_the_counts(kvlab):
    code, out, _ = kvlab("--section", 2)
    assert code == 0 and out.startswith("Sizing the cache")
    assert re.findall(r"^(C\d\d) ", out, re.M) == [f"C{n:02}" for n in range(8, 16)]
    assert re.search(r"^8 claims: \d", out, re.M)
    counted = [int(n) for n in re.findall(r"(\d+) [a-z]", out.splitlines()[-1])][1:]
    assert sum(counted) == 8


def test_chinese_has_the_same_numbers_and_no_english_words_of_the_ledger(kvlab):
    _, english, _ = kvlab("show", "C11")
    code, chinese, _ = kvlab("show", "C11", "--lang", "zh")
    assert code == 0 and "成立" in chinese and "supported" not in chinese and "1,342,177,280" in chinese
    assert re.findall(r"kvlab \w+ .*", english) == re.findall(r"kvlab \w+ .*", chinese)


def test_json_has_every_field_of_the_ledger_and_the_evidence(kvlab):
    code, out, _ = kvlab("C03", "--json")
    (row,) = json.loads(out)
    assert code == 0 and row == json.loads(json.dumps(as_row(ledger(ids=["C03"])[0])))
    assert {"id", "verdict", "value", "low", "high", "n", "kind", "evidence", "claim_zh", "because"} <= row.keys()
    assert row["evidence"][0].keys() >= {"name", "value", "kind", "source"}


def test_show_names_the_figure_and_what_reproduces_the_numbers(kvlab):
    _, out, _ = kvlab("show", "C03")
    claim = claims()["C03"]
    assert f"figure: kvlab figure {claim.figure}" in out and all(f"reproduce: {c}" in out for c in claim.commands)


@pytest.mark.parametrize("arguments, said", [
    (["C99"], "no claim named 'C99'"), (["show"], "show needs the id of a claim"),
    (["--section", 9], "section 9 is none of the article's; allowed: 1 The bottleneck"),
    (["C03", "--section", 5], "none of C03 is in section 5"), (["--lang", "fr"], "language 'fr' is not there"),
    (["--results", "nowhere.parquet"], "there are no results at nowhere.parquet"),
    (["C28", "--run", "--size", "huge"], "--size huge is none of"), (["profiles/x"], "no claim named 'profiles/x'"),
    (["--results", __file__], "test_claims_verb.py is not a file of results; give a run's directory or id"),
])
def test_wrong_use_is_one_sentence_and_exit_code_2(kvlab, arguments, said):
    code, out, err = kvlab(*arguments)
    assert code == 2 and out == "" and said in err and err.count("\n") == 1


def test_results_of_another_schema_version_are_refused(kvlab, tmp_path):
    import pyarrow.parquet

    from kvlab.api import reference
    table = pyarrow.parquet.read_table(reference("paging"))
    metadata = {**table.schema.metadata, b"kvlab.schema_version": b"99"}
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), tmp_path / "new.parquet")
    code, _, err = kvlab("--results", tmp_path / "new.parquet")
    assert code == 2 and "schema version 99" in err


def test_two_runs_of_one_study_are_refused_and_a_run_without_the_rows_names_the_study(kvlab, tmp_path):
    import kvlab.record.export as export
    from kvlab.api import reference
    from kvlab.record.store import read_table
    paths = tmp_path / "a.parquet", tmp_path / "b.parquet"
    for path in paths:
        export.write_parquet(read_table(reference("paging")).head(1), path)
    code, _, err = kvlab("--results", paths[0], "--results", paths[1])
    assert code == 2 and "are both results of paging; give one of them" in err
    _, out, _ = kvlab("show", "C34", "--results", paths[0])
    assert "verdict: untestable here" in out and "needs: " in out and "kvlab run paging" in out


def test_results_that_no_asked_claim_rests_on_are_said_to_be_unused(kvlab):
    from kvlab.api import reference
    code, _, err = kvlab("C47", "--results", reference("paging"))
    assert code == 0
    assert err == f"kvlab: {reference('paging')} is not used: no claim that was asked for rests on paging\n"


def test_the_counts_in_chinese_are_a_chinese_sentence(kvlab):
    _, out, _ = kvlab("--section", 2, "--lang", "zh")
    assert re.match(r"8 条论断：\d 条成立，", out.splitlines()[-1])


def test_a_checkout_without_stored_results_still_judges_what_needs_none(monkeypatch, tmp_path):
    results = Results()
    results.paths = {}
    words = {one.claim.id: one.verdict.word for one in ledger(results)}
    assert words["C03"] == "refuted" and words["C34"] == "untestable here"
    assert sum(word != "untestable here" for word in words.values()) > 30


def test_run_judges_the_runs_it_makes_and_says_what_cannot_run(kvlab, monkeypatch, tmp_path):
    from types import SimpleNamespace

    from kvlab.api import reference
    asked = []

    def run(study, *, size, out, begun):
        asked.append((study, size, out))
        if study == "paging":
            raise ValueError("no compiler")
        return SimpleNamespace(path=reference(study))
    monkeypatch.setattr("kvlab.studies._run.run", run)
    code, out, err = kvlab("C34", "C51", "--run", "--size", "smoke", "--out", tmp_path, "--json")
    words = {row["id"]: row["verdict"] for row in json.loads(out)}
    assert code == 0 and sorted(study for study, *_ in asked) == ["batching", "paging"]
    assert {where for *_, where in asked} == {tmp_path} and {size for _, size, _ in asked} == {"smoke"}
    assert "kvlab: paging cannot run here: no compiler" in err
    assert words["C34"] == "untestable here" and words["C51"] == ledger(ids=["C51"])[0].label


def test_an_interrupted_run_says_how_to_go_on(kvlab, monkeypatch, tmp_path):
    from types import SimpleNamespace

    def run(study, *, size, out, begun):
        begun(SimpleNamespace(path=Path("profiles/paging/half")))
        raise KeyboardInterrupt
    monkeypatch.setattr("kvlab.studies._run.run", run)
    code, _, err = kvlab("C34", "--run")
    assert code == 130 and "kvlab run paging --resume profiles/paging/half, then" in err
    assert "--run --results profiles/paging/half" in err
