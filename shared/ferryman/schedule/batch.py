"""A step as integers: the only message from the scheduler to the device.

A plan is frozen and complete. The forward stream runs plans in the order of their `step_id`; the
slot operations of a plan are executed once, even if its requests end meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ferryman.cache.keys import TokenIds
from ferryman.cache.manifest import Kind
from ferryman.cache.units import HostUnit as HostUnit
from ferryman.schedule.prompt_scores import PromptScores, ScoreRequest
from ferryman.schedule.request import SamplingParams

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """Copy the whole slot `src` to `dst`, both of one kind: copy-on-write of a snapshot, or of the
    end of a prompt that several requests share."""

    src: int
    dst: int
    kind: Kind = Kind.RECURRENT


@dataclass(frozen=True, slots=True)
class SlotLoad:
    """Bring a host unit into device slot `dst` of the unit's kind, verifying its digest."""

    request_id: str
    unit: HostUnit
    dst: int


@dataclass(frozen=True, slots=True)
class SlotSnapshot:
    """Freeze the recurrent state at `position` of the request whose working slot is `src`."""

    src: int
    dst: int
    position: int


@dataclass(frozen=True, slots=True)
class RowSeed:
    """Token ids at the start of a row's history that no forward of this row computes."""

    row: int
    token_ids: TokenIds


@dataclass(frozen=True, slots=True)
class SlotOps:
    """The changes of slots that a step makes before and after its forward.

    Prologue, in this order: loads, copies, clears, seeds, saves. Epilogue: snapshots. (In a prefill
    step the scan itself writes snapshots, see `Chunk.snapshots`; these are of decode steps.)
    `saves` freeze states as they stand before the forward: those that verification ended on.
    """

    loads: tuple[SlotLoad, ...] = ()
    copies: tuple[SlotCopy, ...] = ()
    clears: tuple[int, ...] = ()
    seeds: tuple[RowSeed, ...] = ()
    saves: tuple[SlotSnapshot, ...] = ()
    snapshots: tuple[SlotSnapshot, ...] = ()

    def joined(self, other: SlotOps) -> SlotOps:
        """The operations of both, for two halves of one step."""
        return SlotOps(
            self.loads + other.loads,
            self.copies + other.copies,
            self.clears + other.clears,
            self.seeds + other.seeds,
            self.saves + other.saves,
            self.snapshots + other.snapshots,
        )


@dataclass(slots=True)
class SlotOpsBuilder:
    """Collects the operations of a step while it is planned."""

    loads: list[SlotLoad] = field(default_factory=list)
    copies: list[SlotCopy] = field(default_factory=list)
    clears: list[int] = field(default_factory=list)
    seeds: list[RowSeed] = field(default_factory=list)
    saves: list[SlotSnapshot] = field(default_factory=list)
    snapshots: list[SlotSnapshot] = field(default_factory=list)

    def add(self, other: SlotOpsBuilder) -> None:
        self.loads += other.loads
        self.copies += other.copies
        self.clears += other.clears
        self.seeds += other.seeds
        self.saves += other.saves
        self.snapshots += other.snapshots

    def finish(self) -> SlotOps:
        return SlotOps(
            tuple(self.loads),
            tuple(self.copies),
            tuple(self.clears),
            tuple(self.seeds),
            tuple(self.saves),
            tuple(self.snapshots),
        )


class SampleRequest(NamedTuple):
    """One draw: the token at `position` (absolute) of the request in `row`.

    `prompt_len` splits the row's history into prompt and output for the penalties. The tokens of
    `stop_token_ids` end the request. `arrival` tells it from those that have the row before and
    after it.
    """

    row: int
    position: int
    prompt_len: int
    params: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    arrival: int = 0

    @property
    def banned(self) -> frozenset[int]:
        """Tokens that would end the request before its least length."""
        is_early = self.position - self.prompt_len < self.params.rules.min_tokens
        return self.stop_token_ids if is_early else frozenset()


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part [start, end) of a request's tokens that one prefill step computes.

    `token_ids` [end - start]; `snapshots` lie in (start, end] on the page grid and are written by
    the scan. `draws` is empty unless the chunk ends the prompt, and then holds one draw; an audit's
    draws tokens behind any of the chunk's. `scores` holds one entry if the prompt's tokens after
    those of the chunk are to be scored.
    """

    request_id: str
    row: int
    start: int
    end: int
    token_ids: TokenIds
    working_slot: int
    snapshots: tuple[SlotSnapshot, ...]
    draws: tuple[SampleRequest, ...]
    scores: tuple[ScoreRequest, ...] = ()


def _no_adapters() -> Ints:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """Chunks of several requests, flattened into one ragged batch.

    `page_tables[kind]` [chunks, pages] names the slot of every page up to the chunk's end; unused
    entries are -1. FULL covers [0, end); WINDOW entries before the window are -1. `adapters`
    [chunks] are numbers of LoRA adapters; 0, or an empty array, for the model alone.
    """

    step_id: int
    ops: SlotOps
    chunks: tuple[Chunk, ...]
    page_tables: Mapping[Kind, Ints]
    adapters: Ints = field(default_factory=_no_adapters)

    @property
    def draws(self) -> tuple[SampleRequest, ...]:
        return tuple(draw for chunk in self.chunks for draw in chunk.draws)

    @property
    def scores(self) -> tuple[ScoreRequest, ...]:
        return tuple(wanted for chunk in self.chunks for wanted in chunk.scores)


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One token of each running request, followed by the drafts to verify.

    Token i is consumed at `positions[i]` of `rows[i]`. Tokens lie wave after wave: the first token
    of each of `request_ids`, then the second tokens of the requests that have one, in the same
    order. `verify_depths` are the sizes of the waves; they never grow, so request i is the i-th of
    every wave that it is in.

    The first wave is read on the device from the rows' histories, where the step before it (or the
    prologue's seed) wrote it; `drafts` are the token ids of the later waves, or ON_DEVICE for those
    that a draft model names. A token is drawn after every position, draft or not. `rows`,
    `positions`, `read_slots`, `write_slots` are [tokens]; `page_tables` [tokens, pages] as in
    PrefillStep. The recurrent state before a token is read at its `read_slots` and the state after
    it is written at its `write_slots`; both are equal for a token that is no draft. `adapters`
    [tokens] as in PrefillStep.
    """

    step_id: int
    ops: SlotOps
    request_ids: tuple[str, ...]
    rows: Ints
    positions: Ints
    read_slots: Ints
    write_slots: Ints
    verify_depths: tuple[int, ...]
    page_tables: Mapping[Kind, Ints]
    draws: tuple[SampleRequest, ...]
    drafts: tuple[int, ...] = ()
    adapters: Ints = field(default_factory=_no_adapters)

    def num_drafts(self, index: int) -> int:
        """The number of drafts of request `index` that this step verifies."""
        return sum(index < size for size in self.verify_depths[1:])

    def tokens_of(self, index: int) -> list[int]:
        """Indices of the tokens of request `index`, in order."""
        firsts = accumulate(self.verify_depths, initial=0)
        return [
            first + index
            for first, size in zip(firsts, self.verify_depths, strict=False)
            if index < size
        ]


@dataclass(frozen=True, slots=True)
class AuditStep(PrefillStep):
    """A chunk of an audit: tokens of a request that has ended, computed and drawn again without any
    reuse. Nobody waits for it."""


PureStep = PrefillStep | DecodeStep


@dataclass(frozen=True, slots=True)
class MixedStep:
    """Chunks of prompts, and one token of each running request, in one forward.

    The halves have one id, and no token of `tokens` is a draft. The draws of the prompts come
    first.
    """

    prompts: PrefillStep
    tokens: DecodeStep

    def __post_init__(self) -> None:
        assert self.prompts.step_id == self.tokens.step_id, "halves of one step"
        assert len(self.tokens.verify_depths) == 1, "a step that verifies drafts is not mixed"

    @property
    def step_id(self) -> int:
        return self.prompts.step_id

    @property
    def ops(self) -> SlotOps:
        return self.prompts.ops.joined(self.tokens.ops)

    @property
    def draws(self) -> tuple[SampleRequest, ...]:
        return self.prompts.draws + self.tokens.draws

    @property
    def scores(self) -> tuple[ScoreRequest, ...]:
        return self.prompts.scores

    def outcomes(self, outcome: StepOutcome) -> tuple[StepOutcome, StepOutcome]:
        """The part of the prompts in the outcome of this step, and that of the tokens."""
        drawn, count = outcome.sampled, len(self.prompts.draws)
        of_prompts = replace(outcome, sampled=drawn[:count])
        return of_prompts, replace(outcome, sampled=drawn[count:], scores=())


StepPlan = PureStep | MixedStep


def halves_of(plan: StepPlan) -> tuple[PureStep, ...]:
    """The step itself, or the two of a mixed one."""
    return (plan.prompts, plan.tokens) if isinstance(plan, MixedStep) else (plan,)


NO_TOKEN = -1
"""Drawn from logits that are not all finite numbers."""
NO_CHOICE = -2
"""Drawn when the request's grammar leaves no token."""
NO_DRAW = -3
"""In place of a token that could not be drawn."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One drawn token; `logprobs` maps token id to natural log probability (empty: not asked).

    The token is NO_TOKEN if the logits are not all finite numbers, and NO_CHOICE at a dead end of
    the request's grammar.
    """

    token_id: int
    logprobs: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class FailedDraw(Sampled):
    """A draw for which some work raised `error`; its token is NO_DRAW."""

    error: Exception


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of a step's loads: verified bytes, and the seconds spent copying them."""

    num_bytes: int = 0
    seconds: float = 0.0


NOTHING_LOADED = LoadReport()


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of a step: one `Sampled` per draw of the plan, in order, and the loads that
    failed.

    A request in `corrupt` got bytes from a tier that differ from the bytes written, so this step's
    results for it are void. `forward_seconds` exclude the loads, which are in `loaded`. `drafts`
    are the tokens consumed after the first wave, from the plan or from a draft model. `scores` has
    one entry per score request of the plan, in order. `failed` are errors by request: those whose
    part of the step could not be prepared, so its results for them are void.
    """

    step_id: int
    sampled: tuple[Sampled, ...]
    corrupt: tuple[str, ...] = ()
    forward_seconds: float = 0.0
    loaded: LoadReport = NOTHING_LOADED
    drafts: tuple[int, ...] = ()
    scores: tuple[PromptScores, ...] = ()
    failed: Mapping[str, Exception] = field(default_factory=dict)
