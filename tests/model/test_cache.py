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


@pytest.mark.parametrize("name", [*format_names(), "kivi4/g8/r16", "kivi2/g4/r8", "int4/channel/g32+fp32",
                                  "fp32+int8/block16"])
def test_scoring_is_decoding_token_by_token(name):
    decoder, text = Decoder.random(tiny(head_dim=12)), ids(LENGTH)
    formats = calibrated(decoder, name, ids(50, 9))
    scored = decoder.hidden([text], decoder.teacher(formats))
    group = max(fmt.token_group(tiny().shape(0)) for fmt in formats)
    cache = decoder.cache(64, kv_format=formats, variant="paged", layout=Layout(-(-16 // group) * group))
    decoded = torch.cat([decoder.hidden([token], cache) for token in text.split(1)])
    exact = decoder.hidden([text], decoder.teacher())
    # 16-bit codes may round the other way where the states differ in their last bits
    assert (scored - decoded).norm() <= (3e-4 if "16" in name or "kivi" in name else 1e-5) * exact.norm()
    if name != "fp32":
        assert (scored - exact).norm() > 1e-5 * exact.norm()


@pytest.mark.parametrize("name", format_names())
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
    with pytest.raises(ValueError, match="2 texts for sequences .* this cache has 1"):
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
    assert mixed[0].name == "fp32" and not mixed[1].static
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
