"""The incident, its alarms judged by hand, and findings that turn when an alarm is late, silent or always on."""
import json
from dataclasses import asdict

import made_serving as made
import pytest

from kvlab.record.asked import asked
from kvlab.record.reading import schema, table
from kvlab.registry import case_from
from kvlab.studies import monitoring
from kvlab.studies._monitoring_case import ALARMS, EVERY_S, METRICS, WINDOW_S, Incident, _at
from kvlab.studies._monitoring_findings import findings


def incident(**more):
    return Incident("azure_2023_conv", 3.0, **{**dict(calm_s=420.0, burst_s=120.0, after_s=120.0, seeds=(0,)), **more})


@pytest.fixture(scope="module")
def rows():
    return table(incident().rows())


def said(*alarms):
    return {one.name.removeprefix("alarm: "): one for one in findings(table([row for rows in alarms for row in rows]))}


@pytest.mark.parametrize("size, seeds", [("smoke", 2), ("small", 5), ("large", 20)])
def test_one_incident_over_seeds(monkeypatch, size, seeds):
    monkeypatch.setattr(monitoring, "capacity_of", lambda load: (3.0, 30.0))
    (case,) = monitoring.cases(size)
    assert len(case.seeds) == seeds and case.capacity == 3.0 and case.calm < 1 < case.burst
    assert case.calm_s > WINDOW_S and case.after_s > WINDOW_S
    kind = f"{type(case).__module__}:{type(case).__qualname__}"
    again = case_from(kind, json.loads(json.dumps(asdict(case))))
    assert again.comparison_id == case.comparison_id, "a worker gets it as JSON"


@pytest.mark.parametrize("wrong", [dict(variants=("sdpa",)), dict(model="meta-llama/Llama-3.1-8B")])
def test_what_it_cannot_take_is_refused(wrong):
    with pytest.raises(ValueError, match="kvlab watch URL"):
        next(monitoring.cases("smoke", **wrong))


def test_requests_come_in_three_stretches_at_their_rates():
    case = incident()
    every = list(case.requests(seed=1))
    times = [one.arrival_s for one in every]
    assert times == sorted(times) and len({one.id for one in every}) == len(every)
    for part, (began, ended, rate) in enumerate(((0, 420, 1.5), (420, 540, 6.0), (540, 660, 1.5))):
        mine = [one for one in every if one.id.startswith(f"{part}-")]
        assert all(began <= one.arrival_s < ended for one in mine)
        assert len(mine) == pytest.approx(rate * (ended - began), rel=0.2)
    assert times != [one.arrival_s for one in case.requests(seed=2)]


def test_an_alarm_is_judged_by_when_it_was_on():
    case = incident()                                       # the burst: from 420 to 540 s
    state = [(t, 480 <= t <= 600) for t in range(0, 660, 15)]
    assert case._judged(state) == {"false_share": 0, "detected_after_s": 60, "cleared_after_s": 75}
    always = case._judged([(t, True) for t in range(0, 660, 15)])
    assert always == {"false_share": 1, "detected_after_s": 0, "cleared_after_s": None}
    never = case._judged([(t, False) for t in range(0, 660, 15)])
    assert never == {"false_share": 0, "detected_after_s": None, "cleared_after_s": None}
    early = case._judged([(t, t < WINDOW_S + 15) for t in range(0, 660, 15)])
    assert early["false_share"] == pytest.approx(1 / 8), "before one window has passed nothing is judged"


def test_counts_at_a_time_are_those_of_the_last_step_that_had_ended():
    assert _at([(1.0, 5), (2.0, 7)], [0.5, 1.0, 1.5, 9.0]) == [0, 5, 5, 7]


def test_rows_hold_one_curve_per_measure_and_a_strip_per_alarm(rows):
    schema().validate(rows)
    assert set(rows["kind"]) <= {"simulated", "missing"} and set(rows["metric"]) <= set(METRICS)
    curve, strip = asked(rows, "curve"), asked(rows, "strip")
    times = sorted(curve["t"].unique())
    assert times[0] >= 0 and {b - a for a, b in zip(times, times[1:])} == {EVERY_S}
    assert set(strip["alarm"]) == set(ALARMS) and len(strip) == len(times) * len(ALARMS)
    evicted = curve[curve["metric"] == "cache_evictions"].sort_values("t")["value"]
    assert evicted.is_monotonic_increasing and evicted.iloc[-1] > 0
    assert curve[curve["metric"] == "kv_usage"]["value"].between(0, 1).all()


def test_the_incident_is_told_by_the_queue_and_not_by_evictions(rows):
    alarms = asked(rows, "alarm").set_index(["alarm", "metric"])["value"]
    assert alarms["queue p99", "false_share"] == 0 and 0 < alarms["queue p99", "detected_after_s"] < 120
    assert alarms["evictions > 0", "false_share"] == 1 == alarms["evictions > 5 %", "false_share"]


def test_seeds_in_which_an_alarm_did_not_fire_are_counted():
    case = incident(seeds=(0, 1, 2))
    lacking = case._over_seeds("detected_after_s", [30.0], "said")
    assert lacking.kind == "missing" and lacking.note == "it did not fire in 2 of 3 seeds"
    assert "still on at the end in 3 of 3" in case._over_seeds("cleared_after_s", [], "said").note
    mean = case._over_seeds("detected_after_s", [0.0, 0.0, 60.0], "said")
    assert (mean.value, mean.low, mean.n) == (20.0, 0.0, 3) and mean.high > 60


def test_a_finding_tells_good_alarms_from_silent_and_useless_ones():
    found = said(made.alarm("KV usage"), made.alarm("late", soon=None, clear=0.0), made.alarm("evictions", 0.4),
                 made.alarm("always", 1.0, 0.0, None))
    assert found["KV usage"].sentence.endswith(
        "on for 0% of the calm time, fires 60 s after the burst began, goes out 300 s after the burst's end; it tells "
        "the incident.")
    assert "silent: it did not fire in 2 of 5 seeds" in found["late"].sentence
    assert "useless" in found["evictions"].sentence and "fires" not in found["evictions"].sentence
    assert "still on at the end in 5 of 5 seeds; useless" in found["always"].sentence and found["always"].value == 1.0


def test_a_table_without_the_study_has_no_finding():
    (none,) = findings(table([]))
    assert none.name == "none"
