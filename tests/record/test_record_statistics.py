"""The t-interval that studies and figures share."""
import math

import pytest

from kvlab.record.statistics import share, t_interval


def test_three_values_give_the_textbook_interval():
    got = t_interval([1.0, 2.0, 3.0])
    assert got.value == 2 and got.n == 3 and got.high - 2 == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert got.high - 2 == pytest.approx(2 - got.low)


def test_one_value_tells_no_spread_and_bad_ones_are_refused():
    one = t_interval([0.5])
    assert one.value == 0.5 and math.isnan(one.low) and math.isnan(one.high)
    for bad in ([], [1.0, math.nan]):
        with pytest.raises(ValueError, match="finite"):
            t_interval(bad)
    with pytest.raises(ValueError, match="confidence"):
        t_interval([1.0, 2.0], 95)


def test_a_share_has_the_textbooks_exact_interval():
    some = share(1, 14)
    assert (some.value, some.n) == (1 / 14, 14) and (some.low, some.high) == pytest.approx((0.0018, 0.3387), abs=2e-4)
    none, every = share(0, 16), share(16, 16)
    assert none.low == 0 and every.high == 1 and every.low == pytest.approx(0.025**(1 / 16))
    assert none.high == pytest.approx(1 - every.low)
    for hits, n in ((-1, 3), (4, 3), (0, 0)):
        with pytest.raises(ValueError, match="is no share"):
            share(hits, n)
