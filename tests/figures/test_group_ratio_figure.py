"""NLL over ratio and over KV width, with intervals over seeds, and time beside it, from rows of known truth."""
import json
from dataclasses import asdict

import numpy as np
import pytest

from kvlab.figures import make, save
from kvlab.record.reading import Reading, table

RATIOS, SEEDS = (1, 4, 16, 32), (0, 1, 2)


def cell(ratio, head_dim, value, n, seed, data="recall:pair", keys=256, kv_format="fp32"):
    task = data.removeprefix("recall:").partition(",")[0]
    case = json.dumps(dict(num_keys=keys, num_values=64, pairs=[8, 64], task=task))
    context = dict(run_id="20261129T181422Z-8a68e5", study="group_ratio",
                   comparison_id=f"{data}{ratio}-{head_dim}-{keys}",
                   case_id=f"{data}{ratio}-{head_dim}-{n}-{seed}-{keys}-{kv_format}", variant="sdpa", device="cpu",
                   dtype="fp32", kv_format=kv_format, kv_len=n, num_q_heads=32, num_kv_heads=32 // ratio,
                   group_ratio=ratio, head_dim=head_dim, seed=seed, data=data, case=case)
    about = dict(hardware="A CPU")
    return [{**context, **asdict(reading)} for reading in (
        Reading("recall", value, "ratio", "measured", n=2048, **about),
        Reading("nll", 4 * (1 - value), "nat", "measured", n=2048, **about),
        Reading("kv_floats_per_token", 2 * head_dim * 32 // ratio, "count", "modelled", **about))]


def decode(ratio, head_dim, variant="sdpa", q_heads=32):
    case = f"d{q_heads}-{ratio}-{head_dim}"
    context = dict(run_id="20261129T181422Z-8a68e5", comparison_id=case, case_id=f"{case}{variant}", phase="decode",
                   variant=variant, dtype="fp32", kv_len=512, num_q_heads=q_heads, num_kv_heads=q_heads // ratio,
                   group_ratio=ratio, head_dim=head_dim, replica=0)
    seconds, about = head_dim / ratio * 1e-4, dict(hardware="A CPU")
    rows = [{**context, **asdict(r)} for r in (
        Reading("latency_s", seconds, "s", "measured", low=0.9 * seconds, high=1.1 * seconds, n=9, **about),
        Reading("ideal_bytes", 1e6 * head_dim / ratio, "B", "modelled", **about))]
    ceiling = Reading("read_ceiling", 2e10, "B/s", "measured", n=9, scope="comparison", **about)
    return [*rows, {**context, "variant": "", "case_id": case, **asdict(ceiling)}]


def recall(head_dim, ratio, n, seed):
    return float((0.9 - 0.1 * np.log2(ratio) if head_dim == 4 else 0.99) - 0.002 * (n == 64) + 0.001 * seed)


def nll(*case):
    return 4 * (1 - recall(*case))


@pytest.fixture(scope="module")
def rows():
    found = [r for d, ratios in ((4, RATIOS), (64, (1, 32))) for ratio in ratios for n in (8, 64) for s in SEEDS
             for r in cell(ratio, d, recall(d, ratio, n, s), n, s)]
    found += [r for s in SEEDS for r in cell(32, 4, 0.45, 64, s, data="recall:pair, parameters matched")]
    found += cell(1, 64, 0.5, 64, 0, keys=16384) + cell(1, 64, 0.1, 64, 0, kv_format="int4/token")
    found += [r for d, ratios in ((4, RATIOS), (64, (1, 32))) for ratio in ratios for r in decode(ratio, d)]
    return found + decode(3, 64, q_heads=9) + decode(1, 4, variant="naive")


@pytest.fixture(scope="module")
def figure(rows):
    return make("group_ratio", table(rows))


def line(ax, marker):
    return next(one for one in ax.lines if one.get_marker() == marker)


def test_quality_over_ratio_has_means_t_intervals_and_a_dot_per_seed(figure):
    left = figure.axes[0]
    x, y = line(left, "o").get_data()
    assert list(x) == list(RATIOS) and left.get_yscale() == "log"
    np.testing.assert_allclose(np.asarray(y, float), [nll(4, r, 64, 1) for r in RATIOS])
    dots = [one for one in left.lines if one.get_marker() == "."]
    assert sorted(len(one.get_xdata()) for one in dots) == [3, 6, 12]
    bars = [np.array(c.get_segments()) for c in left.collections if len(c.get_segments()) == 4][0]
    np.testing.assert_allclose(np.diff(bars[:, :, 1])[:, 0], 2 * 4.302653 * 0.004 / np.sqrt(3), rtol=1e-5)
    assert left.get_ylabel() == "NLL of the answer (nat) at N = 64 pairs" and "group ratio" in left.get_xlabel()


def test_heads_that_recall_everything_are_told_apart_and_recall_stands_at_the_ends(figure):
    texts = {text.get_text() for text in figure.axes[0].texts}
    for case in ((4, 1), (4, 32), (64, 1), (64, 32)):
        assert f"{recall(*case, 64, 1):.3f}".removeprefix("0") in texts
    low, high = figure.axes[0].get_ylim()
    assert low < nll(64, 1, 64, 2) and high > np.log(64)
    guess = [one for one in figure.axes[0].lines if set(one.get_ydata()) == {np.log(64)}]
    assert len(guess) == 1


def test_the_legend_says_what_dots_and_bars_are(figure):
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "95 % t-interval over 3–3 seeds" not in labels and "95 % t-interval over 3 seeds" in labels
    assert "one seed (drawn left of the mean)" in labels and "a guess" in labels


def test_only_the_grids_cells_with_an_exact_cache_are_shown(figure):
    x, y = line(figure.axes[0], "s").get_data()
    assert list(x) == [1, 32]
    np.testing.assert_allclose(np.asarray(y, float), [nll(64, r, 64, 1) for r in (1, 32)])
    assert line(figure.axes[0], "P").get_data()[1][0] == pytest.approx(4 * 0.55)
    assert not [one for one in figure.axes[1].lines if one.get_marker() == "P"]


def test_the_two_token_task_is_a_dashed_line_at_as_many_pairs(rows):
    two = [r for ratio in RATIOS for s in SEEDS for n in (16, 128, 256)
           for r in cell(ratio, 64, 0.8 - 0.001 * ratio - 0.1 * (n == 256), n, s, data="recall:two_token")]
    figure = make("group_ratio", table(rows + two))
    x, y = line(figure.axes[0], "p").get_data()
    np.testing.assert_allclose(np.asarray(y, float), [4 * (0.2 + 0.001 * r) for r in RATIOS])
    assert line(figure.axes[0], "p").get_linestyle() == "--" and list(x) == list(RATIOS)
    assert "head_dim 64, two-token task" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_articles_claims_are_lines_that_the_legend_calls_the_articles(figure):
    upright = {one.get_xdata()[0]: one.get_linestyle() for one in figure.axes[0].lines
               if len(one.get_xdata()) == 2 and one.get_xdata()[0] == one.get_xdata()[1]}
    assert upright == {16: "--", 8: ":"}
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"head_dim 4", "head_dim 64", "the article's limit, 16", "parameters matched to ratio 1"} <= set(labels)
    assert any("safer beyond 8K" in label for label in labels)


def test_other_lengths_are_thin_and_named(figure):
    assert [text.get_text() for text in figure.axes[0].texts if "N" in text.get_text()] == ["N = 8"]


def test_the_second_axis_is_kv_width(figure):
    x, y = line(figure.axes[1], "o").get_data()
    assert list(x) == [8, 16, 64, 256] and (np.diff(y) < 0).all()
    assert figure.axes[1].get_xticks()[0] == 8
    assert "KV floats per token" in figure.axes[1].get_xlabel()


def test_time_stands_beside_it_with_what_its_bytes_take(figure):
    right = figure.axes[2]
    np.testing.assert_allclose(line(right, "o").get_data(), [RATIOS, [4 / r * 1e-4 for r in RATIOS]])
    dashed = [one for one in right.lines if one.get_linestyle() == "--"]
    np.testing.assert_allclose(dashed[0].get_ydata(), [4e6 / r / 2e10 for r in RATIOS])
    assert "kv_len 512" in right.get_xlabel() and "(s)" in right.get_ylabel()


def test_a_run_without_times_has_two_panels_and_one_seed_no_bar(rows):
    some = [r for r in rows if r.get("phase") != "decode" and r["seed"] == 0]
    figure = make("group_ratio", table(some))
    assert len(figure.axes) == 2
    segments = [np.array(c.get_segments()) for c in figure.axes[0].collections]
    assert all(np.ptp(s[:, :, 1], axis=1).max() == 0 for s in segments if len(s))


def test_what_is_lacking_is_named(rows):
    with pytest.raises(ValueError, match="needs recall and nll of trained models.*kvlab run group_ratio"):
        make("group_ratio", table([r for r in rows if r["metric"] not in ("recall", "nll")]))


def test_the_file_holds_the_rows_that_are_shown(rows, tmp_path):
    paths = save("group_ratio", table(rows), tmp_path, formats=("png",))
    assert [p.suffix for p in paths] == [".png", ".csv"] and paths[0].stat().st_size > 20_000
    import pandas as pd
    shown = pd.read_csv(paths[1])
    assert set(shown["metric"]) == {"recall", "nll", "kv_floats_per_token", "latency_s", "ideal_bytes", "read_ceiling"}
    assert set(shown["variant"].dropna()) == {"sdpa"} and set(shown["num_q_heads"]) == {32}
