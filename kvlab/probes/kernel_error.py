"""How far a variant's output is from fp64 attention on the K and V it was given. Gates every other number."""
from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

from kvlab.probes._base import Bench, Broken
from kvlab.probes._expected import Expected, decisive, overwrite, read_only
from kvlab.record.reading import Reading


@dataclass(frozen=True)
class KernelError:
    """Relative L2 distance to the fp64 oracle on decode(encode(K, V)); a trial with a row off the tolerance is failed.

    Tolerance of the worst row: four times that of plain attention in the trial's dtype, eight units of rounding at
    least. Judged twice: on the inputs, and by the same call after single tokens in the cache were made decisive.
    The note names the operators that torch dispatched, since torch falls back to slower ones without a word.
    Its call is a trial's first one: what it took, compilation included, is in bench.first_call_s.
    """
    name: ClassVar[str] = "kernel_error"
    metrics: ClassVar[dict[str, str]] = {"kernel_error": "ratio"}
    needs: ClassVar[tuple[str, ...]] = ()
    rotates: ClassVar[bool] = False

    def why_not(self, trial):
        return None

    def measure(self, bench: Bench):
        import torch
        dispatched(lambda: torch.zeros(1).split(1))     # what torch imports for the watch is no variant's first call
        expected, calls, found = Expected(bench), {}, {}
        for trial in list(bench.trials):
            with bench.on(trial):
                inputs = bench.inputs_of(trial)[:1]
                with read_only(inputs[0]):
                    began = time.perf_counter()
                    calls[trial] = trial.prepare(inputs)[0]
                    output, operators = dispatched(calls[trial])
                    if trial.device.startswith("cuda"):
                        torch.cuda.synchronize()
                    bench.first_call_s[trial] = time.perf_counter() - began
                error, tolerance = expected.judge(trial, output)
                found[trial] = Reading("kernel_error", error, "ratio", "measured", method="derived", source=self.name,
                                       denominator="L2 norm of fp64 attention on decode(encode(K, V))",
                                       note="; ".join(filter(None, [f"tolerance of the worst row {tolerance:.2g}",
                                                                    f"operators: {operators}", trial.ran])))
        self._decisive(bench, calls)
        yield from ((trial, reading) for trial, reading in found.items() if trial in bench.trials)

    def _decisive(self, bench: Bench, calls) -> None:
        firsts = [copies[0] for copies in bench.inputs.values()]
        k, v = decisive(firsts[0], bench.comparison.workload, {one.cache.block_size for one in firsts})
        for one in firsts:
            overwrite(one, k, v)
        expected = Expected(bench)
        for trial in list(bench.trials):
            with bench.on(trial):
                try:
                    expected.judge(trial, calls[trial]())
                except Broken as wrong:
                    raise Broken(f"wrong where single tokens decide (first, block edge, newest): {wrong}") from None
        for one in firsts:
            overwrite(one, one.k, one.v)


def dispatched(call) -> tuple[object, str]:
    """(output, the attention operators that torch ran for it, or its matrix products where there are none)."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Watch(TorchDispatchMode):
        @classmethod
        def ignore_compile_internals(cls):                  # else torch would run what is compiled uncompiled instead
            return True

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            if name not in seen:
                seen.append(name)
            return func(*args, **(kwargs or {}))

    with Watch():
        output = call()
    fused = [n for n in seen if "attention" in n]
    products = [n for n in seen if n in ("bmm", "mm", "matmul", "einsum")]
    return output, ", ".join(fused or products or ["none that torch dispatched (compiled, or a library's)"])
