"""What Triton makes of kvlab's kernels for GPUs that are not here: memory, registers, loads and products.

`make check-all` (KVLAB_CHECK_ALL=1) compiles everything for every architecture; KVLAB_TRITON names a folder with a
second Triton, the oldest that kvlab allows, and the same is asked of it.
"""
import os
from pathlib import Path

import compiling
import pytest
from compiling import SHARED_BYTES, Facts

from kvlab.kernels.decode_tiles import RESIDENT
from kvlab.libraries import library

ALL = os.environ.get("KVLAB_CHECK_ALL") == "1"
OTHER = os.environ.get("KVLAB_TRITON")
SHIPPED = [name for name in compiling.LAUNCHES if "broken" not in name]
SOME = [("prefill bf16", 80), ("prefill bf16", 90), ("prefill bf16", 100), ("prefill bf16 paged", 90),
        ("decode bf16", 80), ("decode bf16", 100), ("decode int8/token", 90), ("decode fp8_e4m3", 80),
        ("decode fp8_e4m3", 90), ("decode fp8_e5m2", 90), ("decode fp16", 90), ("decode int4/token/g32", 90),
        ("decode bf16 contiguous", 90), ("decode bf16 blocks of 64", 90), ("decode bf16 window softcap", 90),
        ("decode latent", 90), ("growing", 90)]
CASES = [(name, arch) for name in SHIPPED for arch in SHARED_BYTES] if ALL else SOME
OTHER_CASES = CASES if ALL else [(name, 90) for name in
                                 ("prefill bf16", "prefill bf16 paged", "decode bf16 contiguous", "decode int8/token",
                                  "decode fp8_e4m3", "decode latent", "growing")]
# bytes of a thread's stack that stand in for registers: a handful of accesses outside the inner loop
SPILLED = {("prefill bf16 256", 100): 16, ("prefill bf16, not by default", 100): 144,
           ("prefill bf16 paged, not by default", 90): 72, ("prefill bf16 paged, not by default", 100): 192,
           ("decode int8/token, not by default", 80): 8}
# KiB of K and V that a program copies straight to shared memory, by all instructions of its text together: as measured
# for the default configurations, on sm_80 and on newer ones. Fewer: a smaller tile, fewer stages or narrower loads.
AHEAD = {"prefill": (96, 192), "prefill bf16 80": (48, 120), "prefill bf16 96": (72, 144),
         "prefill bf16 192/128": (80, 160), "prefill bf16 256": (128, 128), "prefill fp32": (0, 0),
         "decode bf16": (96, 96), "decode fp16": (96, 96), "decode int8": (48, 48), "decode fp8": (48, 48),
         "decode int4": (24, 24), "decode latent": (108, 108), "growing": (96, 96)}
RESIDENT_BYTES, REGISTERS = 227 * 1024, 65536           # of a multiprocessor of sm_90 and sm_100, for all its programs

BROKEN = {"broken: mixed product": "Unsupported rhs dtype fp8", "broken: spilling": "spills",
          "broken: narrow loads": "loads nothing by 16 bytes", "decode bf16, broken: one stage": "0 KiB ahead",
          "decode bf16, broken: small tile": "24 KiB ahead", "decode bf16, broken: large tile": "leaves no room",
          "decode bf16, broken: odd rows": "48 KiB ahead"}


def complaints(name: str, arch: int, facts: list[Facts] | str) -> list[str]:
    """What is wrong with the kernels of a launch, in words."""
    if isinstance(facts, str):
        return [facts]
    found, bound, by_default = [], SPILLED.get((name, arch), 0), "not by default" not in name
    for kernel in facts:
        if kernel.shared > SHARED_BYTES[arch]:
            found.append(f"{kernel.kernel} takes {kernel.shared} bytes of shared memory of {SHARED_BYTES[arch]}")
        if kernel.stack > bound or kernel.local and not bound:
            found.append(f"{kernel.kernel} spills: {kernel.stack} bytes of stack, {kernel.local} accesses")
    main = [kernel for kernel in facts if kernel.kernel != "combine_kernel"]
    if by_default and len(main) != 1:
        found.append(f"{len(main)} kernels where one was meant")
    for kernel in main:
        threads = 32 * kernel.warps
        if not kernel.copies + kernel.wide_loads:
            found.append(f"{kernel.kernel} loads nothing by 16 bytes")
        if kernel.conversions:
            found.append(f"{kernel.kernel} converts {kernel.conversions} numbers one at a time")
        units = kernel.mma + kernel.wgmma + kernel.tcgen05
        if name.startswith("prefill"):                  # long tiles; those of a decode step are too flat for the newest
            units = {80: kernel.mma, 90: kernel.wgmma, 100: kernel.tcgen05}[arch]
        if not units and "fp32" not in name:            # no unit multiplies fp32 without rounding it
            found.append(f"{kernel.kernel} does not use the matrix units it should")
        if not by_default or name.startswith("broken"):
            continue
        ahead = (16 * kernel.copies + 8 * kernel.narrow_copies) * threads / 1024
        wanted = AHEAD[max((start for start in AHEAD if name.startswith(start)), key=len)][arch > 80]
        if ahead < wanted:
            found.append(f"{kernel.kernel} loads {ahead:.0f} KiB ahead, and {wanted} were meant")
        if not name.startswith("prefill") and (
                arch > 80 and RESIDENT * (kernel.shared + 1024) > RESIDENT_BYTES        # 1 KiB of each is the system's
                or RESIDENT * kernel.registers * threads > REGISTERS):
            found.append(f"{kernel.kernel} leaves no room for {RESIDENT} programs on a multiprocessor: {kernel.shared} "
                         f"bytes of shared memory, {kernel.registers} registers of {threads} threads")
    return found


@pytest.fixture(scope="module")
def found():
    if why := library("triton").why_not:
        pytest.skip(f"{why}; install kvlab[gpu] on Linux")
    return compiling.compiled([*CASES, *((name, 90) for name in BROKEN)])


@pytest.fixture(scope="module")
def found_by_the_other():
    if not OTHER:
        pytest.skip("KVLAB_TRITON names no folder with a second Triton (pip install --target FOLDER --no-deps triton)")
    return compiling.compiled(OTHER_CASES, OTHER)


@pytest.mark.parametrize(("name", "arch"), CASES)
def test_a_launch_compiles_to_what_is_meant(found, name, arch):
    assert complaints(name, arch, found[name, arch]) == []


@pytest.mark.parametrize(("name", "arch"), OTHER_CASES)
def test_it_does_so_under_another_triton_too(found_by_the_other, name, arch):
    facts = found_by_the_other[name, arch]
    assert complaints(name, arch, facts) == []
    assert list(Path(OTHER).glob(f"triton-{facts[0].triton}.dist-info")), "another Triton compiled than was asked for"


@pytest.mark.parametrize("name", BROKEN)
def test_a_mistake_turns_this_red(found, name):
    assert any(BROKEN[name] in complaint for complaint in complaints(name, 90, found[name, 90]))
