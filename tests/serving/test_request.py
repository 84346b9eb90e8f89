"""Requests and what became of them: what is refused, and the four times."""
import pytest

from kvlab.serving.request import Request, Served


@pytest.mark.parametrize("bad", [dict(prompt_tokens=0), dict(output_tokens=0), dict(prompt_tokens=-3),
                                 dict(piece_tokens=0), dict(arrival_s=-1.0), dict(arrival_s=float("nan")),
                                 dict(arrival_s=float("inf")), dict(max_tokens=4), dict(prompt_tokens=2.5),
                                 dict(max_tokens=float("nan")), dict(max_tokens=9.5), dict(priority=float("nan")),
                                 dict(priority=0.5)])
def test_what_cannot_be_served_is_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Request(**dict(id="x", arrival_s=0.0, prompt_tokens=10, output_tokens=5) | bad)


def test_the_most_tokens_are_those_of_the_limit_where_one_was_given():
    assert Request("x", 0, 10, 5).most_tokens == 15
    assert Request("x", 0, 10, 5, max_tokens=20).most_tokens == 30


def test_times_are_none_until_they_come():
    served = Served(Request("x", 2.0, 10, 3))
    assert (served.queue_s, served.ttft_s, served.tpot_s, served.e2e_s) == (None,) * 4
    served.scheduled_s, served.first_token_s = 3.0, 5.0
    assert (served.queue_s, served.ttft_s, served.tpot_s, served.e2e_s) == (1.0, 3.0, None, None)
    served.last_token_s, served.generated = 9.0, 3
    assert (served.tpot_s, served.e2e_s) == (2.0, 7.0)


def test_one_token_has_no_time_between_tokens():
    assert Served(Request("x", 0, 10, 1), 0, 1, 1, generated=1).tpot_s is None
