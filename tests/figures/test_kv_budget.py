"""What fills a GPU: golden bytes of the article's case, what fits, what is unknown, and what is refused."""
import dataclasses

import pytest

from kvlab.catalog.gpus import gpu
from kvlab.catalog.models import models
from kvlab.figures import make
from kvlab.figures._style import Style
from kvlab.figures.kv_budget import KVBudget, draw, select
from kvlab.kv.sizing import size
from kvlab.record.reading import schema, table
from kvlab.units import GiB


def rows_of(choice):
    return select(table([]), choice)


def value(rows, metric, hardware="none"):
    (found,) = rows[(rows["metric"] == metric) & (rows["hardware"] == hardware)]["value"]
    return found


def drawn(choice):
    return draw(rows_of(choice), Style())


def texts(figure):
    return ([text.get_text() for text in figure.legends[0].get_texts()], [t.get_text() for t in figure.axes[0].texts])


def test_the_articles_case_has_the_golden_bytes_and_they_fit():
    rows = rows_of(KVBudget())
    schema().validate(rows)
    assert set(rows["kind"]) == {"modelled", "quoted"} and (rows["source"] != "").all()
    assert value(rows, "kv_bytes") == value(rows, "article_formula_bytes") == 16 * 1_342_177_280
    assert value(rows, "kv_bytes_per_rank") == 2 * 1_342_177_280
    assert value(rows, "weight_bytes_per_rank") == 72_706_203_648 * 2 / 8
    a100 = "A100 SXM4 80GB"
    assert value(rows, "memory_bytes", a100) == 80e9 and value(rows, "reserve_bytes", a100) == 8e9
    assert value(rows, "sequences_that_fit", a100) == (80e9 - 8e9 - 18_176_550_912) // (1_342_177_280 // 8) == 320


def test_what_fits_fits_and_one_more_does_not():
    choice = KVBudget(model="meta-llama/Llama-3.1-8B", kv_len=50_000, batch_size=3, kv_format="int8/token", tp=2,
                      reserve=0.2, gpus=("L4",))
    fits = choice.fits(gpu("L4"))
    for count, inside in ((fits, True), (fits + 1, False)):
        more = dataclasses.replace(choice, batch_size=count)
        assert (more.size.kv_bytes_per_rank + more.weights + 0.2 * 24e9 <= 24e9) == inside


def test_a_bar_stacks_reserve_weights_state_and_cache_and_ends_where_the_numbers_say():
    choice = KVBudget(gpus=("H200 SXM 141GB",))
    (ax,) = drawn(choice).axes
    ends = [patch.get_x() + patch.get_width() for patch in ax.patches]
    assert ends == sorted(ends)
    assert ends[-1] * GiB == pytest.approx(14.1e9 + choice.weights + choice.size.kv_bytes_per_rank)
    diamonds = [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "D"]
    assert diamonds == [pytest.approx(141e9 / GiB)]
    rules = [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "^"]
    assert rules == [pytest.approx(ends[-1])], "the article's formula is exact for this model"
    assert all(patch.get_facecolor()[:3] == (1, 1, 1) for patch in ax.patches), "modelled is hollow"


def test_the_legend_has_exact_bytes_and_the_texts_what_fits():
    labels, beside = texts(drawn(KVBudget()))
    assert "KV cache: 2,684,354,560 B = 2.5 GiB a GPU" in labels
    assert "weights: 18,176,550,912 B = 16.93 GiB a GPU, 16 bit" in labels
    assert "KV by the article's formula: 20 GiB in all, 1 × the exact 20 GiB" in labels
    assert beside[0] == "26.9 GiB of 74.5 GiB\n8 hold 320 sequences"
    _, (alone,) = texts(drawn(KVBudget("Llama-3.1-8B", 131_072, 1, tp=1, gpus=("L4",))))
    assert alone.endswith("\nholds only 0 sequences")
    _, beside = texts(drawn(KVBudget(batch_size=400)))
    assert "8 hold only 320 sequences" in beside[0] and "8 hold 648 sequences" in beside[2]


def test_where_the_weights_are_unknown_nothing_is_said_to_fit():
    choice = KVBudget(model="google/gemma-3-27b-it", kv_len=131_072, batch_size=4, tp=1, gpus=("RTX 4090", "MI300X"))
    rows = rows_of(choice)
    schema().validate(rows)
    absent = rows[rows["kind"] == "missing"]
    assert set(absent["metric"]) == {"weight_bytes_per_rank", "sequences_that_fit"} and (absent["note"] != "").all()
    labels, beside = texts(draw(rows, Style()))
    assert "weights: unknown, left out" in labels
    assert all(text.startswith("at least") and "the weights are unknown" in text for text in beside)


def test_constant_state_has_a_part_of_its_own_and_only_where_there_is_one():
    labels, _ = texts(drawn(KVBudget(model="moonshotai/Kimi-K3")))
    assert any(label.startswith("constant state: ") for label in labels)
    assert not any("constant state" in label for label in texts(drawn(KVBudget()))[0])


def test_a_context_beyond_the_models_own_is_said():
    figure = drawn(KVBudget(kv_len=65_536))
    assert "beyond the model's own context of 32,768 tokens" in figure.axes[0].get_title(loc="left")
    assert "beyond" in rows_of(KVBudget(kv_len=65_536))["note"].iloc[0]


def test_what_needs_far_more_than_the_memory_leaves_the_memory_visible():
    (ax,) = drawn(KVBudget(kv_len=2**20, batch_size=1024)).axes
    assert ax.get_xlim()[1] == pytest.approx(1.5 * 141e9 / GiB)


@pytest.mark.parametrize("name", {spec.attention_type: spec.name for spec in models().values()}.values())
def test_a_model_of_every_attention_type_is_budgeted(name):
    choice = KVBudget(model=name, kv_len=8192, batch_size=2, tp=1, gpus=("B200 SXM",))
    rows = rows_of(choice)
    schema().validate(rows)
    assert value(rows, "kv_bytes_per_rank") == size(choice.spec, 8192, 2).kv_bytes


@pytest.mark.parametrize("wrong, error, said", [
    (dict(gpus=()), ValueError, "no GPU is chosen"), (dict(gpus=("H300",)), KeyError, "no gpu named 'H300'"),
    (dict(weight_bits=4), ValueError, "allowed: 8, 16"), (dict(reserve=1.5), ValueError, "between 0 and 0.9"),
    (dict(reserve=float("nan")), ValueError, "between 0 and 0.9")])
def test_a_wrong_choice_is_refused_when_it_is_made(wrong, error, said):
    with pytest.raises(error, match=said):
        KVBudget(**wrong)


@pytest.mark.parametrize("wrong, error, said", [
    (dict(tp=3), ValueError, "tp=3 does not fit the heads"), (dict(kv_len=0), ValueError, "kv_len=0"),
    (dict(batch_size=-1), ValueError, "batch_size=-1"), (dict(model="Qwen3-73B"), KeyError, "no model named"),
    (dict(kv_format="int9"), KeyError, "int9")])
def test_a_choice_that_no_cache_has_is_refused_when_it_is_sized(wrong, error, said):
    with pytest.raises(error, match=said):
        rows_of(KVBudget(**wrong))


def test_the_figure_without_a_choice_is_the_articles_case():
    assert "16 × 4,096 tokens in bf16, tensor parallel 8" in make("kv_budget").axes[0].get_title(loc="left")
