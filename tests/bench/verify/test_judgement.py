"""Differences of answers, the odd one among them, and the bet on it."""

from __future__ import annotations

import math
from random import Random

import pytest

from ferryman_bench.endpoint.reply import DrawnToken, Reply, ReportedUsage
from ferryman_bench.verify.difference import difference_of, odd_index
from ferryman_bench.verify.wager import Wager


def reply(*tokens: tuple[str, float], finish: str = "length", **above: float) -> Reply:
    drawn = tuple(DrawnToken(text, logprob, {text: logprob, **above}) for text, logprob in tokens)
    return Reply("".join(text for text, _ in tokens), drawn, finish, ReportedUsage())


def test_equal_answers_have_no_difference() -> None:
    assert difference_of(reply(("a", -1.0)), reply(("a", -1.0))).nats == 0


def test_the_largest_change_up_to_the_first_other_token_counts() -> None:
    one = reply(("a", -1.0), ("b", -0.5), ("c", -9.0))
    other = reply(("a", -1.25), ("b", -0.5), ("c", -9.5))
    assert difference_of(one, other).nats == 0.5
    parted = reply(("a", -1.25), ("x", -0.7), ("c", -0.1), b=-0.75)
    difference = difference_of(reply(("a", -1.0), ("b", -0.6), x=-0.65), parted)
    assert difference.position == 1
    assert difference.nats == pytest.approx(0.25)


def test_an_unlisted_token_is_at_most_as_likely_as_the_last_that_is_listed() -> None:
    one, other = reply(("a", -0.1), c=-4.0), reply(("b", -0.2), c=-3.0)
    assert difference_of(one, other).nats == pytest.approx(3.8)
    assert difference_of(other, one).nats == pytest.approx(3.8)


def test_a_token_less_before_the_limit_is_no_rounding() -> None:
    whole = reply(("a", -0.1), ("b", -0.1))
    assert difference_of(whole, reply(("a", -0.1))).nats == math.inf
    ended = reply(("a", -0.1), finish="stop")
    assert difference_of(whole, ended).nats == pytest.approx(math.log(2) - 0.1)


def test_the_odd_one_is_further_from_the_others_than_they_are_apart() -> None:
    answers = [reply(("a", logprob)) for logprob in (-1.0, -1.1, -3.0, -1.2)]
    assert odd_index(answers, floor=0.5) == 2
    assert odd_index(answers, floor=2.5) is None
    spread = [reply(("a", logprob)) for logprob in (-1.0, -2.0, -3.5, -2.2)]
    assert odd_index(spread, floor=0.1) is None


def test_the_bet_is_lost_on_average_by_chance_and_seldom_won() -> None:
    random, won, capital = Random(5), 0, 0.0
    for _ in range(4_000):
        wager, best = Wager(0.25), 0.0
        for _ in range(60):
            wager = wager.after(random.random() < 0.25)
            best = max(best, wager.log_capital)
        won += best >= math.log(20)
        capital += math.exp(wager.log_capital)
    assert won <= 4_000 / 20
    # A fair game's mean is 1; few large gains carry it, so the sample may lie well below.
    assert capital / 4_000 < 1.5


def test_eight_odd_warm_answers_in_a_row_are_enough_for_ten_ways() -> None:
    wager = Wager(0.25)
    for _ in range(7):
        wager = wager.after(True)
    assert not wager.has_won(0.001, 10)
    assert wager.after(True).has_won(0.001, 10)
