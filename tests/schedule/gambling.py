"""Drafts for stamped engines: whoever proposes knows what is right, and lies now and then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from ferryman.engine.stamps import fake_tokens, next_token
from ferryman.schedule.drafting import Proposals
from ferryman.schedule.request import Request

VOCAB = 50


@dataclass(frozen=True, slots=True)
class Gambling:
    """Proposes any number of drafts, each right with `chance`."""

    num_tokens: int
    chance: float = 0.7
    seed: int = 0

    def begin(self, request: Request) -> Proposals:
        return _Gambler(self, request)


class _Gambler:
    def __init__(self, gambling: Gambling, request: Request) -> None:
        self._chance = gambling.chance
        self._prompt = request.token_ids.tolist()
        self._rng = Random(f"{gambling.seed} {request.request_id} {len(self._prompt)}")

    def propose(self, drawn: Sequence[int], most: int) -> Sequence[int]:
        count = self._rng.randint(0, most) if self._chance < 1 else most
        right = fake_tokens([*self._prompt, *drawn], count, VOCAB)
        return [
            token if self._rng.random() < self._chance else self._rng.randrange(VOCAB)
            for token in right
        ]


def lying_draft_model(prefix: int) -> int:
    """What a fake draft model says behind a prefix: two times out of three what is right."""
    return next_token(prefix, VOCAB) if prefix % 3 else prefix % VOCAB
