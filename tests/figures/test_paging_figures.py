"""The figures of paging and prefix_sharing: numbers lie where the rows say, and a run that lacks them is refused."""
import json
from dataclasses import asdict

import made_kernels
import matplotlib
import pytest

from kvlab.figures import make
from kvlab.figures._style import PALETTE, Style, drawing
from kvlab.figures.block_table import draw_table
from kvlab.record.reading import Reading, table


def row(case, metric, value, kind="simulated", unit="ratio", width=0.0, **columns):
    ends = dict(low=value - width, high=value + width) if width else {}
    return {**asdict(Reading(metric, value, unit, kind, hardware="none", **ends)), "run_id": "r",
            "case_id": json.dumps([case, metric]), "case": json.dumps(case), **columns}


def waste(of="", block_size=None, **values):
    case = dict(question="waste", reserved=of)
    return [row({**case, "kind": kind}, metric, value, kind, block_size=block_size)
            for metric, (value, kind) in values.items()]


def paging_rows():
    rows = []
    for size, counted, used in ((1, 0.0, 1.0), (16, 0.006, 0.994), (64, 0.024, 0.976)):
        rows += waste("", size, waste_of_tokens=(counted, "simulated"), used_share=(used, "simulated"))
        rows += waste("", size, waste_of_tokens=(size / 2600, "modelled"))
    for name, used in (("max_model_len", 0.16), ("next power of two", 0.6), ("true length", 0.886)):
        rows += waste(name, None, waste_of_tokens=(1 / used - 1, "simulated"), used_share=(used, "simulated"))
    return rows + [{**one, "run_id": "r"} for one in made_kernels.paging()]


def snapshots():
    tables = {3: {"a": [1, 2, 3], "b": [4, 5]}, 400: {"a": [1, 3], "b": [5, 2, 9]}}
    return [row(dict(question="snapshot", after_steps=step, num_blocks=33, request=name, blocks=blocks), "blocks_held",
                float(len(blocks)), unit="count") for step, of in tables.items() for name, blocks in of.items()]


def sharing_rows(real=True):
    rows = []
    for shared in (0.5, 0.9):
        for sharers in (1, 4):
            formula = shared * (sharers - 1) / sharers
            case = dict(question="sharers", shared=shared, sharers=sharers)
            rows += [row(case, "memory_saved", formula - 0.001), row(case, "memory_saved", formula, "modelled")]
        if real:
            rows.append(row(dict(question="prefill", shared=shared, sharers=4), "memory_saved", shared - 0.2,
                            "measured"))
    for blocks, rate in ((500, 0.03), (5000, 0.12), (10**7, 0.36)):
        rows.append(row(dict(question="pool", num_blocks=blocks, endless=blocks == 10**7), "hit_rate", rate,
                        data="workload:mooncake_conversation", block_size=512))
    for rate, spared, held in ((0.5, 0.7, 0.1), (4.0, 0.71, 0.52)):
        case = dict(question="engine", rate=rate)
        rows += [row(case, "prefill_saved", spared, width=0.01), row(case, "live_memory_saved", held, width=0.02)]
    return rows


def points(ax, marker=None):
    """(x, y) -> filled, of every marker."""
    return {(round(float(x), 4), round(float(y), 4)): line.get_markerfacecolor() != "white" for line in ax.lines
            if (line.get_marker() == marker if marker else line.get_marker() in tuple("osv^P<>X*phH8"))
            for x, y in zip(line.get_xdata(), line.get_ydata())}


def legend(figure):
    return [text.get_text() for one in figure.legends for text in one.get_texts()]


# ---- paging

def test_waste_lies_beside_the_rule_and_no_waste_is_not_on_a_log_axis():
    pages, _, _ = make("paging", table(paging_rows())).axes
    assert points(pages) == {(16, 0.006): False, (64, 0.024): False}
    (rule,) = [line for line in pages.lines if line.get_color() == "black" and line.get_linestyle() == "-"]
    assert list(rule.get_ydata()) == pytest.approx([1 / 2600, 16 / 2600, 64 / 2600])
    assert pages.get_yscale() == "log"


def test_room_that_holds_tokens_by_reservation_and_the_papers_span_as_a_diamond():
    _, kept, _ = make("paging", table(paging_rows())).axes
    assert points(kept) == {(0, 0.16): False, (1, 0.6): False, (2, 0.886): False, (3, 0.994): False}
    assert list(points(kept, "D")) == [(4, 0.293)]
    assert [text.get_text() for text in kept.get_xticklabels()][3:] == ["pages of 16", "the paper, before it"]


def test_the_kernels_time_by_block_size_heads_first_only():
    figure = make("paging", table(paging_rows()))
    times = points(figure.axes[2])
    assert times == {(size, value): True for (size, order, inner), value in made_kernels.PAGED.items()
                     if size and order == "random" and inner == "head"}
    assert "paged, blocks in random order" in legend(figure)


@pytest.mark.parametrize("without, lacking", [("used_share", "used_share of the question 'waste'"),
                                              ("waste_of_tokens", "waste_of_tokens of the question 'waste'"),
                                              ("to_contiguous", "to_contiguous of a kernel on pages")])
def test_a_run_without_a_part_of_paging_is_refused(without, lacking):
    with pytest.raises(ValueError, match=f"{lacking}.*kvlab run paging"):
        make("paging", table([one for one in paging_rows() if one["metric"] != without]))


# ---- block_table

def faces(ax):
    return [matplotlib.colors.to_hex(patch.get_facecolor()) for patch in ax.patches]


def test_each_block_has_the_colour_of_its_owner():
    figure = make("block_table", table(snapshots()))
    early, late = figure.axes
    assert len(early.patches) == 33 and early.patches[0].get_hatch() == "////"
    assert faces(early)[1:7] == [PALETTE[0]] * 3 + [PALETTE[1]] * 2 + ["#ffffff"]
    assert [faces(late)[i] for i in (1, 2, 3, 5, 9)] == [PALETTE[i] for i in (0, 1, 0, 1, 1)]
    assert early.get_title(loc="left") == "after 3 steps: 2 requests, each in 1.0 pieces on average"
    assert late.get_title(loc="left") == "after 400 steps: 2 requests, each in 2.5 pieces on average"


def test_shared_blocks_are_black_and_colours_follow_the_given_order():
    with drawing():
        _, (ax,) = Style().figure(2)
        draw_table(ax, {"b": [1, 2], "c": [1, 3]}, 5, names=("a", "b", "c"))
    assert faces(ax) == ["#ffffff", "#000000", PALETTE[1], PALETTE[2], "#ffffff"]


def test_a_run_without_snapshots_is_refused():
    with pytest.raises(ValueError, match="block_table needs blocks_held of the question 'snapshot'"):
        make("block_table", table(paging_rows()))


# ---- prefix_sharing

def test_memory_counted_lies_on_the_formula_and_a_real_cache_is_filled():
    figure = make("prefix_sharing", table(sharing_rows()))
    sharers = figure.axes[0]
    assert points(sharers) == {(1, -0.001): False, (4, 0.374): False, (4, 0.674): False, (4, 0.3): True,
                               (4, 0.7): True}
    filled = [line for line in sharers.lines if line.get_marker() in "osv" and line.get_markerfacecolor() != "white"]
    assert [(list(line.get_ydata()), line.get_color()) for line in filled] == [([0.3], PALETTE[0]),
                                                                               ([pytest.approx(0.7)], PALETTE[1])]
    assert "filled: blocks of a real model's cache" in legend(figure)
    lines = sorted(tuple(line.get_ydata()) for line in sharers.lines if line.get_marker() == "None"
                   and line.get_linestyle() == "-" and len(line.get_xdata()) == 2)
    assert (0.0, 0.375) in lines and (0.0, pytest.approx(0.675)) in lines


def test_hit_rates_over_pools_with_the_endless_one_as_a_line():
    _, pool, _ = make("prefix_sharing", table(sharing_rows())).axes
    assert points(pool) == {(500, 0.03): False, (5000, 0.12): False} and pool.get_xscale() == "log"
    assert [line.get_ydata()[0] for line in pool.lines if line.get_linestyle() == ":"] == [0.36]


def test_computing_and_memory_in_an_engine_over_the_articles_band():
    figure = make("prefix_sharing", table(sharing_rows()))
    engine = figure.axes[2]
    assert set(points(engine)) == {(0.5, 0.7), (4, 0.71), (0.5, 0.1), (4, 0.52)}
    (band,) = engine.patches
    assert (band.get_y(), band.get_y() + band.get_height()) == pytest.approx((0.3, 0.5))
    assert "the article: 30 to 50 % of the memory" in legend(figure)


def test_without_the_model_the_rest_is_drawn_and_without_a_question_nothing():
    figure = make("prefix_sharing", table(sharing_rows(real=False)))
    assert len(points(figure.axes[0])) == 3 and not any("real model" in label for label in legend(figure))
    for question, lacking in (("sharers", "memory_saved"), ("pool", "hit_rate"), ("engine", "prefill_saved")):
        rows = [one for one in sharing_rows() if json.loads(one["case"])["question"] != question]
        with pytest.raises(ValueError, match=f"needs {lacking}.*kvlab run prefix_sharing"):
            make("prefix_sharing", table(rows))
