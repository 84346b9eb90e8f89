"""What Triton makes of kvlab's kernels for GPUs that are not here: memory, registers, loads and products.

`make check-all` (KVLAB_CHECK_ALL=1) compiles everything for every architecture; KVLAB_TRITON names a folder with a
second Triton, the oldest that kvlab allows, and the same is asked of it.
"""
import os
from pathlib import Path

import compiling
import pytest
from compiling import SHARED_BYTES, Facts

from kvlab.libraries import library

ALL = os.environ.get("KVLAB_CHECK_ALL") == "1"
OTHER = os.environ.get("KVLAB_TRITON")
SHIPPED = [name for name in compiling.LAUNCHES if not name.startswith("broken")]
SOME = ["prefill bf16", "prefill bf16 paged", "decode bf16", "decode int8/token", "decode fp8_e4m3",
        "decode int4/token/g32", "decode latent"]
CASES = [(name, arch) for name in (SHIPPED if ALL else SOME) for arch in SHARED_BYTES]
OTHER_CASES = CASES if ALL else [(name, 90) for name in SOME]
# bytes of a thread's stack that stand in for registers: a handful of accesses outside the inner loop
SPILLED = {("prefill bf16 256", 100): 16}

BROKEN = {"broken: mixed product": "Unsupported rhs dtype fp8", "broken: spilling": "spills",
          "broken: narrow loads": "loads nothing by 16 bytes"}


def complaints(name: str, arch: int, facts: list[Facts] | str) -> list[str]:
    """What is wrong with the kernels of a launch, in words; the first is the one that does the work."""
    if isinstance(facts, str):
        return [facts]
    found, bound = [], SPILLED.get((name, arch), 0)
    for kernel in facts:
        if kernel.shared > SHARED_BYTES[arch]:
            found.append(f"{kernel.kernel} takes {kernel.shared} bytes of shared memory of {SHARED_BYTES[arch]}")
        if kernel.stack > bound or kernel.local and not bound:
            found.append(f"{kernel.kernel} spills: {kernel.stack} bytes of stack, {kernel.local} accesses")
    main = facts[0]
    if not main.wide_loads:
        found.append(f"{main.kernel} loads nothing by 16 bytes")
    units = main.mma + main.wgmma + main.tcgen05
    if name.startswith("prefill"):                      # long tiles; those of a decode step are too flat for the newest
        units = {80: main.mma, 90: main.wgmma, 100: main.tcgen05}[arch]
    if not units and "fp32" not in name:                # no unit multiplies fp32 without rounding it
        found.append(f"{main.kernel} does not use the matrix units it should")
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
