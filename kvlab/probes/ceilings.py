"""What this machine can do at best right now: bytes read, bytes copied, matrix products. Beside each comparison."""
from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import ClassVar

from kvlab.probes._base import Bench, room_on
from kvlab.probes._clock import clock, summarise
from kvlab.record.reading import Reading

SMALLEST, LARGEST = 2**20, {"cpu": 2**28, "cuda": 2**31}        # bytes of one buffer: overhead below, time above
SAMPLE = 2**23                  # bytes that one sample moves at the least, over several buffers


@dataclass(frozen=True)
class Ceilings:
    """Fastest read and copy of fp32 buffers as large as the comparison's K/V (1 MiB at least), and a square matmul.

    Buffers rotate, so that none is found in the cache. read_ceiling: the fastest of torch's own read-only sweeps (sum,
    norm, maximum). copy_ceiling counts bytes read and written. matmul_ceiling is in the trials' dtype. samples: how
    many of each.
    """
    samples: int = 9
    name: ClassVar[str] = "ceilings"
    metrics: ClassVar[dict[str, str]] = {"read_ceiling": "B/s", "copy_ceiling": "B/s", "matmul_ceiling": "flop/s"}
    needs: ClassVar[tuple[str, ...]] = ("kernel_error",)
    rotates: ClassVar[bool] = False

    def why_not(self, trial):
        return None

    def measure(self, bench: Bench):
        import torch
        trial, device = bench.trials[0], bench.comparison.device
        largest = LARGEST[device.partition(":")[0]]
        nbytes = min(largest, max(SMALLEST, *bench.comparison.touched_bytes().values())) // 4 * 4
        copies = -(-5 * room_on(device)[1] // nbytes) + 1
        buffers = [torch.randn(nbytes // 4, device=device) for _ in range(copies)]
        turn, inner = count(), -(-SAMPLE // nbytes)
        seconds = _stopwatch(device, trial.threads)

        def sample(work) -> float:
            """Seconds per buffer; every piece of work takes the next buffer, whatever was done before."""
            chosen = [buffers[next(turn) % copies] for _ in range(inner)]
            return seconds(lambda: [work(b) for b in chosen]) / inner

        def times(work) -> list[float]:
            return [sample(work) for _ in range(self.samples + 1)][1:]
        sweeps = {name: times(f) for name, f in (("sum", torch.sum), ("norm", torch.linalg.vector_norm),
                                                 ("max", torch.amax))}
        best = min(sweeps, key=lambda name: summarise(sweeps[name]).median)
        size = f"{copies} buffers of {nbytes:,} bytes"
        yield None, self._rate("read_ceiling", "B/s", nbytes, sweeps[best], f"torch {best} over {size}")
        half = nbytes // 8
        copied = times(lambda b: b[:half].copy_(b[half:2 * half]))
        yield None, self._rate("copy_ceiling", "B/s", 8 * half, copied, f"torch copy_ within each of {size}")
        yield None, self._matmul(torch, trial, seconds, 8192 if device.startswith("cuda") else 1024)

    def _matmul(self, torch, trial, seconds, n):
        """Square product; the size is halved while one takes over 0.1 s (bf16 without bf16 instructions)."""
        def product(n):
            a = torch.randn(n, n, device=trial.device).to(trial.torch_dtype)
            seconds(lambda: a @ a)                                   # libraries load at the first call
            return lambda: a @ a

        while seconds(work := product(n)) > 0.1 and n > 128:
            n //= 2
        times = [seconds(work) for _ in range(self.samples)]
        return self._rate("matmul_ceiling", "flop/s", 2 * n**3, times, f"{trial.dtype} {n} x {n} matmul")

    def _rate(self, metric, unit, amount, times, note) -> Reading:
        s = summarise(times)
        ends = {} if s.low is None else dict(low=amount / s.high, high=amount / s.low)
        return Reading(metric, amount / s.median, unit, "measured", method="timer", source=self.name, n=s.n,
                       rel_std=s.rel_std, note=note, **ends)


def _stopwatch(device: str, threads: int):
    """Seconds that some work takes: on the clock of the trials, on a GPU between two events."""
    if device.startswith("cuda"):
        import torch
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def seconds(work) -> float:
            start.record()
            work()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3
        return seconds
    now = clock(threads).now

    def seconds(work) -> float:
        began = now()
        work()
        return now() - began
    return seconds
