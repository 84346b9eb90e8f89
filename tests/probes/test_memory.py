"""Peak bytes of a first call are seen within the stated resolution, by whatever means the system has."""
import gc
import mmap
import sys

import psutil
import pytest
import torch
from made_variants import compare, honest, made, of

from kvlab.attention import Comparison, trial
from kvlab.kv.cache import Layout
from kvlab.probes import measure, memory
from kvlab.probes.kernel_error import KernelError
from kvlab.probes.memory import RESOLUTION, Memory, gradient_bytes, peak_extra
from kvlab.shapes import AttentionShape, Workload

SIZE = 64 * 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="VmHWM is Linux's")


def takes(nbytes):
    def call(honest_call, inputs):
        touch(nbytes).close()
        return honest_call()
    return made(f"takes{nbytes}", call)


def touch(nbytes):
    """Fresh pages from the system, given back by close(): malloc may hand out what another test has freed."""
    pages = mmap.mmap(-1, nbytes)
    for at in range(0, nbytes, mmap.PAGESIZE):
        pages[at] = 1
    return pages


@linux
def test_a_known_allocation_is_seen_within_the_resolution():
    large, small = of(measure(compare(takes(SIZE), honest()), [KernelError(), Memory()]), "peak_extra_bytes")
    assert large["method"] == "counter:VmHWM" and abs(large["value"] - SIZE) <= RESOLUTION and large["note"] == ""
    assert large["low"] <= SIZE <= large["high"]
    assert small["value"] < RESOLUTION and small["low"] == 0 and small["note"].startswith("below resolution")


@linux
def test_memory_freed_within_the_call_counts_once_and_a_second_call_sees_it_again():
    def call():
        for _ in range(3):
            touch(SIZE).close()
    for _ in range(2):
        extra, _, _ = peak_extra(call, "cpu")
        assert abs(extra - SIZE) <= RESOLUTION


def test_inference_keeps_no_bytes_for_gradients_and_training_would():
    def training(honest_call, inputs):
        with torch.enable_grad():
            q = inputs.q_TQD.clone().requires_grad_()
            (q * q.exp()).sum()
        return honest_call()
    rows = of(measure(compare(made("training", training), honest()), [KernelError(), Memory()]), "gradient_bytes")
    assert rows[0]["value"] > 0 and rows[1]["value"] == 0 and rows[1]["kind"] == "measured"


def test_saved_tensors_are_counted_exactly():
    x = torch.ones(1000, requires_grad=True)
    assert gradient_bytes(lambda: x * x) == 2 * x.nbytes
    with torch.no_grad():
        assert gradient_bytes(lambda: x * x) == 0


@pytest.mark.parametrize("without", ["glibc", "clear_refs", "linux"])
def test_elsewhere_resident_bytes_are_sampled(monkeypatch, without):
    gc.collect()
    memory._trim()                                                   # what other tests left must not go back meanwhile
    if without == "glibc":
        monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    elif without == "clear_refs":
        def refused(self, text):
            raise PermissionError("read-only /proc")
        monkeypatch.setattr(memory.Path, "write_text", refused)
    else:
        monkeypatch.setattr(memory.sys, "platform", "darwin")
    extra, method, resolution = peak_extra(lambda: touch(SIZE), "cpu")
    assert method == "sensor:psutil_rss" and resolution == RESOLUTION
    assert SIZE // 2 <= extra <= SIZE + SIZE // 8                    # a lower bound: some may go back all the same


@pytest.mark.parametrize("method, high", [("counter:VmHWM", 3 * RESOLUTION), ("sensor:psutil_rss", None)])
def test_a_sampled_peak_has_no_upper_bound_since_it_may_have_been_missed(monkeypatch, method, high):
    monkeypatch.setattr(memory, "peak_extra", lambda call, device: (2 * RESOLUTION, method, RESOLUTION))
    (row,) = of(measure(compare(honest()), [KernelError(), Memory()]), "peak_extra_bytes")
    assert (row["value"], row["low"], row["high"], row["method"]) == (2 * RESOLUTION, RESOLUTION, high, method)


@linux
def test_a_workspace_that_is_kept_between_calls_counts():
    workload = Workload.decode(AttentionShape(2, 2, 128), kv_len=8192)
    comparison = Comparison((trial("paged_gather", workload, layout=Layout(block_size=16)),
                             trial("sdpa", workload, layout=Layout())))
    paged, sdpa = of(measure(comparison, [KernelError(), Memory()]), "peak_extra_bytes")
    stored = 2 * 2 * 128 * 8192 * 4
    assert paged["value"] >= stored - RESOLUTION and paged["high"] >= stored > 8 * sdpa["value"]


def test_the_sampling_thread_ends_when_the_call_raises():
    import threading
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        memory._sampled(lambda: 1 / 0)
    assert threading.active_count() == before


def test_the_sampled_peak_is_the_highest_seen(monkeypatch):
    sizes = iter([100, 900])

    class Process:
        def __init__(self, pid):
            pass

        def memory_info(self):
            return type("info", (), {"rss": next(sizes, 400)})
    monkeypatch.setattr(psutil, "Process", Process)
    assert memory._sampled(lambda: None) == 800


@linux
def test_an_unknown_line_of_proc_is_said():
    with pytest.raises(OSError, match="VmNothing"):
        memory._status("VmNothing")


def test_a_gpu_is_asked_for_its_allocators_own_peak(monkeypatch):
    asked = []
    for name, answer in dict(synchronize=None, memory_allocated=1000, reset_peak_memory_stats=None,
                             max_memory_allocated=1500).items():
        def asks(device, name=name, answer=answer):
            asked.append((name, device))
            return answer
        monkeypatch.setattr(torch.cuda, name, asks)
    assert peak_extra(lambda: asked.append("call"), "cuda:1") == (500, "counter:cuda_allocator", 0)
    order = [a if isinstance(a, str) else a[0] for a in asked]
    assert order.index("reset_peak_memory_stats") < order.index("call") < order.index("max_memory_allocated")
    assert order[order.index("call") + 1] == "synchronize" and {a[1] for a in asked if a != "call"} == {"cuda:1"}
