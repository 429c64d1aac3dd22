"""A reservation as decode sees it.

    state       event → state
    offered     first write or renewal → receiving · lease over, abort → expiring
    receiving   commit verified → committed · commit with gaps or a bad digest → failed
                lease over, abort → expiring
    expiring    the writer stopped, or its epoch is dead → freed
    committed, failed, freed      absorbing

A writer cannot be recalled. While one may still write, the slots of an expiring reservation are in
quarantine: only the writer's report that it stopped, or its death, frees them; never a clock alone.
A commit is such a report too, because it means that all is written, so `failed` needs no
quarantine.

The receiver's half of a KV transfer (vLLM's KV connector, SGLang's KV receiver).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ferryman.handoff.transitions import follow, terminal_states


class ReservationState(StrEnum):
    """The progress of a reservation."""

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
    """Every wanted unit was written, and its bytes are those that were sent."""


@dataclass(frozen=True, slots=True)
class CommitRefused:
    """A unit is missing, or its bytes differ from those that were sent."""


@dataclass(frozen=True, slots=True)
class ReservationLeaseEnded:
    """The lease has ended by decode's own monotonic clock."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """The router cancelled the attempt, its writer gave it up, or decode itself did."""


@dataclass(frozen=True, slots=True)
class WriterStopped:
    """The writer reports that it will not write again."""


@dataclass(frozen=True, slots=True)
class WriterDied:
    """The process that could write has ended."""


ReservationEvent = (
    Written
    | Renewed
    | CommitVerified
    | CommitRefused
    | ReservationLeaseEnded
    | Aborted
    | WriterStopped
    | WriterDied
)

S = ReservationState
_WRITER_GONE: dict[type, ReservationState] = {WriterStopped: S.FREED, WriterDied: S.FREED}
_GIVEN_UP: dict[type, ReservationState] = {ReservationLeaseEnded: S.EXPIRING, Aborted: S.EXPIRING}
_COMMIT: dict[type, ReservationState] = {CommitVerified: S.COMMITTED, CommitRefused: S.FAILED}
_WRITE: dict[type, ReservationState] = {Written: S.RECEIVING, Renewed: S.RECEIVING}

# fmt: off
TRANSITIONS: Mapping[ReservationState, Mapping[type, ReservationState]] = {
    S.OFFERED:   {**_WRITE, **_COMMIT, **_GIVEN_UP, **_WRITER_GONE},
    S.RECEIVING: {**_WRITE, **_COMMIT, **_GIVEN_UP, **_WRITER_GONE},
    S.EXPIRING:  {ReservationLeaseEnded: S.EXPIRING, Aborted: S.EXPIRING, **_WRITER_GONE},
    S.COMMITTED: {},
    S.FAILED:    {},
    S.FREED:     {},
}
# fmt: on

OPEN = frozenset({S.OFFERED, S.RECEIVING})
TERMINAL = terminal_states(TRANSITIONS)


def next_state(state: ReservationState, event: ReservationEvent) -> ReservationState:
    """Follows the table; raises IllegalTransition. A terminal state stays as it is."""
    return follow(TRANSITIONS, state, event)
