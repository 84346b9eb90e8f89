"""Ceilings are measured beside each comparison, on buffers of its size that no cache holds."""
import pytest
import torch
from made_variants import SMALL, compare, honest, made
from torch.utils._python_dispatch import TorchDispatchMode

from kvlab.attention import trial
from kvlab.probes import ceilings, measure
from kvlab.probes._base import Bench
from kvlab.probes.ceilings import LARGEST, SMALLEST, Ceilings
from kvlab.probes.kernel_error import KernelError
from kvlab.shapes import AttentionShape, Workload

MIB = 2**20


@pytest.fixture(autouse=True)
def small_cache(monkeypatch):
    """A cache of 400 KiB: five of it are two buffers of 1 MiB, and one more; a sample of eight ends inside a round."""
    monkeypatch.setattr(ceilings, "room_on", lambda device: (2**30, 400 * 2**10))


def readings(comparison, samples=1):
    return [reading for _, reading in Ceilings(samples=samples).measure(Bench(comparison, list(comparison.trials), {}))]


def test_three_ceilings_about_the_whole_comparison():
    comparison = compare(honest(), made("wrong", lambda call, inputs: call() * 2))
    rows = [r for r in measure(comparison, [KernelError(), Ceilings(samples=6)]) if r["metric"] in Ceilings.metrics]
    assert {r["metric"]: r["unit"] for r in rows} == Ceilings.metrics and len(rows) == 3
    for row in rows:
        assert row["scope"] == "comparison" and row["case_id"] == comparison.comparison_id and row["variant"] == ""
        assert 0 < row["low"] <= row["value"] <= row["high"] and row["n"] == 6 and row["hardware"]
    assert rows[0]["note"].startswith("torch ") and rows[0]["note"].endswith("over 3 buffers of 1,048,576 bytes")
    assert rows[1]["note"] == "torch copy_ within each of 3 buffers of 1,048,576 bytes"
    assert "fp32 " in rows[2]["note"] and "matmul" in rows[2]["note"]


def test_rates_are_amounts_over_median_seconds(monkeypatch):
    monkeypatch.setattr(ceilings, "_stopwatch", lambda device, threads: lambda work: work() is None or 0.05)
    read, copy, matmul = readings(compare(honest()), samples=3)
    assert read.value == pytest.approx(8 * MIB / 0.05)               # eight buffers are one sample
    assert copy.value == pytest.approx(8 * MIB / 0.05)               # half a buffer read, and half of it written
    assert matmul.value == pytest.approx(2 * 1024**3 / 0.05) and "1024 x 1024" in matmul.note
    assert read.low == read.high == read.value and read.n == 3


def test_one_sample_is_a_rate_without_an_interval():
    for reading in readings(compare(honest())):
        assert reading.value > 0 and reading.n == 1 and reading.low is None and reading.high is None


class Recorded(TorchDispatchMode):
    """What torch runs of the sweeps and copies: the operator, and the memory that it reads."""
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("sum", "linalg_vector_norm", "amax", "copy_"):
            self.seen.append((name, args))
        return func(*args, **(kwargs or {}))


def test_all_work_goes_round_the_same_buffers_so_that_nothing_is_found_in_the_cache():
    with Recorded() as recorded:
        readings(compare(honest()), samples=2)
    storages = [args[0].untyped_storage() for _, args in recorded.seen]
    assert len({s.data_ptr() for s in storages}) == 3 and {s.nbytes() for s in storages} == {MIB}
    order = [s.data_ptr() for s in storages]
    assert order == [order[i % 3] for i in range(len(order))]        # over all kinds of work, each time the next
    names = [name for name, _ in recorded.seen]
    assert {name: names.count(name) for name in names} == dict.fromkeys(
        ("sum", "linalg_vector_norm", "amax", "copy_"), 3 * 8)       # two samples and a warm-up, of 8 MiB each
    for name, (target, *source) in recorded.seen:
        if name != "copy_":
            assert target.nbytes == MIB
            continue
        (source, *_) = source
        assert source.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
        assert (target.storage_offset(), source.storage_offset()) == (0, MIB // 8)
        assert target.nbytes == source.nbytes == MIB // 2


def test_a_sample_of_large_buffers_is_one_of_them():
    workload = Workload.decode(AttentionShape(1, 1, 128), kv_len=8192 + 1)                    # over 8 MiB
    with Recorded() as recorded:
        read, *_ = readings(compare(honest(), workload=workload))
    assert read.note.endswith(f"over 2 buffers of {8193 * 1024:,} bytes") and len(recorded.seen) == 4 * 2


def test_the_square_product_is_halved_while_it_takes_long():
    sizes = []

    def seconds(work):
        sizes.append(work().shape[0])
        return sizes[-1] / 3000                                      # 1024: 0.34 s, 512: 0.17 s, 256: 0.085 s
    reading = Ceilings(samples=2)._matmul(torch, trial("naive", SMALL, dtype="bf16"), seconds, 1024)
    assert sizes == [1024, 1024, 512, 512, 256, 256, 256, 256] and reading.note == "bf16 256 x 256 matmul"
    assert reading.value == pytest.approx(2 * 256**3 / (256 / 3000))


def test_the_first_product_of_a_size_decides_nothing_since_libraries_load_then():
    sizes = []

    def seconds(work):
        sizes.append(work().shape[0])
        assert work().std() > 1                                      # of random numbers, which switch as real ones do
        return 5.0 if len(sizes) == 1 else 0.01
    reading = Ceilings(samples=3)._matmul(torch, trial("naive", SMALL), seconds, 256)
    assert sizes == [256] * 5 and reading.value == pytest.approx(2 * 256**3 / 0.01) and reading.n == 3


def test_the_square_product_never_falls_below_128():
    sizes = []
    Ceilings(samples=1)._matmul(torch, trial("naive", SMALL), lambda work: sizes.append(work().shape[0]) or 9.0, 256)
    assert sizes == [256, 256, 128, 128, 128]


def test_buffers_stay_small_for_a_huge_cache(monkeypatch):
    assert LARGEST == {"cpu": 2**28, "cuda": 2**31} and SMALLEST == MIB
    monkeypatch.setattr(ceilings, "LARGEST", {"cpu": 2 * MIB})
    monkeypatch.setattr(ceilings, "room_on", lambda device: (2**30, 6 * MIB))
    read, *_ = readings(compare(honest(), workload=Workload.decode(AttentionShape(4, 2, 16), kv_len=2**14)))
    assert read.note.endswith("over 16 buffers of 2,097,152 bytes")


@pytest.mark.parametrize("kv_len", [1, 64])
def test_the_tiniest_cache_has_a_buffer_of_a_mebibyte(kv_len):
    workload = Workload.decode(AttentionShape(1, 1, 1, 1, v_in_k=True), kv_len=kv_len)
    read, *_ = readings(compare(honest(), workload=workload, dtype="bf16"))
    assert read.note.endswith("over 3 buffers of 1,048,576 bytes") and read.value > 0


def test_buffers_are_as_large_as_what_a_call_may_touch():
    hidden = Workload.decode(AttentionShape(1, 1, 128, window=2048), kv_len=8192)
    read, *_ = readings(compare(honest(), workload=hidden))
    assert read.note.endswith(f"buffers of {2048 * 1024:,} bytes")


def test_a_gpu_is_timed_between_two_events(monkeypatch):
    order = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
            self.name = f"event {len([o for o in order if o == 'made'])}"
            order.append("made")

        def record(self):
            order.append(f"record {self.name}")

        def synchronize(self):
            order.append(f"wait for {self.name}")

        def elapsed_time(self, end):
            assert (self.name, end.name) == ("event 0", "event 1")
            return 4.0                                               # milliseconds
    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert ceilings._stopwatch("cuda:0", 1)(lambda: order.append("work")) == pytest.approx(4e-3)
    assert order == ["made", "made", "record event 0", "work", "record event 1", "wait for event 1"]
