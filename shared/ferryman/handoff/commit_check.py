"""Decode's check of a commit: whether every wanted unit was written, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ferryman.handoff.values import (
    PageRange,
    Reservation,
    UnitDigest,
    UnitName,
    difference,
    intersection,
    ranges_of,
)


@dataclass(frozen=True, slots=True)
class Verified:
    """Every wanted unit is there; `num_skipped` units were offered but not wanted."""

    num_skipped: int = 0


@dataclass(frozen=True, slots=True)
class Gaps:
    """These units were wanted and did not arrive, or arrived without a digest."""

    missing: tuple[PageRange, ...]


@dataclass(frozen=True, slots=True)
class Corrupt:
    """The bytes of these units are not the bytes that were sent."""

    units: tuple[PageRange, ...]


@dataclass(frozen=True, slots=True)
class LeaseOver:
    """The reservation had ended before the commit came."""


Verdict = Verified | Gaps | Corrupt | LeaseOver


def check_commit(
    reservation: Reservation,
    received: Mapping[UnitName, bytes],
    written: Iterable[PageRange],
    sent: Iterable[UnitDigest],
) -> Verified | Gaps | Corrupt:
    """Compares the wanted units, the digests of the arrived ones, and the writer's own account."""
    sent_digests = {unit.name: unit.digest for unit in sent}
    wanted = reservation.ranges
    arrived = intersection(written, ranges_of(received))
    missing = difference(wanted, intersection(arrived, ranges_of(sent_digests)))
    if missing:
        return Gaps(missing)
    names = [unit.name for unit in reservation.wanted]
    wrong = ranges_of(name for name in names if received[name] != sent_digests[name])
    if wrong:
        return Corrupt(wrong)
    return Verified(len(sent_digests.keys() - set(names)))
