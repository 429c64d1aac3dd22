"""An answer through a cluster is compared to the bit, and only if it proves its way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest
from tests.harness.cluster import Cluster, Generated
from tools.bits.cluster import moving_ways, tier_ways
from tools.bits.cluster.columns import as_promised
from tools.bits.cluster.served_answer import ServedAnswer, Tried, served_answer
from tools.bits.cluster.serving import ROUNDS, ServedCase
from tools.bits.compared_answer import NotTried, have_equal_bits, have_equal_tokens
from tools.bits.models import BitsModel, Prompt
from tools.bits.served_forms import ServedForm

from ferryman.cache.manifest import Exactness
from ferryman.client import Client
from ferryman.handoff.lifecycle import LifecycleEntry
from ferryman.handoff.usage import CachedTokens
from ferryman.wire.values import Usage

PROMPT = tuple(range(3, 43))
OTHER = tuple(range(4, 44))


def answer(
    likeliest: float = -0.5,
    cached: CachedTokens = CachedTokens(),  # noqa: B008  # it is frozen
    exactness: Exactness = Exactness.BITS,
    prompt: Prompt = PROMPT,
) -> ServedAnswer:
    logprobs: list[Mapping[int, float]] = [{7: likeliest, 9: -2.0}, {8: -0.25, 7: -3.0}]
    usage = Usage(len(prompt), 2, cached)
    found = Generated([7, 8], logprobs, usage=usage, exactness=exactness)
    return served_answer(prompt, "one", found)


def test_the_last_bit_of_one_log_probability_is_a_difference() -> None:
    other = answer(math.nextafter(-0.5, 0.0))
    assert have_equal_tokens(other, answer())
    assert not have_equal_bits(other, answer())
    assert have_equal_bits(answer(cached=CachedTokens(host=32)), answer())


def test_the_order_in_which_alternatives_come_is_none() -> None:
    turned: list[Mapping[int, float]] = [{9: -2.0, 7: -0.5}, {7: -3.0, 8: -0.25}]
    found = Generated([7, 8], turned, usage=Usage(40, 2), exactness=Exactness.BITS)
    assert have_equal_bits(served_answer(PROMPT, "two", found), answer())


def test_an_answer_that_promises_values_is_not_compared() -> None:
    assert as_promised(answer()) == answer()
    assert as_promised(answer(exactness=Exactness.VALUES)) == NotTried("it promises values")


@pytest.mark.parametrize(
    ("cached", "reason"),
    [
        (CachedTokens(storage=32), ""),
        (CachedTokens(device=16, storage=16), ""),
        (CachedTokens(device=32), "32 from device, not 32 tokens from storage"),
        (CachedTokens(), "nothing, not 32 tokens from storage"),
        (CachedTokens(storage=16), "16 from storage, not 32 tokens from storage"),
        (
            CachedTokens(host=16, storage=16),
            "16 from host, 16 from storage, not 32 tokens from storage",
        ),
    ],
)
def test_a_tier_has_to_bring_all_that_no_prompt_beside_brought(
    cached: CachedTokens, reason: str
) -> None:
    found = answer(cached=cached)
    assert tier_ways.brought(found, "storage") == (NotTried(reason) if reason else found)


def log_of(*events: tuple[str, str, int]) -> list[LifecycleEntry]:
    return [
        LifecycleEntry(role, f"{role}-1", 1, "one", attempt, seq, name, {})
        for seq, (role, name, attempt) in enumerate(events, 1)
    ]


def test_a_killed_worker_shows_in_the_log() -> None:
    whole = [("prefill", "handed_off", 1), ("decode", "first_token", 1)]
    moved = [("router", "migrated", 2), ("prefill", "queued", 2)]
    assert moving_ways.was_recovered(log_of(*whole)) == "no other worker took it up"
    assert moving_ways.was_recovered(log_of(*whole, moved[0])) == "nothing was computed again"
    assert moving_ways.was_recovered(log_of(*whole, *moved)) == ""


def test_a_drain_shows_in_the_log() -> None:
    """With its state: nothing is computed again."""
    whole = [("prefill", "handed_off", 1), ("decode", "first_token", 1)]
    moved = ("decode", "handed_off", 2)
    assert moving_ways.was_moved(log_of(*whole)) == "its worker did not hand it off"
    assert moving_ways.was_moved(log_of(*whole, moved)) == ""
    again = ("prefill", "queued", 2)
    assert moving_ways.was_moved(log_of(*whole, moved, again)) == "it was computed again"


def test_a_prompt_that_was_cut_shows_in_the_log() -> None:
    cut = [("prefill", "chunk", 1), ("prefill", "queued", 2)]
    assert moving_ways.was_begun_twice(log_of(*cut)) == ""
    assert moving_ways.was_begun_twice(log_of(cut[0])) == "nothing was computed again"
    late = log_of(*cut, ("prefill", "handed_off", 1))
    assert moving_ways.was_begun_twice(late) == "it was not in the middle of its prompt"


def served() -> ServedCase:
    """Of two prompts, without a cluster."""
    model = BitsModel("none", ServedForm(Path()), (PROMPT, OTHER), (), has_own_layer=False)
    return ServedCase(model, 2, cast(Cluster, None), cast(Client, None))


async def test_prompts_that_a_way_missed_are_asked_again_in_their_order() -> None:
    asked: list[Sequence[Prompt]] = []

    async def attempt(prompts: Sequence[Prompt]) -> list[Tried]:
        asked.append(tuple(prompts))
        is_first = len(asked) == 1
        return [
            NotTried("missed") if is_first and prompt == PROMPT else answer(prompt=prompt)
            for prompt in prompts
        ]

    found = await served().until_taken(attempt)
    assert asked == [(PROMPT, OTHER), (PROMPT,)]
    assert found == [answer(), answer(prompt=OTHER)]


async def test_a_way_that_misses_again_and_again_is_given_up() -> None:
    asked: list[Sequence[Prompt]] = []

    async def attempt(prompts: Sequence[Prompt]) -> list[Tried]:
        asked.append(prompts)
        return [NotTried("missed")] * len(prompts)

    assert await served().until_taken(attempt) == [NotTried("missed")] * 2
    assert len(asked) == ROUNDS
