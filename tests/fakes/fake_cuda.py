"""torch as if it had one CUDA device, computing on the CPU: so that the lines for a GPU run where there is none.

Tests only. Tensors asked for on "cuda" lie on the CPU; events tell host time; the device calls itself FAKE.
"""
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

NAME = "FAKE GPU of kvlab's tests"
UUID = "00000000-1111-2222-3333-444444444444"


class _OnCpu(TorchFunctionMode):
    """Every tensor that is asked for on cuda is made on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        args = tuple("cpu" if isinstance(a, str | torch.device) and str(a).startswith("cuda") else a for a in args)
        return function(*args, **kwargs)


class Event:
    """A CUDA event by the host's clock."""

    def __init__(self, enable_timing=False):
        self.at = None

    def record(self, stream=None):
        self.at = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


class _Generator(torch.Generator):
    """A generator of the CPU, whatever it is asked for."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu")


class Graph:
    """A CUDA graph that keeps the functions which were called while it was captured, if the test tells it to."""

    def __init__(self):
        self.replays = 0

    def replay(self):
        self.replays += 1


@contextmanager
def fake_cuda(count=1, l2=2**20, total=8 * 2**30):
    """torch.cuda with `count` devices. A context, so that nothing of it outlives a test."""
    known = SimpleNamespace(uuid=UUID, name=NAME, L2_cache_size=l2, total_memory=total, major=9, minor=0,
                            multi_processor_count=132, pci_domain_id=0, pci_bus_id=1, pci_device_id=0)
    faked = dict(
        is_available=lambda: count > 0, device_count=lambda: count, current_device=lambda: 0,
        synchronize=lambda device=None: None, get_device_properties=lambda device=None: known,
        get_device_name=lambda device=None: NAME, get_device_capability=lambda device=None: (9, 0),
        mem_get_info=lambda device=None: (total, total), empty_cache=lambda: None, memory_allocated=lambda d=None: 0,
        max_memory_allocated=lambda device=None: 0, reset_peak_memory_stats=lambda device=None: None,
        device=lambda device: nullcontext(), Event=Event, CUDAGraph=Graph, graph=lambda g, **k: nullcontext(),
        _sleep=lambda cycles: None)
    with mock.patch.multiple(torch.cuda, **faked), mock.patch.object(
            torch, "Generator", _Generator), _OnCpu():
        yield known
