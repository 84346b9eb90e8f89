"""NVML's answers and refusals through the real pynvml and a fake library in C; recordings give the same answers."""
import json

import pytest
from fake_cuda import fake_cuda
from fake_nvml import SECOND, UUID, compiled, loaded, run

from kvlab.probes._nvml import Gpu, Replayed, Unavailable, gpu, opened, why_closed

GPM = {"sm": 2, "occupancy": 3, "tensor": 5, "dram": 10}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="module")
def old_library(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("nvml"), old=True)


@pytest.fixture
def asked(library):
    """gpu("cuda:0") under switches of the fake."""
    from contextlib import contextmanager

    @contextmanager
    def ask(heard=None, **switches):
        with fake_cuda(), loaded(library, **switches) as fake, gpu("cuda:0", heard) as one:
            one.fake = fake
            yield one
    return ask


@pytest.mark.parametrize("code, said", [
    (9, "DriverNotLoaded: the NVIDIA library is there but its kernel driver is not loaded"),
    (4, "NoPermission: permission denied: run as root"), (18, "LibRmVersionMismatch: the driver was upgraded"),
    (15, "GpuIsLost: "), (999, "Unknown: "),
])
def test_a_library_that_does_not_open_says_why_and_what_to_do(library, code, said):
    with loaded(library, init=code):
        assert why_closed().startswith(said)
        with pytest.raises(Unavailable) as raised, opened():
            pass
        assert raised.value.code == code
    with loaded(library):
        assert why_closed() is None


def test_a_process_of_its_own_finds_the_library_where_a_drivers_would_be(library):
    code = "from kvlab.probes._nvml import why_closed; print(why_closed())"
    assert run(library, "-c", code).stdout == "None\n"
    assert run(library, "-c", code, init=9).stdout.startswith("DriverNotLoaded: ")


def test_a_file_that_is_no_library_is_one_that_is_not_found(tmp_path):
    broken = tmp_path / "libnvidia-ml.so.1"
    broken.write_text("no library")
    done = run(broken, "-c", "from kvlab.probes._nvml import why_closed; print(why_closed())")
    assert done.stdout.startswith("LibraryNotFound: no NVIDIA driver answers") and done.stderr == ""


def test_answers_are_plain_values(asked):
    import pynvml
    with asked(processes="4242,own", temperature=51) as one:
        assert one.ask("DeviceGetUUID") == UUID and one.ask("DeviceGetTemperature", 0) == 51
        assert one.ask("DeviceGetUtilizationRates") == {"gpu": 100, "memory": 37}
        assert one.ask("DeviceGetMemoryInfo", pynvml.nvmlMemory_v2)["reserved"] == 600 * 2**20
        assert [p["pid"] for p in one.ask("DeviceGetComputeRunningProcesses")][0] == 4242
        assert one.ask("DeviceIsMigDeviceHandle") == 0 and one.slice_of is None and one.whole is one
        assert one.field(186) == 350_000 and one.field(185) == 340_000


def test_refusals_are_reasons_by_type(asked):
    with asked(error="DeviceGetPowerUsage=3,DeviceGetUUID=4,DeviceGetName=999", field_status="186=3,185=4") as one:
        for ask, code, said in (
                (lambda: one.ask("DeviceGetPowerUsage"), 3, "NotSupported: this GPU does not offer it"),
                (lambda: one.ask("DeviceGetUUID"), 4, "NoPermission: permission denied"),
                (lambda: one.ask("DeviceGetName"), 999, "Unknown: "),
                (lambda: one.ask("DeviceGetNothing"), 13, "the installed nvidia-ml-py has no DeviceGetNothing"),
                (lambda: one.ask("DeviceGetMemoryInfo", 1), 25, "ArgumentVersionMismatch: this driver has another"),
                (lambda: one.field(186), 3, "NotSupported"), (lambda: one.field(185), 4, "NoPermission"),
                (lambda: one.field(100), 3, "NotSupported")):
            with pytest.raises(Unavailable) as raised:
                ask()
            assert raised.value.code == code and str(raised.value).startswith(said)


def test_an_old_driver_without_a_function_says_so_for_that_function_only(old_library):
    import pynvml
    with fake_cuda(), loaded(old_library), gpu("cuda:0") as one:
        assert one.ask("DeviceGetClockInfo", 1) == 1755
        for ask in (one.gpm_sample, lambda: one.ask("DeviceGetComputeRunningProcesses"),
                    lambda: one.ask("DeviceGetMemoryInfo", pynvml.nvmlMemory_v2)):
            with pytest.raises(Unavailable, match="^FunctionNotFound: this driver is too old for it") as raised:
                ask()
            assert raised.value.code == 13


def test_the_gpu_is_found_by_its_uuid_though_others_are_hidden_and_then_by_its_address(library):
    with fake_cuda() as known, loaded(library, gpus=2):
        known.uuid = SECOND.removeprefix("GPU-")                     # CUDA_VISIBLE_DEVICES=1: cuda:0 is NVML's 1
        with gpu("cuda:0") as one:
            assert one.ask("DeviceGetIndex") == 1
        known.uuid, known.pci_bus_id = "99999999-0000-0000-0000-000000000000", 2
        with gpu("cuda:0") as one:
            assert one.ask("DeviceGetUUID") == SECOND
        known.pci_bus_id = 7
        with pytest.raises(Unavailable, match="NVML does not know torch's cuda:0: NotFound"), gpu("cuda:0"):
            pass


def test_a_slice_is_read_as_a_slice_and_its_clocks_are_the_whole_gpus(asked):
    with asked(mig=1) as one:
        assert one.slice_of[1] == 7 and one.whole.ask("DeviceGetUUID") == UUID
        with pytest.raises(Unavailable, match="NotSupported"):
            one.ask("DeviceGetUtilizationRates")
        assert one.whole.ask("DeviceGetUtilizationRates")["gpu"] == 100
        before, after = one.gpm_sample(), one.gpm_sample()           # by the slice's own call: the other one is refused
        assert one.gpm(before, after, {"sm": 2}) == {"sm": 98.5}


def counted(one, **metrics):
    before, after = one.gpm_sample(), one.gpm_sample()
    try:
        return one.gpm(before, after, metrics or GPM)
    finally:
        one.free(before)
        one.free(after)


def test_gpm_reads_each_metric_or_its_reason(asked):
    with asked(dram_util=72.5, sm_occupancy="nan", gpm_status="5=3") as one:
        found = counted(one)
        assert found["sm"] == 98.5 and found["dram"] == 72.5
        assert isinstance(found["occupancy"], Unavailable) and "NaN" in str(found["occupancy"])
        assert isinstance(found["tensor"], Unavailable) and str(found["tensor"]).startswith("NotSupported")


def test_an_old_drivers_metrics_are_read_through_the_larger_structure(asked):
    with asked(gpm_max=98, dram_util=50) as one:
        found = counted(one, dram=10, newer=248)
        assert found["dram"] == 50 and str(found["newer"]).startswith("InvalidArgument: this driver does not know")


@pytest.mark.parametrize("switches, code", [
    (dict(gpm=0), 3), (dict(error="GpmSampleGet=4"), 4), (dict(error="GpmSampleGet=15@1"), 15),
    (dict(error="GpmSampleAlloc=20"), 20), (dict(error="GpmMetricsGet=25"), 25),
])
def test_gpm_that_is_refused_raises_the_reason(asked, switches, code):
    with asked(**switches) as one, pytest.raises(Unavailable) as raised:
        counted(one)
    assert raised.value.code == code


def test_a_gpu_that_is_lost_takes_every_later_answer(asked):
    with asked(error="*=15@3") as one:
        told = [one.ask("DeviceGetClockInfo", 1) for _ in range(2)]
        assert told == [1755, 1755]
        one.ask("DeviceGetIndex")
        for function in ("DeviceGetIndex", "DeviceGetUUID"):
            with pytest.raises(Unavailable, match="GpuIsLost: .*numbers are void"):
                one.ask(function)


def test_traffic_that_the_fake_is_told_is_what_its_counter_shows(asked):
    """util = bytes / (2 · clock · bus · time): the formula itself, so that a missing 2 in a reader is seen."""
    import time
    with asked(kappa=0.98) as one:
        before, began = one.gpm_sample(), time.perf_counter()
        one.fake.traffic(1e9)
        time.sleep(0.05)
        after, seconds = one.gpm_sample(), time.perf_counter() - began
        share = one.gpm(before, after, GPM)["dram"] / 100
        assert share * 2 * 3201e6 * 6144 / 8 * 0.98 * seconds == pytest.approx(1e9, rel=0.05)


def test_a_recording_gives_the_same_answers_and_the_same_reasons(asked, tmp_path):
    def ask(one: Gpu):
        import pynvml
        told = [one.ask("DeviceGetClockInfo", 1), one.ask("DeviceGetMemoryInfo", pynvml.nvmlMemory_v2), one.field(186)]
        for refused in (lambda: one.ask("DeviceGetName"), lambda: one.field(185), lambda: one.ask("DeviceGetIndex")):
            with pytest.raises(Unavailable) as raised:
                refused()
            told.append((raised.value.code, str(raised.value)))
        found = counted(one)
        told += [str(value) for value in found.values()]
        with pytest.raises(Unavailable) as raised:
            counted(one)
        return [*told, raised.value.code, str(raised.value)]
    heard = []
    with asked(heard, error="DeviceGetName=3,GpmSampleGet=4@2", field_status="185=3", dram_util="nan") as one:
        one.nvml.nvmlDeviceGetIndex, kept = None, one.nvml.nvmlDeviceGetIndex        # an older nvidia-ml-py
        try:
            first = ask(one)
        finally:
            one.nvml.nvmlDeviceGetIndex = kept
    (tmp_path / "recording.json").write_text(json.dumps(heard))
    again = ask(Replayed.of(tmp_path / "recording.json"))
    same = [i for i, (a, b) in enumerate(zip(first, again)) if a == b]
    # what nvidia-ml-py lacked is told in other words; its code is the same
    assert len(same) == len(first) - 1 and first[5][0] == again[5][0] == 13
    assert all(one["at"] > 0 for one in heard)


def test_a_recording_says_what_it_does_not_hold():
    empty = Replayed([])
    for ask in (empty.gpm_sample, lambda: empty.field(186), lambda: empty.gpm(None, None, GPM)):
        with pytest.raises(Unavailable, match="the recording holds no answer of"):
            ask()
    assert empty.slice_of is None and empty.whole is empty


def test_a_recordings_answers_come_in_order_and_the_last_one_stays():
    told = Replayed([dict(call="DeviceGetClockInfo", arguments=[1], answer=1000),
                     dict(call="DeviceGetClockInfo", arguments=[1], answer=2**64 - 1)])
    assert told.ask("DeviceGetClockInfo", 1) == 1000
    for _ in range(2):
        with pytest.raises(Unavailable, match="has no value"):
            told.ask("DeviceGetClockInfo", 1)
