"""Makes traces: conversations of several turns that begin with one of few shared system prompts.

The popularity of system prompts follows Zipf's law; conversations arrive at random; each next turn
comes after a time to think; each turn repeats the whole conversation, answers included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from ferryman.errors import ConfigError
from ferryman.settings.declaration import GROUP
from ferryman_simulator.mooncake import BlockNames, mooncake_line
from ferryman_simulator.trace import MAX_REQUESTS

Tokens = NDArray[np.uint32]
_TOKEN_VALUES = 1 << 32


# A number that only a slip of the hand makes larger; NaN and infinity are refused as well.
AtMost = Field(le=MAX_REQUESTS, allow_inf_nan=False)
Number = Annotated[int, AtMost, Field(ge=1)]


class Habits(BaseModel):
    """Properties of conversations. Lengths are means in tokens; every length is at least 1.

    System prompt i of `num_prefixes` is as popular as (i + 1) ** -`zipf`.
    """

    model_config = GROUP
    seed: Annotated[int, Field(ge=0)] = 0
    """With --generate: the same seed makes the same trace."""
    num_requests: Number = 1000
    """With --generate."""
    num_prefixes: Number = 8
    """With --generate: system prompts."""
    zipf: Annotated[float, AtMost, Field(ge=0)] = 1.1
    """With --generate: how few prompts are popular."""
    prefix_tokens: Annotated[int, AtMost, Field(ge=0)] = 1024
    """With --generate: of a system prompt."""
    turns: Annotated[float, AtMost, Field(ge=1)] = 4.0
    """With --generate: mean of a conversation."""
    user_tokens: Number = 128
    """With --generate: mean of a turn."""
    output_tokens: Number = 128
    """With --generate: mean of an answer."""
    think_seconds: Annotated[float, AtMost, Field(ge=0)] = 20.0
    """With --generate: mean between turns."""
    conversations_per_second: Annotated[float, AtMost, Field(gt=0)] = 0.5
    """With --generate."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One future request: turn `index` of a conversation under system prompt `prefix`."""

    at_seconds: float
    conversation: int
    prefix: int
    index: int
    user_len: int
    output_len: int


def plan_turns(habits: Habits) -> list[Turn]:
    """All turns in the order of their time; the same habits give the same turns."""
    rng = np.random.default_rng(habits.seed)
    ranks = np.arange(1, habits.num_prefixes + 1, dtype=np.float64)
    popularity = ranks**-habits.zipf
    turns: list[Turn] = []
    began, conversation = 0.0, 0
    while len(turns) < habits.num_requests:
        prefix = int(rng.choice(habits.num_prefixes, p=popularity / popularity.sum()))
        turns += _conversation(habits, rng, (began, conversation, prefix))
        began += float(rng.exponential(1 / habits.conversations_per_second))
        conversation += 1
    ordered = sorted(turns, key=lambda turn: (turn.at_seconds, turn.conversation))
    return ordered[: habits.num_requests]


def _conversation(
    habits: Habits, rng: np.random.Generator, begin: tuple[float, int, int]
) -> Iterator[Turn]:
    at, conversation, prefix = begin
    for index in range(int(rng.geometric(1 / habits.turns))):
        user_len, output_len = _length(rng, habits.user_tokens), _length(rng, habits.output_tokens)
        yield Turn(at, conversation, prefix, index, user_len, output_len)
        at += float(rng.exponential(habits.think_seconds)) if habits.think_seconds else 0.0


def _length(rng: np.random.Generator, mean: int) -> int:
    """Many are short and some are long, as people write: gamma with shape 2."""
    return max(1, round(float(rng.gamma(2.0, mean / 2))))


def trace_lines(habits: Habits, block_tokens: int) -> Iterator[str]:
    """The turns as lines of a Mooncake trace with blocks of `block_tokens`, in their order."""
    rng = np.random.default_rng([habits.seed, 1])
    names = BlockNames(block_tokens)
    prefixes = [_tokens(rng, habits.prefix_tokens) for _ in range(habits.num_prefixes)]
    spoken: dict[int, Tokens] = {}
    for turn in plan_turns(habits):
        before = spoken.get(turn.conversation, prefixes[turn.prefix])
        prompt = np.concatenate([before, _tokens(rng, turn.user_len)])
        answer = _tokens(rng, turn.output_len)
        yield mooncake_line(names, turn.at_seconds, prompt, answer)
        spoken[turn.conversation] = np.concatenate([prompt, answer])


def _tokens(rng: np.random.Generator, count: int) -> Tokens:
    return rng.integers(_TOKEN_VALUES, size=count, dtype=np.uint32)


def write_trace(path: Path, habits: Habits, block_tokens: int) -> int:
    """Writes a trace to `path`; returns how many requests it has. Raises ConfigError."""
    try:
        with path.open("w") as opened:
            return sum(opened.write(f"{line}\n") > 0 for line in trace_lines(habits, block_tokens))
    except OSError as error:
        raise ConfigError(f"--generate {path}: {error.strerror or error}") from None
