"""The cascade: a shared prefix attended once for the batch and merged with each sequence's own tokens.

Twice: over kvlab's kernel for CPUs where it can be compiled, and over plain torch behind the same interface, so that
what the cascade asks for is seen, and judged on any machine.
"""
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvlab.attention import Comparison, VariantRef, least_cost, reference, trial
from kvlab.attention._matrix import cells
from kvlab.attention.triton_paged import TritonPaged
from kvlab.kernels import cpu_decode
from kvlab.kv.cache import Layout
from kvlab.kv.formats import kv_format
from kvlab.probes import measure
from kvlab.probes.kernel_error import KernelError
from kvlab.shapes import AttentionShape, Workload

SHAPE = AttentionShape(8, 2, 32)
BATCH = Workload.decode(SHAPE, batch_size=3, kv_len=100, shared_prefix=64)


def numbers(side, table, kv_len):
    """One sequence's tokens [K, S, W] as floats: (code · scale) + zero."""
    codes, size = side.codes[table.long()].transpose(0, 1).flatten(1, 2)[:, :kv_len], side.codes.shape[2]
    x_KSW = (codes.view(torch.float8_e4m3fn) if side.kind == "fp8_e4m3" else codes).float()[..., :side.width]
    if side.scale is None:
        return x_KSW
    slot_S, channel_W = torch.arange(kv_len), torch.arange(side.width) // side.channels
    block_S, row_S = table.long()[slot_S // size], slot_S % size // side.tokens
    return x_KSW * side.scale[block_S, :, row_S].transpose(0, 1)[..., channel_W].float()


class Torch:
    """The decode interface of kvlab's kernels in plain torch; keeps what it was asked."""
    def __init__(self):
        self.asked = []

    def decode(self, q_BQD, k, v, block_table_BM, firsts, kv_lens, *, softcap=None, out_BQE, lse_BQ=None, workspace,
               threads):
        self.asked.append(SimpleNamespace(q=q_BQD.shape, firsts=firsts, kv_lens=kv_lens, threads=threads,
                                          contiguous=q_BQD.is_contiguous() and out_BQE.is_contiguous()))
        (_, Q, D), K = q_BQD.shape, k.codes.shape[1]
        for b, (first, kv_len) in enumerate(zip(firsts, kv_lens, strict=True)):
            k_KSD, v_KSE = (numbers(side, block_table_BM[b], kv_len)[:, first:] for side in (k, v))
            score_KGS = q_BQD[b].float().view(K, Q // K, D) @ k_KSD.transpose(1, 2) * D**-0.5
            score_KGS = score_KGS if softcap is None else softcap * torch.tanh(score_KGS / softcap)
            lse_BQ[b] = score_KGS.logsumexp(-1).flatten()            # of nothing: -inf
            out_BQE[b] = (score_KGS.softmax(-1) @ v_KSE).view(Q, -1)


@pytest.fixture
def plain(monkeypatch):
    """The cascade over plain torch."""
    stand_in = Torch()
    monkeypatch.setattr(cpu_decode, "decode", stand_in.decode)
    monkeypatch.setattr(cpu_decode, "why_not", lambda: None)
    return stand_in


@pytest.fixture(params=["torch", "cpu"])
def kernel(request):
    """What the cascade runs on: both, one after the other."""
    if request.param == "torch":
        request.getfixturevalue("plain")
    elif why := cpu_decode.why_not():
        pytest.skip(why)


def judged(workload, *, fmt="fp32", **rest):
    (row,) = measure(Comparison((trial("cascade", workload, kv_format=fmt, **rest),)), [KernelError()])
    assert row["status"] == "ok", row["error"]
    return row["value"]


def prepared(workload, **rest):
    one = trial("cascade", workload, **rest)
    (inputs,) = Comparison((one,)).inputs()[one.kv_format, one.layout]
    return one, inputs, one.prepare([inputs])[0]


def far(output, exact):
    return float((output.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp16", "int8/token", "int8/block16", "int8/head", "int8/channel",
                                 "fp8_e4m3", "fp8_e4m3/token", "bf16+int8/token"])
@pytest.mark.parametrize("batch, kv_heads", [(1, 8), (2, 2), (7, 1), (7, 8), (2, 1)])
def test_agrees_with_the_oracle(kernel, batch, kv_heads, fmt):
    workload = Workload.decode(AttentionShape(8, kv_heads, 32), batch_size=batch, kv_len=75, shared_prefix=48)
    assert judged(workload, fmt=fmt) < 2e-6


@pytest.mark.parametrize("shared_prefix, kv_lens", [
    (64, (65,)), (64, (65, 65, 65)), (16, (500, 17, 90)), (64, (64, 200, 65)), (64, (64,)), (64, (64, 64))],
    ids=["all but the newest", "all but the newest of three", "ragged", "one is the prefix alone", "nothing own",
         "nothing own of two"])
def test_any_share_of_the_tokens_may_be_the_prefix(kernel, shared_prefix, kv_lens):
    workload = Workload(SHAPE, (1,) * len(kv_lens), kv_lens, shared_prefix)
    for fmt in ("fp32", "int8/token"):
        assert judged(workload, fmt=fmt) < 2e-6
    assert judged(workload, layout=Layout(8, "in_order", "token", share_prefix=True)) < 2e-6


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_in_half_precision_the_two_parts_are_merged_before_they_are_rounded(kernel, dtype):
    assert judged(BATCH, dtype=dtype, fmt=dtype) < {"bf16": 2.5e-3, "fp16": 3e-4}[dtype], "a rounding, or little more"
    assert judged(BATCH, dtype=dtype, fmt="int8/token") < {"bf16": 8e-3, "fp16": 1e-3}[dtype]
    _, inputs, call = prepared(BATCH, dtype=dtype)
    assert call().dtype == inputs.q_TQD.dtype


@pytest.mark.parametrize("changed", [
    dict(softcap=5.0), dict(window=60), dict(window=20), dict(window=1), dict(v_head_dim=16),
    dict(num_kv_heads=1, head_dim=40, v_head_dim=32, v_in_k=True)], ids=str)
def test_a_soft_cap_a_window_and_v_of_another_width(kernel, changed):
    """Windows of 60, 20 and 1 token of 100 begin in the prefix of 64, behind it, and at the newest."""
    assert judged(replace(BATCH, shape=replace(SHAPE, **changed))) < 2e-6


@pytest.mark.parametrize("strong", ["prefix", "own", "both"])
def test_scores_of_ten_thousands_overflow_nothing(kernel, strong):
    one, inputs, call = prepared(BATCH)
    q_BQD = inputs.q_TQD
    for b, table in enumerate(inputs.block_table.tolist()):
        k_SKD = inputs.k[b]
        toward_KD = q_BQD[0].view(2, 4, 32)[:, 0]                    # along one query head of sequence 0, in all
        toward_KD = toward_KD * (1e4 * 32**0.5 / (toward_KD**2).sum(-1, keepdim=True))
        for part, token in (("prefix", 10), ("own", 80)):
            if strong in (part, "both"):
                k_SKD[token] = toward_KD
                k_SKD[token + 1] = -toward_KD
        inputs.cache.write(inputs.cache.format.encode(k_SKD, inputs.v[b]), table, b)
    output, exact = call(), reference(one.workload, inputs.q_BTQD, inputs.k, inputs.v)
    scores = q_BQD[0].view(2, 4, 32)[:, 0] @ inputs.k[0][80 if strong == "own" else 10].T / 32**0.5
    assert scores.max() > 9000
    assert bool(output.isfinite().all()) and far(output, exact) < 2e-3, "LSE of 1e4 are known to 1e-3 in fp32"
    if strong != "both":
        assert far(output, exact) < 1e-4


def test_threads_that_share_the_prefix_agree_with_the_oracle(kernel):
    workload = Workload(SHAPE, (1, 1), (700, 530), 512)
    for fmt in ("fp32", "int8/token"):
        one, inputs, call = prepared(workload, threads=2, kv_format=fmt)
        k, v = zip(*(inputs.cache.format.decode(inputs.cache.gather(table[:-(-n // 16)], n), SHAPE, torch.float32)
                     for table, n in zip(inputs.block_table.tolist(), workload.kv_lens, strict=True)), strict=True)
        assert far(call(), reference(workload, inputs.q_BTQD, k, v)) < 2e-6


def test_the_prefix_is_attended_once_by_the_query_heads_of_all_sequences(plain):
    workload = Workload(SHAPE, (1, 1, 1), (100, 64, 70), 64)
    _, _, call = prepared(workload)
    call()
    prefix, own = plain.asked
    assert prefix.q == (1, 2 * 3 * 4, 32) and prefix.firsts == (0,) and prefix.kv_lens == (64,)
    assert own.q == (3, 8, 32) and own.firsts == (64, 64, 64) and own.kv_lens == (100, 64, 70)
    assert prefix.contiguous and own.contiguous and prefix.threads == own.threads == 1
    plain.asked.clear()
    windowed = replace(workload, shape=replace(SHAPE, window=50), kv_lens=(100, 100, 100))
    prepared(windowed)[2]()
    assert [(a.firsts, a.kv_lens) for a in plain.asked] == [((50,), (64,)), ((64, 64, 64), (100, 100, 100))]


def test_reads_q_and_the_cache_when_called_and_hands_out_no_output_twice(kernel):
    one, inputs, call = prepared(BATCH)
    first = call()
    kept = first.clone()
    inputs.q_TQD.neg_()
    for side in (inputs.cache.k_arrays[0], inputs.cache.v_arrays[0]):
        side.mul_(0.5)
    exact = reference(BATCH, inputs.q_BTQD, [k / 2 for k in inputs.k], [v / 2 for v in inputs.v])
    second = call()
    assert torch.equal(first, kept) and far(second, exact) < 2e-6 < far(second, first.double())


def test_slots_beyond_a_sequence_and_what_the_workspace_held_never_matter(kernel):
    workload = Workload(SHAPE, (1, 1), (100, 65), 64)
    one = trial("cascade", workload)
    (inputs,) = Comparison((one,)).inputs()[one.kv_format, one.layout]
    call = one.variant.load().prepare(one, inputs)
    before = call()
    for kept in inputs.scratch.values():
        if kept.is_floating_point():
            kept.fill_(float("nan"))
    table, cache = inputs.block_table, inputs.cache
    for side in (cache.k_arrays[0], cache.v_arrays[0]):
        side[0] = float("nan")                                       # the null block, which fills up short tables
        side[table[0, 6], :, 100 - 96:] = float("nan")
        side[table[1, 4], :, 65 - 64:] = float("nan")
    assert torch.equal(call(), before) and len(inputs.scratch) >= 4


def test_a_block_table_that_points_outside_the_cache_is_refused_before_it_is_read(plain):
    one = trial("cascade", BATCH)
    (inputs,) = Comparison((one,)).inputs()[one.kv_format, one.layout]
    inputs.block_table[2, 1] = inputs.cache.num_blocks
    with pytest.raises(IndexError, match="block table of sequence 2 is out of range"):
        one.prepare([inputs])


PREFILL = Workload(SHAPE, (1, 2), (90, 90), 64)
UNEQUAL = Workload(replace(SHAPE, window=60), (1, 1), (100, 90), 64)


@pytest.mark.parametrize("changed, why", [
    (dict(workload=PREFILL), "one query token per sequence; use paged"),
    (dict(layout=Layout(16, "random")), "Layout(…, share_prefix=True)), or use paged"),
    (dict(layout=Layout()), "Layout(…, share_prefix=True)), or use paged"),
    (dict(workload=replace(BATCH, shared_prefix=0)), "share_prefix needs a shared_prefix above 0"),
    (dict(workload=UNEQUAL), "the window hides more of it from one sequence than from another"),
    (dict(kv_format="int4/token"), "runs on kvlab's kernel for CPUs: the kernel reads fp32"),
    (dict(kv_format="int4/token"), "and int4/token stores int4"),
    (dict(kv_format="int8/token/g16"), "a scale per token, head or channel, and int8/token/g16 has one per group"),
    (dict(kv_format="kivi4/g16/r32"), "kvlab shares no prefix of such a cache"),
])
def test_what_it_cannot_compute_is_refused_in_words(plain, changed, why):
    assert why in trial("cascade", **{"workload": BATCH, **changed}).why_not()
    assert trial("cascade", BATCH).why_not() is None


def test_windows_behind_the_prefix_may_differ(plain):
    short = replace(UNEQUAL, shape=replace(SHAPE, window=20))
    assert trial("cascade", short).why_not() is None
    assert judged(short) < 2e-6


def test_what_the_kernel_lacks_is_the_cascades_reason(monkeypatch):
    monkeypatch.setattr(cpu_decode, "why_not", lambda: "no C compiler answers here")
    assert trial("cascade", BATCH).why_not() == (
        "cascade runs on kvlab's kernel for CPUs: no C compiler answers here; use paged")


def test_on_a_gpu_the_triton_kernel_must_be_there(monkeypatch):
    monkeypatch.setattr(TritonPaged, "why_not", lambda self, trial: f"no triton on {trial.device}")
    one = trial("cascade", BATCH, device="cuda")
    assert one.variant.load().why_not(one) == "no triton on cuda"


def test_check_finds_cells_of_the_matrix_that_it_computes(plain):
    answers = [(about, comparison.trials[0].why_not()) for about, comparison in cells(VariantRef.of("cascade"))]
    assert {about for about, why in answers if why is None} == {"shared prefix"}
    assert sum(why is None for _, why in answers) == 5               # formats


def cost_of(workload, cache_bytes=0, **rest):
    one = trial("cascade", workload, **rest)
    return one.variant.load().cost(one, cache_bytes), least_cost(one, cache_bytes)


def test_the_cost_by_hand():
    """24 query heads and as many packed ones; the kernel keeps q, and a result, a maximum and a sum of each."""
    cost, least = cost_of(BATCH)
    token, q, part, lse, blocks = 2 * 2 * 32 * 4, 24 * 32 * 4, 24 * 32 * 4, 24 * 4, 4 + 3 * 3
    kept = 24 * (32 + 32 + 2) * 4
    assert least.read_bytes == q + token * (64 + 3 * 36), "the prefix once"
    assert cost.read_bytes == least.read_bytes + 2 * q + 2 * kept + 2 * (part + lse) + 2 * lse + 4 * blocks
    assert cost.write_bytes == least.write_bytes + q + 2 * kept + 2 * part + 4 * lse
    assert cost.executed_flops == least.executed_flops
    half, least = cost_of(BATCH, dtype="bf16")
    assert half.write_bytes == least.write_bytes + q // 2 + 2 * kept + 2 * part + 4 * lse + part
    warm, least = cost_of(BATCH, 2**30)
    assert warm.read_bytes == least.read_bytes + 4 * blocks


def test_threads_keep_parts_of_the_prefix_and_of_what_follows(monkeypatch):
    """1024 tokens of prefix and 500 behind it of 3 sequences; each of so many parts writes its own results."""
    workload = Workload.decode(SHAPE, batch_size=3, kv_len=1524, shared_prefix=1024)
    monkeypatch.setattr(cpu_decode, "plan", lambda block_size, kv_heads, lengths, threads: (
        1, {(1024,): 8, (500,) * 3: 3}[lengths] * threads // 2))
    costs = [cost_of(workload, threads=threads)[0].write_bytes for threads in (4, 2)]
    assert costs[0] - costs[1] == 24 * (8 + 3) * (32 + 2) * 4


def test_a_gpu_fills_tiles_of_16_query_heads_and_keeps_results_of_parts(monkeypatch):
    monkeypatch.setattr("kvlab.attention.cascade.multiprocessors", lambda device: 1)
    cost, least = cost_of(BATCH, device="cuda", dtype="fp32")
    # one tile of 2 KV heads each fills the only multiprocessor: nothing is cut into parts
    assert cost.executed_flops == 2 * 16 * 2 * (32 + 32) * (64 + 3 * 36) > least.executed_flops
    q, part, lse = 24 * 32 * 4, 24 * 32 * 4, 24 * 4
    assert cost.write_bytes == least.write_bytes + q + 2 * part + 4 * lse
    monkeypatch.setattr("kvlab.attention.cascade.multiprocessors", lambda device: 100)
    monkeypatch.setattr("kvlab.attention.cascade.splits", lambda programs, kv_len, tokens, sms: {64: 4, 36: 2}[kv_len])
    assert cost_of(BATCH, device="cuda", dtype="fp32")[0].write_bytes == cost.write_bytes + 24 * (4 + 2) * (32 + 1) * 4


def test_what_a_window_hides_costs_neither_bytes_nor_table_entries():
    windowed = replace(BATCH, shape=replace(SHAPE, window=50))       # tokens 50 … 99: of the prefix the last block
    assert cost_of(BATCH, 2**30)[0].read_bytes - cost_of(windowed, 2**30)[0].read_bytes == (
        50 * 2 * 2 * 32 * 4 + 4 * 3)


@pytest.mark.parametrize("name", ["fp32", "int8/token"])
def test_what_is_saved_is_the_prefix_of_all_sequences_but_one(name):
    long = Workload.decode(SHAPE, batch_size=16, kv_len=1024, shared_prefix=1008)
    shared, apart = (cost_of(long, kv_format=name, layout=Layout(16, share_prefix=share))[0] for share in (True, False))
    assert apart.read_bytes - shared.read_bytes == 15 * kv_format(name).nbytes(1008, SHAPE) > 5 * shared.read_bytes
    assert apart[1:] == shared[1:]


TRITON = """
from kvlab.attention import Comparison, reference, trial
from kvlab.kernels import cpu_decode, triton_decode
from kvlab.shapes import AttentionShape, Workload

cpu_decode.decode = lambda *given, threads, **rest: triton_decode.decode(*given, **rest)
for heads, width, kv_lens, dtype in ((2, 32, (75, 64, 49), "fp32"), (8, 16, (60, 60), "bf16")):
    workload = Workload(AttentionShape(8, heads, width), (1,) * len(kv_lens), kv_lens, 48)
    one = trial("cascade", workload, dtype=dtype)
    (inputs,) = Comparison((one,)).inputs()[one.kv_format, one.layout]
    exact = reference(workload, inputs.q_BTQD, inputs.k, inputs.v)
    print(float((one.prepare([inputs])[0]().double() - exact).norm() / exact.norm()))
"""


def test_over_the_triton_kernel_in_its_interpreter():
    """In a process of its own: Triton reads at its import whether it is interpreted."""
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run([sys.executable, "-c", TRITON], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    fp32, bf16 = map(float, done.stdout.split())
    assert fp32 < 2e-6 and bf16 < 5e-3
