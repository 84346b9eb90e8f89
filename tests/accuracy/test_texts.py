"""Texts are what their name says, as prose; what is none is refused in words."""
import gzip

import pytest

from kvlab.accuracy import texts as module
from kvlab.accuracy.texts import sha256, text, texts, unwrap


def test_a_topic_of_pythons_documentation_is_unwrapped_prose():
    pytest.importorskip("pydoc_data.topics", reason="this Python was built without pydoc_data")
    found = text("pydoc:execmodel")
    assert len(found) > 5000 and "code block" in found
    paragraphs = found.split("\n\n")
    assert all("\n" not in one and len(one) >= 120 for one in paragraphs) and "****" not in found
    assert len(sha256(found)) == 64 and sha256(found) != sha256(found + " ")


def test_unwrap_joins_lines_and_leaves_headings_out():
    long = "word " * 30
    assert unwrap(f"Heading\n=======\n\n{long}\nof   two\tlines\n \nshort\n\n{long}") == (
        f"{' '.join(long.split())} of two lines\n\n{long.strip()}")
    assert unwrap("a\nb\n\nc", shortest=1) == "a b\n\nc" and unwrap("") == ""


def test_every_listed_text_that_is_there_can_be_read():
    listed = texts()
    assert [source.name for source in listed][-2:] == ["man:PAGE", "file:PATH"]
    for source in listed[:-2]:
        if source.why_not is None and (source.name.startswith("licence") or source.name == "pydoc:lambda"):
            assert isinstance(text(source.name), str)


@pytest.fixture
def manuals(tmp_path, monkeypatch):
    """A small folder of manual pages."""
    monkeypatch.setattr(module, "MANUALS", tmp_path)
    (tmp_path / "man1").mkdir()
    (tmp_path / "man5").mkdir()

    def add(name, roff):
        path = tmp_path / name
        path.write_bytes(gzip.compress(roff.encode()) if name.endswith(".gz") else roff.encode())
    return add


ROFF = r'''.\" a comment that is not text
.TH DEMO 1
.de zY
hidden macro text
..
.SH NAME
demo \- a page
.SH DESCRIPTION
The program \fBdemo\fP reads a file, prints \(lqwords\(rq and does so with the option
.BR \-\-all ,
which is \f(CWnot\fR the default\s-1.\s0 It goes on for long enough to be kept as a paragraph of its own.
.nf
code that is left out
.fi
.PP
.B Another
.I "paragraph of"
this page, with a back\e slash, that is again long enough so that it is kept where headings and short lines are not.
'''


def test_a_manual_page_loses_its_markup_and_keeps_its_words(manuals):
    manuals("man1/demo.1.gz", ROFF)
    first, second = text("man:demo").split("\n\n")
    assert first.startswith("The program demo reads a file, prints “words” and does so with the option --all, which is")
    assert "not the default. It goes" in first
    assert second.startswith("Another paragraph of this page, with a back\\ slash")
    for left_out in ("comment", "hidden", "code that", ".B", "\\f", "DESCRIPTION"):
        assert left_out not in text("man:demo")


def test_the_lowest_section_is_taken_unless_one_is_named(manuals):
    for section in (1, 5):
        manuals(f"man{section}/two.{section}", f".PP\n{f'section {section} ' * 20}")
    manuals("man1/two.x.1", ".PP\n" + "another page " * 20)
    assert text("man:two").startswith("section 1") and text("man:two.5").startswith("section 5")
    assert text("man:two.x").startswith("another page")


@pytest.mark.parametrize("roff, why", [(".so man1/other.1\n", "only points to man1/other.1"),
                                       (".Dd today\n.Sh NAME\n", "mdoc")])
def test_a_page_that_cannot_be_read_is_refused_in_words(manuals, roff, why):
    manuals("man1/odd.1", roff)
    with pytest.raises(ValueError, match=f"'odd': .*{why}.*take another"):
        text("man:odd")


def test_an_unknown_page_gets_a_near_match(manuals):
    manuals("man1/demo.1", ROFF)
    with pytest.raises(KeyError, match="man:demp.*Did you mean 'man:demo'"):
        text("man:demp")
    for name in ("../../etc/passwd", "", "zzz"):
        with pytest.raises(KeyError, match="no manual page"):
            text(f"man:{name}")


def test_a_file_is_read_as_it_is(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("Kürze\n\nzählt: ☃\n", encoding="utf-8-sig")
    assert text(f"file:{path}") == "Kürze\n\nzählt: ☃\n"


@pytest.mark.parametrize("content, why", [(b"ab\0cd", "NUL bytes"), ("größe".encode("latin-1"), "not in UTF-8"),
                                          (b"x" * 2049, "larger than")])
def test_what_is_no_text_is_refused(tmp_path, monkeypatch, content, why):
    monkeypatch.setattr(module, "LARGEST", 2048)
    path = tmp_path / "odd"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=why):
        text(f"file:{path}")


def test_a_broken_archive_and_a_folder_are_refused(tmp_path):
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"word " * 1000)[:20])
    for path in (tmp_path / "cut.gz", tmp_path):
        with pytest.raises(ValueError, match="cannot read"):
            text(f"file:{path}")


@pytest.mark.parametrize("name, said", [("pydoc:execmodl", "Did you mean 'pydoc:execmodel'"),
                                        ("execmodel", "named pydoc:"), ("poem:iliad", "no text named"),
                                        ("file:/not/there", "no text file"),
                                        ("licence:../hosts", "no text")])
def test_unknown_names_say_what_there_is(name, said):
    pytest.importorskip("pydoc_data.topics", reason="this Python was built without pydoc_data")
    with pytest.raises(KeyError, match=said):
        text(name)
    with pytest.raises(ValueError, match="a text is named"):
        text(None)


def test_a_machine_without_licences_or_topics_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LICENCES", tmp_path / "none")
    monkeypatch.setattr(module, "_topics", dict)
    assert {source.name for source in texts() if source.why_not} >= {"pydoc:TOPIC", "licence:NAME"}
    for name in ("pydoc:execmodel", "licence:GPL-3"):
        with pytest.raises(KeyError, match="take one of another kind"):
            text(name)
