"""Making and saving any figure: sources of rows, formats, fonts, the footer, and what is refused."""
import subprocess
import sys

import matplotlib
import pandas as pd
import pytest

import kvlab
from kvlab.figures import _make as making
from kvlab.figures import figures, make, save
from kvlab.figures._style import KNOWN, PALETTE, Style, drawing
from kvlab.record.environment import Manifest
from kvlab.record.export import StoreError, write_parquet
from kvlab.record.store import RunStore, read_table
from kvlab.record.wide import wide


def rows_for(module, run):
    """The made-up run for memory_wall's figures, the shipped one for other studies', none for the catalogue's."""
    if module.STUDY in (None, "memory_wall"):
        return None if module.STUDY is None else run
    return read_table(kvlab.reference(module.STUDY))


def footer(figure):
    return figure.get_supxlabel()


@pytest.mark.parametrize("name", figures.names())
def test_a_figure_module_says_what_it_shows_and_has_the_three_parts(name):
    module = figures[name]
    assert len(module.__doc__.strip().split("\n")[0]) > 30 and "claim" in module.__doc__
    assert callable(module.select) and callable(module.draw)


@pytest.mark.parametrize("name", figures.names())
def test_saved_files_are_the_image_the_pdf_with_type_42_fonts_and_exactly_the_rows(name, run, tmp_path):
    module = figures[name]
    given = rows_for(module, run)
    paths = save(name, given, tmp_path / "new" / "folder")
    assert [p.name for p in paths] == [f"{name}.png", f"{name}.pdf", f"{name}.csv"]
    png, pdf = paths[0].read_bytes(), paths[1].read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) > 20_000
    assert b"/Type3" not in pdf and b"/FontFile2" in pdf
    rows = module.select(run.iloc[:0] if given is None else given).reset_index(drop=True)
    pd.testing.assert_frame_equal(read_table(paths[2]), rows, check_exact=False, rtol=1e-12)


def test_the_same_rows_give_the_same_bytes(run, tmp_path):
    first, again = (save("attention_memory", run, tmp_path / name, ["png", "pdf", "svg"]) for name in "ab")
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in again]


def test_the_search_for_type_3_fonts_would_find_them(run, tmp_path):
    figure = make("attention_memory", run)
    with matplotlib.rc_context({"pdf.fonttype": 3}):
        figure.savefig(tmp_path / "x.pdf")
    assert b"/Type3" in (tmp_path / "x.pdf").read_bytes()


def test_a_run_may_be_a_table_a_directory_or_a_file(run, build, tmp_path):
    store = RunStore.create(tmp_path, "memory_wall", Manifest(study="memory_wall", environment={}))
    for comparison, rows in run[run["phase"] == "prefill"].groupby("comparison_id"):
        store.append(comparison, rows.to_dict("records"))
    store.close()
    write_parquet(run, tmp_path / "run.parquet")
    run.to_csv(tmp_path / "run.csv", index=False)
    drawn = []
    csv = tmp_path / "run.csv"
    for given in (run, store.path, str(tmp_path / "run.parquet"), csv, pd.read_csv(csv)):
        ax = make("attention_memory", given).axes[0]
        drawn.append([tuple(line.get_ydata()) for line in ax.lines])
    assert all(one == drawn[0] for one in drawn)
    assert kvlab.figure("attention_memory", run).axes[0].get_ylabel() == "peak memory beyond the inputs (B)"


def test_without_a_run_the_reference_run_is_drawn_and_its_absence_is_explained(run, tmp_path, monkeypatch):
    monkeypatch.setattr("kvlab.catalog.data_dir", lambda: tmp_path)
    with pytest.raises(StoreError, match="kvlab run memory_wall.*kvlab figure decode_time --run DIR"):
        make("decode_time")
    (tmp_path / "reference").mkdir()
    write_parquet(run, tmp_path / "reference" / "memory_wall.parquet")
    assert "20261129T181422Z-8a68e5" in footer(make("decode_time"))


def test_the_footer_names_hardware_run_date_kinds_and_resolution_and_no_path(run):
    words = footer(make("memory_wall", run))
    for part in ("A CPU, 2 logical cores", "fp32", "2026-11-29 18:14 UTC", "run 20261129T181422Z-8a68e5", "measured",
                 "modelled", "quoted", "n = 21–52 a point", "A/A resolution 1.010 [0.980, 1.041]",
                 "Not drawn, because it failed or was refused: Mine"):
        assert part in words, part
    assert "/" not in words.replace("A/A", "") and "\\" not in words
    memory = footer(make("attention_memory", run))
    assert "A/A" not in memory, "a resolution of times says nothing about memory"
    assert "Not drawn" not in memory, "what failed was a decode case"
    assert "nothing measured" in footer(make("kv_size"))


@pytest.mark.parametrize("formats", [("gif",), ("png", "PDF"), "jpeg"])
def test_an_unknown_format_is_refused_before_anything_is_written(formats, run, tmp_path):
    with pytest.raises(ValueError, match="allowed: png, pdf, svg"):
        save("decode_time", run, tmp_path / "out", formats)
    assert not (tmp_path / "out").exists()


def test_one_format_may_be_given_as_a_word(run, tmp_path):
    assert [p.name for p in save("attention_memory", run, tmp_path, "svg")] == ["attention_memory.svg",
                                                                                "attention_memory.csv"]
    assert b"<svg" in (tmp_path / "attention_memory.svg").read_bytes()


def test_bad_input_is_one_clear_sentence(run, build, tmp_path):
    with pytest.raises(KeyError, match="Did you mean 'decode_time'"):
        make("decode_tine", run)
    with pytest.raises(StoreError, match="no results at"):
        make("decode_time", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="long form.*lacks the columns"):
        make("decode_time", wide(run))
    with pytest.raises(ValueError, match="takes no run"):
        make("kv_size", run)
    two = build["table"](build["rows"]() + build["decode"]("sdpa", 1024, 8, 1e9, run_id="other"))
    with pytest.raises(ValueError, match="2 runs.*choose it"):
        make("memory_wall", two)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="a file stands where a folder is needed"):
        save("attention_memory", run, tmp_path / "file" / "out", ["png"])


def test_drawing_needs_neither_torch_nor_pyplot_and_leaves_matplotlib_as_it_was(run, tmp_path):
    write_parquet(run, tmp_path / "run.parquet")
    script = f"""
import sys, warnings
warnings.simplefilter("error")
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "seaborn"):
            raise ImportError(name + " is blocked in this test")
sys.meta_path.insert(0, Blocker())
import matplotlib
before = dict(dict.items(matplotlib.rcParams))               # a plain look-up of "backend" would import pyplot
from kvlab.figures import figures, save
for name in figures:
    made = {str(tmp_path / 'run.parquet')!r} if figures[name].STUDY == "memory_wall" else None
    save(name, made, {str(tmp_path)!r}, ["pdf"])
assert "matplotlib.pyplot" not in sys.modules
assert dict(dict.items(matplotlib.rcParams)) == before
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_notebook_can_show_a_figure_without_pyplot(run):
    assert make("attention_memory", run)._repr_png_().startswith(b"\x89PNG")


def test_names_with_markup_are_drawn_as_they_are_and_long_ones_do_not_leave_the_page(build):
    names = ["$\\frac{", "_hidden", "x" * 300, "<b>&"]
    rows = [build["prefill"](name, 512 * k, 1e8 * k) for name in names for k in (1, 2)]
    figure = make("attention_memory", build["table"](rows))
    figure.canvas.draw()
    legend = figure.legends[0]
    labels = [text.get_text() for text in legend.get_texts()]
    assert {"$\\frac{", "_hidden", "<b>&"} <= set(labels) and any("…" in label for label in labels)
    assert legend.get_window_extent().x1 <= figure.bbox.x1
    assert len(figure.legends) == 1
    assert legend.get_window_extent().y0 >= figure.axes[0].get_window_extent().y1, "it covers no point"


def test_looks_are_fixed_for_known_names_and_distinct_for_others():
    style = Style()
    assert style.looks(["sdpa"]) == {"sdpa": style.looks(KNOWN)["sdpa"]}
    assert style.looks(["b", "a", "sdpa"]) == style.looks(["sdpa", "a", "b"])
    many = style.looks([f"v{i:02}" for i in range(60)])
    assert len(set(many.values())) == 60 and not {"D", "d"} & {look.marker for look in many.values()}
    assert len({look.color for look in style.looks(KNOWN).values()}) == len(KNOWN)


def test_the_palette_is_seaborns_colorblind():
    import seaborn
    assert list(PALETTE) == seaborn.color_palette("colorblind").as_hex()


def test_settings_are_restored_when_drawing_fails():
    before = dict(matplotlib.rcParams)
    with pytest.raises(RuntimeError), drawing():
        assert matplotlib.rcParams["pdf.fonttype"] == matplotlib.rcParams["ps.fonttype"] == 42
        raise RuntimeError
    assert dict(matplotlib.rcParams) == before
    assert set(making.FORMATS) == {"png", "pdf", "svg", "pgf"}
