"""What this machine can do at best right now: bytes read, bytes copied, matrix products. Beside each comparison."""
from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

from kvlab.probes._base import Bench, room_on
from kvlab.probes._clock import clock, summarise
from kvlab.record.reading import Reading

LARGEST = 256 * 2**20           # bytes of one buffer at the most; beyond that size bandwidth no longer changes


@dataclass(frozen=True)
class Ceilings:
    """Fastest read and copy of fp32 buffers as large as the comparison's K/V, rotated like them, and a square matmul.

    read_ceiling: the fastest of torch's own read-only sweeps (sum, norm, maximum). copy_ceiling counts bytes read
    and written. matmul_ceiling is in the trials' dtype. samples: how many of each.
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
        nbytes = max(4, min(LARGEST, max(bench.comparison.cache_bytes().values())) // 4 * 4)
        copies = min(-(-5 * room_on(device)[1] // nbytes) + 1, 1000)
        buffers = [torch.ones(nbytes // 4, device=device) for _ in range(copies)]
        seconds = _stopwatch(device, trial.threads)
        sweeps = {"sum": torch.sum, "norm": torch.linalg.vector_norm, "max": torch.amax}
        times = {name: [seconds(lambda b=buffers[i % copies], f=f: f(b)) for i in range(-1, self.samples)][1:]
                 for name, f in sweeps.items()}
        best = min(times, key=lambda name: summarise(times[name]).median)
        size = f"{copies} buffers of {nbytes:,} bytes"
        yield None, self._rate("read_ceiling", "B/s", nbytes, times[best], f"torch {best} over {size}")
        copied = [seconds(lambda i=i: buffers[i % copies].copy_(buffers[(i + 1) % copies]))
                  for i in range(-1, self.samples)][1:]
        yield None, self._rate("copy_ceiling", "B/s", 2 * nbytes, copied, f"torch copy_ over {size}")
        yield None, self._matmul(torch, trial, seconds, 8192 if device.startswith("cuda") else 1024)

    def _matmul(self, torch, trial, seconds, n):
        """Square product; the size is halved while one takes over 0.1 s (bf16 without bf16 instructions)."""
        def product(n):
            a = torch.ones(n, n, dtype=trial.torch_dtype, device=trial.device)
            return lambda: a @ a

        while seconds(work := product(n)) > 0.1 and n > 128:
            n //= 2
        times = [seconds(work) for _ in range(self.samples)]
        return self._rate("matmul_ceiling", "flop/s", 2 * n**3, times, f"{trial.dtype} {n} x {n} matmul")

    def _rate(self, metric, unit, amount, times, note) -> Reading:
        s = summarise(times)
        return Reading(metric, amount / s.median, unit, "measured", method="timer", source=self.name, n=s.n,
                       low=amount / s.high, high=amount / s.low, rel_std=s.rel_std, note=note)


def _stopwatch(device: str, threads: int):
    if device.startswith("cuda"):
        import torch

        def wait() -> float:
            torch.cuda.synchronize()
            return time.perf_counter()
    else:
        wait = clock(threads).now

    def seconds(work) -> float:
        began = wait()
        work()
        return wait() - began
    return seconds
