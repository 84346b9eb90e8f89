"""The figures of kernels, from made rows: which points lie where, what is told apart, and what could not run."""
import json

import made_kernels as made
import numpy as np
import pytest

from kvlab.figures import make
from kvlab.figures._kernels import layout_of, question
from kvlab.figures.block_size import select as pages_shown
from kvlab.figures.format_support import select as words_shown
from kvlab.figures.kernels import select as shares_shown
from kvlab.record.reading import schema
from kvlab.record.reading import table as empty


def markers(ax, marker=None):
    """(x, y) of every marker of that kind, and whether it is filled."""
    return {(round(float(x), 4), round(float(y), 4)): line.get_markerfacecolor() != "white" for line in ax.lines
            if (line.get_marker() == marker if marker else line.get_marker() in "osv^P<>X*phH8")
            for x, y in zip(line.get_xdata(), line.get_ydata())}


def legend(figure):
    return [text.get_text() for one in figure.legends for text in one.get_texts()]


def footer(figure):
    return " ".join(figure.get_supxlabel().split())


def table(*rows):
    return made.made([row for some in rows for row in some])


@pytest.fixture(scope="module")
def cpu():
    return made.made(made.on_cpu())


def test_each_comparison_asks_one_question(cpu):
    asked = question(cpu)
    found = {name: set(cpu[asked == name]["comparison_id"]) for name in set(asked)}
    assert set(found) == {"decode", "paging", "formats", "memory", "prefill", "step"}
    assert found["paging"] == {"paging-cpu"} and len(found["decode"]) == 2 and len(found["formats"]) == 3


def test_pages_whose_times_failed_are_still_no_comparison_of_variants():
    rows = [{**row, "metric": "latency_s", "value": None, "kind": "missing", "note": "it broke", "low": None,
             "high": None} for row in made.paging() if row["metric"] == "latency_s"]
    assert set(question(made.made(rows))) == {"paging"}


def test_a_layout_in_words_says_what_tells_it_apart():
    rows = made.made(made.paging())
    words = set(layout_of(rows))
    assert {"contiguous", "pages of 16 random", "pages of 16 random, tokens first", "pages of 1 in order"} <= words


# ---- kernels

def test_a_share_lies_at_its_value_decode_and_prefill_apart(cpu):
    decode, prefill = make("kernels", cpu).axes
    assert "read ceiling" in decode.get_xlabel() and "matmul ceiling" in prefill.get_xlabel()
    assert sorted(x for x, _ in markers(decode)) == [0.1, 0.3, 0.3, 0.45, 0.5, 0.55, 0.6, 0.8]
    assert sorted(x for x, _ in markers(prefill)) == [0.1, 0.4, 0.6]
    assert set(markers(decode).values()) == {True}, "time and ceiling are measured: filled"
    labels = [text.get_text() for text in decode.get_yticklabels()]
    assert labels == ["32:32 heads\n4,096 tokens", "32:4 heads\n8,192 tokens"]


def test_pages_and_formats_are_not_among_the_variants_side_by_side(cpu):
    shown = shares_shown(cpu)
    assert not shown["comparison_id"].str.startswith(("paging", "formats", "memory", "step")).any()


def test_what_could_not_run_is_named_below_with_its_reason(cpu):
    figure = make("kernels", cpu)
    assert f"Not drawn: flashinfer gave nothing: {made.NO_CUDA}" in footer(figure)
    assert not {"flashinfer", "flash_attn"} & set(legend(figure))
    schema().validate(shares_shown(cpu))


def test_a_variant_in_two_layouts_is_two_names():
    contiguous = [row for row in made.share({"sdpa": 0.5, "paged": 0.8}) if row["variant"] == "paged"]
    paged = [{**row, "block_size": None, "page_order": "", "case_id": row["case_id"] + "c", "value": 0.7, "low": None,
              "high": None} for row in contiguous if row["metric"] == "bandwidth_share"]
    figure = make("kernels", table(made.share({"sdpa": 0.5, "paged": 0.8}), paged))
    assert legend(figure)[:3] == ["sdpa", "paged, pages of 16 random", "paged, contiguous"]
    assert sorted(x for x, _ in markers(figure.axes[0])) == [0.5, 0.7, 0.8]


def test_the_roofline_of_a_shape_ends_its_share_of_the_read_ceiling():
    rows = made.share({"sdpa": 0.2}, heads=1)
    about = next(row for row in rows if row["metric"] == "bandwidth_share")
    rows += [{**about, "metric": metric, "unit": "flop/B", "value": value, "low": None, "high": None}
             for metric, value in (("intensity", 16.0), ("ridge", 6.4))]
    rows.append({**about, "metric": "read_ceiling", "unit": "B/s", "value": 2e10, "variant": "", "case": json.dumps({}),
                 "kind": "measured", "low": None, "high": None})
    figure = make("kernels", made.made(rows))
    (ax,) = figure.axes
    strokes = [line.get_xdata() for line in ax.lines if line.get_color() == "black" and line.get_linewidth() == 1.2]
    np.testing.assert_allclose(strokes, [[0.4, 0.4]])
    assert "roofline: what this shape allows (modelled)" in legend(figure) and "100 %: 20 GB/s" in ax.get_xlabel()


def test_threads_and_dtypes_are_told_where_they_are_unusual():
    one = [{**row, "threads": 1, "dtype": "bf16", "comparison_id": "one", "case_id": row["case_id"] + "1"}
           for row in made.share({"sdpa": 0.2})]
    (ax,) = make("kernels", table(made.share({"sdpa": 0.4, "naive": 0.2}), one)).axes
    labels = [text.get_text() for text in ax.get_yticklabels()]
    assert labels == ["32:4 heads\n8,192 tokens", "32:4 heads, bf16, 1 thread\n8,192 tokens"]
    assert ax.get_title(loc="left") == "query heads:KV heads, tokens; fp32, 2 threads unless said"


# ---- block_size

def test_the_ratio_of_each_layout_over_its_block_size(cpu):
    (ax,) = make("block_size", cpu).axes
    assert [text.get_text() for text in ax.get_xticklabels()] == ["1", "16", "64", "128", "256"]
    values = sorted(y for _, y in markers(ax))
    assert values == sorted(value for (size, *_), value in made.PAGED.items() if size)
    tokens = [label for label in legend(make("block_size", cpu)) if "tokens first" in label]
    assert tokens == ["pages in random order, tokens first"]
    assert any(list(line.get_ydata()) == [1, 1] for line in ax.lines), "a line at no cost"


def test_the_same_trial_measured_twice_is_a_band():
    rows = made.paging()
    plain = next(row for row in rows if row["metric"] == "latency_s" and row["block_size"] is None)
    again = {**plain, "replica": 1, "case_id": "again", "value": 4e-3, "low": 3.9e-3, "high": 4.1e-3}
    figure = make("block_size", made.made([*rows, again]))
    assert "contiguous ÷ contiguous, measured twice (A/A)" in legend(figure)
    assert "contiguous ÷ contiguous, measured twice (A/A)" not in legend(make("block_size", made.made(rows)))
    (band,) = figure.axes[0].patches
    low, high = band.get_y(), band.get_y() + band.get_height()
    assert low == pytest.approx(plain["low"] / 4.1e-3) and high == pytest.approx(plain["high"] / 3.9e-3)
    assert set(pages_shown(made.made([*rows, again]))["replica"]) == {0, 1}


def test_a_run_without_pages_is_refused():
    with pytest.raises(ValueError, match="block_size needs to_contiguous.*kvlab run kernels"):
        make("block_size", made.made(made.share({"sdpa": 0.5})))


def test_two_runs_in_one_table_are_refused(cpu):
    two = made.made([*made.paging(), *({**row, "run_id": "other"} for row in made.paging())])
    with pytest.raises(ValueError, match="holds 2 runs"):
        make("block_size", two)


# ---- format_speed

def test_time_and_bytes_saved_by_each_format(cpu):
    calls, steps = make("format_speed", cpu).axes
    saved = {y for _, y in markers(calls)}
    assert saved == {faster for name, (faster, _) in made.FORMATS.items() if name != "fp32"}
    dashed = {round(float(line.get_ydata()[0]), 3) for line in calls.lines
              if line.get_linestyle() == "--" and len(line.get_xdata()) == 3}
    assert dashed == {fewer for name, (_, fewer) in made.FORMATS.items() if name != "fp32"}
    assert [text.get_text() for text in calls.get_xticklabels()] == ["2K", "8K", "32K"]


def test_a_step_gains_what_bytes_allow_and_the_articles_numbers_are_diamonds_on_it(cpu):
    figure = make("format_speed", cpu)
    _, steps = figure.axes
    modelled = markers(steps)
    weights, kv = 145.4e9, 256 * 32768 * 327680
    assert modelled[256, round((weights + kv) / (weights + kv / 2) - 1, 4)] is False, "modelled: hollow"
    assert {y for _, y in markers(steps, "D")} == {0.08, 0.05}
    assert {x for x, y in markers(steps, "D") if y == 0.08} == {3, 10, 38}
    for said in ("the article: FP8 +8 %; at these batches", "the article: INT8 +5 %; at these batches"):
        assert said in legend(figure)


def test_without_the_models_weights_the_calls_stand_alone():
    figure = make("format_speed", table(made.formats(), made.unknown_weights()))
    assert len(figure.axes) == 1
    with pytest.raises(ValueError, match="format_speed needs format_speedup"):
        make("format_speed", made.made(made.steps()))


# ---- flash_flops

def test_useful_flops_are_equal_and_bytes_are_not(cpu):
    bars, memory = make("flash_flops", cpu).axes
    tops = sorted(round(patch.get_y() + patch.get_height(), 3) for patch in bars.patches)
    assert tops == sorted([2.0, 62.5, 1.1, 1.0, 1.0, 1.0])
    assert all(patch.get_facecolor()[:3] == (1, 1, 1) for patch in bars.patches), "modelled: hollow"
    assert [text.get_text().split("\n")[0] for text in bars.get_xticklabels()] == ["naive", "flash", "sdpa"]
    assert "1.54 s" in bars.get_xticklabels()[0].get_text() and "20 GFLOP useful" in bars.get_xlabel()


def test_bytes_that_a_counter_saw_are_filled_points_beside_the_bar():
    rows = made.prefill()
    naive = next(row for row in rows if row["variant"] == "naive" and row["metric"] == "hbm_bytes")
    rows.append({**naive, "kind": "measured", "source": "gpm", "value": 520e6, "low": 510e6, "high": 530e6})
    figure = make("flash_flops", made.made(rows))
    assert markers(figure.axes[0]) == {(0.19, 65.0): True}
    assert "bytes counted ÷ ideal" in legend(figure)


def test_the_exponent_of_memory_stands_in_the_legend_and_a_value_below_resolution_is_an_upper_limit(cpu):
    assert any(label.startswith("naive: n^2.00") for label in legend(make("flash_flops", cpu)))
    rows = [{**row, "low": 0.0} if row["q_len"] == 2048 else row for row in made.memory()]
    figure = make("flash_flops", table(made.prefill(), rows))
    assert "arrow: upper limit" in figure.axes[1].get_xlabel()


def test_a_run_without_prompts_is_refused():
    with pytest.raises(ValueError, match="flash_flops needs useful_flops, executed_flops"):
        make("flash_flops", made.made(made.memory()))


def test_a_gpus_run_draws_all_four():
    gpu = made.made(made.on_gpu())
    for name in ("kernels", "block_size", "format_speed", "flash_flops"):
        assert make(name, gpu).axes


# ---- format_support

def test_the_matrix_of_words_is_the_catalogues():
    rows = words_shown(empty([]))
    assert rows["value"].iloc[0] == 2 and rows["note"].iloc[0].startswith("native: fp32 × fp32")
    schema().validate(rows)
    assert set(rows["kind"]) == {"quoted", "missing"} and (rows["note"] != "").all()
    words = {(model, kind): note.partition(":")[0] for model, kind, note in
             zip(rows["model"], rows["kv_format"], rows["note"])}
    assert words["Ampere 8.0", "fp8_e4m3"] == "storage-only" and words["Ada 8.9", "fp8_e4m3"] == "native"
    assert words["CDNA3 gfx942", "fp8_e4m3"] == "storage-only" and words["x86 with AVX2", "bf16"] == "storage-only"
    assert rows[rows["kind"] == "quoted"]["source"].ne("").all()


def test_each_cell_says_its_word_and_has_its_colour():
    figure = make("format_support")
    (ax,) = figure.axes
    kinds, targets = ([text.get_text() for text in axis.get_ticklabels()] for axis in (ax.xaxis, ax.yaxis))
    assert len(ax.patches) == len(ax.texts) == len(kinds) * len(targets)
    assert targets[:3] == ["Volta 7.0", "Turing 7.5", "Ampere 8.0"] and "fp8\ne4m3" in kinds
    said = {(targets[int(text.xy[1])], kinds[int(text.xy[0])]): text.get_text() for text in ax.texts}
    assert said["Hopper 9.0", "int4"] == "stored" and said["Blackwell 10.0", "nvfp4"] == "native"
    assert said["Ampere 8.0", "nvfp4"] == "none" and said["CDNA4 gfx950", "nvfp4"] == "?"
    faces = {text.get_text(): patch.get_facecolor() for text, patch in zip(ax.texts, ax.patches)}
    assert len(set(faces.values())) == len(faces) == 4
