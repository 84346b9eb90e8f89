"""The Gantt scrubber without a browser: controls, the state at a moment, refusals, and the static twin."""
import pytest

pytest.importorskip("ipywidgets", reason="the extra `notebook` is not installed")
from kvlab import widgets_gantt  # noqa: E402
from kvlab.serving.gantt import SPANS  # noqa: E402
from kvlab.widgets_gantt import SmallEngine, gantt, gantt_scrubber  # noqa: E402


def parts(scrubber):
    """Its controls by description, its picture and its words."""
    grid, picture, words = scrubber.children
    return {control.description: control for control in grid.children}, picture, words


@pytest.fixture
def scrubber():
    return parts(gantt_scrubber(SmallEngine(count=6)))


def test_the_first_picture_is_the_static_figure(scrubber):
    _, picture, words = scrubber
    assert picture.value == gantt(SmallEngine(count=6))._repr_png_()
    assert words.value.startswith(f"at 5 s, {SmallEngine(count=6).used()} of 320 blocks in use")


def test_every_control_changes_the_picture_and_back_it_is_the_same(scrubber):
    controls, picture, words = scrubber
    before, start = (picture.value, words.value), {name: control.value for name, control in controls.items()}
    other = {"policy": "short_first", "admission": "worst_case", "blocks": 141, "requests / s": 1.0, "moment (s)": 2.0}
    assert set(other) == set(controls)
    for name, value in other.items():
        controls[name].value = value
        assert picture.value != before[0] or name in ("policy", "admission"), name
        controls[name].value = start[name]
        assert (picture.value, words.value) == before
    assert not any(control.continuous_update for control in controls.values() if hasattr(control, "continuous_update"))


def test_a_policy_changes_who_runs():
    fcfs, short = (SmallEngine(policy=policy, at_s=3.0) for policy in ("fcfs", "short_first"))
    assert fcfs.state() != short.state() and gantt(fcfs)._repr_png_() != gantt(short)._repr_png_()


def test_the_state_at_a_moment_is_that_of_the_spans():
    choice = SmallEngine(at_s=5.0)
    assert set(choice.state()) == set(SPANS)
    inside = {what: [r for r, kind, began, length in choice.spans if kind == what and began <= 5 < began + length]
              for what in SPANS}
    assert choice.state() == inside and any(inside.values())
    assert choice.used() == max((ended, used) for ended, used in choice.blocks if ended <= 5)[1] > 0
    assert not any(SmallEngine(at_s=1e6).state().values()) and SmallEngine(at_s=1e6).used() == 0
    assert SmallEngine(at_s=0.0).used() == 0, "no step has ended yet"


def test_preemption_is_among_the_spans_unless_the_worst_case_is_set_aside():
    assert "preempted" in {what for _, what, *_ in SmallEngine().spans}
    assert "preempted" not in {what for _, what, *_ in SmallEngine(admission="worst_case").spans}


def test_who_is_larger_than_the_pool_is_named_and_an_empty_chart_is_drawn():
    _, _, words = parts(gantt_scrubber(SmallEngine(num_blocks=2, count=3)))
    assert "3 rejected: larger than the pool" in words.value
    assert gantt(SmallEngine(num_blocks=2, count=3))._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize("wrong, said", [
    (dict(count=61), "at most 60"), (dict(count=0), "count"), (dict(rate=0), "above 0"),
    (dict(at_s=-1), "at least 0 s"), (dict(num_blocks=-5), "num_blocks"), (dict(rate=float("nan")), "above 0")])
def test_what_cannot_be_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        SmallEngine(**wrong)


@pytest.mark.parametrize("wrong", [dict(policy="no_such"), dict(workload="no_such"), dict(num_blocks=1)])
def test_what_only_the_simulation_knows_is_refused_there(wrong):
    with pytest.raises((ValueError, KeyError)):
        gantt(SmallEngine(**wrong))


def test_a_refusal_is_text_and_goes_away_again(scrubber, monkeypatch):
    controls, picture, words = scrubber
    monkeypatch.setattr(widgets_gantt, "SmallEngine", refuse)
    controls["moment (s)"].value = 7.0
    assert "<script>" not in words.value and "&lt;script&gt;" in words.value and picture.layout.display == "none"
    monkeypatch.undo()
    controls["moment (s)"].value = 5.0
    assert picture.layout.display == "" and words.value.startswith("at 5 s")


def refuse(**choice):
    raise ValueError("<script>alert(1)</script>")


def test_what_is_not_installed_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ipywidgets", None)
    with pytest.raises(ImportError, match=r"pip install 'kvlab\[notebook\]'"):
        gantt_scrubber()
    assert gantt(SmallEngine(count=2))._repr_png_().startswith(b"\x89PNG")
