"""The caller gets each token and each character once, wherever a stream breaks and begins again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferryman.client import FinishReason, GenerateFinished, TokenChunk, Usage
from ferryman.client.generate_call import ReceivedTokens
from ferryman.client.retries import ConnectionBroken, NotResumable, Retries
from ferryman.errors import (
    CorruptState,
    DeadlineExceeded,
    FerrymanError,
    NoWorker,
    QueueFull,
    Stale,
    Stopping,
    Suspect,
    Unavailable,
)

TOKENS = list(range(100, 112))
# Text lags behind its token, as it does while a character is incomplete.
TEXTS = ["", "ab", "c", "", "", "def", "g", "", "hi", "j", "k", ""]
LAST = "lm"


def chunks(start: int, sizes: list[int]) -> list[TokenChunk]:
    found, at = [], start
    for size in [*sizes, len(TOKENS)]:
        end = min(len(TOKENS), at + size)
        if at < end:
            logprobs = tuple({token: -float(token)} for token in TOKENS[at:end])
            text = "".join(TEXTS[at:end])
            found.append(TokenChunk(at, tuple(TOKENS[at:end]), text, logprobs))
        at = end
    return found


streams = st.lists(
    st.tuples(st.booleans(), st.lists(st.integers(1, 4), max_size=5), st.integers(0, 6)),
    max_size=4,
)


@settings(deadline=None)
@given(streams)
def test_tokens_and_text_come_once(broken: list[tuple[bool, list[int], int]]) -> None:
    received, text = ReceivedTokens(), ""
    got: list[int] = []
    for is_anew, sizes, length in [*broken, (False, [], 99)]:
        if is_anew:
            received.restart()
        for chunk in chunks(received.reached, sizes)[:length]:
            if new := received.accept(chunk):
                assert new.offset == len(got)
                assert new.logprobs == tuple({token: -float(token)} for token in new.token_ids)
                got += new.token_ids
                text += new.text
    text += received.finish(GenerateFinished(FinishReason.STOP, Usage(1), LAST)).text
    assert got == TOKENS
    assert text == "".join(TEXTS) + LAST


def test_a_hole_is_noticed() -> None:
    received = ReceivedTokens()
    received.accept(TokenChunk(0, (1, 2), "ab"))
    with pytest.raises(CorruptState):
        received.accept(TokenChunk(3, (4,), "d"))


def test_another_answer_is_noticed() -> None:
    received = ReceivedTokens()
    received.accept(TokenChunk(0, (1, 2), "ab"))
    received.restart()
    with pytest.raises(NotResumable) as caught:
        received.accept(TokenChunk(0, (1, 3, 4), "acd"))
    assert caught.value.num_tokens == 2


def test_an_answer_that_ends_sooner_when_begun_anew_is_not_the_same() -> None:
    received = ReceivedTokens()
    received.accept(TokenChunk(0, (1, 2, 3), "abc"))
    received.restart()
    received.accept(TokenChunk(0, (1, 2), "ab"))
    with pytest.raises(NotResumable):
        received.finish(GenerateFinished(FinishReason.STOP, Usage(1), ""))


@pytest.mark.parametrize(
    ("error", "num_failures", "seconds", "pause"),
    [
        pytest.param(Unavailable(""), 1, 0.0, 0.1, id="first"),
        pytest.param(Unavailable(""), 3, 0.0, 0.4, id="doubled twice"),
        pytest.param(Unavailable(""), 5, 99.0, 1.0, id="at most"),
        pytest.param(QueueFull("", 30.0), 1, 0.0, 30.0, id="as asked for"),
        pytest.param(Unavailable(""), 6, 0.0, None, id="too many"),
        pytest.param(ConnectionBroken(""), 1, 0.0, 0.1, id="an outage begins"),
        pytest.param(ConnectionBroken(""), 400, 7.0, 0.5, id="an outage goes on"),
        pytest.param(Stopping(""), 400, 7.0, 0.5, id="the router ends"),
        pytest.param(NoWorker(""), 400, 7.0, 0.5, id="no worker is there"),
        pytest.param(ConnectionBroken(""), 400, 7.1, None, id="an outage without an end"),
        pytest.param(DeadlineExceeded(""), 1, 0.0, None, id="no use"),
        pytest.param(Suspect(""), 1, 0.0, None, id="more workers would die"),
        pytest.param(Stale(""), 1, 0.0, None, id="one level up"),
    ],
)
def test_pauses(
    error: FerrymanError, num_failures: int, seconds: float, pause: float | None
) -> None:
    retries = Retries(max_failures=5, first_seconds=0.1, max_seconds=1.0, outage_seconds=7.0)
    assert retries.pause(error, num_failures, seconds, lambda: 1.0) == pause


def test_none_means_none() -> None:
    retries = Retries(max_failures=0)
    assert retries.pause(ConnectionBroken(""), 1, 0.0, lambda: 1.0) is None
