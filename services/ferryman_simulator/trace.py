"""A trace for the simulator: requests by arrival, with their tokens and their answers.

A trace does not hold the prompts, only the names of their parts, which tell shared parts. Tokens
are made from names: a part's tokens depend on its name and their place in it, so equal names give
equal tokens and equal page keys. Page keys are chained, so sharing ends at the first different
name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ferryman.cache.keys import TokenIds, as_token_ids
from ferryman.errors import InvalidRequest

MAX_REQUESTS = 1_000_000
MAX_TOKENS = 1 << 20
MAX_LINE_BYTES = 1 << 20


class BadTrace(InvalidRequest):
    """A line of a trace cannot be read; `path` and `line_number`, from 1, are its place."""

    def __init__(self, path: Path | str, line_number: int, message: str) -> None:
        super().__init__(f"{path}:{line_number}: {message}", "trace")
        self.path = str(path)
        self.line_number = line_number


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request: `content` is its prompt of `prompt_len` tokens, followed by its answer.

    `arrival_seconds` counts from the trace's first request. At `fork_points` other prompts are
    likely to part from this one, as a router would say.
    """

    request_id: str
    arrival_seconds: float
    content: SyntheticPrompt
    prompt_len: int
    fork_points: tuple[int, ...] = ()

    @property
    def output_len(self) -> int:
        return self.content.num_tokens - self.prompt_len


@dataclass(frozen=True, slots=True)
class MeasuredPace:
    """Seconds measured in the trace; 0.0 without a measurement."""

    prefill_seconds_per_token: float = 0.0
    decode_step_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival, and the times measured in the trace.

    `num_left_out` requests are left out: they did not end well, or their events are incomplete.
    """

    requests: Sequence[TracedRequest]
    pace: MeasuredPace = MeasuredPace()
    num_left_out: int = 0

    @property
    def num_tokens(self) -> int:
        """The tokens of all prompts."""
        return sum(request.prompt_len for request in self.requests)


def by_arrival(requests: Iterable[TracedRequest]) -> list[TracedRequest]:
    """In the order of their arrival, counted from the first of them."""
    ordered = sorted(requests, key=lambda request: request.arrival_seconds)
    start = ordered[0].arrival_seconds if ordered else 0.0
    return [
        replace(request, arrival_seconds=request.arrival_seconds - start) for request in ordered
    ]


# Tokens made from names.

# Constants of splitmix64 (Steele, Lea and Flood, 2014): a bijection in which every bit counts.
_STRIDE, _MIX_1, _MIX_2 = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)
_LOW_HALF = np.uint64(0xFFFFFFFF)
# Names for parts that no other request has: above all names in a trace.
OWN_NAMES = 1 << 62


@dataclass(frozen=True, slots=True)
class SyntheticPrompt:
    """The first `lengths[i]` tokens of each part `names[i]`, in order."""

    names: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def first(self, num_tokens: int) -> SyntheticPrompt:
        """The first `num_tokens` of it, or all when it has fewer."""
        names, lengths, left = [], [], num_tokens
        for name, length in zip(self.names, self.lengths, strict=True):
            if left <= 0:
                break
            names.append(name)
            lengths.append(min(length, left))
            left -= length
        return SyntheticPrompt(tuple(names), tuple(lengths))

    def then(self, other: SyntheticPrompt) -> SyntheticPrompt:
        return SyntheticPrompt(self.names + other.names, self.lengths + other.lengths)

    def token_ids(self) -> TokenIds:
        """Its tokens [num_tokens], any u32."""
        lengths = np.array(self.lengths, dtype=np.int64)
        names = np.repeat(np.array(self.names, dtype=np.uint64), lengths)
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
        places = (np.arange(len(names)) - starts + 1).astype(np.uint64)
        with np.errstate(over="ignore"):
            mixed = names * _STRIDE + places * _MIX_1
            mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
            mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
        return as_token_ids((mixed ^ (mixed >> np.uint64(31))) & _LOW_HALF)


def blocks(names: Sequence[int], block_tokens: int, num_tokens: int) -> SyntheticPrompt:
    """The first `num_tokens` tokens of whole blocks."""
    every = SyntheticPrompt(tuple(names), (block_tokens,) * len(names))
    return every.first(num_tokens)


def own(owner: int, num_tokens: int) -> SyntheticPrompt:
    """Tokens that no other request has; `owner` counts requests."""
    return SyntheticPrompt((OWN_NAMES + owner,), (num_tokens,))
