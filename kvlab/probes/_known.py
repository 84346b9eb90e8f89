"""Operations whose traffic nobody disputes: a copy, a read and a matrix product. What sources are judged by."""
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from kvlab.attention import Cost
from kvlab.attention._base import DTYPES, digest

OPERATIONS = ("copy", "read", "matmul")


@dataclass(frozen=True)
class Operation:
    """copy or read of a buffer of nbytes, or the product of two square matrices of nbytes each.

    The copy changes the sign of each number: so it is a kernel. A plain copy of a contiguous tensor is left to the
    driver (cudaMemcpyAsync), which counters of kernels do not see. Not attention: it has no workload, and its rows
    leave those columns blank.
    """
    name: str
    nbytes: int
    dtype: str = "fp32"
    device: str = "cpu"
    threads: int = 1
    seed: int = 0

    def __post_init__(self):
        if self.name not in OPERATIONS:
            raise ValueError(f"operation {self.name!r}; allowed: {', '.join(OPERATIONS)}")
        if self.nbytes < 64 * 64 * self.itemsize:
            raise ValueError(f"nbytes={self.nbytes} must hold 64 × 64 numbers of {self.dtype} at least")

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype][1]

    @property
    def side(self) -> int:
        """Rows of a matrix of about nbytes."""
        return int((self.nbytes // self.itemsize)**0.5) // 64 * 64

    @property
    def case_id(self) -> str:
        return digest(asdict(self))

    comparison_id = case_id                                          # a case of a study by itself

    def columns(self) -> dict:
        return dict(variant=self.name, device=self.device, dtype=self.dtype, threads=self.threads, seed=self.seed,
                    replica=0, case=json.dumps(asdict(self), sort_keys=True))

    def cost(self, cache_bytes: int = 0) -> Cost:
        """Bytes in and out of memory at the least, whatever the cache holds; flops."""
        if self.name == "matmul":
            one = self.side**2 * self.itemsize
            return Cost(2 * one, one, 2 * self.side**3)
        n = self.nbytes // self.itemsize
        return Cost(n * self.itemsize, n * self.itemsize if self.name == "copy" else 0, 0 if self.name == "copy" else n)

    def calls(self, copies: int = 1) -> list[Callable]:
        """One call per copy of its operands. A product's result is written to one matrix that is kept."""
        import torch
        dtype = getattr(torch, DTYPES[self.dtype][0])
        made = []
        for i in range(copies):
            generator = torch.Generator(self.device).manual_seed(self.seed + i)

            def gaussian(*size, generator=generator):
                return torch.randn(*size, generator=generator, device=self.device).to(dtype)
            if self.name == "matmul":
                a, b = gaussian(self.side, self.side), gaussian(self.side, self.side)
                out = torch.empty_like(a)
                made.append(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))
            else:
                source = gaussian(self.nbytes // self.itemsize)
                if self.name == "copy":
                    target = torch.empty_like(source)
                    made.append(lambda source=source, target=target: torch.neg(source, out=target))
                else:
                    made.append(lambda source=source: source.sum())
        return made
