"""The roofline: where its line, its points and the quoted diamonds lie."""
import numpy as np
import pytest

from kvlab.catalog.gpus import gpu
from kvlab.figures import make
from kvlab.figures.memory_wall import GPUS, select

RIDGE = 5.0


def markers(ax, shape):
    """(x, y, filled) of every drawn point of that marker."""
    return [(x, y, line.get_markerfacecolor() not in ("white", "none")) for line in ax.lines
            if line.get_marker() == shape for x, y in zip(line.get_xdata(), line.get_ydata())]


@pytest.fixture(scope="module")
def ax(run):
    return make("memory_wall", run).axes[0]


def test_axes_say_what_and_in_which_unit(ax):
    assert "intensity" in ax.get_xlabel() and "(flop/B)" in ax.get_xlabel()
    assert ax.get_ylabel() == "share of the matmul ceiling (%)"
    assert ax.get_xscale() == ax.get_yscale() == "log"
    top = next(child for child in ax.child_axes)
    assert "group ratio" in top.get_xlabel()
    assert list(top.xaxis.get_majorticklocs()) == [0.5, 4, 16]
    assert top.xaxis.get_major_formatter().format_ticks([0.5, 4, 16]) == ["1", "8", "32"]
    assert ax.yaxis.get_major_formatter().format_ticks([0.1, 1]) == ["10 %", "100 %"]


def test_the_roof_is_the_smaller_of_one_and_intensity_over_ridge(ax):
    roof = max((line for line in ax.lines if line.get_marker() == "None"), key=lambda line: len(line.get_xdata()))
    x, y = roof.get_data()
    np.testing.assert_allclose(y, np.minimum(1, x / RIDGE))
    assert x[0] < 0.5 and x[-1] > 300 and (y == 1).any() and (y < 1).any()


def test_reached_shares_are_filled_and_the_roofs_own_are_hollow(ax, run):
    own = run[(run["metric"] == "flops_share") & (run["replica"] == 0) & (run["variant"] == "sdpa")]
    circles = markers(ax, "o")
    filled = sorted(y for _, y, is_filled in circles if is_filled)
    np.testing.assert_allclose(filled, sorted(own["value"]))
    assert len(markers(ax, "^")) == 3 and all(is_filled for *_, is_filled in markers(ax, "^"))
    hollow = {(x, y) for x, y, is_filled in circles if not is_filled}
    assert hollow == {(0.5, 0.1), (4, 0.8), (16, 1.0)}
    for x, _, is_filled in circles:
        assert min(abs(np.log10(x / i)) for i in (0.5, 4, 16)) < 0.1 and (is_filled or x in (0.5, 4, 16))


def test_a_share_whose_time_is_modelled_is_hollow(build):
    rows = build["decode"]("sdpa", 1024, 8, 8e9, time_kind="modelled")
    figure = make("memory_wall", build["table"](rows))
    assert [is_filled for *_, is_filled in markers(figure.axes[0], "o")] == [False, False]


def test_quoted_numbers_are_diamonds_with_their_source(ax, run):
    diamonds = {(round(x, 6), y) for x, y, is_filled in markers(ax, "D") if not is_filled}
    ridges = {(round(gpu(name).ridge("bf16"), 6), 1.0) for name in GPUS}
    assert ridges < diamonds and {y for _, y in diamonds - ridges} == {0.1}
    quoted = select(run).query("kind == 'quoted'")
    assert len(quoted) == 4 and (quoted["source"] != "").all() and set(quoted["unit"]) == {"flop/B", "ratio"}
    assert {"A100: 153", "H100: 295", "H200: 206"} <= {text.get_text() for text in ax.texts}


def test_ridges_that_differ_make_a_band(ax, build):
    rows = build["decode"]("sdpa", 1024, 8, 8e9) + build["decode"]("sdpa", 1024, 1, 8e9)
    for r in rows:
        if r["metric"] == "ridge" and r["group_ratio"] == 1:
            r["value"] = 2 * RIDGE
    figure = make("memory_wall", build["table"](rows))
    assert "roofline, ridge 7.5 [5.0, 10.0] flop/B" in [t.get_text() for t in figure.legends[0].get_texts()]
    band = figure.axes[0].collections[0].get_paths()[0].vertices
    at = band[np.isclose(band[:, 0], band[:, 0].min())][:, 1]
    np.testing.assert_allclose(at.max() / at.min(), 2, rtol=1e-6)
    flat = ax.collections[0].get_paths()[0].vertices
    assert np.ptp(flat[np.isclose(flat[:, 0], flat[:, 0].min())][:, 1]) == 0


def test_a_share_above_the_ceiling_stays_in_sight(build):
    rows = build["decode"]("sdpa", 1024, 32, 4e10)
    assert make("memory_wall", build["table"](rows)).axes[0].get_ylim()[1] > 6


def test_many_variants_do_not_press_the_axes_flat(build):
    def height(count):
        rows = [r for i in range(count) for r in build["decode"](f"variant number {i:02}", 1024, 8, 8e9)]
        figure = make("memory_wall", build["table"](rows))
        figure.canvas.draw()
        return figure.axes[0].get_window_extent().height
    assert height(24) > height(2) - 5


@pytest.mark.parametrize("metric", ["flops_share", "ridge", "latency_s"])
def test_a_run_without_what_it_needs_is_refused_by_name(run, metric):
    with pytest.raises(ValueError, match=f"memory_wall needs {metric} of decode cases.*kvlab run memory_wall"):
        make("memory_wall", run[run["metric"] != metric])
