"""Every registered variant against the oracle, on every cell of the matrix; and what each promises beyond numbers."""
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.attention import Comparison, VariantRef, reference, trial, variants
from kvlab.attention._matrix import FORMATS, LAYOUTS, MORE_FORMATS, WITH_MORE_FORMATS, WORKLOADS, cells
from kvlab.attention.flash import Flash
from kvlab.attention.paged_gather import PagedGather
from kvlab.kv.cache import Layout
from kvlab.kv.formats import format_names
from kvlab.probes import measure
from kvlab.probes.format_error import FormatError
from kvlab.probes.kernel_error import KernelError
from kvlab.shapes import AttentionShape, Workload

ALL = [name for name in variants if not getattr(variants[name], "compiles", False)]     # those: test_flex.py
SHIPPED = {"flash", "naive", "naive_repeat", "paged", "paged_gather", "sdpa", "sdpa_enable_gqa"}
PAGES = {"paged", "paged_gather"}
CONTIGUOUS_ONLY = SHIPPED - PAGES
NO_SOFTCAP = {"paged", "paged_gather", "sdpa", "sdpa_enable_gqa"}
PAGED = Layout(16, "random")


def formats_of(workload):
    return FORMATS + (MORE_FORMATS if workload in WITH_MORE_FORMATS else ())


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
    pairs = [inputs.cache.format.decode(inputs.cache.gather(table[:-(-n // inputs.cache.block_size)], n, b),
                                        one.workload.shape, one.torch_dtype)
             for b, (table, n) in enumerate(zip(inputs.block_table.tolist(), inputs.kv_lens, strict=True))]
    return reference(one.workload, inputs.q_BTQD, [k for k, _ in pairs], [v for _, v in pairs])


def close(output, exact, tolerance=2e-6):
    return float((output.double() - exact).norm() / exact.norm()) < tolerance


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("name", ALL)
def test_agrees_with_the_oracle_or_says_why_not(name, workload):
    rows = {cell: row for cell, row in matrix(workload).items() if cell[0] == name}
    assert len(rows) == len(formats_of(workload)) * (len(LAYOUTS) - (WORKLOADS[workload].shared_prefix == 0))
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
    must = {(workload, fmt, layout) for workload in WORKLOADS for fmt in formats_of(workload) for layout in LAYOUTS
            if (WORKLOADS[workload].shared_prefix or not layout.share_prefix)
            and ((name in CONTIGUOUS_ONLY and layout.block_size) or (name in NO_SOFTCAP and workload == "soft-cap"))}
    assert set(refused) == must
    for (_, _, layout), why in refused.items():
        assert ("reads contiguous caches only" if layout.block_size and name not in PAGES else "no soft-capping") in why


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
@given(workloads(), st.sampled_from((*FORMATS, *MORE_FORMATS, "kivi2/g8/r8", "bf16+kivi4/g16/r32",
                                     "kivi4/g8/r24+int8/token", "kivi2/g16/r48+kivi4/g8/r8", "int4/channel/g16",
                                     "fp8_e5m2/head")),
       st.sampled_from(["head", "token"]), st.sampled_from([16, 32, 48]))
def test_any_workload_agrees_with_the_oracle(workload, fmt, order, block_size):
    trials = [trial(name, workload, kv_format=fmt, layout=layout) for name in ALL
              for layout in (Layout(order=order), Layout(block_size, "random", order))]
    tiled = trial(Flash(q_tile=3, kv_tile=5), workload, kv_format=fmt, layout=Layout(order=order))
    rows = judged([*trials, tiled])
    for one, row in rows.items():
        assert row["status"] in ("ok", "skipped"), (one.variant.label, one.layout, row["error"])
    assert rows[tiled]["status"] == "ok"


BATCH = Workload(AttentionShape(4, 2, 16, window=25), (1, 3, 1), (40, 33, 7))


@pytest.mark.parametrize("fmt", ["fp32", "int8/block16", "kivi4/g16/r32", "bf16+kivi4/g16/r16"])
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
    for mine, theirs in zip(inputs.cache.arrays, other.cache.arrays, strict=True):
        mine.copy_(theirs.flip(0) if fmt == "fp32" else theirs)
    third = call()
    assert close(third, expected(one, inputs)), "the cache was not read again"
    assert not close(third, second, 0.1)


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "int8/block16", "fp8_e4m3", "kivi4/g16/r32", "bf16+kivi4/g16/r32",
                                 "kivi4/g16/r16+fp32"])
@pytest.mark.parametrize("name", ALL)
def test_slots_beyond_kv_len_never_matter(name, fmt):
    one, inputs = runnable(name, BATCH, kv_format=fmt)
    call, cache = one.prepare([inputs])[0], inputs.cache
    before = call().clone()
    spoiled, stale = 0, {torch.uint8: 126, torch.int8: -113}          # 126 is the largest number of e4m3
    tables = inputs.block_table.tolist()
    for (codec, width), arrays, tail in zip(cache.format.sides(cache.shape), (cache.k_arrays, cache.v_arrays),
                                            (cache.k_tail, cache.v_tail), strict=True):
        for b, kv_len in enumerate(inputs.kv_lens if tail is not None else ()):
            tail[b, :, kv_len - codec.settled(kv_len):] = -113
        for array, part in zip(cache.by_head(arrays), codec.components(width), strict=True):
            used = {(table[token // cache.block_size], token % cache.block_size // part.tokens)
                    for table, kv_len in zip(tables, inputs.kv_lens, strict=True)
                    for token in range(codec.settled(kv_len))}
            for block in range(cache.num_blocks):
                unused = [row for row in range(array.shape[2]) if (block, row) not in used]
                array[block, :, unused] = stale.get(array.dtype, -113)
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
    ("paged_gather", "decode, GQA, batch", "_scaled_dot_product_flash_attention_for_cpu"),
    ("sdpa", "decode, K wider than V", "bmm"),                        # torch falls back to its math path without a word
    ("sdpa_enable_gqa", "decode, K wider than V", "bmm"),
    ("naive", "decode, GQA, batch", "bmm"),
])
def test_the_note_names_the_operator_that_torch_dispatched(name, workload, operators):
    layout = PagedGather.default_layout if name == "paged_gather" else Layout()
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
    one, inputs = runnable("paged_gather", WORKLOADS["decode, ragged"])
    call, spaces = one.prepare([inputs])[0], []
    original = torch.index_select
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "index_select", lambda *a, out: spaces.append(out.data_ptr()) or original(*a, out=out))
        call()
        call()
    assert len(spaces) == 2 * 2 * 3 and len(set(spaces)) == 2         # K and V, three sequences, two calls


def test_a_window_keeps_blocks_before_it_from_being_gathered():
    workload = Workload.decode(AttentionShape(4, 2, 16, window=20), kv_len=100)
    one, inputs = runnable("paged_gather", workload)
    rows = []
    original = torch.index_select
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "index_select", lambda a, d, i, out: rows.append(len(i)) or original(a, d, i, out=out))
        one.prepare([inputs])[0]()
    assert rows == [2 * 2] * 2                                      # tokens 80 … 99 lie in blocks 5 and 6 of two heads


def gathered_blocks(workload, fmt, layout):
    """How many blocks of each sequence `paged_gather` gathers; what it gives must be right."""
    rows, original = [], torch.index_select
    one, inputs = runnable("paged_gather", workload, kv_format=fmt, layout=layout)
    call = one.prepare([inputs])[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "index_select", lambda a, d, i, out: rows.append(len(i)) or original(a, d, i, out=out))
        assert close(call(), expected(one, inputs))
    (count,) = set(rows)
    return count // workload.batch_size // (1 if layout.order == "token" else workload.shape.num_kv_heads)


# Of 100 tokens K has 96 encoded and V 68: windows that begin in both tails, at and beside either end, and before them.
# Tokens up to 95 lie in six blocks of 16; none is read before that of the window, or of V's tail (block 4).
WINDOWS = [(1, 2), (4, 2), (5, 2), (20, 2), (31, 2), (32, 2), (33, 2), (36, 2), (37, 3), (53, 4), (90, 6), (None, 6)]


@pytest.mark.parametrize("window, blocks", WINDOWS)
@pytest.mark.parametrize("workload", [
    Workload.decode(AttentionShape(4, 2, 16), kv_len=100),
    Workload.decode(AttentionShape(4, 2, 16), batch_size=3, kv_len=100),
    Workload(AttentionShape(4, 2, 16), (1, 5, 1), (100, 33, 31)),
    Workload(AttentionShape(4, 1, 24, v_head_dim=16, v_in_k=True), (3, 1), (100, 9))],
    ids=["one", "batch", "ragged", "latent"])
def test_a_window_may_begin_in_a_tail_before_it_or_between_those_of_k_and_v(workload, window, blocks):
    """Also where blocks of 48 do not divide a residual of 32; blocks in which nothing is encoded are not gathered."""
    workload = replace(workload, shape=replace(workload.shape, window=window))
    fmt = "kivi4/g16/r32"
    trials = [trial(name, workload, kv_format=fmt, layout=layout) for name in sorted(SHIPPED)
              for layout in (Layout(), Layout(order="token"), Layout(16), Layout(48, "random"),
                             Layout(16, "random", "token"))]
    for one, row in judged(trials).items():
        assert row["status"] == ("skipped" if one.variant.ref not in PAGES and one.layout.block_size else "ok"), row
        assert row["value"] is None or row["value"] < 5e-6
    if workload.uniform:
        for order in ("head", "token"):
            assert gathered_blocks(workload, fmt, Layout(16, "random", order)) == blocks


@pytest.mark.parametrize("window", [1, 12, 40, 52, 60, 75, None])
@pytest.mark.parametrize("fmt", ["bf16+kivi4/g16/r32", "kivi2/g16/r48+fp32", "kivi4/g16/r48+kivi2/g8/r8",
                                 "kivi4/g8/r8+kivi2/g16/r96", "int8/block16+kivi4/g16/r64"])
@pytest.mark.parametrize("latent", [False, True], ids=["grouped", "latent"])
def test_k_and_v_of_formats_of_their_own_settle_apart_under_any_window(fmt, window, latent):
    shape = AttentionShape(4, 1, 24, 16, True, window) if latent else AttentionShape(4, 2, 16, 8, window=window)
    for lengths in ((100, 100), (108, 47)):
        workload = Workload(shape, (1, 1), lengths)
        trials = [trial(name, workload, kv_format=fmt, layout=layout)
                  for name in ("naive", "sdpa", "paged", "paged_gather")
                  for layout in (Layout(), Layout(16, "random"), Layout(48, "random", "token"))
                  if name in PAGES or layout.block_size is None]
        for one, row in judged(trials).items():
            assert row["status"] == "ok" and row["value"] < 5e-6, (one.variant.ref, one.layout, row["error"])
        one, inputs = runnable("paged", workload, kv_format=fmt, layout=Layout(48, "random"))
        assert close(one.prepare([inputs])[0](), expected(one, inputs))


def test_blocks_before_the_tails_of_both_are_all_that_is_gathered_and_one_at_least():
    shape, layout = AttentionShape(4, 2, 16, window=2), Layout(16, "random")
    for fmt, kv_len, blocks in (("kivi4/g16/r32", 130, 2), ("kivi4/g16/r128", 100, 1), ("bf16+kivi4/g16/r32", 100, 3),
                                ("kivi4/g16/r96+fp32", 100, 1), ("int8/token", 100, 1)):
        assert gathered_blocks(Workload.decode(shape, kv_len=kv_len), fmt, layout) == blocks, fmt


LATENT = AttentionShape(8, 1, 72, v_head_dim=64, v_in_k=True)
WIDE_K = AttentionShape(8, 2, 96, v_head_dim=64)


@pytest.mark.parametrize("fmt", [name for name in format_names() if name not in FORMATS])
@pytest.mark.parametrize("shape", [LATENT, WIDE_K], ids=["latent", "K wider than V"])
def test_shipped_variants_agree_with_the_oracle_in_every_format(shape, fmt):
    workload = Workload(shape, (1, 4), (200, 37))
    group = trial("naive", workload, kv_format=fmt).format.token_group(shape)
    trials = [trial(name, workload, kv_format=fmt) for name in sorted(CONTIGUOUS_ONLY)]
    trials += [trial(name, workload, kv_format=fmt, layout=Layout(max(16, group), "random", order))
               for name in sorted(PAGES) for order in ("head", "token")]
    for one, row in judged(trials).items():
        assert row["status"] == "ok" and row["value"] < 5e-6, (one.variant.label, row["error"])


def format_errors(names, workload, **rest):
    rows = measure(Comparison(tuple(trial("sdpa", workload, kv_format=name, **rest) for name in names)),
                   [KernelError(), FormatError()])
    found = {row["kv_format"]: row["value"] for row in rows if row["metric"] == "format_error"}
    assert {row["status"] for row in rows} == {"ok"}
    return [found[name] for name in names]


def test_what_a_format_costs_grows_as_bits_fall():
    workload = Workload.decode(AttentionShape(8, 2, 64), batch_size=2, kv_len=300)
    errors = format_errors(["fp32", "fp16", "bf16", "int8/token", "fp8_e4m3", "fp8_e5m2", "int2/token/g32"], workload)
    assert errors == sorted(errors) and errors[0] < 1e-6 and errors[-1] > 0.2
    bits = format_errors(["int8/token", "k8v4", "int4/token/g32", "k4v2", "int2/token/g32"], workload)
    assert all(1.2 * fewer < more for fewer, more in zip(bits, bits[1:], strict=False))
    fine, coarse = format_errors(["int4/token/g16", "int4/block64"], workload)
    assert fine < coarse
    eight, kivi, four = format_errors(["k16v8", "kivi4/g32/r128", "kivi4/g32"], workload)
    assert eight < kivi < four, "tokens that are kept in fp16 err less"


def test_channels_of_k_that_stand_out_cost_a_scale_per_token_more_than_one_per_channel():
    workload = Workload.decode(AttentionShape(8, 2, 64), kv_len=300)
    token, channel = format_errors(["int4/token", "int4/channel/g32+int4/token"], workload, data="outlier")
    assert 1.5 * channel < token
