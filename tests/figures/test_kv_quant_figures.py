"""The figures of kv_quant show every format's number where it lies, and refuse a run that lacks it."""
import dataclasses

import numpy as np
import pytest

from kvlab.figures import make
from kvlab.figures._formats import FAMILIES, family, short
from kvlab.kv.formats import format_names
from kvlab.record.reading import Reading, missing, table

FORMATS = {"fp32": (0.0, 46080), "bf16": (2e-5, 23040), "fp8_e4m3": (6e-3, 11520), "int8/token": (6e-4, 12240),
           "int8/tensor, guessed range ±8": (9e-2, 11520), "kivi4/g32/r32": (4e-3, 7216),
           "layers mixed, bytes of int8/token+int4/token/g32": (4.5e-3, 9720)}


def row(fmt, metric, value, unit, low=None, high=None, scope="texts", kind="measured", **more):
    reading = Reading(metric, value, unit, kind, low=low, high=high, n=1024, scope=scope, source="kv_quant",
                      hardware="A CPU, 2 logical cores")
    return {"run_id": "20261129T181422Z-8a68e5", "study": "kv_quant", "dtype": "fp32", "variant": "sdpa",
            "replica": None, "kv_len": 512, "kv_format": fmt, "model": "smollm2-135m",
            "data": "pydoc:execmodel + licence:GPL-3", "case_id": f"{fmt}-{scope}", **more,
            **dataclasses.asdict(reading)}


def run_rows():
    rows = []
    for i, (fmt, (kl, size)) in enumerate(FORMATS.items()):
        rows += [row(fmt, "kl", kl, "nat", 0.9 * kl, 1.2 * kl),
                 row(fmt, "kv_bytes_per_token", size, "B", kind="modelled"),
                 row(fmt, "perplexity_delta_90", i * 1e-3, "ratio", i * 1e-3 - 2e-3, i * 1e-3 + 2e-3)]
    for fmt, grows in (("fp8_e4m3", 1.3), ("int8/token", 1.0)):
        for i, (first, end) in enumerate(((0, 512), (512, 1024), (1024, 2048))):
            kl = FORMATS[fmt][0] * grows**i
            rows.append(row(fmt, "kl", kl, "nat", 0.9 * kl, 1.1 * kl, scope=f"tokens {first} … {end - 1}", kv_len=end,
                            data="pydoc:specialnames"))
    for fmt, base in (("int4/token/g32", 1e-3), ("int8/token", 1e-5)):
        rows += [row(fmt, "kl", base * (1 + layer) * (1 if side == "K" else 0.1), "nat", scope=f"layer {layer} {side}")
                 for layer in range(12) for side in "KV"]
    return rows


@pytest.fixture(scope="module")
def run():
    return table(run_rows())


def drawn(ax):
    """(x, y) of every marker."""
    return {(float(x), float(y)) for line in ax.lines if line.get_marker() not in ("None", "|", "_", None)
            for x, y in zip(line.get_xdata(), line.get_ydata())}


def texts(figure):
    return {text.get_text() for legend in figure.legends for text in legend.get_texts()}


def test_every_format_stands_at_its_kl_and_its_perplexity_with_the_claims_as_bands(run):
    figure = make("kv_quant", run)
    left, right = figure.axes
    names = [label.get_text() for label in left.get_yticklabels()]
    assert names[0] == "int8/tensor, guessed range ±8" and names[-3] == "bf16" and "layers mixed" in names
    assert "fp32" not in names and names[-2:] == ["the article: FP8", "the article: INT8"]
    assert len(names) == len(FORMATS) - 1 + 2
    expected = {(kl, names.index(short(fmt))) for fmt, (kl, _) in FORMATS.items() if fmt != "fp32"}
    assert drawn(left) >= expected
    changes = {(round(i * 1e-3, 6), names.index(short(fmt))) for i, fmt in enumerate(FORMATS) if fmt != "fp32"}
    assert {(round(x, 6), y) for x, y in drawn(right)} >= changes
    assert {"the article: FP8 loses less than 0.1 %", "the article: INT8 loses 0.1 to 0.3 %"} <= texts(figure)
    bands = {tuple(np.round([patch.get_x(), patch.get_x() + patch.get_width()], 6)) for patch in right.patches}
    assert bands == {(round(right.get_xlim()[0], 6), 0.001), (0.001, 0.003)}       # FP8's holds every gain
    assert right.get_xlim()[0] <= -0.01
    assert {(0.001, len(names) - 2), (0.001, len(names) - 1), (0.003, len(names) - 1)} <= drawn(right)
    assert "nat" in left.get_xlabel() and "90 %" in right.get_xlabel() and "smollm2" in left.get_title(loc="left")


def test_the_line_of_least_kl_holds_the_formats_that_none_beats(run):
    ax, = make("kv_pareto", run).axes
    line = next(line for line in ax.lines if line.get_linestyle() == "--")
    assert [round(x * 1024) for x in line.get_xdata()] == [7216, 12240]
    assert list(line.get_ydata()) == [4e-3, 6e-4]
    points = {(round(x * 1024), y) for x, y in drawn(ax)}
    assert points >= {(size, kl) for kl, size in list(FORMATS.values())[2:]}
    *labels, beyond = [text.get_text() for text in ax.texts]
    assert set(labels) == {short(fmt) for fmt in FORMATS if fmt not in ("fp32", "bf16")}
    assert beyond == "beyond these axes: bf16 (22.5 KiB, KL 2e-05)" and max(ax.get_xlim()) < 22.5
    assert "512 tokens" in ax.get_xlabel() and "95 %" in ax.get_ylabel()


def test_16_bits_alone_are_drawn():
    ax, = make("kv_pareto", table([row("bf16", "kl", 2e-5, "nat"), row("bf16", "kv_bytes_per_token", 23040, "B")])).axes
    assert {(22.5, 2e-5)} <= drawn(ax) and "beyond" not in " ".join(text.get_text() for text in ax.texts)


@pytest.mark.parametrize("name", ["kv_pareto", "kv_quant"])
def test_formats_are_ranked_on_the_windows_that_all_scored(name):
    made = run_rows() + [{**row("int8/token", "kl", 5e-5, "nat", scope="texts: common windows"), "data": "pydoc:a"},
                         row("int8/token", "kv_bytes_per_token", 12240, "B", scope="texts: common windows"),
                         row("int8/token", "perplexity_delta_90", 0, "ratio", scope="texts: common windows")]
    axes = make(name, table(made)).axes
    found = {(round(x, 9), round(y, 9)) for ax in axes for point in drawn(ax) for x, y in (point, point[::-1])}
    assert any(5e-5 in pair for pair in found) and not any(6e-4 in pair for pair in found)


def test_names_beside_the_pareto_do_not_cover_each_other():
    made = [one for i in range(14) for one in (row(f"int8/block{i + 1}", "kl", 1e-3 * 1.01**i, "nat"),
                                               row(f"int8/block{i + 1}", "kv_bytes_per_token", 11520 + i, "B"))]
    made += [row("bf16", "kl", 1e-6, "nat"), row("bf16", "kv_bytes_per_token", 23040, "B")]
    figure = make("kv_pareto", table(made))
    figure.canvas.draw()
    ax, = figure.axes
    names = [text for text in ax.texts if "beyond" not in text.get_text()]
    middles = sorted(ax.transData.transform(name.xyann)[1] for name in names)
    assert len(names) == 14 and all(b - a >= 6 * figure.dpi / 72 for a, b in zip(middles, middles[1:]))
    assert max(name.get_window_extent().x1 for name in names) <= figure.bbox.width


def test_context_is_a_line_per_format_with_its_positions(run):
    ax, = make("kv_context", run).axes
    assert list(ax.xaxis.get_majorticklocs()) == [512, 1024, 2048]
    assert ax.xaxis.get_major_formatter().format_ticks([512, 1024, 2048])[1] == "512–1,023"
    assert {(512.0, 6e-3), (2048.0, 6e-3 * 1.3**2), (1024.0, 6e-4)} <= drawn(ax)
    assert "pydoc:specialnames" in ax.get_xlabel() and "nat" in ax.get_ylabel()


def test_one_stretch_of_positions_is_no_line():
    only = [row("fp8_e4m3", "kl", 5e-3, "nat", 4e-3, 6e-3, scope="tokens 0 … 511")]
    with pytest.raises(ValueError, match="one stretch of positions only; run kv_quant at size small"):
        make("kv_context", table(only))


def test_the_heat_map_has_k_above_v_for_each_format(run):
    figure = make("kv_sensitivity", run)
    ax = figure.axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "int4/token/g32  K", "int4/token/g32  V", "int8/token  K", "int8/token  V"]
    shown = ax.images[0].get_array()
    assert shown.shape == (4, 12) and shown[0, 11] == pytest.approx(12e-3) and shown[1, 0] == pytest.approx(1e-4)
    assert "nat" in figure.axes[1].get_ylabel()
    for said in ("smollm2-135m", "pydoc:execmodel and licence:GPL-3", "windows of 512 tokens"):
        assert said in ax.get_title(loc="left")


@pytest.mark.parametrize("name, scope", [("kv_quant", "texts"), ("kv_pareto", "texts"), ("kv_context", "tokens"),
                                         ("kv_sensitivity", "layer")])
def test_a_run_without_its_rows_is_refused_with_the_reason(run, name, scope):
    rest = run[~run["scope"].str.startswith(scope)]
    with pytest.raises(ValueError, match=f"{name} needs kl.*of {scope}.*kvlab run kv_quant"):
        make(name, rest)
    gone = table([{"run_id": "r", **dataclasses.asdict(missing("kl", "nat", "no model here", source="kv_quant"))}])
    with pytest.raises(ValueError, match="no model here"):
        make(name, gone)


def test_every_format_has_a_family():
    assert {family(name) for name in format_names()} == set(FAMILIES)
    assert family("int8/tensor, guessed range ±8") == "INT8"
