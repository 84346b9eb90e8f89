"""Every registered variant against the oracle, on every cell of the matrix; and what each promises beyond numbers."""
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.attention import Comparison, VariantRef, reference, trial, variants
from kvlab.attention._matrix import FORMATS, LAYOUTS, WORKLOADS, cells
from kvlab.attention.flash import Flash
from kvlab.attention.paged import Paged
from kvlab.kv.cache import Layout
from kvlab.probes import measure
from kvlab.probes.kernel_error import KernelError
from kvlab.shapes import AttentionShape, Workload

ALL = list(variants)
SHIPPED = {"flash", "naive", "naive_repeat", "paged", "sdpa", "sdpa_enable_gqa"}
CONTIGUOUS_ONLY = SHIPPED - {"paged"}
NO_SOFTCAP = {"paged", "sdpa", "sdpa_enable_gqa"}
PAGED = Layout(16, "random")


def judged(trials):
    """trial -> its kernel_error row. One comparison, so that the oracle is computed once per format."""
    trials = tuple(dict.fromkeys(trials))
    rows = measure(Comparison(trials), [KernelError()])
    by_id = {row["case_id"]: row for row in rows}
    assert len(by_id) == len(rows) == len(trials)
    return {t: by_id[t.case_id] for t in trials}


@cache
def matrix(workload, dtype="fp32"):
    """(variant, kv_format, layout) -> row, for every registered variant on one workload of the matrix."""
    trials = [c.trials[0] for name in ALL
              for about, c in cells(VariantRef.of(name), dtypes=(dtype,)) if about == workload]
    return {(t.variant.ref, t.kv_format, t.layout): row for t, row in judged(trials).items()}


def runnable(name, workload, **rest):
    """A trial of that variant in its own layout and its one copy of inputs; skips where it says that it cannot run."""
    one = trial(name, workload, **rest)
    if one.why_not():
        pytest.skip(one.why_not())
    return one, Comparison((one,)).inputs()[one.kv_format, one.layout][0]


def expected(one, inputs):
    """The oracle on what the cache holds now."""
    pairs = [inputs.cache.format.decode(inputs.cache.gather(table[:-(-n // inputs.cache.block_size)], n),
                                        one.workload.shape, one.torch_dtype)
             for table, n in zip(inputs.block_table.tolist(), inputs.kv_lens, strict=True)]
    return reference(one.workload, inputs.q_BTQD, [k for k, _ in pairs], [v for _, v in pairs])


def close(output, exact, tolerance=2e-6):
    return float((output.double() - exact).norm() / exact.norm()) < tolerance


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("name", ALL)
def test_agrees_with_the_oracle_or_says_why_not(name, workload):
    rows = {cell: row for cell, row in matrix(workload).items() if cell[0] == name}
    assert len(rows) == len(FORMATS) * (len(LAYOUTS) - (WORKLOADS[workload].shared_prefix == 0))
    for cell, row in rows.items():
        assert row["status"] in ("ok", "skipped"), (cell, row["error"])
        if row["status"] == "skipped":
            assert len(row["error"].split()) > 5, (cell, "a refusal is a sentence")
            assert row["value"] is None
        else:
            assert 0 <= row["value"] < 5e-6, cell                     # also without the probe's own tolerance
    assert name not in SHIPPED or workload == "soft-cap" or "ok" in {row["status"] for row in rows.values()}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("workload", ["decode, window", "mixed batch", "shared prefix", "decode, absorbed MLA"])
def test_agrees_with_the_oracle_in_half_precision(workload, dtype):
    statuses = [row["status"] for row in matrix(workload, dtype).values()]
    assert set(statuses) <= {"ok", "skipped"} and statuses.count("ok") >= 2 * len(FORMATS) * len(SHIPPED)
    assert all(row["value"] < 0.02 for row in matrix(workload, dtype).values() if row["status"] == "ok")


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_a_shipped_variant_refuses_what_it_must_and_nothing_else(name):
    refused = {(workload, cell[1], cell[2]): row["error"] for workload in WORKLOADS
               for cell, row in matrix(workload).items() if cell[0] == name and row["status"] == "skipped"}
    must = {(workload, fmt, layout) for workload in WORKLOADS for fmt in FORMATS for layout in LAYOUTS
            if (WORKLOADS[workload].shared_prefix or not layout.share_prefix)
            and ((name in CONTIGUOUS_ONLY and layout.block_size) or (name in NO_SOFTCAP and workload == "soft-cap"))}
    assert set(refused) == must
    for (_, _, layout), why in refused.items():
        assert ("reads contiguous caches only" if layout.block_size and name != "paged" else "no soft-capping") in why


def test_the_shipped_variants_are_all_registered():
    assert SHIPPED <= set(ALL)


@st.composite
def workloads(draw):
    kv_heads, head_dim, v_in_k = draw(st.integers(1, 3)), draw(st.integers(1, 20)), draw(st.booleans())
    shape = AttentionShape(kv_heads * draw(st.integers(1, 4)), kv_heads, head_dim,
                           draw(st.none() | st.integers(1, head_dim if v_in_k else 20)), v_in_k,
                           draw(st.none() | st.integers(1, 40)), draw(st.none() | st.just(5.0)))
    lengths = draw(st.lists(st.integers(1, 20).flatmap(lambda q: st.tuples(st.just(q), st.integers(q, 60))),
                            min_size=1, max_size=3))
    if draw(st.booleans()):
        lengths = lengths[:1] * len(lengths)                          # the batched path
    return Workload(shape, *zip(*lengths, strict=True))


@settings(max_examples=40, deadline=None)
@given(workloads(), st.sampled_from(FORMATS), st.sampled_from(["head", "token"]), st.sampled_from([16, 32]))
def test_any_workload_agrees_with_the_oracle(workload, fmt, order, block_size):
    trials = [trial(name, workload, kv_format=fmt, layout=layout) for name in ALL
              for layout in (Layout(order=order), Layout(block_size, "random", order))]
    tiled = trial(Flash(q_tile=3, kv_tile=5), workload, kv_format=fmt, layout=Layout(order=order))
    rows = judged([*trials, tiled])
    for one, row in rows.items():
        assert row["status"] in ("ok", "skipped"), (one.variant.label, one.layout, row["error"])
    assert rows[tiled]["status"] == "ok"


BATCH = Workload(AttentionShape(4, 2, 16, window=25), (1, 3, 1), (40, 33, 7))


@pytest.mark.parametrize("fmt", ["fp32", "int8/block16"])
@pytest.mark.parametrize("name", ALL)
def test_reads_q_and_the_cache_when_called_and_keeps_nothing_derived(name, fmt):
    one, inputs = runnable(name, BATCH, kv_format=fmt)
    call = one.prepare([inputs])[0]
    first = call()
    assert close(first, expected(one, inputs))
    first.fill_(float("nan"))                                         # whoever hands the same tensor out again shows it
    inputs.q_TQD.copy_(torch.randn(inputs.q_TQD.shape, generator=torch.Generator().manual_seed(5)))
    second = call().clone()                                          # an output buffer of its own may be used again
    assert close(second, expected(one, inputs)), "q was not read again"
    other = Comparison((replace(one, seed=99),)).inputs()[one.kv_format, one.layout][0]
    for mine, theirs in zip(inputs.cache.k_arrays + inputs.cache.v_arrays,
                            other.cache.k_arrays + other.cache.v_arrays, strict=True):
        mine.copy_(theirs.flip(0) if fmt == "fp32" else theirs)
    third = call()
    assert close(third, expected(one, inputs)), "the cache was not read again"
    assert not close(third, second, 0.1)


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "int8/block16"])
@pytest.mark.parametrize("name", ALL)
def test_slots_beyond_kv_len_never_matter(name, fmt):
    one, inputs = runnable(name, BATCH, kv_format=fmt)
    call, cache = one.prepare([inputs])[0], inputs.cache
    before = call().clone()
    k_parts, v_parts = cache.format.components(cache.shape)
    used = [[set() for _ in range(cache.num_blocks)] for _ in k_parts + v_parts]
    for table, kv_len in zip(inputs.block_table.tolist(), inputs.kv_lens, strict=True):
        for token in range(kv_len):
            for rows, part in zip(used, k_parts + v_parts, strict=True):
                rows[table[token // cache.block_size]].add(token % cache.block_size // part.tokens)
    spoiled = 0
    for rows, array in zip(used, cache.by_head(cache.k_arrays) + cache.by_head(cache.v_arrays), strict=True):
        for block, kept in enumerate(rows):
            unused = [r for r in range(array.shape[2]) if r not in kept]
            array[block, :, unused] = -113
            spoiled += len(unused)
    assert spoiled > 0
    assert torch.equal(call(), before)


@pytest.mark.parametrize("layout", [Layout(16), PAGED, Layout(48, "random", "token"),
                                    Layout(16, "random", share_prefix=True)], ids=str)
@pytest.mark.parametrize("workload", [
    Workload(AttentionShape(8, 2, 32), (1, 17, 40), (90, 33, 200), shared_prefix=32),
    Workload.prefill(AttentionShape(8, 2, 32, window=30), batch_size=2, q_len=80),
    WORKLOADS["shared prefix"]], ids=["ragged", "prefill", "decode"])
def test_paged_gives_what_contiguous_gives(workload, layout):
    workload = replace(workload, shared_prefix=workload.shared_prefix or 16)
    pair = (trial("sdpa", workload), trial("paged", workload, layout=layout))
    inputs = Comparison(pair).inputs()
    contiguous, paged = (one.prepare(inputs[one.kv_format, one.layout])[0]() for one in pair)
    assert torch.allclose(contiguous, paged, rtol=0, atol=1e-6)


def test_a_shared_prefix_is_stored_once_and_read_by_all():
    workload = WORKLOADS["shared prefix"]
    one, inputs = runnable("paged", workload, layout=Layout(16, "random", share_prefix=True))
    table = inputs.block_table
    assert (table[:, :4] == table[0, :4]).all() and len(set(table[:, 4:].flatten().tolist())) == 3 * 3
    before = one.prepare([inputs])[0]()
    inputs.cache.v_arrays[0][table[0, 0]] += 1.0
    assert ((one.prepare([inputs])[0]() - before).abs().amax((1, 2)) > 1e-3).all()


def test_inputs_of_a_shared_prefix_agree_in_the_prefix_only():
    one = trial("naive", WORKLOADS["shared prefix"])
    inputs = Comparison((one,)).inputs()[one.kv_format, one.layout][0]
    for side in (inputs.k, inputs.v):
        assert torch.equal(side[0][:64], side[2][:64]) and not (side[0][64:] == side[2][64:]).any()


@pytest.mark.parametrize("tiles", [(1, 1), (7, 3), (64, 1000)])
@pytest.mark.parametrize("workload", ["prefill, window", "mixed batch", "soft-cap", "decode, window"])
def test_flash_gives_the_same_with_tiles_of_any_size(tiles, workload):
    one, inputs = runnable(Flash(*tiles), WORKLOADS[workload], layout=Layout())
    assert close(one.prepare([inputs])[0](), expected(one, inputs))


@pytest.mark.parametrize("name, workload, operators", [
    ("sdpa", "decode, GQA, batch", "_scaled_dot_product_flash_attention_for_cpu"),
    ("sdpa", "prefill, window", "_scaled_dot_product_flash_attention_for_cpu"),
    ("sdpa_enable_gqa", "decode, GQA, batch", "_scaled_dot_product_flash_attention_for_cpu"),
    ("paged", "decode, GQA, batch", "_scaled_dot_product_flash_attention_for_cpu"),
    ("sdpa", "decode, K wider than V", "bmm"),                        # torch falls back to its math path without a word
    ("sdpa_enable_gqa", "decode, K wider than V", "bmm"),
    ("naive", "decode, GQA, batch", "bmm"),
])
def test_the_note_names_the_operator_that_torch_dispatched(name, workload, operators):
    layout = Paged.default_layout if name == "paged" else Layout()
    assert matrix(workload)[name, "fp32", layout]["note"].endswith(f"; operators: {operators}")


def test_decoding_reads_each_kv_head_once_not_once_per_query_head():
    """The folded call hands torch one K per KV head; repeating heads would allocate group_ratio times as much."""
    from torch.nn import functional
    seen, original = [], functional.scaled_dot_product_attention

    def watched(q, k, v, **rule):
        seen.append((q.shape, k.shape, k.data_ptr()))
        return original(q, k, v, **rule)

    one, inputs = runnable("sdpa", WORKLOADS["decode, ratio 32"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "scaled_dot_product_attention", watched)
        one.prepare([inputs])[0]()
    assert seen == [((1, 1, 32, 64), (1, 1, 300, 64), inputs.cache.k_arrays[0].data_ptr())]


def test_the_gather_workspace_is_reused():
    one, inputs = runnable("paged", WORKLOADS["decode, ragged"])
    call, spaces = one.prepare([inputs])[0], []
    original = torch.index_select
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "index_select", lambda *a, out: spaces.append(out.data_ptr()) or original(*a, out=out))
        call()
        call()
    assert len(spaces) == 2 * 2 * 3 and len(set(spaces)) == 2         # K and V, three sequences, two calls


def test_a_window_keeps_blocks_before_it_from_being_gathered():
    workload = Workload.decode(AttentionShape(4, 2, 16, window=20), kv_len=100)
    one, inputs = runnable("paged", workload)
    rows = []
    original = torch.index_select
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "index_select", lambda a, d, i, out: rows.append(len(i)) or original(a, d, i, out=out))
        one.prepare([inputs])[0]()
    assert rows == [2 * 2] * 2                                      # tokens 80 … 99 lie in blocks 5 and 6 of two heads
