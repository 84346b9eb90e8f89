"""Few seeds: intervals of known width, trends and knees that are there, and those that are not."""
import math

import numpy as np
import pytest

from kvlab.accuracy.seeds import difference, knee, t_interval, trend
from kvlab.accuracy.statistics import equivalence

RATIOS = [1, 2, 4, 8, 16, 32]
X = np.log2(RATIOS)


def seeds(curve, n=4, noise=0.002, seed=0):
    return np.asarray(curve) + np.random.default_rng(seed).normal(0, noise, (n, len(curve)))


def test_the_t_interval_of_three_values_is_the_textbook_one():
    got = t_interval([1.0, 2.0, 3.0])
    assert got.value == 2 and got.n == 3
    assert got.high - got.value == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    narrower = t_interval([1.0, 2.0, 3.0], 0.90)
    assert narrower.high - 2 == pytest.approx(2.919986 / math.sqrt(3), rel=1e-6)


def test_one_value_has_no_interval_and_bad_input_is_refused():
    one = t_interval([0.5])
    assert one.value == 0.5 and math.isnan(one.low) and math.isnan(one.high) and one.n == 1
    for bad in ([], [1.0, math.nan], [math.inf]):
        with pytest.raises(ValueError, match="finite"):
            t_interval(bad)
    with pytest.raises(ValueError, match="confidence"):
        t_interval([1.0, 2.0], 95)


def test_a_fall_is_a_trend_and_a_rise_or_noise_is_not():
    falling = seeds(1 - 0.1 * X, n=3)
    assert trend(falling).p < 1e-6 and trend(falling)[2:] == (3, 6)
    assert trend(falling[:, ::-1]).p > 0.99
    assert trend(np.random.default_rng(3).normal(size=(5, 6))).p > 0.05
    with pytest.raises(ValueError, match="at least 2 rows"):
        trend(falling[:1])


def test_a_straight_line_has_no_knee_and_a_break_has_one():
    straight = knee(RATIOS, seeds(1 - 0.1 * X), margin=0.02)
    assert straight.verdict == "no knee" and "excluded" in straight.why
    assert abs(straight.change.value) < 0.01 and straight.p > 0.01
    broken = knee(RATIOS, seeds(1 - 0.1 * X - 0.2 * np.maximum(0, X - 4)), margin=0.02)
    assert broken.verdict == "knee" and broken.change.value == pytest.approx(-0.2, abs=0.01) and broken.p < 1e-6
    assert broken.change.low < -0.2 < broken.change.high and broken.change.n == 4
    assert [bend.at for bend in broken.bends] == [2, 4, 8, 16] and broken.bends[3].change == broken.change


def test_losses_that_get_smaller_are_no_knee_though_the_line_is_not_straight():
    saturating = knee(RATIOS, seeds(1 - 0.1 * X + 0.1 * np.maximum(0, X - 4)), margin=0.02)
    assert saturating.verdict == "no knee" and saturating.change.value > 0.05 and saturating.p < 1e-6


@pytest.mark.parametrize("at", [2, 4, 8])
def test_a_break_elsewhere_is_named_where_it_is(at):
    curve = seeds(1 - 0.02 * X - 0.2 * np.maximum(0, X - np.log2(at)))
    asked_at_16, asked_there = (knee(RATIOS, curve, at=r, margin=0.02) for r in (16, at))
    assert asked_at_16.verdict == "knee elsewhere" and f"knee at {at}, not at 16" in asked_at_16.why
    assert asked_there.verdict == "knee" and asked_there.change.value == pytest.approx(-0.2, abs=0.01)


def logistic(centre, width):
    return 1 / (1 + np.exp((X - centre) / width))


@pytest.mark.parametrize("curve", [logistic(4, 1.5), logistic(6, 1.0), 1 - 0.02 * X**2])
def test_a_smooth_curve_has_no_knee_however_clear_its_curvature(curve):
    got = knee(RATIOS, seeds(curve, noise=0.001), margin=0.02)
    assert got.verdict == "no knee" and got.p < 0.01
    if got.change.high < -0.02:                         # it does bend there, and elsewhere too
        assert "the curve bends at" in got.why and "as well" in got.why


SMOOTH = [1 - 0.1 * X, 0 * X + 0.99, 0.95 - 0.02 * X**2,
          *(logistic(centre, width) for centre in (2, 4, 6) for width in (1.0, 2.0))]


@pytest.mark.parametrize("n, noise", [(3, 0.002), (3, 0.02), (5, 0.002), (5, 0.02)])
def test_noise_makes_a_knee_of_a_smooth_curve_once_in_twenty_at_most_and_a_break_is_seen_with_five_seeds(n, noise):
    for i, curve in enumerate(SMOOTH):
        found = [knee(RATIOS, seeds(curve, n, noise, 1000 * i + j), margin=0.02).verdict for j in range(60)]
        assert sum(verdict.startswith("knee") for verdict in found) <= 3, (i, found)
    if n == 5:
        broken = 1 - 0.02 * X - 0.4 * np.maximum(0, X - 4)
        found = [knee(RATIOS, seeds(broken, n, noise, j), margin=0.02).verdict for j in range(60)]
        assert found.count("knee") >= 50 and "knee elsewhere" not in found


def test_wide_scatter_is_inconclusive_and_never_no_knee():
    assert knee(RATIOS, seeds(1 - 0.1 * X, n=3, noise=0.1), margin=0.02).verdict == "inconclusive"


@pytest.mark.parametrize("ratios, n, why", [
    ([1, 2, 4, 8, 16], 3, "no ratio beyond 16"), ([16, 32, 64, 128, 256], 3, "no ratio below 16"),
    ([1, 2, 4, 8, 32, 64], 3, "ratio 16 was not tried"), (RATIOS, 1, "one seed"),
    ([1, 16, 32], 3, "with 3 ratios a knee cannot be told from a smooth curve")])
def test_what_cannot_be_told_is_inconclusive_with_the_reason(ratios, n, why):
    got = knee(ratios, np.ones((n, len(ratios))), margin=0.02)
    assert got.verdict == "inconclusive" and why in got.why and math.isnan(got.change.value)


def test_bad_tables_and_margins_are_refused():
    with pytest.raises(ValueError, match="rows are seeds"):
        knee(RATIOS, np.ones((3, 5)), margin=0.02)
    with pytest.raises(ValueError, match="margin"):
        knee(RATIOS, np.ones((3, 6)), margin=0)
    with pytest.raises(ValueError, match="must rise"):
        knee(RATIOS[::-1], np.ones((3, 6)), margin=0.02)
    with pytest.raises(ValueError, match="paired"):
        difference([1, 2], [1, 2, 3])


def test_a_difference_is_paired_and_feeds_the_equivalence_test():
    near = [0.999, 0.998, 1.0]
    got = difference([0.899, 0.898, 0.9], near)
    assert got.value == pytest.approx(-0.1) and got.high - got.low < 1e-9        # the seeds' own spread cancels
    assert equivalence(difference(near, [1.0, 0.999, 0.999]), 0.01) == "below"
    assert equivalence(got, 0.01) == "above"
    assert equivalence(difference([0.99, 1.0, 0.93], near), 0.01) == "inconclusive"
    assert equivalence(difference([1.0], [1.0]), 0.01) == "inconclusive"
