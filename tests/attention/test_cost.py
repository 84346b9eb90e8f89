"""What a call must move and compute at the least, against brute force over the mask and over the stored bytes."""
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.attention import Comparison, ideal_traffic, least_cost, trial, useful_flops, variants
from kvlab.attention._matrix import WORKLOADS
from kvlab.attention._oracle import not_found, score_matrix_bytes
from kvlab.attention.flash import Flash
from kvlab.attention.naive import Naive
from kvlab.kv.cache import Layout
from kvlab.kv.formats import kv_format
from kvlab.probes import measure
from kvlab.probes.roofline import Roofline
from kvlab.shapes import AttentionShape, Workload

MHA = AttentionShape(4, 4, 16)
GQA = AttentionShape(8, 2, 16)
FORMATS = ["fp32", "bf16", "int8/token", "int8/block4", "int8/head", "fp8_e4m3", "int4/token/g3", "int4/channel/g4",
           "k16v8", "kivi4/g4/r4", "bf16+kivi4/g2/r6", "kivi2/g4/r8+fp32"]


@st.composite
def workloads(draw):
    kv_heads, head_dim, v_in_k = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.booleans())
    shape = AttentionShape(kv_heads * draw(st.integers(1, 3)), kv_heads, head_dim,
                           draw(st.none() | st.integers(1, head_dim if v_in_k else 6)), v_in_k,
                           draw(st.none() | st.integers(1, 12)))
    lengths = draw(st.lists(st.integers(1, 6).flatmap(lambda q: st.tuples(st.just(q), st.integers(q, 20))),
                            min_size=1, max_size=4))
    q_lens, kv_lens = zip(*lengths, strict=True)
    return Workload(shape, q_lens, kv_lens, draw(st.integers(0, min(kv_lens))))


def seen(workload):
    """Every visible (sequence, query token, KV token), read off the definition of the mask."""
    for b, (q_len, kv_len) in enumerate(zip(workload.q_lens, workload.kv_lens, strict=True)):
        for t in range(q_len):
            for token in range(kv_len):
                back = kv_len - q_len + t - token
                if back >= 0 and (workload.shape.window is None or back < workload.shape.window):
                    yield b, t, token


def stored_bytes(workload, fmt):
    """Bytes of the set of stored rows that some query sees; a row is shared if all its tokens lie in the prefix.

    A format that scales groups of tokens stores a group's codes anew where its scale is another. A tail (of K what its
    residual does not divide, of V the newest) is fp16, and each sequence of such a cache has everything to itself.
    """
    group, rows, shape = fmt.token_group(workload.shape), {}, workload.shape
    tails = any(codec.residual for codec, _ in fmt.sides(shape))
    for b, _, token in seen(workload):
        n = workload.kv_lens[b]
        shared = not tails and token // group * group + group <= workload.shared_prefix
        for side, (codec, width) in zip("kv", fmt.sides(shape), strict=not shape.v_in_k):
            in_fp16 = codec.residual and (n % codec.residual if side == "k" else codec.residual)
            if token >= n - in_fp16:
                rows[b, side, "tail", token] = 2 * width
                continue
            for part in codec.components(width):
                rows["all" if shared else b, side, part.name, token // part.tokens] = part.width * part.itemsize
    return sum(rows.values()) * workload.shape.num_kv_heads


@settings(max_examples=150, deadline=None)
@given(workloads())
def test_useful_flops_are_two_per_head_pair_and_element(workload):
    pairs, s = len(list(seen(workload))), workload.shape
    v_width = s.v_head_dim if s.v_head_dim else s.head_dim
    assert workload.visible_pairs() == pairs
    assert useful_flops(workload) == sum(2 * s.head_dim + 2 * v_width for _ in range(pairs * s.num_q_heads))


@settings(max_examples=150, deadline=None)
@given(workloads(), st.sampled_from(FORMATS), st.sampled_from([2, 4]))
def test_ideal_traffic_is_each_visible_stored_byte_once_and_q_and_the_output(workload, name, itemsize):
    fmt, s, tokens = kv_format(name), workload.shape, sum(workload.q_lens)
    cost = ideal_traffic(workload, fmt, itemsize)
    assert cost.read_bytes == tokens * s.num_q_heads * s.head_dim * itemsize + stored_bytes(workload, fmt)
    assert cost.write_bytes == tokens * s.num_q_heads * s.v_dim * itemsize
    assert cost.executed_flops == useful_flops(workload)


def test_ideal_traffic_by_hand():
    workload = Workload.decode(AttentionShape(8, 2, 64, v_head_dim=32), batch_size=3, kv_len=100)
    q, k, v, out = 3 * 8 * 64 * 4, 3 * 100 * 2 * 64, 3 * 100 * 2 * 32, 3 * 8 * 32 * 4
    assert ideal_traffic(workload, kv_format("fp32"), 4)[:2] == (q + 4 * (k + v), out)
    scales = 3 * 100 * 2 * 2 * 4                                      # one of fp32 per token, KV head, and each of K, V
    assert ideal_traffic(workload, kv_format("int8/token"), 4)[:2] == (q + k + v + scales, out)
    for name in ("fp8_e4m3", "fp8_e5m2/tensor", "int8/head", "int8/channel"):         # static scales are the layer's
        assert ideal_traffic(workload, kv_format(name), 4)[:2] == (q + k + v, out)
    groups = 3 * 100 * 2 * (2 + 1) * (2 + 2)                          # fp16 scale and zero of each 32 channels of K, V
    assert ideal_traffic(workload, kv_format("int4/token/g32"), 4)[:2] == (q + (k + v) // 2 + groups, out)
    assert ideal_traffic(workload, kv_format("int2/token/g32"), 2)[:2] == ((q // 2 + (k + v) // 4 + groups), out // 2)
    assert ideal_traffic(workload, kv_format("k16v8"), 4)[:2] == (q + 2 * k + v + scales // 2, out)
    # of K two groups of 32 are encoded and 36 tokens are not; of V 36 tokens are, and the newest 64 are not
    k_bytes, v_bytes = 2 * (64 * 32 + 2 * 64 * 4 + 36 * 64 * 2), 2 * (36 * (16 + 4) + 64 * 32 * 2)
    assert ideal_traffic(workload, kv_format("kivi4/g32/r64"), 4)[:2] == (q + 3 * (k_bytes + v_bytes), out)
    assert ideal_traffic(workload, kv_format("kivi4/g32/r64+fp32"), 4)[:2] == (q + 3 * k_bytes + 4 * v, out)
    assert ideal_traffic(workload, kv_format("bf16+kivi4/g32/r64"), 4)[:2] == (q + 2 * k + 3 * v_bytes, out)


def test_a_window_in_the_tail_reads_fp16_and_one_before_it_whole_groups_too():
    def read(window):
        workload = Workload.decode(AttentionShape(2, 1, 32, window=window), kv_len=100)
        return ideal_traffic(workload, kv_format("kivi4/g32/r64"), 4).read_bytes - 2 * 32 * 4
    codes, scales, zeros, fp16 = 16, 2, 2, 64                         # per token; of 32 channels
    token, channels = codes + scales + zeros, 32 * (scales + zeros)   # V's scale is the token's, K's the group's
    # K: tokens 0 … 31 and 32 … 63 in two groups, 64 … 99 in fp16; V: tokens 0 … 35 encoded, 36 … 99 in fp16
    assert [read(n) for n in (1, 36)] == [1 * 2 * fp16, 36 * 2 * fp16]
    assert read(37) == 36 * 2 * fp16 + codes + channels + fp16
    assert read(64) == 36 * 2 * fp16 + 28 * (codes + fp16) + channels
    assert read(65) == 36 * 2 * fp16 + 28 * (codes + fp16) + channels + codes + token
    assert read(69) == 36 * 2 * fp16 + 28 * (codes + fp16) + 5 * (codes + token) + 2 * channels
    assert read(100) == read(None) == 36 * 2 * fp16 + 28 * (codes + fp16) + 36 * (codes + token) + 2 * channels


@pytest.mark.parametrize("name", FORMATS)
def test_a_shared_prefix_counts_once(name):
    fmt, alone = kv_format(name), Workload.decode(GQA, batch_size=5, kv_len=80)
    shared = replace(alone, shared_prefix=48)
    saved = ideal_traffic(alone, fmt, 4).read_bytes - ideal_traffic(shared, fmt, 4).read_bytes
    assert saved == (0 if fmt.residual else 4 * fmt.nbytes(48, GQA)), "a cache with tails shares no prefix"


def test_a_prefix_outside_every_window_counts_nothing():
    fmt, windowed = kv_format("fp32"), replace(GQA, window=10)
    workload = Workload.decode(windowed, batch_size=2, kv_len=80, shared_prefix=64)
    assert ideal_traffic(workload, fmt, 4) == ideal_traffic(replace(workload, shared_prefix=0), fmt, 4)


@pytest.mark.parametrize("ratio", [1, 2, 8, 32])
def test_decoding_does_half_the_group_ratio_of_flop_per_byte_of_fp32_cache(ratio):
    shape = AttentionShape(2 * ratio, 2, 64)
    cost = ideal_traffic(Workload.decode(shape, kv_len=4096), kv_format("fp32"), 4)
    q = 2 * ratio * 64 * 4
    assert cost.executed_flops / (cost.read_bytes - q) == ratio / 2
    intensity = cost.executed_flops / (cost.read_bytes + cost.write_bytes)
    assert ratio / 2 * (1 - ratio / 4096) <= intensity < ratio / 2    # q and the output are ratio / kv_len of K and V


def test_ideal_bytes_and_useful_flops_depend_on_neither_variant_nor_layout():
    workload = WORKLOADS["shared prefix"]
    trials = tuple(trial(name, workload, layout=layout)
                   for name in ("naive", "naive_repeat", "sdpa", "flash", "paged", "paged_gather")
                   for layout in (Layout(), Layout(16, "random"), Layout(16, share_prefix=True))
                   if "paged" in name or layout.block_size is None)
    rows = measure(Comparison(trials), [Roofline()])
    values = {m: [r["value"] for r in rows if r["metric"] == m] for m in ("ideal_bytes", "useful_flops", "hbm_bytes")}
    assert {len(v) for v in values.values()} == {len(trials)}
    assert len(set(values["ideal_bytes"])) == len(set(values["useful_flops"])) == 1
    assert len(set(values["hbm_bytes"])) > 1                          # what a variant itself moves does depend


@settings(max_examples=60, deadline=None)
@given(workloads(), st.sampled_from([*FORMATS]), st.sampled_from([0, 1 << 30]), st.sampled_from([None, 4, 8]))
def test_no_variant_claims_to_do_with_less_than_the_ideal(workload, name, cache_bytes, block_size):
    ideal = ideal_traffic(workload, kv_format(name), 4)
    for variant in variants:
        one = trial(variant, workload, kv_format=name, layout=Layout(block_size))
        cost = one.variant.load().cost(one, cache_bytes)
        least = least_cost(one, cache_bytes)
        assert cost.read_bytes >= least.read_bytes >= ideal.read_bytes
        assert cost.write_bytes >= least.write_bytes >= ideal.write_bytes
        assert cost.executed_flops >= least.executed_flops == useful_flops(workload)
        assert all(type(number) is int for number in cost)


def test_a_layout_that_does_not_share_reads_the_prefix_once_per_sequence():
    workload = Workload.decode(GQA, batch_size=3, kv_len=80, shared_prefix=64)
    apart, shared = (trial("paged", workload, layout=Layout(16, share_prefix=share)) for share in (False, True))
    prefix = kv_format("fp32").nbytes(64, GQA)
    assert least_cost(apart).read_bytes - least_cost(shared).read_bytes == 2 * prefix
    assert least_cost(shared) == ideal_traffic(workload, kv_format("fp32"), 4)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 90))
def test_what_a_second_walk_does_not_find_is_what_an_lru_cache_forgot(nbytes, passed, cache):
    """A cache of single bytes, run: the array is walked while others pass evenly, then walked again alone."""
    held, others, missed = [], iter(range(1000, 1000 + passed)), 0

    def touch(one):
        found = one in held
        if found:
            held.remove(one)
        held.append(one)
        del held[:max(0, len(held) - cache)]
        return found
    for i in range(nbytes):
        touch(i)
        for _ in range((i + 1) * passed // nbytes - i * passed // nbytes):
            touch(next(others))
    for i in range(nbytes):
        missed += not touch(i)
    expected = not_found(nbytes, passed, cache)
    assert abs(missed - expected) <= 2 + (passed and nbytes / passed) + (nbytes == cache) * nbytes


def test_decoding_a_format_costs_a_write_of_the_floats_and_a_read_unless_they_and_the_codes_fit():
    workload = Workload.decode(replace(GQA, window=30), batch_size=2, kv_len=80)
    one = trial("sdpa", workload, kv_format="fp8_e4m3")
    ideal, floats = ideal_traffic(workload, one.format, 4), 2 * 30 * 2 * (16 + 16) * 4
    codes = 2 * (one.format.nbytes(80, workload.shape, first=50))
    assert one.format_path == "decoded"
    assert least_cost(one, floats - 1) == ideal.plus(read=floats, write=floats)
    assert least_cost(one, floats + codes) == ideal.plus(write=floats), "what is written is written back"
    half = least_cost(one, floats + codes // 2).read_bytes - ideal.read_bytes
    assert half == pytest.approx(floats / 2, rel=0.01), "half of the codes passed behind the part that stayed"
    native = trial("sdpa", workload, kv_format="fp32")
    assert native.format_path == "native" and least_cost(native) == ideal_traffic(workload, native.format, 4)


@pytest.mark.parametrize("name, k, v", [
    ("bf16", 4, 4), ("k16v8", 4, 8), ("int8/token", 8, 8), ("int8/channel", 8, 8), ("int8/block16", 8, 8),
    ("int4/token/g16", 26, 26),                       # shifted, masked, cast; two scales, spread twice; product, sum
    ("kivi4/g16/r16", 30, 30), ("bf16+kivi4/g16/r16", 4, 30)])                        # and joined to the tail
def test_what_decoding_writes_on_the_way_is_written_and_read_once(name, k, v):
    """Bytes per number of K and of V, fp32 on a CPU."""
    workload = Workload.decode(GQA, kv_len=100)
    one, numbers = trial("sdpa", workload, kv_format=name), 100 * 2 * 16
    moved = numbers * (k + v)
    assert least_cost(one) == ideal_traffic(workload, one.format, 4).plus(read=moved, write=moved)


def test_a_gpu_casts_codes_in_registers():
    workload = Workload.decode(GQA, kv_len=100)
    one = trial("sdpa", workload, kv_format="int8/token", device="cuda", dtype="fp32")
    assert least_cost(one).write_bytes == ideal_traffic(workload, one.format, 4).write_bytes + 100 * 2 * 32 * 4


def test_a_view_of_k_is_decoded_once():
    latent = AttentionShape(4, 1, 24, v_head_dim=16, v_in_k=True)
    one = trial("sdpa", Workload.decode(latent, kv_len=50), kv_format="bf16")
    assert least_cost(one).write_bytes == 4 * 16 * 4 + 50 * 24 * 4


def cost_of(variant, workload, cache_bytes=0, **rest):
    one = trial(variant, workload, **rest)
    return one.variant.load().cost(one, cache_bytes)


@pytest.mark.parametrize("ratio", [1, 4, 16])
def test_repeated_heads_are_read_per_copy_written_and_read_again(ratio):
    shape = AttentionShape(2 * ratio, 2, 16)
    workload = Workload.decode(shape, batch_size=2, kv_len=100)
    grouped, repeated = cost_of("naive", workload), cost_of("naive_repeat", workload)
    copies, stored = 2 * 100 * (2 * ratio) * (16 + 16) * 4, 2 * 100 * 2 * (16 + 16) * 4
    assert repeated.write_bytes - grouped.write_bytes == copies
    assert repeated.read_bytes - grouped.read_bytes == copies + (ratio - 1) * stored      # each copy reads its head
    assert repeated.executed_flops == grouped.executed_flops == useful_flops(workload)
    head = 100 * 16 * 4
    gone, stays = (cost_of("naive_repeat", workload, cache).read_bytes for cache in (2 * head - 1, 2 * head))
    assert gone - stays == pytest.approx((ratio - 1) * stored, abs=4), "a head and its copy fit"
    all_stay = cost_of("naive_repeat", workload, 2**30)
    assert all_stay.read_bytes == least_cost(trial("naive", workload)).read_bytes
    assert all_stay.write_bytes - cost_of("naive", workload, 2**30).write_bytes == copies


def test_the_score_matrix_is_written_scaled_hidden_and_its_softmax_read_unless_all_that_passes_fits():
    workload = Workload(replace(MHA, window=8), (5, 1), (20, 3))
    one = trial("naive", workload)
    long, short, mask = 4 * 5 * 12 * 4, 4 * 3 * 4, 5 * 12             # queries 15 … 19 see tokens 8 … 19 between them
    hidden = 4 * 5 * (12 - 8) * 4
    assert score_matrix_bytes(one) == long + short
    q = out = 5 * 4 * 16 * 4                                          # put in order by a copy each
    least, cost = least_cost(one), cost_of("naive", workload)
    assert cost.read_bytes == least.read_bytes + 3 * (long + short) + 4 * mask + hidden + q + out
    assert cost.write_bytes == least.write_bytes + 3 * (long + short) + hidden + q + out
    stays = cost_of("naive", workload, 2**20)
    assert stays.read_bytes == least.read_bytes + mask
    assert stays.write_bytes == least.write_bytes + 2 * (long + short) + q + out, "each array is written back once"
    assert cost.executed_flops == 2 * (16 + 16) * 4 * (5 * 12 + 1 * 3)                          # hidden cells too


def test_scores_that_fit_do_not_survive_k_and_v_passing_by():
    """4 heads, 1,000 tokens: 16 kB of scores, 256 kB each of K and V; a cache of 144 kB keeps half of them."""
    workload = Workload.decode(MHA, kv_len=1000)
    scores, k = 4 * 1000 * 4, 4 * 1000 * 16 * 4
    least = least_cost(trial("naive", workload)).read_bytes
    read = {cache: cost_of("naive", workload, cache).read_bytes - least for cache in (
        2 * scores, scores + k // 2, scores + k)}
    assert read[scores + k] == 0
    assert read[scores + k // 2] == pytest.approx(scores, rel=0.01), "half each by scaling and sum"
    assert read[2 * scores] == pytest.approx(2 * scores * (1 - scores / k), rel=0.01)


def test_naive_prefill_moves_bytes_in_the_square_of_the_length_and_flash_does_not():
    def extra(variant, n):
        workload = Workload.prefill(MHA, q_len=n)
        return sum(cost_of(variant, workload)[:2]) - sum(least_cost(trial(variant, workload))[:2])

    assert extra("naive", 4096) == pytest.approx(4 * extra("naive", 2048), rel=0.01)
    assert extra("naive", 256) > 0
    assert extra(Flash(q_tile=1024), 512) == 0


def test_flash_reads_k_and_v_again_for_every_tile_of_queries():
    """Three tiles of 4 queries over 12 tokens see 4 + 8 + 12 tokens; 12 of those reads are the ideal's."""
    workload = Workload.prefill(GQA, q_len=12)
    per_token = 2 * (16 + 16) * 4
    ideal = ideal_traffic(workload, kv_format("fp32"), 4)
    cost = cost_of(Flash(q_tile=4), workload)
    assert cost[:2] == (ideal.read_bytes + (4 + 8) * per_token, ideal.write_bytes)
    assert cost.executed_flops == 2 * 8 * (16 + 16) * 4 * (4 + 8 + 12)
    assert cost_of(Flash(q_tile=4), workload, 12 * per_token)[:2] == ideal[:2]


def test_flash_under_a_window_counts_again_only_what_two_tiles_both_see():
    """Tokens 96 … 99 are new; tiles of 2 queries see tokens 87 … 97 and 89 … 99 of a window of 10, 9 of them twice."""
    workload = Workload.prefill(replace(GQA, window=10), q_len=4, kv_len=100)
    cost = cost_of(Flash(q_tile=2), workload)
    assert cost.read_bytes - ideal_traffic(workload, kv_format("fp32"), 4).read_bytes == 9 * 2 * (16 + 16) * 4


def test_paged_writes_and_reads_the_gathered_bytes_and_reads_its_tables():
    workload = Workload(GQA, (1, 1), (40, 17))
    stored = kv_format("fp32").nbytes(40, GQA) + kv_format("fp32").nbytes(17, GQA)
    one = trial("paged_gather", workload, layout=Layout(16, "random"))
    least, cost = least_cost(one), cost_of("paged_gather", workload, layout=Layout(16, "random"))
    assert cost[:2] == (least.read_bytes + stored + 8 * (3 + 2), least.write_bytes + stored)
    stays = cost_of("paged_gather", workload, 2 * stored, layout=Layout(16, "random"))      # beside what was gathered
    assert stays == least.plus(read=8 * (3 + 2), write=stored)


@pytest.mark.parametrize("workload, again", [
    (Workload.decode(GQA, batch_size=2, kv_len=100), 3 * 200),
    (Workload(GQA, (1, 1), (100, 60)), 3 * 160),
    (Workload.decode(MHA, kv_len=100), 0),
])
def test_enable_gqa_walks_k_and_v_once_per_query_head_unless_one_heads_stay_in_the_cache(workload, again):
    longest = max(n - workload.first_visible(b) for b, n in enumerate(workload.kv_lens))
    one_head, per_token = longest * (16 + 16) * 4, workload.shape.num_kv_heads * (16 + 16) * 4
    least = least_cost(trial("sdpa", workload))
    assert cost_of("sdpa_enable_gqa", workload, one_head - 1) == least.plus(read=again * per_token)
    assert cost_of("sdpa_enable_gqa", workload, one_head) == least
    assert cost_of("sdpa", workload) == least, "folded: the group's heads are query tokens"


@pytest.mark.parametrize("workload, tokens, masks", [
    (Workload.prefill(GQA, q_len=100), 100, 0),                       # causal, without a mask
    (Workload.prefill(replace(GQA, window=10), q_len=4, kv_len=100), 13, 4 * 13),
    (Workload.prefill(GQA, q_len=20, kv_len=100), 100, 20 * 100),
    (Workload.prefill(GQA, batch_size=3, q_len=20, kv_len=100), 100, 20 * 100),
])
def test_sdpa_under_a_mask_is_a_call_per_head_of_the_group_and_a_mask_of_floats_each(workload, tokens, masks):
    """Masks are of booleans; each call writes its floats and reads them for each KV head; outputs are copied twice."""
    q_len, batch, least = workload.q_lens[0], workload.batch_size, least_cost(trial("sdpa", workload))
    kv, out = batch * 2 * tokens * (16 + 16) * 4, batch * q_len * 8 * 16 * 4
    cost = cost_of("sdpa", workload)
    assert cost.read_bytes == least.read_bytes + 3 * kv + 4 * (masks + batch * 2 * 4 * masks) + 2 * out
    assert cost.write_bytes == least.write_bytes + 4 * 4 * masks + 2 * out
    stays = cost_of("sdpa", workload, 2**30)
    assert stays.read_bytes == least.read_bytes + 4 * masks and stays.write_bytes == cost.write_bytes
    assert cost_of("sdpa", workload, device="cuda", dtype="fp32") == least, "a GPU's kernels share K and V"


def test_a_head_of_the_group_finds_k_and_v_only_if_those_of_all_kv_heads_stayed():
    workload = Workload.prefill(GQA, q_len=100)
    one_head, out = 100 * (16 + 16) * 4, 100 * 8 * 16 * 4
    least = least_cost(trial("sdpa", workload)).read_bytes
    assert cost_of("sdpa", workload, one_head).read_bytes - least == 3 * 2 * one_head + 2 * out
    assert cost_of("sdpa", workload, 2 * one_head).read_bytes - least <= 2 * out
    assert cost_of("sdpa_enable_gqa", workload, one_head).read_bytes - least <= out


def test_a_latent_is_walked_again_without_a_v_of_its_own():
    latent = AttentionShape(4, 1, 24, v_in_k=True)
    workload = Workload.decode(latent, kv_len=50)
    assert cost_of("sdpa_enable_gqa", workload).read_bytes - cost_of("sdpa", workload).read_bytes == 3 * 50 * 24 * 4


def test_naive_walks_a_latent_as_k_and_again_as_v():
    workload = Workload.decode(AttentionShape(4, 1, 24, v_head_dim=16, v_in_k=True), kv_len=50)
    scores, v = 4 * 50 * 4, 50 * 16 * 4
    least = least_cost(trial("naive", workload))
    assert cost_of("naive", workload) == least.plus(read=3 * scores + v, write=3 * scores)
    assert cost_of("naive", workload, 2**20).read_bytes == least.read_bytes


MATH = Workload.decode(AttentionShape(8, 2, 16), batch_size=2, kv_len=100)


def test_the_math_back_end_writes_a_scaled_k_three_matrices_and_a_byte_per_score():
    k, q, cells = 2 * 2 * 100 * 16 * 4, 2 * 8 * 16 * 4, 2 * 8 * 100
    least, cost = least_cost(trial("sdpa_math", MATH)), cost_of("sdpa_math", MATH)
    assert cost.write_bytes == least.write_bytes + k + q + 3 * 4 * cells + cells
    assert cost.read_bytes == least.read_bytes + k + q + 4 * 4 * cells + cells
    stays = cost_of("sdpa_math", MATH, 2**30)
    assert stays.read_bytes == least.read_bytes and stays.write_bytes == cost.write_bytes


def test_the_math_back_end_makes_a_call_and_a_mask_per_head_of_the_group():
    workload = Workload.prefill(AttentionShape(4, 2, 16), q_len=8, kv_len=20)
    k, q, cells, mask, out = 2 * 20 * 16 * 4, 4 * 8 * 16 * 4, 4 * 8 * 20, 8 * 20, 4 * 8 * 16 * 4
    least, cost = least_cost(trial("sdpa_math", workload)), cost_of("sdpa_math", workload)
    assert cost.write_bytes == least.write_bytes + 2 * (k + 4 * mask) + 2 * q + 4 * 4 * cells + cells + 2 * out
    assert cost.read_bytes == (least.read_bytes + 2 * k + 2 * k + 2 * mask + 4 * cells + 2 * q + 5 * 4 * cells + cells
                               + 2 * out), "K and V again by the second call"


@pytest.mark.parametrize("name", ["sdpa", "paged_gather", "sdpa_enable_gqa"])
def test_k_and_v_of_two_widths_are_torchs_math_on_a_cpu_and_no_gpus(name):
    wide = Workload.decode(AttentionShape(8, 2, 16, v_head_dim=8), batch_size=2, kv_len=100)
    least, q, cells = least_cost(trial("sdpa", wide)), 2 * 8 * 16 * 4, 2 * 8 * 100
    cost, k, v = cost_of(name, wide), 2 * 2 * 100 * 16 * 4, 2 * 2 * 100 * 8 * 4
    own = {"sdpa": k, "paged_gather": k + k + v, "sdpa_enable_gqa": 4 * k + 4 * (k + v)}[name]
    assert cost.write_bytes == least.write_bytes + own + q + 4 * 3 * cells + cells
    gpu = cost_of("sdpa", wide, device="cuda", dtype="fp32")
    assert gpu == least


def test_cuda_writes_every_cell_under_a_mask_and_a_cpu_only_those_that_are_hidden():
    """Scores larger than any cache: the masking reads and writes what it touches."""
    workload = Workload.prefill(AttentionShape(2, 2, 16), q_len=64)
    cpu, cuda = (Naive().cost(replace(trial("naive", workload, dtype="fp32"), device=device), 0)
                 for device in ("cpu", "cuda"))
    seen = 4 * 2 * workload.visible_pairs()
    assert cuda.read_bytes - cpu.read_bytes == seen == cuda.write_bytes - cpu.write_bytes
