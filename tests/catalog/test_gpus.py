"""data/gpus.csv builds every GPUSpec in base units; what is unknown stays None."""
import pytest

from kvlab.catalog import rows
from kvlab.catalog.gpus import gpu, gpus

ROWS = rows("gpus.csv")


def test_every_row_is_an_accelerator_with_a_source():
    assert list(gpus()) == [row["name"] for row in ROWS]
    assert len(gpus()) == 53
    assert all(spec.source and spec.fp8_support for spec in gpus().values())


def test_units_of_a_known_card():
    a100 = gpu("A100 SXM4 80GB")
    assert (a100.memory_bytes, a100.bandwidth, a100.l2_bytes) == (80 * 10**9, 2.039e12, 40 * 2**20)
    assert a100.flops == {"fp16": 312e12, "bf16": 312e12, "fp8": None, "int8": 624e12}
    assert (a100.compute_capability, a100.sm_count, a100.vendor) == ("8.0", 108, "NVIDIA")
    assert a100.fp8_support.startswith("none")
    assert gpu("MI300X").llc_bytes == 256 * 2**20


@pytest.mark.parametrize("name, ridge", [("A100 SXM4 80GB", 153.0), ("H100 SXM5 80GB", 295.2),
                                         ("H200 SXM 141GB", 206.0), ("H20", 37.0), ("Gaudi 3", 453.2)])
def test_ridge_points(name, ridge):
    assert gpu(name).ridge() == pytest.approx(ridge, abs=0.051)


def test_unknown_is_none_and_never_zero():
    laptop = gpu("CPU laptop 2ch DDR4-3200")
    assert laptop.l2_bytes is None and laptop.sm_count is None and laptop.compute_capability is None
    assert set(laptop.flops.values()) == {None}
    assert laptop.ridge() is None and gpu("T4").ridge("bf16") is None and gpu("T4").ridge("fp16") > 200
    for spec in gpus().values():
        assert 0 not in (spec.memory_bytes, spec.bandwidth, spec.l2_bytes, *spec.flops.values())


@pytest.mark.parametrize("name, found", [("h200", "H200 SXM 141GB"), ("l4", "L4"), ("h20", "H20"),
                                         ("a100 sxm4 80gb", "A100 SXM4 80GB")])
def test_names_in_any_case_and_unique_beginnings(name, found):
    assert gpu(name).name == found


def test_an_ambiguous_beginning_lists_what_it_could_be():
    with pytest.raises(KeyError, match="could be any of: H100 PCIe 80GB, H100 SXM5 80GB, H100 NVL 94GB"):
        gpu("h100")


def test_unknown_accelerator_names_a_near_one():
    with pytest.raises(KeyError, match="Did you mean 'RTX 4090'"):
        gpu("RTX 4091")


def test_a_spec_can_be_a_key():
    assert {gpu("T4"): 1}[gpu("t4")] == 1
