"""Shapes and workloads: what is refused and in which words, and the counts against brute force over the mask."""
import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.shapes import LAYER_KINDS, AttentionShape, LayerSpec, ModelSpec, Workload


def visible_tokens(q_len, kv_len, window):
    """The mask written out: for each query, the set of KV tokens that it sees."""
    sets = []
    for t in range(q_len):
        position = kv_len - q_len + t
        sets.append({s for s in range(kv_len) if s <= position and (window is None or s > position - window)})
    return sets


lengths = st.integers(1, 12).flatmap(lambda q: st.tuples(st.just(q), st.integers(q, 30)))


@settings(deadline=None)
@given(st.lists(lengths, min_size=1, max_size=4), st.none() | st.integers(1, 40))
def test_visible_pairs_and_first_visible_match_the_mask(sequences, window):
    q_lens, kv_lens = zip(*sequences, strict=True)
    workload = Workload(AttentionShape(4, 2, 8, window=window), q_lens, kv_lens)
    masks = [visible_tokens(q, kv, window) for q, kv in sequences]
    assert workload.visible_pairs() == sum(len(seen) for mask in masks for seen in mask)
    for i, mask in enumerate(masks):
        assert workload.first_visible(i) == min(set().union(*mask))


def test_visible_pairs_by_hand():
    shape = AttentionShape(8, 8, 64)
    assert Workload.decode(shape, batch_size=3, kv_len=100).visible_pairs() == 300
    assert Workload.prefill(shape, q_len=4).visible_pairs() == 1 + 2 + 3 + 4
    assert Workload.prefill(shape, q_len=2, kv_len=10).visible_pairs() == 9 + 10


@pytest.mark.parametrize("heads, kv_heads, ratio", [(32, 32, 1), (32, 8, 4), (64, 8, 8), (32, 1, 32)])
def test_group_ratio_is_query_heads_per_kv_head(heads, kv_heads, ratio):
    assert AttentionShape(heads, kv_heads, 128).group_ratio == ratio


def test_v_dim_follows_head_dim_unless_given():
    assert AttentionShape(8, 8, 64).v_dim == 64
    assert AttentionShape(128, 1, 576, v_head_dim=512, v_in_k=True).v_dim == 512


@pytest.mark.parametrize("arguments, message", [
    (dict(num_q_heads=32, num_kv_heads=5, head_dim=64), "num_q_heads=32 is not a multiple of num_kv_heads=5; "
                                                        "allowed num_kv_heads: 1, 2, 4, 8, 16, 32"),
    (dict(num_q_heads=0, num_kv_heads=1, head_dim=64), "num_q_heads=0 must be a whole number of at least 1"),
    (dict(num_q_heads=8, num_kv_heads=-8, head_dim=64), "num_kv_heads=-8 must be"),
    (dict(num_q_heads=8, num_kv_heads=8, head_dim=64.0), "head_dim=64.0 must be"),
    (dict(num_q_heads=True, num_kv_heads=1, head_dim=64), "num_q_heads=True must be"),
    (dict(num_q_heads=8, num_kv_heads=8, head_dim=64, v_head_dim=0), "v_head_dim=0 must be"),
    (dict(num_q_heads=8, num_kv_heads=8, head_dim=64, window=0), "window=0 must be"),
    (dict(num_q_heads=8, num_kv_heads=8, head_dim=64, softcap=0.0), "softcap=0.0 must be above 0"),
    (dict(num_q_heads=8, num_kv_heads=8, head_dim=64, softcap=float("nan")), "softcap=nan must be above 0"),
    (dict(num_q_heads=8, num_kv_heads=1, head_dim=64, v_head_dim=65, v_in_k=True), "v_in_k needs v_head_dim <= head"),
])
def test_impossible_shapes_are_refused_in_words(arguments, message):
    with pytest.raises(ValueError, match=message):
        AttentionShape(**arguments)


@pytest.mark.parametrize("q_lens, kv_lens, shared, message", [
    ((), (), 0, "one entry per sequence, got 0 and 0"),
    ((1,), (5, 6), 0, "one entry per sequence, got 1 and 2"),
    ((6,), (5,), 0, "kv_len=5 is less than q_len=6"),
    ((0,), (5,), 0, "q_len=0 must be"),
    ((1, 1), (5, -5), 0, "kv_len=-5 must be"),
    ((1, 1), (5, 9), 6, "shared_prefix=6 must lie between 0 and the shortest kv_len"),
    ((1, 1), (5, 9), -1, "shared_prefix=-1 must lie"),
])
def test_impossible_workloads_are_refused_in_words(q_lens, kv_lens, shared, message):
    with pytest.raises(ValueError, match=message):
        Workload(AttentionShape(8, 2, 64), q_lens, kv_lens, shared)


def test_batch_size_must_be_positive():
    with pytest.raises(ValueError, match="batch_size=0"):
        Workload.decode(AttentionShape(8, 2, 64), batch_size=0, kv_len=4)
    with pytest.raises(ValueError, match="batch_size=-1"):
        Workload.prefill(AttentionShape(8, 2, 64), batch_size=-1, q_len=4)


@pytest.mark.parametrize("q_lens, kv_lens, phase, uniform", [
    ((1, 1), (8, 8), "decode", True), ((1, 1), (8, 9), "decode", False), ((8, 8), (8, 8), "prefill", True),
    ((1, 8), (8, 8), "mixed", False), ((4, 8), (8, 8), "prefill", False),
])
def test_phase_and_uniform(q_lens, kv_lens, phase, uniform):
    workload = Workload(AttentionShape(8, 2, 64), q_lens, kv_lens)
    assert (workload.phase, workload.uniform, workload.batch_size) == (phase, uniform, 2)


def test_columns_hold_the_maxima():
    columns = Workload(AttentionShape(8, 2, 64), (1, 7), (30, 9)).columns()
    assert columns == dict(phase="mixed", batch_size=2, q_len=7, kv_len=30, num_q_heads=8, num_kv_heads=2,
                           group_ratio=4, head_dim=64)


def test_shapes_and_workloads_are_values():
    shape = AttentionShape(8, 2, 64)
    assert len({Workload.decode(shape, kv_len=4), Workload(AttentionShape(8, 2, 64), (1,), (4,))}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        shape.head_dim = 32


@pytest.mark.parametrize("arguments, message", [
    (dict(kind="dense", count=1), "layer kind 'dense' is unknown; allowed: full, sliding, chunked, mla, linear"),
    (dict(kind="full", count=0), "count=0 must be"),
    (dict(kind="sliding", count=1, num_q_heads=8, num_kv_heads=8, head_dim=64), "a sliding layer needs a window"),
    (dict(kind="chunked", count=1, num_q_heads=8, num_kv_heads=8, head_dim=64), "a chunked layer needs a window"),
])
def test_impossible_layers_are_refused_in_words(arguments, message):
    with pytest.raises(ValueError, match=message):
        LayerSpec(**arguments)


def test_a_layer_knows_the_shape_of_its_attention_call():
    assert LayerSpec("full", 4, 32, 8, 128, v_head_dim=64).shape == AttentionShape(32, 8, 128, 64)
    assert LayerSpec("mla", 4, 128, 1, 576, v_head_dim=512).shape == AttentionShape(128, 1, 576, 512, v_in_k=True)
    assert LayerSpec("linear", 4, state_bytes=1024).shape is None
    assert {"full", "mla", "linear"} < set(LAYER_KINDS)


def test_a_model_counts_its_layers_over_all_kinds():
    full = LayerSpec("full", 5, 32, 8, 128)
    model = ModelSpec("hybrid", (full, LayerSpec("linear", 43, state_bytes=1024)), 32, 8, 128)
    assert model.num_layers == 48
    assert model.params is None and model.context is None, "an unknown fact is None, never guessed"
    assert model.weight_bytes is None and model.assumed == () and model.approximate == ""
