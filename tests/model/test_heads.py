"""Another number of KV heads: what is exact stays the same function, what is not is as the formula says."""
import pytest
import torch

from kvlab.model.config import DecoderConfig
from kvlab.model.decoder import Decoder
from kvlab.model.heads import _agreeing, align_kv_heads, convert, expand_kv_heads, pool_kv_heads

torch.set_num_threads(1)
K_NAME, V_NAME = "model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.v_proj.bias"


def config(**changed):
    return DecoderConfig(**{**dict(vocab_size=50, hidden_size=24, intermediate_size=32, num_layers=2, num_q_heads=12,
                                   num_kv_heads=4, head_dim=8, context=64, qkv_bias=True, windows=(None, 5)),
                            **changed})


def made(**changed):
    decoder = Decoder.random(config(**changed))
    decoder.name = "tiny"
    for name, w in decoder.weights.items():             # biases as large as the projections, so that one left out shows
        if name.endswith("bias"):
            w *= 10
    return decoder


def ids(n=40, seed=1):
    return torch.randint(50, (n,), generator=torch.Generator().manual_seed(seed))


def logits(decoder, text=None):
    return decoder.logits(decoder.hidden([ids() if text is None else text], decoder.teacher()))


def disguised(decoder, num_kv_heads):
    """The same function with more KV heads that look unlike: repeated, then each turned in its own way."""
    made, c = expand_kv_heads(decoder, num_kv_heads), decoder.config
    generator, group, half = torch.Generator().manual_seed(3), c.num_q_heads // num_kv_heads, c.head_dim // 2
    weights = {name: w.clone() for name, w in made.weights.items()}
    for layer in range(c.num_layers):
        at = f"model.layers.{layer}.self_attn."
        for head in range(num_kv_heads):
            readers = range(head * group, (head + 1) * group)
            turn, _ = torch.linalg.qr(torch.randn(c.head_dim, c.head_dim, generator=generator))
            angle = 6 * torch.rand(half, generator=generator)
            for side, heads in (("q", readers), ("k", [head])):
                for kind in ("weight", "bias"):
                    for i in heads:
                        rows = weights[f"{at}{side}_proj.{kind}"][i * c.head_dim:(i + 1) * c.head_dim]
                        z = torch.polar(torch.ones(half), angle).view(-1, *[1] * (rows.dim() - 1))
                        z = z * torch.complex(rows[:half], rows[half:])
                        rows[:half], rows[half:] = z.real, z.imag
            for kind in ("weight", "bias"):
                rows = weights[f"{at}v_proj.{kind}"][head * c.head_dim:(head + 1) * c.head_dim]
                rows[:] = turn @ rows
            for i in readers:
                columns = weights[f"{at}o_proj.weight"][:, i * c.head_dim:(i + 1) * c.head_dim]
                columns[:] = columns @ turn.T
    return made.renamed("disguised", weights)


@pytest.mark.parametrize("num_kv_heads", [4, 12])
def test_expansion_is_the_same_function(num_kv_heads):
    decoder = made()
    more = expand_kv_heads(decoder, num_kv_heads)
    assert more.config.num_kv_heads == num_kv_heads and more.weights[K_NAME].shape == (8 * num_kv_heads, 24)
    assert torch.allclose(logits(more), logits(decoder), atol=1e-4)
    assert torch.equal(logits(more).argmax(-1), logits(decoder).argmax(-1))
    assert more.name == f"tiny, {num_kv_heads} KV heads (expand)"


def test_expansion_with_qk_norm_is_the_same_function():
    decoder = made(qk_norm=True, qkv_bias=False)
    assert torch.allclose(logits(expand_kv_heads(decoder, 12)), logits(decoder), atol=1e-4)


def test_mean_and_first_pool_consecutive_heads_and_biases_and_share_the_rest():
    decoder = made()
    for method in ("mean", "first"):
        fewer = pool_kv_heads(decoder, 2, method)
        for name in (K_NAME, V_NAME):
            heads = decoder.weights[name].view(4, 8, -1)
            goal = (heads[0] + heads[1], heads[2] + heads[3]) if method == "mean" else (heads[0], heads[2])
            goal = torch.cat(goal) / (2 if method == "mean" else 1)
            assert torch.allclose(fewer.weights[name], goal.view(fewer.weights[name].shape)), (method, name)
        shared = [name for name, w in fewer.weights.items() if w is decoder.weights[name]]
        assert len(decoder.weights) - len(shared) == 2 * 4              # k, v: weight and bias of two layers
        assert fewer.name == f"tiny, 2 KV heads ({method})" and fewer.config.num_kv_heads == 2
        assert logits(fewer).shape == (40, 50)
    assert pool_kv_heads(decoder, 1).name == "tiny, 1 KV head (mean)"


def test_pooling_undoes_an_expansion():
    decoder = made(num_kv_heads=2)
    more = expand_kv_heads(decoder, 6)
    for method in ("mean", "first", "aligned"):
        assert torch.allclose(logits(pool_kv_heads(more, 2, method, ids())), logits(decoder), atol=1e-4), method


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_alignment_alone_is_the_same_function_in_another_basis(num_kv_heads):
    decoder = made()
    turned = align_kv_heads(decoder, num_kv_heads, ids())
    assert torch.allclose(logits(turned, ids(seed=2)), logits(decoder, ids(seed=2)), atol=1e-4)
    groups = [w.weights[K_NAME].view(num_kv_heads, -1, 8, 24) for w in (decoder, turned)]
    assert torch.allclose(groups[0][:, 0], groups[1][:, 0], atol=1e-6)              # the first of a group stays
    assert not torch.allclose(groups[0][:, 1], groups[1][:, 1], atol=1e-2)


@pytest.mark.parametrize("num_kv_heads, groups", [(6, 2), (4, 2), (4, 1)])
def test_alignment_finds_heads_that_are_one_in_disguise(num_kv_heads, groups):
    decoder = made(num_kv_heads=groups)
    unlike = disguised(decoder, num_kv_heads)
    assert torch.allclose(logits(unlike), logits(decoder), atol=1e-4)
    fewer = pool_kv_heads(unlike, groups, "aligned", ids(seed=4))
    assert torch.allclose(logits(fewer), logits(decoder), atol=1e-4)
    assert not torch.allclose(logits(pool_kv_heads(unlike, groups, "mean")), logits(decoder), atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_alignment_goes_on_until_no_head_can_agree_more(dtype):
    """At the end each head is turned to the sum of the others as well as can be; after one sweep it is not yet."""
    x_JTD = torch.randn(6, 40, 8, generator=torch.Generator().manual_seed(6), dtype=dtype)
    moments = torch.einsum("itd,jte->ijde", x_JTD, x_JTD.conj())

    def left(turns_JDD):
        """What turning the one head that can gain the most still gains, of the agreement that there is."""
        gains = []
        for j in range(1, 6):
            m_DD = sum(turns_JDD[i] @ moments[i, j] for i in range(6) if i != j)
            gains.append(float(torch.linalg.svdvals(m_DD).sum() - (m_DD * turns_JDD[j].conj()).sum().real))
        whole = torch.einsum("ide,ijef,jdf->", turns_JDD, moments, turns_JDD.conj()).real
        return max(gains) / float(whole)
    assert left(_agreeing(moments)) < 1e-5 < 1e-3 < left(_agreeing(moments, sweeps=1))


def test_alignment_of_unlike_heads_brings_k_and_v_closer_to_their_mean():
    decoder, text = made(windows=()), ids(60)

    def spread(one):
        found = {}

        def observe(layer, q, k, v):
            for side, x in (("k", k), ("v", v)):
                found[side, layer] = float((x - x.mean(1, keepdim=True)).square().sum())
        one.hidden([text], one.teacher(), observe=observe)
        return found
    before, after = spread(decoder), spread(align_kv_heads(decoder, 1, text))
    assert all(after[key] < before[key] for key in before)
    assert all(after["v", layer] < 0.8 * before["v", layer] for layer in range(2))


def test_weights_keep_their_dtype():
    decoder = made().to("cpu", torch.bfloat16)
    for method in ("expand", "mean", "aligned"):
        one = convert(decoder, 12 if method == "expand" else 1, method, ids=ids())
        assert {w.dtype for w in one.weights.values()} == {torch.bfloat16}, method


@pytest.mark.parametrize("wrong, said", [
    (lambda d: expand_kv_heads(d, 8), "allowed: 4, 12"), (lambda d: expand_kv_heads(d, 24), "allowed: 4, 12"),
    (lambda d: expand_kv_heads(d, 2), "allowed: 4, 12"), (lambda d: pool_kv_heads(d, 3), "allowed: 1, 2, 4"),
    (lambda d: pool_kv_heads(d, 0), "allowed: 1, 2, 4"), (lambda d: pool_kv_heads(d, 1.0), "allowed: 1, 2, 4"),
    (lambda d: align_kv_heads(d, 3, ids()), "allowed: 1, 2, 4"),
    (lambda d: pool_kv_heads(d, 1, "aligned"), "needs ids"),
    (lambda d: pool_kv_heads(d, 1, "aligned", ids(9)), "9 tokens.*at least 16"),
    (lambda d: convert(d, 1, "mean", 5), "needs ids"), (lambda d: convert(d, 1, "mean", -1, ids()), "distil_steps=-1"),
    (lambda d: convert(d, 12, "expand", 5, ids()), "nothing to learn"),
    (lambda d: convert(d, 4, "mean", 5, ids()), "nothing to learn"),
])
def test_what_is_impossible_is_refused_with_what_is_allowed(wrong, said):
    with pytest.raises(ValueError, match=said):
        wrong(made())


def test_unknown_methods_are_refused_with_a_near_match():
    with pytest.raises(KeyError, match="'mean'"):
        convert(made(), 1, "meen")
    with pytest.raises(KeyError, match="aligned"):
        pool_kv_heads(made(), 1, "expand")


def test_alignment_is_refused_under_qk_norm():
    decoder = made(qk_norm=True, qkv_bias=False)
    with pytest.raises(ValueError, match="QK-norm.*mean or first"):
        convert(decoder, 1, "aligned", ids=ids())
    assert logits(convert(decoder, 1, "mean")).shape == (40, 50)


def test_convert_distils_with_the_unconverted_decoder_as_teacher():
    decoder = made(context=1024)
    one = convert(decoder, 1, "mean", 2, ids(600))
    assert one.name == "tiny, 1 KV head (mean), distilled 2 steps a layer"
    assert not torch.equal(one.weights[K_NAME], convert(decoder, 1, "mean").weights[K_NAME])


def test_aligning_and_distilling_are_announced_layer_by_layer():
    text, told = torch.randint(50, (600,), generator=torch.Generator().manual_seed(3)), []
    decoder = made(context=1024)
    convert(decoder, 2, "aligned", 1, text, told=told.append)
    assert told == ["aligning layer 0", "aligning layer 1", "distilling layer 0, step 0", "distilling layer 1, step 0"]
