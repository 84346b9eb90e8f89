"""GPM: bytes from utilisation by literals that the code does not share, κ and its refusals, every way to have none."""
import contextlib
import math
from unittest import mock

import pytest
from fake_cuda import fake_cuda
from fake_nvml import compiled, loaded
from fake_traffic import CALL_S, told
from hypothesis import given
from hypothesis import strategies as st
from virtual_time import virtual_time

from kvlab.attention import Comparison, trial
from kvlab.probes import _gpm, gpm, measure
from kvlab.probes._base import Bench
from kvlab.probes._gpm import Calibration, Counted, _peak, counted, edge_of, peak, per_call
from kvlab.probes._known import Operation
from kvlab.probes._loop import Loop
from kvlab.probes._nvml import Replayed, Unavailable, _gpm_value
from kvlab.probes._nvml import gpu as opened
from kvlab.probes._traffic import TRAFFIC
from kvlab.probes.gpm import Gpm, bounded
from kvlab.record.reading import Reading
from kvlab.shapes import AttentionShape, Workload

H200 = 4.916736e12              # B/s: 3201 MHz × 2 transfers × 6144 bit ÷ 8, worked out by hand
SMALL = dict(buffer_bytes=4 * 2**20)
EXACTLY = 1e-6                  # no time is lost under virtual_time
CASE = Comparison((trial("sdpa", Workload.decode(AttentionShape(8, 2, 64), batch_size=2, kv_len=4096), dtype="fp32",
                         device="cuda"),))
UTILISATION = ("sm_utilization", "sm_occupancy", "tensor_utilization", "dram_utilization")


def window(dram, seconds=1.0, calls=10, most=H200, **shares):
    return Counted(calls, seconds, {**dict.fromkeys(UTILISATION, 0.5), "dram_utilization": dram, **shares}, most)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def watched(library, monkeypatch, tmp_path):
    """measure() of CASE by GPM on the fake GPU: metric -> row. What it takes of one process does not reach the next."""
    def run(factor=None, probe=None, **switches):
        with fake_cuda(l2=2**19), loaded(library, **switches) as fake, virtual_time(fake), told(fake, factor):
            rows = measure(CASE, [probe or Gpm(**SMALL)])
        assert len({row["metric"] for row in rows}) == len(rows) == len(Gpm.metrics)
        return {row["metric"]: row for row in rows}
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))                 # its lock: other tests have the same fake GPU
    monkeypatch.setattr(gpm, "_calibrated", {})
    return run


@pytest.fixture
def known(monkeypatch, watched):
    """κ is 1 and the idle GPU moves nothing: calibrated before."""
    monkeypatch.setitem(gpm._calibrated, ("cuda", SMALL["buffer_bytes"]), Calibration(window(0.0), 1.0, 1.0))


def test_half_of_an_h200s_memory_bandwidth_is_2458_gb_each_second(library):
    assert peak(3201e6, 6144) == pytest.approx(H200)
    with fake_cuda(), loaded(library, dram_util=50, mem_mhz=3201, bus_bits=6144) as fake, virtual_time(fake), opened(
            "cuda") as one:
        before = edge_of(one)
        found = counted(one, before, edge_of(one), 4, 2.0)
    assert found.peak == pytest.approx(H200) and found.shares["dram_utilization"] == pytest.approx(0.5)
    assert found.bytes(window(0.0)) == pytest.approx(4.916736e12)    # two seconds at half of it
    assert found.bytes(window(0.25), 0.9) == pytest.approx(2.2125312e12)


def test_bytes_of_a_call_are_the_slope_so_that_what_the_edges_add_falls_out():
    first, second, idle = window(0.50, 1.0, 100), window(0.48, 2.0, 200), window(0.10)
    assert per_call(first, second, idle) == pytest.approx((0.38 * 2 - 0.40) * H200 / 100)
    with pytest.raises(Unavailable, match="200 calls moved no more bytes than one of 100"):
        per_call(window(0.5, 1.0, 100), window(0.2, 2.0, 200), idle)


@given(st.floats(0, 1), st.floats(0.1, 100), st.floats(0.1, 10))
def test_bytes_are_linear_in_utilisation_and_in_time(share, seconds, times):
    one = window(share, seconds).bytes(window(0.0))
    assert window(share, seconds * times).bytes(window(0.0)) == pytest.approx(one * times)
    assert window(share * times, seconds).bytes(window(0.0)) == pytest.approx(one * times)


@given(st.sampled_from([math.nan, math.inf, -math.inf]), st.sampled_from(["busy", "idle"]))
def test_no_number_never_becomes_0(value, where):
    none = _gpm_value(0, value)
    assert isinstance(none, Unavailable)
    busy, idle = (none, 0.1) if where == "busy" else (0.1, none)
    with pytest.raises(Unavailable, match="NaN"):
        window(busy).bytes(window(idle))


def test_the_interval_grows_with_refresh_against_window_and_with_the_disagreement_of_kappa():
    first, second = window(0.5, 1.0, 100), window(0.5, 2.0, 200)
    value, low, high = bounded(first, second, Calibration(window(0.0), 1.0, 1.0))
    assert value == pytest.approx(0.005 * H200) and low == pytest.approx(0.9 * value)
    assert high == pytest.approx(1.1 * value)
    value, low, high = bounded(first, second, Calibration(window(0.0), 0.98, 1.02))
    assert high / value - 1 == pytest.approx(math.hypot(0.1, 0.02)) == 1 - low / value
    longer = bounded(window(0.5, 10, 1000), window(0.5, 20, 2000), Calibration(window(0.0), 1.0, 1.0))
    assert longer[2] / longer[0] == pytest.approx(1.01)
    off = bounded(window(0.5, 1.0, 100), window(0.6, 2.0, 200), Calibration(window(0.0), 1.0, 1.0))
    assert off[0] == pytest.approx(0.007 * H200) and off[1] == pytest.approx(0.9 * 0.006 * H200)   # the longer alone
    with pytest.raises(Unavailable, match="took no longer"):
        bounded(window(0.1, 2.0, 100), window(0.9, 2.0, 200), Calibration(window(0.0), 1.0, 1.0))


@pytest.mark.parametrize("copy, read, said", [
    (1.0, 1.0, None), (0.92, 0.95, None), (0.98, 1.04, "1.040 for a read of known size, which differ by 5.9%"),
    (0.88, 0.89, "more than 10% from 1"), (1.13, 1.12, "more than 10% from 1")])
def test_kappa_is_refused_where_copy_and_read_differ_or_it_is_far_from_1(copy, read, said):
    why = Calibration(window(0.0), copy, read).why_refused
    assert why is None if said is None else said in why and f"{copy:.3f} for a copy" in why


@pytest.mark.parametrize("before, after, bits, said", [
    (0.0, 0.0, 6144, "memory clock of 0"), (3.2e9, 3.2e9, 0, "memory bus of 0 bits"),
    (3.201e9, 1.593e9, 6144, "went from 3,201 to 1,593 MHz"), (Unavailable("no clock"), 3e9, 6144, "no clock")])
def test_a_clock_that_says_nothing_makes_no_bytes(before, after, bits, said):
    why = _peak(before, after, bits)
    assert isinstance(why, Unavailable) and said in str(why)
    assert _peak(3.201e9, 3.201e9, 6144) == pytest.approx(H200)


def test_bytes_per_call_and_kappa_come_back_whatever_kappa_the_gpu_has(watched):
    needed = 2 * 2 * 2 * 4096 * 64 * 4 + 2 * 2 * 8 * 64 * 4          # K and V of both sequences; q and output
    found = watched(kappa=0.94)
    assert found["gpm_kappa"]["value"] == pytest.approx(0.94, rel=EXACTLY)
    assert found["gpm_kappa"]["scope"] == "comparison" and "copy 0.9400, read 0.9400" in found["gpm_kappa"]["note"]
    row = found["hbm_bytes"]
    assert row["value"] == pytest.approx(needed, rel=EXACTLY) and row["low"] <= row["value"] <= row["high"]
    assert (row["kind"], row["method"], row["unit"], row["scope"]) == ("measured", "derived", "B", "device")
    assert "refresh" in row["note"] and row["cache_state"].startswith("cold") and row["window_s"] == pytest.approx(
        3 * 105 * CALL_S, rel=1e-3)
    assert found["traffic_amplification"]["value"] == pytest.approx(1, rel=EXACTLY)
    for metric in ("hbm_read_bytes", "hbm_write_bytes", "read_amplification"):
        assert found[metric]["kind"] == "missing" and "reads and writes together" in found[metric]["note"]
    assert found["sm_utilization"]["value"] == pytest.approx(0.985)
    assert found["sm_occupancy"]["value"] == pytest.approx(0.24)
    assert found["tensor_utilization"]["value"] == pytest.approx(0.41)
    assert {found[m]["method"] for m in UTILISATION} == {"counter"}
    assert [found[m]["denominator"] for m in UTILISATION] == [
        "SMs, over the whole window", "warps that fit, over the whole window", "tensor pipes, over the whole window",
        "DRAM at its peak, over the whole window"]
    with mock.patch.object(_gpm.Meter, "calibrate", side_effect=AssertionError("calibrated twice")):
        assert watched(kappa=0.94)["gpm_kappa"]["value"] == found["gpm_kappa"]["value"]


def test_what_the_idle_gpu_moves_is_taken_off(watched):
    calm, busy = watched(), watched(bytes_per_second=2e8)            # a neighbour who came after the calibration
    assert busy["hbm_bytes"]["value"] == pytest.approx(calm["hbm_bytes"]["value"] + 2e8 * CALL_S, rel=EXACTLY)
    gpm._calibrated.clear()
    busy = watched(bytes_per_second=1e9)
    assert busy["hbm_bytes"]["value"] == pytest.approx(calm["hbm_bytes"]["value"], rel=EXACTLY)
    assert busy["gpm_kappa"]["value"] == pytest.approx(1, rel=EXACTLY)


@pytest.mark.parametrize("factor, switches, said", [
    ({}, dict(kappa=0.8), "κ is 0.8"), ({"read": 1.1}, {}, "which differ by"),
    ({}, dict(gpm_status="10=3"), "could not be calibrated: NotSupported"),
    ({}, dict(dram_util="nan"), "could not be calibrated: NVML gave no number (NaN)"),
    ({}, dict(mem_mhz=0), "clock of 0"), ({}, dict(bus_bits=0), "bus of 0 bits"),
    ({}, dict(error="DeviceGetClockInfo=3"), "DeviceGetClockInfo of NVML: NotSupported")])
def test_without_a_kappa_to_trust_bytes_are_missing_and_utilisation_stays(watched, factor, switches, said):
    found = watched(factor, **switches)
    assert found["gpm_kappa"]["kind"] == "missing" and said in found["gpm_kappa"]["note"]
    for metric in TRAFFIC:
        assert found[metric]["kind"] == "missing" and found[metric]["status"] == "ok"
        assert found[metric]["note"] and found[metric]["note"] in found["gpm_kappa"]["note"]
    assert found["sm_utilization"]["value"] == pytest.approx(0.985)


@pytest.mark.parametrize("switches, lacking", [
    (dict(sm_occupancy="nan"), {"sm_occupancy": "NaN"}),
    (dict(gpm_status="5=3"), {"tensor_utilization": "NotSupported"}),
    (dict(gpm_status="2=6,3=6"), {"sm_utilization": "NotFound", "sm_occupancy": "NotFound"})])
def test_a_metric_without_a_number_costs_itself_only(watched, known, switches, lacking):
    found = watched(**switches)
    for metric in (*UTILISATION, "hbm_bytes"):
        if metric in lacking:
            assert found[metric]["kind"] == "missing" and lacking[metric] in found[metric]["note"]
        else:
            assert found[metric]["kind"] == "measured"


@pytest.mark.parametrize("error, said", [("GpmSampleGet=4", "permission denied"), ("*=15@12", "was lost"),
                                         ("GpmMetricsGet=25", "nvidia-ml-py"), ("GpmSampleAlloc=999", "Unknown")])
def test_a_gpu_that_refuses_or_is_lost_in_mid_window_is_missing_and_fails_no_trial(watched, known, error, said):
    found = watched(error=error)
    lacking = [row for metric, row in found.items() if metric != "gpm_kappa"]
    assert {(row["kind"], row["status"]) for row in lacking} == {("missing", "ok")}
    assert all(said in row["note"] for row in lacking)


def test_why_there_is_none_names_what_is_needed(library, watched):
    with fake_cuda(), loaded(library, gpm=0):
        assert "needs Hopper or newer" in Gpm().why_not(CASE.trials[0])
    with fake_cuda(), loaded(library, error="GpmSampleGet=13"):
        assert "too old" in Gpm().why_not(Operation("copy", 2**20, device="cuda"))
    for said in (dict(gpm_says=0), dict(error="GpmQueryDeviceSupport=13")):     # a sample decides, not what NVML thinks
        with fake_cuda(), loaded(library, **said):
            assert Gpm().why_not(CASE.trials[0]) is None
    with loaded(library, init=9):
        assert "kernel driver is not loaded" in Gpm().why_not(CASE.trials[0])
    with loaded(library):
        assert Gpm().why_not(Operation("copy", 2**20)) == "GPM counts on NVIDIA GPUs, not on the device cpu"
    found = watched(gpm=0)
    assert all("needs Hopper or newer" in row["note"] for row in found.values())


def test_a_slice_of_a_gpu_is_counted_by_the_slices_call_and_says_so(watched, known):
    found = watched(mig=1)
    assert found["sm_utilization"]["value"] == pytest.approx(0.985) and "MIG" in found["sm_utilization"]["note"]
    assert "MIG" in found["hbm_bytes"]["note"]


def test_an_operation_has_the_same_metrics_and_its_known_bytes(library, watched):
    op = Operation("matmul", 2**20, device="cuda")
    with fake_cuda(l2=2**17), loaded(library) as fake, virtual_time(fake), told(fake):
        found = {r.metric: r for r in Gpm(**SMALL).operation(op)}
    assert set(found) == set(Gpm.metrics)
    assert found["hbm_bytes"].value == pytest.approx(3 * 2**20, rel=EXACTLY)
    with fake_cuda(), loaded(library, gpm=0):
        none = Gpm(**SMALL).operation(op)
    assert {r.metric for r in none} == set(Gpm.metrics) and {r.kind for r in none} == {"missing"}


def test_utilisation_is_told_beside_what_of_it_is_useful(library, watched, known):
    one = CASE.trials[0]
    with fake_cuda(l2=2**19), loaded(library) as fake, virtual_time(fake), told(fake):
        bench = Bench(CASE, [one], CASE.inputs(5))
        bench.readings = [(one, Reading("latency_s", 1e-9, "s", "measured")),
                          (one, Reading("flops_share", 0.04, "ratio", "modelled"))]

        def note():
            return next(r.note for _, r in Gpm(**SMALL).measure(bench) if r.metric == "sm_utilization")
        without = note()
        bench.readings.append((one, Reading("latency_graph_s", 1e-9, "s", "measured")))
        told_ = note()
    useful = "SM utilisation 98.5 %, useful flops 4 % of the matmul ceiling; "
    assert without.startswith(f"{useful}windows of ") and "calls fill" not in without    # latency_s holds launch gaps
    assert told_.startswith(f"{useful}calls fill 0% of the window by the timer's graph; windows of ")


def test_a_full_memory_and_a_window_without_calls(library):
    with fake_cuda(l2=2**30, total=2**30), loaded(library) as fake, virtual_time(fake), opened("cuda") as one:
        meter = _gpm.Meter(one, "cuda", 1.0)
        with pytest.raises(Unavailable, match="at least twice the L2"):
            meter.room_for(2**30)
        idle = meter.idle()
    assert idle.calls == 0 and idle.seconds == pytest.approx(1, abs=1e-5)
    assert idle.shares["sm_utilization"] == pytest.approx(0.985)


def test_a_calibration_that_failed_is_not_tried_again_and_a_full_memory_is(watched):
    with mock.patch.object(_gpm.Meter, "calibrate", side_effect=Unavailable("disturbed", 7)) as tried:
        notes = [watched()["gpm_kappa"]["note"] for _ in range(3)]
    assert tried.call_count == 1
    assert notes == ["κ could not be calibrated: disturbed"] + 2 * [
        "κ could not be calibrated at the first try in this process: disturbed"]
    (kept,) = gpm._calibrated.values()
    assert kept.__traceback__ is None                    # its frames would keep the buffers of a copy on the GPU
    gpm._calibrated.clear()
    with mock.patch.object(_gpm.Meter, "room_for", side_effect=Unavailable("memory is full")):
        assert "memory is full" in watched()["gpm_kappa"]["note"]
    assert watched()["gpm_kappa"]["kind"] == "measured"


def busy_before(library, **switches):
    """(meter, loop) of a copy that has kept the fake GPU busy until now."""
    stack = contextlib.ExitStack()
    fake = [stack.enter_context(one) for one in (fake_cuda(l2=2**18), loaded(library, **switches))][1]
    stack.enter_context(virtual_time(fake))
    stack.enter_context(told(fake))
    meter = _gpm.Meter(stack.enter_context(opened("cuda")), "cuda", 1.0)
    loop = Loop(Operation("copy", 2**22, device="cuda").calls(4), "cuda")
    loop.run(loop.lasting(1.0))
    return stack, meter, loop


def test_the_idle_floor_holds_nothing_of_the_work_before_it_though_samples_are_renewed_rarely(library):
    stack, meter, loop = busy_before(library, refresh_ms=100)
    with stack:
        assert meter.idle().shares["dram_utilization"] == 0
        assert meter.window(loop, loop.lasting(1.0)).shares["dram_utilization"] > 0


def test_samples_that_lag_show_in_windows_out_of_idleness_and_hide_behind_a_lead_in(library):
    stack, meter, loop = busy_before(library, delay_ms=100)
    with stack:
        n = loop.lasting(0.02)
        assert meter.window(loop, n).shares["dram_utilization"] > 0
        assert meter.from_idle(loop, 1).shares["dram_utilization"] == 0


def test_a_window_that_fails_is_noted_where_it_began_so_that_a_replay_fails_there_too(library):
    heard = []
    with fake_cuda(), loaded(library, error="GpmMetricsGet=4@1") as fake, virtual_time(fake), opened(
            "cuda", heard) as one:
        meter = _gpm.Meter(one, "cuda", 1.0)
        meter.idle()
        with pytest.raises(Unavailable, match="permission denied"):
            meter.idle()
    (good, at), (bad, end) = [(e, i) for i, e in enumerate(heard) if e["call"] == "Window"]
    assert good["began"] == 0 and good["answer"]["calls"] == 0 and "error" not in good
    assert bad["began"] == at + 1 and "permission denied" in bad["error"]
    for entry, place in ((good, at), (bad, end)):
        again = Replayed(heard[entry["began"]:place])
        before = edge_of(again)
        after = edge_of(again)
        with pytest.raises(Unavailable, match="permission denied") if entry is bad else contextlib.nullcontext():
            found = counted(again, before, after, **entry["answer"])
            assert found.shares["sm_utilization"] == pytest.approx(0.985)
