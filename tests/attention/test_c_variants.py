"""The variants in C: what they refuse, tiles of any size, and formulas against counts made by hand and by brute force.

That they agree with the oracle on every cell is in test_variants.py; that a simulator agrees with the formulas, in
tests/probes/test_callgrind.py.
"""
from dataclasses import replace

import pytest
import torch

from kvlab.attention import Comparison, VariantRef, ideal_traffic, least_cost, reference, trial, useful_flops
from kvlab.attention._c_kernel import c_why_not, library
from kvlab.attention._matrix import WORKLOADS
from kvlab.attention.c_flash import CFlash
from kvlab.kernels import compiled
from kvlab.kv.cache import Layout
from kvlab.probes import measure
from kvlab.probes.kernel_error import KernelError
from kvlab.shapes import AttentionShape, Workload

SHAPE = AttentionShape(8, 2, 16)
DECODE = Workload.decode(SHAPE, kv_len=100)
NAMES = ("c_naive", "c_flash", "c_decode")


@pytest.fixture
def built():
    if why := c_why_not(trial("c_naive", DECODE)):
        pytest.skip(why)


def output(variant, workload, **rest):
    """(its output, the oracle's)."""
    one = trial(variant, workload, **rest)
    (inputs,) = Comparison((one,)).inputs()[one.kv_format, one.layout]
    return one.prepare([inputs])[0](), reference(workload, inputs.q_BTQD, inputs.k, inputs.v)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("changed, why", [
    (dict(dtype="bf16", kv_format="bf16"), "fp32 only, and this is bf16 over bf16"),
    (dict(kv_format="int8/token"), "this is fp32 over int8/token"),
    (dict(layout=Layout(order="token")), "head order only"),
    (dict(layout=Layout(16)), "contiguous caches only"),
    (dict(device="cuda"), "run on a CPU"),
    (dict(threads=2), "one thread, and this trial has 2"),
    (dict(workload=replace(DECODE, shape=replace(SHAPE, softcap=5.0))), "no soft-capping"),
])
def test_what_it_cannot_compute_is_refused_in_words(name, changed, why):
    one = trial(name, **{"workload": DECODE, **changed})
    assert why in one.variant.load().why_not(one)


def test_several_query_tokens_are_no_decode_step(built):
    one = trial("c_decode", Workload(SHAPE, (1, 2), (30, 40)))
    assert "one query token per sequence; use c_flash" in one.why_not()
    assert trial("c_flash", one.workload).why_not() is None


@pytest.mark.parametrize("name", NAMES)
def test_without_a_compiler_it_says_so(name, tmp_path, monkeypatch):
    compiled.compiler.cache_clear()
    library.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C compiler answers here" in trial(name, DECODE).why_not()
    monkeypatch.undo()
    compiled.compiler.cache_clear()


@pytest.mark.parametrize("tiles", [(1, 1), (3, 5), (7, 16), (1000, 1000)])
@pytest.mark.parametrize("about", ["decode, window", "decode, absorbed MLA", "prefill after a cache", "prefill, window",
                                   "mixed batch"])
def test_c_flash_gives_the_same_with_tiles_of_any_size(built, about, tiles):
    got, exact = output(CFlash(*tiles), WORKLOADS[about])
    assert float((got.double() - exact).norm() / exact.norm()) < 1e-6


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ratio", [1, 4, 8])
def test_scores_that_would_overflow_an_exponential_do_not(built, name, ratio):
    one = trial(name, Workload.decode(AttentionShape(8, 8 // ratio, 16), kv_len=70), data="outlier")
    (inputs,) = Comparison((one,)).inputs()[one.kv_format, one.layout]
    inputs.q_TQD.mul_(100)
    got, exact = one.prepare([inputs])[0](), reference(one.workload, inputs.q_BTQD, inputs.k, inputs.v)
    assert float((got.double() - exact).norm() / exact.norm()) < 1e-4
    assert float((inputs.q_BTQD[0].double() @ inputs.k[0][:, 0].double().T).abs().max() / 4) > 1000


def test_loading_the_kernels_leaves_small_numbers_small(built):
    """A library linked with -ffast-math makes the whole process round them to 0."""
    library()
    assert float(torch.tensor([1e-40]) * 0.5) > 0


def test_a_flash_with_tiles_of_nothing_is_refused():
    with pytest.raises(ValueError, match="q_tile=0"):
        CFlash(q_tile=0)
    assert VariantRef.of(CFlash(q_tile=8)).label == "c_flash(q_tile=8)"


def cost_of(variant, workload, cache_bytes=0):
    one = trial(variant, workload)
    return one.variant.load().cost(one, cache_bytes)


def test_c_decode_needs_the_ideal_and_no_more():
    assert cost_of("c_decode", DECODE) == ideal_traffic(DECODE, trial("c_decode", DECODE).format, 4)


def test_c_naive_walks_k_and_v_per_query_row_and_its_matrix_twice_each_way():
    workload = Workload(replace(SHAPE, window=30), (5, 1), (90, 40))
    least, tokens, q_lens = least_cost(trial("c_naive", workload)), (34, 30), (5, 1)     # 85 … 89 see 56 … 89
    kv, scores = [n * 32 * 4 for n in tokens], [n * q * 4 for n, q in zip(tokens, q_lens, strict=True)]
    walks = sum(8 * q * n for q, n in zip(q_lens, kv, strict=True)) - 2 * sum(kv)        # least_cost has one per group
    cost = cost_of("c_naive", workload)
    assert cost[:2] == (least.read_bytes + walks + 2 * 8 * sum(scores), least.write_bytes + 2 * 8 * sum(scores))
    assert cost.executed_flops == 2 * 32 * 8 * (34 * 5 + 30)


def test_c_naive_finds_again_what_fits_with_all_that_is_touched_in_between():
    workload = Workload.prefill(SHAPE, q_len=40, kv_len=100)
    least, row, k = least_cost(trial("c_naive", workload)), 100 * 4, 100 * 16 * 4        # V is as large as K
    scores, heads = 40 * row, 8
    moved = {cache: cost_of("c_naive", workload, cache) for cache in (
        k + row - 1, k + row, scores + k - 1, scores + k, scores + 2 * k - 1, scores + 2 * k)}
    extra = [(cost.read_bytes - least.read_bytes, cost.write_bytes - least.write_bytes) for cost in moved.values()]
    per_group, matrix = (heads - 2) * 2 * k, 2 * heads * scores
    assert extra == [((heads * 40 - 2) * 2 * k + matrix, matrix), (per_group + matrix, matrix),
                     (per_group + matrix, matrix), (per_group, heads * scores), (per_group, heads * scores),
                     (0, scores)]


@pytest.mark.parametrize("window", [None, 1, 9, 25, 200])
@pytest.mark.parametrize("q_tile", [1, 4, 7, 64])
def test_c_flash_reads_again_what_a_tile_shares_with_the_one_before(window, q_tile):
    """Tokens of each tile, counted one by one, less each token once."""
    workload = Workload(replace(SHAPE, window=window), (21, 1), (60, 33))
    again = 0
    for q_len, kv_len in zip(workload.q_lens, workload.kv_lens, strict=True):
        seen = [{s for t in range(start, min(start + q_tile, q_len)) for s in range(kv_len)
                 if 0 <= kv_len - q_len + t - s < (window or kv_len)} for start in range(0, q_len, q_tile)]
        again += sum(map(len, seen)) - len(set().union(*seen))
    cost, least = cost_of(CFlash(q_tile=q_tile, kv_tile=60), workload), least_cost(trial("c_flash", workload))
    assert cost.read_bytes - least.read_bytes == again * 2 * 32 * 4
    assert cost.write_bytes == least.write_bytes and cost.executed_flops == useful_flops(workload)


def test_c_flash_reads_nothing_again_that_stayed_beside_two_tiles_of_queries():
    """Tiles of 4 of 12 queries see 4, 8 and 12 tokens; a tile's queries and outputs are 4 · 4 heads of 128 bytes."""
    workload, token, tile = Workload.prefill(SHAPE, q_len=12), 32 * 4, 4 * 4 * 128
    least = least_cost(trial("c_flash", workload)).read_bytes
    again = [cost_of(CFlash(q_tile=4, kv_tile=4), workload, 2 * tile + n * token).read_bytes - least for n in (3, 4, 8)]
    assert again == [2 * (4 + 8) * token, 2 * 8 * token, 0]


def test_c_flash_moves_queries_and_outputs_per_tile_of_k_and_v_that_they_do_not_fit_beside():
    workload = Workload.prefill(SHAPE, q_len=4, kv_len=10)            # one tile of queries, tiles of 4, 4 and 2 tokens
    least, half = least_cost(trial("c_flash", workload)), 4 * 4 * 16 * 4
    fits = 2 * half + 4 * 32 * 4
    assert cost_of(CFlash(q_tile=4, kv_tile=4), workload, fits) == least
    assert cost_of(CFlash(q_tile=4, kv_tile=4), workload, fits - 1) == least.plus(read=2 * 2 * 2 * half,
                                                                                  write=2 * 2 * half)


@pytest.mark.parametrize("name, workload", [
    *((name, Workload.decode(AttentionShape(8, 1, 64), kv_len=16384)) for name in NAMES),
    *((name, Workload.prefill(AttentionShape(8, 2, 64), q_len=64, kv_len=2048)) for name in NAMES[:2])])
def test_sums_over_many_tokens_pass_the_gate_with_room(built, name, workload):
    """fp32 sums of so many numbers in a row drift beyond the tolerance."""
    rows = {r["metric"]: r for r in measure(Comparison((trial(name, workload),)), [KernelError()])}
    assert rows["kernel_error"]["status"] == "ok"
    assert rows["kernel_error"]["value"] < 1e-6, "twenty rounding units; one after the other it is a hundred"
