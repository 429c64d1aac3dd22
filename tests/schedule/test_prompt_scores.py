"""Scores of a prompt travel in pieces: whole at the end, each token once, in any cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.doubles.fake_engine import fake_scores
from tests.harness.schedule import HYBRID, WatchedWorker, request

from ferryman.errors import CorruptState, InvalidRequest
from ferryman.schedule.batch import PrefillStep
from ferryman.schedule.prompt_scores import (
    MAX_ENTRIES,
    PIECE_ENTRIES,
    PromptLogprob,
    PromptScores,
    ScoreBook,
    ScoreRequest,
    check_num_entries,
)

PROMPT = np.arange(50, 90, dtype="<u4")


def scores(first: int, end: int, num_best: int = 2) -> PromptScores:
    return fake_scores(ScoreRequest(first, PROMPT[first:end], num_best))


def expected(num_best: int = 2) -> Sequence[dict[int, PromptLogprob] | None]:
    """By hand: the token at position i is 50 + i, and so on."""
    return [
        {
            50 + i + place: PromptLogprob(-i / 8 - place, i if place == 0 else place)
            for place in range(1 + num_best)
        }
        if i
        else None
        for i in range(len(PROMPT))
    ]


@given(st.data())
def test_any_cut_with_any_repetition_gives_each_token_once(data: st.DataObject) -> None:
    num_best = data.draw(st.integers(0, 4))
    cuts = sorted(data.draw(st.sets(st.integers(2, len(PROMPT) - 1), max_size=6)))
    chunks = [
        scores(first, end, num_best)
        for first, end in zip([1, *cuts], [*cuts, len(PROMPT)], strict=True)
    ]
    pieces = [piece for chunk in chunks for piece in chunk.pieces(data.draw(st.integers(1, 40)))]
    book = ScoreBook(len(PROMPT))
    for at, piece in enumerate(pieces):
        assert not book.is_whole
        book.add(piece)
        book.add(pieces[data.draw(st.integers(0, at))])
    assert book.is_whole
    book.begin_attempt()
    book.add(pieces[0])
    assert book.scores() == tuple(expected(num_best))


def test_a_later_attempt_begins_anew_unless_the_scores_are_whole() -> None:
    book = ScoreBook(len(PROMPT))
    book.add(scores(1, 30))
    book.begin_attempt()
    with pytest.raises(CorruptState, match=r"\[30, 40\) cannot follow 1 "):
        book.add(scores(30, 40))
    book.add(scores(1, 40))
    assert book.scores() == tuple(expected())


@pytest.mark.parametrize(
    "wrong",
    [scores(11, 20), scores(9, 20), scores(10, 20, num_best=1)],
    ids=["a gap", "an overlap", "another width"],
)
def test_a_piece_that_does_not_follow_is_corrupt(wrong: PromptScores) -> None:
    book = ScoreBook(len(PROMPT))
    book.add(scores(1, 10))
    with pytest.raises(CorruptState):
        book.add(wrong)
    with pytest.raises(CorruptState):
        ScoreBook(20).add(scores(1, 40))


@pytest.mark.parametrize("overlap", [False, True])
def test_chunks_of_a_schedule_score_each_token_of_a_prompt_once(overlap: bool) -> None:
    worker = WatchedWorker(HYBRID, overlap=overlap, chunk_tokens=8)
    asked = request(HYBRID, "r0", range(1, 24))
    worker.submit(replace(asked, sampling=replace(asked.sampling, prompt_logprobs=2)))
    scored: list[int] = []
    while worker.plan():
        plan = worker.queued[-1]
        chunks = plan.chunks if isinstance(plan, PrefillStep) else ()
        scored += [t for c in chunks for s in c.scores for t in s.token_ids.tolist()]
        worker.run_oldest()
    assert scored == list(range(2, 24))


def test_a_prompt_of_one_token_is_scored_at_once() -> None:
    assert ScoreBook(1).scores() == (None,)


def test_a_piece_fits_into_a_message() -> None:
    token_ids = np.zeros(20_000, "<u4")
    sizes = [
        piece.token_ids.size
        for piece in fake_scores(ScoreRequest(1, token_ids, num_best=20)).pieces()
    ]
    assert sum(sizes) == 20_000 * 21
    assert PIECE_ENTRIES - 21 < max(sizes) <= PIECE_ENTRIES


def test_the_number_of_entries_is_bounded() -> None:
    check_num_entries(0, MAX_ENTRIES)
    check_num_entries(20, MAX_ENTRIES // 21)
    for num_best, prompt_len in ((0, MAX_ENTRIES + 1), (20, MAX_ENTRIES // 21 + 1)):
        with pytest.raises(InvalidRequest, match="at most") as refused:
            check_num_entries(num_best, prompt_len)
        assert refused.value.param == "prompt_logprobs"
