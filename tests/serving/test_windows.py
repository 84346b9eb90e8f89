"""Counters across restarts and quantiles of histograms: against plain arithmetic, for any sequence."""
import math

import pytest
from fake_engine import vllm_page
from hypothesis import given
from hypothesis import strategies as st

from kvlab.serving.metrics import read
from kvlab.serving.scrape import parse
from kvlab.serving.windows import History, Quantile, quantile


def snap(at_s, **values):
    return read(parse(vllm_page(**values)), at_s)


@given(st.lists(st.one_of(st.integers(0, 50), st.just("restart")), min_size=1, max_size=30))
def test_any_restarts_leave_the_true_increase(steps):
    """An engine that grows by so much between scrapes, or is restarted and grows by 1 less than it had counted."""
    history, counted, true = History([snap(0, finished=10)]), 10, 0
    for i, step in enumerate(steps):
        if step == "restart":
            counted, grown = max(counted - 1, 0), max(counted - 1, 0)
            if counted == 0 and grown == 0:
                history.add(snap(i + 1, finished=0))
                continue
        else:
            counted, grown = counted + step, step
        true += grown
        history.add(snap(i + 1, finished=counted))
    window = history.window(1e9)
    assert window.increase("finished") == true and window.over_s == len(steps)
    assert ("finished" in window.restarts) == ("restart" in steps)


def test_one_of_two_engines_is_restarted():
    both = [vllm_page(finished=100, engine="0") + vllm_page(finished=50, engine="1"),
            vllm_page(finished=104, engine="0") + vllm_page(finished=2, engine="1")]
    history = History(read(parse(text), float(i)) for i, text in enumerate(both))
    assert history.window(10).increase("finished") == 4 + 2 and history.window(10).restarts == ["finished"]


def test_a_series_that_is_new_counts_from_zero_and_one_that_comes_back_from_where_it_was():
    def page(**reasons):
        return "vllm:num_requests_running 1\n" + "".join(
            f'vllm:request_success_total{{finished_reason="{reason}"}} {count}\n' for reason, count in reasons.items())
    texts = [page(stop=5), page(stop=5, length=3), page(stop=6), page(stop=6, length=4)]
    history = History(read(parse(text), float(i)) for i, text in enumerate(texts))
    assert history.window(10).increase("finished") == 3 + 1 + 1 and not history.window(10).restarts


def test_what_could_not_be_read_has_no_history():
    history = History([snap(0, finished="NaN"), snap(1, finished=1000), snap(2, finished=1004)])
    assert history.window(10).increase("finished") == 4


def test_windows_reach_back_to_the_last_scrape_that_is_old_enough():
    history = History([snap(t, finished=10 * t, usage=t / 10) for t in range(6)], keep_s=3)
    assert len(history) == 4 and history.window(3).increase("finished") == 30
    assert history.window(2.5).over_s == 3 and not history.window(2.5).short
    assert history.window(100).over_s == 3 and history.window(100).short
    assert history.window(1e-9).rate("finished") == 10
    assert history.window(2).mean_of_fullest("kv_usage") == pytest.approx(0.4)
    with pytest.raises(ValueError, match="no scrape"):
        History().window(1)


def test_the_fullest_engine_counts():
    pages = [vllm_page(usage=a, engine="0") + vllm_page(usage=b, engine="1") for a, b in ((0.2, 0.9), (0.4, 0.7))]
    history = History(read(parse(text), float(i)) for i, text in enumerate(pages))
    assert history.window(10).mean_of_fullest("kv_usage") == pytest.approx(0.8)
    assert history.window(10).newest.value("kv_usage") == pytest.approx(0.55)


def test_one_scrape_is_no_window_but_tells_of_the_time_since_the_start():
    history = History([snap(7, finished=20, preempted=2, queue=(10, 20, 20))])
    window = history.window(60)
    assert window.increase("finished") is None and window.rate("finished") is None and window.over_s == 0
    assert window.quantile("queue_s", 0.5) is None and window.ratio("preemptions", "finished") is None
    whole = history.since_start()
    assert whole.over_s is None and whole.increase("finished") == 20 and whole.rate("finished") is None
    assert whole.ratio("preemptions", "finished") == 0.1 and whole.quantile("queue_s", 0.5) == Quantile(0.3)


def test_quantiles_are_of_the_window_only_also_over_a_restart():
    history = History([snap(0, queue=(1000, 1000, 1000)), snap(1, queue=(1000, 1004, 1004)), snap(2, queue=(0, 2, 2))])
    window = history.window(10)
    assert window.quantile("queue_s", 0.5) == Quantile(pytest.approx(0.3 + 0.5 * 59.7))
    assert "queue_s" in window.restarts


def test_order_and_engine_are_kept():
    with pytest.raises(ValueError, match="not later"):
        History([snap(1), snap(1)])
    with pytest.raises(ValueError, match="was vllm and is tgi now"):
        History([snap(0), read(parse("tgi_queue_size 1\n"), 1.0)])


@given(st.lists(st.integers(0, 20), min_size=2, max_size=8), st.floats(0, 1), st.floats(0, 1))
def test_a_quantile_lies_in_the_bucket_that_holds_its_rank(counts, q, other):
    bounds = [0.5 * (i + 1) for i in range(len(counts) - 1)] + [math.inf]
    buckets, total = {}, 0
    for bound, count in zip(bounds, counts):
        buckets[bound] = total = total + count
    found = quantile(q, buckets)
    if not total:
        assert found is None
        return
    at = next(i for i, bound in enumerate(bounds) if buckets[bound] >= q * total)
    if at == len(bounds) - 1:
        assert found == Quantile(bounds[-2], at_least=True)
    else:
        assert (bounds[at - 1] if at else 0) <= found.value <= bounds[at] and not found.at_least
    low, high = sorted((q, other))
    assert quantile(low, buckets).value <= quantile(high, buckets).value + 1e-12


def test_quantiles_by_hand():
    assert quantile(0.5, {1.0: 10, 2.0: 20, math.inf: 20}).value == 1.0
    assert quantile(0.75, {1.0: 10, 2.0: 20, math.inf: 20}).value == 1.5
    assert quantile(0.25, {1.0: 10, 2.0: 20, math.inf: 20}).value == 0.5
    assert quantile(0.6, {1.0: 5, 2.0: 3, 4.0: 10, math.inf: 10}).value == 2.4    # scraped one after another
    assert quantile(0.9, {0.0: 10, math.inf: 10}) == Quantile(0.0)
    assert quantile(0.5, {math.inf: 3}) is None
    for wrong in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="between 0 and 1"):
            quantile(wrong, {math.inf: 1})
    with pytest.raises(ValueError, match="infinite"):
        quantile(0.5, {1.0: 1})
