"""A trace for the simulator: requests by arrival, with their tokens and their answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ferryman.errors import InvalidRequest
from ferryman_simulator.synthetic_prompt import SyntheticPrompt

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

    `arrival_seconds` counts from the trace's first request.
    """

    request_id: str
    arrival_seconds: float
    content: SyntheticPrompt
    prompt_len: int

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
    return [replace(one, arrival_seconds=one.arrival_seconds - start) for one in ordered]
