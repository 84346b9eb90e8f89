"""The timer believes no variant: whatever is wrong, lazy or stale loses its time, and its neighbours keep theirs."""
import mmap
import threading
import time
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from made_variants import SMALL, compare, honest, made, of

import kvlab
from kvlab.attention import Comparison, trial
from kvlab.attention.naive import Naive
from kvlab.kv.cache import Layout
from kvlab.probes import _base, _cpu_sampler, measure, timer
from kvlab.probes._base import Bench, rotation
from kvlab.probes._clock import Clock, clock, summarise
from kvlab.probes.kernel_error import KernelError
from kvlab.probes.timer import CpuSampler, Runner, Timer
from kvlab.shapes import AttentionShape, Workload

METRICS = list(Timer.metrics)
OF_A_GPU = ("latency_graph_s", "cycles", "throttled_samples")
ON_CPU = [metric for metric in METRICS if metric not in (*OF_A_GPU, "latency_warm_s")]   # warm: if the cap allows it


@pytest.fixture(autouse=True)
def small_cache(monkeypatch):
    """A last-level cache of 64 KiB, so that five of it are few input copies."""
    for module in (_base, _cpu_sampler):
        monkeypatch.setattr(module, "last_level_cache", lambda: (2**16, "test"))


def timed(*variants, artifacts=None, **options):
    return measure(compare(*variants, **options), [KernelError(), Timer(cap_s=0.02)], artifacts=artifacts)


def first_answer(trial, inputs):
    call, kept = Naive().prepare(trial, inputs), []

    def lazy():
        kept or kept.append(call())
        return kept[0].clone()
    return lazy


def kept_output(trial, inputs):
    call, kept = Naive().prepare(trial, inputs), []

    def lazy():
        kept or kept.append(call())
        return kept[0]
    return lazy


def kv_of_the_plan(trial, inputs):
    """Reads q when called, but K and V as they were when it planned: unpacking done outside the clock."""
    stored = SimpleNamespace(**vars(inputs))
    stored.cache = SimpleNamespace(**vars(inputs.cache))
    parts = [tuple(a.clone() for a in arrays) for arrays in inputs.stored(0)]
    stored.q_BTQD = inputs.q_BTQD
    stored.stored = lambda b: parts
    stored.decode = inputs.decode
    return Naive().prepare(trial, stored)


def plan_of_copy_0():
    plans = []

    def prepare(trial, inputs):
        plans or plans.append(Naive().prepare(trial, inputs))
        return Naive().prepare(trial, inputs) if len(plans) == 0 else plans[0]
    return prepare


def one_token_short(trial, inputs):
    def call():
        q, (k,), (v,) = inputs.q_BTQD[0], *inputs.stored(0)
        K, S, D = k.shape
        scores = q.view(K, -1, D) @ k[:, :S - 1].transpose(1, 2) / D**0.5
        return (scores.softmax(-1) @ v[:, :S - 1]).view(1, -1, D)
    return call


def drifting(after):
    count = []

    def call(honest_call, inputs):
        count.append(1)
        return honest_call() * (1.0 if len(count) <= after else 1.001)
    return call


def raising(error, in_prepare_number):
    """Raises when it plans for the n-th time; 2 is the timed phase."""
    plans = []

    def prepare(trial, inputs):
        plans.append(1)
        if len(plans) >= in_prepare_number:
            raise error
        return Naive().prepare(trial, inputs)
    return prepare


def raising_call(error, after):
    count = []

    def call(honest_call, inputs):
        count.append(1)
        if len(count) > after:
            raise error
        return honest_call()
    return call


def in_another_thread(honest_call, inputs):
    def work():
        for _ in range(200_000):
            pass
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return honest_call()


class Lazy(torch.Tensor):
    pass


def later(cheat):
    """Honest until kernel_error has judged it, then the cheat: when it plans for the timer."""
    plans = []

    def prepare(trial, inputs):
        plans.append(1)
        return (Naive().prepare if len(plans) == 1 else cheat)(trial, inputs)
    return prepare


def sleeping(honest_call, inputs):
    time.sleep(0.003)
    return honest_call()


DECIDED = "wrong where single tokens decide (first, block edge, newest): an output row"
CHEATS = {
    "constant": (made("constant", lambda call, inputs: torch.zeros(1, 4, 16)), "off by 1 of its length, which exceeds"),
    "first_answer": (made("first_answer", prepare=first_answer), DECIDED),
    "kept_output": (made("kept_output", prepare=kept_output), DECIDED),
    "kv_of_the_plan": (made("kv_of_the_plan", prepare=kv_of_the_plan), DECIDED),
    "plan_of_copy_0": (made("plan_of_copy_0", prepare=plan_of_copy_0()), "on changed q, K and V: an output row"),
    "late_answer": (made("late_answer", prepare=later(first_answer)), "on changed q, K and V: an output row"),
    "late_output": (made("late_output", prepare=later(kept_output)), "on changed q, K and V: the output holds NaN"),
    "late_kv": (made("late_kv", prepare=later(kv_of_the_plan)), "on changed q, K and V: an output row"),
    "one_token_short": (made("one_token_short", prepare=one_token_short), "exceeds the tolerance"),
    "shape": (made("shape", lambda call, inputs: call()[..., :-1]), "shape (1, 4, 15), must be"),
    "dtype": (made("dtype", lambda call, inputs: call().double()), "torch.float64, must be torch.float32"),
    "array": (made("array", lambda call, inputs: call().numpy()), "ndarray, must be a plain torch.Tensor"),
    "subclass": (made("subclass", lambda call, inputs: call().as_subclass(Lazy)), "Lazy, must be a plain torch.Tensor"),
    "nan": (made("nan", lambda call, inputs: call().index_fill(0, torch.tensor(0), float("nan"))), "NaN or infinity"),
    "nothing": (made("nothing", lambda call, inputs: None), "NoneType, must be a plain torch.Tensor"),
    "drifts": (made("drifts", drifting(after=5)), "wrong when checked again after timing"),
    "plan_raises": (made("plan_raises", prepare=raising(RuntimeError("no plan"), 1)), "RuntimeError: no plan"),
    "call_raises": (made("call_raises", raising_call(OSError("no call"), 0)), "OSError: no call"),
    "timed_plan_raises": (made("timed_plan_raises", prepare=raising(KeyError("late"), 2)), "KeyError: 'late'"),
    "timed_call_raises": (made("timed_call_raises", raising_call(ValueError("much\nlater"), 20)), "much later"),
    "exits": (made("exits", raising_call(SystemExit(3), 5)), "SystemExit: 3"),
    "writes_q": (made("writes_q", lambda call, inputs: inputs.q_TQD.mul_(1.5) * 0 + call()),
                 "writes into its inputs (q)"),
    "writes_kv": (made("writes_kv", lambda call, inputs: inputs.cache.v_arrays[0].mul_(-1).sum() * 0 + call()),
                  "writes into its inputs (the cache)"),
    "other_thread": (made("other_thread", in_another_thread), "other threads did its work"),
    "sleeps": (made("sleeps", sleeping), "it waits (sleeps, reads or lets others work)"),
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_failed_with_a_sentence_and_the_others_keep_their_times(name):
    cheat, sentence = CHEATS[name]
    if name == "other_thread" and clock(1).method != "timer:thread_cpu":
        pytest.skip("wall time counts the work of all threads")
    if name == "sleeps" and _cpu_sampler.usage() is None:
        pytest.skip("only Linux counts how often one thread waits")
    rows = timed(cheat, honest())
    for row in (r for metric in METRICS for r in of(rows, metric, name)):
        assert row["status"] == "failed" and row["value"] is None and sentence in row["error"], row["error"]
        assert "\n" not in row["error"]
    assert len([r for r in rows if r["variant"].endswith(name)]) == 1 + len(METRICS)
    for metric in ["kernel_error", *ON_CPU]:
        (row,) = of(rows, metric, "honest")
        assert row["status"] == "ok" and row["value"] >= 0, row["error"]


def test_a_failed_trial_leaves_no_samples(tmp_path):
    timed(made("first_answer", prepare=first_answer), honest(), artifacts=tmp_path)
    (file,) = (tmp_path / "samples").iterdir()
    assert pd.read_parquet(file)["case_id"].nunique() == 1
    rows = timed(made("late", prepare=raising(RuntimeError("no"), 2)), artifacts=tmp_path / "none")
    assert of(rows, "latency_s")[0]["status"] == "failed" and not (tmp_path / "none").exists()


def test_the_front_door_reports_a_wrong_instance_of_a_class():
    table = kvlab.measure(CHEATS["constant"][0](), SMALL, probes=["kernel_error", "timer"])
    assert set(table["status"]) == {"failed"} and set(table["metric"]) == {"kernel_error", *METRICS}


def test_memory_that_cannot_be_had_is_out_of_memory():
    rows = timed(made("large", raising_call(MemoryError("no room"), 3)),
                 made("larger", raising_call(RuntimeError("CUDA out of memory. Tried"), 3)))
    assert {r["status"] for r in of(rows, "latency_s")} == {"oom"}


def test_one_trial_cannot_give_the_next_more_threads():
    seen = []

    def greedy(call, inputs):
        torch.set_num_threads(2)
        return call()

    def watching(call, inputs):
        seen.append(torch.get_num_threads())
        return call()
    before = torch.get_num_threads()
    timed(made("greedy", greedy), made("watching", watching))
    assert set(seen) == {1} and torch.get_num_threads() == before


def test_copies_are_overwritten_for_the_check_and_copy_0_comes_back(monkeypatch):
    held = []

    class Late:                                                     # a probe that runs after the timer
        name, metrics, needs, rotates = "late", {}, ("timer",), False

        def why_not(self, trial):
            return None

        def measure(self, bench):
            held.append((bench.inputs, len(bench.inputs_of(bench.trials[0]))))
            return ()
    comparison = compare(honest(), kv_format="int8/token")
    for free in (2**30, comparison.nbytes(1)):                      # many copies, and one only
        monkeypatch.setattr(_base, "free_memory", lambda free=free: free)
        measure(comparison, [KernelError(), Timer(cap_s=0.02), Late()])
        (inputs, _), fresh = held[-1], comparison.inputs()
        for key, copies in inputs.items():
            assert torch.equal(copies[0].q_TQD, fresh[key][0].q_TQD)
            for got, wanted in zip(copies[0].cache.k_arrays + copies[0].cache.v_arrays,
                                   fresh[key][0].cache.k_arrays + fresh[key][0].cache.v_arrays):
                assert torch.equal(got, wanted)
    assert held[0][1] > 5 and held[1][1] == 1


@pytest.mark.parametrize("smallest, all_of, cache, free, copies", [
    (100, 100, 100, 10**9, 6),              # five caches and one more
    (300, 300, 100, 10**9, 3),
    (10**6, 10**6, 100, 10**9, 2),          # larger than the cache: the other copy evicts it
    (100, 400, 100, 4000, 5),               # half of the free memory, over all formats
    (100, 400, 100, 100, 1),                # never none
    (1, 1, 2**25, 2**40, _base.MOST_COPIES),
])
def test_rotation(smallest, all_of, cache, free, copies):
    assert rotation(smallest, all_of, cache, free) == copies


def test_the_cache_state_says_when_memory_is_too_short_to_rotate(monkeypatch):
    (row,) = of(timed(honest()), "latency_s")
    assert row["cache_state"] == "cold (unverified)"
    needed = compare(honest()).nbytes(1)
    monkeypatch.setattr(_base, "free_memory", lambda: needed)
    (row,) = of(timed(honest()), "latency_s")
    assert row["status"] == "ok" and row["cache_state"].startswith("warm (")


def test_calls_take_the_input_copies_in_turn_whichever_trial_runs():
    taken, outputs = [], []

    def note(call, inputs):
        taken.append(inputs.seed)
        outputs.append(call())
        return outputs[-1]
    comparison = compare(made("a", note), made("b", note))
    bench = Bench(comparison, list(comparison.trials), comparison.inputs(3))
    sampler = CpuSampler(bench)
    a, b = (Runner(t, t.prepare(bench.inputs_of(t)), 0.0) for t in comparison.trials)
    for runner, calls in ((a, 2), (b, 1), (a, 4)):
        sampler.sample(runner, calls)
    assert taken == [0, 1, 2, 0, 1, 2, 0]
    assert all(output.isnan().all() for output in outputs)           # a kept answer is none the next time


def test_an_a_a_pair_is_interleaved_and_its_samples_are_kept(tmp_path):
    order = []

    def note(name):
        def call(honest_call, inputs):
            order.append(name)
            return honest_call()
        return call
    rows = timed(made("a", note("a")), made("b", note("b")), artifacts=tmp_path)
    for row in of(rows, "latency_s"):
        assert row["kind"] == "measured" and row["n"] >= 5 and 0 < row["low"] <= row["value"] <= row["high"]
        assert row["window_s"] > 0 and row["method"].startswith("timer:")
        samples = pd.read_parquet(tmp_path / row["artifact"])
        own = samples[samples["case_id"] == row["case_id"]]
        assert len(own) == row["n"] and own["round"].nunique() >= 3 and (own["seconds"] > 0).all()
        assert own["seconds"].median() == pytest.approx(row["value"])
        assert {0, 1, 2} <= set(own["round"])
    turns = "".join(name for i, name in enumerate(order) if i == 0 or order[i - 1] != name)
    assert len(turns) >= 8                                           # the blocks of three rounds and more, in turn


class FakeTime(CpuSampler):
    """A clock that only calls move, and a sampler whose calls take what a test says."""
    def __init__(self, seconds):
        self.now, self.seconds, self.calls = 0.0, seconds, 0

    def perf_counter(self):
        return self.now

    process_time = perf_counter

    def sample(self, runner, calls):
        self.calls += calls
        took = self.seconds(self.calls)
        self.now += took * calls
        return took

    method = "timer:fake"

    def cache_state(self, trial):
        return "cold (unverified)"

    warm_state = cache_state

    def note(self, *_):
        return "load 0.0"


def with_times(monkeypatch, seconds, **knobs):
    fake = FakeTime(seconds)
    monkeypatch.setattr(timer, "time", fake)
    monkeypatch.setattr(timer, "CpuSampler", lambda bench: fake)
    rows = measure(compare(honest()), [KernelError(), Timer(**knobs)])
    return fake, {m: of(rows, m)[0] for m in METRICS}


def test_the_trials_of_a_round_come_in_another_order_each_time(monkeypatch):
    order = []

    class Noting(FakeTime):
        def sample(self, runner, calls):
            order.append(runner.trial.variant.label)
            return super().sample(runner, calls)
    fake = Noting(lambda i: 1.0 + i % 2)
    monkeypatch.setattr(timer, "time", fake)
    monkeypatch.setattr(timer, "CpuSampler", lambda bench: fake)
    measure(compare(*(honest(f"t{i}") for i in range(4))), [KernelError(), Timer(cap_s=2.0, rounds=8)])
    rounds = ["".join(order[i:i + 4]) for i in range(4, len(order), 4)]          # after one warm-up call of each
    assert all(len(set(r[i:i + 2] for i in range(0, 8, 2))) == 4 for r in rounds) and len(set(rounds)) > 2


def test_steady_calls_stop_after_three_rounds(monkeypatch):
    fake, row = with_times(monkeypatch, lambda i: 0.01)
    assert row["latency_s"]["value"] == pytest.approx(0.01) and row["latency_s"]["n"] >= 5
    assert 0.5 <= fake.now < 0.65                                    # three rounds of a sixth of a second, and warm-up


def test_unsteady_calls_take_the_whole_cap_and_no_more(monkeypatch):
    fake, row = with_times(monkeypatch, lambda i: 0.01 * (1 + i % 2), cap_s=0.6, target=1e-6)
    assert 0.6 + 0.15 <= fake.now < 0.8 + 0.15 and row["latency_s"]["high"] > row["latency_s"]["low"]   # cold and warm


def test_calls_slower_than_a_round_still_give_the_fewest_samples_asked_for(monkeypatch):
    _, row = with_times(monkeypatch, lambda i: 2.0, cap_s=1.0)
    assert row["latency_s"]["n"] == 5 and "slow" not in row["latency_s"]["note"]


def test_a_call_far_beyond_the_cap_gives_one_sample_and_says_so(monkeypatch):
    fake, row = with_times(monkeypatch, lambda i: 20.0, cap_s=1.0)
    assert row["latency_s"]["n"] == 1 and "slow: fewer samples" in row["latency_s"]["note"]
    assert fake.calls == 2 and row["latency_s"]["low"] is None and row["latency_s"]["high"] is None


def test_short_calls_are_sampled_many_at_a_time(monkeypatch):
    fake, row = with_times(monkeypatch, lambda i: 1e-5, cap_s=0.3)
    assert fake.calls > 50 * row["latency_s"]["n"]


def test_a_call_that_waits_is_not_taken_for_a_short_one(monkeypatch):
    class Waiting(FakeTime):
        def sample(self, runner, calls):
            super().sample(runner, calls)
            return 1e-6                                              # the CPU time of a call that only waits
    fake = Waiting(lambda i: 20.0)
    monkeypatch.setattr(timer, "time", fake)
    monkeypatch.setattr(timer, "CpuSampler", lambda bench: fake)
    (row,) = of(measure(compare(honest()), [KernelError(), Timer(cap_s=1.0)]), "latency_s")
    assert fake.calls == 2 and row["n"] == 1


def test_planning_is_reported_per_call(monkeypatch):
    def slow_plan(trial, inputs):
        fake.now += 0.5
        return Naive().prepare(trial, inputs)
    fake = FakeTime(lambda i: 0.01)
    monkeypatch.setattr(timer, "time", fake)
    monkeypatch.setattr(timer, "CpuSampler", lambda bench: fake)
    (row,) = of(measure(compare(made("plans", prepare=slow_plan)), [KernelError(), Timer()]), "prepare_s")
    assert row["value"] == pytest.approx(0.5)


def test_the_note_holds_load_and_steal_where_the_system_tells_them(monkeypatch):
    sampler = CpuSampler(Bench(compare(honest()), [], {}))
    monkeypatch.setattr(_cpu_sampler, "cpu_steal_seconds", lambda: 3.0)
    monkeypatch.setattr(_cpu_sampler.os, "cpu_count", lambda: 4)     # stolen seconds are counted over all processors
    assert sampler.note(1.25, 2.0, 10.0) == "load 1.2, steal 2.5 %"
    monkeypatch.setattr(_cpu_sampler, "cpu_steal_seconds", lambda: None)
    assert sampler.note(1.25, None, 10.0) == "load 1.2" and sampler.note(None, None, 10.0) == ""


def test_warm_calls_follow_the_cold_ones_on_one_copy_and_do_not_count_among_them(monkeypatch):
    seen = []

    class Noting(FakeTime):
        def sample(self, runner, calls):
            seen.append((len(runner.calls), len(runner.seconds)))
            return super().sample(runner, calls)
    fake = Noting(lambda i: 0.002 if len(seen) and seen[-1][0] == 1 else 0.01)
    monkeypatch.setattr(timer, "time", fake)
    monkeypatch.setattr(timer, "CpuSampler", lambda bench: fake)
    found = measure(compare(honest()), [KernelError(), Timer()])
    rows = {metric: of(found, metric)[0] for metric in METRICS}
    copies = [n for n, _ in seen]
    first = copies.index(1)
    assert set(copies[first:]) == {1} and min(copies[:first]) > 1 and 1 + 5 <= len(copies) - first <= 1 + 126
    assert rows["latency_s"]["value"] == pytest.approx(0.01) and rows["latency_s"]["n"] == seen[first - 1][1] + 1
    assert rows["latency_warm_s"]["value"] == pytest.approx(0.002) and rows["latency_warm_s"]["n"] >= 5
    assert "same input copy" in rows["latency_warm_s"]["note"]


def test_calls_too_long_to_be_repeated_have_no_warm_time_and_say_so(monkeypatch):
    fake, row = with_times(monkeypatch, lambda i: 0.13, cap_s=1.0)
    assert row["latency_warm_s"]["kind"] == "missing"
    assert row["latency_warm_s"]["note"] == "two calls take longer than a quarter of the time cap of 1 s"
    _, row = with_times(monkeypatch, lambda i: 0.12, cap_s=1.0)
    assert row["latency_warm_s"]["kind"] == "measured" and row["latency_warm_s"]["n"] <= 3


def test_what_only_a_gpu_has_is_missing_with_the_reason_and_warm_says_what_fits_the_cache(monkeypatch):
    for held, state in ((2**16, "warm"), (2**10, "warm (larger than the cache)")):
        monkeypatch.setattr(_cpu_sampler, "last_level_cache", lambda held=held: (held, "test"))
        rows = measure(compare(honest()), [KernelError(), Timer(cap_s=0.4)])
        assert of(rows, "latency_warm_s")[0]["cache_state"] == state and of(rows, "latency_warm_s")[0]["value"] > 0
    for metric, why in zip(OF_A_GPU, ("CUDA graphs are of GPUs", "need its performance counters", "does not say")):
        assert of(rows, metric)[0]["kind"] == "missing" and why in of(rows, metric)[0]["note"]


def test_formats_and_layouts_are_timed_side_by_side():
    trials = [trial("paged", SMALL, kv_format=f, layout=Layout(block_size=16, page_order="random"))
              for f in ("fp32", "int8/token", "int8/block16")]
    rows = measure(Comparison((*trials, trial("naive", SMALL))), [KernelError(), Timer(cap_s=0.02)])
    assert {r["status"] for r in rows} == {"ok"} and len(of(rows, "latency_s")) == 4


class ByTrial(FakeTime):
    """Calls that take what a test says for each variant and sample."""
    def sample(self, runner, calls):
        took = self.seconds(runner.trial.variant.label, len(runner.seconds))
        self.calls += calls
        self.now += took * calls
        return took


def rounds_of(monkeypatch, tmp_path, seconds, *names, **knobs):
    fake = ByTrial(seconds)
    monkeypatch.setattr(timer, "time", fake)
    monkeypatch.setattr(timer, "CpuSampler", lambda bench: fake)
    comparison = compare(*(honest(name) for name in names))
    rows = of(measure(comparison, [KernelError(), Timer(**knobs)], artifacts=tmp_path), "latency_s")
    samples = pd.read_parquet(tmp_path / rows[0]["artifact"])
    return {row["variant"]: (row, samples[samples["case_id"] == row["case_id"]]) for row in rows}


def test_a_trial_that_has_enough_goes_on_until_all_have(monkeypatch, tmp_path):
    def seconds(name, sample):
        return 0.01 * (1 + sample % 2) if name == "unsteady" else 0.01
    found = rounds_of(monkeypatch, tmp_path, seconds, "steady", "unsteady", cap_s=1.2, target=1e-6)
    steady, unsteady = (set(found[name][1]["round"]) for name in ("steady", "unsteady"))
    assert steady == unsteady == set(range(len(steady))) and len(steady) > 3


def test_a_trial_far_beyond_the_cap_leaves_and_the_others_go_on(monkeypatch, tmp_path):
    found = rounds_of(monkeypatch, tmp_path, lambda name, sample: 20.0 if name == "slow" else 0.01, "slow", "quick",
                      cap_s=1.0)
    assert found["slow"][0]["n"] == 1 and found["quick"][0]["n"] >= 5 and found["quick"][1]["round"].nunique() == 3


def test_a_round_is_short_however_large_the_cap(monkeypatch, tmp_path):
    (_, samples), = rounds_of(monkeypatch, tmp_path, lambda name, sample: 0.01 * (1 + sample % 2), "one", cap_s=3.0,
                              target=1e-6).values()
    spent = (samples["seconds"] * samples["calls"]).groupby(samples["round"]).sum()
    assert 3.0 <= spent.sum() and len(spent) >= 10 and 0.29 <= spent.min() and spent.max() <= 0.33


def counters(monkeypatch, **each):
    """What the operating system counts: so much more each time that it is asked."""
    asked = []

    def usage():
        asked.append(1)
        return SimpleNamespace(**{name: step * len(asked) for name, step in each.items()})
    monkeypatch.setattr(_cpu_sampler, "usage", usage)


def test_page_faults_and_system_time_are_those_of_a_call(monkeypatch):
    comparison = compare(honest())
    bench = Bench(comparison, list(comparison.trials), comparison.inputs(2))
    counters(monkeypatch, ru_nvcsw=0, ru_minflt=12, ru_stime=0.001)
    sampler = CpuSampler(bench)
    sampler.clock = Clock(iter([0.0, 0.004, 1.0, 1.004]).__next__, "timer:thread_cpu")
    runner = Runner(comparison.trials[0], comparison.trials[0].prepare(bench.inputs_of(comparison.trials[0])), 0.0, 4)
    for _ in range(2):
        runner.seconds.append(sampler.sample(runner, 4))             # 1 ms a call
    *_, faults, system = sampler.rows(runner, summarise(runner.seconds), dict(source="timer", n=2))
    assert (faults.metric, faults.value, faults.unit) == ("page_faults", pytest.approx(24 / 8), "count")
    assert (system.metric, system.value, system.unit) == ("system_time_share", pytest.approx(0.25), "ratio")
    assert {faults.method, system.method} == {"counter:getrusage"} and faults.note == "per call"


@pytest.mark.skipif(_cpu_sampler.usage() is None, reason="only Linux counts what one thread does")
def test_memory_taken_anew_by_each_call_is_seen_as_page_faults():
    def takes(call, inputs):
        with mmap.mmap(-1, 2**20) as pages:
            for at in range(0, 2**20, mmap.PAGESIZE):
                pages[at] = 1
        return call()
    rows = timed(made("takes", takes), honest())
    (takes, ), (frugal, ) = (of(rows, "page_faults", name) for name in ("takes", "honest"))
    assert takes["value"] >= 2**20 // mmap.PAGESIZE > 10 * frugal["value"] and takes["method"] == "counter:getrusage"
    (share,) = of(rows, "system_time_share", "takes")
    assert 0 < share["value"] <= 1 and share["denominator"] == "CPU time of the call"


@pytest.mark.parametrize("without", ["counters", "thread time"])
def test_what_the_system_does_not_count_for_one_thread_is_missing(monkeypatch, without):
    if without == "counters":
        monkeypatch.setattr(_cpu_sampler, "usage", lambda: None)
    else:
        monkeypatch.setattr(_cpu_sampler, "clock", lambda threads: Clock(time.perf_counter, "timer:wall"))
    rows = timed(honest())
    assert of(rows, "latency_s")[0]["kind"] == "measured"
    for metric in ("page_faults", "system_time_share"):
        (row,) = of(rows, metric)
        assert row["kind"] == "missing" and "one thread of a CPU under Linux" in row["note"]


@pytest.mark.parametrize("found, sentence", [
    (dict(elsewhere=0.11), "other threads did its work"), (dict(elsewhere=0.09), None),
    (dict(waits=4, wall=1.2), "it waits"), (dict(waits=1, wall=1.2), None), (dict(waits=4, wall=1.05), None)])
def test_other_threads_are_work_from_a_tenth_on_and_waiting_likewise(found, sentence):
    runner = Runner(None, [lambda: torch.zeros(1)], 0.0, inner=5, seconds=[0.05] * 4, **found)
    judged = SimpleNamespace(judge=lambda trial, output: None)
    if sentence is None:
        return Timer()._judge(runner, judged)
    with pytest.raises(_base.Broken, match=sentence):
        Timer()._judge(runner, judged)


@pytest.mark.parametrize("workload, layout, touched", [
    (Workload.decode(AttentionShape(4, 2, 16, window=16), kv_len=256), Layout(16), 16 * 256),
    (Workload.decode(AttentionShape(4, 2, 16), batch_size=4, kv_len=48, shared_prefix=32),
     Layout(16, share_prefix=True), (32 + 4 * 16) * 256)])
def test_rotation_and_the_cache_state_count_what_a_call_touches(monkeypatch, workload, layout, touched):
    taken, inputs = [], Comparison.inputs
    monkeypatch.setattr(Comparison, "inputs", lambda self, copies: taken.append(copies) or inputs(self, copies))
    comparison = Comparison((trial("paged", workload, layout=layout),))
    assert list(comparison.touched_bytes().values()) == [touched] and touched < sum(comparison.cache_bytes().values())
    (row,) = of(measure(comparison, [KernelError(), Timer(cap_s=0.02)]), "latency_s")
    enough = -(-5 * 2**16 // touched)
    assert taken == [enough + 1] and row["cache_state"] == "cold (unverified)"
    states = [CpuSampler(Bench(comparison, [], {key: [None] * n for key in comparison.touched_bytes()})).cache_state(
        comparison.trials[0]) for n in (enough, enough - 1)]
    assert states[0] == "cold (unverified)" and states[1].startswith("warm (")
    assert (enough - 1) * sum(comparison.cache_bytes().values()) >= 5 * 2**16                 # though it would fill it
