"""The counters' figures: which points lie where, hollow or filled, and that what nobody measured is said."""
import numpy as np
import pytest
from made_counters import NO_GPU, absent, behind, bytes_of, context, made, on_cpu, on_gpu

from kvlab.figures import make
from kvlab.figures.measured_vs_modelled import select as bytes_shown
from kvlab.figures.telemetry import select as telemetry_shown


def points(ax):
    """{(x, y): filled} of every marker."""
    return {(float(x), float(y)): line.get_markerfacecolor() not in ("white", "none") for line in ax.lines
            if line.get_marker() not in ("None", "", None, "|", "_")
            for x, y in zip(line.get_xdata(), line.get_ydata())}


def footer(figure):
    return " ".join(figure.get_supxlabel().split())


def test_one_panel_per_source_that_counted_and_the_others_are_named_below_with_their_reason():
    figure = make("measured_vs_modelled", made(on_cpu()))
    assert [ax.get_title() for ax in figure.axes] == ["callgrind (simulated)"]
    for source, why in (("ncu", "ncu is not installed"), ("gpm", NO_GPU), ("perf", "no PMU")):
        assert f"Not drawn: {source} gave nothing: {why}" in footer(figure)
    figure = make("measured_vs_modelled", made(on_gpu()))
    assert [ax.get_title() for ax in figure.axes] == ["ncu (measured)", "gpm (measured)"]
    assert "Not drawn" not in footer(figure)


def test_a_point_lies_at_the_formulas_bytes_and_the_sources():
    (ax,) = make("measured_vs_modelled", made(on_cpu())).axes
    drawn = sorted(points(ax))
    np.testing.assert_allclose([x for x, _ in drawn], 8e6)                       # of every case in on_cpu
    np.testing.assert_allclose(sorted(y / x for x, y in drawn), [1, 1.01, 1.04, 1.1, 1.42])   # two lie at 1
    assert ax.get_xscale() == ax.get_yscale() == "log" and ax.get_xlim() == ax.get_ylim()


def test_simulated_is_hollow_and_measured_is_filled():
    assert set(points(make("measured_vs_modelled", made(on_cpu())).axes[0]).values()) == {False}
    assert set(points(make("measured_vs_modelled", made(on_gpu())).axes[0]).values()) == {True}


def test_bands_are_the_tolerances_of_what_is_drawn():
    def edges(rows):
        (ax,) = make("measured_vs_modelled", made(rows)).axes
        found = set()
        for band in ax.collections:
            if (vertices := band.get_paths() and band.get_paths()[0].vertices) is not None and len(vertices) > 4:
                left = vertices[np.isclose(vertices[:, 0], vertices[:, 0].min())]
                found |= {round(float(y / x), 3) for x, y in left}
        return found
    assert edges(bytes_of(context("c_decode"), "callgrind", 1.0)) == {0.95, 1.05}
    assert edges(bytes_of(context("sdpa"), "callgrind", 1.0)) == {0.85, 1.15}


def test_exactly_what_is_drawn_is_what_is_selected():
    rows = bytes_shown(made(on_cpu()))
    assert set(rows["metric"]) == {"hbm_bytes", "traffic_to_model"}
    assert set(rows[rows["kind"] == "missing"]["source"]) == {"ncu", "gpm", "perf"}
    lonely = [r for r in on_cpu() if not (r["variant"] == "read" and r["metric"] == "traffic_to_model")]
    assert "read" not in set(bytes_shown(made(lonely))["variant"]), "without the formula's bytes there is no place"


def test_a_run_without_any_count_is_refused_with_the_reasons():
    rows = absent(context("naive"), "ncu", "no permission", "hbm_bytes")
    with pytest.raises(ValueError, match="needs hbm_bytes.*ncu: no permission.*kvlab run counters"):
        make("measured_vs_modelled", made(rows))


def test_bytes_by_cache_are_points_at_the_caches_size_on_a_line_of_the_formula():
    rows = behind("c_naive", [1.0, 1.1, 1.0]) + behind("c_flash", [1.0, 1.0, 1.0]) + on_cpu()
    naive, flash = make("traffic_by_cache", made(rows)).axes
    titles = naive.get_title(), flash.get_title()
    assert titles == ("c_naive, prefill", "c_flash, prefill"), "c_decode of on_cpu was not swept"
    drawn = points(naive)
    assert sorted(x for x, _ in drawn) == [65536, 131072, 262144]
    np.testing.assert_allclose(sorted(y for _, y in drawn), [8e6 / 3, 1.1 * 4e6, 8e6])
    assert set(drawn.values()) == {False}, "simulated: hollow"
    (line,) = [line for line in naive.lines if line.get_marker() in ("None", None, "")and len(line.get_xdata()) == 3
               and line.get_linestyle() == "-"]
    np.testing.assert_allclose(line.get_ydata(), [8e6, 4e6, 8e6 / 3])


def test_a_shape_near_a_step_has_a_line_of_its_own_and_torchs_panels_come_last():
    near = [{**r, "q_len": 76, "case": "near", "case_id": f"near-{r['case_id']}"}
            for r in behind("c_naive", [1, 1.5, 1])]
    rows = behind("naive", [1.0, 1.0, 1.0]) + behind("c_naive", [1.0] * 5) + near
    figure = make("traffic_by_cache", made(rows))
    own, torchs = figure.axes
    assert (own.get_title(), torchs.get_title()) == ("c_naive, prefill", "naive, prefill")
    assert len(points(own)) == 5 + 1 and len(points(torchs)) == 3, "two of three lie on the others"
    told = {text.get_text() for legend in figure.legends for text in legend.get_texts()}
    assert {"group ratio 4: simulated", "group ratio 4, 76 query tokens: simulated"} <= told


def test_bytes_behind_one_cache_only_are_no_sweep():
    with pytest.raises(ValueError, match="three sizes of cache.*--size small"):
        make("traffic_by_cache", made(on_cpu()))


def test_telemetry_shows_each_case_in_order_with_its_range_and_units():
    figure = make("telemetry", made(on_gpu()))
    sm, memory, power, clocks = figure.axes
    assert [y for _, y in sorted(points(sm))] == pytest.approx([97, 96, 95])
    assert [y for _, y in sorted(points(memory))] == pytest.approx([90, 90, 90])
    assert {y for _, y in points(power)} == {600.0, 601.0, 602.0, 580.0}
    assert {round(y, 3) for _, y in points(clocks)} == {1.98, 3.2}
    (bars,) = [line for line in sm.collections]
    low, high = bars.get_segments()[0][:, 1]
    assert low == pytest.approx(97 * 0.98) and high == pytest.approx(97 * 1.01)
    assert [t.get_text() for t in clocks.get_xticklabels()] == ["sdpa 1:1", "sdpa 8:1", "naive_repeat 8:1"]
    assert not any(ax.texts for ax in figure.axes)


def test_telemetry_that_nobody_measured_is_words_and_reasons_not_zeros():
    figure = make("telemetry", made(on_cpu()))
    assert all(not points(ax) and "no source here measures it" in ax.texts[0].get_text() for ax in figure.axes)
    assert f"gpm gave nothing: {NO_GPU}" in footer(figure) and f"nvml gave nothing: {NO_GPU}" in footer(figure)
    assert set(telemetry_shown(made(on_cpu()))["kind"]) == {"missing"}


def test_a_panel_that_lacks_its_rows_says_so_beside_those_that_have_them():
    rows = [r for r in on_gpu() if r["source"] != "nvml"]
    rows += absent(context("sdpa", ratio=1), "nvml", "no permission", "power_instant", "power_average", "sm_clock")
    figure = make("telemetry", made(rows))
    assert [bool(points(ax)) for ax in figure.axes] == [True, True, False, False]
    assert "nvml gave nothing: no permission" in footer(figure)


def test_telemetry_of_a_table_that_never_asked_is_refused():
    with pytest.raises(ValueError, match="telemetry needs sm_utilization.*kvlab run counters"):
        make("telemetry", made(bytes_of(context("naive"), "callgrind", 1.0)))


def test_of_two_sources_of_utilisation_gpm_is_shown_once():
    rows = on_gpu()
    rows += [{**r, "source": "ncu", "value": 0.5, "low": None, "high": None} for r in rows
             if r["metric"] == "sm_utilization"]
    shown = telemetry_shown(made(rows))
    assert list(shown[shown["metric"] == "sm_utilization"]["source"].unique()) == ["gpm"]
