"""The fp64 oracle, which judges every variant, is itself judged: by hand, by plain loops, by what must not matter."""
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.attention import Comparison, reference, trial
from kvlab.kv.cache import Layout
from kvlab.kv.formats import kv_format
from kvlab.shapes import AttentionShape, Workload


def drawn(workload, seed=0):
    """(q, k, v), one fp64 tensor per sequence, Gaussian."""
    s, generator = workload.shape, torch.Generator().manual_seed(seed)

    def one(length, heads, width):
        return torch.randn(length, heads, width, generator=generator, dtype=torch.float64)

    return ([one(n, s.num_q_heads, s.head_dim) for n in workload.q_lens],
            [one(n, s.num_kv_heads, s.head_dim) for n in workload.kv_lens],
            [one(n, s.num_kv_heads, s.v_dim) for n in workload.kv_lens])


def by_loops(workload, q, k, v):
    """Attention as its definition reads, one number at a time; shares nothing with the oracle."""
    s, out = workload.shape, []
    for b in range(workload.batch_size):
        q_b, k_b, v_b = q[b].tolist(), k[b].tolist(), v[b].tolist()
        for t, heads in enumerate(q_b):
            position = workload.kv_lens[b] - workload.q_lens[b] + t
            row = []
            for h, query in enumerate(heads):
                kv_head = h // (s.num_q_heads // s.num_kv_heads)
                weights = {}
                for token in range(position + 1):
                    if s.window is not None and position - token >= s.window:
                        continue
                    score = sum(x * y for x, y in zip(query, k_b[token][kv_head], strict=True)) / math.sqrt(s.head_dim)
                    if s.softcap is not None:
                        score = s.softcap * math.tanh(score / s.softcap)
                    weights[token] = math.exp(score)
                value = [k_b[token][kv_head][:s.v_dim] if s.v_in_k else v_b[token][kv_head] for token in weights]
                row.append([sum(w * x[e] for w, x in zip(weights.values(), value, strict=True)) / sum(weights.values())
                            for e in range(s.v_dim)])
            out.append(row)
    return torch.tensor(out, dtype=torch.float64)


def assert_same(a, b, tolerance=1e-13):
    assert a.shape == b.shape
    assert (a - b).abs().max() <= tolerance, f"differ by {float((a - b).abs().max()):.2g}"


def test_two_tokens_by_hand():
    workload = Workload.prefill(AttentionShape(1, 1, 4, v_head_dim=2), q_len=2)
    q = torch.tensor([[[5.0, 1, 1, 1]], [[2.0, 0, 0, 0]]])              # scores of the second: 0 and 2·ln 3 / √4 = ln 3
    k = torch.tensor([[[0.0, 7, 0, 0]], [[math.log(3), 0, 0, 9]]], dtype=torch.float64)
    v = torch.tensor([[[2.0, -4]], [[10.0, 0]]])
    # the first query sees its own token only; the second weighs the two with 1/4 and 3/4
    expected = torch.tensor([[[2.0, -4]], [[8.0, -1]]], dtype=torch.float64)
    assert_same(reference(workload, [q], [k], [v]), expected, 1e-15)


@st.composite
def small_workloads(draw):
    kv_heads, head_dim = draw(st.integers(1, 2)), draw(st.integers(1, 4))
    v_in_k = draw(st.booleans())
    shape = AttentionShape(kv_heads * draw(st.integers(1, 3)), kv_heads, head_dim,
                           draw(st.none() | st.integers(1, head_dim if v_in_k else 5)), v_in_k,
                           draw(st.none() | st.integers(1, 8)), draw(st.none() | st.sampled_from([0.5, 5.0])))
    lengths = draw(st.lists(st.integers(1, 4).flatmap(lambda q: st.tuples(st.just(q), st.integers(q, 9))),
                            min_size=1, max_size=3))
    return Workload(shape, *zip(*lengths, strict=True))


@settings(max_examples=60, deadline=None)
@given(small_workloads(), st.integers(0, 99))
def test_plain_loops_give_the_same(workload, seed):
    q, k, v = drawn(workload, seed)
    assert_same(reference(workload, q, k, v), by_loops(workload, q, k, v), 1e-12)


def test_grouped_heads_equal_multi_head_attention_on_repeated_k_and_v():
    grouped = Workload(AttentionShape(6, 2, 8), (3, 1), (5, 9))
    q, k, v = drawn(grouped)
    repeated = replace(grouped, shape=AttentionShape(6, 6, 8))
    k_Q, v_Q = ([x.repeat_interleave(3, dim=1) for x in side] for side in (k, v))
    assert_same(reference(grouped, q, k, v), reference(repeated, q, k_Q, v_Q))


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8/token", "int8/block16", "int8/head", "k8v4", "kivi4/g16/r32",
                                  "bf16+kivi4/g16/r32", "kivi2/g16/r48+fp32"])
@pytest.mark.parametrize("layout", [Layout(16), Layout(16, "random"), Layout(32, "random", "token"),
                                    Layout(48, "random"), Layout(16, "random", share_prefix=True)])
def test_paged_storage_reads_back_as_contiguous_to_the_bit(name, layout):
    workload = Workload(AttentionShape(4, 2, 8), (1, 2, 20), (33, 48, 65), shared_prefix=32)
    if kv_format(name).residual and layout.share_prefix:
        pytest.skip(layout.why_not(workload, kv_format(name)))
    inputs = Comparison((trial("paged", workload, kv_format=name, layout=Layout()),
                         trial("paged", workload, kv_format=name, layout=layout))).inputs()
    outputs, decoded = [], []
    for copies in inputs.values():
        one, fmt = copies[0], copies[0].cache.format
        stored = [one.cache.gather(table[:-(-n // one.cache.block_size)], n, b)
                  for b, (table, n) in enumerate(zip(one.block_table.tolist(), workload.kv_lens, strict=True))]
        pairs = [fmt.decode(packed, workload.shape, torch.float32) for packed in stored]
        decoded.append([x for pair in pairs for x in pair])
        outputs.append(reference(workload, one.q_BTQD, [k for k, _ in pairs], [v for _, v in pairs]))
    assert all(torch.equal(a, b) for a, b in zip(*decoded, strict=True))
    assert torch.equal(*outputs)


def test_the_last_causal_row_is_decoding_over_all_tokens():
    shape = AttentionShape(4, 2, 8)
    prefill = Workload.prefill(shape, q_len=7)
    q, k, v = drawn(prefill)
    decode = reference(Workload.decode(shape, kv_len=7), [q[0][-1:]], k, v)
    assert_same(reference(prefill, q, k, v)[-1:], decode)


def test_a_row_does_not_depend_on_later_tokens():
    shape = AttentionShape(4, 2, 8)
    q, k, v = drawn(Workload.prefill(shape, q_len=9))
    shorter = reference(Workload.prefill(shape, q_len=5), [q[0][:5]], [k[0][:5]], [v[0][:5]])
    assert_same(reference(Workload.prefill(shape, q_len=9), q, k, v)[:5], shorter)


def test_adding_one_vector_to_every_k_shifts_all_scores_of_a_query_and_changes_nothing():
    workload = Workload(AttentionShape(4, 2, 8), (1, 4), (6, 4))
    q, k, v = drawn(workload)
    shift_KD = 3 * torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert_same(reference(workload, q, k, v), reference(workload, q, [x + shift_KD for x in k], v))
    moved = [x.clone() for x in k]
    moved[1][0] += shift_KD                                             # one token alone does change it
    assert (reference(workload, q, k, v) - reference(workload, q, moved, v)).abs().max() > 0.01


def test_adding_one_vector_to_every_v_adds_it_to_every_output():
    workload = Workload(AttentionShape(4, 2, 8, v_head_dim=3, window=3), (1, 4), (6, 4))
    q, k, v = drawn(workload)
    shift_KE = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = reference(workload, q, k, v) + shift_KE.repeat_interleave(2, dim=0)
    assert_same(reference(workload, q, k, [x + shift_KE for x in v]), expected)


def test_v_as_a_view_of_k_equals_the_same_v_stored_apart():
    latent = Workload(AttentionShape(6, 1, 12, v_head_dim=8, v_in_k=True), (1, 3), (9, 7))
    q, k, _ = drawn(latent)
    apart = replace(latent, shape=replace(latent.shape, v_in_k=False))
    assert torch.equal(reference(latent, q, k, [None, None]), reference(apart, q, k, [x[..., :8] for x in k]))


@pytest.mark.parametrize("window", [1, 3, 9, 20])
def test_a_window_equals_an_explicit_mask(window):
    workload = Workload.prefill(AttentionShape(2, 2, 8, window=window), q_len=6, kv_len=10)
    (q,), (k,), (v,) = drawn(workload)
    score_QTS = torch.einsum("tqd,sqd->qts", q, k) / 8**0.5
    for t in range(6):
        for token in range(10):
            if not 4 + t - window < token <= 4 + t:
                score_QTS[:, t, token] = -1e300
    expected = torch.einsum("qts,sqe->tqe", score_QTS.softmax(-1), v)
    assert_same(reference(workload, [q], [k], [v]), expected)


def test_a_window_of_one_returns_the_tokens_own_v():
    workload = Workload.prefill(AttentionShape(2, 2, 8, window=1), q_len=3, kv_len=5)
    q, k, v = drawn(workload)
    assert_same(reference(workload, q, k, v), v[0][2:])


def test_soft_capped_scores_are_cap_times_tanh_of_score_over_cap():
    workload = Workload.decode(AttentionShape(1, 1, 2, softcap=1.5), kv_len=2)
    q = torch.tensor([[[math.sqrt(2), 0.0]]], dtype=torch.float64)              # scores 4 and -1
    k = torch.tensor([[[4.0, 0]], [[-1.0, 0]]], dtype=torch.float64)
    v = torch.tensor([[[1.0, 0]], [[0.0, 1]]], dtype=torch.float64)
    first, second = math.exp(1.5 * math.tanh(4 / 1.5)), math.exp(1.5 * math.tanh(-1 / 1.5))
    expected = torch.tensor([[[first, second]]], dtype=torch.float64) / (first + second)
    assert_same(reference(workload, [q], [k], [v]), expected, 1e-15)


def test_a_very_high_soft_cap_caps_nothing():
    workload = Workload.prefill(AttentionShape(4, 2, 8), q_len=5)
    q, k, v = drawn(workload)
    capped = replace(workload, shape=replace(workload.shape, softcap=1e6))
    assert_same(reference(workload, q, k, v), reference(capped, q, k, v), 1e-9)


def test_the_order_of_cached_tokens_does_not_matter_to_decoding():
    workload = Workload.decode(AttentionShape(4, 2, 8), kv_len=11)
    q, k, v = drawn(workload)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(3))
    assert_same(reference(workload, q, k, v), reference(workload, q, [k[0][order]], [v[0][order]]))


def test_sampled_rows_equal_the_same_rows_of_the_full_result():
    workload = Workload(AttentionShape(4, 2, 8, window=5), (6, 1, 9), (6, 12, 14))
    q, k, v = drawn(workload)
    rows = [torch.tensor([0, 3, 5]), torch.tensor([0]), torch.tensor([8, 2])]
    places = torch.tensor([0, 3, 5, 6, 7 + 8, 7 + 2])
    assert_same(reference(workload, q, k, v, rows), reference(workload, q, k, v)[places])


def test_arithmetic_is_fp64_unless_a_lower_dtype_is_asked_for():
    workload = Workload.decode(AttentionShape(4, 2, 8), kv_len=50)
    q, k, v = ([x.to(torch.bfloat16) for x in side] for side in drawn(workload))
    exact, plain = reference(workload, q, k, v), reference(workload, q, k, v, dtype=torch.bfloat16)
    assert (exact.dtype, plain.dtype) == (torch.float64, torch.bfloat16)
    assert_same(exact, reference(workload, *([x.double() for x in side] for side in (q, k, v))), 0)
    assert 1e-4 < (plain.double() - exact).norm() / exact.norm() < 0.05
