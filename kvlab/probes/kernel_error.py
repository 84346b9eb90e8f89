"""How far a variant's output is from fp64 attention on the K and V it was given. Gates every other number."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

from kvlab.attention import reference
from kvlab.probes._base import Bench, Broken
from kvlab.record.reading import Reading

SAMPLED_ROWS = 256          # query tokens checked of a long prefill, spread over its sequences, ends included
MULTIPLE = 4                # of the error that plain attention makes in the same dtype


class Expected:
    """What the outputs of a bench's trials must be: one oracle per format, from one input copy as it is now."""

    def __init__(self, bench: Bench, original: bool = False, copy: int = 0):
        self.bench, self.original, self.copy, self.known = bench, original, copy, {}

    def rows(self, device):
        """Per sequence, the query tokens to check (None: all of them)."""
        import torch
        q_lens = self.bench.comparison.workload.q_lens
        if sum(q_lens) <= SAMPLED_ROWS:
            return None
        each = max(2, SAMPLED_ROWS // len(q_lens))
        return [torch.linspace(0, n - 1, min(n, each), device=device).round().long() for n in q_lens]

    def of(self, trial):
        """(fp64 output of the checked rows, their places in the packed output or None, tolerance) for the trial."""
        import torch
        if trial.kv_format not in self.known:
            inputs, w = self.bench.inputs_of(trial)[self.copy], self.bench.comparison.workload
            k, v = (inputs.k, inputs.v) if self.original else _stored(inputs)
            rows = self.rows(inputs.q_TQD.device)
            exact = reference(w, inputs.q_BTQD, k, v, rows)
            plain = _head_by_head(w, inputs.q_BTQD, k, v, rows, trial.torch_dtype)
            eps = torch.finfo(trial.torch_dtype).eps
            tolerance = MULTIPLE * (float((plain - exact).norm() / exact.norm()) + eps)
            places = None if rows is None else torch.cat(
                [r + sum(w.q_lens[:b]) for b, r in enumerate(rows)])
            self.known[trial.kv_format] = exact, places, tolerance
        return self.known[trial.kv_format]

    def judge(self, trial, output) -> tuple[float, float]:
        """(relative L2 error, tolerance); raises Broken where the output is wrong."""
        exact, places, tolerance = self.of(trial)
        return self.bench.check(trial, output, exact, tolerance, places), tolerance


def _head_by_head(workload, q_BTQD, k, v, rows, dtype):
    """Plain attention in a low precision, one query head of each group at a time.

    A single query row is summed token after token, which errs most: an honest variant may do so, and must pass.
    """
    import torch
    shape = workload.shape
    one_of_each = replace(workload, shape=replace(shape, num_q_heads=shape.num_kv_heads))
    heads = [reference(one_of_each, [q[:, g::shape.group_ratio] for q in q_BTQD], k, v, rows, dtype)
             for g in range(shape.group_ratio)]
    return torch.stack(heads, dim=2).flatten(1, 2).double()


def _stored(inputs):
    """K and V of each sequence as the cache holds them, decoded to q's dtype."""
    cache = inputs.cache
    pairs = [cache.format.decode(cache.gather(blocks, kv_len), cache.shape, inputs.q_TQD.dtype)
             for blocks, kv_len in zip(_tables(inputs), inputs.kv_lens)]
    return [k for k, _ in pairs], [v for _, v in pairs]


def _tables(inputs) -> list[list[int]]:
    """The block table of each sequence, without what fills it up."""
    return [table[:-(-kv_len // inputs.cache.block_size)]
            for table, kv_len in zip(inputs.block_table.tolist(), inputs.kv_lens)]


def overwrite(inputs, k: Iterable, v: Iterable) -> None:
    """Put other K and V, one per sequence, in the place of those that the cache holds."""
    for blocks, k_SKD, v_SKD in zip(_tables(inputs), k, v):
        inputs.cache.write(inputs.cache.format.encode(k_SKD, v_SKD), blocks)


@contextmanager
def read_only(inputs) -> Iterator[None]:
    """Copy 0 for the length of a trial's own code: Broken if that writes into it, and put right for the others.

    q is compared; K and V, which may be large, are known by torch's own count of writes.
    """
    import torch
    kept, arrays = inputs.q_TQD.clone(), inputs.cache.k_arrays + inputs.cache.v_arrays
    writes = [a._version for a in arrays]
    written = []
    try:
        yield
    finally:
        if not torch.equal(inputs.q_TQD, kept):
            written.append("q")
            inputs.q_TQD.copy_(kept)
        if writes != [a._version for a in arrays]:
            written.append("the cache")
            overwrite(inputs, inputs.k, inputs.v)
    if written:
        raise Broken(f"the call writes into its inputs ({' and '.join(written)}), which the other trials share")


@dataclass(frozen=True)
class KernelError:
    """Relative L2 distance to the fp64 oracle on decode(encode(K, V)); a trial above the tolerance is failed.

    Tolerance: four times the error of plain attention in the trial's dtype, and four units of rounding.
    The note names the operators that torch dispatched, since torch falls back to slower ones without a word.
    """
    name: ClassVar[str] = "kernel_error"
    metrics: ClassVar[dict[str, str]] = {"kernel_error": "ratio"}
    needs: ClassVar[tuple[str, ...]] = ()
    rotates: ClassVar[bool] = False

    def why_not(self, trial):
        return None

    def measure(self, bench: Bench):
        expected = Expected(bench)
        for trial in list(bench.trials):
            with bench.on(trial):
                inputs = bench.inputs_of(trial)[:1]
                with read_only(inputs[0]):
                    output, operators = dispatched(trial.prepare(inputs)[0])
                error, tolerance = expected.judge(trial, output)
                yield trial, Reading("kernel_error", error, "ratio", "measured", method="derived", source=self.name,
                                     denominator="L2 norm of fp64 attention on decode(encode(K, V))",
                                     note=f"tolerance {tolerance:.2g}; operators: {operators}")


def dispatched(call) -> tuple[object, str]:
    """(output, the attention operators that torch ran for it, or its matrix products where there are none)."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            if name not in seen:
                seen.append(name)
            return func(*args, **(kwargs or {}))

    with Watch():
        output = call()
    fused = [n for n in seen if "attention" in n]
    products = [n for n in seen if n in ("bmm", "mm", "matmul", "einsum")]
    return output, ", ".join(fused or products or ["none of torch's"])


__all__ = ["Broken", "Expected", "KernelError", "dispatched", "overwrite", "read_only"]
