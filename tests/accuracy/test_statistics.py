"""Intervals cover what they claim to, over correlated tokens too; the equivalence test errs as rarely as it says."""
import math

import numpy as np
import pytest
from scipy.signal import lfilter

from kvlab.accuracy.statistics import Estimate, below, block_bootstrap, equivalence, inside, n_needed


def series(phi, n=2048, runs=300, seed=1):
    """AR(1) runs of mean 0: neighbours correlate by phi."""
    noise = np.random.default_rng(seed).normal(size=(runs, n + 100))
    return lfilter([1], [1, -phi], noise, axis=1)[:, 100:]


@pytest.mark.parametrize("phi", [0.0, 0.5])
def test_the_interval_covers_the_truth_95_times_in_100(phi):
    found = [block_bootstrap(run, draws=400, seed=i) for i, run in enumerate(series(phi))]
    assert 0.91 <= np.mean([e.low < 0 < e.high for e in found]) <= 0.985


def test_single_tokens_as_blocks_would_not_cover_it():
    found = [block_bootstrap(run, block=1, draws=200, seed=i) for i, run in enumerate(series(0.5, n=512, runs=150))]
    assert np.mean([e.low < 0 < e.high for e in found]) < 0.85


def test_skewed_values_are_covered_less_often_and_missed_above_as_the_docstring_says():
    """As skewed as a KL can be: log-normal, sigma 1.5, two windows of 512."""
    z = series(0.5, n=1024, runs=400, seed=5) * math.sqrt(1 - 0.5**2)
    found = [block_bootstrap(np.exp(1.5 * run), window=np.repeat([0, 1], 512), draws=400, seed=i)
             for i, run in enumerate(z)]
    truth = math.exp(1.5**2 / 2)
    above, below = (np.mean([e.high < truth for e in found]), np.mean([e.low > truth for e in found]))
    assert 0.87 <= 1 - above - below < 0.95 and above > 2 * below
    assert "90.8 %" in block_bootstrap.__doc__ and abs(1 - above - below - 0.908) < 0.04


def test_equivalence_at_the_margin_is_declared_in_5_of_100_runs_at_most():
    """The true difference is the margin itself, the hardest case; 1,000 runs vary by ± 1.4 points."""
    runs = series(0.3, runs=1000, seed=2) + 0.2
    verdicts = [equivalence(block_bootstrap(run, draws=400, confidence=0.9, seed=i), 0.2) for i, run in enumerate(runs)]
    assert verdicts.count("below") / len(verdicts) <= 0.05 + 0.014
    assert verdicts.count("above") / len(verdicts) <= 0.05 + 0.014 and verdicts.count("inconclusive") > 800


def test_the_mean_is_the_plain_one_and_draws_repeat_by_seed():
    values = np.random.default_rng(0).gamma(1, size=500)
    one, again, other = (block_bootstrap(values, seed=seed) for seed in (3, 3, 4))
    assert one == again and one.low != other.low and one.n == 500
    assert one.value == pytest.approx(values.mean()) and one.low < one.value < one.high


def test_a_constant_has_no_width_and_a_wider_confidence_a_wider_interval():
    flat = block_bootstrap(np.full(200, 2.5))
    assert flat.low == pytest.approx(2.5) and flat.high == pytest.approx(2.5)
    values = np.random.default_rng(0).normal(size=640)
    narrow, wide = (block_bootstrap(values, confidence=c) for c in (0.9, 0.95))
    assert wide.low < narrow.low and narrow.high < wide.high


def test_documents_keep_their_share_so_that_their_difference_adds_no_width():
    rng = np.random.default_rng(0)
    document = np.repeat([0, 1], 640)
    values = rng.normal(size=1280) + 100 * document
    apart, together = block_bootstrap(values, document), block_bootstrap(values)
    assert apart.high - apart.low < 0.3 < 10 < together.high - together.low
    assert apart.value == pytest.approx(values.mean())


def test_blocks_do_not_cross_windows():
    """Signs that alternate by window: inside one every block is all +1 or all -1, across borders they cancel."""
    values, window = np.tile(np.repeat([1.0, -1.0], 32), 8), np.repeat(range(16), 32)
    within, across = block_bootstrap(values, window=window), block_bootstrap(values)
    assert within.high - within.low > 1.3 * (across.high - across.low)


def test_a_window_shorter_than_a_block_is_one_block():
    values, window = np.random.default_rng(0).normal(size=200), np.repeat(range(10), 20)
    found = block_bootstrap(values, window=window)
    assert found.low < found.value < found.high


@pytest.mark.parametrize("values, options, said", [
    ([], {}, "at least one value"), ([1.0, math.nan] * 40, {}, "value 1 of 80 is not finite"),
    ([1.0] * 32, {}, "no more than one block"), ([1.0] * 80, dict(block=0), "block of at least 1"),
    ([1.0] * 80, dict(confidence=1.0), "between 0 and 1"), ([1.0] * 80, dict(draws=5), "draws"),
    ([1.0] * 80, dict(document=["a"]), "1 labels of document for 80 values")])
def test_what_gives_no_interval_is_refused(values, options, said):
    with pytest.raises(ValueError, match=said):
        block_bootstrap(values, **options)


def test_verdicts_need_the_whole_interval():
    def of(low, high):
        return Estimate((low + high) / 2, low, high, 100)
    assert equivalence(of(-0.5, 0.9), 1) == "below"
    assert equivalence(of(-0.5, 1.1), 1) == equivalence(of(-1.1, 0.5), 1) == equivalence(of(-2, 2), 1) == "inconclusive"
    assert equivalence(of(1.0, 2), 1) == equivalence(of(-3, -1.5), 1) == "above"
    assert inside(of(1.2, 2.8), 1, 3) == "inside"
    assert inside(of(3.1, 4), 1, 3) == inside(of(0, 0.9), 1, 3) == "outside"
    assert inside(of(0.5, 2), 1, 3) == inside(of(0.5, 4), 1, 3) == "inconclusive"
    assert below(of(-3, -1.5), 1) == below(of(-3, 0.9), 1) == "below" and below(of(1, 2), 1) == "above"
    assert below(of(-3, 1.1), 1) == "inconclusive"
    for wrong in (lambda: equivalence(of(0, 1), 0), lambda: below(of(0, 1), math.nan), lambda: inside(of(0, 1), 2, 2),
                  lambda: n_needed(of(0, 1), -1)):
        with pytest.raises(ValueError):
            wrong()


def test_needed_tokens_bring_the_half_width_to_half_the_margin():
    """The study's own numbers: a half-width of 0.008 over 1,022 tokens, a margin of 0.1 %."""
    assert n_needed(Estimate(0.004, -0.004, 0.012, 1022), 0.001) == math.ceil(1022 * (0.008 / 0.0005)**2)
    values = np.random.default_rng(0).normal(size=16 * 1024)
    part, whole = block_bootstrap(values[:1024]), block_bootstrap(values)
    needed = n_needed(part, whole.high - whole.low)
    assert 0.5 * len(values) < needed < 2 * len(values)


def test_an_increasing_function_carries_the_interval():
    found = Estimate(0.0, -1.0, 1.0, 5).through(math.exp)
    assert (found.value, found.low, found.high, found.n) == (1.0, math.exp(-1), math.e, 5)
