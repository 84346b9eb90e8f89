"""Decode time over bytes and over group ratio."""
import numpy as np
import pytest

from kvlab.figures import make


@pytest.fixture(scope="module")
def figure(run):
    return make("decode_time", run)


def lines(ax, **wanted):
    return [line for line in ax.lines if all(getattr(line, f"get_{name}")() == value for name, value in wanted.items())]


def test_left_time_grows_with_ideal_bytes_and_the_dashed_line_is_the_read_ceiling(figure):
    left = figure.axes[0]
    assert "(B)" in left.get_xlabel() and left.get_ylabel() == "time of a decode call (s)"
    x = np.array([2 * n * 4 * 128 * 4 for n in (1024, 2048, 4096)])
    (sdpa,), (repeat,), (ceiling,) = (lines(left, marker="o"), lines(left, marker="^"), lines(left, linestyle="--"))
    np.testing.assert_allclose(sdpa.get_data(), [x, x / 8e9])
    np.testing.assert_allclose(repeat.get_data(), [x, x / 6e8])
    np.testing.assert_allclose(ceiling.get_data(), [x, x / 2e10])
    assert list(left.child_axes[0].xaxis.get_majorticklocs()) == list(x)
    assert left.child_axes[0].get_xlabel() == "kv_len (tokens) at group ratio 8"


def test_bars_are_the_intervals(figure):
    heights = [np.array(c.get_segments())[:, :, 1] for c in figure.axes[0].collections]
    for y in heights:
        np.testing.assert_allclose(y[:, 1] / y[:, 0], 1.02 / 0.99)
    assert len(heights) == 2


def test_right_time_by_group_ratio_at_the_length_that_has_most_of_them(figure):
    right = figure.axes[1]
    assert right.get_xlabel().endswith("at kv_len 2,048")
    (sdpa,) = lines(right, marker="o")
    np.testing.assert_allclose(sdpa.get_data(), [[1, 8, 32], [2 * 2048 * 32 // r * 512 / 8e9 for r in (1, 8, 32)]])


def test_the_legend_has_the_fitted_bandwidth_and_its_share(figure):
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[0].startswith("sdpa: 8 GB/s [") and labels[0].endswith("40 %")
    assert labels[1].startswith("naive_repeat: 600 MB/s [") and labels[1].endswith(" 3 %")
    assert labels[2] == "ideal bytes at the read ceiling, 20 GB/s = 100 %"


def test_a_single_ratio_has_one_panel_and_two_lengths_no_slope(build):
    figure = make("decode_time", build["table"]([r for n in (1024, 2048) for r in build["decode"]("Mine", n, 8, 1e9)]))
    assert len(figure.axes) == 1 and figure.legends[0].get_texts()[0].get_text() == "Mine"


def test_a_time_that_does_not_grow_has_no_slope(build):
    rows = [r for n, speed in ((1024, 1e9), (2048, 2e9), (4096, 4e9)) for r in build["decode"]("flat", n, 8, speed)]
    label = make("decode_time", build["table"](rows)).legends[0].get_texts()[0].get_text()
    assert label == "flat: no slope can be told"


def test_what_is_lacking_is_named(run, build):
    with pytest.raises(ValueError, match="decode_time needs read_ceiling of decode cases"):
        make("decode_time", run[run["metric"] != "read_ceiling"])
    with pytest.raises(ValueError, match="latency_s, ideal_bytes, read_ceiling of decode cases"):
        make("decode_time", run[run["phase"] == "prefill"])
    with pytest.raises(ValueError, match="at batch size 1"):
        make("decode_time", build["table"](build["decode"]("sdpa", 1024, 8, 8e9, batch=4)))
