"""Faults of fake workers: each is a value that does one thing at one stage, and counts it.

    death = decode.suffers(Die(FaultStage.TOKEN, offset=4))
    ...
    assert death.happened == 1

One fault may be given to several workers; `happened_at` has the number of each.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from ferryman.errors import Exhausted, OutOfSlots, RequestIdInUse
from ferryman.schedule.prompt_scores import PromptScores
from ferryman.wire.values import Ending, RequestTokens

Scores = list[PromptScores]


class FaultStage(Enum):
    """The stages of a request's way through fake workers, in order."""

    ORDER = auto()
    """Prefill has an order."""
    PREFILL = auto()
    """Prefill is about to reserve."""
    RESERVE = auto()
    """Decode is asked for slots."""
    RESERVED = auto()
    """Prefill has its slots."""
    SCORES = auto()
    """Prefill has told the scores of the prompt."""
    COMMIT = auto()
    """Prefill is about to commit; decode is told to."""
    COMMITTED = auto()
    """Prefill has committed."""
    HANDED_OFF = auto()
    """Prefill is about to say its last word."""
    NEXT_TOKEN = auto()
    """Decode is about to draw a token of an attempt after its first one."""
    TOKEN = auto()
    """Decode is about to draw a token, any one."""
    STREAM = auto()
    """A token is about to leave with decode's stream."""
    DETACH = auto()
    """Decode is told to let a request go."""
    HAND_OFF = auto()
    """Decode is told to hand a request off."""
    PREFETCH = auto()
    """A host-cache is asked for a prefetch."""


@dataclass(frozen=True)
class Moment:
    """A worker at a stage of one request; `attempt` is `ID.NUMBER`."""

    stage: FaultStage
    attempt: str = ""
    offset: int = 0
    max_tokens: int = 0


class Mortal(Protocol):
    """The part of a fake worker that faults need."""

    worker_id: str

    def die(self) -> None: ...


class GivenUp(Exception):
    """Decode ends a request unasked, with this ending."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending)
        self.ending = ending


@dataclass(eq=False)
class Fault:
    """The base of all: where it strikes, and how often it did."""

    stage: FaultStage
    offset: int | None = field(default=None, kw_only=True)
    """Only at the token of this offset."""
    max_tokens: int | None = field(default=None, kw_only=True)
    """Only for a request that asks for so many tokens."""
    attempts: frozenset[str] = field(default=frozenset(), kw_only=True)
    """Only for these attempts, as `ID.NUMBER`."""
    times: int | None = field(default=None, kw_only=True)
    """So often, and no more; None is always."""
    happened_at: Counter[str] = field(default_factory=Counter, init=False)
    """How often it took effect, by the worker's id."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False, repr=False)

    @property
    def happened(self) -> int:
        return self.happened_at.total()

    async def reached(self, times: int) -> None:
        """Waits until it has taken effect so often."""
        async with asyncio.timeout(120):
            while self.happened < times:
                self._changed.clear()
                await self._changed.wait()

    def is_due(self, moment: Moment) -> bool:
        return (
            moment.stage is self.stage
            and self.offset in (None, moment.offset)
            and self.max_tokens in (None, moment.max_tokens)
            and (not self.attempts or moment.attempt in self.attempts)
            and (self.times is None or self.happened < self.times)
        )

    async def strike(self, worker: Mortal) -> None:
        """Takes effect where the worker stands; may raise, or not come back."""

    def sent(self, worker: Mortal, entry: RequestTokens) -> list[RequestTokens]:
        """The frames that decode sends instead of one."""
        return [entry]

    def told(self, worker: Mortal, stage: FaultStage, scores: Scores) -> Scores:
        """The scores that prefill tells at a stage instead of these."""
        return scores

    def note(self, worker: Mortal) -> None:
        self.happened_at[worker.worker_id] += 1
        self._changed.set()


@dataclass(eq=False)
class Refuse(Fault):
    """The worker answers with an error."""

    error: Exception

    async def strike(self, worker: Mortal) -> None:
        self.note(worker)
        raise self.error


@dataclass(eq=False)
class Die(Fault):
    """The worker dies as by SIGKILL."""

    async def strike(self, worker: Mortal) -> None:
        self.note(worker)
        worker.die()
        await asyncio.Event().wait()


@dataclass(eq=False)
class Pause(Fault):
    """The worker stands still until the test releases it."""

    _gate: asyncio.Event = field(default_factory=asyncio.Event, init=False, repr=False)

    async def strike(self, worker: Mortal) -> None:
        if not self._gate.is_set():
            self.note(worker)
            await self._gate.wait()

    def release(self) -> None:
        """Those that are held go on, and no more are held."""
        self._gate.set()

    def pause_again(self) -> None:
        self._gate.clear()


@dataclass(eq=False)
class GiveUp(Fault):
    """Decode ends a request unasked, with this ending, before the token at an offset."""

    stage: FaultStage = field(default=FaultStage.TOKEN, init=False)
    ending: Ending

    async def strike(self, worker: Mortal) -> None:
        self.note(worker)
        raise GivenUp(self.ending)


@dataclass(eq=False)
class LoseTokens(Fault):
    """The tokens at these offsets do not arrive, the first time."""

    stage: FaultStage = field(default=FaultStage.STREAM, init=False)
    offsets: set[int]

    def sent(self, worker: Mortal, entry: RequestTokens) -> list[RequestTokens]:
        if entry.frame.offset not in self.offsets:
            return [entry]
        self.offsets.discard(entry.frame.offset)
        self.note(worker)
        return []


@dataclass(eq=False)
class RepeatTokens(Fault):
    """Every token arrives twice."""

    stage: FaultStage = field(default=FaultStage.STREAM, init=False)

    def sent(self, worker: Mortal, entry: RequestTokens) -> list[RequestTokens]:
        self.note(worker)
        return [entry, entry]


@dataclass(eq=False)
class SpoilScores(Fault):
    """Prefill tells other scores of a prompt than it should."""

    stage: FaultStage = field(default=FaultStage.SCORES, init=False)
    spoil: Callable[[Scores], Scores]

    def told(self, worker: Mortal, stage: FaultStage, scores: Scores) -> Scores:
        if stage is not self.stage or not scores:
            return scores
        self.note(worker)
        return self.spoil(scores)


@dataclass(eq=False)
class LateScores(Fault):
    """Prefill tells the scores of a prompt after its commit."""

    stage: FaultStage = field(default=FaultStage.COMMITTED, init=False)
    _kept: Scores = field(default_factory=list, init=False, repr=False)

    def told(self, worker: Mortal, stage: FaultStage, scores: Scores) -> Scores:
        if stage is not self.stage:
            self._kept = scores
            return []
        self.note(worker)
        return self._kept


def no_slots(times: int = 1) -> Refuse:
    """Decode has no slots for so many requests."""
    return Refuse(FaultStage.RESERVE, OutOfSlots("no slots in the fake", 0.05), times=times)


def no_room(times: int = 1) -> Refuse:
    """Prefill has no room for so many requests."""
    return Refuse(FaultStage.PREFILL, Exhausted("no room in the fake", 0.05), times=times)


def in_use(*attempts: str) -> Refuse:
    """Prefill runs attempts of another router under these names, as `ID.NUMBER`."""
    error = RequestIdInUse("the fake has one of another router")
    return Refuse(FaultStage.ORDER, error, attempts=frozenset(attempts))
