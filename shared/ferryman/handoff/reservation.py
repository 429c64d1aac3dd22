"""A reservation as decode sees it.

    state       event → state
    offered     first write or renewal → receiving · lease over, abort → expiring
    receiving   commit verified → committed · commit with gaps or a bad digest → failed
                lease over, abort → expiring
    expiring    the writer stopped, or its epoch is dead → freed
    committed, failed, freed      absorbing

A writer cannot be recalled. While one may still write, the slots of an expiring reservation are in
quarantine: only the writer's word, or its death, frees them; never a clock alone. A commit is such
a word too, for it says that all is written, so `failed` needs no quarantine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ferryman.handoff.transitions import follow, terminal_states


class ReservationState(StrEnum):
    """How far a reservation has come."""

    OFFERED = "offered"
    RECEIVING = "receiving"
    COMMITTED = "committed"
    FAILED = "failed"
    EXPIRING = "expiring"
    FREED = "freed"


@dataclass(frozen=True, slots=True)
class Written:
    """A part of a wanted unit arrived."""


@dataclass(frozen=True, slots=True)
class Renewed:
    """The writer made progress that decode cannot see."""


@dataclass(frozen=True, slots=True)
class CommitVerified:
    """Everything wanted was written, and its bytes are those that were sent."""


@dataclass(frozen=True, slots=True)
class CommitRefused:
    """A unit is lacking, or its bytes are not those that were sent."""


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The lease is over by decode's own monotonic clock."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """The router cancelled the attempt, or decode itself gives it up."""


@dataclass(frozen=True, slots=True)
class WriterStopped:
    """The writer says that it will not write again."""


@dataclass(frozen=True, slots=True)
class WriterDied:
    """The process that could write is no more."""


ReservationEvent = (
    Written
    | Renewed
    | CommitVerified
    | CommitRefused
    | LeaseEnded
    | Aborted
    | WriterStopped
    | WriterDied
)

S = ReservationState
_NOBODY_WRITES: dict[type, ReservationState] = {WriterStopped: S.FREED, WriterDied: S.FREED}
_GIVEN_UP: dict[type, ReservationState] = {LeaseEnded: S.EXPIRING, Aborted: S.EXPIRING}
_COMMIT: dict[type, ReservationState] = {CommitVerified: S.COMMITTED, CommitRefused: S.FAILED}
_WRITE: dict[type, ReservationState] = {Written: S.RECEIVING, Renewed: S.RECEIVING}

# fmt: off
TRANSITIONS: Mapping[ReservationState, Mapping[type, ReservationState]] = {
    S.OFFERED:   {**_WRITE, **_COMMIT, **_GIVEN_UP, **_NOBODY_WRITES},
    S.RECEIVING: {**_WRITE, **_COMMIT, **_GIVEN_UP, **_NOBODY_WRITES},
    S.EXPIRING:  {LeaseEnded: S.EXPIRING, Aborted: S.EXPIRING, **_NOBODY_WRITES},
    S.COMMITTED: {},
    S.FAILED:    {},
    S.FREED:     {},
}
# fmt: on

OPEN = frozenset({S.OFFERED, S.RECEIVING})
TERMINAL = terminal_states(TRANSITIONS)


def next_state(state: ReservationState, event: ReservationEvent) -> ReservationState:
    """Follows the table; raises IllegalTransition, and stays where it is in a terminal state."""
    return follow(TRANSITIONS, state, event)
