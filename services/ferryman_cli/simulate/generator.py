"""Makes traces: conversations of several turns that begin with one of few shared system prompts.

How popular a system prompt is follows Zipf's law; conversations arrive at random, turn upon turn
after a time to think; each turn repeats all that was said, answers included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ferryman.errors import ConfigError
from ferryman_cli.simulate.mooncake import BlockNames, mooncake_line
from ferryman_cli.simulate.trace import MAX_REQUESTS

Tokens = NDArray[np.uint32]
_TOKEN_VALUES = 1 << 32


@dataclass(frozen=True, slots=True)
class Habits:
    """What conversations are like. Lengths are means in tokens; every length is at least 1.

    System prompt i of `num_prefixes` is as popular as (i + 1) ** -`zipf`.
    """

    num_requests: int = 1000
    num_prefixes: int = 8
    zipf: float = 1.1
    prefix_tokens: int = 1024
    turns: float = 4.0
    user_tokens: int = 128
    output_tokens: int = 128
    think_seconds: float = 20.0
    conversations_per_second: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_requests", "num_prefixes", "user_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.turns < 1 or self.zipf < 0 or self.prefix_tokens < 0 or self.think_seconds < 0:
            raise ConfigError("turns must be at least 1; zipf, prefix and think time at least 0")
        if self.conversations_per_second <= 0:
            raise ConfigError("conversations_per_second must be above 0")
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name != "seed" and not value <= MAX_REQUESTS:  # so is no number at all
                raise ConfigError(f"{each.name} must be at most {MAX_REQUESTS}, not {value}")


@dataclass(frozen=True, slots=True)
class Turn:
    """One request to come: turn `index` of a conversation under system prompt `prefix`."""

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
    said: dict[int, Tokens] = {}
    for turn in plan_turns(habits):
        before = said.get(turn.conversation, prefixes[turn.prefix])
        prompt = np.concatenate([before, _tokens(rng, turn.user_len)])
        answer = _tokens(rng, turn.output_len)
        yield mooncake_line(names, turn.at_seconds, prompt, answer)
        said[turn.conversation] = np.concatenate([prompt, answer])


def _tokens(rng: np.random.Generator, count: int) -> Tokens:
    return rng.integers(_TOKEN_VALUES, size=count, dtype=np.uint32)


def write_trace(path: Path, habits: Habits, block_tokens: int) -> int:
    """Writes a trace to `path`; how many requests it has. Raises ConfigError."""
    try:
        with path.open("w") as opened:
            return sum(opened.write(f"{line}\n") > 0 for line in trace_lines(habits, block_tokens))
    except OSError as error:
        raise ConfigError(f"--generate {path}: {error.strerror or error}") from None
