"""NVML's numbers by their right names, from a fake library; without a driver three missing rows say why."""
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from made_variants import SMALL, compare, honest, made, of

from kvlab.attention import trial
from kvlab.probes import measure
from kvlab.probes._base import Bench
from kvlab.probes.kernel_error import KernelError
from kvlab.probes.nvml import Nvml

UUID = "12345678-aaaa"


class FakeNvml:
    """pynvml with one GPU: 75 % busy, 250 W and 350 W in turn."""
    class NVMLError(Exception):
        pass

    class NVMLError_LibraryNotFound(NVMLError):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    class NVMLError_NotFound(NVMLError):
        pass

    def __init__(self, init=None, power=None, handle=None):
        self.open, self.init, self.power, self.handle = 0, init, power, handle
        self.draw = 0

    def nvmlInit(self):
        if self.init:
            raise self.init
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if self.handle:
            raise self.handle
        assert uuid == f"GPU-{UUID}"
        return "handle"

    def nvmlDeviceGetUtilizationRates(self, handle):
        assert handle == "handle"
        return SimpleNamespace(gpu=75, memory=10)

    def nvmlDeviceGetPowerUsage(self, handle):
        if self.power:
            raise self.power
        self.draw += 1
        return 250_000 if self.draw % 2 else 350_000                 # milliwatts


@pytest.fixture
def install(monkeypatch):
    def put(**options):
        fake = FakeNvml(**options)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
        return fake
    return put


def window(*variants):
    comparison = compare(*variants)
    bench = Bench(comparison, list(comparison.trials), comparison.inputs(1))
    return bench, list(Nvml(window_s=0.05).measure(bench))


def test_without_a_driver_three_metrics_are_missing_with_the_reason(install):
    install(init=FakeNvml.NVMLError_LibraryNotFound("no libnvidia-ml.so"))
    rows = [r for r in measure(compare(honest()), [KernelError(), Nvml()]) if r["metric"] != "kernel_error"]
    assert {r["metric"] for r in rows} == {"sm_utilization", "gpu_busy_fraction", "power"}
    for row in rows:
        assert row["kind"] == "missing" and row["status"] == "ok" and row["value"] is None
        assert row["note"].startswith("LibraryNotFound: ") and row["source"] == "nvml"


def test_a_cpu_trial_beside_a_gpu_is_not_credited_with_its_power(install):
    fake = install()
    rows = measure(compare(honest()), [KernelError(), Nvml()])
    assert {r["kind"] for r in of(rows, "power")} == {"missing"} and "cpu" in of(rows, "power")[0]["note"]
    assert fake.open == 0
    assert Nvml().why_not(replace(trial("naive", SMALL), device="cuda")) is None


def test_utilization_is_the_busy_fraction_and_never_sm_utilization(install):
    fake = install()
    _, found = window(honest())
    by = {reading.metric: reading for _, reading in found}
    assert by["gpu_busy_fraction"].value == pytest.approx(0.75) and by["gpu_busy_fraction"].scope == "device"
    assert by["sm_utilization"].kind == "missing" and "not how many SMs" in by["sm_utilization"].note
    power = by["power"]
    assert power.unit == "W" and 250 <= power.low <= power.value <= power.high <= 350 and power.n >= 1
    assert fake.open == 0


def test_one_sensor_that_fails_leaves_the_others(install):
    install(power=FakeNvml.NVMLError_NotSupported("no sensor"))
    _, found = window(honest())
    by = {reading.metric: reading for _, reading in found}
    assert by["power"].kind == "missing" and by["power"].note == "NotSupported"
    assert by["gpu_busy_fraction"].value == pytest.approx(0.75)


def test_a_device_that_nvml_does_not_know_is_missing_for_every_trial(install):
    fake = install(handle=FakeNvml.NVMLError_NotFound("a slice"))
    bench, found = window(honest(), honest("other"))
    assert len(found) == 6 and {r.kind for _, r in found} == {"missing"} and len({t for t, _ in found}) == 2
    assert all(r.note.startswith("NotFound: ") for _, r in found) and fake.open == 0 and not bench.failures


def test_sensors_are_read_from_a_second_thread_while_a_call_runs(install):
    fake = install()
    read, in_call, readers = threading.Event(), [], set()

    def power(handle):
        readers.add(threading.get_ident())
        read.set()
        return 300_000

    def waits_for_a_sample(call, inputs):
        in_call.append(read.wait(20))                                # one call, however long, is still seen
        return call()
    fake.nvmlDeviceGetPowerUsage = power
    _, found = window(made("long", waits_for_a_sample))
    assert all(in_call) and len(in_call) >= 10 and threading.get_ident() not in readers and len(readers) == 1
    assert {r.metric for _, r in found if r.kind == "measured" and r.n >= 1} == {"gpu_busy_fraction", "power"}


def test_a_call_that_raises_in_the_loop_fails_its_trial_only(install):
    fake, before = install(), threading.active_count()

    def broken(call, inputs):
        raise RuntimeError("lost")
    bench, found = window(made("broken", broken), honest())
    assert [t.variant.label for t in bench.failures] == ["broken"] and fake.open == 0
    assert {t.variant.label for t, _ in found} == {"honest"} and threading.active_count() == before
