"""Tokens reach the client once and in order, whatever frames arrive."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferryman.errors import InvalidRequest
from ferryman.handoff.offsets import (
    Accepted,
    Diverged,
    Dropped,
    Lacking,
    TokenFrame,
    TokenLedger,
    extend_hash,
)

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=20)


def frame(tokens: list[int], first: int, end: int, attempt: int = 1) -> TokenFrame:
    """The frame of tokens [first, end) from a worker that drew `tokens`."""
    hash_to_end = extend_hash(0, tokens[:end])
    return TokenFrame(attempt, first, tuple(tokens[first:end]), hash_to_end)


@given(token_lists, token_lists)
def test_the_hash_does_not_depend_on_the_cut(left: list[int], right: list[int]) -> None:
    assert extend_hash(extend_hash(0, left), right) == extend_hash(0, left + right)


@given(token_lists, st.integers(0, 19), st.integers(0, 2**32 - 1))
def test_another_token_makes_another_hash(tokens: list[int], place: int, other: int) -> None:
    if place < len(tokens) and tokens[place] != other:
        changed = [*tokens[:place], other, *tokens[place + 1 :]]
        assert extend_hash(0, changed) != extend_hash(0, tokens)


@given(st.data(), st.lists(st.integers(0, 9), min_size=1, max_size=30))
def test_duplicated_reordered_and_stale_frames_against_a_naive_model(
    data: st.DataObject, tokens: list[int]
) -> None:
    """The model is the list of what the client saw; a frame extends it or does not."""
    ledger, seen = TokenLedger(1), list[int]()
    for _ in range(data.draw(st.integers(1, 40))):
        first = data.draw(st.integers(0, len(tokens)))
        end = data.draw(st.integers(first, len(tokens)))
        attempt = data.draw(st.integers(1, 3))
        answer = ledger.accept(frame(tokens, first, end, attempt))
        current = attempt == ledger.attempt
        if isinstance(answer, Accepted):
            assert current
            assert answer.offset == len(seen)
            seen += answer.token_ids
            assert len(seen) == end
        elif isinstance(answer, Lacking):
            assert current
            assert (answer.first, answer.end) == (len(seen), first)
            assert first > len(seen)
        else:
            assert answer == Dropped(is_stale=not current)
            assert not current or end <= len(seen)
        assert seen == tokens[: len(seen)] == list(ledger.token_ids)
        assert ledger.hash == extend_hash(0, seen)
        if data.draw(st.booleans()) and ledger.attempt < 3:
            ledger.begin_attempt(ledger.attempt + 1)
    last = ledger.accept(frame(tokens, 0, len(tokens), ledger.attempt))
    assert isinstance(last, Accepted | Dropped)
    assert list(ledger.token_ids) == tokens


def test_a_later_attempt_goes_on_where_the_earlier_one_ended() -> None:
    tokens = [5, 6, 7, 8]
    ledger = TokenLedger(1)
    assert ledger.accept(frame(tokens, 0, 2)) == Accepted(0, (5, 6))
    ledger.begin_attempt(2)
    assert ledger.accept(frame(tokens, 2, 3, attempt=1)) == Dropped(is_stale=True)
    assert ledger.accept(frame(tokens, 1, 4, attempt=2)) == Accepted(2, (7, 8))
    assert ledger.statistics().num_stale_frames == 1
    assert ledger.statistics().num_duplicate_tokens == 1
    assert ledger.since(1) == Accepted(1, (6, 7, 8))


def test_an_attempt_with_another_past_is_refused_at_once() -> None:
    ledger = TokenLedger(1)
    ledger.accept(frame([5, 6], 0, 2))
    assert ledger.accept(frame([5, 9, 7], 2, 3)) == Diverged(2)
    assert ledger.token_ids == (5, 6)


def test_an_overlap_that_differs_is_refused() -> None:
    ledger = TokenLedger(1)
    ledger.accept(frame([5, 6], 0, 2))
    assert ledger.accept(frame([5, 9, 7], 1, 3)) == Diverged(1)
    assert ledger.statistics().num_diverged_frames == 1


def test_a_frame_with_a_bit_turned_over_changes_nothing() -> None:
    ledger = TokenLedger(1)
    sent = frame([5, 6, 7], 0, 3)
    assert ledger.accept(replace(sent, token_ids=(5, 6, 6))) == Diverged(0)
    assert ledger.accept(sent) == Accepted(0, (5, 6, 7))


def test_an_early_frame_is_counted_and_what_lacks_is_asked_for() -> None:
    ledger = TokenLedger(1)
    assert ledger.accept(frame([1, 2, 3], 2, 3)) == Lacking(0, 2)
    assert ledger.statistics().num_early_frames == 1


def test_attempts_only_go_up() -> None:
    with pytest.raises(AssertionError, match="does not follow"):
        TokenLedger(2).begin_attempt(2)


def test_a_negative_offset_is_no_frame() -> None:
    with pytest.raises(InvalidRequest):
        TokenFrame(1, -1, (1,), 0)
