"""Scores are those of the model with that cache, token by token and causal; what cannot be scored is refused."""
import math

import pytest
import torch

from kvlab.accuracy import scoring
from kvlab.accuracy.scoring import (
    compare,
    encode,
    hidden_states,
    kl_divergence,
    score,
    score_windows,
    windows,
    with_scales,
)
from kvlab.kv.formats import format_names
from kvlab.model.config import DecoderConfig
from kvlab.model.decoder import Decoder

CONFIG = DecoderConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=2, num_q_heads=4, num_kv_heads=2,
                       head_dim=32, context=512)
TOKENS = torch.randint(0, 97, (600,), generator=torch.Generator().manual_seed(1))
OTHER = torch.randint(0, 97, (128,), generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def decoder():
    return Decoder.random(CONFIG)


def with_format(decoder, name):
    return with_scales(decoder, name, OTHER)


def test_the_fp32_cache_is_its_own_reference(decoder):
    frame = score_windows(decoder, windows("a", TOKENS, window=80, count=2))
    assert list(frame.columns) == list(scoring.COLUMNS) and len(frame) == 160
    assert (frame["kl"] == 0).all() and frame["top1"].all() and frame["nll"].equals(frame["nll_reference"])
    assert frame["window"].tolist() == [0] * 80 + [1] * 80 and frame["position"].tolist() == [*range(80)] * 2


def test_nll_and_rank_are_of_the_next_token_and_the_last_has_none(decoder):
    one, = windows("a", TOKENS, window=80, start=7)
    assert one.ids_T.tolist() == TOKENS[7:87].tolist()
    frame = score_windows(decoder, [one])
    logits = decoder.logits(decoder.hidden([one.ids_T], decoder.cache(80)))
    expected = torch.nn.functional.cross_entropy(logits[:-1], one.ids_T[1:], reduction="none")
    assert frame["nll"][:-1].tolist() == pytest.approx(expected.tolist(), rel=1e-4)
    assert frame["token"][:-1].tolist() == one.ids_T[1:].tolist()
    place = [int((row > row[target]).sum()) for row, target in zip(logits[:-1], one.ids_T[1:])]
    assert frame["rank"][:-1].tolist() == place
    assert frame.iloc[-1][["nll", "nll_reference", "token", "rank"]].isna().all() and frame["kl"].notna().all()


def test_kl_is_over_the_whole_vocabulary_and_does_not_drown_in_rounding():
    """Against fp64 and the textbook sum, for caches that are far off and for such that differ by 1e-5."""
    p = torch.randn(6, 5000, generator=torch.Generator().manual_seed(0)) * 3
    for change in (1e-5, 1e-2, 1.0, 30.0):
        q = p + change * torch.randn(6, 5000, generator=torch.Generator().manual_seed(1))
        exact = [x.double().log_softmax(-1) for x in (p, q)]
        expected = (exact[0].exp() * (exact[0] - exact[1])).sum(-1)
        found = kl_divergence(p.log_softmax(-1), q.log_softmax(-1))
        assert found.tolist() == pytest.approx(expected.tolist(), rel=2e-2 if change == 1e-5 else 1e-3)
    far = torch.tensor([[0.0, -500.0]]).log_softmax(-1), torch.tensor([[-500.0, 0.0]]).log_softmax(-1)
    assert kl_divergence(*far).tolist() == pytest.approx([500.0])


@pytest.mark.parametrize("name", format_names())
def test_scores_look_at_no_later_token(decoder, name):
    """Everything behind token 50 is another text: what was scored before it stays, to the last bits."""
    first, changed = TOKENS[:72], torch.cat([TOKENS[:50], (TOKENS[50:72] + 31) % 97])
    formats = with_format(decoder, name)
    a, b = (hidden_states(decoder, windows("a", ids, window=72), formats)[0] for ids in (first, changed))
    torch.testing.assert_close(a[:50], b[:50], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(a[50:], b[50:], atol=1e-2)


@pytest.mark.parametrize("name", ["kivi4/g32/r32", "kivi2/g32/r32", "int8/token", "fp8_e4m3"])
def test_scores_are_those_of_decoding_token_by_token(decoder, name):
    """With a residual or a scale per token no group is rounded anew, so the growing cache must agree.

    KIVI's tokens wait in fp16 before they are encoded, and a text as a whole is encoded from fp32: some codes differ by
    one, which is little beside what the format itself changes.
    """
    one, = windows("a", TOKENS, window=72)
    cache, states = decoder.cache(96, kv_format=name), []
    for token in one.ids_T:
        states.append(decoder.hidden([token[None]], cache))
    (scored,), (exact,) = (hidden_states(decoder, [one], fmt) for fmt in (name, "fp32"))
    change = float((scored - exact)[32:].norm())
    assert change > 1e-3 and float((scored - torch.cat(states)).norm()) < (0.05 if "kivi" in name else 1e-3) * change


def test_every_so_many_tokens_are_the_same_tokens(decoder):
    chosen = windows("a", TOKENS, window=80)
    whole, part = (score_windows(decoder, chosen, "int4/token/g32", every=every) for every in (1, 4))
    same = whole[whole["position"] % 4 == 0].reset_index(drop=True)
    assert part["position"].tolist() == list(range(0, 80, 4)) and part["kl"].tolist() == pytest.approx(
        same["kl"].tolist(), rel=1e-4)
    assert part["nll"].notna().all()


def test_a_given_reference_saves_a_pass_and_changes_nothing(decoder):
    chosen = windows("a", TOKENS, window=40, count=2)
    reference = hidden_states(decoder, chosen)
    assert score_windows(decoder, chosen, "int8/token", reference=reference).equals(
        score_windows(decoder, chosen, "int8/token"))
    with pytest.raises(ValueError, match="1 reference states for 2 windows"):
        score_windows(decoder, chosen, "int8/token", reference=reference[:1])


def test_a_format_per_layer_and_a_list_of_stages(decoder):
    stages = []
    chosen = windows("a", TOKENS, window=40)
    last = score_windows(decoder, chosen, ["fp32", "int4/token/g32"], told=stages.append)
    both = score_windows(decoder, chosen, "int4/token/g32")
    assert 0 < last["kl"].mean() < 0.5 * both["kl"].mean()
    assert any("layer 1" in stage for stage in stages) and any("logits" in stage for stage in stages)


@pytest.mark.parametrize("name, where", [("model.layers.1.mlp.down_proj.weight", "layer 1"),
                                         ("model.layers.0.self_attn.k_proj.weight", "layer 0")])
def test_nan_stops_with_window_layer_and_token(decoder, name, where):
    weights = dict(decoder.weights)
    weights[name] = weights[name].clone()
    weights[name][3, 3] = math.nan
    with pytest.raises(ValueError, match=rf"essay, window 0: .*{where}.*token 0"):
        score_windows(Decoder(CONFIG, weights, name="broken"), windows("essay", TOKENS, window=40))


def test_infinite_logits_stop_with_the_token(decoder):
    weights = dict(decoder.weights)
    weights["lm_head.weight"] = weights["lm_head.weight"].clone()
    weights["lm_head.weight"][5] = math.inf
    with pytest.raises(ValueError, match="essay, window 0: the output layer of broken gives NaN or infinite logits"):
        score_windows(Decoder(CONFIG, weights, name="broken"), windows("essay", TOKENS, window=40))


def test_a_text_shorter_than_its_windows_says_both_numbers():
    with pytest.raises(ValueError, match="essay has 600 tokens, and 1064 are needed for 2 × 512 from token 40"):
        windows("essay", TOKENS, window=512, count=2, start=40)
    assert len(windows("essay", TOKENS, window=100, count=None, start=150)) == 4
    with pytest.raises(ValueError, match="has 600 tokens, and 700 are needed"):
        windows("essay", TOKENS, window=700, count=None)
    for wrong in (dict(window=1), dict(count=0), dict(start=-1)):
        with pytest.raises(ValueError, match="allowed"):
            windows("essay", TOKENS, **{"window": 8, **wrong})
    with pytest.raises(ValueError, match="no windows"):
        score_windows(None, [])


def test_static_scales_come_from_a_text_that_is_not_scored(decoder):
    chosen = windows("essay", TOKENS, window=80, count=2)
    assert with_scales(decoder, "int8/token", None) == "int8/token"
    assert not any(fmt.static for fmt in with_scales(decoder, "int8/channel", OTHER, chosen))
    for empty in (None, TOKENS[:0]):
        with pytest.raises(ValueError, match="calibration text is empty"):
            with_scales(decoder, "int8/tensor", empty, chosen)
    with pytest.raises(ValueError, match="shares 32 tokens in a row with essay, window 1"):
        with_scales(decoder, "int8/tensor", torch.cat([OTHER, TOKENS[100:140]]), chosen)
    assert with_scales(decoder, "int8/tensor", torch.cat([OTHER, TOKENS[100:120]]), chosen)
    with pytest.raises(ValueError, match="static scales"):
        score_windows(decoder, chosen, "int8/tensor")


def test_a_window_shorter_than_32_tokens_does_not_calibrate_itself(decoder):
    short = windows("essay", TOKENS, window=24)
    assert with_scales(decoder, "int8/tensor", OTHER, short)
    with pytest.raises(ValueError, match="shares 24 tokens in a row with essay, window 0"):
        with_scales(decoder, "int8/tensor", torch.cat([OTHER, TOKENS[:24], OTHER]), short)
    with pytest.raises(ValueError, match="shares 20 tokens in a row"):
        with_scales(decoder, "int8/tensor", TOKENS[30:50], windows("essay", TOKENS, window=80))


def test_another_models_states_as_the_reference_are_not_taken_for_its_own(decoder):
    """Under fp32 too: the reference is then that of the model before it was changed."""
    chosen, other = windows("a", TOKENS, window=40), Decoder.random(CONFIG, seed=1)
    frame = score_windows(other, chosen, reference=hidden_states(decoder, chosen))
    assert frame["kl"].min() > 0 and (score_windows(other, chosen)["kl"] == 0).all()


def test_a_range_that_was_guessed_too_small_clips(decoder):
    chosen = windows("a", TOKENS, window=80)
    from kvlab.kv.formats import kv_format
    small = torch.full((1, 2, 32), 0.2)
    guessed = score_windows(decoder, chosen, kv_format("int8/tensor").calibrate(small, small))
    calibrated = score_windows(decoder, chosen, with_format(decoder, "int8/tensor"))
    assert guessed["kl"].mean() > 20 * calibrated["kl"].mean()


def test_compare_reports_paired_differences(decoder):
    chosen = windows("a", TOKENS, window=128, count=2)
    exact, rough = score_windows(decoder, chosen), score_windows(decoder, chosen, "int4/token/g32")
    found = compare(rough)
    delta = (rough["nll"] - exact["nll"]).dropna()
    assert found.kl.value == pytest.approx(rough["kl"].mean()) and found.kl.n == 256
    assert found.nll_delta.value == pytest.approx(delta.mean()) and found.nll_delta.n == 254
    assert found.perplexity.value == pytest.approx(math.exp(rough["nll"].mean()))
    assert found.perplexity_delta.value == pytest.approx(math.expm1(delta.mean()))
    assert found.loss.value == found.perplexity_delta.value
    assert found.perplexity_delta.low < found.loss.low and found.loss.high < found.perplexity_delta.high
    assert found.top1_agreement.value == pytest.approx(rough["top1"].mean()) and found.top1_agreement.high <= 1
    gained = rough.assign(nll=rough["nll_reference"] - 0.1, nll_reference=rough["nll_reference"])
    lost = gained.assign(nll=rough["nll_reference"] + 0.1)
    assert (compare(gained).verdict, compare(lost).verdict) == ("gain", "above")
    assert compare(exact).verdict == "below" and compare(rough, rough).nll_delta.value == 0
    assert compare(rough, exact).nll_delta == found.nll_delta
    rows = found.readings(method="m", source="s")
    assert [(r.metric, r.unit) for r in rows] == list(scoring.UNITS.items())
    assert all(r.kind == "measured" and r.low is not None and r.n and r.method == "m" for r in rows)


def test_frames_of_other_tokens_are_not_compared(decoder):
    a = score_windows(decoder, windows("a", TOKENS, window=80))
    for other in (windows("b", TOKENS, window=80), windows("a", TOKENS, window=80, start=1),
                  windows("a", TOKENS, window=40)):
        with pytest.raises(ValueError, match="not of the same windows"):
            compare(a, score_windows(decoder, other))


class Letters:
    """A tokenizer of single characters."""
    def encode(self, content, add_special_tokens):
        assert not add_special_tokens
        return type("Encoding", (), {"ids": [ord(c) % 97 for c in content]})()

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(97 + i) for i in ids)


def test_the_door_scores_a_named_text(decoder, tmp_path):
    mine, other = tmp_path / "mine.txt", tmp_path / "other.txt"
    mine.write_text("".join(map(chr, (TOKENS[:200] + 97).tolist())))
    other.write_text("".join(map(chr, (OTHER + 97).tolist())))
    model = Decoder(CONFIG, decoder.weights, Letters(), "tiny")
    frame = score(model, f"file:{mine}", "int8/tensor", window=64, count=2, calibration=f"file:{other}")
    assert len(frame) == 128 and 0 < frame["kl"].mean() < 0.1
    for same in (f"file:{mine}", f"file:{mine.parent}/./{mine.name}"):
        with pytest.raises(ValueError, match="to be scored and to calibrate"):
            score("not loaded", f"file:{mine}", "int8/tensor", window=64, count=2, calibration=same)
    longer = tmp_path / "longer.txt"
    longer.write_text("zz" + mine.read_text())
    with pytest.raises(ValueError, match="shares 32 tokens"):
        score(model, f"file:{mine}", "int8/tensor", window=64, count=2, calibration=f"file:{longer}")
    with pytest.raises(ValueError, match="200 tokens, and 300 are needed"):
        score(model, f"file:{mine}", window=300, count=1)
    with pytest.raises(KeyError, match="int8/tokn"):
        score(model, f"file:{mine}", "int8/tokn", window=64)
    with pytest.raises(ValueError, match="has no tokenizer"):
        encode(decoder, "words")
    with pytest.raises(ValueError, match="2 × 32 tokens are too few for an interval"):
        score(model, f"file:{mine}", window=32)
    with pytest.raises(ValueError, match="score takes a kvlab Decoder.* got Linear; kvlab.attach"):
        score(torch.nn.Linear(2, 2), f"file:{mine}", window=64)
    with pytest.raises(ValueError, match="layer 0 cannot keep its K and V as nvfp4"):
        score(model, f"file:{mine}", "nvfp4", window=64)
    with pytest.raises(ValueError, match="is given by its name .* 31 characters of text; write it to a file"):
        score(model, "A text of mine,\nof two lines...", window=64)
