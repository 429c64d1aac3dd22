"""Limits on a schedule, the order of its steps, and its statistics.

The order says which kind of step is planned next while prompts wait and requests decode. A worker
that only prefills, or only decodes, has one kind. When both meet, the order decides what an
arriving prompt costs the requests that decode:

    PREFILL_FIRST   prompts go first, chunk after chunk; running requests wait for all of them
    IN_TURNS        a decode step after each chunk; a running request waits for one chunk at most
    TOGETHER        one step computes a chunk and a token of each running request

vLLM and SGLang call the last one chunked prefill, or mixed batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ferryman.cache.capacity import Concurrency
from ferryman.errors import InvalidRequest
from ferryman.schedule.drafting import NO_DRAFTS, DraftCounts, Drafting
from ferryman.schedule.prompt_scores import check_num_entries
from ferryman.schedule.request import Request

MIXED_SHARE = 4
"""A chunk beside running requests has this part of `chunk_tokens`."""


class StepOrder(Protocol):
    """The choice between two kinds of step, each planned only if it has something to do."""

    @property
    def mixes(self) -> bool:
        """Whether a step computes both, if none of its requests drafts."""
        ...

    def decodes_next(self, *, after_prefill: bool) -> bool:
        """Whether a decode step is tried first; otherwise a prefill step is tried first."""
        ...

    def prefill_tokens(self, chunk_tokens: int, num_decoding: int, grid: int) -> int:
        """The most tokens of one prefill step while `num_decoding` requests decode."""
        ...


@dataclass(frozen=True, slots=True)
class PrefillFirst:
    """Prompts before running requests: the least seconds until all have their first token."""

    @property
    def mixes(self) -> bool:
        return False

    def decodes_next(self, *, after_prefill: bool) -> bool:
        return False

    def prefill_tokens(self, chunk_tokens: int, num_decoding: int, grid: int) -> int:
        return chunk_tokens


@dataclass(frozen=True, slots=True)
class InTurns:
    """Decode, a chunk, decode, a chunk: `chunk_tokens` bound the two steps of a turn together."""

    @property
    def mixes(self) -> bool:
        return False

    def decodes_next(self, *, after_prefill: bool) -> bool:
        return after_prefill

    def prefill_tokens(self, chunk_tokens: int, num_decoding: int, grid: int) -> int:
        # Chunks are cut on the grid: with less than a piece of it no prompt would ever advance.
        return max(grid, chunk_tokens - num_decoding)


@dataclass(frozen=True, slots=True)
class Together(InTurns):
    """A token of each running request in each step, and beside it a part of `chunk_tokens`: a step
    of both takes little longer than a chunk, so shorter chunks cost less than in turns. Where
    requests draft, as in turns."""

    @property
    def mixes(self) -> bool:
        return True

    def prefill_tokens(self, chunk_tokens: int, num_decoding: int, grid: int) -> int:
        if not num_decoding:
            return chunk_tokens
        return max(grid, chunk_tokens // MIXED_SHARE - num_decoding)


PREFILL_FIRST: StepOrder = PrefillFirst()
IN_TURNS: StepOrder = InTurns()
TOGETHER: StepOrder = Together()


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one schedule. `chunk_tokens` bounds the tokens of one prefill step.

    `snapshot_grid` is the distance in tokens between the coarse snapshots of a prompt, a multiple
    of the page size; 0 for none. `drafting` proposes tokens of requests that decode. `order`
    decides between prompts and those. `audit_share` is the share of the tokens, and of the requests
    that reuse state, that is computed again to be compared.
    """

    concurrency: Concurrency
    chunk_tokens: int
    max_len: int
    max_waiting: int
    steps_in_flight: int
    prefix_cache: bool
    snapshot_grid: int = 0
    drafting: Drafting = NO_DRAFTS
    order: StepOrder = PREFILL_FIRST
    audit_share: float = 0.0

    def check(self, request: Request) -> None:
        """Raises InvalidRequest when these pools can never hold the request to its last token."""
        if request.prompt_len < 1:
            raise InvalidRequest("the prompt is empty", "prompt")
        if (num_best := request.prompt_logprobs) is not None:
            check_num_entries(num_best, request.prompt_len)
        if request.num_generated >= request.sampling.max_tokens:
            raise InvalidRequest(
                f"{request.num_generated} tokens were generated already, max_tokens="
                f"{request.sampling.max_tokens} allows no further one",
                "num_generated",
            )
        final = request.prompt_len - request.num_generated + request.sampling.max_tokens
        if final > self.max_len:
            raise InvalidRequest(
                f"prompt of {request.prompt_len} tokens and max_tokens="
                f"{request.sampling.max_tokens} exceed the {self.max_len} tokens that fit",
                "max_tokens",
            )


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Gauges for heartbeats and metrics, and steps committed since the start."""

    waiting: int
    prefilling: int
    decoding: int
    held: int
    reserved: int
    tokens_to_prefill: int
    prefill_steps: int
    decode_steps: int
    draft_steps: int
    drafted_tokens: int
    accepted_tokens: int
    audited_tokens: int

    @property
    def drafts(self) -> DraftCounts:
        """The counts of requests that draft."""
        return DraftCounts(self.draft_steps, self.drafted_tokens, self.accepted_tokens)
