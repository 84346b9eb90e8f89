"""data/gpus.csv builds every GPUSpec in base units, data/gpu_formats.csv what they multiply; unknown stays unknown."""
import pytest

from kvlab.catalog import rows
from kvlab.catalog.gpus import WORDS, format_kinds, format_support, format_target, gpu, gpus

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


@pytest.mark.parametrize("name, found", [
    ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("NVIDIA A100-SXM4-80GB", "A100 SXM4 80GB"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell Server"),
    ("NVIDIA H200", "H200 SXM 141GB"),
    ("NVIDIA H100 80GB HBM3", "H100 SXM5 80GB"), ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
    ("RTXPRO6000", "RTX PRO 6000 Blackwell Server"), ("rtx4090", "RTX 4090"), ("Tesla T4", "T4")])
def test_names_that_drivers_and_folders_use(name, found):
    assert gpu(name).name == found


def test_what_a_driver_calls_a_card_is_never_another_card():
    for spec in gpus().values():
        if spec.vendor == "NVIDIA":
            try:
                assert gpu(f"NVIDIA {spec.name}") == spec
            except KeyError as error:
                assert "could be any of" in str(error)
    for name in ("", "6000", "NVIDIA"):
        with pytest.raises(KeyError):
            gpu(name)


def test_an_ambiguous_beginning_lists_what_it_could_be():
    with pytest.raises(KeyError, match="could be any of: H100 PCIe 80GB, H100 SXM5 80GB, H100 NVL 94GB"):
        gpu("h100")


def test_unknown_accelerator_names_a_near_one():
    with pytest.raises(KeyError, match="Did you mean 'RTX 4090'"):
        gpu("RTX 4091")


def test_a_spec_can_be_a_key():
    assert {gpu("T4"): 1}[gpu("t4")] == 1


FACTS = rows("gpu_formats.csv")


def test_the_table_of_formats_says_one_thing_about_each_target_and_kind():
    pairs = [(target, kind) for row in FACTS for target in row["targets"].split(";")
             for kind in row["kinds"].split(";")]
    assert len(pairs) == len(set(pairs)), sorted(pair for pair in pairs if pairs.count(pair) > 1)
    known = {format_target(spec) for spec in gpus().values()} | {"*"}
    assert {target for target, _ in pairs} <= known, "a target that no accelerator of the catalogue has"
    for row in FACTS:
        assert row["word"] in WORDS and row["why"] and not row["why"].endswith(".")
        assert bool(row["product"]) == (row["word"] in ("native", "storage-only")), row
        assert row["source"] or row["word"] == "unknown", "what is not sourced is unknown"


@pytest.mark.parametrize("target", ["7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "gfx90a",
                                    "gfx942", "gfx950"])
def test_a_line_stands_for_every_kind_on_every_generation_of_gpus(target):
    for kind in format_kinds():
        assert "no line" not in format_support(target, kind).why, kind


@pytest.mark.parametrize("target, fmt, word", [
    ("V100 SXM2 32GB", "bf16", "storage-only"), ("V100 SXM2 32GB", "fp16", "native"), ("T4", "int8/token", "native"),
    ("A100 SXM4 80GB", "fp8_e4m3/token", "storage-only"), ("L4", "fp8_e4m3", "native"), ("h200", "fp8_e5m2", "native"),
    ("A100 SXM4 80GB", "int4/token/g32", "native"), ("h200", "int4/token/g32", "storage-only"),
    ("h200", "kivi4/g32/r128", "storage-only"), ("h200", "nvfp4", "storage-only"), ("8.0", "nvfp4", "unsupported"),
    ("B200", "nvfp4", "native"), ("RTX 5090", "mxfp4", "native"), ("B300", "int8", "native"),
    ("MI300X", "fp8_e4m3", "storage-only"), ("MI355X", "fp8_e4m3", "native"), ("MI300X", "fp32", "native"),
    ("CPU server Xeon", "int8/token", "native"), ("CPU desktop", "bf16", "storage-only"), ("CPU server EPYC", "bf16",
    "native"), ("h200", "q4_0", "unknown"), ("Apple M4 Max", "bf16", "unknown"), ("h200", "int2/token/g32",
    "storage-only")])
def test_known_generations_and_kinds(target, fmt, word):
    assert format_support(target, fmt).word == word


def test_the_articles_fp8_from_ampere_on_is_wrong_by_one_generation():
    ampere, ada = format_support(gpu("A100 SXM4 80GB"), "fp8_e4m3"), format_support(gpu("L40S"), "fp8_e4m3")
    assert (ampere.word, ada.word) == ("storage-only", "native") and "8.9" in ampere.why and "fp16" in ampere.product


def test_amds_cdna3_multiplies_another_fp8_than_the_one_that_is_stored():
    found = format_support("gfx942", "fp8_e4m3/token")
    assert "FNUZ" in found.why and "240" in found.why and found.source


def test_of_k_and_v_stored_apart_the_weaker_side_counts():
    assert format_support("9.0", "bf16+int4/token/g32").kind == "int4"
    assert format_support("9.0", "bf16+int4/token/g32").word == "storage-only"
    assert format_support("9.0", "bf16+fp8_e4m3").word == "native"


def test_an_unknown_kind_or_accelerator_is_refused_by_name_and_an_unsourced_one_is_unknown():
    with pytest.raises(KeyError, match="no kind of code named 'fp8'. Did you mean 'fp8_e4m3'"):
        format_support("9.0", "fp8/token")
    with pytest.raises(KeyError, match="no gpu named 'H300'"):
        format_support("H300", "bf16")
    found = format_support("CPU server Grace", "bf16")
    assert found.word == "unknown" and "no line about bf16 on Neoverse V2" in found.why


def test_the_same_letters_and_digits_name_the_one_even_where_a_longer_name_begins_so():
    assert gpu("apple-m1").name == gpu("AppleM1").name == "Apple M1"
    assert gpu("H100-SXM5-80GB").name == "H100 SXM5 80GB"
