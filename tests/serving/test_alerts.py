"""Alerts on live scrapes and on a simulated timeline: the same code, the same answers."""
import pytest
from fake_engine import vllm_page

from kvlab.serving.alerts import Thresholds, evaluate, timeline
from kvlab.serving.metrics import read
from kvlab.serving.scrape import parse
from kvlab.serving.windows import History

ALL = Thresholds(preemption_ratio=0.05, queue_p99_s=10, kv_usage=0.9, hit_rate=0.3)


def snaps(*pages, every=100.0):
    return [read(parse(vllm_page(**page)), i * every) for i, page in enumerate(pages)]


def alert(samples, name, thresholds=ALL):
    return {one.name: one for one in evaluate(samples, thresholds)}[name]


def test_the_ratio_is_of_the_window_and_fires_above_its_threshold():
    pages = [dict(preempted=100 + 5 * i, finished=100 + 100 * i) for i in range(4)]
    got = alert(snaps(*pages), "preemption_ratio")
    assert got.value == 0.05 and not got.firing and got.over_s == 300 and got.note == ""
    pages[-1]["preempted"] += 1
    assert alert(snaps(*pages), "preemption_ratio").firing


def test_what_happened_before_the_window_does_not_count():
    pages = [dict(preempted=0, finished=0), dict(preempted=90, finished=100)]
    pages += [dict(preempted=90, finished=100 + 10 * i) for i in range(1, 5)]
    got = alert(snaps(*pages), "preemption_ratio")
    assert got.value == 0 and not got.firing


def test_a_short_window_says_so():
    got = alert(snaps(dict(), dict(preempted=1, finished=10), every=42.0), "preemption_ratio")
    assert got.firing and got.value == 0.1 and got.over_s == 42 and got.note == "over 42 s so far"
    assert alert(snaps(dict()), "preemption_ratio").note == "needs a second scrape"


def test_preemptions_without_a_finished_request_fire_without_a_number():
    got = alert(snaps(dict(), dict(preempted=3), dict(preempted=3), dict(preempted=3)), "preemption_ratio")
    assert got.firing and got.value is None and got.note == "3 preemptions and no finished request"
    got = alert(snaps(*[dict()] * 4), "preemption_ratio")
    assert not got.firing and got.value is None and got.note == "no finished request"


def test_a_restart_is_counted_from_zero_and_said():
    pages = [dict(preempted=50, finished=900), dict(preempted=50, finished=950), dict(preempted=3, finished=20),
             dict(preempted=5, finished=50)]
    got = alert(snaps(*pages), "preemption_ratio")
    assert got.value == 5 / 100 and "restarted, counted from 0" in got.note
    pages = [dict(preempted=5, finished=5), dict(preempted=1, finished=0)] * 2
    got = alert(snaps(*pages[:2], every=300), "preemption_ratio")
    assert got.firing and "1 preemptions and no finished request" in got.note and "restarted" in got.note


def test_queue_usage_and_hit_rate():
    low = dict(usage=0.5, queried=100, hit=90, queue=(10, 10, 10))
    high = dict(usage=1.0, queried=200, hit=100, queue=(10, 110, 110))
    got = snaps(low, high, every=300)
    assert alert(got, "queue_p99_s").value == pytest.approx(0.3 + 0.99 * 59.7) and alert(got, "queue_p99_s").firing
    assert alert(got, "kv_usage").value == 0.75 and not alert(got, "kv_usage").firing
    assert alert(got, "kv_usage", Thresholds(kv_usage=0.7)).firing
    assert alert(got, "hit_rate").value == 0.1 and alert(got, "hit_rate").firing
    assert not alert(got, "hit_rate", Thresholds(hit_rate=0.1)).firing                # below, not at


def test_a_quantile_beyond_the_last_bound_is_a_lower_bound():
    got = alert(snaps(dict(), dict(queue=(0, 0, 5)), every=300), "queue_p99_s")
    assert got.value == 60 and got.at_least and got.firing


def test_nothing_seen_is_no_alarm():
    got = snaps(*[dict()] * 4)
    assert not any(one.firing for one in evaluate(got, ALL))
    assert alert(got, "hit_rate").note == "nothing was looked up" and alert(got, "hit_rate").value is None
    assert alert(got, "queue_p99_s").note == "no request was observed"


def test_an_engine_without_the_metric_is_unknown_with_the_reason():
    got = evaluate([read(parse("llamacpp:requests_processing 1\n"), t) for t in (0.0, 300.0)], ALL)
    assert [(one.name, one.value, one.firing) for one in got] == [
        (name, None, False) for name in ("preemption_ratio", "queue_p99_s", "kv_usage", "hit_rate")]
    assert "never preempts" in got[0].note and "exports no histogram" in got[1].note


def test_only_what_has_a_threshold_is_watched():
    assert [one.name for one in evaluate(snaps({}), Thresholds())] == ["preemption_ratio"]
    assert [one.name for one in evaluate(snaps({}), Thresholds(None, kv_usage=0.5))] == ["kv_usage"]


@pytest.mark.parametrize("bad", [dict(preemption_ratio=-0.1), dict(kv_usage=95), dict(hit_rate=1.1), dict(window_s=0),
                                 dict(queue_p99_s=float("nan")), dict(preemption_ratio=float("inf"))])
def test_thresholds_that_are_none(bad):
    with pytest.raises(ValueError, match="threshold|window"):
        Thresholds(**bad)


def test_a_timeline_is_what_looking_at_each_moment_gives():
    got = snaps(*[dict(preempted=i * (i > 5), finished=10 * i) for i in range(12)], every=60.0)
    along = timeline(got, ALL)
    assert [t for t, _ in along] == [one.at_s for one in got]
    for i, (_, alerts) in enumerate(along):
        assert alerts == evaluate(got[:i + 1], ALL) == evaluate(History(got[:i + 1]), ALL)
    assert [alerts[0].firing for _, alerts in along] == [False] * 6 + [True] * 6
