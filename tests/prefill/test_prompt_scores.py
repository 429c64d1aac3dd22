"""Prefill tells a prompt's scores in pieces, in order, before it hands the prompt off."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.doubles.fake_engine import fake_scores
from tests.harness.pair import expected, pair_of_workers, request

from ferryman.cache.keys import as_token_ids
from ferryman.errors import InvalidRequest
from ferryman.schedule import prompt_scores
from ferryman.schedule.prompt_scores import MAX_ENTRIES, PromptScores, ScoreRequest, joined
from ferryman.schedule.request import Request
from ferryman.wire.codec.prefill import progress_from_wire

PROMPT = [3 + i % 11 for i in range(21)]


def scored(request_id: str, num_best: int) -> Request:
    plain = request(request_id, PROMPT)
    return replace(plain, sampling=replace(plain.sampling, prompt_logprobs=num_best))


@pytest.mark.parametrize("num_best", [0, 2])
async def test_pieces_come_before_the_hand_off(
    num_best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = prompt_scores.PromptScores.pieces
    monkeypatch.setattr(PromptScores, "pieces", lambda scores: small(scores, 5))
    async with pair_of_workers() as pair:
        asked = scored("r1", num_best)
        messages = await pair.run_prefill(pair.order(asked))
        kinds = [message.WhichOneof("progress") for message in messages]
        assert kinds[-1] == "handed_off"
        pieces = [progress_from_wire(message) for message in messages if message.HasField("scored")]
        assert len(pieces) > 4
        assert all(isinstance(piece, PromptScores) for piece in pieces)
        whole = joined([piece for piece in pieces if isinstance(piece, PromptScores)])
        right = fake_scores(ScoreRequest(1, asked.token_ids[1:], num_best))
        assert list(whole.positions()) == list(right.positions())
        tokens, _ = await pair.read_tokens("r1")
        assert tokens == expected(asked)
        behind = as_token_ids([*PROMPT, tokens[0]])
        again = replace(asked, token_ids=behind, num_generated=1)
        assert again.prompt_logprobs is None, "an attempt behind tokens repeats no scores"


async def test_a_prompt_with_too_many_scores_is_refused() -> None:
    async with pair_of_workers() as pair:
        long = request("r1", [3] * (MAX_ENTRIES // 21 + 1))
        asked = replace(long, sampling=replace(long.sampling, prompt_logprobs=20))
        with pytest.raises(InvalidRequest, match="prompt_logprobs"):
            await pair.run_prefill(pair.order(asked))
