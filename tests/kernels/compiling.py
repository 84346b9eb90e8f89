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
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvlab._child import python
from kvlab.kernels.triton_tuning import Config

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

    copies: of 16 bytes from global memory straight to shared memory, which is how tiles are loaded ahead;
    narrow_copies: of 8. wide_loads: of 16 bytes to registers. conversions: one number at a time (F2F), far slower than
    those of two. local: accesses of memory that stands in for registers. mma, wgmma, tcgen05: products on matrix units,
    the oldest way to the newest.
    """
    kernel: str
    triton: str
    warps: int
    shared: int
    registers: int
    stack: int
    local: int
    mma: int
    wgmma: int
    tcgen05: int
    copies: int
    narrow_copies: int
    wide_loads: int
    conversions: int


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
            return [_facts(kernel, Path(folder)) for kernel in dict.fromkeys(kernels)]          # each once
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

    return Facts(kernel.metadata.name, triton.__version__, kernel.metadata.num_warps, kernel.metadata.shared,
                 int(used["REG"]), int(used["STACK"]) + int(used["LOCAL"]), count(r"\b(?:LDL|STL)\b", sass),
                 count(r"\bmma\.sync"), count(r"\bwgmma\.mma_async"), count(r"\btcgen05\.mma"),
                 count(r"\bLDGSTS\.E(?:\.\w+)*?\.128\b", sass), count(r"\bLDGSTS\.E(?:\.\w+)*?\.64\b", sass),
                 count(r"\bLDG\.E(?:\.\w+)*?\.128\b", sass), count(r"\bF2F\b", sass))


def _empty(*size, dtype="bf16"):
    import torch

    from kvlab.kernels.triton_flash import DTYPES
    return torch.empty(size, dtype=DTYPES.get(dtype) or getattr(torch, dtype), device="meta")


def prefill(arch: int, *, dtype="bf16", head_dim=128, v_dim=None, q_heads=32, kv_heads=8, length=4096, block_size=0,
            window=None, softcap=None, order="head", which=slice(1)) -> None:
    """Two prompts of that length; which: of the configurations that such a GPU gets, the first is the default."""
    from kvlab.attention.triton_flash import candidates
    from kvlab.kernels.stored import Stored
    from kvlab.kernels.triton_flash import flash_prefill
    v_dim, per_block = v_dim or head_dim, block_size or length

    def side(width):
        codes = _empty(2 * length // per_block, *((kv_heads, per_block) if order == "head" else (per_block, kv_heads)),
                       width, dtype=dtype)
        return Stored(codes if order == "head" else codes.transpose(1, 2), dtype, width)

    for config in candidates(dtype, max(head_dim, v_dim), divmod(arch, 10), bool(block_size))[which]:
        flash_prefill(_empty(2 * length, q_heads, head_dim, dtype=dtype), side(head_dim), side(v_dim),
                      _empty(2, length // per_block, dtype="int32"), (length, length), (length, length), window=window,
                      softcap=softcap, out_TQE=_empty(2 * length, q_heads, v_dim, dtype=dtype),
                      lse_TQ=_empty(2 * length, q_heads, dtype="float32"), config=config)


def decode(arch: int, *, kv_format="bf16", block_size=16, kv_len=8192, splits=None, which=slice(1), config=None,
           odd_rows=False, **shape) -> None:
    """A decode step of 16 sequences on a cache in that format; which: of the configurations, or another config.

    odd_rows: K's rows begin anywhere, not at multiples of 16 bytes.
    """
    from kvlab.attention._stored import kind_of, stored_sides
    from kvlab.kernels import triton_decode
    from kvlab.kv.cache import KVCache
    from kvlab.kv.formats import kv_format as named
    from kvlab.shapes import AttentionShape
    triton_decode.multiprocessors = lambda device: 132
    if splits:
        triton_decode.splits = lambda *_: splits
    triton_decode._native_fp8 = lambda device: arch >= 89
    heads = AttentionShape(**{**dict(num_q_heads=32, num_kv_heads=8, head_dim=128), **shape})
    per_sequence = kv_len // block_size
    cache = KVCache(heads, named(kv_format), 16 * per_sequence + 1, block_size, device="meta")
    k, v = stored_sides(cache)
    sides = [(kind_of(codec), width) for codec, width in cache.format.sides(heads)]
    if odd_rows:
        *rest, width = k.codes.shape
        k = k._replace(codes=_empty(*rest, width + 1)[..., :width])
    chosen = (config,) if config else triton_decode.candidates(heads.group_ratio, sides, 2)[which]
    for config in chosen:
        triton_decode.decode(
            _empty(16, heads.num_q_heads, heads.head_dim), k, v, _empty(16, per_sequence, dtype="int32"),
            (kv_len - (heads.window or kv_len),) * 16, (kv_len,) * 16, softcap=heads.softcap,
            out_BQE=_empty(16, heads.num_q_heads, heads.v_dim), config=config,
            workspace=lambda name, *size, dtype: _empty(*size, dtype=str(dtype).removeprefix("torch.")))


def growing(arch: int) -> None:
    """Steps of two lengths: blocks and splits are multiples of 16, and are none."""
    for kv_len, splits in ((8192, 16), (8208, 15)):
        decode(arch, kv_len=kv_len, splits=splits)


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
    **{f"prefill bf16 {width}": partial(prefill, head_dim=width) for width in (64, 80, 96, 112, 256)},
    "prefill bf16 192/128": partial(prefill, head_dim=192, v_dim=128),
    "prefill bf16 paged": partial(prefill, block_size=16, order="token"),
    "prefill bf16 blocks of 64": partial(prefill, block_size=64),
    "prefill bf16 window softcap": partial(prefill, window=1024, softcap=30.0),
    "prefill fp16": partial(prefill, dtype="fp16"),
    "prefill fp32": partial(prefill, dtype="fp32"),
    "decode bf16": decode,
    **{f"decode {name}": partial(decode, kv_format=name)
       for name in ("int8/token", "fp8_e4m3", "fp8_e5m2", "int4/token/g32", "fp16")},
    "decode bf16 blocks of 64": partial(decode, block_size=64),
    "decode int8/token blocks of 64": partial(decode, kv_format="int8/token", block_size=64),
    **{f"decode {name} contiguous": partial(decode, kv_format=name, block_size=8192)
       for name in ("bf16", "int8/token", "int4/token/g32")},
    "decode bf16 window softcap": partial(decode, window=1024, softcap=30.0),
    "decode latent": partial(decode, block_size=64, **LATENT),
}
LAUNCHES |= {f"{name}, not by default": partial(LAUNCHES[name], which=slice(1, None))              # but by tuning
             for name in ("prefill bf16", "prefill bf16 64", "prefill bf16 256", "prefill bf16 paged", "decode bf16",
                          "decode int8/token", "decode fp8_e4m3", "decode int4/token/g32", "decode latent")}
LAUNCHES |= {
    "growing": growing,
    "broken: mixed product": mixed_product,
    "broken: spilling": spilling,
    "broken: narrow loads": narrow_loads,
    "decode bf16, broken: one stage": partial(decode, config=Config(16, 64, 4, 1)),
    "decode bf16, broken: small tile": partial(decode, config=Config(16, 16, 4, 3)),
    "decode bf16, broken: large tile": partial(decode, config=Config(16, 64, 8, 5)),
    "decode bf16, broken: odd rows": partial(decode, odd_rows=True),
}

if __name__ == "__main__":                                          # compiling.py [folder of another Triton] name …
    folder = sys.argv.pop(1) if sys.argv[1:] and Path(sys.argv[1]).is_dir() else None
    asked = [(name, arch) for name in sys.argv[1:] or LAUNCHES for arch in SHARED_BYTES]
    for which, facts in compiled(asked, folder).items():
        print(*which, *([facts] if isinstance(facts, str) else facts), sep="\n    ")
