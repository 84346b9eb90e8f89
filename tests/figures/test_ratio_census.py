"""Every model of the catalogue at its ratio and context; MLA apart; the listed names are those at 16 and above."""
import pytest

from kvlab.catalog.models import models
from kvlab.figures import make
from kvlab.figures.ratio_census import APART, KINDS, _kind, select
from kvlab.record.reading import schema, table
from kvlab.shapes import LayerSpec, ModelSpec


@pytest.fixture(scope="module")
def rows():
    return select(table([]))


def test_one_row_per_model_of_known_kind_and_mla_has_no_ratio(rows):
    schema().validate(rows)
    assert set(rows["model"]) == {name for name, spec in models().items() if spec.context}
    assert rows["model"].is_unique and set(rows["data"]) == set(KINDS)
    mla = rows[rows["data"] == "MLA (no ratio)"]
    assert set(mla["kind"]) == {"missing"} and mla["note"].str.contains("latent").all()
    assert {name for name in mla["model"]} == {n for n, s in models().items() if any(x.kind == "mla" for x in s.layers)}


def test_ratios_are_those_of_the_layers_that_keep_every_token(rows):
    by_model = rows.set_index("model")["value"]
    assert by_model["meta-llama/Meta-Llama-3.1-405B"] == 16 and by_model["Qwen/Qwen3-235B-A22B-Instruct-2507"] == 16
    assert by_model["meta-llama/Llama-2-7b-hf"] == 1 and by_model["tiiuae/falcon-7b"] == 71
    full, sliding = LayerSpec("full", 1, 8, 1, 64), LayerSpec("sliding", 5, 8, 4, 64, window=128)
    assert _kind(ModelSpec("x", (sliding, full), 8, 4, 64))[:2] == ("some layers keep a window or chunk", 8)
    assert _kind(ModelSpec("x", (sliding,), 8, 4, 64))[1] == 2
    linear = LayerSpec("linear", 3, state_bytes=10)
    assert _kind(ModelSpec("x", (linear, full), 8, 1, 64))[:2] == ("some layers are linear (hybrid)", 8)


def test_names_are_those_at_16_and_above_beyond_8k_and_none_overlaps(rows):
    figure = make("ratio_census")
    ax, listing = figure.axes
    texts = [text.get_text() for text in listing.texts]
    high = rows[(rows["value"] >= 16) & (rows["kv_len"] > 8192)]
    named = [t for t in texts if t[:2].strip().isdigit() and "   " in t]
    assert len(named) == len(high) and any("Llama-3.1-405B, 128K" in t for t in named)
    long = rows[(rows["value"] > 0) & (rows["kv_len"] > 8192)]
    assert texts[0] == f"Of the catalogue's {len(long)} models beyond 8K,"
    counts = [int((long["value"] > 16).sum()), int((long["value"] == 16).sum()), int((long["value"] > 8).sum())]
    assert texts[1] == "{} above 16, {} exactly 16, {} above 8".format(*counts) and sum(counts[:2]) == len(high)
    assert "falcon" not in " ".join(texts)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in listing.texts if text.get_text()]
    assert all(not a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[i + 1:])
    assert all(0 <= box.x0 and box.x1 <= figure.bbox.width for box in boxes)
    assert {float(line.get_ydata()[0]) for line in ax.lines if line.get_marker() == "^"} == {APART}


def test_every_model_is_drawn_once(rows):
    ax = make("ratio_census").axes[0]
    markers = {look.marker for look in KINDS.values()}
    numbers = [int(text.get_text()) for text in ax.texts]
    assert sum(numbers) + sum(line.get_marker() in markers for line in ax.lines) - len(numbers) == len(rows)


def test_the_articles_claims_are_drawn(rows):
    figure = make("ratio_census")
    levels = {line.get_ydata()[0]: line.get_linestyle() for line in figure.axes[0].lines
              if len(line.get_xdata()) == 2 and line.get_marker() == "None"}
    assert levels[16] == "--" and levels[8] == ":"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"the article's limit, 16", "8K tokens"} <= set(labels)
    with pytest.raises(ValueError, match="takes no run"):
        make("ratio_census", table([]))
