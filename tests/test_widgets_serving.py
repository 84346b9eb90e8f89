"""The stepper through block tables as far as it goes without a browser: states, words, refusals, its static twin."""
import sys
from dataclasses import replace

import matplotlib
import pytest

from kvlab import widgets_serving as serving
from kvlab.figures._style import PALETTE, image
from kvlab.serving.request import Request
from kvlab.serving.scheduler_config import SchedulerConfig
from kvlab.widgets_serving import PoolState, block_stepper, engine_states, figure

# three requests for a pool of 6 blocks of 4: the third waits, and the second gives way when the first grows
THREE = [Request("a", 0.0, 8, 8), Request("b", 0.0, 8, 8), Request("c", 0.0, 8, 2)]


@pytest.fixture
def states():
    return engine_states(THREE, num_blocks=7, block_size=4)


def faces(made):
    return [matplotlib.colors.to_hex(patch.get_facecolor()) for patch in made.axes[0].patches]


def parts(explorer):
    """Play, slider, picture and words."""
    controls, picture, words = explorer.children
    return *controls.children, picture, words


def test_the_states_are_those_of_the_engine_one_per_step(states):
    assert (states[0].tables, states[0].words) == ({}, "step 0: nothing has been computed")
    assert {name: len(table) for name, table in states[1].tables.items()} == {"a": 2, "b": 2, "c": 2}
    assert states[1].words == ("step 1: computed 24 prompt tokens; admitted a, b, c. 6 of 6 blocks in use, 3 running, "
                               "0 waiting")
    assert not states[-1].tables and states[-1].words.endswith("0 of 6 blocks in use, 0 running, 0 waiting")
    said = " ".join(state.words for state in states)
    assert "preempted, its blocks taken away: c" in said and "admitted again b" in said and "; ended c" in said
    for state in states:
        held = [block for table in state.tables.values() for block in table]
        assert len(set(held)) == len(held) <= 6
        assert f"{len(held)} of 6 blocks" in state.words or state is states[0]


def test_no_more_steps_are_kept_than_asked_for():
    assert [state.words.partition(":")[0] for state in engine_states(THREE, num_blocks=7, block_size=4, steps=2)] == [
        "step 0", "step 1", "step 2"]
    with pytest.raises(ValueError, match="steps"):
        engine_states(THREE, steps=0)


def test_shared_blocks_stand_in_several_tables():
    pair = [Request(name, 0.0, 9, 2, prefix=(1, own), piece_tokens=4) for own, name in enumerate("ab", 5)]
    last = engine_states(pair, SchedulerConfig(prefix_caching=True), num_blocks=16, block_size=4)[1]
    assert last.tables["a"][0] == last.tables["b"][0] and last.tables["a"][1] != last.tables["b"][1]
    assert "#000000" in faces(figure(last))


def test_many_names_are_cut_short():
    crowd = [Request(str(i), 0.0, 1, 1) for i in range(12)]
    assert "admitted 0, 1, 2, 3, 4, 5, 6, 7 and 4 more" in engine_states(crowd)[1].words


def test_a_request_keeps_its_colour_when_others_have_gone(states):
    first = next(state for state in states if len(state.tables) == 3)
    alone = next(state for state in states if list(state.tables) == ["b"])
    for state in (first, alone):
        assert {faces(figure(state))[block] for block in state.tables["b"]} == {PALETTE[1]}


def test_few_requests_are_named_beside_their_colours_many_are_not():
    made = figure(PoolState({"long $x$": [1], "b": [2]}, 8, names=("z", "long $x$", "b")))
    (legend,) = made.legends
    assert [text.get_text() for text in legend.get_texts()] == ["long $x$", "b"]
    assert [matplotlib.colors.to_hex(patch.get_facecolor()) for patch in legend.get_patches()] == list(PALETTE[1:3])
    for other in (PoolState({str(i): [i] for i in range(1, 12)}, 16), PoolState({}, 4)):
        assert not figure(other).legends


def test_the_static_twin_is_the_steppers_picture(states):
    pytest.importorskip("ipywidgets", reason="the extra `notebook` is not installed")
    play, slider, picture, words = parts(block_stepper(states, at=1))
    assert picture.value == image(figure(states[1]), "png") and words.value == states[1].words
    slider.value = len(states) - 1
    assert picture.value == image(figure(states[-1]), "png") and words.value == states[-1].words
    assert play.value == slider.value
    play.value = 2
    assert slider.value == 2 and words.value == states[2].words
    assert (slider.min, slider.max, play.max) == (0, len(states) - 1, len(states) - 1)


def test_words_are_text_and_no_markup():
    pytest.importorskip("ipywidgets", reason="the extra `notebook` is not installed")
    hostile = PoolState({"<script>": [1]}, 4, "<script>alert(1)</script>")
    *_, words = parts(block_stepper([hostile]))
    assert "<script>" not in words.value and "&lt;script&gt;" in words.value


@pytest.mark.parametrize("count, at, said", [(0, 0, "no states to show"), (3, 3, "step 3 is not one of the 3"),
                                             (3, -1, "give a step from 0 to 2")])
def test_a_step_that_is_not_there_is_refused(count, at, said):
    with pytest.raises(ValueError, match=said):
        block_stepper([PoolState({}, 4)] * count, at)


@pytest.mark.parametrize("tables, num_blocks, said", [
    ({"a": [0]}, 4, "block id 0 is not one that a table may hold; this pool hands out 1 … 3"), ({"a": [4]}, 4, "id 4"),
    ({}, 5000, "a pool of 5,000 blocks cannot be seen in one picture"), ({}, 0, "num_blocks")])
def test_a_state_that_cannot_be_is_refused(tables, num_blocks, said):
    with pytest.raises(ValueError, match=said):
        PoolState(tables, num_blocks)


def test_a_picture_needs_no_widgets_and_a_stepper_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    state = PoolState({"mine": [3, 1]}, 8)
    assert figure(state)._repr_png_().startswith(b"\x89PNG")
    assert faces(figure(replace(state, num_blocks=5)))[1:] == [PALETTE[0], "#ffffff", PALETTE[0], "#ffffff"]
    with pytest.raises(ImportError, match=r"pip install 'kvlab\[notebook\]'"):
        serving.block_stepper([state])
