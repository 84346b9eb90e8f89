"""Greedy tokens depend neither on where the cache lies nor on being thrown out of it half way, in any format."""
import pytest
import torch
from test_decoder import ids, one_thread, tiny  # noqa: F401

from kvlab.kv.cache import Layout
from kvlab.model.decoder import Decoder
from kvlab.model.generate import greedy

PROMPTS = [ids(5, 1), ids(14, 2), ids(3, 3)]


def decoder():
    made = Decoder.random(tiny())
    made.weights["model.embed_tokens.weight"].mul_(3)               # distinct logits: no near ties to flip
    return made


def one_by_one(made, prompt, max_new):
    """The plainest greedy decoding there is: the whole text anew for every token."""
    tokens = prompt.tolist()
    for _ in range(max_new):
        states = made.hidden([torch.tensor(tokens)], made.teacher())
        tokens.append(int(made.logits(states[-1:]).argmax()))
    return tokens[len(prompt):]


def test_contiguous_paged_and_preempted_give_the_same_tokens():
    made = decoder()
    expected = [one_by_one(made, prompt, 25) for prompt in PROMPTS]
    contiguous = greedy(made, PROMPTS, 25)
    paged = greedy(made, PROMPTS, 25, variant="paged", layout=Layout(4, "random"))
    tiny_pool = greedy(made, PROMPTS, 25, variant="paged", layout=Layout(4), num_blocks=13)
    assert contiguous.tokens == paged.tokens == tiny_pool.tokens == expected
    assert contiguous.preemptions == paged.preemptions == 0 < tiny_pool.preemptions
    assert contiguous.steps == 25 < tiny_pool.steps


@pytest.mark.parametrize("kv_format", ["int8/token", "kivi4/g8/r16", "int8/block16"])
def test_a_preempted_sequence_of_a_quantised_cache_goes_on_as_it_began(kv_format):
    made = decoder()
    free = greedy(made, PROMPTS, 25, kv_format=kv_format, variant="paged", layout=Layout(16))
    tight = greedy(made, PROMPTS, 25, kv_format=kv_format, variant="paged", layout=Layout(16), num_blocks=5)
    assert tight.tokens == free.tokens and free.preemptions == 0 < tight.preemptions


@pytest.mark.parametrize("name, what", [("model.norm.weight", 3), ("lm_head.weight", 7)])
def test_nan_logits_stop_with_the_sequence_named(name, what):
    made = decoder()
    made.weights[name][what] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinite logits, first of sequence 0 at token 5"):
        greedy(made, PROMPTS, 3)


@pytest.mark.parametrize("kv_format", ["int8/token", "kivi4/g8/r16"])
def test_sequences_of_a_quantised_batch_are_those_alone(kv_format):
    made = decoder()
    together = greedy(made, PROMPTS, 20, kv_format=kv_format, variant="paged", layout=Layout(8))
    alone = [greedy(made, [p], 20, kv_format=kv_format, variant="paged", layout=Layout(8)).tokens[0] for p in PROMPTS]
    assert together.tokens == alone


def test_a_stop_token_ends_its_sequence_and_no_other():
    made = decoder()
    free = greedy(made, PROMPTS, 12).tokens
    stop = free[0][4]
    stopped = greedy(made, PROMPTS, 12, stop={stop}).tokens
    for got, whole in zip(stopped, free):
        end = whole.index(stop) + 1 if stop in whole else len(whole)
        assert got == whole[:end]
    assert len(stopped[0]) <= 5


@pytest.mark.parametrize("make, match", [
    (lambda d: greedy(d, PROMPTS, 0), "max_new=0"), (lambda d: greedy(d, [], 3), "no prompts"),
    (lambda d: greedy(d, PROMPTS, 20, variant="paged", layout=Layout(4), num_blocks=8),
     "34 tokens needs more than the pool's 7 blocks even alone; give num_blocks=10 or more"),
    (lambda d: greedy(d, PROMPTS, 20, variant="paged", layout=Layout(4), num_blocks=3), "even alone"),
    (lambda d: greedy(d, PROMPTS, 115), "129 tokens, prompt and max_new, are beyond the 128 of context"),
])
def test_wrong_use_is_refused_in_words(make, match):
    with pytest.raises(ValueError, match=match):
        make(decoder())
