"""Samples become medians with honest intervals, and one thread is timed by its own CPU time."""
import sys
import time

import numpy as np
import pytest

from kvlab.probes._clock import Summary, bootstrap, clock, paired_ratio, summarise


def medians(draws):
    return np.median(draws, axis=1)


def test_the_bootstrap_is_reproducible_and_ordered():
    samples = np.random.default_rng(1).lognormal(size=40)
    low, high = bootstrap(medians, samples)
    assert (low, high) == bootstrap(medians, samples) and low < np.median(samples) < high


def test_the_interval_covers_the_true_median_about_as_often_as_it_says():
    rng = np.random.default_rng(2)
    intervals = [summarise(list(rng.lognormal(0, 0.5, 30))) for _ in range(300)]
    covered = np.mean([s.low <= 1.0 <= s.high for s in intervals])        # the median of this lognormal is 1
    assert 0.90 <= covered <= 0.99


def test_few_samples_give_their_whole_range():
    s = summarise([3.0, 1.0, 2.0])
    assert (s.median, s.low, s.high, s.n) == (2.0, 1.0, 3.0, 3) and s.rel_half_width == 0.5
    one = summarise([4.0])                                           # says nothing about where another would be
    assert one == Summary(4.0, None, None, 4.0, 4.0, 0.0, 1) and one.rel_half_width == float("inf")


def test_a_summary_holds_percentiles_and_relative_deviation():
    s = summarise([float(i) for i in range(101)])
    assert (s.median, s.p5, s.p95, s.n) == (50.0, 5.0, 95.0, 101)
    assert s.rel_std == pytest.approx(np.std(range(101), ddof=1) / 50)


def test_the_interval_narrows_with_more_samples():
    rng = np.random.default_rng(3)
    few, many = (summarise(list(rng.lognormal(0, 0.3, n))) for n in (20, 2000))
    assert many.rel_half_width < few.rel_half_width / 3


def test_samples_of_zero_never_pass_for_precise():
    assert summarise([0.0] * 8).rel_half_width == float("inf")


def test_a_paired_ratio_ignores_what_both_of_a_pair_share():
    rng = np.random.default_rng(4)
    drift = np.exp(np.cumsum(rng.normal(0, 0.3, 50)))                     # a machine that changes speed all the time
    value, low, high = paired_ratio(list(2 * drift * rng.lognormal(0, 0.01, 50)), list(drift))
    assert low < value < high and low == pytest.approx(2, rel=0.02) and high == pytest.approx(2, rel=0.02)


def test_one_thread_is_timed_by_its_cpu_time_and_several_by_the_wall(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert clock(1).method == "timer:thread_cpu" and clock(1).now is time.thread_time
    assert clock(2).method == "timer:wall" and clock(2).now is time.perf_counter


def test_the_coarse_thread_clock_of_windows_is_not_used_and_the_row_says_so(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    assert clock(1).method == "timer:wall" and clock(1).now is time.perf_counter
