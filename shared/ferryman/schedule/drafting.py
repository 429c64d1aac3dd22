"""Drafting: who guesses the next tokens of a request, so that one step may verify several.

Speculative decoding (Leviathan et al. 2023; Chen et al. 2023) with the strictest acceptance: what
plain decoding would draw is drawn at every verified position, and a draft counts only if it is that
token. Draws depend on seed and position alone, so greedy and sampled outputs are those of plain
decoding, token for token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ferryman.schedule.request import Request

ON_DEVICE = -1
"""A draft that the device's draft model will name."""


class Proposals(Protocol):
    """What is proposed behind one request's tokens."""

    def propose(self, drawn: Sequence[int], most: int) -> Sequence[int]:
        """Up to `most` token ids behind the prompt and all of `drawn`; ON_DEVICE for unknown."""
        ...


class Drafting(Protocol):
    """Who proposes. A step verifies up to `num_tokens` drafts of each request."""

    @property
    def num_tokens(self) -> int: ...

    def begin(self, request: Request) -> Proposals:
        """For a request that was admitted; NOTHING_PROPOSED for one that shall not draft."""
        ...


class NothingProposed:
    """Of a request that does not draft: its steps may overlap, for they need no known tokens."""

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
    """A draft model on the device proposes: here nothing is known but how many."""

    num_tokens: int

    def begin(self, request: Request) -> Proposals:
        return _Unnamed()


class _Unnamed:
    """As many drafts as may be, named on the device."""

    def propose(self, drawn: Sequence[int], most: int) -> Sequence[int]:
        return (ON_DEVICE,) * most


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Of requests that draft: their shares of decode steps, drafts verified, drafts accepted."""

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
    def steps_per_token(self) -> float:
        """1 for plain decoding: each step of a request brings one token, and those accepted."""
        tokens = self.steps + self.accepted
        return self.steps / tokens if tokens else 1.0

    @property
    def acceptance(self) -> float:
        """The share of drafts that were right."""
        return self.accepted / self.drafted if self.drafted else 0.0


NOTHING_DRAFTED = DraftCounts()
