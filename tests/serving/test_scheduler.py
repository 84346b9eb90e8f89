"""The scheduler: what holds after every step of any trace under any configuration, and small cases by hand."""
from collections import Counter, OrderedDict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_requests import BLOCK_SIZE, NUM_BLOCKS, configs, drive, names, of_lengths, traces

from kvlab.kv.block_pool import BlockPool
from kvlab.serving.request import Request, Served
from kvlab.serving.scheduler import Scheduler
from kvlab.serving.scheduler_config import ADMISSIONS, POLICIES, SchedulerConfig

MANY = settings(max_examples=300, deadline=None)
CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)


def watched(config, counts=None):
    """`each` for drive: what must hold in every step, before it is over."""
    def each(scheduler, step, now):
        pool, batch = scheduler.pool, step.batch
        padding = scheduler._padding
        tables = [live.table for live in (*scheduler.running, *padding)]
        pool.check(tables)
        assert pool.used_blocks == len({block for table in tables for block in table})
        assert len(scheduler.running) + len(padding) <= config.max_num_seqs
        assert batch.tokens - len(padding) <= config.max_num_batched_tokens
        assert batch.tokens == sum(step.chunks.values()) + batch.decode_seqs
        assert batch.prefill_pairs == sum(sum(range(live.computed - need + 1, live.computed + 1))
                                          for live, need in step.chunks.items())    # each token sees those up to itself
        assert all(0 < live.computed <= live.known <= live.prompt + live.served.request.output_tokens
                   and live.computed <= live.room == len(live.table) * pool.block_size for live in scheduler.running
                   if config.batching == "continuous")
        assert not (step.preempted and step.admitted)
        if config.admission == "worst_case" or config.batching == "static":
            assert not step.preempted
        if config.batching == "static" and step.admitted:
            assert len(scheduler.running) == len(step.admitted), "a static batch was filled while it ran"
        waiting = [entry[-1] for entry in scheduler._waiting]
        assert len({*waiting, *scheduler.running}) == len(waiting) + len(scheduler.running)
        assert not any(live.table or live.computed for live in waiting)
        if counts is not None:
            counts["tokens"] += step.generated
            counts.update(live.served.request.id for live in step.admitted)
    return each


@given(traces(), configs)
@MANY
def test_any_trace_under_any_configuration_is_served_and_leaves_nothing_behind(requests, config):
    counts = Counter()
    scheduler, done = drive(requests, config, each=watched(config, counts))
    assert scheduler.pool.used_blocks == 0 and scheduler._reserved == 0
    assert sorted(served.request.id for served in done) == sorted(one.id for one in requests)
    limit = config.max_model_len
    for served in done:
        request = served.request
        if served.rejected:
            assert served.scheduled_s is None and served.generated == 0 and counts[request.id] == 0
            continue
        asked = request.output_tokens if limit is None else min(request.output_tokens, limit - request.prompt_tokens)
        assert served.generated == asked and counts[request.id] == 1
        assert request.arrival_s <= served.scheduled_s < served.first_token_s <= served.last_token_s
        assert (served.first_token_s == served.last_token_s) == (asked == 1) or served.preemptions
        assert 0 <= served.cached_tokens < request.prompt_tokens
    assert counts["tokens"] == sum(served.generated for served in done)
    assert scheduler.preemptions == sum(served.preemptions for served in done)
    assert scheduler.cached_tokens == sum(served.cached_tokens for served in done)
    assert scheduler.queried_tokens == config.prefix_caching * sum(
        served.request.prompt_tokens for served in done if not served.rejected)


@given(traces(), configs)
@MANY
def test_whoever_could_be_served_alone_is_and_others_are_told_the_arithmetic(requests, config):
    _, done = drive(requests, config)
    usable = NUM_BLOCKS - 1
    for served in done:
        request, limit = served.request, config.max_model_len or 10**9
        worst = config.admission == "worst_case" or config.batching == "static"
        most = min(request.most_tokens if worst else request.prompt_tokens + request.output_tokens, limit)
        if request.prompt_tokens >= limit:
            assert f"max_model_len={limit}" in served.rejected
        elif not config.chunked_prefill and most > config.max_num_batched_tokens:
            assert str(most) in served.rejected and "chunked_prefill is off" in served.rejected
        elif -(-most // BLOCK_SIZE) > usable:
            assert f"needs {-(-most // BLOCK_SIZE)} blocks" in served.rejected and f"has {usable}" in served.rejected
        else:
            assert served.rejected == "" and served.last_token_s is not None


@given(traces(), configs)
@settings(max_examples=60, deadline=None)
def test_the_same_trace_gives_the_same_steps(requests, config):
    def told():
        steps = []
        drive(requests, config, each=lambda scheduler, step, now: steps.append(
            (now, names(scheduler.running), names(step.preempted), [list(live.table) for live in scheduler.running])))
        return steps
    assert told() == told()


@given(traces(), st.sampled_from(ADMISSIONS), st.booleans(), st.sampled_from((3, 8, 100)))
@MANY
def test_fcfs_admits_in_order_of_arrival_and_preempts_the_youngest(requests, admission, caching, budget):
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget, admission=admission,
                             prefix_caching=caching)
    order = []

    def each(scheduler, step, now):
        order.extend(live.serial for live in step.admitted)
        serials = [live.serial for live in scheduler.running]
        assert serials == sorted(serials)
        assert all(victim.serial > serial for victim in step.preempted for serial in serials)
    drive(requests, config, each=each)
    assert order == sorted(order)


@given(traces(prefixes=False), configs)
@MANY
def test_a_prefix_cache_changes_nothing_where_nothing_is_shared_and_nobody_preempted(requests, config):
    results = []
    for caching in (False, True):
        scheduler, done = drive(requests, replace(config, prefix_caching=caching))
        if scheduler.preemptions:
            return
        assert scheduler.cached_tokens == 0
        results.append([(one.request.id, one.scheduled_s, one.first_token_s, one.last_token_s) for one in done])
    assert results[0] == results[1]


@given(st.lists(st.tuples(st.lists(st.integers(1, 3), max_size=6), st.integers(1, 6)), min_size=1, max_size=25),
       st.integers(9, 14))
@MANY
def test_cached_tokens_are_those_of_an_lru_cache_of_prefixes(drawn, num_blocks):
    """One request at a time, one token each: an LRU cache of full blocks, keyed by all tokens up to their end."""
    requests, now = [], 0.0
    for i, (prefix, own) in enumerate(drawn):
        requests.append(Request(str(i), now, len(prefix) * BLOCK_SIZE + own, 1, prefix=tuple(prefix),
                                piece_tokens=BLOCK_SIZE))
        now += 100.0
    _, done = drive(requests, SchedulerConfig(max_num_batched_tokens=1000, prefix_caching=True), num_blocks)
    cache, blanks = OrderedDict(), num_blocks - 1               # prefixes remembered, oldest first; blocks without one
    for served in done:
        request = served.request
        keys = [request.prefix[:k + 1] if k < len(request.prefix) else (request.id, k)
                for k in range(request.prompt_tokens // BLOCK_SIZE)]
        hits = 0
        while hits < (request.prompt_tokens - 1) // BLOCK_SIZE and keys[hits] in cache:
            hits += 1
        assert served.cached_tokens == hits * BLOCK_SIZE, request.id
        for key in keys[:hits]:
            del cache[key]
        fresh = -(-request.prompt_tokens // BLOCK_SIZE) - hits
        while fresh > blanks:
            cache.popitem(last=False)
            blanks += 1
        blanks -= fresh
        twins = [key for key in keys[hits:] if key in cache]    # a whole prompt that is there is computed again
        for key in reversed(keys):
            if key not in twins:
                cache[key] = None
        blanks += fresh - len(keys[hits:])
        if twins:
            return                                              # two blocks under one hash: the pool's own tests


def test_aging_lets_everyone_in_however_many_short_ones_come():
    """A long request among short ones that alone fill the engine: without aging it comes last, with it in time."""
    requests = [Request("long", 0.0, 30, 2)] + [Request(f"s{i}", 0.5 * i, 8, 3) for i in range(200)]
    last = {}
    for policy in ("short_first", "shortest_prefill", "priority"):
        trace = [replace(one, priority=one.id != "long") for one in requests]
        if policy == "priority":
            trace = [replace(one, priority=one.id == "long") for one in requests]
        for aging in (None, 5.0):
            config = SchedulerConfig(max_num_seqs=1, policy=policy, aging_s=aging, short_threshold=10)
            _, done = drive(trace, config)
            last[policy, aging] = [served.request.id for served in done].index("long")
    assert all(place > 150 for (_, aging), place in last.items() if aging is None), last
    assert all(place < 30 for (_, aging), place in last.items() if aging is not None), last


@given(traces(), st.sampled_from((3, 20)), st.booleans())
@MANY
def test_without_aging_no_long_one_enters_while_a_short_one_waits(requests, threshold, by_most):
    config = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=20, policy="short_first",
                             short_threshold=threshold, short_by="most" if by_most else "prompt")

    def short(live):
        request = live.served.request
        return (request.most_tokens if by_most else request.prompt_tokens) < threshold

    def each(scheduler, step, now):
        entered = step.admitted + step.resumed
        waiting = [entry[-1] for entry in scheduler._waiting]
        if any(not short(live) for live in entered):
            assert not any(short(live) for live in waiting)
    drive(requests, config, each=each)


def test_a_short_one_counts_double_until_another_has_waited_long_enough():
    """Scores: a long one 1 + 4/2 = 3 after 4 s against 2 for a short one that just came; after 1 s 1.5 against 2."""
    config = SchedulerConfig(max_num_seqs=1, policy="short_first", short_threshold=5, aging_s=2.0, short_weight=2.0)
    for arrival, first in ((4.0, "b"), (1.0, "c")):
        requests = of_lengths((3, round(arrival)), (8, 2), (4, 2), arrivals=[0.0, 0.0, arrival])
        entered = []
        drive([replace(one, arrival_s=0.0) if one.id == "b" else one for one in requests], config,
              each=lambda scheduler, step, now, entered=entered: entered.extend(names(step.admitted)))
        assert entered[:2] == ["a", first]


def test_shortest_prefill_goes_by_the_prompt_and_then_by_arrival():
    config = SchedulerConfig(max_num_seqs=1, policy="shortest_prefill")
    entered = []
    drive(of_lengths((9, 1), (5, 9), (7, 1), (5, 1)), config,
          each=lambda scheduler, step, now: entered.extend(names(step.admitted)))
    assert "".join(entered) == "bdca"


def test_a_policy_of_ones_own_is_a_function_of_the_request():
    """Longest prompt first; with aging, five tokens of length count as much as five seconds of waiting."""
    def entered(requests, **config):
        seen = []
        config = SchedulerConfig(max_num_seqs=1, policy=lambda request: -request.prompt_tokens, **config)
        drive(requests, config, each=lambda scheduler, step, now: seen.extend(names(step.admitted)))
        return "".join(seen)
    assert entered(of_lengths((9, 1), (5, 9), (7, 1), (5, 1))) == "acbd"
    late = of_lengths((9, 8), (5, 1), (7, 1), arrivals=[0, 0, 4])
    assert entered(late) == "acb" and entered(late, aging_s=1.0) == "abc"


@pytest.mark.parametrize("gives", [float("nan"), None, "soon", (1, 2)])
def test_a_policy_that_gives_no_number_is_refused(gives):
    scheduler = Scheduler(SchedulerConfig(policy=lambda request: gives), BlockPool(4, 4))
    with pytest.raises(ValueError, match="for request x; it must give a number"):
        scheduler.submit(Served(Request("x", 0, 3, 1)))


def test_a_piece_far_longer_than_the_prompt_costs_no_memory():
    scheduler = Scheduler(SchedulerConfig(prefix_caching=True), BlockPool(8, 4))
    live = scheduler.submit(Served(Request("x", 0, 10, 1, prefix=(1,), piece_tokens=10**15)))
    assert len(live.hashes) == 2


def told(requests, config, num_blocks=5, block_size=4):
    """Every step in a line: computed tokens of each running request, blocks used, who came, went or was preempted."""
    lines = []

    def each(scheduler, step, now):
        lines.append((" ".join(f"{live.served.request.id}{live.computed}" for live in scheduler.running),
                      scheduler.pool.used_blocks, names(step.admitted), names(step.resumed), names(step.preempted),
                      names(step.first), names(step.ended)))
    drive(requests, config, num_blocks, block_size, each=each)
    return lines


def test_preemption_by_hand():
    """Four blocks of four tokens. a and b have two each and fill them; at the ninth token b gives its two up.

    It comes back when a has ended, and computes all its nine tokens at once: six of the prompt and three it had made.
    """
    assert told(of_lengths((6, 5), (6, 5)), CONFIG) == [
        ("a6 b6", 4, "ab", "", "", "ab", ""),
        ("a7 b7", 4, "", "", "", "", ""),
        ("a8 b8", 4, "", "", "", "", ""),
        ("a9", 3, "", "", "b", "", ""),
        ("a10", 3, "", "", "", "", "a"),
        ("b9", 3, "", "b", "", "", ""),
        ("b10", 3, "", "", "", "", "b")]


def test_admission_by_hand():
    """a runs in two blocks. b's prompt of 11 tokens needs three, and two are free.

    full_prompt lets it wait; first_chunk lets its first eight tokens in and preempts it when the third block is due;
    worst_case lets it wait as well.
    """
    requests = of_lengths((5, 3), (11, 2), arrivals=[0, 1])
    config = replace(CONFIG, max_num_batched_tokens=9)
    wait = [("a5", 2, "a", "", "", "a", ""), ("a6", 2, "", "", "", "", ""), ("a7", 2, "", "", "", "", "a")]
    end = [("b9", 3, "b", "", "", "", ""), ("b11", 3, "", "", "", "b", ""), ("b12", 3, "", "", "", "", "b")]
    assert told(requests, config) == wait + end
    assert told(requests, replace(config, admission="worst_case")) == wait + end
    assert told(requests, replace(config, admission="first_chunk")) == [
        ("a5", 2, "a", "", "", "a", ""), ("a6 b8", 4, "b", "", "", "", ""), ("a7", 2, "", "", "b", "", "a"),
        ("b9", 3, "", "b", "", "", ""), ("b11", 3, "", "", "", "b", ""), ("b12", 3, "", "", "", "", "b")]


def test_worst_case_sets_aside_what_the_limit_allows():
    """a may generate 9 tokens and stops after 2: four blocks are set aside until then, and b waits."""
    requests = [Request("a", 0, 4, 2, max_tokens=9), Request("b", 0, 2, 1)]
    assert told(requests, replace(CONFIG, admission="worst_case")) == [
        ("a4", 1, "a", "", "", "a", ""), ("a5", 2, "", "", "", "", "a"), ("b2", 1, "b", "", "", "b", "b")]


def test_chunks_by_hand():
    """A budget of 5: a decodes first, b's prompt of 9 takes 4, then 4, then its last one."""
    config = replace(CONFIG, max_num_batched_tokens=5)
    assert told(of_lengths((3, 9), (9, 1), arrivals=[0, 1]), config)[:4] == [
        ("a3", 1, "a", "", "", "a", ""), ("a4 b4", 2, "b", "", "", "", ""), ("a5 b8", 4, "", "", "", "", ""),
        ("a6", 2, "", "", "b", "", "")]


def test_without_chunks_a_prompt_waits_for_a_step_with_room():
    config = replace(CONFIG, max_num_batched_tokens=12, chunked_prefill=False)
    lines = told(of_lengths((8, 3), (8, 1), (4, 1)), config, num_blocks=20)
    assert [(line[0], line[2]) for line in lines] == [("a8", "a"), ("a9 b8", "b"), ("a10 c4", "c")]


def test_a_static_batch_waits_for_its_last_and_pads():
    """c comes while a and b run: it enters when both have ended, though a's blocks are idle before."""
    config = replace(CONFIG, batching="static")
    seen = []
    drive(of_lengths((2, 1), (2, 4), (2, 1), arrivals=[0, 0, 1]), config, each=lambda scheduler, step, now: seen.append(
        (names(scheduler.running), step.batch.sequences, step.batch.tokens, step.batch.kv_tokens,
         scheduler.pool.used_blocks)))
    assert seen == [("ab", 2, 4, 4, 2), ("b", 2, 2, 6, 2), ("b", 2, 2, 7, 2), ("b", 2, 2, 8, 3), ("c", 1, 2, 2, 1)]


def test_the_watermark_holds_beside_others_and_not_for_the_only_one():
    config = replace(CONFIG, watermark=0.5)                     # 2 of 5 blocks
    lines = told(of_lengths((4, 4), (4, 1)), config)
    assert lines[0][2] == "ab" and told(of_lengths((5, 4), (4, 1)), config)[0][2] == "a"
    assert told(of_lengths((15, 1)), config)[0][2] == "a"


def test_under_priority_the_least_urgent_gives_way_though_it_had_its_turn():
    """b, less urgent, runs before a in the list; when a finds no block, b's token of this step is taken back."""
    requests = [Request("b", 0, 6, 6, priority=1), Request("a", 1, 8, 4)]
    seen = []
    drive(requests, replace(CONFIG, policy="priority"), 5, each=lambda scheduler, step, now: seen.append(
        (names(scheduler.running), names(step.preempted), step.generated, step.batch.tokens, step.batch.kv_tokens)))
    assert seen[:3] == [("b", "", 1, 6, 6), ("ba", "", 2, 9, 15), ("a", "b", 1, 1, 9)]


def test_what_is_taken_back_is_free_for_those_who_come_after():
    """Two tokens a step for three: b's goes back to the budget, a takes b's blocks, and c still has its turn."""
    scheduler = Scheduler(replace(CONFIG, policy="priority"), BlockPool(6, 4))
    b = scheduler.submit(Served(Request("b", 0, 6, 6, priority=1)))
    scheduler.finish(scheduler.schedule())
    a, c = (scheduler.submit(Served(Request(name, 1, prompt, 4))) for name, prompt in (("a", 8), ("c", 3)))
    scheduler.finish(scheduler.schedule())
    assert (b.computed, b.known, b.left, a.computed, c.computed) == (7, 8, 4, 8, 3)
    scheduler.config = replace(scheduler.config, max_num_batched_tokens=2)
    step = scheduler.schedule()
    assert step.preempted == [b] and (b.computed, b.known, b.left) == (0, 8, 4)
    assert (a.computed, c.computed) == (9, 4) and step.batch.decode_seqs == step.generated == 2
    assert step.batch.kv_tokens == 13 and step.batch.sequences == 2


def test_a_step_in_which_the_only_one_to_run_gives_way_computes_nothing():
    """b comes first in the list and finds no block; it is the least urgent itself, and a has its turn in the next."""
    requests = [Request("b", 0, 7, 6, priority=1), Request("a", 1, 7, 4)]
    seen = []
    drive(requests, replace(CONFIG, policy="priority"), 5, each=lambda scheduler, step, now: seen.append(
        (names(scheduler.running), names(step.preempted), step.batch.sequences)))
    assert seen[1:4] == [("ba", "", 2), ("a", "b", 0), ("a", "", 1)]


def test_what_the_last_piece_covers_beyond_the_prompt_is_not_shared():
    """A piece of 8 tokens, of which the prompt has 5: the second block holds what was generated, not the piece."""
    requests = [Request("a", 0, 5, 8, prefix=(7,), piece_tokens=8), Request("b", 50, 12, 1, prefix=(7, 8),
                                                                            piece_tokens=8)]
    _, done = drive(requests, SchedulerConfig(prefix_caching=True))
    assert done[1].cached_tokens == 4


def test_hits_leave_a_token_to_compute():
    requests = of_lengths((8, 1), (8, 1), arrivals=[0, 5], prefix=(1, 2), piece_tokens=4)
    _, done = drive(requests, SchedulerConfig(prefix_caching=True))
    assert [one.cached_tokens for one in done] == [0, 4]


def test_who_comes_back_finds_its_own_blocks_and_is_not_counted_again():
    requests = of_lengths((6, 5), (6, 5))
    scheduler, done = drive(requests, replace(CONFIG, prefix_caching=True), 5)
    assert scheduler.preemptions and scheduler.cached_tokens == 0 and scheduler.queried_tokens == 12


@pytest.mark.parametrize("bad, said", [
    (dict(policy="lifo"), "fcfs, priority.*function"), (dict(policy=None), "fcfs"),
    (dict(admission="none"), "full_prompt"), (dict(batching="x"), "static"),
    (dict(short_by="y"), "most"), (dict(max_num_seqs=0), "max_num_seqs"), (dict(watermark=1.0), "watermark"),
    (dict(watermark=-0.1), "watermark"), (dict(watermark=float("nan")), "watermark"), (dict(aging_s=0), "aging_s"),
    (dict(aging_s=float("nan")), "aging_s"), (dict(short_weight=0.5), "short_weight"),
    (dict(max_num_batched_tokens=0), "max_num_batched_tokens"), (dict(max_model_len=0), "max_model_len"),
    (dict(short_threshold=0), "short_threshold")])
def test_settings_that_cannot_be_are_refused(bad, said):
    with pytest.raises(ValueError, match=said):
        SchedulerConfig(**bad)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_empty_engine_has_nothing_to_do(policy):
    scheduler = Scheduler(SchedulerConfig(policy=policy), BlockPool(4, 4))
    assert scheduler.schedule().batch.sequences == 0 and scheduler.waiting == 0


def test_a_rejected_request_does_not_wait():
    scheduler, served = Scheduler(SchedulerConfig(), BlockPool(4, 4)), Served(Request("x", 0, 13, 1))
    assert scheduler.submit(served) is None and scheduler.waiting == 0
    assert served.rejected == ("it needs 4 blocks (14 tokens in blocks of 4), and the pool has 3; give it more "
                               "blocks, or the request fewer tokens")
