"""Explorers as far as they go without a browser: controls, the answer in exact bytes, refusals, and static twins."""
import sys
from xml.etree import ElementTree

import pandas as pd
import pytest

pytest.importorskip("ipywidgets", reason="the extra `notebook` is not installed")
from kvlab import listing, widgets  # noqa: E402
from kvlab.figures import make  # noqa: E402


def parts(explorer):
    """Its controls by description, its picture and its words."""
    grid, picture, words = explorer.children
    return {control.description: control for control in grid.children}, picture, words


@pytest.fixture
def kv():
    return parts(widgets.kv_explorer())


@pytest.fixture
def roofline():
    return parts(widgets.roofline_explorer())


def test_the_first_picture_is_the_static_figure_with_its_exact_numbers(kv):
    _, picture, words = kv
    assert picture.value == make("kv_budget")._repr_png_() == widgets.figure(widgets.KVBudget())._repr_png_()
    head, *lines = [[cell.text or "" for cell in row] for row in
                    ElementTree.fromstring(words.value.partition("</style>")[2]).iter("tr")]
    assert head == ["metric", "model", "A100 SXM4 80GB", "H100 SXM5 80GB", "H200 SXM 141GB", "kind", "how"]
    assert lines[0][:2] == ["kv_bytes", "21,474,836,480 B"] and lines[0][5] == "modelled"
    assert lines[-3][:6] == ["memory_bytes", "", "80,000,000,000 B", "80,000,000,000 B", "141,000,000,000 B", "quoted"]
    assert lines[-1][:6] == ["sequences_that_fit", "", "320", "320", "648", "modelled"]


def test_every_control_is_answered(kv):
    controls, picture, words = kv
    answers = {"sequences": (32, "42,949,672,960 B"), "context": (8192, "42,949,672,960 B"),
               "kv format": ("fp32", "42,949,672,960 B"), "tensor parallel": (4, "5,368,709,120 B"),
               "weight bits": (8, "9,088,275,456 B"), "reserve": (0.2, "16,000,000,000 B"),
               "gpus": (("MI300X",), "192,000,000,000 B"), "model": ("deepseek-ai/DeepSeek-V3", "4,605,345,792 B")}
    assert set(answers) == set(controls)
    before, start = picture.value, {name: control.value for name, control in controls.items()}
    for name, (value, said) in answers.items():
        assert said not in words.value
        controls[name].value = value
        assert said in words.value and picture.value != before, name
        controls[name].value = start[name]
    assert picture.value == before, "back where it was, it is the same picture"


def test_formats_that_are_only_sized_are_offered_too(kv):
    controls, _, words = kv
    controls["kv format"].value = "q8_0"
    assert f"{21_474_836_480 * 34 // 64:,} B" in words.value                # 34 bytes per 32 elements of 2 bytes


def test_the_roofline_walks_with_its_controls(roofline):
    controls, picture, words = roofline
    assert "7.984 flop/B" in words.value and picture.value == make("decode_roofline")._repr_png_()
    for control, value, said in (("group ratio", 16, "15.94 flop/B"), ("sequences", 256, "256 flop/B"),
                                 ("gpu", "L4", "403.3 flop/B")):
        controls[control].value = value
        assert said in words.value, control


def test_what_cannot_be_is_said_without_a_picture_and_goes_away_again(kv):
    controls, picture, words = kv
    for control, wrong, said, right in (
            ("model", "tiiuae/falcon-7b", "tp=8 does not fit the heads", "openai/gpt-oss-20b"),
            ("gpus", (), "no GPU is chosen", ("L4",))):
        controls[control].value = wrong
        assert said in words.value and "Traceback" not in words.value and picture.layout.display == "none"
        controls[control].value = right
        assert picture.layout.display == "" and "kv_bytes" in words.value


def test_a_refusal_is_text_and_no_markup(kv, monkeypatch):
    def refuse(choice):
        raise ValueError("<script>alert(1)</script>")
    monkeypatch.setattr(widgets, "_drawn", refuse)
    controls, _, words = kv
    controls["sequences"].value = 1
    assert "<script>" not in words.value and "&lt;script&gt;" in words.value


def test_sliders_answer_when_they_are_let_go(kv, roofline):
    for controls in (kv[0], roofline[0]):
        sliders = [control for control in controls.values() if hasattr(control, "continuous_update")]
        assert len(sliders) >= 3 and not any(slider.continuous_update for slider in sliders)


def test_an_explorer_starts_from_any_choice_also_one_between_its_steps():
    controls, _, _ = parts(widgets.kv_explorer(widgets.KVBudget("falcon-7b", 5000, 7, "int8/block32", 1, gpus=("l4",))))
    assert [controls[name].value for name in ("model", "context", "sequences", "kv format", "gpus")] == [
        "tiiuae/falcon-7b", 5000, 7, "int8/block32", ("L4",)]
    controls, _, _ = parts(widgets.roofline_explorer(widgets.DecodeStep("h200", 3, 100, 1, "fp16")))
    assert [controls[name].value for name in ("gpu", "sequences", "context", "group ratio")] == [
        "H200 SXM 141GB", 3, 100, 1]


def test_a_table_takes_listings_and_result_tables():
    pytest.importorskip("anywidget", reason="itables[widget] is not installed")
    shown = widgets.table(listing.models())
    assert type(shown).__name__ == "ITable" and list(shown.df.columns)[:2] == ["name", "aliases"]
    assert shown.df["params"].dtype == "Int64", "an unknown count makes no floats of the known ones"
    assert all(isinstance(text, str) for text in shown.df["aliases"])
    result = pd.DataFrame({"metric": ["latency_s"], "value": [1.5]})
    assert widgets.table(result).df["value"].tolist() == [1.5]


@pytest.mark.parametrize("package, made, needed", [
    ("ipywidgets", lambda: widgets.kv_explorer(), "ipywidgets"),
    ("itables.widget", lambda: widgets.table([]), "itables")])
def test_what_is_not_installed_is_named_with_the_remedy(package, made, needed, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"need {needed}.*pip install 'kvlab\[notebook\]'"):
        made()


def test_figures_need_no_widgets(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert widgets.figure(widgets.DecodeStep())._repr_png_().startswith(b"\x89PNG")
