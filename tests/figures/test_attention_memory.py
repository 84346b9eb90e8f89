"""Prefill memory: points, limits below the resolution, fitted exponents and guide lines."""
import numpy as np
import pytest

from kvlab.figures import make


def by_marker(ax, marker):
    return next(line for line in ax.lines if line.get_marker() == marker)


def test_points_exponents_and_guides(run):
    figure = make("attention_memory", run)
    (ax,) = figure.axes
    n = np.array([512, 1024, 2048])
    np.testing.assert_allclose(by_marker(ax, "s").get_data(), [n, 16.0 * n**2])
    np.testing.assert_allclose(by_marker(ax, "v").get_data(), [n, 2048.0 * n])
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[0] == "naive: n^2.00 [2.00, 2.00]" and labels[1].startswith("flash: n^1.00 [0.")
    slopes = [round(float(np.polyfit(np.log(line.get_xdata()), np.log(line.get_ydata()), 1)[0]), 6)
              for line in ax.lines if line.get_linestyle() == ":"]
    assert slopes == [1, 2] and [text.get_text() for text in ax.texts] == ["∝ n", "∝ n²"]
    assert ax.get_xlabel() == "prompt length n (tokens); 4 query heads, group ratio 4, head_dim 128"
    assert ax.get_ylabel().endswith("(B)")
    assert ax.xaxis.get_major_formatter().format_ticks([512, 1024, 2048]) == ["512", "1,024", "2,048"]


def test_a_value_below_the_resolution_is_an_upper_limit(build):
    rows = [build["prefill"]("flash", n, value) for n, value in ((512, 2.0e5), (1024, 4e6), (2048, 8e6))]
    ax = make("attention_memory", build["table"](rows)).axes[0]
    marked = [tuple(line.get_ydata()) for line in ax.lines if line.get_marker() == "v"]
    assert marked == [(4e6, 8e6), (2.0e5 + 2**20,)]
    assert ax.get_xlabel().endswith("arrow: upper limit")
    assert any(line.get_marker() not in ("v", "None", "_", "|") for line in ax.lines), "an arrow that points down"


def test_zero_without_resolution_is_left_out_and_nothing_else_is_refused(build):
    some = [build["prefill"]("sdpa", n, v, 0) for n, v in ((512, 0.0), (1024, 4e6))]
    ax = make("attention_memory", build["table"](some)).axes[0]
    assert list(by_marker(ax, "o").get_xdata()) == [1024]
    with pytest.raises(ValueError, match="every value in the table is 0.*--size large"):
        make("attention_memory", build["table"](some[:1]))


def test_a_run_without_prefill_is_refused(run):
    with pytest.raises(ValueError, match="needs peak_extra_bytes of prefill cases"):
        make("attention_memory", run[run["phase"] == "decode"])
