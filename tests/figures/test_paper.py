"""Figures for papers: a venue's widths and fonts, the caption beside the picture, pgf, the gallery, what is refused."""
import re
import shutil
import subprocess
import warnings
from pathlib import Path

import matplotlib
import pandas as pd
import pytest
from matplotlib.text import Text
from typer.testing import CliRunner

from kvlab.cli import app, main
from kvlab.figures import _pgf, _venue, figures, make, save
from kvlab.figures._caption import caption, footer
from kvlab.figures._gallery import entries, thumbnail
from kvlab.figures._style import KINDS, PAGE, Style, drawing, sized
from kvlab.figures._venue import VENUES, venue
from kvlab.record._tex import escaped
from kvlab.record.store import read_table

ROOT = Path(__file__).parents[2]
PANELS = ("batching", "gantt", "format_support", "kv_budget")
pytestmark = pytest.mark.filterwarnings("ignore:the venue sets its text in")


def box(text, figure):
    """Where a text is, as shares of the figure."""
    found = text.get_window_extent()
    return found.x0 / figure.bbox.width, found.x1 / figure.bbox.width, found.y0 / figure.bbox.height, \
        found.y1 / figure.bbox.height


def shown(figure):
    """Every text but the ticks', of which some lie outside of the axes and are not drawn."""
    ticks = {label for ax in figure.axes for axis in (ax.xaxis, ax.yaxis) for tick in
             (*axis.get_major_ticks(), *axis.get_minor_ticks()) for label in (tick.label1, tick.label2)}
    return [text for text in figure.findobj(Text)
            if text not in ticks and text.get_visible() and text.get_text().strip()]


@pytest.mark.parametrize("name", VENUES)
def test_a_venue_has_widths_sizes_and_a_source(name):
    place = venue(name)
    assert place.source and 2.9 < min(place.widths) and max(place.widths) < 7.3 and 6 <= place.small < place.text <= 10
    assert list(place.widths) == sorted(set(place.widths))
    settings = place.settings()
    with drawing(place):
        assert matplotlib.rcParams["pdf.fonttype"] == 42 and matplotlib.rcParams["font.size"] == place.text
        assert sized(PAGE) == place.text
    assert settings["font.family"][-1] == "DejaVu Sans" and set(settings) <= set(matplotlib.rcParams)


def test_the_widths_are_those_of_the_style_files():
    widths = {name: [round(width, 2) for width in venue(name).widths] for name in VENUES}
    assert widths == dict(neurips=[5.5], icml=[3.25, 6.75], iclr=[5.5], acl=[3.03, 6.3], ieee=[3.49, 7.14],
                          acm=[3.34, 7.01], slides=[5.51])


@pytest.mark.parametrize("name, columns, sentence", [("neurips", 2, "has one column"), ("icml", 3, "two columns"),
                                                     ("acl", 0, "--columns 0")])
def test_columns_that_a_page_lacks_are_refused(name, columns, sentence):
    with pytest.raises(ValueError, match=sentence):
        venue(name).width(columns)


def test_panels_stand_below_each_other_only_where_a_row_would_be_too_narrow():
    for style, rows in ((Style(), 1), (Style(5.5, venue("neurips")), 1), (Style(3.25, venue("icml")), 3)):
        with drawing(style.venue):
            figure, axes = style.figure(3, 3, width_ratios=[3, 2, 1])
        assert len({ax.get_subplotspec().rowspan.start for ax in axes}) == rows and len(axes) == 3
        assert figure.get_figwidth() == style.width


@pytest.mark.parametrize("name", PANELS)
@pytest.mark.parametrize("place", ["acl"])                                    # the narrowest, with the largest text
def test_a_figure_in_one_column_is_whole_and_its_labels_do_not_touch(name, place):
    figure = make(name, venue=place)
    figure.draw_without_rendering()
    assert figure.get_figwidth() == pytest.approx(venue(place).width(1))
    assert figure.get_figheight() <= venue(place).height + 0.01
    for text in shown(figure):
        x0, x1, y0, y1 = box(text, figure)
        assert -0.02 < x0 and x1 < 1.04 and -0.02 < y0 and y1 < 1.02, text.get_text()
    for ax in figure.axes:
        labels = [one.get_window_extent() for one in ax.get_xticklabels() if one.get_text() and one.get_visible()]
        labels = sorted(labels, key=lambda one: one.x0)
        if labels and not ax.get_xticklabels()[0].get_rotation() % 90:
            assert all(one.x1 <= two.x0 + 1 for one, two in zip(labels, labels[1:])), name
        assert ax.get_window_extent().height > 0.3 * figure.dpi, "no panel is pressed flat"
    for legend in figure.legends:
        assert legend.get_window_extent().x1 <= figure.bbox.width


def test_a_figure_higher_than_a_page_says_what_to_do():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        make("ratio_census", venue="slides")
    assert any(re.search(r"ratio_census is .* inches high and a page of slides has 2.8: include it at \d+ %",
                         str(one.message)) for one in said)


def test_with_a_venue_the_footer_is_beside_the_picture_and_nothing_is_lost(run, tmp_path):
    paths = save("memory_wall", run, tmp_path, ["png", "pdf", "svg"], venue="icml")
    assert [path.name.partition(".")[2] for path in paths] == ["png", "pdf", "svg", "caption.txt", "caption.tex", "csv"]
    told, tex = paths[3].read_text(encoding="utf-8"), paths[4].read_text(encoding="utf-8")
    rows = read_table(paths[5])
    lines = list(footer(rows, run))
    assert len(lines) >= 3 and all(line.rstrip(".") in told for line in lines)
    assert tex.strip() == escaped(told.strip()) and "\\%" in tex or "%" not in told
    png, pdf, svg = (path.read_bytes() for path in paths[:3])
    assert b"/Subject" in pdf and b"/Keywords" in pdf and b"/Type3" not in pdf and b"/FontFile2" in pdf
    assert b"Description" in png and b"20261129T181422Z-8a68e5" in png
    assert "A CPU, 2 logical cores" in svg.decode() and "A/A resolution" in svg.decode()
    assert svg.decode().count("A/A resolution") == 1, "in the metadata, and not in the picture"
    pd.testing.assert_frame_equal(rows, figures["memory_wall"].select(run).reset_index(drop=True), check_exact=False)


def test_without_a_venue_files_say_nothing_of_themselves_and_no_caption_is_written(run, tmp_path):
    paths = save("attention_memory", run, tmp_path, ["svg"])
    assert [path.name for path in paths] == ["attention_memory.svg", "attention_memory.csv"]
    assert b"dc:description" not in paths[0].read_bytes()


def test_an_anonymous_figure_names_no_run_anywhere(run, tmp_path):
    for path in save("memory_wall", run, tmp_path, ["pdf", "svg"], venue="neurips", anonymous=True):
        assert b"8a68e5" not in path.read_bytes(), path.name
    assert "run-1" in (tmp_path / "memory_wall.csv").read_text()
    assert "A CPU, 2 logical cores" in (tmp_path / "memory_wall.caption.txt").read_text(encoding="utf-8")


def test_the_caption_names_every_kind(run):
    rows = figures["memory_wall"].select(run)
    told = caption("title", rows, run)
    assert {"measured", "modelled", "quoted", "memory_wall", "20261129T181422Z-8a68e5"} <= set(told.keywords)
    assert all(KINDS[kind] in told.text for kind in ("measured", "modelled", "quoted"))
    assert caption("t", rows, run, anonymous=True).keywords[-1] == "memory_wall"
    absent = rows.assign(kind="missing", value=None, note="no counter", source="nvml")
    assert ". ." not in caption("t", absent, run).text, "no line where no number is drawn"


def test_a_font_that_stands_in_is_said_once(monkeypatch):
    monkeypatch.setattr(_venue, "findSystemFonts", lambda: [])
    monkeypatch.setattr(_venue, "_there", lambda: {"STIXGeneral", "DejaVu Sans"})
    _venue.font.cache_clear()
    try:
        with pytest.warns(UserWarning, match="STIXGeneral stands in.*Install the font"):
            assert _venue.font(_venue.TIMES) == "STIXGeneral"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert _venue.font(_venue.TIMES) == "STIXGeneral" and _venue.font(("DejaVu Sans",)) == "DejaVu Sans"
    finally:
        _venue.font.cache_clear()


def test_pgf_without_latex_says_what_to_install(run, tmp_path, monkeypatch):
    monkeypatch.setattr(_pgf.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="none of pdflatex, xelatex, lualatex is on the PATH; install TeX Live"):
        save("attention_memory", run, tmp_path / "out", ["pgf"], venue="icml")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not any(map(shutil.which, _pgf.ENGINES)), reason="no LaTeX is installed")
def test_pgf_is_text_for_latex_and_compiles(build, tmp_path):
    rows = [build["prefill"](name, 512 * k, 1e8 * k) for name in ("50%_of $x^2 & {#1}\\z~", "≤ µ") for k in (1, 2)]
    paths = save("attention_memory", build["table"](rows), tmp_path, ["pgf"], venue="icml")
    text = paths[0].read_text(encoding="utf-8")
    assert text.startswith("%% Peak memory") or "%%" in text[:3]
    assert r"50\%\_of \$x\textasciicircum{}2 \& \{\#1\}\textbackslash{}z\textasciitilde{}" in text
    assert "≤" not in re.sub("%.*", "", text) and "/fonts/" not in text
    engine = _pgf.engine()
    if subprocess.run(["kpsewhich", "pgf.sty"], capture_output=True).returncode:
        pytest.skip("LaTeX's package pgf is not installed")
    (tmp_path / "a.tex").write_text("\\documentclass{article}\\usepackage{pgf,times}\\begin{document}"
                                    "\\input{attention_memory.pgf}\\input{attention_memory.caption.tex}\\end{document}")
    done = subprocess.run([engine, "-halt-on-error", "-interaction=batchmode", "a.tex"], cwd=tmp_path,
                          capture_output=True, timeout=60)
    assert done.returncode == 0 and (tmp_path / "a.pdf").stat().st_size > 5000


@pytest.mark.parametrize("arguments, sentence", [
    (["kv_size", "--venue", "icm"], "no venue named 'icm'. Did you mean 'icml'? Known: acl, acm"),
    (["kv_size", "--all"], "either the NAME of a figure (kvlab ls figures) or --all, not both"),
    ([], "give the NAME of a figure (kvlab ls figures) or --all"),
    (["--all", "--run", "x"], "leave --run out"), (["kv_size", "--columns", "2"], "give --venue too"),
    (["kv_size", "--format", "png,gif"], "allowed: png, pdf, svg, pgf")])
def test_bad_input_of_the_verb_is_one_sentence(arguments, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["kvlab", "figure", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and sentence in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_all_draws_every_figure_and_a_page_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr("kvlab.figures._gallery.figures", {name: figures[name] for name in ("kv_context",)})
    done = CliRunner().invoke(app, ["figure", "--all", "--venue", "ieee", "--format", "png", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    for name in ("kv_context",):
        assert (tmp_path / f"{name}.png").exists() and f'src="{name}.png"' in page
        assert f"kvlab figure {name} --venue ieee" in page and (tmp_path / f"{name}.caption.txt").exists()


def test_the_gallery_page_lists_every_figure_as_it_is_and_its_pictures_are_small():
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    pictures = {path.stem: path.stat().st_size for path in (ROOT / "docs/figures/gallery").glob("*.png")}
    found = list(entries())
    assert [one.name for one in found] == figures.names() and set(pictures) == set(figures.names())
    for one in found:
        assert f"### {one.name}\n" in page and one.shows in page and f"(figures/gallery/{one.name}.png)" in page
        assert f"`{one.command}`; {', '.join(one.kinds)}\n" in page, f"python tools/gallery.py: {one.name} has changed"
    assert max(pictures.values()) <= 60_000 and sum(pictures.values()) <= 2_000_000


def test_a_thumbnail_is_a_small_png(run):
    small = thumbnail(make("attention_memory", run)._repr_png_())
    assert small.startswith(b"\x89PNG") and len(small) < 60_000
