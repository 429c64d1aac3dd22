"""Log probabilities of an answer's and of a prompt's tokens, as OpenAI's endpoints show them.

vLLM's `prompt_logprobs` is a list with an entry for each token of the prompt: null for the first,
else an object from token id to `logprob`, `rank` and `decoded_token`. With `echo` and `logprobs` a
completion's own lists of log probabilities begin with those of the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ferryman.schedule.prompt_scores import Position, PromptLogprob
from ferryman.text.tokenizer import Tokenizer
from ferryman.wire.public import TokenChunk
from ferryman_router.answers.response_format import AnsweredChoice, ScoredPrompt

Alternatives = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class TokenNames:
    """The names of tokens in an answer: their texts, or `token_id:7` if asked for `by_id`. The
    answer's text has control tokens if it `shows_special`."""

    tokenizer: Tokenizer
    by_id: bool = False
    shows_special: bool = False

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.by_id else self.text(token_id)

    def text(self, token_id: int) -> str:
        return self.tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def width(self, token_id: int) -> int:
        """The characters of a token in the answer's text."""
        text = self.text(token_id)
        is_shown = self.shows_special or text not in self.tokenizer.control_tokens
        return len(text) if is_shown else 0

    def num_chars(self, chunks: Sequence[TokenChunk]) -> int:
        """The characters of all texts together."""
        return sum(self.width(token_id) for chunk in chunks for token_id in chunk.token_ids)


def best_answers(answers: Sequence[AnsweredChoice], count: int) -> list[AnsweredChoice]:
    """The `count` answers that the model finds likeliest by token, the best first; of two that are
    alike, the earlier."""
    return sorted(answers, key=lambda answer: -_mean_logprob(answer.chunks))[:count]


def _mean_logprob(chunks: Sequence[TokenChunk]) -> float:
    """The mean over the tokens drawn; minus infinity without any."""
    values = [logprobs[token_id] for token_id, logprobs in _tokens(chunks)]
    return sum(values) / len(values) if values else -math.inf


def chat_logprobs(
    chunks: Sequence[TokenChunk], names: TokenNames, num_shown: int
) -> list[dict[str, Any]]:
    """`choices[].logprobs.content` of a chat: every token with its alternatives."""
    content = []
    for token_id, logprobs in _tokens(chunks):
        entry = _chat_token(names, token_id, logprobs.get(token_id, 0.0))
        best = _best(logprobs, num_shown)
        entry["top_logprobs"] = [_chat_token(names, other, value) for other, value in best]
        content.append(entry)
    return content


def completion_logprobs(
    chunks: Sequence[TokenChunk], names: TokenNames, num_shown: int, text_offset: int = 0
) -> dict[str, list[Any]]:
    """`choices[].logprobs` of a completion: four lists of the same length. As OpenAI has it, a
    token that was drawn is among its alternatives, beyond their number if need be."""
    scored = (
        (token_id, logprobs.get(token_id, 0.0), _best_and(token_id, logprobs, num_shown))
        for token_id, logprobs in _tokens(chunks)
    )
    return completion_lists(scored, names, text_offset)


def completion_lists(
    scored: Iterable[tuple[int, float | None, Alternatives | None]],
    names: TokenNames,
    text_offset: int = 0,
) -> dict[str, list[Any]]:
    """The four lists of tokens with their log probabilities and the likeliest ones; a prompt's
    first token has neither."""
    tokens, values, tops, offsets = [], [], list[Any](), []
    for token_id, value, best in scored:
        tokens.append(names.name(token_id))
        values.append(value)
        tops.append(None if best is None else {names.name(other): of for other, of in best})
        offsets.append(text_offset)
        text_offset += names.width(token_id)
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


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
    """The part of a completion's four lists that belongs to the prompt."""
    positions = prompt.positions(num_shown)
    scored = (
        (token_id, None, None)
        if position is None
        else (token_id, position[token_id].logprob, _likeliest(token_id, position, num_shown))
        for token_id, position in zip(prompt.token_ids.tolist(), positions, strict=True)
    )
    return completion_lists(scored, names)


def _likeliest(
    prompt_token: int, position: Mapping[int, PromptLogprob], num_shown: int
) -> Alternatives:
    """The tokens with the best ranks at a position, and the prompt's own."""
    ranked = sorted(position.items(), key=lambda item: item[1].rank)
    token_ids = [token_id for place, (token_id, _) in enumerate(ranked) if place < num_shown]
    token_ids += [] if prompt_token in token_ids else [prompt_token]
    return [(token_id, position[token_id].logprob) for token_id in token_ids]


def _tokens(chunks: Sequence[TokenChunk]) -> list[tuple[int, Mapping[int, float]]]:
    return [
        (token_id, logprobs)
        for chunk in chunks
        for token_id, logprobs in zip(chunk.token_ids, chunk.logprobs, strict=False)
    ]


def _best(logprobs: Mapping[int, float], num_shown: int) -> Alternatives:
    return sorted(logprobs.items(), key=lambda item: (-item[1], item[0]))[:num_shown]


def _best_and(drawn_token: int, logprobs: Mapping[int, float], num_shown: int) -> Alternatives:
    best = _best(logprobs, num_shown)
    is_apart = drawn_token in logprobs and all(token_id != drawn_token for token_id, _ in best)
    return [*best, (drawn_token, logprobs[drawn_token])] if is_apart else best


def _chat_token(names: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
    raw = list(names.tokenizer.token_bytes(token_id))
    return {"token": names.name(token_id), "logprob": logprob, "bytes": raw}
