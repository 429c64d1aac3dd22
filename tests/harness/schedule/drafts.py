"""Drafts for stamped engines: the proposer knows the right token and is sometimes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from tests.doubles.stamps import fake_tokens, next_token

from ferryman.schedule.drafting import Proposals
from ferryman.schedule.request import Request

VOCAB = 50


@dataclass(frozen=True, slots=True)
class RandomDrafts:
    """Proposes any number of drafts, each right with `chance`."""

    num_tokens: int
    chance: float = 0.7
    seed: int = 0

    def begin(self, request: Request) -> Proposals:
        return _RandomProposals(self, request)


class _RandomProposals:
    def __init__(self, drafts: RandomDrafts, request: Request) -> None:
        self._chance = drafts.chance
        self._prompt = request.token_ids.tolist()
        self._rng = Random(f"{drafts.seed} {request.request_id} {len(self._prompt)}")

    def propose(self, drawn: Sequence[int], most: int) -> Sequence[int]:
        count = self._rng.randint(0, most) if self._chance < 1 else most
        right = fake_tokens([*self._prompt, *drawn], count, VOCAB)
        return [
            token if self._rng.random() < self._chance else self._rng.randrange(VOCAB)
            for token in right
        ]


def lying_draft_model(prefix: int) -> int:
    """A fake draft model's token after a prefix: right for two prefixes out of three."""
    return next_token(prefix, VOCAB) if prefix % 3 else prefix % VOCAB
