"""What a teacher's cache gives is decoding token by token, to rounding; static scales come from another text."""
import pytest
import torch
from test_decoder import ids, one_thread, tiny  # noqa: F401

from kvlab.attention import VariantRef
from kvlab.kv.cache import Layout
from kvlab.kv.formats import format_names
from kvlab.model.cache import calibrated
from kvlab.model.decoder import Decoder

LENGTH = 41                                     # no multiple of a group, and beyond two blocks
MIXED = ("kivi4/g8/r16+int8/block16", "int8/block16+kivi4/g8/r16", "kivi4/g8/r16+int4/channel/g32",
         "kivi4/g8/r16+fp32", "fp32+kivi2/g4/r8")


@pytest.mark.parametrize("name", [*format_names(), "kivi4/g8/r16", "kivi2/g4/r8", "int4/channel/g32+fp32",
                                  "fp32+int8/block16", *MIXED])
def test_scoring_is_decoding_token_by_token(name):
    decoder, text = Decoder.random(tiny(head_dim=12)), ids(LENGTH)
    formats = calibrated(decoder, name, ids(50, 9))
    scored = decoder.hidden([text], decoder.teacher(formats))
    group = max(fmt.token_group(tiny().shape(0)) for fmt in formats)
    cache = decoder.cache(64, kv_format=formats, variant="paged_gather", layout=Layout(-(-16 // group) * group))
    decoded = torch.cat([decoder.hidden([token], cache) for token in text.split(1)])
    exact = decoder.hidden([text], decoder.teacher())
    # a code or tail may round the other way where the states differ in their last bits, as one CPU's sums do and
    # another's do not: far less than what the format itself costs
    allowed = (2e-4 if "16" in name or "kivi" in name else 1e-5) * exact.norm()
    assert (scored - decoded).norm() <= max(allowed, 0.1 * (scored - exact).norm())
    if name != "fp32":
        assert (scored - exact).norm() > 1e-5 * exact.norm()


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8/token", "int8/block16", "fp8_e4m3", "fp8_e5m2/token"])
def test_decoding_in_place_is_decoding_what_was_gathered(name):
    """Sums in another order: the states differ in their last bits, so a code may round the other way, and few do."""
    decoder, text, out = Decoder.random(tiny(head_dim=12)), ids(LENGTH), []
    for variant in ("paged", "paged_gather"):
        cache = decoder.cache(64, kv_format=calibrated(decoder, name, ids(50, 9)), variant=variant, layout=Layout(16))
        out.append(torch.cat([decoder.hidden([token], cache) for token in text.split(1)]))
    assert (out[0] - out[1]).norm() <= (1e-5 if name == "fp32" else 2e-3) * out[1].norm()


@pytest.mark.parametrize("name", [*format_names(), *MIXED])
def test_no_token_sees_what_comes_after_it(name):
    decoder = Decoder.random(tiny())
    formats = calibrated(decoder, name, ids(50, 9))
    text, other = ids(LENGTH), ids(LENGTH)
    other[23:] = ids(LENGTH - 23, 5)
    a, b = (decoder.hidden([t], decoder.teacher(formats)) for t in (text, other))
    assert torch.equal(a[:23], b[:23]) and not torch.equal(a[23:], b[23:])


@pytest.mark.parametrize("variant, name", [("paged", "kivi4/g8/r16"), ("sdpa", "int8/block16"),
                                           ("paged", "int4/channel/g32")])
def test_a_prompt_is_attended_in_full_where_later_tokens_would_show(variant, name):
    decoder, text = Decoder.random(tiny()), ids(LENGTH)
    exact = decoder.hidden([text], decoder.teacher())
    layout = Layout(32) if variant == "paged" else None
    cache = decoder.cache(64, kv_format=name, variant=variant, layout=layout, sequences=3)
    whole = decoder.hidden([text, text[:30]], cache)
    assert torch.allclose(whole, torch.cat([exact, exact[:30]]), atol=2e-5)
    # one token more beside a prompt: each is what it would be in a step of its own
    both = decoder.hidden([ids(1, 7), text], cache, sequences=[0, 2])
    alone = decoder.cache(64, kv_format=name, variant=variant, layout=layout)
    decoder.hidden([text], alone)
    assert torch.allclose(both[:1], decoder.hidden([ids(1, 7)], alone), atol=2e-5)
    assert torch.allclose(both[1:], exact, atol=2e-5)
    more = decoder.hidden([ids(2, 8)], alone)                      # earlier tokens as they are stored
    longer = torch.cat([text, ids(1, 7), ids(2, 8)])
    off = (more - decoder.hidden([longer], decoder.teacher())[-2:]).norm() / more.norm()
    assert 1e-4 < off < 0.4


def test_a_teacher_takes_one_text_once():
    decoder = Decoder.random(tiny())
    cache = decoder.teacher()
    decoder.hidden([ids(4)], cache)
    with pytest.raises(ValueError, match="one whole text, once"):
        decoder.hidden([ids(4)], cache)
    with pytest.raises(ValueError, match="2 texts for sequences .* of the 1 that this cache has"):
        decoder.hidden([ids(4), ids(4)], decoder.teacher())


def test_the_variant_that_reads_is_said_and_can_be_chosen():
    decoder = Decoder.random(tiny())
    assert decoder.teacher("int8/token").variants == (VariantRef("sdpa"),) * 2
    assert decoder.teacher(["fp32", "kivi4/g8/r16"]).variants == (VariantRef("sdpa"), VariantRef("paged"))
    text = ids(20)
    assert torch.allclose(decoder.hidden([text], decoder.teacher("int8/token", variant="naive")),
                          decoder.hidden([text], decoder.teacher("int8/token", variant="paged")), atol=1e-5)
    with pytest.raises(ValueError, match="layer 0: sdpa cannot compute this call"):
        decoder.hidden([text], decoder.teacher("kivi4/g8/r16", variant="sdpa"))


def test_calibration_finds_each_layers_own_scales():
    decoder, text, seen = Decoder.random(tiny()), ids(30, 3), {}
    decoder.hidden([text], decoder.teacher(), observe=lambda layer, q, k, v: seen.setdefault(layer, (k, v)))
    for layer, fmt in enumerate(calibrated(decoder, "int8/tensor", text)):
        for codec, x in zip((fmt.k, fmt.v), seen[layer]):
            assert torch.allclose(codec.scales[0].flatten(), x.abs().max() / 127)
    mixed = calibrated(decoder, ["fp32", "int8/tensor+int4/token"], text)
    assert [fmt.name for fmt in mixed] == ["fp32", "int8/tensor+int4/token"] and not mixed[1].static
    with pytest.raises(ValueError, match="1 KV formats for 2 layers"):
        calibrated(decoder, ["int8/tensor"], text)
    with pytest.raises(ValueError, match="calibration text is empty"):
        calibrated(decoder, "int8/tensor", ids(0))


def test_freed_sequences_give_their_blocks_back_and_can_be_used_again():
    decoder = Decoder.random(tiny())
    cache = decoder.cache(16, variant="paged", layout=Layout(4), sequences=2, num_blocks=6)
    decoder.hidden([ids(10)], cache, sequences=[1])
    assert cache.kv_lens == [0, 10] and cache.pool.free_blocks == 2
    alone = decoder.hidden([ids(1, 2)], cache, sequences=[1])
    cache.free(1)
    assert cache.kv_lens == [0, 0] and cache.pool.free_blocks == 5 and cache.stored_bytes == 0
    decoder.hidden([ids(10)], cache, sequences=[0])
    assert torch.allclose(decoder.hidden([ids(1, 2)], cache, sequences=[0]), alone, atol=1e-5)
    cache.pool.check(cache.tables)


@pytest.mark.parametrize("chosen", [[1], [0, 2], [2, 0]])
@pytest.mark.parametrize("name, variant, layout", [("kivi4/g8/r16", "paged", Layout(8, "random")),
                                                   ("kivi4/g8/r16", "sdpa", None), ("int8/token", "sdpa", None),
                                                   ("int8/token", "paged", Layout())])
def test_a_step_of_some_sequences_is_each_of_them_alone(name, variant, layout, chosen):
    decoder, texts = Decoder.random(tiny()), [ids(19, 1), ids(26, 2), ids(7, 3)]

    def fresh(sequences):
        return decoder.cache(40, kv_format=name, variant=variant, layout=layout, sequences=sequences)
    cache = fresh(3)
    decoder.hidden(texts, cache)
    got = decoder.hidden([ids(1, 10 + b) for b in chosen], cache, sequences=chosen)
    for i, b in enumerate(chosen):
        alone = fresh(1)
        decoder.hidden([texts[b]], alone)
        assert torch.allclose(got[i], decoder.hidden([ids(1, 10 + b)], alone)[0], atol=2e-5)
    assert cache.kv_lens == [len(t) + (b in chosen) for b, t in enumerate(texts)]


def test_random_pages_lie_in_no_order_and_change_nothing():
    decoder, text = Decoder.random(tiny()), ids(40)
    places = []
    for order in ("in_order", "random"):
        cache = decoder.cache(40, variant="paged", layout=Layout(4, order))
        assert torch.allclose(decoder.hidden([text], cache), decoder.hidden([text], decoder.teacher()), atol=2e-5)
        places.append(cache._placed[0])
    assert places[0] == sorted(places[0]) != places[1] and sorted(places[1]) == places[0]


def test_a_step_that_failed_half_way_spoils_its_sequence_until_it_is_freed():
    decoder = Decoder.random(tiny())
    weight = decoder.weights["model.layers.1.mlp.down_proj.weight"]
    cache = decoder.cache(40, kv_format="kivi4/g8/r16", variant="paged", layout=Layout(8))
    decoder.hidden([ids(10)], cache)
    kept, weight[3, 2] = weight[3, 2].clone(), float("nan")
    with pytest.raises(ValueError, match="layer 1"):
        decoder.hidden([ids(1, 2)], cache)
    weight[3, 2] = kept
    with pytest.raises(ValueError, match=r"failed half way.*free\(0\)"):
        decoder.hidden([ids(1, 2)], cache)
    cache.free(0)
    decoder.hidden([ids(10)], cache)
    cache.pool.check(cache.tables)


def test_why_not_is_asked_for_every_kind_of_call(monkeypatch):
    from kvlab.attention.sdpa import Sdpa
    asked = []
    monkeypatch.setattr(Sdpa, "why_not", lambda self, one: asked.append((one.workload.q_lens, one.workload.kv_lens)))
    decoder = Decoder.random(tiny())
    cache = decoder.cache(40)
    for n in (5, 6, 6, 1, 1):
        decoder.hidden([ids(n)], cache)
    assert asked == [((5,), (5,)), ((6,), (11,)), ((1,), (18,))]
