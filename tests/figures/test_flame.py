"""Flame strips: bars where the operators ran, one level per caller, kernels below, and what is refused."""
import pytest

from kvlab.figures._flame import COLORS, flame
from kvlab.record.trace import trace_of

SECOND = 1e6                                                     # a trace counts microseconds


def event(name, start, took, category="cpu_op", tid=1, **args):
    return dict(ph="X", cat=category, name=name, ts=start * SECOND, dur=took * SECOND, pid=1, tid=tid, args=args)


def call(start, took):
    return event("kvlab:call naive", start, took, "user_annotation")


def bars(ax):
    """(start, seconds, level) of every bar."""
    return [(patch.get_x(), patch.get_width(), patch.get_y() + patch.get_height() / 2) for patch in ax.patches]


def close(found):
    return [pytest.approx(one) for one in found]


NESTED = [event("aten::repeat_interleave", 10, 4), event("aten::copy_", 11, 2), event("aten::bmm", 15, 3)]


def test_an_operator_stands_above_its_caller_at_its_own_time():
    figure = flame(trace_of({"traceEvents": [call(10, 10), *NESTED]}))
    (ax,) = figure.axes
    assert bars(ax) == close([(0, 4, 0), (1, 2, 1), (5, 3, 0)])
    assert ax.get_xlim() == (0, pytest.approx(10)) and ax.get_title(loc="left") == "naive: 10 s, 3 operators"
    assert [text.get_text() for text in ax.texts] == ["repeat_interleave", "copy_", "bmm"]
    from matplotlib.colors import to_hex
    assert [to_hex(patch.get_facecolor()) for patch in ax.patches] == [COLORS["copy"], COLORS["copy"], COLORS["matmul"]]
    assert "measured by torch's profiler" in figure.get_supxlabel()


def test_only_the_last_call_and_its_own_thread_are_drawn():
    events = [call(0, 5), event("aten::early", 1, 1), call(10, 10), *NESTED, event("aten::elsewhere", 12, 1, tid=2)]
    assert len(bars(flame(trace_of({"traceEvents": events})).axes[0])) == 3


def test_kernels_stand_below_the_line():
    kernel = event("flash_fwd", 16, 2, "kernel", tid=7)
    found = bars(flame(trace_of({"traceEvents": [call(10, 10), *NESTED, kernel]})).axes[0])
    assert found[-1] == pytest.approx((6, 2, -1))


def test_each_trace_has_a_strip_over_its_own_time_and_its_variants_name():
    one = trace_of({"traceEvents": [call(10, 10), *NESTED], "kvlab": {"variant": "mine"}})
    two = trace_of({"traceEvents": [call(0, 2), event("aten::scaled_dot_product_attention", 0.5, 1)]})
    figure = flame(one, two)
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["mine: 10 s, 3 operators", "naive: 2 s, 1 operators"]
    assert [ax.get_xlim()[1] for ax in figure.axes] == close([10, 2])
    figure._repr_png_()
    first, second = (ax.get_tightbbox() for ax in figure.axes)
    assert second.y1 <= first.y0, "strips do not overlap"


def test_names_that_do_not_fit_their_bar_are_left_out():
    long = event("aten::_scaled_dot_product_flash_attention_for_cpu", 11, 0.1)
    assert not flame(trace_of({"traceEvents": [call(10, 10), long]})).axes[0].texts


def test_a_call_in_which_no_operator_ran_is_an_empty_strip():
    assert flame(trace_of({"traceEvents": [call(0, 1), event("aten::x", 3, 1)]})).axes[0].patches[:] == []


def test_what_is_no_profile_of_kvlab_is_refused():
    with pytest.raises(ValueError, match="no trace is given; make one"):
        flame()
    with pytest.raises(ValueError, match="kvlab trace FILE"):
        flame(trace_of({"traceEvents": NESTED}))
