"""Ends of attempts as values: what a failure means, when tries end, which tokens are counted."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferryman.cache.manifest import Exactness
from ferryman.errors import (
    CorruptState,
    DeadlineExceeded,
    FerrymanError,
    InvalidRequest,
    ManifestMismatch,
    OutOfSlots,
    Unavailable,
    Unreachable,
)
from ferryman.handoff.usage import CachedTokens
from ferryman.wire.values import UncachedPages, Usage
from ferryman_router.answers.openai_responses import usage_object
from ferryman_router.request.attempt_result import (
    AttemptCount,
    CutOff,
    Fatal,
    NoCapacity,
    Retryable,
    classify,
    settled_usage,
    uncached_tokens,
)
from ferryman_router.request.context import RetryBudget
from ferryman_router.routing.fleet import WorkerName


def test_retries_are_a_share_of_what_is_in_flight_but_a_few_always() -> None:
    budget = RetryBudget(share=0.1, floor=2)
    assert budget.try_take("a", 1)
    assert budget.try_take("b", 1)
    assert not budget.try_take("c", 1)
    assert budget.try_take("a", 1)  # the same request counts once
    assert budget.try_take("c", 30)
    budget.give_back("a")
    assert len(budget) == 2


def test_three_failures_are_enough() -> None:
    tries = AttemptCount()
    tries.ran_at_a_death(WorkerName("decode-00000001", 1), 0)
    for _ in range(2):
        tries.failed()
        assert tries.may_go_on, "a death is no failed try"
    tries.failed()
    assert not tries.may_go_on


DEATHS = {
    "one": (["decode 0"], False),
    "two at one place": (["decode 0", "decode 0"], True),
    "two prefill workers": (["prefill 0", "prefill 0"], True),
    "two behind the first tokens": (["decode 9", "decode 9"], True),
    "a token between the two": (["decode 4", "decode 5"], False),
    "two behind a token": (["decode 0", "decode 7", "decode 7"], True),
    "three, each a token further": (["decode 0", "decode 1", "decode 2"], True),
    "prefill, which it then passed": (["prefill 0", "decode 0"], False),
    "another role between the two": (["decode 4", "prefill 4", "decode 4"], True),
}


@pytest.mark.parametrize(("places", "is_suspect"), DEATHS.values(), ids=DEATHS)
def test_a_request_is_suspect_after(places: list[str], is_suspect: bool) -> None:
    tries = AttemptCount()
    for number, place in enumerate(places):
        assert not tries.is_suspect, "no sooner"
        role, num_tokens = place.split()
        tries.ran_at_a_death(WorkerName(f"{role}-{number:08x}", 1), int(num_tokens))
    assert tries.is_suspect is is_suspect
    assert tries.may_go_on is not is_suspect


def test_a_request_is_accused_until_it_draws_a_token() -> None:
    tries, name = AttemptCount(), WorkerName("decode-00000001", 1)
    assert not tries.is_accused(4)
    tries.ran_at_a_death(name, 4)
    assert tries.is_accused(4)
    assert not tries.is_accused(5)
    tries.came_back(name)
    assert not tries.is_accused(4)


STEPS = st.lists(st.tuples(st.sampled_from(["token", "death", "back"]), st.integers(0, 3)))


@given(STEPS)
def test_a_worker_that_came_back_never_died(steps: list[tuple[str, int]]) -> None:
    """Each worker that comes back leaves a request as if it had not been lost."""
    tries, lost, num_tokens = AttemptCount(), list[tuple[int, int]](), 0
    for what, number in steps:
        match what:
            case "token":
                num_tokens += 1
            case "death":
                tries.ran_at_a_death(WorkerName("decode-00000001", number), num_tokens)
                lost.append((number, num_tokens))
            case _:
                tries.came_back(WorkerName("decode-00000001", number))
                lost = [one for one in lost if one[0] != number]
        only_dead = AttemptCount()
        for dead, place in lost:
            only_dead.ran_at_a_death(WorkerName("decode-00000001", dead), place)
        assert tries.is_suspect == only_dead.is_suspect
        counts = Counter(place for _, place in lost)
        # Only the latest place counts: tokens came behind the others.
        assert tries.is_suspect == (len(lost) >= 3 or (bool(lost) and counts[lost[-1][1]] >= 2))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OutOfSlots("full"), NoCapacity),
        (Unreachable("no answer"), CutOff),
        (InvalidRequest("odd"), Fatal),
        (ManifestMismatch(("dtype",)), Fatal),
        (CorruptState("other bytes"), Retryable),
        (Unavailable("draining"), Retryable),
        (DeadlineExceeded("a worker's own call"), Retryable),
    ],
)
def test_what_a_failure_means(error: FerrymanError, kind: type) -> None:
    assert type(classify(error)) is kind


def test_cached_tokens_never_exceed_the_prompt() -> None:
    cached = CachedTokens(device=20, host=10, storage=5, peer=15)
    prompt = Usage(50, 3, cached, (UncachedPages("never_seen", 2),))
    usage = settled_usage(prompt, Usage(9, drafted_tokens=30, accepted_tokens=9), 40, 7)
    assert (usage.prompt_tokens, usage.completion_tokens) == (40, 7)
    assert (usage.drafted_tokens, usage.accepted_tokens) == (30, 7), "never more than were sent"
    assert usage.cached == CachedTokens(device=20, host=10, storage=5, peer=5)
    assert uncached_tokens(usage, 16) == {}


def test_what_decode_had_is_the_last_attempt_s_and_at_most_the_prompt() -> None:
    prompt = Usage(50, at_decode=CachedTokens(host=7))
    output = Usage(9, at_decode=CachedTokens(device=48, host=2))
    usage = settled_usage(prompt, output, 49, 7)
    assert usage.at_decode == CachedTokens(device=48, host=1)
    assert usage.cached == CachedTokens(), "prefill had none of it"
    assert settled_usage(prompt, None, 49, 7).at_decode == CachedTokens()
    assert output.of_output.at_decode == CachedTokens(), "another answer's prompt counts once"


def test_usage_shows_what_decode_had_where_it_had_some() -> None:
    had = Usage(50, 1, at_decode=CachedTokens(device=32))
    shown = usage_object("r1", [had, Usage(50, 1)], Exactness.BITS, 16, ())
    assert shown["ferryman"]["decode_cached_tokens"] == {
        "device": 32,
        "host": 0,
        "storage": 0,
        "peer": 0,
    }
    assert shown["prompt_tokens_details"]["cached_tokens"] == 0
    assert (
        "decode_cached_tokens"
        not in usage_object("r1", [Usage(50, 1)], Exactness.BITS, 16, ())["ferryman"]
    )


def test_the_last_partial_page_counts_as_it_is() -> None:
    pages = (UncachedPages("no_snapshot", 1), UncachedPages("never_seen", 2))
    usage = Usage(50, 0, CachedTokens(device=16), pages)
    assert uncached_tokens(usage, 16) == {"no_snapshot": 16, "never_seen": 18}
