"""The decode step under a data sheet's roof: values against the library's own, what moves a point and what does not."""
from dataclasses import replace

import pytest

from kvlab.attention import ideal_traffic, useful_flops
from kvlab.catalog.gpus import gpus
from kvlab.figures import make
from kvlab.figures._style import Style
from kvlab.figures.decode_roofline import DecodeStep, X, Y, draw, select
from kvlab.kv.formats import kv_format
from kvlab.record.reading import schema, table

LAYERS, PARAMETERS = 80, 72_706_203_648


def rows_of(choice):
    return select(table([]), choice)


def value(choice, scope, metric):
    rows = rows_of(choice)
    (found,) = rows[(rows["scope"] == scope) & (rows["metric"] == metric)]["value"]
    return found


@pytest.mark.parametrize("choice", [
    DecodeStep(), DecodeStep(batch_size=3, kv_len=777, group_ratio=64, kv_format="int8/token"),
    DecodeStep(kv_len=64, group_ratio=1, kv_format="int8/block16")])
def test_attention_is_what_the_library_counts_for_one_layer_times_the_layers(choice):
    flops, moved = choice.parts()["attention"]
    ideal = ideal_traffic(choice.workload, kv_format(choice.kv_format), itemsize=2)
    assert moved == LAYERS * (ideal.read_bytes + ideal.write_bytes)
    assert flops == LAYERS * useful_flops(choice.workload)


def test_rows_are_a_valid_table_and_the_step_is_the_sum_of_its_parts():
    rows = rows_of(DecodeStep())
    schema().validate(rows)
    assert set(rows["kind"]) == {"quoted", "modelled"}
    for metric in ("useful_flops", "ideal_bytes"):
        attention, weights, step = (value(DecodeStep(), part, metric) for part in ("attention", "weights", "step"))
        assert attention + weights == step
    assert value(DecodeStep(batch_size=7), "weights", "useful_flops") == 2 * PARAMETERS * 7
    assert value(DecodeStep(), "weights", "ideal_bytes") == 2 * PARAMETERS


def test_the_batch_moves_the_weights_and_not_attention():
    few, many = DecodeStep(batch_size=1), DecodeStep(batch_size=128)
    assert value(many, "weights", "intensity") == pytest.approx(128 * value(few, "weights", "intensity"))
    assert value(many, "attention", "intensity") == pytest.approx(value(few, "attention", "intensity"))


def test_the_group_ratio_and_the_format_move_attention_and_not_the_weights():
    at = DecodeStep(kv_len=32_768, group_ratio=8)
    assert value(at, "attention", "intensity") == pytest.approx(8, rel=0.01)
    for moved, intensity in ((replace(at, group_ratio=16), 16), (replace(at, kv_format="fp32"), 4)):
        assert value(moved, "attention", "intensity") == pytest.approx(intensity, rel=0.01)
        assert value(moved, "weights", "intensity") == value(at, "weights", "intensity")


def test_a_part_attains_what_the_nearer_roof_allows():
    far_left, beyond = DecodeStep(batch_size=1), DecodeStep(batch_size=1024)
    assert value(far_left, "weights", "attainable_flops") == pytest.approx(4.8e12)       # 1 flop/B × 4.8 TB/s
    assert value(far_left, "weights", "roof_latency") == pytest.approx(2 * PARAMETERS / 4.8e12)
    assert value(beyond, "weights", "attainable_flops") == 989e12
    assert value(beyond, "weights", "attainable_flops_share") == 1
    assert value(DecodeStep(), "device", "ridge") == pytest.approx(206, abs=0.1)


def test_points_lie_on_the_roof_hollow_and_the_axes_stay():
    for choice in (DecodeStep(), DecodeStep("b200", 512, 131_072, 64, "int8/token")):
        (ax,) = draw(rows_of(choice), Style()).axes
        assert ax.get_xlim() == X and ax.get_ylim() == Y
        points = {line.get_marker(): line for line in ax.lines if line.get_marker() in "os^"}
        for marker, part in zip("os^", ("attention", "weights", "step")):
            assert points[marker].get_markerfacecolor() == "white"
            assert points[marker].get_xdata()[0] == pytest.approx(value(choice, part, "intensity"))
            assert points[marker].get_ydata()[0] == pytest.approx(value(choice, part, "attainable_flops"))
            assert X[0] < points[marker].get_xdata()[0] < X[1] and Y[0] < points[marker].get_ydata()[0] < Y[1]
        (ridge,) = [line for line in ax.lines if line.get_marker() == "D"]
        assert ridge.get_ydata()[0] == choice.peak


def test_the_legend_says_what_each_point_allows_and_where_the_roof_is_from():
    labels = [text.get_text() for text in make("decode_roofline").legends[0].get_texts()]
    assert labels[0] == "H200 SXM 141GB: 4.8 TB/s, 989 TFLOP/s bf16, ridge 206 flop/B (data sheet)"
    assert labels[1].startswith("attention: 7.98 flop/B, at most 3.88 % of the peak, at least ")


def test_a_gpu_without_bf16_is_drawn_with_fp16_and_says_so():
    rows = rows_of(DecodeStep("V100 SXM2 32GB"))
    assert set(rows["dtype"]) == {"fp16"} and value(DecodeStep("V100 SXM2 32GB"), "device", "matmul_ceiling") == 125e12


@pytest.mark.parametrize("name", [name for name, one in gpus().items() if not (one.flops["bf16"] or one.flops["fp16"])])
def test_a_gpu_without_a_16_bit_rate_is_refused(name):
    with pytest.raises(ValueError, match="choose another GPU"):
        DecodeStep(name)


@pytest.mark.parametrize("wrong, error, said", [
    (dict(group_ratio=3), ValueError, "must divide the 64"), (dict(group_ratio=0), ValueError, "must divide the 64"),
    (dict(batch_size=0), ValueError, "batch_size=0"), (dict(kv_len=0), ValueError, "kv_len=0"),
    (dict(kv_format="int9"), KeyError, "int9"), (dict(gpu="H300"), KeyError, "H300")])
def test_a_wrong_choice_is_one_sentence(wrong, error, said):
    with pytest.raises(error, match=said):
        rows_of(DecodeStep(**wrong))
