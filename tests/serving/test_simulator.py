"""The engine on a simulated clock: who is served when, on how many replicas, what the timeline says, in what memory."""
import gc
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_requests import BLOCK_SIZE, NUM_BLOCKS, configs, of_lengths, traces

from kvlab.serving.request import Request
from kvlab.serving.scheduler import SchedulerConfig
from kvlab.serving.simulator import TIMELINE, simulate
from kvlab.serving.step_time import Linear, fixed

MANY = settings(max_examples=150, deadline=None)
SECOND = fixed(1.0)
CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)
SMALL = dict(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
CUMULATIVE = ("preemptions", "finished", "prompt_tokens", "generated_tokens", "queried_tokens", "cached_tokens")


@given(traces(), configs, st.integers(1, 3))
@MANY
def test_every_request_is_served_or_rejected_once_and_in_order_of_its_times(requests, config, replicas):
    records = []
    done = simulate(requests, config, step_time=Linear(0.1, 0.01, 0.02, 0.001, "D", "S"), replicas=replicas,
                    every_s=0.5, on_step=records.append, **SMALL)
    assert sorted(one.request.id for one in done.served) == sorted(one.id for one in requests)
    kept = [one for one in done.served if not one.rejected]
    assert (done.finished, done.rejected) == (len(kept), len(done.served) - len(kept))
    for one in kept:
        assert one.request.arrival_s <= one.scheduled_s < one.first_token_s <= one.last_token_s
    assert done.generated_tokens == sum(one.generated for one in kept) == sum(one.step.generated for one in records)
    assert done.prompt_tokens == sum(one.request.prompt_tokens for one in kept)
    assert done.preemptions == sum(one.preemptions for one in kept)
    assert done.cached_tokens == sum(one.cached_tokens for one in kept)
    assert done.steps == sum(record.step.batch.sequences > 0 for record in records)
    ends = [one.last_token_s for one in kept]
    assert ends == sorted(ends) and done.makespan_s == pytest.approx(max(ends, default=done.began_s) - done.began_s)
    for replica in range(replicas):
        mine = [record for record in records if record.replica == replica]
        assert all(a.ended_s <= b.began_s for a, b in zip(mine, mine[1:], strict=False))
        assert all(record.ended_s > record.began_s or not record.step.batch.sequences for record in mine)
        assert not mine or mine[-1].blocks_used == mine[-1].running == 0


@given(traces(), configs, st.integers(1, 3), st.sampled_from((0.3, 1.0, 4.0)))
@MANY
def test_the_timeline_is_what_the_steps_and_requests_say(requests, config, replicas, every_s):
    records = []
    done = simulate(requests, config, step_time=SECOND, replicas=replicas, every_s=every_s, on_step=records.append,
                    **SMALL)
    table = done.timeline()
    assert tuple(table.columns) == TIMELINE
    before = int(done.began_s // every_s) + 1
    assert list(table.t) == [k * every_s for k in range(before, before + len(table))]
    end = done.began_s + done.makespan_s
    assert table.empty == (done.steps == 0 and before * every_s >= max((one.arrival_s for one in requests), default=0))
    if done.steps:                                              # the last line: the first at which all is over
        last = table.iloc[-1]
        late = max(one.arrival_s for one in requests) > end     # who came later was rejected
        assert last.t >= end and (late or last.t - every_s < end)
        assert [last[name] for name in CUMULATIVE] == [getattr(done, name) for name in CUMULATIVE]
        assert last.running == last.waiting == last.blocks_used == 0
    assert table[list(CUMULATIVE)].diff().dropna().ge(0).all().all()
    kept = [one for one in done.served if not one.rejected]
    instants = {t for one in records for t in (one.began_s, one.ended_s)} | {one.arrival_s for one in requests}
    for row in table.itertuples():
        if row.t in instants:                                   # something happens just then: before it or after
            continue
        assert row.finished == sum(one.last_token_s < row.t for one in kept)
        assert row.preemptions == sum(len(one.step.preempted) for one in records if one.began_s < row.t)
        assert row.generated_tokens == sum(one.step.generated for one in records if one.ended_s < row.t)
        came = sum(one.request.arrival_s < row.t for one in kept)
        assert row.running + row.waiting + row.finished == came
        assert 0 <= row.blocks_used <= replicas * (NUM_BLOCKS - 1)
        assert row.kv_usage == pytest.approx(row.blocks_used / (replicas * (NUM_BLOCKS - 1)))
        assert row.running <= replicas * config.max_num_seqs


def test_a_sample_shows_the_step_that_is_under_way():
    """Steps of ten seconds; b comes at 3 s and waits until the step has ended, which no sample knows beforehand."""
    done = simulate(of_lengths((4, 2), (4, 1), arrivals=[0, 3]), CONFIG, step_time=fixed(10.0), every_s=2.0, **SMALL)
    table = done.timeline().set_index("t")
    assert list(table.running)[:4] == [1, 1, 1, 1]
    assert list(table.waiting)[:4] == [0, 1, 1, 1]              # at 2, 4, 6, 8 s
    assert list(table.generated_tokens)[:4] == [0, 0, 0, 0]
    assert (table.running[12.0], table.waiting[12.0], table.generated_tokens[12.0]) == (2, 0, 1)
    assert table.blocks_used[8.0] == 1 and table.blocks_used[12.0] == 3


def test_times_by_hand():
    """Two seats. a: steps 1–3; b: 1–2; c comes at 0.5, is let in when b has ended, and ends with the third step."""
    done = simulate(of_lengths((4, 3), (4, 2), (4, 1), arrivals=[0, 0, 0.5]),
                    SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16), step_time=fixed(2.0), **SMALL)
    table = done.requests().set_index("id").sort_index()
    assert list(table.queue_s) == [0, 0, 3.5] and list(table.ttft_s) == [2, 2, 5.5]
    assert list(table.e2e_s) == [6, 4, 5.5] and list(table.output_tokens) == [3, 2, 1]
    assert table.tpot_s["a"] == 2 and table.tpot_s["c"] != table.tpot_s["c"]            # NaN: it has one token
    assert done.makespan_s == 6 and done.steps == 3
    summary = done.summary()
    assert summary["ttft_mean_s"] == pytest.approx(9.5 / 3) and summary["requests_per_s"] == 0.5
    assert summary["tokens_per_s"] == 1 and summary["preemption_ratio"] == 0 and summary["hit_rate"] is None


def test_an_idle_engine_starts_when_a_request_comes_and_not_before():
    done = simulate(of_lengths((4, 1), (4, 1), arrivals=[5, 100.25]), CONFIG, step_time=SECOND, every_s=10, **SMALL)
    assert [one.first_token_s for one in done.served] == [6, 101.25]
    assert done.began_s == 5 and done.makespan_s == 96.25
    assert list(done.timeline().t) == [10.0 * k for k in range(1, 12)]
    assert list(done.timeline().finished) == [1] * 10 + [2]


def test_a_trace_that_begins_late_has_no_samples_from_before():
    done = simulate(of_lengths((4, 3), arrivals=[1.7e9]), CONFIG, step_time=SECOND, **SMALL)
    assert list(done.timeline().t) == [1.7e9 + 1, 1.7e9 + 2, 1.7e9 + 3]


def test_a_late_request_that_is_rejected_does_not_make_the_run_longer():
    done = simulate(of_lengths((4, 1), (400, 1), arrivals=[0, 50]), CONFIG, step_time=SECOND, **SMALL)
    assert list(done.timeline().t) == list(range(1, 50))        # and no line beyond, as all was over long before
    assert done.makespan_s == 1 and done.rejected == 1 and done.requests().rejected[1].startswith("it needs 101 blocks")


@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_share_the_load_evenly(replicas):
    records = []
    requests = [Request(str(i), 0.0, 8, 5) for i in range(12 * replicas)]
    done = simulate(requests, CONFIG, step_time=SECOND, replicas=replicas, on_step=records.append, **SMALL)
    finished = [sum(len(one.step.ended) for one in records if one.replica == k) for k in range(replicas)]
    assert finished == [12] * replicas
    alone = simulate(requests[:12], CONFIG, step_time=SECOND, **SMALL)
    assert done.makespan_s == alone.makespan_s


def test_a_request_goes_where_fewest_wait():
    """Load is 4 × waiting + running. Replica 0 has a long one in its only seat; what comes next finds replica 1."""
    placed = {}

    def note(record):
        placed.update({live.served.request.id: record.replica for live in record.step.admitted})
    simulate(of_lengths((8, 9), (8, 1), (8, 1), arrivals=[0, 1, 3]), SchedulerConfig(max_num_seqs=1), step_time=SECOND,
             replicas=2, on_step=note, **SMALL)
    assert placed == {"a": 0, "b": 1, "c": 1}
    # c finds no blocks beside a: 4 + 1 on replica 0 against two that run on replica 1, when e comes
    simulate(of_lengths((36, 8), (4, 20), (36, 2), (4, 20), (4, 20), arrivals=[0, 1.2, 2.5, 3.5, 4.8]), CONFIG,
             step_time=SECOND, replicas=2, on_step=note, **SMALL)
    assert placed == {"a": 0, "b": 1, "c": 0, "d": 1, "e": 1}


@given(traces(), configs)
@settings(max_examples=40, deadline=None)
def test_the_same_input_gives_the_same_result_to_the_bit(requests, config):
    step_time = Linear(0.1, 0.01, 0.02, 0.001, "D", "S")
    first, second = (simulate(iter(requests), config, step_time=step_time, replicas=2, **SMALL) for _ in range(2))
    assert first.samples == second.samples and first.summary() == second.summary()
    assert first.requests().equals(second.requests())


def test_unsorted_requests_are_refused_and_named():
    with pytest.raises(ValueError, match="request b arrives at 1.*order of arrival"):
        simulate(of_lengths((4, 1), (4, 1), arrivals=[2, 1]), CONFIG, step_time=SECOND, **SMALL)


@pytest.mark.parametrize("bad", [dict(num_blocks=0), dict(block_size=0), dict(replicas=0), dict(every_s=0),
                                 dict(every_s=-1), dict(every_s=float("nan")), dict(every_s=float("inf"))])
def test_settings_that_cannot_be_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        simulate([], CONFIG, **dict(step_time=SECOND, **SMALL) | bad)


def test_nothing_to_serve_is_an_empty_result():
    for requests in ([], of_lengths((400, 1))):
        done = simulate(requests, CONFIG, step_time=SECOND, **SMALL)
        assert done.steps == 0 and done.makespan_s == 0 and len(done.requests()) == len(requests)
        assert done.timeline().empty and done.summary()["ttft_mean_s"] is None
        assert done.summary()["requests_per_s"] is None and done.summary()["rejected"] == len(requests)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_a_step_time_that_is_none_is_refused(seconds):
    class Broken:
        kind, device, source = "modelled", "D", "S"

        def __call__(self, batch):
            return seconds
    with pytest.raises(ValueError, match=r"step time of D \(S\) says .* s for Batch\(prefill_tokens=4"):
        simulate(of_lengths((4, 1)), CONFIG, step_time=Broken(), **SMALL)


@pytest.mark.parametrize("arrives", [1e9, 1e301])
def test_a_gap_that_no_timeline_can_hold_is_refused_and_costs_nothing_without_one(arrives):
    requests = of_lengths((4, 2), (4, 2), arrivals=[0, arrives])
    with pytest.raises(ValueError, match="a line every 1 s is more than 5,000,000 lines up to 1e"):
        simulate(requests, CONFIG, step_time=SECOND, **SMALL)
    done = simulate(requests, CONFIG, step_time=SECOND, every_s=None, **SMALL)
    assert done.finished == 2 and done.samples == []


def test_a_gap_in_the_trace_is_idle_time():
    done = simulate(of_lengths((4, 2), (4, 2), arrivals=[0, 500]), CONFIG, step_time=SECOND, **SMALL)
    table = done.timeline()
    assert len(table) == 502 and (table.running[3:499] == 0).all() and (table.finished[3:499] == 1).all()


def _stream(count: int):
    draw, now = random.Random(7), 0.0
    for i in range(count):
        now += draw.expovariate(1.0)
        yield Request(str(i), now, draw.randint(1, 30), draw.randint(1, 6))


def _peak(count: int) -> int:
    gone = [0]

    def sink(served):
        gone[0] += 1
    gc.collect()
    tracemalloc.start()
    done = simulate(_stream(count), SchedulerConfig(prefix_caching=True), num_blocks=200, block_size=16,
                    step_time=fixed(0.05), every_s=None, sink=sink)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert gone[0] == count == done.finished and done.served == []
    return peak


def test_with_a_sink_memory_does_not_grow_with_the_number_of_requests():
    _peak(200)
    few, many = _peak(1_000), _peak(6_000)
    assert many < 1.5 * few, (few, many)
