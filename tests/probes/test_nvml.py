"""NVML's numbers by their right names and units, from a fake library behind the real pynvml; what it lacks says why."""
import threading
import time
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from fake_cuda import fake_cuda
from fake_nvml import compiled, loaded
from made_variants import SMALL, compare, honest, made, of

from kvlab.attention import trial
from kvlab.probes import _sampler, measure
from kvlab.probes._sampler import Sampler
from kvlab.probes.kernel_error import KernelError
from kvlab.probes.nvml import Nvml, _update_s, _Watched

QUICK = dict(window_s=0.05, lead_s=0.02)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def rows(library):
    """Rows of the nvml probe on a comparison of these variants, under switches of the fake."""
    def take(*variants, artifacts=None, probe=QUICK, **switches):
        with fake_cuda(l2=2**14), loaded(library, **switches):
            found = measure(compare(*(variants or (honest(),)), device="cuda"), [KernelError(), Nvml(**probe)],
                            artifacts=artifacts)
        return [row for row in found if row["source"] == "nvml"]
    return take


def by(rows):
    return {row["metric"]: row for row in rows}


def test_every_metric_has_its_value_in_its_unit(rows):
    found = by(rows(probe=QUICK | {"window_s": 0.5}, processes="own,4242", power_w=350, power_average_w=340,
                    util_gpu=75, util_memory=10, sm_mhz=1755, mem_mhz=3201, temperature=51, ecc_errors=3,
                    memory_used=2**31, throttle="74=0.25,270=0.5"))
    assert set(found) == set(Nvml.metrics)
    for metric, value in dict(gpu_busy_fraction=0.75, memory_busy_fraction=0.10, power_instant=350, power_average=340,
                              idle_power=350, sm_clock=1755e6, memory_clock=3201e6, temperature=51, memory_used=2**31,
                              memory_reserved=600 * 2**20, ecc_errors=3, other_processes=1).items():
        assert found[metric]["value"] == pytest.approx(value), metric
    for metric, row in found.items():
        assert row["unit"] == Nvml.metrics[metric] and row["kind"] == "measured" and row["method"] == "sensor"
        assert row["scope"] == ("comparison" if metric == "idle_power" else "device")
    # the counter rises by 350 W: joules of a call are watts times its time
    energy = found["energy_per_call"]
    assert energy["value"] * energy["n"] == pytest.approx(350 * energy["window_s"], rel=0.1) and energy["n"] >= 2
    assert "idle power is part of it" in energy["note"] and "interval: one update, " in energy["note"]
    assert energy["low"] < energy["value"] < energy["high"]
    share = found["throttled_share"]
    assert share["value"] == pytest.approx(0.5, rel=0.1) and share["high"] == pytest.approx(0.75, rel=0.1)
    assert "power cap 0.2" in share["note"] and "heat, by hardware 0." in share["note"]


def test_busy_fractions_are_said_not_to_be_sm_utilisation_or_bandwidth(rows):
    found = by(rows())
    assert "not SM utilisation" in found["gpu_busy_fraction"]["note"]
    assert "no bandwidth" in found["memory_busy_fraction"]["note"]
    assert not {"sm_utilization", "power"} & set(found)


@pytest.mark.parametrize("code, name", [(9, "DriverNotLoaded"), (4, "NoPermission"), (18, "LibRmVersionMismatch")])
def test_a_library_that_does_not_open_makes_every_metric_missing(rows, code, name):
    found = rows(init=code)
    assert {row["metric"] for row in found} == set(Nvml.metrics)
    for row in found:
        assert row["kind"] == "missing" and row["status"] == "ok" and row["note"].startswith(f"{name}: ")


def test_a_cpu_trial_beside_a_gpu_is_not_credited_with_its_power(library):
    with fake_cuda(l2=2**14), loaded(library) as fake:
        found = measure(compare(honest()), [KernelError(), Nvml(**QUICK)])
        assert {r["kind"] for r in of(found, "power_instant")} == {"missing"}
        assert "not the device cpu" in of(found, "power_instant")[0]["note"] and fake.calls() == 0
        assert Nvml().why_not(trial("naive", SMALL, device="cuda")) is None


def test_a_gpu_that_nvml_does_not_know_is_missing_for_every_trial(rows):
    found = rows(honest(), honest("other"), error="DeviceGetHandleByUUID=6,DeviceGetHandleByPciBusId=6")
    assert len(found) == 2 * len(Nvml.metrics) and {r["kind"] for r in found} == {"missing"}
    assert all("NVML does not know torch's cuda: NotFound" in r["note"] for r in found)


@pytest.mark.parametrize("switches, metric, said", [
    (dict(error="DeviceGetUtilizationRates=3"), "gpu_busy_fraction", "NotSupported: "),
    (dict(error="DeviceGetTemperature=4"), "temperature", "NoPermission: "),
    (dict(field_status="186=3"), "power_instant", "NotSupported: "),
    (dict(field_status="186=3"), "idle_power", "NotSupported: "),
    (dict(sm_mhz=0), "sm_clock", "the clock reads 0 MHz"), (dict(mem_mhz=0), "memory_clock", "the clock reads 0 MHz"),
    (dict(energy="falls"), "energy_per_call", "its counter went backwards in the window"),
    (dict(energy="still"), "energy_per_call", "the energy counter stood still"),
    (dict(error="DeviceGetTotalEnergyConsumption=3"), "energy_per_call", "NotSupported: "),
    (dict(ecc=0), "ecc_errors", "ECC is switched off on this GPU"),
    (dict(error="DeviceGetTotalEccErrors=4"), "ecc_errors", "NoPermission: "),
    (dict(error="DeviceGetFieldValues=13"), "throttled_share", "FunctionNotFound: "),
    (dict(throttle="74=1000"), "throttled_share", "its counters moved "),
    (dict(error="DeviceGetMemoryInfo_v2=25"), "memory_reserved", "ArgumentVersionMismatch: "),
    (dict(processes=""), "other_processes", "NVML lists no process on the GPU"),
])
def test_one_sensor_that_fails_is_missing_with_its_reason_and_leaves_the_others(rows, switches, metric, said):
    found = by(rows(**{"processes": "own", **switches}))
    assert found[metric]["kind"] == "missing" and found[metric]["note"].startswith(said)
    others = set(Nvml.metrics) - {metric, "memory_busy_fraction", "memory_used", "idle_power", "power_instant",
                                  "throttled_share"}
    assert {found[name]["kind"] for name in others} == {"measured"}


def test_the_average_power_says_where_it_comes_from(rows, library, monkeypatch):
    assert by(rows())["power_average"]["note"].startswith("field 185")
    found = by(rows(field_status="185=3"))["power_average"]
    assert found["value"] == 340 and "DeviceGetPowerUsage" in found["note"]
    assert "the mean of the last second" in found["note"]
    from kvlab.probes._nvml import gpu
    from kvlab.probes.nvml import _average_power
    with fake_cuda(l2=2**14), loaded(library, field_status="185=3"), gpu("cuda:0") as one:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
        assert "an instantaneous value" in _average_power(one, "cuda:0")[1]


def test_a_reason_that_the_driver_does_not_tell_is_named(rows):
    found = by(rows(field_status="269=3,271=4", throttle="74=0.1"))["throttled_share"]
    assert found["value"] == pytest.approx(0.1, rel=0.3)
    assert "not told: heat, by software, power brake" in found["note"]


def test_a_gpu_lost_in_mid_window_makes_what_remains_missing(rows, monkeypatch):
    real, edges = Sampler.read, []

    def lost_after_the_first_edge(self):
        real(self)
        if threading.current_thread() is threading.main_thread():
            edges.append(1)
            if len(edges) == 3:                                      # idle had two
                with self._one_at_a_time:
                    monkeypatch.setenv("FAKE_ERROR", "*=15")
    monkeypatch.setattr(Sampler, "read", lost_after_the_first_edge)
    found = by(rows(processes="own"))
    assert found["idle_power"]["kind"] == "measured"                 # it was over before
    for metric in set(Nvml.metrics) - {"idle_power"}:
        assert found[metric]["kind"] == "missing", metric
        assert found[metric]["note"].startswith("GpuIsLost: the GPU has fallen off the bus"), metric
    assert {row["status"] for row in found.values()} == {"ok"}


def test_a_slice_says_that_power_and_clocks_are_the_whole_gpus(rows):
    found = by(rows(mig=1, processes="own"))
    assert found["gpu_busy_fraction"]["kind"] == "missing" and "NotSupported" in found["gpu_busy_fraction"]["note"]
    for metric in ("power_instant", "energy_per_call", "sm_clock"):
        assert "a MIG slice" in found[metric]["note"] and found[metric]["kind"] == "measured"
    assert "MIG" not in by(rows())["power_instant"]["note"]


def test_two_gpus_are_told_apart_by_their_uuid(library):
    from kvlab.probes._nvml import gpu
    with fake_cuda(l2=2**14) as known, loaded(library, gpus=2):
        known.uuid = "00000000-1111-2222-3333-555555555555"
        with gpu("cuda") as one:
            assert one.ask("DeviceGetIndex") == 1


# ------------------------------------------------------------------------------------------------ the window

def test_sensors_are_read_from_a_second_thread_while_a_call_runs(library, monkeypatch):
    monkeypatch.setattr(_sampler, "PERIOD_S", 0.005)
    readers, read = set(), threading.Event()
    real = Sampler.read

    def noted(self):
        real(self)
        if threading.current_thread() is not threading.main_thread():
            readers.add(threading.current_thread())
            read.set()

    def waits_for_a_sample(call, inputs):
        assert read.wait(20)                                         # one call, however long, is still seen
        return call()
    monkeypatch.setattr(Sampler, "read", noted)
    with fake_cuda(l2=2**14), loaded(library):
        comparison = compare(made("long", waits_for_a_sample), device="cuda")
        read.set()                                                   # for the calls of kernel_error
        found = by([r for r in measure(comparison, [KernelError(), Nvml(**QUICK)]) if r["source"] == "nvml"])
    assert found["power_instant"]["n"] >= 2 and readers and not any(thread.is_alive() for thread in readers)


def test_the_lead_in_is_outside_the_window_and_the_window_as_long_as_asked(rows):
    seen = []

    def timed(call, inputs):
        seen.append(time.perf_counter())
        time.sleep(0.001)
        return call()
    found = by(rows(made("timed", timed), probe=dict(window_s=0.2, lead_s=0.1)))
    energy = found["energy_per_call"]
    assert energy["window_s"] >= 0.2 and energy["n"] < len(seen)
    assert seen[-energy["n"]] - seen[0] >= 0.1                       # what came before the window


def test_an_update_of_the_energy_counter_takes_no_longer_than_from_before_one_change_to_after_the_next():
    sampler = Sampler({})
    sampler.samples.extend((at, "energy", value) for at, value in [
        (0.0, 1.0), (0.1, 1.0), (0.2, 2.0), (0.3, 2.0), (0.4, 3.0), (0.5, 3.0), (0.6, 3.0), (0.7, 4.0)])
    assert _update_s(sampler) == pytest.approx(0.3)                  # from 0.1 to 0.4; from 0.3 to 0.7 it is longer
    sampler.samples.extend([(0.75, "power_instant", 9.0), (0.8, "energy", 5.0)])
    assert _update_s(sampler) == pytest.approx(0.2)
    few = Sampler({})
    few.samples.extend([(0.0, "energy", 1.0), (0.1, "energy", 2.0)])
    assert _update_s(few) is None


def test_an_update_widens_the_interval_by_its_share_of_the_window_and_an_unseen_one_is_said():
    window = SimpleNamespace(calls=10, seconds=2.0, before=SimpleNamespace(counters={"energy": 1000.0}),
                             after=SimpleNamespace(counters={"energy": 6000.0}))
    watched = SimpleNamespace(note="")
    found = Nvml()._energy(watched, window, 0.2)
    assert (found.value, found.low, found.high) == (0.5, pytest.approx(0.45), pytest.approx(0.55))
    unseen = Nvml()._energy(watched, window, None)
    assert unseen.low is None and unseen.high is None and "no interval: its updates were not seen" in unseen.note


def test_nothing_is_asked_between_the_calls_and_the_energy_counter(rows, monkeypatch):
    order, real, counters = [], Sampler.read, _Watched.counters

    def read(self):
        if threading.current_thread() is threading.main_thread():
            order.append("sensors")
        real(self)

    def noted(self, energy_last):
        for name, ask in list(self._counted.items()):
            self._counted[name] = lambda name=name, ask=ask: order.append(name) or ask()
        return counters(self, energy_last)
    monkeypatch.setattr(Sampler, "read", read)
    monkeypatch.setattr(_Watched, "counters", noted)
    monkeypatch.setattr(_sampler, "PERIOD_S", 60)
    rows(made("call", lambda call, inputs: order.append("call") or call()))
    calls = [i for i, what in enumerate(order) if what == "call"]
    at = next(i for i in range(len(order) - 1, 0, -1) if order[i] == "energy" and order[i - 1] == "call")
    first = max(i for i in range(at) if order[i] == "energy")
    assert order[first + 1] == "call" and set(order[first + 1:at]) == {"call"} and calls[-1] == at - 1
    before, after = order[:first], order[at + 1:]
    opening = before[max(i for i, what in enumerate(before) if what == "sensors"):]
    assert "ecc" in opening and "call" not in opening and after[-1] == "sensors"


def test_calls_take_turns_on_the_input_copies(rows):
    seen = []

    def noted(call, inputs):
        seen.append(id(inputs))
        return call()
    rows(made("noted", noted))
    assert len(set(seen)) > 1 and seen[-1] != seen[-2]


def test_a_call_that_raises_in_the_loop_fails_its_trial_only(library):
    calls = []

    def breaks(call, inputs):
        calls.append(1)
        if len(calls) > 5:
            raise RuntimeError("broke in the loop")
        return call()
    before = threading.active_count()
    with fake_cuda(l2=2**14), loaded(library, processes="own"):
        found = measure(compare(made("broken", breaks), honest(), device="cuda"), [KernelError(), Nvml(**QUICK)])
    assert {r["status"] for r in of(found, "power_instant", "broken")} == {"failed"}
    assert of(found, "power_instant", "honest")[0]["kind"] == "measured"
    assert of(found, "idle_power")[0]["kind"] == "measured" and threading.active_count() == before


def test_what_was_sampled_is_kept_and_named_by_the_rows(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(_sampler, "PERIOD_S", 0.005)
    found = rows(honest(), honest("other"), artifacts=tmp_path, sm_mhz=0)
    (file,) = tmp_path.glob("telemetry/*.parquet")
    kept = pd.read_parquet(file)
    assert list(kept) == ["case_id", "seconds", "metric", "value"] and kept["seconds"].min() == 0
    assert set(kept["case_id"]) == {row["case_id"] for row in found}             # both trials, and the comparison: idle
    assert "sm_clock" not in set(kept["metric"]) and kept["value"].notna().all()
    name = f"telemetry/{file.name}"
    assert {row["artifact"] for row in found if row["kind"] == "measured"} == {name}
    assert {row["artifact"] for row in found if row["kind"] == "missing"} == {""}
    power = kept[(kept["metric"] == "power_instant") & (kept["case_id"] != file.stem)]
    assert len(power) > 4 and set(power["value"]) == {350.0}


# ------------------------------------------------------------------------------------------------ the sampler

def test_the_sampler_keeps_no_more_than_it_says(monkeypatch):
    monkeypatch.setattr(_sampler, "MOST", 50)
    count = iter(range(10**6))
    sampler = Sampler({"a": lambda: next(count)})
    for _ in range(200):
        sampler.read()
    assert [value for *_, value in sampler.samples] == list(range(150, 200))


def test_a_sensor_that_raises_anything_is_asked_no_more_and_the_others_go_on():
    asked = []

    def broken():
        asked.append(1)
        raise KeyError("gpu")
    sampler = Sampler({"broken": broken, "fine": lambda: 2.0})
    for _ in range(3):
        sampler.read()
    assert len(asked) == 1 and sampler.refused == {"broken": "'gpu'"}
    assert [value for _, name, value in sampler.samples] == [2.0] * 3


def test_samples_at_the_edges_count_only_where_the_window_has_no_other():
    sampler = Sampler({})
    sampler.samples.extend([(0.5, "a", 1.0), (0.9, "a", 2.0), (1.5, "a", 3.0), (1.6, "b", 9.0), (2.0, "a", 4.0),
                            (2.5, "a", 5.0)])
    assert sampler.between("a", 1.0, 2.0) == [3.0]
    assert sampler.between("a", 1.6, 1.9) == [3.0, 4.0]
    assert sampler.between("c", 1.0, 2.0) == []
