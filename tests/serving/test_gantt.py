"""Spans and Chrome traces of a simulation: they tile each request's life, and kvlab's own trace reader takes them."""
import gzip
import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_requests import BLOCK_SIZE, NUM_BLOCKS, configs, of_lengths, traces
from typer.testing import CliRunner

from kvlab.cli import app
from kvlab.record.trace import read_trace
from kvlab.record.trace_summary import summary
from kvlab.serving.gantt import SPANS, Gantt
from kvlab.serving.scheduler import SchedulerConfig
from kvlab.serving.simulator import simulate
from kvlab.serving.step_time import fixed

SMALL = dict(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)


def drawn(requests, config=CONFIG, **other):
    gantt = Gantt()
    return gantt, simulate(requests, config, step_time=fixed(1.0), on_step=gantt, **SMALL | other)


@given(traces(), configs, st.integers(1, 2))
@settings(max_examples=200, deadline=None)
def test_spans_tile_the_life_of_every_request(requests, config, replicas):
    gantt, done = drawn(requests, config, replicas=replicas)
    spans = gantt.spans()
    assert gantt._open == {} and set(spans.what) <= set(SPANS)
    assert set(spans.id) == {one.request.id for one in done.served if not one.rejected}
    for one in done.served:
        mine = list(spans[spans.id == one.request.id].itertuples())
        if one.rejected:
            assert mine == []
            continue
        assert mine[0].began_s == one.request.arrival_s and mine[-1].ended_s == one.last_token_s
        assert all(a.ended_s == b.began_s and a.what != b.what for a, b in pairwise(mine))
        assert all(span.ended_s > span.began_s for span in mine)
        assert len({span.replica for span in mine}) == 1
        whats = [span.what for span in mine]
        assert whats.count("preempted") == whats.count("recompute") == one.preemptions
        assert sum(span.ended_s - span.began_s for span in mine if span.what == "queued") == pytest.approx(one.queue_s)


def test_spans_by_hand():
    """As the scheduler's own case: b gives way in the fourth step, comes back in the sixth, decodes in the seventh."""
    gantt, _ = drawn(of_lengths((6, 5), (6, 5)), num_blocks=5)
    told = [(one.id, one.what, one.began_s, one.ended_s) for one in gantt.spans().itertuples()]
    assert sorted(told) == [
        ("a", "decode", 1, 5), ("a", "prefill", 0, 1),
        ("b", "decode", 1, 3), ("b", "decode", 6, 7), ("b", "preempted", 3, 5), ("b", "prefill", 0, 1),
        ("b", "recompute", 5, 6)]


def test_a_static_batch_ends_each_request_once():
    gantt, done = drawn(of_lengths((2, 1), (2, 4), (2, 1)), SchedulerConfig(batching="static"))
    ended = gantt.spans().groupby("id").ended_s.max()
    assert list(ended) == [one.last_token_s for one in sorted(done.served, key=lambda one: one.request.id)] == [1, 4, 1]


@pytest.mark.parametrize("name", ["steps.json", "steps.json.gz"])
def test_a_chrome_trace_has_every_step_and_span(tmp_path, name):
    gantt, done = drawn(of_lengths((6, 5), (6, 5)), num_blocks=5)
    path = gantt.write(tmp_path / name)
    with (gzip.open if name.endswith("gz") else open)(path, "rt", encoding="utf-8") as file:
        whole = json.load(file)
    assert whole["otherData"]["clock"] == "simulated"
    events = whole["traceEvents"]
    steps = [event for event in events if event["ph"] == "X"]
    assert len(steps) == done.steps and sum(event["dur"] for event in steps) == 1e6 * done.makespan_s
    opened = [(event["id"], event["name"], event["ts"]) for event in events if event["ph"] == "b"]
    assert len(opened) == len(gantt.spans()) == sum(event["ph"] == "e" for event in events)
    assert {event["name"] for event in events if event["ph"] == "C"} == {"requests", "blocks"}


def test_kvlabs_own_trace_reader_takes_it(tmp_path):
    gantt, done = drawn(of_lengths((6, 5), (6, 5)), num_blocks=5)
    trace = read_trace(gantt.write(tmp_path / "steps.json"))
    assert trace.simulated == summary(trace) and trace.problems == () and trace.simulated.bytes is None
    (replica,) = trace.simulated.replicas
    assert replica["simulated_s"] == pytest.approx(done.makespan_s) and replica["busy_s"] == replica["simulated_s"]
    assert sum(row["count"] for row in replica["steps"]) == done.steps
    told = {row["what"]: (row["count"], row["total_s"], row["mean_s"]) for row in replica["spans"]}
    assert told == {"prefill": (2, 2, 1), "decode": (3, 7, pytest.approx(7 / 3)), "preempted": (1, 2, 2),
                    "recompute": (1, 1, 1)}


def test_a_simulated_trace_is_shown_as_simulated_with_its_replicas_apart(tmp_path):
    done = drawn(of_lengths(*[(6, 5)] * 6), num_blocks=5, replicas=2)
    path = done[0].write(tmp_path / "two.json.gz")
    shown = CliRunner().invoke(app, ["trace", str(path)], standalone_mode=False).stdout
    assert "2 simulated replicas" in shown and shown.count(" s simulated, ") == 2
    assert all(word in shown for word in ("queued", "prefill", "decode", "preempted", "recompute", "mean"))
    assert not any(word in shown for word in ("under the profiler", "record_shapes", "gap", "operator"))
    told = json.loads(CliRunner().invoke(app, ["trace", str(path), "--json"], standalone_mode=False).stdout)
    assert told["kind"] == "simulated" and [one["replica"] for one in told["replicas"]] == ["0", "1"]
    assert max(one["simulated_s"] for one in told["replicas"]) == pytest.approx(done[1].makespan_s)


def test_a_damaged_simulated_trace_is_read_as_far_as_it_goes(tmp_path):
    whole = [dict(ph="X", name="decode", pid=0, ts=0, dur=5e6), dict(ph="b", name="queued", id="a", pid=0, ts=0),
             dict(ph="e", name="queued", id="a", pid=0, ts=2e6), dict(ph="C", name="blocks", pid=0, ts=0, args={})]
    bad = [3, {}, dict(ph="X", name="x", ts=1, dur="long"), dict(ph="X", name=[], ts=1, dur=1), dict(ph="M", name="m"),
           dict(ph="e", name="queued", id="z", pid=0, ts=3), dict(ph="b", name="decode", id="a", pid={}, ts=1),
           dict(ph="b", name="decode", id="a", pid=0, ts=True)]
    data = dict(traceEvents=[*bad, *whole], otherData=dict(source="kvlab.serving.gantt"))
    (tmp_path / "d.json").write_text(json.dumps(data))
    found = read_trace(tmp_path / "d.json").simulated
    assert found.replicas == [dict(replica="0", simulated_s=5.0, busy_s=5.0,
                                   steps=[dict(what="decode", count=1, mean_s=5.0, total_s=5.0)],
                                   spans=[dict(what="queued", count=1, mean_s=2.0, total_s=2.0)])]
    assert len(found.problems) == 1 and found.problems[0].startswith(f"{len(bad)} events without")


def test_an_empty_simulation_is_an_empty_chart(tmp_path):
    gantt, _ = drawn([])
    assert gantt.spans().empty and list(gantt.spans().columns) == ["id", "replica", "what", "began_s", "ended_s"]
    assert json.loads(gantt.write(tmp_path / "none.json").read_text())["traceEvents"] == []


def test_hostile_names_stay_text(tmp_path):
    from kvlab.serving.request import Request
    gantt, _ = drawn([Request('"}],"x":[\n\u2028<script>', 0.0, 4, 1)])
    events = json.loads(gantt.write(tmp_path / "h.json").read_text(encoding="utf-8"))["traceEvents"]
    assert {event["id"] for event in events if "id" in event} == {'"}],"x":[\n\u2028<script>'}
