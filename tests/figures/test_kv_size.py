"""Cache sizes of real models: golden values, own contexts, the article's point and the crossover."""
import numpy as np
import pytest

from kvlab.catalog.models import model
from kvlab.figures import make
from kvlab.figures.kv_size import LENGTHS, MODELS, select
from kvlab.record.reading import schema, table
from kvlab.units import GiB


@pytest.fixture(scope="module")
def rows():
    return select(table([]))


@pytest.fixture(scope="module")
def figure():
    return make("kv_size")


def value(rows, name, kv_len, kind="modelled"):
    chosen = rows[(rows["model"] == name) & (rows["kv_len"] == kv_len) & (rows["kind"] == kind)]
    assert len(chosen) == 1
    return chosen["value"].iloc[0]


def test_rows_are_a_valid_result_table_with_the_golden_values(rows):
    schema().validate(rows)
    assert set(rows["kind"]) == {"modelled", "quoted"} and (rows["source"] != "").all()
    assert value(rows, "Qwen/Qwen2-72B-Instruct", 4096) == 1_342_177_280
    assert value(rows, "Qwen/Qwen2-72B-Instruct", 4096, "quoted") == 1.25 * GiB
    assert value(rows, "Qwen/Qwen-72B", 131072) == 320 * GiB
    assert value(rows, "tiiuae/falcon-7b", 131072) == 1 * GiB
    assert rows[rows["metric"] == "crossover_tokens"]["value"].tolist() == [443_763]
    assert rows[rows["metric"] == "weight_bytes"]["value"].tolist() == [2 * 72_706_203_648]


def test_a_line_is_solid_up_to_the_models_own_context_and_dotted_beyond(figure):
    (ax,) = figure.axes
    solid = [line for line in ax.lines if line.get_linestyle() == "-"]
    dotted = [line for line in ax.lines if line.get_linestyle() == ":"]
    assert len(solid) == len(dotted) == len(MODELS)
    for name, inside, beyond in zip(MODELS, solid, dotted):
        context = model(name).context
        assert inside.get_xdata()[0] == LENGTHS[0] and inside.get_xdata()[-1] == context == beyond.get_xdata()[0]
        assert beyond.get_xdata()[-1] == LENGTHS[-1]


def test_the_hybrids_constant_state_is_in_its_line_and_in_its_label(figure, rows):
    solid = [line for line in figure.axes[0].lines if line.get_linestyle() == "-"]
    line = solid[list(MODELS).index("moonshotai/Kimi-K3")]
    state = rows[(rows["model"] == "moonshotai/Kimi-K3") & (rows["metric"] == "state_bytes")]["value"].iloc[0]
    assert state == 414 * 2**20
    kv = value(rows, "moonshotai/Kimi-K3", 1024)
    np.testing.assert_allclose(line.get_ydata()[0], (kv + state) / GiB)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "Kimi-K3: hybrid MLA + linear, with 414 MiB constant state" in labels
    assert sum("constant state" in label for label in labels) == 1


def test_the_articles_point_is_a_diamond_on_the_line_and_the_crossover_is_marked(figure):
    (ax,) = figure.axes
    diamonds = [line.get_xydata().tolist() for line in ax.lines if line.get_marker() == "D"]
    assert diamonds == [[[4096, 1.25]]]
    marked = [line.get_xydata()[0] for line in ax.lines
              if line.get_marker() == "o" and line.get_color() == "black"]
    np.testing.assert_allclose(marked, [[443_763, 2 * 72_706_203_648 / GiB]])
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "the article: 1.25 GiB at 4,096 tokens" in labels
    assert "weights of Qwen2-72B, 135 GiB: KV equals them at 443,763 tokens" in labels


def test_axes(figure):
    (ax,) = figure.axes
    assert "tokens" in ax.get_xlabel() and ax.get_ylabel() == "KV cache of one sequence, bf16 (GiB)"
    assert ax.xaxis.get_major_formatter().format_ticks(LENGTHS)[::5] == ["1K", "32K", "1M"]
    assert ax.yaxis.get_major_formatter().format_ticks([0.01, 1000]) == ["0.01", "1,000"]
