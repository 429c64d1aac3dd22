"""Identities, answers and effects of a reservation table, as values."""

from __future__ import annotations

from dataclasses import dataclass

from ferryman.handoff.commit_check import Verdict
from ferryman.handoff.values import Reservation


@dataclass(frozen=True, slots=True)
class WriterId:
    """A process that may write, from one start to its end."""

    worker_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class WriteFence:
    """The fence that every message about a reservation carries."""

    epoch: int
    reservation_id: str
    attempt: int


def fence_of(reservation: Reservation) -> WriteFence:
    """The fence that the writer of a reservation must show."""
    return WriteFence(reservation.epoch, reservation.reservation_id, reservation.attempt)


@dataclass(frozen=True, slots=True)
class StartDecoding:
    """Everything is verified: the request owns the slots now, and it may run."""

    request_id: str
    reservation: Reservation


@dataclass(frozen=True, slots=True)
class FreeSlots:
    """No process will write to these slots again: release the reservation's leases."""

    request_id: str
    reservation: Reservation


@dataclass(frozen=True, slots=True)
class StopWriter:
    """Ask the writer to stop and to report `writer_stopped` when it has; until then,
    quarantine."""

    request_id: str
    reservation: Reservation
    writer: WriterId


Effect = StartDecoding | FreeSlots | StopWriter


@dataclass(frozen=True, slots=True)
class CommitAnswer:
    """The verdict for the writer, and the effects for the worker; a repeated commit has no
    effects."""

    verdict: Verdict
    effects: tuple[Effect, ...]


@dataclass(frozen=True, slots=True)
class AbortAnswer:
    """The answer to an abort. `may_still_write`: slots went into quarantine."""

    may_still_write: bool
    effects: tuple[Effect, ...]


@dataclass(frozen=True, slots=True)
class ReceiverLimits:
    """Bounds. Closed reservations are remembered to answer a repeated commit as the first."""

    max_open: int = 1024
    max_closed: int = 4096
    max_tombstones: int = 16384
    tombstone_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class ReceiverStatistics:
    """Counts for the gauges; `num_refused` messages came too late or to the wrong address."""

    num_open: int
    num_quarantined: int
    num_quarantined_slots: int
    num_refused: int
    num_skipped_units: int
