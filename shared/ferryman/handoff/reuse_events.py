"""Facts on reuse that the lifecycle log has beside a request's plan. Pure.

A route and a plan are predictions; these events say which units a host-cache fetched, and at which
place a prompt parts from an earlier one of its owner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ferryman.handoff.lifecycle import HOSTCACHE, ROUTER, LifecycleEntry

BEGINS = ("received", "taken_over")
"""The events of a router that begin a request."""


def begins_request(event: LifecycleEntry) -> bool:
    """Whether a router says by it that it has a request from here on: others may write the name."""
    return event.role == ROUTER and event.name in BEGINS


@dataclass(frozen=True, slots=True)
class FetchedUnits:
    """Units that a host-cache fetched for an attempt. `origin` is storage or peer; `folder` names
    the node in whose folder of the bucket they lay, if another's."""

    attempt: int
    worker_id: str
    units: int
    origin: str
    folder: str

    @property
    def text(self) -> str:
        place = f"{self.folder}'s folder of the bucket" if self.folder else self.origin
        return f"attempt {self.attempt}: {self.worker_id} brought {self.units} units from {place}"


@dataclass(frozen=True, slots=True)
class PartedPrompt:
    """The place at which a prompt parts from an earlier one of its owner, that of the request
    `other`. The log has positions, and no words."""

    at: int
    place: str
    other: str
    missed_tokens: int

    @property
    def text(self) -> str:
        return (
            f"the prompt parts at token {self.at}, in {self.place}, from request {self.other}:"
            f" {self.missed_tokens} tokens may have been cached"
        )


def fetches(events: Iterable[LifecycleEntry]) -> list[FetchedUnits]:
    """The units that came from storage or a peer; others were written back by a worker."""
    stored = [event for event in events if (event.role, event.name) == (HOSTCACHE, "stored")]
    return [
        FetchedUnits(
            event.attempt,
            event.worker_id,
            int(str(event.facts["units"])),
            str(event.facts["origin"]),
            str(event.facts.get("folder", "")),
        )
        for event in stored
        if "origin" in event.facts
    ]


def partings(events: Iterable[LifecycleEntry]) -> list[PartedPrompt]:
    """The places at which the events that begin a request say that its prompt parts."""
    begun = [event.facts for event in events if begins_request(event)]
    return [
        PartedPrompt(
            int(parts.get("at", 0)),
            str(facts.get("parts_in", "")),
            str(facts.get("parts_from", "")),
            int(parts.get("missed", 0)),
        )
        for facts in begun
        if isinstance(parts := facts.get("parts"), dict)
    ]
