"""Spans and Chrome traces of a simulation: they tile each request's life, and kvlab's own trace reader takes them."""
import gzip
import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_requests import BLOCK_SIZE, NUM_BLOCKS, configs, of_lengths, traces

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
    from kvlab.record.trace import read_trace
    gantt, done = drawn(of_lengths((6, 5), (6, 5)), num_blocks=5)
    trace = read_trace(gantt.write(tmp_path / "steps.json"))
    assert trace is not None


def test_an_empty_simulation_is_an_empty_chart(tmp_path):
    gantt, _ = drawn([])
    assert gantt.spans().empty and list(gantt.spans().columns) == ["id", "replica", "what", "began_s", "ended_s"]
    assert json.loads(gantt.write(tmp_path / "none.json").read_text())["traceEvents"] == []


def test_hostile_names_stay_text(tmp_path):
    from kvlab.serving.request import Request
    gantt, _ = drawn([Request('"}],"x":[\n\u2028<script>', 0.0, 4, 1)])
    events = json.loads(gantt.write(tmp_path / "h.json").read_text(encoding="utf-8"))["traceEvents"]
    assert {event["id"] for event in events if "id" in event} == {'"}],"x":[\n\u2028<script>'}
