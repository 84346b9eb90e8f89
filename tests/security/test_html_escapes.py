"""What strangers wrote stays text: in pages (seen by a browser), pictures, terminals, LaTeX and spreadsheets."""
import csv
import re
import shutil
from html.parser import HTMLParser

import hostile
import pytest
from typer.testing import CliRunner

from kvlab.cli import app
from kvlab.figures._style import Drawing, drawing, image
from kvlab.record.export import export
from kvlab.record.store import read_table
from kvlab.report import write_report
from kvlab.show import print_failures, print_findings, print_list, print_readings, printable

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return hostile.run(tmp_path_factory.mktemp("runs"))


def ledger_rows():
    """Two claims whose every text is hostile, the names too."""
    from kvlab.claims._words import VERDICTS
    text = hostile.ALL
    both = {name: text for one in ("section", "claim", "because", "needs", "what", "said")
            for name in (one, f"{one}_zh")}
    evidence = dict(name=text, about=text, about_zh=text, value=1.0, low=None, high=None, unit=text, n=3,
                    kind="measured", source=text, note=text, note_zh=text)
    return [dict(both, id=f"C0{n}{text}", verdict=next(iter(VERDICTS)), kind="measured", value=1.0, low=None,
                 high=None, unit=text, figure="", commands=[text],
                 evidence=[evidence, dict(evidence, note="", note_zh="")]) for n in (1, 2)]


def pages(run, folder):
    """Name -> file of everything kvlab writes that a browser opens."""
    from kvlab.claims_page import claim, summary, write_page
    made = {"report": write_report(run, folder / "report.html")}
    made["claims"] = write_page(ledger_rows(), folder / "claims.html")
    import pandas as pd
    frame = pd.DataFrame(ledger_rows())
    cell = summary(frame)._repr_html_() + claim(frame, frame["id"][0])._repr_html_()
    made["cell"] = folder / "cell.html"
    made["cell"].write_text(f"<!doctype html><meta charset='utf-8'><body>{cell}", encoding="utf-8")
    made["table"] = folder / "table.html"
    made["table"].write_text(f"<!doctype html><meta charset='utf-8'><body>{read_table(run)._repr_html_()}",
                             encoding="utf-8")
    with drawing():
        figure = Drawing(figsize=(4, 3))
        figure.subplots().set_title(hostile.ALL.replace("\x07", "").replace("\x08", ""))
        figure.axes[0].plot([1, 2], label=hostile.MARKUP[1])
        figure.legend()
        made["svg"] = folder / "figure.svg"
        made["svg"].write_bytes(image(figure, "svg", {"Title": hostile.MARKUP[1], "Keywords": list(hostile.MARKUP)}))
    return made


class Elements(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes


def test_no_page_has_an_element_that_a_run_named(run, tmp_path):
    for name, path in pages(run, tmp_path).items():
        found = Elements(path.read_text(encoding="utf-8"))
        assert not found.tags & {"script", "iframe", "object", "embed", "link", "base", "form"}, name
        assert not [one for one, _ in found.attributes if one.startswith("on")], name
        for one, value in found.attributes:
            assert one not in ("src", "href", "xlink:href") or value.startswith(("#", "data:image/png;base64,")), name
    assert "default-src &#x27;none&#x27;" not in (tmp_path / "claims.html").read_text(encoding="utf-8")


def test_pages_that_stand_alone_forbid_scripts_and_loading_too(run, tmp_path):
    made = pages(run, tmp_path)
    for name in ("report", "claims"):
        policy = dict(Elements(made[name].read_text(encoding="utf-8")).attributes)
        assert "content" in policy
        assert re.search("http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; img-src data:; ",
                         made[name].read_text(encoding="utf-8")), name


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed on this machine")
def test_in_a_browser_no_script_runs_and_nothing_is_asked_for(run, tmp_path):
    """Also without the policy that forbids it: escaping alone must do."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the dependency group `browser` is not installed")
    made = pages(run, tmp_path)
    bare = {f"{name} without its policy": path.with_name(f"bare-{path.name}") for name, path in made.items()
            if name != "svg"}
    for path, out in zip([path for name, path in made.items() if name != "svg"], bare.values()):
        out.write_text(re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", path.read_text("utf-8")), "utf-8")
    trap = tmp_path / "trap.html"
    trap.write_text("<!doctype html>" + hostile.MARKUP[0] + hostile.MARKUP[1], encoding="utf-8")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage",
                                                                         "--disable-gpu"])
        try:
            page = browser.new_page()
            asked, said = [], []
            page.on("request", lambda one: asked.append(one.url))
            page.on("dialog", lambda one: (said.append(one.message), one.dismiss()))
            page.goto(trap.as_uri())
            assert page.evaluate("window.hacked") == 1, "the trap works: what is not escaped would be noticed"
            for name, path in {**made, **bare}.items():
                asked.clear()
                page.goto(path.as_uri(), wait_until="load")
                assert page.evaluate("window.hacked") is None, name
                assert [url for url in asked if not url.startswith(("file:", "data:"))] == [] and not said, name
                assert "window.hacked=1" in page.content(), f"{name} shows the text"
        finally:
            browser.close()


def test_tables_and_words_in_notebooks_are_escaped_whatever_the_user_set(run, monkeypatch):
    pytest.importorskip("itables.widget", reason="the extra `notebook` is not installed")
    import itables.options
    import itables.widget

    from kvlab import widgets
    monkeypatch.setattr(itables.options, "allow_html", True)
    frame = read_table(run).rename(columns={"note": hostile.MARKUP[0]})
    shown = str(widgets.table(frame).get_state()["_dt_args"])
    assert "onerror" in shown and "<img" not in shown and "<script" not in shown and "<svg" not in shown
    plain = itables.widget.ITable(frame, maxBytes=0)
    assert "<img" in str(plain.get_state()["_dt_args"]), "the user's option alone would have let it through"


# --- terminals ------------------------------------------------------------------------------------

def clean(text):
    return all(line.isprintable() for line in text.split("\n"))


def test_what_a_terminal_is_shown_holds_no_control_characters(run, tmp_path, capsys):
    other = hostile.run(tmp_path, values=(2e-3,))
    for words in (["compare", run, other], ["compare", run, other, "--metric", f"m {hostile.ALL}"],
                  ["compare", "no such\x1b[31m", "run\u202e"]):
        done = CliRunner().invoke(app, list(map(str, words)), standalone_mode=False)
        assert clean(done.output), words
    print_failures(read_table(run))
    from types import SimpleNamespace
    print_findings([SimpleNamespace(name="a:b", sentence=hostile.ALL)])
    print_list([{"name": hostile.ALL, "about": hostile.TERMINAL}])
    out, err = capsys.readouterr()
    assert clean(out + err) and "\\x1b[2J" in out and "[bold]markup[/bold]" in out and "hacked" in err
    assert not clean("\x1b[31m") and not clean("\u202e") and printable("\x9b\u2069") == "\\x9b\\u2069"


def test_a_measured_row_is_printed_escaped_also_its_metric(capsys):
    from kvlab.attention import VariantRef, trial
    from kvlab.shapes import AttentionShape, Workload
    rows = [dict(row, value=row["value"]) for row in hostile.rows("c0", hostile.ALL, 1e-3)]
    for row in rows:
        row.update(format_path="")
    print_readings(rows, trial(VariantRef("naive"), Workload.decode(AttentionShape(4, 1, 64), kv_len=64)))
    out, _ = capsys.readouterr()
    assert "\x1b[2J" not in out and "\x9b" not in out and "\u202e" not in out


# --- LaTeX ----------------------------------------------------------------------------------------

def commands(text):
    """LaTeX's own commands in it, comments left out as TeX leaves them out (a line ends at \\r too)."""
    lines = re.split(r"[\r\n]", text)
    return re.findall(r"(?<!\\)(?:\\\\)*\\(input|write|immediate|openin|include|catcode|def|csname)",
                      "\n".join(re.sub(r"(?<!\\)%.*", "", line) for line in lines)) + [
        line for line in lines if "^^" in re.sub(r"(?<!\\)%.*", "", line)]


def test_latex_tables_hold_no_command_of_a_run(run, tmp_path):
    text = export(run, "latex", tmp_path / "t.tex").read_text(encoding="utf-8")
    assert "textbackslash" in text and commands(text) == []
    assert commands("a\\input{x} % \\write") == ["input"] and commands("% a\r\\input{x}") == ["input"]


@pytest.mark.parametrize("column", ["metric", "unit", "note", "error", "variant", "run_id", "case_id", "kv_format",
                                    "scope", "source"])
def test_latex_of_a_table_that_kvlab_did_not_check(column, tmp_path):
    frame = hostile.any_table(**{column: hostile.LATEX})
    if column in ("metric", "unit"):                                    # a run without calls: one reading a line
        frame["variant"] = ""
    path = hostile.as_parquet(frame, tmp_path / "a.parquet")
    assert commands(export(path, "latex", tmp_path / "t.tex").read_text(encoding="utf-8")) == []


def test_latex_of_metrics_named_by_strangers_beside_calls(tmp_path):
    frame = hostile.any_table()
    frame.loc[frame["metric"].isin(["m sdpa", "power"]), "metric"] = hostile.LATEX
    path = hostile.as_parquet(frame, tmp_path / "a.parquet")
    assert commands(export(path, "latex", tmp_path / "t.tex").read_text(encoding="utf-8")) == []


def test_captions_for_latex_hold_no_command_of_a_run():
    from kvlab.figures._caption import caption
    frame = hostile.any_table(hardware=hostile.LATEX, variant=hostile.LATEX, run_id=hostile.LATEX)
    told = caption(hostile.LATEX, frame, frame)
    assert "textbackslash" in told.latex and commands(told.latex) == []


@pytest.mark.skipif(not any(map(shutil.which, ("pdflatex", "xelatex", "lualatex"))), reason="no LaTeX is installed")
def test_pgf_pictures_hold_no_command_of_a_run():
    from kvlab.figures._caption import Caption
    from kvlab.figures._pgf import pgf
    with drawing():
        figure = Drawing(figsize=(3, 2))
        figure.subplots().set_title("\\input{x}\\write18{id}")
        made = pgf(figure, "f", Caption(hostile.LATEX, (hostile.LATEX,), ("kvlab",)))
    text = made["f.pgf"].decode()
    assert "textbackslash" in text and set(commands(text)) <= {"def", "catcode"}     # matplotlib's own


# --- spreadsheets ---------------------------------------------------------------------------------

def test_no_cell_of_a_csv_is_a_formula_and_reading_it_gives_the_text_back(tmp_path):
    """A spreadsheet runs a cell that begins like a formula; kvlab writes ' before it and takes it away again."""
    frame = hostile.any_table()
    frame = frame.loc[frame.index.repeat(len(hostile.FORMULAS))].reset_index(drop=True)
    frame["note"] = [text for _ in range(4) for text in hostile.FORMULAS]
    frame["case_id"] = [f"c{n}" for n in range(len(frame))]
    path = hostile.as_parquet(frame, tmp_path / "a.parquet")
    out = export(path, "csv", tmp_path / "a.csv")
    with open(out, newline="", encoding="utf-8") as file:
        cells = [(name, cell) for row in csv.DictReader(file) for name, cell in row.items()]
    begins = {cell[0] for name, cell in cells if name == "note"}
    assert begins == {"'"}
    back = read_table(out)
    assert back["note"].tolist() == frame["note"].tolist()
    wide = export(path, "csv", tmp_path / "w.csv", wide=True)
    with open(wide, newline="", encoding="utf-8") as file:
        assert not [cell for row in csv.reader(file) for cell in row if re.match(r"[=+@\t]|-(?![\d.])", cell)]
