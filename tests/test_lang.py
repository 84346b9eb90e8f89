"""Chinese: the dictionary, findings of every shipped run and of branches that none took, and the run's own lines."""
import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from chinese import english
from hypothesis import given
from hypothesis import strategies as st

from kvlab import cli
from kvlab.catalog import data_dir, rows
from kvlab.lang import LANGUAGES, Text, checked, translated

REFERENCE = sorted(path.stem for path in (data_dir() / "reference").glob("*.parquet"))
NUMBER = r"[+\-−±]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?"


def test_a_text_has_both_languages_and_no_other():
    text = Text("cache", "缓存")
    assert [text.of(lang) for lang in LANGUAGES] == ["cache", "缓存"]
    for ask in (lambda: text.of("de"), lambda: checked("de"), lambda: translated("cache", "de")):
        with pytest.raises(ValueError, match="'de' is not there; allowed: en, zh"):
            ask()


def test_every_line_of_the_dictionary_fills_the_holes_of_its_english_once_each():
    lines = rows("zh.csv")
    assert len({line["en"] for line in lines}) == len(lines) > 600
    for line in lines:
        holes, used = re.findall(r"\{[#*-]?\}", line["en"]), re.findall(r"\{(\d*)\}", line["zh"])
        assert used == [""] * len(holes) or sorted(used, key=int) == [str(i) for i in range(len(holes))], line
        assert not re.search("[，。：；？！（）]", line["en"]) and line["zh"] == line["zh"].strip(), line


@pytest.mark.parametrize("text, said", [
    ("decode", "解码"), ("Decode", "解码"), ("sdpa", "sdpa"), ("", ""), ("0.5", "0.5"), ("no word", "no word"),
    ("sdpa, naive", "sdpa, naive"), ("sdpa, decode", "sdpa，解码"), ("sdpa and naive", "sdpa 和 naive"),
    ("group ratio 4: simulated", "组比 4：仿真"), ("callgrind (simulated)", "callgrind（仿真）"),
    ("f (simulated) (x", "f (simulated) (x"), ("Slower: a; b.", "更慢：a; b。"),
    ("what nobody wrote; decode", "what nobody wrote；解码"), ("Yes. Nobody wrote this.", "是。Nobody wrote this."),
    ("group ratio (query heads\nper KV head)", "组比（每个 KV 头的查询头数）"), ("decode\nprefill", "解码\n预填充")])
def test_phrases_templates_and_parts_are_translated_and_the_rest_is_left(text, said):
    assert translated(text, "zh") == said and translated(text, "en") == text


@given(st.text(alphabet="ab .,;:?()[]“”\n{}×1", max_size=40))
def test_no_text_breaks_the_translation_and_without_known_words_it_stays(text):
    assert translated(text, "zh") == text


def test_what_a_hole_holds_is_no_format_string():
    assert translated("run {0.__class__}", "zh") == "运行 {0.__class__}"


@pytest.mark.parametrize("study", REFERENCE)
def test_every_finding_of_a_shipped_run_is_chinese_but_for_names(study):
    from kvlab.record.store import read_table
    from kvlab.studies._run import studies
    found = studies[study].findings(read_table(data_dir() / "reference" / f"{study}.parquet"))
    assert found
    for one in found:
        said = translated(one.sentence, "zh")
        assert said != one.sentence and english(said) == [], said
        assert sorted(re.findall(NUMBER, said)) == sorted(re.findall(NUMBER, one.sentence)), said
        assert translated(said, "zh") == said


BRANCHES = (Path(__file__).parent / "lang_branches.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("sentence", BRANCHES)
def test_what_other_runs_may_say_is_chinese_too(sentence):
    said = translated(sentence, "zh")
    assert said != sentence and english(said) == [], said
    assert sorted(re.findall(NUMBER, said)) == sorted(re.findall(NUMBER, sentence)), said


# names of findings, columns and formats, which no sentence holds
NO_SENTENCE = {"preempted answers", "waste at \0", "hit rate", "knee elsewhere", "sensed windows", "minus fp\0",
               "max_num_seqs at \0 %", "{\0:.\0f} between {\0} and {\0}", "nll steepest from {\0} to {\0}",
               "× in order", "the same trial measured twice differs by a factor {:.\0f}"}


def pieces(path):
    """What a module's texts say, cut at marks and brackets, numbers made alike; docstrings and errors left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.Module, ast.FunctionDef, ast.ClassDef)
    left_out = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, kinds) and
                isinstance(node.body[0], ast.Expr)}
    left_out |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.Raise) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
            for piece in re.split(r"[.?!;:,](?: |$)|\n|[()\[\]“”]", node.value):
                yield alike(piece.strip())


def alike(text):
    return re.sub(rf"\b(?:INT|FP)\d|{NUMBER}", "\0", text).lower()


def test_every_piece_of_a_sentence_in_the_findings_stands_in_the_dictionary():
    known = "\n".join(alike(re.sub(r"\{[#*-]?\}", "\0", line["en"])) for line in rows("zh.csv"))
    folder = Path(cli.__file__).parent / "studies"
    modules = [*folder.glob("_*_findings.py"), folder / "_kv_quant_ranked.py", folder / "_kernels_groups.py",
               *(folder / f"_group_ratio_{name}.py" for name in ("confounders", "grid", "knees", "others"))]
    assert len(modules) == 15
    lacking = {(path.name, piece) for path in modules for piece in pieces(path)
               if " " in piece and len(re.findall("[a-z]{2,}", piece)) > 1 and piece not in known}
    assert {piece for _, piece in lacking} - NO_SENTENCE == set()


def test_a_run_says_its_findings_failures_and_next_steps_in_chinese(tmp_path, monkeypatch, capsys):
    import pandas as pd

    from kvlab.record.store import read_table
    table = read_table(data_dir() / "reference" / "paging.parquet")
    bad = table.iloc[:1].assign(status="failed", error="no time was measured", variant="paged", kind="missing")
    store = SimpleNamespace(path=tmp_path, place=tmp_path, share=lambda: None,
                            table=lambda: pd.concat([table, bad], ignore_index=True))
    monkeypatch.setattr("kvlab.studies._run.run", lambda study, **options: store)
    drawn = []
    monkeypatch.setattr("kvlab.figures.save", lambda name, run, out, lang: drawn.append((name, lang)))
    assert cli.run("paging", lang="zh") == 1
    out, err = capsys.readouterr()
    assert "- 块大小为 16 时，闲置空间为 token 数的 0.58%" in out and "\n- 分页要花时间吗？是。paged" in out
    assert f"下一步：kvlab report {tmp_path}，或 kvlab figure paging --run {tmp_path} --lang zh" in out
    assert err == "! paged：没有计时（1 个用例）\n" and ("paging", "zh") in drawn
    with pytest.raises(ValueError, match="'fr' is not there; allowed: en, zh"):
        cli.run("no such study", lang="fr")
