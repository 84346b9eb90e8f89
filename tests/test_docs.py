"""The documents are true: commands parse, cheap ones run, printed output comes out, links and anchors are there."""
import re

import pytest
from documents import (
    PAGES,
    ROOT,
    anchor,
    blocks,
    commands,
    headings,
    inline,
    links,
    options_of,
    parse,
    printed,
    prose,
    read,
    verbs,
)

from kvlab.claims import _words
from kvlab.claims._ledger import SECTIONS, claims
from kvlab.comparing import VERDICTS
from kvlab.figures import figures
from kvlab.record.reading import COLUMNS, KINDS, STATUSES

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
GIVEN = {tuple(given) for page in PAGES for given in commands(page.read_text(encoding="utf-8"))}
PLACES = ("path/to", "RUN", "MODEL", "FILE", "my.py", "localhost", "s3://")          # of a reader's own
HEAVY = {"run", "measure", "score", "check", "validate-gpu", "lab", "lint", "doctor", "figure", "watch"}
CHEAP = sorted(given for given in GIVEN if given[0] not in HEAVY
               and (given[0] != "claims" or "show" in given)         # the whole ledger has tests of its own
               and given != ("ls", "runs")                           # of the reader's folder
               and not any(place in word for word in given for place in PLACES))


@pages
def test_every_command_in_a_fence_parses(page):
    """Verb, options and the types of their values; studies, figures, variants, formats and GPUs by name too."""
    from kvlab.attention._variant import variants
    from kvlab.catalog.gpus import gpu
    from kvlab.kv.formats import kv_format
    from kvlab.listing import LISTS
    from kvlab.studies._run import studies
    known = {"study": lambda name: name == "STUDY" or name in studies.names(),
             "variant": lambda name: ":" in name or name in variants.names(),
             "kv_format": kv_format, "gpu": gpu, "what": lambda name: name in LISTS}
    for given in commands(page.read_text(encoding="utf-8")):
        values = parse(given)
        if given[0] == "figure" and values["name"]:
            assert values["name"] in figures.names(), given
        for key, there in known.items():
            for name in str(values.get(key) or "").split(","):
                assert not name or there(name), (given, key, name)


@pages
def test_every_command_in_a_sentence_has_its_verb_and_options(page):
    for verb, options in inline(page.read_text(encoding="utf-8")):
        assert verb in verbs() and set(options) <= options_of(verb), (verb, options)


def test_a_command_that_is_wrong_would_be_found():
    wrong = [["sizes", "x"], ["size", "x", "--kvlen", "1"], ["size", "x", "--kv-len", "many"], ["run"]]
    for given in wrong:
        with pytest.raises(Exception, match=r"sizes|No such option|valid integer|Missing"):
            parse(given)
    assert commands("```\nkvlab size x  # y\n$ kvlab ls\nkvlab-like\n```\nkvlab run\n") == [["size", "x"], ["ls"]]


def output_of(given, capsys, monkeypatch, tmp_path):
    from kvlab.cli import app
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    code = app(list(given), standalone_mode=False)
    return code or 0, capsys.readouterr().out


@pytest.mark.parametrize("given", CHEAP, ids=" ".join)
def test_a_cheap_command_runs(given, capsys, monkeypatch, tmp_path):
    code, out = output_of(given, capsys, monkeypatch, tmp_path)
    assert code == 0 and (out.strip() or list(tmp_path.glob("*.html"))), out


SHOWN = {tuple(given): lines for page in PAGES for given, lines in printed(page.read_text(encoding="utf-8"))
         if given[0] not in HEAVY}


@pytest.mark.parametrize("given", SHOWN, ids=" ".join)
def test_a_printed_output_is_what_the_command_prints(given, capsys, monkeypatch, tmp_path):
    """Line by line in order; a line of … stands for lines that were left out."""
    out = iter(output_of(given, capsys, monkeypatch, tmp_path)[1].splitlines())
    skip = False
    for line in SHOWN[given]:
        if line == "…":
            skip = True
            continue
        found = next((one for one in out if not skip or one.rstrip() == line), None)
        assert found is not None and found.rstrip() == line, line
        skip = False
    assert SHOWN[given][-1] == "…" or next(out, None) is None


def test_some_commands_are_run_and_some_outputs_are_held():
    assert {"size", "plan", "simulate", "claims", "ls", "compare"} <= {given[0] for given in CHEAP}
    assert {"size", "plan"} <= {given[0] for given in SHOWN}


@pages
def test_links_lead_somewhere(page):
    for target in links(page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        path, _, part = target.partition("#")
        to = (page.parent / path).resolve() if path else page
        assert to.exists(), target
        if part:
            assert part in {anchor(words) for _, words in headings(to.read_text(encoding="utf-8"))}, target


@pages
def test_make_targets_figures_and_files_that_are_named_exist(page):
    text = page.read_text(encoding="utf-8")
    makefile = read("Makefile")
    named = "\n".join(blocks(text) + re.findall(r"`([^`\n]+)`", prose(text)))
    for target in set(re.findall(r"^make ([a-z-]+)", named, re.M)):
        assert re.search(rf"^{target}:", makefile, re.M), target
    for path in re.findall(r"`((?:kvlab|tests|data|notebooks|tools)/[\w/.]+\.(?:py|csv|c|ipynb|parquet))`", text):
        assert re.search(r"/X\.|/test_X\.|/mine\.py", path) or (ROOT / path).exists(), path


@pages
def test_python_on_a_page_is_python_that_uses_what_is_there(page):
    import kvlab
    for code in blocks(page.read_text(encoding="utf-8"), "python"):
        compile(code, page.name, "exec")
        assert set(re.findall(r"\bkvlab\.(\w+)\(", code)) <= set(kvlab.__all__), code


def test_the_python_of_the_page_on_serving_runs_as_printed():
    (code,) = blocks(read("docs/serving.md"), "python")
    there = {}
    exec(compile(code, "docs/serving.md", "exec"), there)
    assert len(there["done"].requests()) == 500 and there["done"].summary()["ttft_p99_s"] > 0
    assert there["plan"](there["model"]("Qwen/Qwen2-72B"), "H200", 2).live >= 1


def test_every_page_is_reached_from_the_readme():
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page not in seen and page.suffix == ".md" and page.exists():
            seen.add(page)
            todo += [(page.parent / target.partition("#")[0]).resolve() for target in
                     links(page.read_text(encoding="utf-8")) if not target.startswith("http")]
    assert set(PAGES) <= seen, set(PAGES) - seen


def test_the_words_and_columns_of_a_result_are_all_explained():
    page = read("docs/provenance.md")
    listed = {}
    for part in re.split(r"^## ", page, flags=re.M)[1:]:
        cells = re.findall(r"^\| ([^|]+) \|", part, re.M)[1:]
        listed[part.splitlines()[0]] = [name.strip() for cell in cells for name in cell.split(",")]
    assert listed["Kinds, strongest first"] == list(KINDS) and listed["Words of a claim"] == list(_words.VERDICTS)
    assert set(listed["Words of a comparison"]) == set(VERDICTS)
    assert sorted(listed["Columns of the result table"]) == sorted(COLUMNS)
    assert all(status in page for status in STATUSES)


def test_the_glossary_has_the_words_of_kinds_and_verdicts():
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in read("docs/glossary.md").splitlines()
            if line.startswith("| ")][2:]
    assert len(rows) >= 60 and all(len(row) == 3 and row[0] and row[1] for row in rows)
    there = {en.strip(): zh.strip() for row in rows for en, zh in zip(row[0].split(","), row[1].split("、"))}
    for table in (_words.KIND_WORDS, _words.VERDICTS):
        for word, text in table.items():
            assert there[word] == text.zh, word


def test_the_chinese_reader_goes_through_every_claim_in_its_section():
    page = read("docs/zh/reader.md")
    parts = re.split(r"^## ", page, flags=re.M)[1:]
    assert [part.splitlines()[0] for part in parts] == [f"{n} {text.zh}" for n, text in SECTIONS.items()]
    for part, section in zip(parts, SECTIONS.values()):
        cells = [line.rstrip(" |").rpartition("|")[2] for line in part.splitlines() if line.startswith("|")]
        ids = [found for cell in cells for found in re.findall(r"C\d\d", cell)]
        assert ids == [one.id for one in claims().values() if one.section == section]
        drawn = [name for words in re.findall(r"图 ((?:`\w+`、?)+)", part) for name in re.findall(r"`(\w+)`", words)]
        assert set(drawn) <= set(figures.names())
    assert not any(text.zh in line for line in page.splitlines() if line.startswith("|") for text in
                   _words.VERDICTS.values() if text.zh != "成立"), "a verdict is computed, never written down"


def test_changelog_citation_and_comparison_follow_the_project():
    from importlib import import_module

    import kvlab
    from kvlab.catalog import rows
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load(read("CITATION.cff"))
    assert cited["version"] == kvlab.__version__ and cited["cff-version"] == "1.2.0" and cited["type"] == "software"
    assert cited["authors"] == [{"name": "The kvlab authors"}] and {"message", "title"} <= set(cited)
    assert set(cited) <= {"cff-version", "message", "type", "title", "abstract", "authors", "version", "license",
                          "keywords", "date-released", "repository-code", "url"}
    changes = read("CHANGELOG.md")
    assert re.search(rf"^## {re.escape(kvlab.__version__)}$", changes, re.M)
    assert f"{len(claims())} claims" in changes
    assert f"{len(import_module('kvlab.catalog.models').models())} models" in changes
    facts, page = rows("engines.csv"), read("docs/comparison.md")
    assert f"{len(facts)} facts about seven engines" in page and len({fact["engine"] for fact in facts}) == 7
    for version in {fact["version"] for fact in facts}:
        assert version in page, version
