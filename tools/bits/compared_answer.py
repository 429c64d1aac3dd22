"""An answer with its bits, to be compared with the cold run, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tools.bits.models import Prompt


@dataclass(frozen=True, slots=True)
class ComparedAnswer:
    """The tokens of an answer. `digests` has one for each: the bits of the numbers that came with
    it."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class NotTried:
    """A way that was not taken. `is_possible` unless the model or the machine lacks what it
    needs."""

    reason: str
    is_possible: bool = True


class Expected(Protocol):
    """The cold run's answers."""

    def answer(self, prompt: Prompt) -> ComparedAnswer: ...


def have_equal_tokens(answer: ComparedAnswer, expected: ComparedAnswer) -> bool:
    return answer.token_ids == expected.token_ids


def have_equal_bits(answer: ComparedAnswer, expected: ComparedAnswer) -> bool:
    """Whether tokens, and the numbers that came with each, are equal."""
    return have_equal_tokens(answer, expected) and answer.digests == expected.digests
