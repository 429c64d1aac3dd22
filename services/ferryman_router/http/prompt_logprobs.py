"""Log probabilities of a prompt's tokens in an answer: vLLM's field, and OpenAI's with an echo.

`prompt_logprobs` is a list with an entry for each token of the prompt: null for the first, else an
object from token id to `logprob`, `rank` and `decoded_token`. With `echo` and `logprobs` a
completion's own lists of log probabilities begin with those of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from ferryman.schedule.prompt_scores import Position
from ferryman_router.http.logprobs import TokenNames
from ferryman_router.http.response_format import ScoredPrompt


def position_fields(position: Position, names: TokenNames) -> dict[str, Any] | None:
    """An entry of `prompt_logprobs`."""
    if position is None:
        return None
    return {
        str(token_id): {
            "logprob": logprob,
            "rank": rank,
            "decoded_token": names.text(token_id),
        }
        for token_id, (logprob, rank) in position.items()
    }


def echoed_logprobs(
    prompt: ScoredPrompt, names: TokenNames, num_shown: int
) -> Mapping[str, list[Any]]:
    """The part of a completion's four lists that belongs to the prompt; the first token has
    neither a log probability nor alternatives."""
    tokens, values, tops, offsets = [], [], list[Any](), []
    offset = 0
    for token_id, position in zip(
        prompt.token_ids.tolist(), prompt.positions(num_shown), strict=True
    ):
        tokens.append(names.name(token_id))
        values.append(None if position is None else position[token_id].logprob)
        tops.append(None if position is None else _likeliest(position, names, num_shown))
        offsets.append(offset)
        offset += names.width(token_id)
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _likeliest(position: Position, names: TokenNames, num_shown: int) -> dict[str, float]:
    """Of the tokens at a position those with the best ranks: the prompt's own is one of them only
    if it is that likely."""
    assert position is not None
    best = sorted(position.items(), key=lambda item: item[1].rank)
    return {names.name(token_id): found.logprob for token_id, found in islice(best, num_shown)}
