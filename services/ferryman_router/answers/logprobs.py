"""Log probabilities of an answer's and of a prompt's tokens, as OpenAI's endpoints show them.

vLLM's `prompt_logprobs` is a list with an entry for each token of the prompt: null for the first,
else an object from token id to `logprob`, `rank` and `decoded_token`. With `echo` and `logprobs` a
completion's own lists of log probabilities begin with those of the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ferryman.schedule.prompt_scores import Position, PromptLogprob
from ferryman.text.detokenizer import Detokenizer
from ferryman.text.tokenizer import Tokenizer
from ferryman.wire.public import TokenChunk
from ferryman_router.answers.response_format import AnsweredChoice, ScoredPrompt

Alternatives = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class TokenNames:
    """The names of tokens in an answer: their texts, or `token_id:7` if asked for `by_id`.

    A token may be a part of a character, which is no text. Then its bytes are its name, as in
    OpenAI's answers: `bytes:\\xe2\\x80`, or `\\xe2\\x80` where the bytes have a field besides.
    """

    tokenizer: Tokenizer
    by_id: bool = False

    def name(self, token_id: int) -> str:
        if self.by_id:
            return _by_id(token_id)
        raw = self.tokenizer.token_bytes(token_id)
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            return f"bytes:{_escaped(raw)}"
        # A text that looks like such a name is none.
        return _by_id(token_id) if text.startswith(("bytes:", "token_id:")) else text

    def name_beside_bytes(self, token_id: int) -> str:
        return _by_id(token_id) if self.by_id else _escaped(self.tokenizer.token_bytes(token_id))

    def distinct(self, token_ids: Iterable[int]) -> dict[int, str]:
        """The names of the tokens at one place. If two tokens have one text, the first of them is
        called by it, and others by their ids."""
        names: dict[str, int] = {}
        for token_id in dict.fromkeys(token_ids):
            name = self.name(token_id)
            names[_by_id(token_id) if name in names else name] = token_id
        return {token_id: name for name, token_id in names.items()}

    def text(self, token_id: int) -> str:
        return self.tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _by_id(token_id: int) -> str:
    return f"token_id:{token_id}"


def _escaped(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


class TextOffsets:
    """Counts the characters before each token of a text. The detokenizer is one like that which
    makes the text: it alone knows which tokens are shown, and how."""

    def __init__(self, detokenizer: Detokenizer, begin: int = 0) -> None:
        self._detokenizer, self._end = detokenizer, begin

    def of(self, token_ids: Iterable[int]) -> list[int]:
        """The offsets of the next tokens. One within a character has the offset of that."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._end)
            self._end += len(self._detokenizer.feed([token_id]))
        return offsets

    def end(self) -> int:
        """The characters of the whole text, after its last token."""
        return self._end + len(self._detokenizer.flush())


@dataclass(frozen=True, slots=True)
class PlacedChunk:
    """A chunk of an answer, and the offsets of its tokens in the text."""

    chunk: TokenChunk
    offsets: Sequence[int]

    @property
    def begin(self) -> int:
        return self.offsets[0] if self.offsets else 0

    def scored(self, num_shown: int, text_len: int) -> Iterator[ScoredToken]:
        """The tokens whose log probabilities are known. Those of a stop string that was cut off
        begin where the text ends."""
        tokens = zip(self.chunk.token_ids, self.chunk.logprobs, self.offsets, strict=False)
        for token_id, logprobs, offset in tokens:
            best = _best_and(token_id, logprobs, num_shown)
            yield ScoredToken(token_id, logprobs.get(token_id, 0.0), best, min(offset, text_len))


class ScoredToken(NamedTuple):
    """A token with its log probability and the likeliest ones; a prompt's first has neither."""

    token_id: int
    logprob: float | None
    best: Alternatives | None
    offset: int


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
    placed: Iterable[PlacedChunk], names: TokenNames, num_shown: int, text_len: int
) -> dict[str, list[Any]]:
    """`choices[].logprobs` of a completion whose text has so many characters so far: four lists of
    the same length. As OpenAI has it, a token that was drawn is among its alternatives, beyond
    their number if need be."""
    tokens = (token for part in placed for token in part.scored(num_shown, text_len))
    return completion_lists(tokens, names)


def completion_lists(scored: Iterable[ScoredToken], names: TokenNames) -> dict[str, list[Any]]:
    """The four lists. A token goes by one name in all of them, and is first to be called by its
    text: under its name it finds its own log probability."""
    lists: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token_id, logprob, best, offset in scored:
        called = names.distinct((token_id, *(other for other, _ in best or ())))
        top = None if best is None else {called[other]: value for other, value in best}
        entry = (called[token_id], logprob, top, offset)
        for values, value in zip(lists.values(), entry, strict=True):
            values.append(value)
    return lists


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
    prompt: ScoredPrompt, names: TokenNames, num_shown: int, offsets: Sequence[int]
) -> Mapping[str, list[Any]]:
    """The part of a completion's four lists that belongs to the prompt."""
    token_ids, positions = prompt.token_ids.tolist(), prompt.positions(num_shown)
    scored = (
        ScoredToken(token_id, None, None, offset)
        if position is None
        else ScoredToken(
            token_id,
            position[token_id].logprob,
            _likeliest(token_id, position, num_shown),
            offset,
        )
        for token_id, position, offset in zip(token_ids, positions, offsets, strict=True)
    )
    return completion_lists(scored, names)


def echoed_offsets(tokens: Iterable[int], detokenizer: Detokenizer, echo: str) -> list[int]:
    """The offsets of a prompt's tokens in its echo, of which a tokenizer may have left out the
    space that it put before the first word."""
    counted = TextOffsets(detokenizer)
    offsets = counted.of(tokens)
    left_out = counted.end() - len(echo)
    return [min(max(0, offset - left_out), len(echo)) for offset in offsets]


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
    return {"token": names.name_beside_bytes(token_id), "logprob": logprob, "bytes": raw}
