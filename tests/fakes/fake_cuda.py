"""torch as if it had one CUDA device, computing on the CPU: so that the lines for a GPU run where there is none.

Tests only. Tensors asked for on "cuda" lie on the CPU; events tell host time; the device calls itself FAKE. Time that
only the device would spend (`torch.cuda._sleep`, a graph's replay) is added to its events, and nobody waits for it; on
a side stream it is waited for, by whoever waits for the stream or the device. What waits for the device inside a call
(`.item()`, `torch.cuda.synchronize`) raises while a graph is captured, as on a real one; so does the end of that
capture, and leaves torch on the stream of the capture, as torch does.
"""
import tempfile
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

NAME = "FAKE GPU of kvlab's tests"
UUID = "00000000-1111-2222-3333-444444444444"
HZ = 1.98e9                     # cycles of torch.cuda._sleep in a second
WAITS = {torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.__float__, torch.Tensor.__int__}


class Stream:
    """A queue of the device. until: host time at which its work is done; ahead: seconds that its events are later."""

    def __init__(self, device=None, **options):
        self.until, self.ahead = 0.0, 0.0
        _device.streams.insert(0, self)

    def wait_stream(self, other):
        self.until = max(self.until, other.until)

    def synchronize(self):
        if (left := self.until - time.perf_counter()) > 0:
            time.sleep(left)


class _Device:
    """What the one device is doing."""

    def __init__(self):
        self.streams, self.main, self.capturing, self.spoilt, self.debug = [], None, None, False, 0


_device = _Device()


class _OnCpu(TorchFunctionMode):
    """Every tensor that is asked for on cuda is made on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in WAITS:
            if _device.debug:
                raise RuntimeError("called a synchronizing CUDA operation")
            _not_while_capturing()
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        args = tuple("cpu" if isinstance(a, str | torch.device) and str(a).startswith("cuda") else a for a in args)
        return function(*args, **kwargs)


class Event:
    """A CUDA event by the host's clock, later by what the device alone has spent before."""

    def __init__(self, enable_timing=False):
        self.at, self.stream = None, None

    def record(self, stream=None):
        self.stream = stream or _device.streams[-1]
        self.at = max(time.perf_counter(), self.stream.until) + self.stream.ahead

    def synchronize(self):
        _not_while_capturing()
        self.stream.synchronize()

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


class _Generator(torch.Generator):
    """A generator of the CPU, whatever it is asked for."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu")


class Graph:
    """A CUDA graph: a replay computes nothing and takes the device as long as the capture took the host."""

    def __init__(self):
        self.replays, self.seconds = 0, 0.0

    def replay(self):
        self.replays += 1
        _device.streams[-1].ahead += self.seconds


def _set_stream(stream):
    _device.streams.remove(stream)
    _device.streams.append(stream)                                   # the last one is the current one


@contextmanager
def _stream(stream):
    before = _device.streams[-1]
    _set_stream(stream)
    try:
        yield
    finally:
        _set_stream(before)


@contextmanager
def _graph(graph, pool=None, stream=None, capture_error_mode="global"):
    before = _device.streams[-1]
    _set_stream(stream or Stream())
    _device.capturing, _device.spoilt, began = graph, False, time.perf_counter()
    try:
        yield
    finally:
        _device.capturing = None
        if _device.spoilt:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        _set_stream(before)
    graph.seconds = time.perf_counter() - began


def _not_while_capturing():
    if _device.capturing is not None:
        _device.spoilt = True
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def _synchronize(device=None):
    _not_while_capturing()
    for stream in _device.streams:
        stream.synchronize()


def _sleep(cycles):
    """A kernel that only takes time. On the main stream nobody waits for it, but later events are later."""
    current = _device.streams[-1]
    if current is _device.main:
        current.ahead += cycles / HZ
    else:
        current.until = max(time.perf_counter(), current.until) + cycles / HZ


_profile = torch.profiler.profile


def _profiled(activities=(), **options):
    """torch's profiler of the CPU alone: without CUDA built in, asking for its kernels costs seconds an operator."""
    return _profile(activities=[a for a in activities if a is not torch.profiler.ProfilerActivity.CUDA], **options)


def _debug(mode):
    _device.debug = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)


@contextmanager
def fake_cuda(count=1, l2=2**20, total=8 * 2**30):
    """torch.cuda with `count` devices. A context, so that nothing of it outlives a test."""
    known = SimpleNamespace(uuid=UUID, name=NAME, L2_cache_size=l2, total_memory=total, major=9, minor=0,
                            multi_processor_count=132, pci_domain_id=0, pci_bus_id=1, pci_device_id=0)
    _device.__init__()
    _device.main = Stream()
    faked = dict(
        is_available=lambda: count > 0, device_count=lambda: count, current_device=lambda: 0,
        synchronize=_synchronize, get_device_properties=lambda device=None: known,
        get_device_name=lambda device=None: NAME, get_device_capability=lambda device=None: (9, 0),
        mem_get_info=lambda device=None: (total, total), empty_cache=lambda: None, memory_allocated=lambda d=None: 0,
        max_memory_allocated=lambda device=None: 0, reset_peak_memory_stats=lambda device=None: None,
        device=lambda device: nullcontext(), Event=Event, Stream=Stream, stream=_stream,
        set_stream=_set_stream,
        current_stream=lambda device=None: _device.streams[-1], CUDAGraph=Graph, graph=_graph,
        graph_pool_handle=lambda: (0, 1), is_current_stream_capturing=lambda: _device.capturing is not None,
        set_sync_debug_mode=_debug, get_sync_debug_mode=lambda: _device.debug, _sleep=_sleep)
    marks = dict(range_push=lambda text: 0, range_pop=lambda: 0, mark=lambda text: None,
                 range=lambda text, *a, **k: nullcontext())
    with mock.patch.multiple(torch.cuda, **faked), mock.patch.object(torch, "Generator", _Generator), \
            mock.patch.multiple(torch.cuda.nvtx, **marks), \
            mock.patch.multiple(torch.cuda.profiler, start=lambda: None, stop=lambda: None), \
            mock.patch.object(torch.profiler, "profile", _profiled), _OnCpu(), \
            tempfile.TemporaryDirectory() as locks, \
            mock.patch("kvlab.probes._device.cache_folder", lambda *parts: Path(locks, *parts)):    # no test waits
        yield known
