"""The ledger's page and pictures: one file that needs nothing, in two languages, with nothing but text in it."""
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

import kvlab
from kvlab import claims_page
from kvlab.claims import as_row, ledger
from kvlab.claims_page import overview, summary, write_page
from kvlab.figures._language import usable
from kvlab.lang import Text

IDS = ["C03", "C28", "C53"]


@pytest.fixture(scope="module")
def judged():
    return ledger(ids=IDS)


@pytest.fixture(scope="module")
def rows(judged):
    return [as_row(one) for one in judged]


class Tags(HTMLParser):
    """Every tag with its attributes, and whether all that was opened is closed."""
    VOID = {"meta", "input", "img", "br"}

    def __init__(self, text):
        super().__init__()
        self.found, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_needs_nothing_and_has_both_languages(rows, tmp_path):
    path = write_page(rows, tmp_path / "ledger.html", "zh")
    text = path.read_text(encoding="utf-8")
    tags = Tags(text)
    assert tags.open == [] and not [tag for tag, _ in tags.found if tag in ("script", "link", "iframe")]
    for tag, attributes in tags.found:
        for name in ("src", "href"):
            assert attributes.get(name, "#").startswith(("#", "data:image/png;base64,")), (tag, attributes)
    assert re.findall(r'<article id="(C\d\d)">', text) == IDS
    anchors = {attributes["href"][1:] for tag, attributes in tags.found if tag == "a"}
    assert anchors <= {attributes["id"] for _, attributes in tags.found if "id" in attributes}
    assert [a["id"] for tag, a in tags.found if tag == "input" and "checked" in a] == ["zh"]
    for row in rows:
        assert row["because"].split(" ")[0] in text and row["because_zh"][:4] in text
    pictures = [attributes for tag, attributes in tags.found if tag == "img"]
    assert {one["class"] for one in pictures} == {"en", "zh"} and len({one["alt"] for one in pictures}) >= 2


def test_what_comes_from_a_run_is_text(judged, tmp_path):
    evil = "<script>alert(1)</script>"
    one = judged[0]
    changed = replace(one, evidence=(replace(one.evidence[0], source=evil),))
    text = write_page([as_row(changed) | {"figure": ""}], tmp_path / "x.html").read_text(encoding="utf-8")
    assert evil not in text and "&lt;script&gt;" in text


def test_a_figure_of_a_study_that_did_not_run_is_left_out(rows, tmp_path):
    text = write_page(rows[1:2], tmp_path / "x.html", runs={"memory_wall": None, "kernels": None}).read_text("utf-8")
    assert "<img" not in text and 'href="#figure' not in text


def test_a_notebook_shows_one_language(rows):
    table = kvlab.ledger(ids=IDS)
    assert list(table["id"]) == IDS and table["value"].iloc[0] == rows[0]["value"]
    shown = summary(table, "zh")._repr_html_()
    assert rows[0]["claim_zh"] in shown and rows[0]["claim"] not in shown and 'class="en"' not in shown
    one = claims_page.claim(table, "C28")
    assert one.count("<article") == 1 and "C28" in one and "C03" not in one
    with pytest.raises(KeyError, match="no claim named 'C99'"):
        claims_page.claim(table, "C99")
    with pytest.raises(ValueError, match="language 'fr'"):
        summary(table, "fr")


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.filterwarnings("error:Glyph")
def test_the_overview_counts_every_claim_once_in_a_font_that_has_the_words(lang):
    table = kvlab.ledger(ids=IDS)
    figure = overview(table, lang)
    assert len(figure._repr_png_())
    word = Text("refuted", "不成立").of(usable(lang))
    (ax,) = figure.axes
    assert sum(bar.get_width() for bar in ax.patches) == len(IDS)
    by_word = {one.get_label(): sum(bar.get_width() for bar in one) for one in ax.containers}
    assert by_word[word] == sum(table["verdict"].str.startswith("refuted"))
