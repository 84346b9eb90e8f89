"""What NVML's GPM counts over a window of looped calls, and what its 100 % of memory really moves on this GPU."""
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvlab.probes._base import room_on, rotation
from kvlab.probes._known import Operation
from kvlab.probes._loop import Loop, waits
from kvlab.probes._nvml import Gpu, Unavailable

UTILISATION = {"sm_utilization": 2, "sm_occupancy": 3, "tensor_utilization": 5, "dram_utilization": 10}    # GPM's ids
REFRESH_S = 0.1                 # GPM renews what it samples from about this often (NVIDIA/DCGM#310)
LEAD_S = 0.2                    # of the same, before a window: a sample that is one refresh old is of it too
IDLE_S = 0.25                   # before a window that shall show how old samples are: over two refreshes
MEMORY_CLOCK = 2                # NVML_CLOCK_MEM
STEADY = 0.01                   # by which the memory clock may differ between the edges of a window
APART, OFF = 0.05, 0.10         # κ is refused where copy and read differ by more, or where it is further from 1


def peak(memory_clock: float, bus_bits: int) -> float:
    """Bytes per second that a memory bus can move: two transfers per clock. Clock in Hz, width in bits."""
    return 2 * memory_clock * bus_bits / 8


@dataclass(frozen=True)
class Counted:
    """One window of calls: how busy GPM saw the GPU (ratios), and what its memory could move at its clock (B/s)."""
    calls: int
    seconds: float                                      # between the two samples
    shares: dict[str, float | Unavailable]
    peak: float | Unavailable

    def bytes(self, idle: Counted, kappa: float = 1.0) -> float:
        """Bytes that the calls moved in the window; Unavailable where a number that it takes is."""
        terms = self.peak, self.shares["dram_utilization"], idle.shares["dram_utilization"]
        for term in terms:
            if isinstance(term, Unavailable):
                raise term
        most, busy, floor = terms
        return (busy - floor) * most * kappa * self.seconds


def per_call(first: Counted, second: Counted, idle: Counted, kappa: float = 1.0) -> float:
    """Bytes of one call: the slope between a window of few calls and one of more, free of what the edges add."""
    slope = (second.bytes(idle, kappa) - first.bytes(idle, kappa)) / (second.calls - first.calls)
    if slope <= 0:
        raise Unavailable(f"a window of {second.calls:,} calls moved no more bytes than one of {first.calls:,}: the "
                          "call moves too little to be seen; take a larger case")
    return slope


@dataclass(frozen=True)
class Calibration:
    """The idle GPU, and κ: bytes that a copy and a read really move ÷ bytes that the counter makes of them."""
    idle: Counted
    copy: float
    read: float

    @property
    def kappa(self) -> float:
        return (self.copy + self.read) / 2

    @property
    def apart(self) -> float:
        """Difference of the two, relative to κ."""
        return abs(self.copy - self.read) / self.kappa

    @property
    def why_refused(self) -> str | None:
        """Why bytes are not to be made of this counter here, with the numbers."""
        numbers = f"κ is {self.copy:.3f} for a copy and {self.read:.3f} for a read of known size"
        if self.apart > APART:
            return (f"{numbers}, which differ by {self.apart:.1%} (allowed: {APART:.0%}); is the GPU used by others, "
                    "or its clock not steady?")
        if abs(self.kappa - 1) > OFF:
            return (f"{numbers}: more than {OFF:.0%} from 1, so the counter's 100 % is not what clock × bus width "
                    "moves on this GPU; use the probe ncu")
        return None


class Meter:
    """GPM on one GPU (or slice of it): windows over looped calls. Everything raises Unavailable with the reason."""

    def __init__(self, one: Gpu, device: str, window_s: float):
        self.gpu, self.device, self.window_s = one, device, window_s

    def window(self, loop: Loop, calls: int) -> Counted:
        """That many calls, after a lead-in of the same."""
        loop.run(loop.lasting(LEAD_S, least=1))
        return self._between(lambda: loop.run(calls), calls)

    def idle(self) -> Counted:
        """The GPU without work for window_s, after a pause in which what it did before leaves the samples."""
        waits(self.device)()
        time.sleep(LEAD_S)
        return self._between(lambda: time.sleep(self.window_s), 0)

    def from_idle(self, loop: Loop, calls: int) -> Counted:
        """That many calls out of idleness: a sample that is old, as no lead-in hides it, makes the window emptier."""
        waits(self.device)()
        time.sleep(IDLE_S)
        return self._between(lambda: loop.run(calls), calls)

    def _between(self, work: Callable[[], None], calls: int) -> Counted:
        """What was counted while the work ran. A recording notes where each window began and how it ended."""
        heard, samples = self.gpu.heard, []
        began = None if heard is None else len(heard)

        def edge():
            samples.append(found := edge_of(self.gpu))
            return found
        outcome = {}
        try:
            before, _ = edge(), work()
            after = edge()
            outcome = dict(answer=dict(calls=calls, seconds=after.at - before.at))
            return counted(self.gpu, before, after, **outcome["answer"])
        except Exception as error:
            outcome["error"] = str(error) or type(error).__name__
            raise
        finally:
            if heard is not None:
                heard.append(dict(call="Window", arguments=[], began=began, **outcome))
            for sample in samples:
                self.gpu.free(sample.sample)

    def pair(self, loop: Loop) -> tuple[Counted, Counted]:
        """Windows of n and of 2n calls, n so many that the shorter lasts window_s."""
        n = loop.lasting(1.05 * self.window_s, least=1)
        return self.window(loop, n), self.window(loop, 2 * n)

    def room_for(self, buffer_bytes: int) -> int:
        """Bytes of a buffer to calibrate with: as asked, or a sixteenth of the free memory."""
        free, cache = room_on(self.device)
        nbytes = min(buffer_bytes, free // 16)
        if nbytes < 2 * cache:
            raise Unavailable(f"κ needs buffers of at least twice the L2 ({2 * cache:,} bytes), and {free:,} bytes of "
                              "GPU memory are free; take a smaller case")
        return nbytes

    def calibrate(self, nbytes: int) -> Calibration:
        """Idle floor, then κ from a copy and a read of buffers of that size."""
        idle, found = self.idle(), {}
        for name in ("copy", "read"):
            op = Operation(name, nbytes, device=self.device)
            cost = op.cost()
            loop = Loop(op.calls(copies_of(op)), self.device)
            found[name] = (cost.read_bytes + cost.write_bytes) / per_call(*self.pair(loop), idle)
        return Calibration(idle, **found)


@dataclass(frozen=True)
class Edge:
    """A sample of the counters at an edge of a window, when it was taken, and the memory clock there."""
    sample: object
    at: float                                           # s
    clock: float | Unavailable                          # Hz


def edge_of(one: Gpu) -> Edge:
    """The edge of a window, now. A clock that is not told costs the bytes; a sample that is not, the window."""
    clock = _asked(one.whole, "DeviceGetClockInfo", MEMORY_CLOCK)
    began = time.perf_counter()
    sample = one.gpm_sample()
    return Edge(sample, (began + time.perf_counter()) / 2, clock if isinstance(clock, Unavailable) else clock * 1e6)


def counted(one: Gpu, before: Edge, after: Edge, calls: int, seconds: float) -> Counted:
    """What lay between two edges."""
    told = one.gpm(before.sample, after.sample, UTILISATION)
    shares = {name: value if isinstance(value, Unavailable) else value / 100 for name, value in told.items()}
    bits = _asked(one.whole, "DeviceGetMemoryBusWidth")
    return Counted(calls, seconds, shares, _peak(before.clock, after.clock, bits))


def copies_of(op: Operation) -> int:
    """Copies of an operation's operands so that none is found in the L2."""
    free, cache = room_on(op.device)
    return rotation(op.nbytes, 3 * op.nbytes, cache, free)


def _asked(one: Gpu, function: str, *arguments):
    try:
        return one.ask(function, *arguments)
    except Unavailable as why:
        return Unavailable(f"{function} of NVML: {why}")


def _peak(before, after, bits) -> float | Unavailable:
    for value in (before, after, bits):
        if isinstance(value, Unavailable):
            return value
    if not (before and after):
        return Unavailable("NVML gives a memory clock of 0, so the counter's 100 % is of unknown bandwidth; a newer "
                           "driver may tell it")
    if not bits:
        return Unavailable("NVML gives a memory bus of 0 bits, so the counter's 100 % is of unknown bandwidth; a newer "
                           "driver may tell it")
    if abs(after - before) > STEADY * before:
        return Unavailable(f"the memory clock went from {before / 1e6:,.0f} to {after / 1e6:,.0f} MHz inside the "
                           f"window (allowed: {STEADY:.0%}); measure again, or lock it (nvidia-smi -lmc)")
    return peak((before + after) / 2, bits)
