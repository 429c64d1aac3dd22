"""What a reservation table is told and what it answers: values, and effects for others to do."""

from __future__ import annotations

from dataclasses import dataclass

from ferryman.handoff.values import Reservation
from ferryman.handoff.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Writer:
    """One life of the process that may write."""

    worker_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Fence:
    """What every message about a reservation carries."""

    epoch: int
    reservation_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class StartDecoding:
    """Everything is verified: the slots are the request's now, and it may run."""

    request_id: str
    reservation: Reservation


@dataclass(frozen=True, slots=True)
class FreeSlots:
    """Nobody will write to these slots again: drop the reservation's leases."""

    request_id: str
    reservation: Reservation


@dataclass(frozen=True, slots=True)
class StopWriter:
    """Tell the writer to stop and report `writer_stopped` when it has; until then, quarantine."""

    request_id: str
    reservation: Reservation
    writer: Writer


Effect = StartDecoding | FreeSlots | StopWriter


@dataclass(frozen=True, slots=True)
class CommitAnswer:
    """What the writer is told, and what the worker does; a repeated commit has no effects."""

    verdict: Verdict
    effects: tuple[Effect, ...]


@dataclass(frozen=True, slots=True)
class AbortAnswer:
    """`may_still_write` says whether slots went into quarantine."""

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
