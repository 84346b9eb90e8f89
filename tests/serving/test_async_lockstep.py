"""Steps that are planned while another computes, and replicas that wait for one another."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.serving.request import Request
from kvlab.serving.scheduler import SchedulerConfig
from kvlab.serving.simulator import simulate
from kvlab.serving.step_time import Linear, fixed

SECOND = fixed(1.0)


def served(requests, step=SECOND, num_blocks=100, replicas=1, lockstep=False, on_step=None, **config):
    done = simulate(requests, SchedulerConfig(**config), num_blocks=num_blocks, step_time=step, replicas=replicas,
                    lockstep=lockstep, on_step=on_step)
    return done, {one.request.id: one for one in done.served}


def test_who_arrives_during_a_step_takes_part_one_step_later():
    """Steps of 1 s from 0: b arrives at 0.5, the step of 1 … 2 was planned at 0, so that b runs from 2 to 3."""
    requests = [Request("a", 0, 10, 10), Request("b", 0.5, 10, 2)]
    _, sync = served(requests)
    _, ahead = served(requests, async_scheduling=True)
    assert (sync["b"].scheduled_s, sync["b"].first_token_s) == (1, 2)
    assert (ahead["b"].scheduled_s, ahead["b"].first_token_s, ahead["b"].last_token_s) == (1, 3, 4)
    assert ahead["a"].last_token_s == sync["a"].last_token_s == 10


def test_who_ends_keeps_its_place_for_a_step():
    requests = [Request("a", 0, 10, 3), Request("b", 0, 10, 1)]
    _, sync = served(requests, max_num_seqs=1)
    _, ahead = served(requests, max_num_seqs=1, async_scheduling=True)
    assert sync["b"].first_token_s == 4 and sync["a"].last_token_s == ahead["a"].last_token_s == 3
    assert ahead["b"].first_token_s == 4                            # nothing else ran: the next step is planned anew
    requests.insert(1, Request("c", 0, 10, 9))
    assert served(requests, max_num_seqs=2)[1]["b"].first_token_s == 4
    assert served(requests, max_num_seqs=2, async_scheduling=True)[1]["b"].first_token_s == 5


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 90), st.integers(1, 60)), min_size=1, max_size=25),
       st.booleans(), st.sampled_from(["fcfs", "priority", "short_first"]), st.integers(1, 3), st.booleans())
def test_all_are_served_whole_whatever_is_planned_ahead(drawn, caching, policy, replicas, lockstep):
    requests = [Request(str(i), arrival, prompt, output, priority=i % 3)
                for i, (arrival, prompt, output) in enumerate(sorted(drawn))]
    done, by = served(requests, Linear(0.01, 1e-4, 1e-3, 1e-5, "none", "test"), 12, replicas, lockstep, max_num_seqs=4,
                      max_num_batched_tokens=32, async_scheduling=True, prefix_caching=caching, policy=policy)
    assert done.finished == len(requests) == len(by) and done.rejected == 0
    assert done.generated_tokens == sum(one.output_tokens for one in requests)
    assert done.prompt_tokens == sum(one.prompt_tokens for one in requests)
    for one in done.served:
        assert one.generated == one.request.output_tokens
        assert one.request.arrival_s <= one.scheduled_s < one.first_token_s <= one.last_token_s
    assert done.preemptions == sum(one.preemptions for one in done.served)


@pytest.mark.parametrize("turn", [1, -1])
def test_replicas_in_lockstep_wait_for_the_slowest(turn):
    """One prefills 1000 tokens (10 s) while the other decodes (its own step: 0.01 s)."""
    step = Linear(0.01, 0.01, 0.0, 0.0, "none", "test")
    requests = [Request("short", 0, 2, 4), Request("long", 0, 1000, 2)][::turn]
    records = []
    _, apart = served(requests, step, replicas=2)
    done, together = served(requests, step, replicas=2, lockstep=True, on_step=records.append)
    assert apart["short"].last_token_s == pytest.approx(0.03 + 0.03) and together["short"].first_token_s == \
        pytest.approx(10.01)
    assert together["short"].last_token_s == pytest.approx(10.01 + 3 * 0.01)
    begins = {}
    for record in records:
        begins.setdefault(round(record.began_s, 9), set()).add((record.replica, round(record.ended_s, 9)))
    assert all(len({ended for _, ended in group}) == 1 for group in begins.values()) and done.steps == len(records)


def test_replicas_in_lockstep_tell_the_step_time_what_the_others_compute():
    seen = []

    class Watching:
        kind, device, source = "modelled", "none", "test"

        def __call__(self, batch):
            seen.append((batch.tokens, batch.peer_tokens))
            return 1.0
    served([Request("a", 0, 7, 1), Request("b", 0, 5, 2)], Watching(), replicas=2, lockstep=True)
    assert seen == [(7, 5), (5, 7), (1, 0)]


def test_planning_ahead_is_of_continuous_batching():
    with pytest.raises(ValueError, match="continuous batching"):
        SchedulerConfig(async_scheduling=True, batching="static")
