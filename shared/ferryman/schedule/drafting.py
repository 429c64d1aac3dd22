"""Drafting: proposals for the next tokens of a request, so that one step may verify several.

Speculative decoding (Leviathan et al. 2023; Chen et al. 2023) with the strictest acceptance: every
verified position draws the token of plain decoding, and a draft counts only if it is that token.
Draws depend on seed and position alone, so greedy and sampled outputs are those of plain decoding,
token for token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ferryman.cache.keys import TokenIds
from ferryman.schedule.request import Request

ON_DEVICE = -1
"""A draft that the device's draft model will name."""
NGRAM = "ngram"
"""The name of `PromptLookup` in settings."""
MTP = "mtp"
"""The name in settings of a model's own layer for multi-token prediction."""
LONGEST = 3
"""Tokens of the longest n-gram."""
LOOKBACK = 4096
"""The last tokens of a prompt that are indexed. Indexing takes milliseconds once, on the event
loop."""
LONGEST_REST = 32
"""The most proposals skipped after wrong ones."""


class Proposals(Protocol):
    """Proposes the tokens that follow one request's tokens."""

    def propose(self, drawn: Sequence[int], most: int) -> Sequence[int]:
        """Up to `most` token ids after the prompt and all of `drawn`; ON_DEVICE for ids not known
        here."""
        ...


class Drafting(Protocol):
    """Makes the proposals of each request. A step verifies up to `num_tokens` drafts of a
    request."""

    @property
    def num_tokens(self) -> int: ...

    def begin(self, request: Request) -> Proposals:
        """The proposals of an admitted request; NOTHING_PROPOSED if it must not draft."""
        ...


class NothingProposed:
    """The proposals of a request that does not draft. Its steps may overlap, because they need no
    known tokens."""

    def propose(self, drawn: Sequence[int], most: int) -> Sequence[int]:
        return ()


NOTHING_PROPOSED = NothingProposed()


@dataclass(frozen=True, slots=True)
class NoDrafts:
    """Plain decoding."""

    num_tokens: int = 0

    def begin(self, request: Request) -> Proposals:
        return NOTHING_PROPOSED


NO_DRAFTS = NoDrafts()


@dataclass(frozen=True, slots=True)
class ModelDrafts:
    """A draft model on the device proposes, or the model's own layer: only the number of drafts is
    known here."""

    num_tokens: int

    def begin(self, request: Request) -> Proposals:
        return _Unnamed()


class _Unnamed:
    """Proposes as many drafts as allowed; the device names them."""

    def propose(self, drawn: Sequence[int], most: int) -> Sequence[int]:
        return (ON_DEVICE,) * most


class AdaptiveDrafting:
    """Wraps proposals and makes them shorter and rarer after wrong ones."""

    def __init__(self, proposals: Proposals) -> None:
        self._proposals = proposals
        self._allowed = 1 << 30
        self._rest = 0
        self._misses = 0
        self._proposed_after = -1

    def propose(self, drawn: Sequence[int], most: int) -> Sequence[int]:
        if self._proposed_after >= 0:
            self._learn(len(drawn) - self._proposed_after - 1)
        self._proposed_after = -1
        if self._rest:
            self._rest -= 1
            return ()
        drafts = self._proposals.propose(drawn, min(most, self._allowed))
        if drafts:
            self._proposed_after = len(drawn)
        return drafts

    def _learn(self, num_right: int) -> None:
        self._allowed = 2 * num_right + 1
        self._misses = 0 if num_right else self._misses + 1
        self._rest = min(1 << self._misses, LONGEST_REST) - 1


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """Drafts come from the request's own text, fewer if the text turns out not to repeat."""

    num_tokens: int

    def begin(self, request: Request) -> Proposals:
        return AdaptiveDrafting(NgramIndex(request.token_ids[-LOOKBACK:]))


class NgramIndex:
    """The last place of each n-gram of a text, except the n-grams at its very end.

    Each token is indexed once, those of the prompt at the first proposal, so the cost of a step
    depends on its new tokens and not on the text's length.
    """

    def __init__(self, prompt: TokenIds) -> None:
        self._prompt = prompt
        self._text: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}
        self._num_drawn = 0

    def propose(self, drawn: Sequence[int], most: int) -> Sequence[int]:
        if not self._text:
            self._extend(self._prompt.tolist())
        self._extend(drawn[self._num_drawn :])
        self._num_drawn = len(drawn)
        place = self._newest_place() if most > 0 else None
        return () if place is None else self._copied_from(place, most)

    def _extend(self, token_ids: Sequence[int]) -> None:
        text, places = self._text, self._places
        for token_id in token_ids:
            # The n-grams that end here have a successor now, so they may be found.
            place = len(text)
            for length in range(1, min(LONGEST, place) + 1):
                places[tuple(text[place - length :])] = place
            text.append(token_id)

    def _newest_place(self) -> int | None:
        text = self._text
        for length in range(min(LONGEST, len(text)), 0, -1):
            place = self._places.get(tuple(text[-length:]))
            if place is not None:
                return place
        return None

    def _copied_from(self, place: int, count: int) -> list[int]:
        copied: list[int] = []
        for at in range(place, place + count):
            copied.append(self._text[at] if at < len(self._text) else copied[at - len(self._text)])
        return copied


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counts of requests that draft: their decode steps, drafts verified and drafts accepted."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(
            self.steps + other.steps,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
        )

    @property
    def acceptance(self) -> float:
        """The share of drafts that were right."""
        return self.accepted / self.drafted if self.drafted else 0.0


NOTHING_DRAFTED = DraftCounts()
