"""A policy of room that never shortens a prefetch: measurements compare truncation with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ferryman.tiers.prefetch import RoomLimits
from ferryman.tiers.unit_group import GroupChoice, Room, WriteOffer


@dataclass(frozen=True, slots=True)
class AllOrNothing:
    """The deepest resume point, or nothing."""

    limits: RoomLimits

    def choices(self, offer: WriteOffer, room: Room) -> Iterator[GroupChoice]:
        depth = next(offer.points(), 0)
        if depth > self.limits.floor and self.limits.fits(least := offer.minimal(depth)):
            yield GroupChoice(least, depth)
