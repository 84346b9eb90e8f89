"""The benchmark gates: when one is met, missed or ambiguous, and what the command writes. No time is asserted."""
import json
from itertools import islice

import pytest

from kvlab import bench
from kvlab.bench import Gate
from kvlab.bench_inputs import OPERATORS, events
from kvlab.record.trace import trace_of
from kvlab.record.trace_summary import summary


@pytest.mark.parametrize("goal, low, high, met", [
    ("<= 1.0", 0.5, 1.0, True), ("<= 1.0", 0.9, 1.1, None), ("<= 1.0", 1.1, 1.2, False),
    (">= 12", 12, 20, True), (">= 12", 11, 13, None), (">= 12", 2, 11.9, False),
    ("within 0.98 1.02", 0.99, 1.01, True), ("within 0.98 1.02", 0.97, 1.0, None),
    ("within 0.98 1.02", 1.03, 1.05, False), ("within 0.98 1.02", 0.9, 0.97, False),
    ("includes 1", 0.99, 1.01, True), ("includes 1", 1.01, 1.02, None), ("includes 1", 1.03, 1.05, False),
    ("includes 1", 0.9, 0.97, False),
])
def test_a_gate_is_met_only_if_the_whole_interval_clears(goal, low, high, met):
    assert Gate("", "ratio", goal, None).met(low, high) is met


def test_an_ambiguous_gate_is_run_again_and_a_broken_one_is_missed_with_the_reason():
    answers = [(1.0, 0.9, 1.1), (1.0, 0.9, 1.1), (0.8, 0.7, 0.9)]
    row = bench._measured(Gate("g", "s", "<= 1.0", lambda: answers.pop(0)))
    assert (row["met"], row["value"], answers) == (True, 0.8, [])
    row = bench._measured(Gate("g", "s", "<= 1.0", lambda: (1.0, 0.9, 1.1)))
    assert row["met"] is None
    row = bench._measured(Gate("g", "s", "<= 1.0", lambda: 1 / 0))
    assert (row["met"], row["value"]) == (False, None) and "ZeroDivisionError" in row["error"]


@pytest.mark.parametrize("low, code", [(0.5, 0), (2.0, 1)])
def test_the_table_is_written_and_the_exit_code_says_whether_all_are_met(tmp_path, monkeypatch, capsys, low, code):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "gates", lambda: [Gate("one", "s", "<= 1.0", lambda: (low, low, low)),
                                                 Gate("two", "s", "<= 9.0", lambda: (1.0, 1.0, 1.0))])
    assert bench.main() == code
    rows = json.loads((tmp_path / "profiles" / "bench" / "bench.json").read_text())
    assert [row["name"] for row in rows] == ["one", "two"]
    assert all({"name", "value", "low", "high", "goal", "met"} <= set(row) for row in rows)
    assert ("met" if code == 0 else "MISSED") in capsys.readouterr().out


def test_the_trace_of_the_gate_is_one_that_torch_could_have_written():
    made = list(islice(events(), 490))
    found = summary(trace_of({"traceEvents": made}))
    assert found.calls == 10 and found.problems == () and found.not_counted == {}
    kernels = [event for event in made if event.get("cat") == "kernel"]
    assert sum(row["count"] for row in found.kernels) == len(kernels) == 60
    assert {row["operator"] for row in found.kernels} == {f"aten::{inner}" for _, inner, _ in OPERATORS}
    shapes = {str(event["args"]["Input Dims"]) for event in made if event.get("cat") == "cpu_op"}
    assert len(shapes) == 6 * 10 and json.loads(json.dumps(made)) == made


def test_every_gate_measures_an_interval_around_its_value(monkeypatch):
    monkeypatch.setattr(bench, "PAIRS", 3)
    for gate in bench.gates():
        if any(word in gate.name for word in ("32768", "figure", "export", "trace", "doctor")):     # only longer
            continue
        value, low, high = gate.measure()
        assert low <= value <= high and value >= 0, gate.name
