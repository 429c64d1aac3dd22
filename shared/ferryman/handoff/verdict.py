"""What decode answers to a commit: whether what was written is all that was wanted, bit for bit."""

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
    """Everything wanted is there; `num_skipped` units were offered beyond the need."""

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
    """The reservation had been given up before the commit came."""


Verdict = Verified | Gaps | Corrupt | LeaseOver


def judge(
    reservation: Reservation,
    received: Mapping[UnitName, bytes],
    written: Iterable[PageRange],
    sent: Iterable[UnitDigest],
) -> Verified | Gaps | Corrupt:
    """Compares what is wanted, what arrived (its digests), and what the writer says it wrote."""
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
