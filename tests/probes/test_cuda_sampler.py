"""Time on a GPU, on a fake one: what lies between the events, which inputs are taken, what NVML says of the clock."""
import time
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from fake_cuda import Event, fake_cuda
from fake_nvml import compiled, loaded
from made_variants import compare, honest, made, of

from kvlab.attention.naive import Naive
from kvlab.probes import _cuda_sampler, _sm_clock, measure
from kvlab.probes._base import Bench
from kvlab.probes._cuda_graph import NotCaptured, captured
from kvlab.probes._cuda_sampler import CudaSampler
from kvlab.probes._sm_clock import Look, SmClock
from kvlab.probes.kernel_error import KernelError
from kvlab.probes.timer import Runner, Timer


@pytest.fixture(autouse=True)
def no_spin_up(monkeypatch):
    monkeypatch.setattr(CudaSampler, "spin_up_s", 0.0)
    monkeypatch.setattr(CudaSampler, "steady_s", 0.0)


@pytest.fixture(scope="module")
def nvml(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("nvml"))


def timed(*variants, artifacts=None, l2=2**13, **knobs):
    with fake_cuda(l2=l2):
        return measure(compare(*variants, device="cuda"), [KernelError(), Timer(**{"cap_s": 0.1, **knobs})],
                       artifacts=artifacts)


def bench_of(*variants, copies=3):
    comparison = compare(*variants, device="cuda")
    return Bench(comparison, list(comparison.trials), comparison.inputs(copies))


def runner_of(bench, n=0, **more):
    trial = bench.trials[n]
    return Runner(trial, trial.prepare(bench.inputs_of(trial)), 0.0, **more)


# ------------------------------------------------------------------------------------------------ what is timed

def ordered(order, output):
    """A sampler on fake parts that write down what happens when, and a runner of two calls."""
    class Noted(Event):
        def record(self, stream=None):
            order.append("record")
            super().record(stream)

        def synchronize(self):
            order.append("wait")

        def elapsed_time(self, end):
            return 3.0                                               # milliseconds
    sampler = CudaSampler(bench_of(honest()))
    sampler.cuda = SimpleNamespace(Event=Noted, _sleep=lambda cycles: order.append("block"))
    sampler.flush, sampler._cycles_per_s = (lambda: order.append("flush")), 1e9
    runner = Runner(sampler.bench.trials[0], [lambda i=i: order.append(f"call {i}") or output for i in range(2)], 0.0)
    return sampler, runner


def test_the_flush_comes_before_the_start_event_and_the_output_is_poisoned_after_the_end():
    order, output = [], torch.zeros(2)
    with fake_cuda():
        sampler, runner = ordered(order, output)
        assert sampler.sample(runner, 2) == pytest.approx(3e-3)
    assert order == ["flush", "record", "call 0", "record", "flush", "record", "call 1", "record", "wait"]
    assert output.isnan().all() and sampler.cache_state(None) == "cold (unverified)"


def test_warm_calls_are_not_flushed():
    order = []
    with fake_cuda():
        sampler, runner = ordered(order, torch.zeros(2))
        runner.cold = False
        sampler.sample(runner, 2)
    assert "flush" not in order and order.count("record") == 4


@pytest.mark.parametrize("milliseconds, short", [(0.049, True), (0.051, False)])
def test_only_calls_below_50_microseconds_stay_queued_behind_a_blocking_kernel(milliseconds, short):
    order = []
    with fake_cuda():
        sampler, runner = ordered(order, torch.zeros(2))
        sampler.cuda.Event.elapsed_time = lambda self, end: milliseconds
        for _ in range(4):
            order.append("sample")
            sampler.sample(runner, 2)
    blocks = " ".join(o for o in order if o in ("sample", "block"))  # the first tells how long launches take
    assert blocks == f"sample sample block sample{' block' * short} sample{' block' * short}"
    assert runner.short is short and ("queued behind a blocking kernel" in sampler.said(runner)) is short


def test_the_blocking_kernel_lasts_twice_the_launches_and_never_long():
    slept = []
    with fake_cuda():
        sampler = CudaSampler(bench_of(honest()))
        torch_sleep, torch.cuda._sleep = torch.cuda._sleep, lambda cycles: slept.append(cycles) or torch_sleep(cycles)
        sampler._block(1e-3)
        sampler._block(10.0)
    assert slept[:2] == [10**4, 10**6] and len(slept) == 4           # calibrated once
    assert slept[2] == pytest.approx(1.98e9 * 1e-3, rel=0.2) and slept[3] == pytest.approx(1.98e9 * 0.02, rel=0.2)


def test_a_long_sample_is_cut_into_batches_that_the_queue_holds():
    order = []
    with fake_cuda():
        sampler, runner = ordered(order, torch.zeros(2))
        assert sampler.sample(runner, 2 * _cuda_sampler.BATCH + 1) == pytest.approx(3e-3)
    assert order.count("wait") == 3


def test_inputs_rotate_on_a_gpu_whichever_trial_runs():
    taken = []

    def note(call, inputs):
        taken.append(inputs.seed)
        return call()
    with fake_cuda():
        bench = bench_of(made("a", note), made("b", note))
        sampler, a, b = CudaSampler(bench), runner_of(bench), runner_of(bench, 1)
        for runner, calls in ((a, 2), (b, 1), (a, 4)):
            sampler.sample(runner, calls)
    assert taken == [0, 1, 2, 0, 1, 2, 0]


def test_the_whole_pipeline_on_a_gpu_without_nvml_goes_on_and_says_what_is_missing(tmp_path):
    rows = timed("naive", honest(), artifacts=tmp_path, cap_s=1.5, target=0.5)
    for name in ("naive", "honest"):
        own = {r["metric"]: r for r in rows if r["variant"].endswith(name) and r["source"] == "timer"}
        assert set(own) == set(Timer.metrics)
        for metric in ("latency_s", "latency_warm_s", "latency_graph_s", "latency_p5", "latency_p95", "prepare_s"):
            assert own[metric]["value"] > 0, own[metric]["note"]
        assert own["latency_s"]["method"] == "timer:cuda_events"
        assert own["latency_graph_s"]["method"] == "timer:cuda_graph"
        assert own["latency_s"]["cache_state"] == "cold (unverified)"
        for metric in ("cycles", "throttled_samples"):
            assert own[metric]["kind"] == "missing" and "NVIDIA driver" in own[metric]["note"]
        assert own["page_faults"]["kind"] == "missing"
    samples = pd.read_parquet(tmp_path / of(rows, "latency_s")[0]["artifact"])
    assert samples["throttled"].isna().all()                          # nobody looked


def test_a_steady_call_needs_thirty_samples_on_a_gpu_before_it_stops(monkeypatch):
    runner, sampler = Runner(None, [], 0.0, seconds=[0.01] * 29, rounds=[0] * 29), CudaSampler.__new__(CudaSampler)
    sampler.clock = SimpleNamespace(fastest=None)
    monkeypatch.setattr(CudaSampler, "steady_s", 0.1)
    Timer()._stop(runner, sampler, 3, 15.0, 0.005)
    assert not runner.done
    runner.seconds.append(0.01)
    runner.rounds.append(0)
    Timer()._stop(runner, sampler, 3, 15.0, 0.005)
    assert runner.done
    short = Runner(None, [], 0.0, seconds=[1e-5] * 100, rounds=[0] * 100)
    Timer()._stop(short, sampler, 3, 15.0, 0.005)
    assert not short.done                                            # a millisecond in all


def test_clocks_are_brought_up_by_calls_before_the_first_sample(monkeypatch):
    calls, kept = [], []
    monkeypatch.setattr(CudaSampler, "spin_up_s", 0.5)
    monkeypatch.setattr(CudaSampler, "sample", lambda self, runner, n: calls.append(len(runner.seconds)) or
                        time.sleep(0.005) or 0.005)
    monkeypatch.setattr(CudaSampler, "after", lambda self, runner, cap_s: kept.extend(runner.seconds))
    timed(honest(), cap_s=0.01)
    assert calls[:8] == [0] * 8 and len(kept) < len(calls) - 8


def test_what_was_learnt_while_the_clocks_were_low_is_forgotten(monkeypatch):
    monkeypatch.setattr(CudaSampler, "spin_up_s", 0.02)
    seen = []

    def low_at_first(self, runner, n):
        seen.append((self._cycles_per_s, runner.short))
        self._cycles_per_s, runner.launch_s, runner.short = 1e9, 1e-5, True
        time.sleep(0.005)
        return 0.005
    monkeypatch.setattr(CudaSampler, "sample", low_at_first)
    monkeypatch.setattr(CudaSampler, "after", lambda self, runner, cap_s: None)
    timed(honest(), cap_s=0.01)
    assert [what for what in seen if what[0] is None] == [(None, None)] * 2   # at the beginning, and once awake


# ------------------------------------------------------------------------------------------------ work on other streams

def on_a_side_stream(awaited):
    side = []

    def call(honest_call, inputs):
        if not side:
            side.append(torch.cuda.Stream())
        with torch.cuda.stream(side[0]):
            output = honest_call()
            torch.cuda._sleep(8_000_000)                             # 4 ms
        if awaited:
            torch.cuda.current_stream().wait_stream(side[0])
        return output
    return call


def test_work_on_a_stream_that_nobody_waits_for_is_found_and_awaited_work_is_timed():
    rows = timed(made("cheat", on_a_side_stream(False)), made("fair", on_a_side_stream(True)))
    for row in of(rows, "latency_s", "cheat"):
        assert row["status"] == "failed" and "wait_stream" in row["error"]
        assert "leaves work on a stream that the current one does not wait for" in row["error"]
    (fair,) = of(rows, "latency_s", "fair")
    assert fair["status"] == "ok" and fair["value"] > 3.9e-3        # and the work is in the time


# ------------------------------------------------------------------------------------------------ CUDA graphs

def test_a_graph_holds_a_call_on_each_copy_and_fewer_copies_than_five_caches_are_refused():
    held, replayed = [], []
    with fake_cuda() as known:
        bench = bench_of(honest(), copies=4)
        touched = bench.comparison.touched_bytes()[bench.trials[0].kv_format, bench.trials[0].layout]
        for l2 in (4 * touched // 5, 4 * touched // 5 + 1):
            known.L2_cache_size = l2
            sampler, runner = CudaSampler(bench), runner_of(bench)
            runner.seconds, runner.used = [1e-3] * 5, [1e-3] * 5
            runner.calls = [lambda i=i: held.append(i) or torch.zeros(1) for i in range(4)]
            sampler._awaited = lambda runner: None
            sampler.after(runner, 0.02)
            replayed.append(runner.graph)
    assert isinstance(replayed[0], list) and min(replayed[0]) > 0 and held == [0, 0, 1, 2, 3]
    assert replayed[1] == (f"4 input copies of {touched:,} bytes are less than five times the L2 ({l2:,} bytes): a "
                           "graph of as many calls would find them there")


def test_the_time_of_a_replay_is_shared_among_the_calls_that_the_graph_holds(monkeypatch):
    with fake_cuda():
        sampler = CudaSampler(bench_of(honest()))
        monkeypatch.setattr(Event, "elapsed_time", lambda self, end: 8.0)
        seconds = sampler._graph(torch.cuda.CUDAGraph(), 4, 15.0)
    assert set(seconds) == {2e-3} and len(seconds) == sampler.steady_samples       # without the first


def test_a_replay_is_queued_behind_twice_the_time_that_the_host_takes_to_ask_for_it():
    blocked = []
    with fake_cuda():
        sampler, graph = CudaSampler(bench_of(honest())), torch.cuda.CUDAGraph()
        sampler._block, graph.replay = blocked.append, lambda: time.sleep(0.002)
        seconds = sampler._graph(graph, 1, 2.0)
    assert len(blocked) == len(seconds) >= 2 and min(blocked) >= 0.004          # none before the first


def test_a_call_that_waits_or_cannot_be_captured_has_no_graph_and_is_no_failure():
    def synchronises(call, inputs):
        torch.cuda.synchronize()
        return call()

    def reads_back(call, inputs):
        inputs.q_TQD.sum().item()
        return call()
    rows = timed(made("synchronises", synchronises), made("reads_back", reads_back), honest())
    (one,), (other,), (fine,) = (of(rows, "latency_graph_s", name) for name in ("synchronises", "reads_back", "honest"))
    assert one["kind"] == other["kind"] == "missing" and one["status"] == other["status"] == "ok"
    assert "cannot be captured" in one["note"] and "operation not permitted when stream is capturing" in one["note"]
    assert other["note"] == "it waits for the GPU inside a call, which a CUDA graph cannot hold"
    assert fine["kind"] == "measured" and {r["status"] for r in of(rows, "latency_s")} == {"ok"}


def test_after_a_failed_capture_the_allocator_is_told_and_the_device_comes_to_rest(monkeypatch):
    told = []
    with fake_cuda():
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *where: told.append(where), raising=False)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: told.append("rest"))

        def call():
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("no\nroom")
        with pytest.raises(NotCaptured, match=r"cannot be captured as a CUDA graph \(RuntimeError: no room\)"):
            captured([call])
        assert told == [(0, (0, 1)), "rest"] and torch.cuda.get_sync_debug_mode() == 0


def test_after_a_capture_that_cannot_even_be_ended_torch_is_back_on_its_stream():
    def call():
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
    with fake_cuda():
        before = torch.cuda.current_stream()
        with pytest.raises(NotCaptured, match="operation not permitted when stream is capturing"):
            captured([call])
        assert torch.cuda.current_stream() is before
        graph = captured([lambda: None])
        assert torch.cuda.current_stream() is before and graph.replays == 0


def test_what_the_variant_raises_itself_is_not_taken_for_waiting():
    def broken():
        raise RuntimeError("its own")
    with fake_cuda(), pytest.raises(RuntimeError, match="its own"):
        captured([broken])


@pytest.mark.parametrize("graph, said", [([1.04e-3] * 3, False), ([1.06e-3] * 3, True), ([0.5e-3] * 3, True)])
def test_where_events_and_graph_differ_by_more_than_5_percent_both_rows_say_so(graph, said):
    runner, sampler = Runner(None, [None] * 4, 0.0, seconds=[1e-3], graph=graph), CudaSampler.__new__(CudaSampler)
    runner.used = [1e-3]
    sampler.clock = SimpleNamespace(fastest=None, why="none")
    rows = sampler.rows(runner, SimpleNamespace(), dict(source="timer"))
    row = next(row for row in rows if row.metric == "latency_graph_s")
    assert ("as a CUDA graph a call takes" in sampler.said(runner)) is said
    assert ("more than 5 % from latency_s" in row.note) is said and "one graph of 4 calls" in row.note


# ------------------------------------------------------------------------------------------------ clocks

@pytest.mark.parametrize("look, fastest, slowed", [
    (Look(1.98e9, 0), 1.98e9, False), (Look(1.98e9, 0x1 | 0x2 | 0x10 | 0x100), 1.98e9, False),
    (Look(1.98e9, 0x4), 1.98e9, True), (Look(1.98e9, 0x8), 1.98e9, True), (Look(1.98e9, 0x20), 1.98e9, True),
    (Look(1.98e9, 0x40), 1.98e9, True), (Look(1.98e9, 0x80 | 0x1), 1.98e9, True),
    (Look(1.47e9, 0), 1.98e9, True), (Look(1.49e9, 0), 1.98e9, False), (Look(0.0, 0), 1.98e9, False),
    (Look(None, 0x4), None, True), (Look(1.0e9, None), 1.98e9, True), (Look(None, None), None, None),
    (Look(0.0, None), 1.98e9, None)])
def test_a_look_is_slowed_by_a_reason_or_by_a_low_clock(look, fastest, slowed):
    assert look.slowed(fastest) is slowed


def test_cycles_are_time_times_the_clock_that_nvml_tells(nvml, tmp_path):
    with loaded(nvml, sm_mhz=1755):
        rows = timed(honest(), artifacts=tmp_path)
    (latency,), (cycles,), (share,) = (of(rows, m) for m in ("latency_s", "cycles", "throttled_samples"))
    for end in ("value", "low", "high"):
        assert cycles[end] == pytest.approx(latency[end] * 1755e6)
    assert cycles["unit"] == "count" and cycles["method"] == "derived" and "1755 MHz" in cycles["note"]
    assert share["value"] == 0 and share["n"] == latency["n"]
    assert not pd.read_parquet(tmp_path / latency["artifact"])["throttled"].any()


def test_the_interval_of_cycles_holds_that_of_the_clock_too():
    runner, sampler = Runner(None, [], 0.0), CudaSampler.__new__(CudaSampler)
    runner.looks, runner.used_rounds = {i: Look(hz, 0) for i, hz in enumerate((1e9, 2e9, 3e9))}, [0, 0, 1, 2]
    latency = SimpleNamespace(median=1.0, low=0.9, high=1.1)
    cycles = sampler._cycles(runner, latency, dict(source="timer", method="timer:cuda_events"))
    assert (cycles.value, cycles.low, cycles.high) == (2e9, pytest.approx(0.9e9), pytest.approx(3.3e9))
    one = sampler._cycles(runner, SimpleNamespace(median=1.0, low=None, high=None), dict(source="timer"))
    assert one.value == 2e9 and one.low is None


def test_a_clock_of_zero_gives_time_and_no_cycles(nvml):
    with loaded(nvml, sm_mhz=0):
        rows = timed(honest())
    assert of(rows, "latency_s")[0]["value"] > 0 and of(rows, "throttled_samples")[0]["value"] == 0
    assert of(rows, "cycles")[0]["kind"] == "missing" and "SM clock is 0" in of(rows, "cycles")[0]["note"]


def test_where_all_samples_are_throttled_they_are_kept_and_said(nvml, tmp_path):
    with loaded(nvml, reasons=0x4):
        rows = timed(honest(), artifacts=tmp_path)
    (latency,), (share,) = of(rows, "latency_s"), of(rows, "throttled_samples")
    assert share["value"] == 1 and "too few others are left to do without them" in latency["note"]
    samples = pd.read_parquet(tmp_path / latency["artifact"])
    assert samples["throttled"].all() and len(samples) == latency["n"]


def test_samples_of_a_throttled_round_are_flagged_and_left_out(monkeypatch, tmp_path):
    looks = []

    class Clock(SmClock):
        def look(self):
            looks.append(Look(1.98e9, 0x40 if len(looks) == 1 else 0))
            self.fastest = 1.98e9
            return looks[-1]
    monkeypatch.setattr(_cuda_sampler, "SmClock", Clock)
    rows = timed(honest(), artifacts=tmp_path, cap_s=0.2)
    (latency,), (share,) = of(rows, "latency_s"), of(rows, "throttled_samples")
    samples = pd.read_parquet(tmp_path / latency["artifact"])
    assert set(samples[samples["throttled"]]["round"]) == {1} and latency["n"] == (~samples["throttled"]).sum()
    assert latency["value"] == pytest.approx(samples[~samples["throttled"]]["seconds"].median())
    assert share["value"] == pytest.approx(samples["throttled"].mean())
    assert f"{samples['throttled'].sum()} samples left out" in latency["note"]


def test_nvml_is_asked_between_rounds_only_and_closed_at_the_end(monkeypatch):
    events = []

    class Clock(SmClock):
        def look(self):
            events.append("look")
            return Look(1e9, 0)

        def close(self):
            events.append("close")
    sample = CudaSampler.sample
    monkeypatch.setattr(_cuda_sampler, "SmClock", Clock)
    monkeypatch.setattr(CudaSampler, "sample", lambda self, runner, n: (
        events.append("sample"), sample(self, runner, n), events.append("/sample"))[1])
    timed(honest())
    assert events[-1] == "close" and events.count("look") >= 3
    assert all(events[i - 1] == "/sample" for i, what in enumerate(events) if what == "look")


def test_nvml_that_refuses_one_thing_still_tells_the_other(nvml):
    with fake_cuda():
        with loaded(nvml, error="DeviceGetClockInfo=4"):
            clock = SmClock("cuda")
            assert clock.look() == Look(None, 0) and "permission denied" in clock.why
            clock.close()
        with loaded(nvml, error="DeviceGetCurrentClocksEventReasons=13"):
            clock = SmClock("cuda")
            assert clock.look() == Look(1.755e9, 0) or clock.look() == Look(1.755e9, None)
            clock.close()
    assert _sm_clock.SLOWED == 0xEC


def test_an_answer_kept_from_the_first_call_is_found_on_a_gpu_too():
    plans = []

    def later(trial, inputs):
        plans.append(1)
        call, kept = Naive().prepare(trial, inputs), []
        if len(plans) == 1:
            return call
        return lambda: kept[0].clone() if kept else kept.append(call()) or kept[0].clone()
    rows = timed(made("late_answer", prepare=later), honest())
    assert of(rows, "latency_s", "late_answer")[0]["status"] == "failed"
    assert "when checked again after timing" in of(rows, "latency_s", "late_answer")[0]["error"]
    assert of(rows, "latency_s", "honest")[0]["status"] == "ok", of(rows, "latency_s", "honest")[0]["error"]
