"""Whatever breaks and begins anew, the caller gets each token and each character once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferryman.client import FinishReason, GenerateFinished, TokenChunk, Usage
from ferryman.client.received import Received
from ferryman.client.retries import ConnectionBroken, Retries
from ferryman.errors import (
    CorruptState,
    DeadlineExceeded,
    FerrymanError,
    QueueFull,
    Stale,
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
            found.append(TokenChunk(at, tuple(TOKENS[at:end]), "".join(TEXTS[at:end])))
        at = end
    return found


streams = st.lists(
    st.tuples(st.booleans(), st.lists(st.integers(1, 4), max_size=5), st.integers(0, 6)),
    max_size=4,
)


@settings(deadline=None)
@given(streams)
def test_tokens_and_text_come_once(broken: list[tuple[bool, list[int], int]]) -> None:
    received, text = Received(), ""
    got: list[int] = []
    for is_anew, sizes, length in [*broken, (False, [], 99)]:
        if is_anew:
            received.begin_anew()
        for chunk in chunks(received.reached, sizes)[:length]:
            if new := received.take(chunk):
                assert new.offset == len(got)
                got += new.token_ids
                text += new.text
    text += received.finish(GenerateFinished(FinishReason.STOP, Usage(1), LAST)).text
    assert got == TOKENS
    assert text == "".join(TEXTS) + LAST


def test_a_hole_is_noticed() -> None:
    received = Received()
    received.take(TokenChunk(0, (1, 2), "ab"))
    with pytest.raises(CorruptState):
        received.take(TokenChunk(3, (4,), "d"))


def test_another_answer_is_noticed() -> None:
    received = Received()
    received.take(TokenChunk(0, (1, 2), "ab"))
    received.begin_anew()
    with pytest.raises(Stale):
        received.take(TokenChunk(0, (1, 3, 4), "acd"))


@pytest.mark.parametrize(
    ("error", "num_failures", "pause"),
    [
        pytest.param(ConnectionBroken(""), 1, 0.1, id="first"),
        pytest.param(ConnectionBroken(""), 3, 0.4, id="doubled twice"),
        pytest.param(Unavailable(""), 5, 1.0, id="at most"),
        pytest.param(QueueFull("", 30.0), 1, 30.0, id="as asked for"),
        pytest.param(ConnectionBroken(""), 6, None, id="too many"),
        pytest.param(DeadlineExceeded(""), 1, None, id="no use"),
        pytest.param(Stale(""), 1, None, id="one level up"),
    ],
)
def test_pauses(error: FerrymanError, num_failures: int, pause: float | None) -> None:
    retries = Retries(max_failures=5, first_seconds=0.1, max_seconds=1.0)
    assert retries.pause(error, num_failures, lambda: 1.0) == pause
