"""The order of steps: which kind a schedule plans next while prompts wait and requests decode.

A worker that only prefills, or only decodes, has one kind. When both meet, the order decides what
an arriving prompt costs the requests that decode:

    PREFILL_FIRST   prompts go first, chunk after chunk; running requests wait for all of them
    IN_TURNS        a decode step after each chunk; a running request waits for one chunk at most

vLLM and SGLang call the second one chunked prefill, or mixed batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class StepOrder(Protocol):
    """The choice between two kinds of step, each planned only if it has something to do."""

    def decodes_next(self, *, after_prefill: bool) -> bool:
        """Whether a decode step is tried first; otherwise a prefill step is tried first."""
        ...

    def prefill_tokens(self, chunk_tokens: int, num_decoding: int, grid: int) -> int:
        """The most tokens of one prefill step while `num_decoding` requests decode."""
        ...


@dataclass(frozen=True, slots=True)
class PrefillFirst:
    """Prompts before running requests: the least seconds until all have their first token."""

    def decodes_next(self, *, after_prefill: bool) -> bool:
        return False

    def prefill_tokens(self, chunk_tokens: int, num_decoding: int, grid: int) -> int:
        return chunk_tokens


@dataclass(frozen=True, slots=True)
class InTurns:
    """Decode, a chunk, decode, a chunk: `chunk_tokens` bound the two steps of a turn together."""

    def decodes_next(self, *, after_prefill: bool) -> bool:
        return after_prefill

    def prefill_tokens(self, chunk_tokens: int, num_decoding: int, grid: int) -> int:
        # Chunks are cut on the grid: with less than a piece of it no prompt would ever advance.
        return max(grid, chunk_tokens - num_decoding)


PREFILL_FIRST: StepOrder = PrefillFirst()
IN_TURNS: StepOrder = InTurns()
