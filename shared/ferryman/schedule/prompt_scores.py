"""Log probabilities of a prompt's own tokens: what a request may ask for, and what comes back.

    row i of a prompt sees the tokens [0, i] and scores token i + 1; token 0 has no score

    step ──PromptScores of a chunk──► event ──pieces──► prefill's stream ──► ScoreBook of the router

vLLM calls them prompt logprobs. Everything here is pure; numbers lie in arrays, because a prompt of
thousands of tokens has as many scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ferryman.cache.keys import TokenIds
from ferryman.errors import CorruptState, InvalidRequest

MAX_ENTRIES = 262_144
"""Entries of one prompt: one for its own token and one for each alternative, at each position."""
PIECE_ENTRIES = 16_384

Reals = NDArray[np.float64]


class PromptLogprob(NamedTuple):
    """The natural log probability of a token, and its rank at its position: 1 is the likeliest, and
    of two that are as likely the lower id comes first."""

    logprob: float
    rank: int


Position = Mapping[int, PromptLogprob] | None


class ScoreRequest(NamedTuple):
    """The tokens [rows] after the first rows of a chunk, the first of them at position `first` of
    the prompt, and the number of likeliest tokens to name with each."""

    first: int
    token_ids: TokenIds
    num_best: int


def check_num_entries(num_best: int, prompt_len: int) -> None:
    """Raises InvalidRequest for a prompt with too many scores."""
    if (1 + num_best) * prompt_len > MAX_ENTRIES:
        most = MAX_ENTRIES // (1 + num_best)
        message = (
            f"prompt_logprobs={num_best} is served for prompts of at most {most} tokens; this one"
            f" has {prompt_len}"
        )
        raise InvalidRequest(message, "prompt_logprobs")


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    """Scores of the prompt's tokens from position `first` on.

    `token_ids`, `logprobs` [tokens, 1 + best]: the prompt's own token, then the likeliest ones in
    order; `ranks` [tokens] are those of the prompt's own tokens. A log probability is NaN if the
    logits were not all finite numbers.
    """

    first: int
    token_ids: TokenIds
    logprobs: Reals
    ranks: NDArray[np.uint32]

    @property
    def end(self) -> int:
        return self.first + len(self.ranks)

    @property
    def num_best(self) -> int:
        return int(self.token_ids.shape[1]) - 1

    @property
    def first_without_number(self) -> int | None:
        """The position of the first token whose logits were not all finite."""
        lacking = np.flatnonzero(np.isnan(self.logprobs).any(axis=1))
        return self.first + int(lacking[0]) if len(lacking) else None

    def pieces(self, max_entries: int = PIECE_ENTRIES) -> Iterator[PromptScores]:
        """The same scores in parts that fit into a message each."""
        step = max(1, max_entries // (1 + self.num_best))
        for at in range(0, len(self.ranks), step):
            rows = slice(at, at + step)
            yield PromptScores(
                self.first + at, self.token_ids[rows], self.logprobs[rows], self.ranks[rows]
            )

    def positions(self) -> Iterator[Mapping[int, PromptLogprob]]:
        """A mapping from token id for each token: the prompt's own first, then the likeliest."""
        for ids, values, rank in zip(
            self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist(), strict=True
        ):
            actual = {ids[0]: PromptLogprob(values[0], rank)}
            best = enumerate(zip(ids[1:], values[1:], strict=True), start=1)
            yield actual | {token: PromptLogprob(value, place) for place, (token, value) in best}


def joined(parts: Sequence[PromptScores]) -> PromptScores:
    """The scores of parts that follow one another; at least one."""
    names = ("token_ids", "logprobs", "ranks")
    arrays: Any = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
    return PromptScores(parts[0].first, *arrays)


def by_position(scores: PromptScores | None) -> tuple[Position, ...]:
    """One entry per token of a prompt, None for the first; `scores` are None for a prompt of one
    token."""
    return (None, *(scores.positions() if scores is not None else ()))


class ScoreBook:
    """Collects the scores of one prompt from pieces; complete when every token but the first has
    one.

    A piece that comes twice is left out. Scores that are whole stay as they are.
    """

    def __init__(self, prompt_len: int) -> None:
        self._prompt_len = prompt_len
        self._parts: list[PromptScores] = []

    @property
    def end(self) -> int:
        """Tokens before this position have their scores."""
        return self._parts[-1].end if self._parts else 1

    @property
    def is_whole(self) -> bool:
        return self.end >= self._prompt_len

    def begin_attempt(self) -> None:
        """Another worker computes the prompt; unless they are whole, its scores begin anew."""
        if not self.is_whole:
            self._parts = []

    def add(self, piece: PromptScores) -> None:
        """Raises CorruptState for a piece that leaves a gap, or does not fit those before."""
        if piece.end <= self.end:
            return
        fits = not self._parts or piece.num_best == self._parts[0].num_best
        if piece.first != self.end or piece.end > self._prompt_len or not fits:
            raise CorruptState(
                f"scores of the tokens [{piece.first}, {piece.end}) cannot follow {self.end} of a"
                f" prompt of {self._prompt_len} tokens"
            )
        self._parts.append(piece)

    def scores(self) -> tuple[Position, ...]:
        """One entry per token of the prompt. Call it once all scores are there."""
        assert self.is_whole, "scores are read when all are there"
        return by_position(joined(self._parts) if self._parts else None)

    def parts(self) -> tuple[PromptScores, ...]:
        """The pieces, in order."""
        return tuple(self._parts)
