"""Kernels compiled for GPUs that are not here, each exactly as a real launch would specialise it.

A launch is a call of the host function on tensors of torch's meta device, which have shapes, dtypes, strides and
alignment but no data. Triton's own launch code runs up to the compiled kernel, told of a GPU that is not there, so that
types, divisibility and constants are its own. The child process ends with what it changed. With
KVLAB_TRITON=<folder> (of `pip install --target`) the Triton of that folder compiles instead of the installed one.
"""
from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from kvlab._child import python

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}           # that a program may have
_CHILD = """
sys.path[:0] = [p for p in sys.argv[1:3] if p]
os.environ.pop("TRITON_INTERPRET", None)
import compiling
for which in sys.argv[3:]:
    name, _, arch = which.rpartition(" sm_")
    answer(**{which: compiling.launched(name, int(arch))})
"""


class Facts(NamedTuple):
    """What the compiler made of a kernel: resources of a thread and a program, and instructions of its text.

    wide_loads: of 16 bytes from global memory, to registers or straight to shared memory. local: accesses of memory
    that stands in for registers. mma, wgmma, tcgen05: products on matrix units, the oldest way to the newest.
    """
    kernel: str
    triton: str
    shared: int
    registers: int
    stack: int
    local: int
    mma: int
    wgmma: int
    tcgen05: int
    wide_loads: int


def compiled(cases, triton: str | None = None) -> dict[tuple[str, int], list[Facts] | str]:
    """Of each (name in LAUNCHES, architecture) the facts of every kernel it starts, or why it does not compile.

    triton: a folder with another Triton than the installed one. Two processes share the work.
    """
    work = [f"{name} sm_{arch}" for name, arch in cases]
    halves = [half for half in (work[::2], work[1::2]) if half]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda half: python(_CHILD, triton or "", str(Path(__file__).parent), *half,
                                                    timeout_s=500), halves))
    found = {}
    for half, (answer, ended) in zip(halves, answers):
        for which in half:
            name, _, arch = which.rpartition(" sm_")
            facts = answer.get(which, f"the compiling process {ended}")
            found[name, int(arch)] = facts if isinstance(facts, str) else [Facts(*each) for each in facts]
    return found


def launched(name: str, arch: int) -> list[Facts] | str:
    """In the child: what a launch compiles to."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction
    kernels, run = [], JITFunction.run

    def record(self, *args, grid, warmup, **options):
        kernels.append(run(self, *args, grid=grid, warmup=True, **options))

    driver.set_active(_Absent(arch))
    JITFunction.run = record
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"                       # no cache may hide a regression
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TRITON_CACHE_DIR"] = folder
            LAUNCHES[name](arch)
            return [_facts(kernel, Path(folder)) for kernel in kernels]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        JITFunction.run = run


class _Absent:
    """A driver of a GPU that is not there."""
    def __init__(self, arch: int):
        self.arch = arch

    def get_current_device(self):
        return self.arch                                            # each has kernels of its own

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget
        return GPUTarget("cuda", self.arch, 32)


def _facts(kernel, folder: Path) -> Facts:
    import triton
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    (binary := folder / "kernel.cubin").write_bytes(kernel.asm["cubin"])

    def dump(what):
        return subprocess.run([tool, what, binary], capture_output=True, text=True, check=True).stdout

    used = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", dump("-res-usage")))
    ptx, sass = kernel.asm["ptx"], dump("-sass")

    def count(pattern, text=ptx):
        return len(re.findall(pattern, text))

    return Facts(kernel.metadata.name, triton.__version__, kernel.metadata.shared, int(used["REG"]),
                 int(used["STACK"]) + int(used["LOCAL"]), count(r"\b(?:LDL|STL)\b", sass), count(r"\bmma\.sync"),
                 count(r"\bwgmma\.mma_async"), count(r"\btcgen05\.mma"),
                 count(r"\b(?:LDG|LDGSTS)\.E(?:\.\w+)*?\.128\b", sass))


def _empty(*size, dtype="bf16"):
    import torch

    from kvlab.kernels.triton_flash import DTYPES
    return torch.empty(size, dtype=DTYPES.get(dtype) or getattr(torch, dtype), device="meta")


def prefill(arch: int, *, dtype="bf16", head_dim=128, v_dim=None, q_heads=32, kv_heads=8, length=4096, block_size=0,
            window=None, softcap=None, order="head", candidate=0) -> None:
    """Two prompts of that length, by the configuration that such a GPU gets."""
    from kvlab.attention.triton_flash import candidates
    from kvlab.kernels.stored import Stored
    from kvlab.kernels.triton_flash import flash_prefill
    v_dim, per_block = v_dim or head_dim, block_size or length
    config = candidates(dtype, max(head_dim, v_dim), divmod(arch, 10), bool(block_size))[candidate]

    def side(width):
        codes = _empty(2 * length // per_block, *((kv_heads, per_block) if order == "head" else (per_block, kv_heads)),
                       width, dtype=dtype)
        return Stored(codes if order == "head" else codes.transpose(1, 2), dtype, width)

    flash_prefill(_empty(2 * length, q_heads, head_dim, dtype=dtype), side(head_dim), side(v_dim),
                  _empty(2, length // per_block, dtype="int32"), (length, length), (length, length), window=window,
                  softcap=softcap, out_TQE=_empty(2 * length, q_heads, v_dim, dtype=dtype),
                  lse_TQ=_empty(2 * length, q_heads, dtype="float32"), config=config)


def decode(arch: int, *, kv_format="bf16", block_size=16, **shape) -> None:
    """A decode step of 16 sequences of 8192 tokens, on a cache in that format, by the default configuration."""
    from kvlab.attention._stored import stored_sides
    from kvlab.kernels import triton_decode
    from kvlab.kv.cache import KVCache
    from kvlab.kv.formats import kv_format as named
    from kvlab.shapes import AttentionShape
    triton_decode.multiprocessors = lambda device: 132
    triton_decode._native_fp8 = lambda device: arch >= 89
    heads = AttentionShape(**{**dict(num_q_heads=32, num_kv_heads=8, head_dim=128), **shape})
    per_sequence = 8192 // block_size
    cache = KVCache(heads, named(kv_format), 16 * per_sequence + 1, block_size, device="meta")
    k, v = stored_sides(cache)
    triton_decode.decode(_empty(16, heads.num_q_heads, heads.head_dim), k, v,
                         _empty(16, per_sequence, dtype="int32"), (0,) * 16, (8192,) * 16, softcap=heads.softcap,
                         out_BQE=_empty(16, heads.num_q_heads, heads.v_dim),
                         workspace=lambda name, *size, dtype: _empty(*size, dtype=str(dtype).removeprefix("torch.")))


def mixed_product(arch: int) -> None:
    """A mistake: bf16 times fp8, which no GPU multiplies."""
    import broken_kernels
    broken_kernels.mixed_product[(1,)](_empty(64, 64), _empty(64, 64, dtype="float8_e4m3fn"), _empty(64, 64))


def spilling(arch: int) -> None:
    """A mistake: more numbers than registers."""
    import broken_kernels
    broken_kernels.crowding[(1,)](_empty(64, 64), _empty(64, 64), num_warps=1, maxnreg=64)


def narrow_loads(arch: int) -> None:
    """A mistake: a row that does not begin at a multiple of 16 bytes."""
    import broken_kernels
    broken_kernels.copying[(1,)](_empty(64, 65), _empty(64, 65), 65)


LATENT = dict(num_q_heads=128, num_kv_heads=1, head_dim=576, v_head_dim=512, v_in_k=True)
LAUNCHES = {
    "prefill bf16": prefill,
    **{f"prefill bf16 {width}": lambda arch, width=width: prefill(arch, head_dim=width)
       for width in (64, 80, 96, 112, 256)},
    "prefill bf16 192/128": lambda arch: prefill(arch, head_dim=192, v_dim=128),
    "prefill bf16 paged": lambda arch: prefill(arch, block_size=16, order="token"),
    "prefill bf16 window softcap": lambda arch: prefill(arch, window=1024, softcap=30.0),
    "prefill fp16": lambda arch: prefill(arch, dtype="fp16"),
    "prefill fp32": lambda arch: prefill(arch, dtype="fp32"),
    "decode bf16": decode,
    **{f"decode {name}": lambda arch, name=name: decode(arch, kv_format=name)
       for name in ("int8/token", "fp8_e4m3", "int4/token/g32")},
    "decode latent": lambda arch: decode(arch, block_size=64, **LATENT),
    "broken: mixed product": mixed_product,
    "broken: spilling": spilling,
    "broken: narrow loads": narrow_loads,
}

if __name__ == "__main__":                                          # compiling.py [folder of another Triton] name …
    folder = sys.argv.pop(1) if sys.argv[1:] and Path(sys.argv[1]).is_dir() else None
    asked = [(name, arch) for name in sys.argv[1:] or LAUNCHES for arch in SHARED_BYTES]
    for which, facts in compiled(asked, folder).items():
        print(*which, *([facts] if isinstance(facts, str) else facts), sep="\n    ")
