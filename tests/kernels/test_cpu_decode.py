"""The C kernel behind `paged`: against the oracle, through any block table, and what happens where it cannot be had."""
from dataclasses import replace

import pytest
import torch

from kvlab.attention import Comparison, reference, trial
from kvlab.attention._stored import checked_table, stored_sides
from kvlab.attention.paged import Paged
from kvlab.kernels import compiled, cpu_decode
from kvlab.kv.cache import Layout
from kvlab.kv.formats import kv_format
from kvlab.shapes import AttentionShape, Workload

RANDOM = Layout(16, "random")
GQA = AttentionShape(8, 2, 128)
BASELINES = {"x86-64-v4": "AVX512", "x86-64-v3": "AVX2", "x86-64-v2": "DEFAULT"}


@pytest.fixture(autouse=True)
def built():
    if why := cpu_decode.why_not():
        pytest.skip(why)


def inputs_of(one):
    return Comparison((one,)).inputs()[one.kv_format, one.layout][0]


def exact(one, inputs):
    """(the oracle's output on what the cache holds, its log-sum-exp [B, Q])."""
    w, shape, ks, vs, lse = one.workload, one.workload.shape, [], [], []
    for b, (table, n) in enumerate(zip(inputs.block_table.tolist(), inputs.kv_lens)):
        k, v = inputs.cache.format.decode(inputs.cache.gather(table, n, b), shape, torch.float32)
        ks.append(k)
        vs.append(v)
        q_KGD = inputs.q_BTQD[b][0].double().view(shape.num_kv_heads, shape.group_ratio, -1)
        score = torch.einsum("kgd,skd->kgs", q_KGD, k.double()[w.first_visible(b):]) / shape.head_dim**0.5
        if shape.softcap:
            score = shape.softcap * torch.tanh(score / shape.softcap)
        lse.append(score.logsumexp(-1).flatten())
    return reference(w, inputs.q_BTQD, ks, vs), torch.stack(lse)


def run(one, inputs, threads=1, firsts=None, kv_lens=None, table=None):
    """(output, log-sum-exp) of the kernel itself."""
    w = one.workload
    assert Paged().not_in_place(one) is None
    k, v = stored_sides(inputs.cache)
    out = torch.full((w.batch_size, w.shape.num_q_heads, w.shape.v_dim), float("nan"), dtype=one.torch_dtype)
    lse = torch.full(out.shape[:2], float("nan"))
    cpu_decode.decode(inputs.q_TQD, k, v, checked_table(inputs) if table is None else table,
                      firsts or tuple(map(w.first_visible, range(w.batch_size))), kv_lens or w.kv_lens,
                      softcap=w.shape.softcap, out_BQE=out, lse_BQ=lse, workspace=inputs.workspace, threads=threads)
    return out, lse


SHAPES = {"MHA": AttentionShape(4, 4, 128), "GQA": GQA, "MQA": AttentionShape(32, 1, 64),
          "ratio 3": AttentionShape(6, 2, 80), "odd widths": AttentionShape(5, 1, 37, v_head_dim=21),
          "latent": AttentionShape(8, 1, 72, v_head_dim=64, v_in_k=True), "window": replace(GQA, window=33),
          "soft-cap": replace(GQA, softcap=0.7),
          "wide soft-cap": replace(GQA, softcap=1000.0), "256": AttentionShape(2, 1, 256),
          "112": AttentionShape(2, 2, 112), "MLA": AttentionShape(16, 1, 576, v_head_dim=512, v_in_k=True)}
FORMATS = ("fp32", "fp16", "bf16", "int8/token", "int8/block16", "int8/head", "int8/tensor", "int8/channel", "fp8_e4m3",
           "fp8_e4m3/token", "fp8_e4m3/channel", "fp8_e5m2", "fp8_e5m2/head", "bf16+int8/token")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_log_sum_exp_agree_with_the_oracle(shape, fmt):
    workload = Workload(SHAPES[shape], (1, 1, 1), (1, 17, 333))
    for layout in (RANDOM, Layout(), Layout(16, "random", "token"), Layout(48)):
        one = trial("paged", workload, kv_format=fmt, layout=layout)
        inputs = inputs_of(one)
        want, lse = exact(one, inputs)
        for threads in (1, 2):
            out, got = run(one, inputs, threads)
            assert float((out.double() - want).norm() / want.norm()) < 1e-6, (layout, threads)
            assert torch.allclose(got.double(), lse, rtol=0, atol=2e-5), (layout, threads)


@pytest.mark.parametrize("level", BASELINES)
def test_every_set_of_instructions_gives_the_same(level, monkeypatch):
    best = torch.backends.cpu.get_cpu_capability()
    order = list(BASELINES.values())
    if best not in order or order.index(best) > order.index(BASELINES[level]):
        pytest.skip(f"this processor has no {level}: torch sees {best}")
    monkeypatch.setattr(cpu_decode, "flags", lambda: ("-fopenmp", f"-march={level}"))
    for fmt in ("fp32", "fp16", "bf16", "int8/token", "fp8_e4m3", "fp8_e5m2"):
        one = trial("paged", Workload(replace(GQA, head_dim=52, softcap=3.0), (1, 1), (5, 90)), kv_format=fmt,
                    layout=RANDOM)
        inputs = inputs_of(one)
        assert torch.allclose(run(one, inputs)[0].double(), exact(one, inputs)[0], rtol=0, atol=2e-6), fmt


def test_every_code_is_decoded_as_torch_does():
    """All bytes of fp8 but its NaN and infinity, all of int8, and fp16 with subnormals and infinity in V's place."""
    from kvlab.kernels.stored import Stored
    every = torch.arange(256, dtype=torch.int32)
    for kind, codes in (("int8", every.to(torch.uint8).view(torch.int8)), ("fp8_e4m3", every.to(torch.uint8)),
                        ("fp8_e5m2", every.to(torch.uint8)),
                        ("fp16", (torch.arange(0, 2**15, 101)).to(torch.int16).view(torch.float16))):
        value = codes.view(getattr(torch, f"float{kind[2:]}fn" if kind == "fp8_e4m3" else f"float{kind[2:]}")) \
            if kind.startswith("fp8") else codes
        kept = value.float().isfinite()
        codes, value = codes[kept], value[kept].float()
        k = Stored(torch.zeros(1, 1, 1, 1), "fp32", 1)
        v = Stored(codes.view(1, 1, 1, -1), kind, len(codes))
        out = torch.empty(1, 1, len(codes))
        cpu_decode.decode(torch.ones(1, 1, 1), k, v, torch.zeros(1, 1, dtype=torch.int32), (0,), (1,), out_BQE=out,
                          workspace=lambda name, *size, dtype: torch.empty(size, dtype=dtype))
        assert torch.equal(out[0, 0], value), kind


def test_an_empty_range_gives_zero_and_minus_infinity():
    one = trial("paged", Workload(GQA, (1, 1), (40, 40)), layout=RANDOM)
    for threads in (1, 2):
        out, lse = run(one, inputs_of(one), threads, firsts=(40, 0))
        assert not out[0].any() and out[1].isfinite().all()
        assert (lse[0] == float("-inf")).all() and lse[1].isfinite().all()


def test_parts_of_a_sequence_merged_by_their_log_sum_exp_are_the_whole():
    one = trial("paged", Workload(GQA, (1,), (300,)), layout=RANDOM)
    inputs = inputs_of(one)
    whole, lse = run(one, inputs)
    parts = [run(one, inputs, firsts=(a,), kv_lens=(b,)) for a, b in ((0, 7), (7, 160), (160, 300))]
    each = torch.stack([p[1] for p in parts])
    assert torch.allclose(each.logsumexp(0), lse, atol=1e-5)
    assert torch.allclose((torch.stack([p[0] for p in parts]) * (each - lse).exp()[..., None]).sum(0), whole, atol=1e-6)


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp8_e5m2"])
@pytest.mark.parametrize("layout", [RANDOM, Layout(48), Layout(16, order="token")])
def test_nan_and_infinity_in_unused_slots_do_not_leak(layout, fmt):
    one = trial("paged", Workload(replace(GQA, window=40), (1, 1), (100, 19)), kv_format=fmt, layout=layout)
    inputs = inputs_of(one)
    before = [run(one, inputs, threads)[0] for threads in (1, 2)]
    used = torch.zeros(inputs.cache.num_blocks, inputs.cache.block_size, dtype=torch.bool)
    for table, n, first in zip(inputs.block_table.tolist(), inputs.kv_lens, (60, 0)):
        for t in range(first, n):
            used[table[t // inputs.cache.block_size], t % inputs.cache.block_size] = True
    for i, array in enumerate(inputs.cache.by_head(inputs.cache.arrays)):
        bad = 0x7F if array.dtype == torch.uint8 else float("nan") if i else float("inf")
        array.transpose(1, 2)[~used] = bad
    for threads, clean in zip((1, 2), before):
        assert torch.equal(run(one, inputs, threads)[0], clean)


def test_a_block_table_that_points_outside_is_refused_and_nothing_is_read():
    one = trial("paged", Workload(GQA, (1, 1), (40, 40)), layout=RANDOM)
    inputs = inputs_of(one)
    for wrong in (-1, inputs.cache.num_blocks, 2**31 - 1):
        kept = inputs.block_table[1, 2].item()
        inputs.block_table[1, 2] = wrong
        with pytest.raises(IndexError, match=f"block id {wrong} in the block table of sequence 1 is out of range; this "
                                             "cache has blocks 0 … "):
            Paged().prepare(one, inputs)
        with pytest.raises(IndexError, match="a block id in the block table is out of range"):      # it looks again
            run(one, inputs, table=inputs.block_table.to(torch.int32))
        inputs.block_table[1, 2] = kept
    inputs.block_table = inputs.block_table[:, :2]
    with pytest.raises(IndexError, match="gives sequence 0 2 blocks of 16, and its 40 tokens need 3"):
        Paged().prepare(one, inputs)


def test_offsets_beyond_two_to_the_31_elements_are_reached():
    """Blocks 3 · 2^30 elements apart: only the pages that are touched take memory."""
    from kvlab.kernels.stored import Stored
    far = 3 * 2**30 // 2
    storage = torch.empty(far * 2 + 4096, dtype=torch.int8)
    codes = storage.as_strided((3, 1, 16, 128), (far, 16 * 128, 128, 1))
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    near = torch.randint(-127, 128, (2, 1, 16, 128), dtype=torch.int8)
    codes[2], codes[0] = near[0], near[1]

    def of(codes, table):
        out = torch.empty(1, 2, 128)
        side = Stored(codes, "int8", 128)
        cpu_decode.decode(torch.full((1, 2, 128), 0.01), side, side, table, (0,), (30,), out_BQE=out,
                          workspace=lambda name, *size, dtype: torch.empty(size, dtype=dtype))
        return out
    assert torch.equal(of(codes, table), of(near, torch.tensor([[0, 1]], dtype=torch.int32)))


def test_a_query_that_is_not_contiguous_is_read_as_what_it_says():
    one = trial("paged", Workload(GQA, (1, 1), (40, 9)), layout=RANDOM)
    inputs = inputs_of(one)
    whole = run(one, inputs)[0]
    wide = torch.zeros(2, 8, 256)
    wide[..., ::2] = inputs.q_TQD
    inputs.q_TQD = wide[..., ::2]
    assert torch.equal(run(one, inputs)[0], whole)


def test_a_block_table_that_is_a_transposed_view_is_read_as_what_it_says():
    one = trial("paged", Workload(GQA, (1,) * 3, (40, 33, 40)), layout=RANDOM)
    inputs = inputs_of(one)
    whole = run(one, inputs)[0]
    inputs.block_table = inputs.block_table.t().contiguous().t()
    assert inputs.block_table.stride() == (1, 3)
    assert torch.equal(Paged().prepare(one, inputs)(), whole)


def test_the_parts_that_are_told_are_those_of_the_caches_own_blocks(monkeypatch):
    """A contiguous block of int8/block16 has room for whole groups: 1,024 slots for 1,020 tokens."""
    one = trial("paged", Workload.decode(AttentionShape(4, 2, 16), kv_len=1020), kv_format="int8/block16",
                layout=Layout(), threads=2)
    seen, plan = [], cpu_decode.plan
    monkeypatch.setattr(cpu_decode, "plan", lambda *a: seen.append(a) or plan(*a))
    one.prepare([inputs_of(one)])[0]()
    told = one.ran
    assert seen[0] == seen[1] and f"{plan(*seen[0])[1]} parts per sequence" in told


def test_a_compiler_without_openmp_gives_one_thread_and_the_row_says_so(monkeypatch):
    real = compiled.loaded

    def without(sources, flags=()):
        if "-fopenmp" in flags:
            raise compiled.CannotCompile("cc failed on c_paged.c: cannot find -lomp")
        return real(sources, flags)
    monkeypatch.setattr(compiled, "loaded", without)
    cpu_decode._loaded.cache_clear()
    try:
        one = trial("paged", Workload(GQA, (1,), (300,)), layout=RANDOM, threads=2)
        inputs = inputs_of(one)
        assert "one thread: compiled without OpenMP" in one.ran and one.format_path == "native"
        assert torch.allclose(one.prepare([inputs])[0]().double(), exact(one, inputs)[0], rtol=0, atol=2e-6)
    finally:
        cpu_decode._loaded.cache_clear()


def test_a_library_that_cannot_be_loaded_is_a_sentence_and_torchs_way(monkeypatch, tmp_path):
    broken = tmp_path / "c_paged-0.so"
    broken.write_bytes(b"cut short")
    monkeypatch.setattr(compiled, "compiled", lambda *a, **k: broken)
    cpu_decode._loaded.cache_clear()
    try:
        one = trial("paged", Workload(GQA, (1,), (40,)), layout=RANDOM)
        assert "cannot be loaded" in one.ran and "delete it, or set KVLAB_CACHE" in one.ran
        assert one.format_path == "gathered" and one.why_not() is None
    finally:
        cpu_decode._loaded.cache_clear()


def test_heads_too_wide_for_the_stack_are_gathered():
    one = trial("paged", Workload(AttentionShape(1, 1, 5000), (1,), (4,)), layout=RANDOM)
    assert "up to 4096 channels" in one.ran


def test_work_is_shared_so_that_one_sequence_with_one_head_keeps_all_threads_busy():
    assert cpu_decode.plan(65536, 1, (65536,), 2) == (1, 8)
    assert cpu_decode.plan(16, 8, (8192,), 2) == (8, 8)
    assert cpu_decode.plan(16, 8, (64,) * 16, 2) == (8, 1)          # sequences enough
    assert cpu_decode.plan(16, 1, (100,), 2) == (1, 1)              # too short to be cut
    assert cpu_decode.plan(8192, 8, (8192,), 2) == (1, 1) and cpu_decode.plan(16, 8, (8192,), 1) == (8, 1)


def test_rows_say_which_way_was_taken(monkeypatch):
    workload = Workload(GQA, (1,), (40,))
    own = trial("paged", workload, kv_format="int8/token", layout=RANDOM)
    assert own.format_path == "native" and own.ran.startswith("kvlab's C kernel") and "read in place" in own.ran
    for changed, why, path in (
            (dict(kv_format="int4/token"), "the kernel reads fp32, fp16, bf16, fp8_e4m3, fp8_e5m2, int8, and "
                                           "int4/token stores int4", "decoded"),
            (dict(kv_format="int8/token/g32"), "one per group of channels", "decoded"),
            (dict(kv_format="kivi4/g8/r8"), "keeps its newest tokens apart", "decoded"),
            (dict(workload=Workload(GQA, (3,), (40,)), kv_format="fp32"), "one query token per sequence", "gathered")):
        one = replace(own, **changed)
        assert why in one.ran and one.ran.startswith("blocks gathered by torch") and one.format_path == path
        assert one.why_not() is None
    monkeypatch.setattr(cpu_decode, "_loaded", lambda flags: "no C compiler answers here; install gcc")
    assert own.format_path == "decoded" and "no C compiler answers here" in own.ran and own.why_not() is None
    capped = replace(own, workload=Workload(replace(GQA, softcap=5.0), (1,), (40,)))
    assert "soft-capping" in capped.why_not() and "no C compiler" in capped.why_not()
    with pytest.raises(compiled.CannotCompile, match="install gcc"):
        cpu_decode.library()


def test_without_a_compiler_torch_computes_it_and_the_measured_rows_say_so(monkeypatch):
    from kvlab.probes import measure
    from kvlab.probes.kernel_error import KernelError
    one = trial("paged", Workload(GQA, (1, 1), (40, 17)), kv_format="int8/token")
    with_kernel, without = [], []
    for rows in (with_kernel, without):
        rows += measure(Comparison((one,)), [KernelError()])
        monkeypatch.setattr(cpu_decode, "_loaded", lambda flags: "no C compiler answers here; install gcc")
    assert [r["format_path"] for r in with_kernel + without] == ["native", "decoded"]
    assert "kvlab's C kernel" in with_kernel[0]["note"] and "no C compiler answers here" in without[0]["note"]
    assert all(r["status"] == "ok" and r["value"] < 1e-6 for r in with_kernel + without)


def test_the_formula_counts_tables_and_what_each_part_leaves_behind():
    from kvlab.attention import ideal_traffic
    workload = Workload.decode(AttentionShape(8, 2, 64), kv_len=4096)
    one, two = (trial("paged", workload, kv_format="int8/token", threads=n) for n in (1, 2))
    ideal = ideal_traffic(workload, kv_format("int8/token"), 4)
    for t, parts in ((one, 1), (two, 8)):
        kept, cost = 4 * 8 * (64 + parts * 66), t.variant.load().cost(t)
        assert cost == ideal.plus(read=kept + 4 * 256, write=kept)
        assert t.variant.load().cost(t, 2**30).read_bytes == ideal.read_bytes + 4 * 256      # it all stays
