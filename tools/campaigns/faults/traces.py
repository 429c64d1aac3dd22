"""Whether the log of each call is legal: what `ferryman trace --check` says, for all at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ferryman.handoff.lifecycle import LifecycleEntry, Violation, check
from ferryman.runtime.lifecycle import decode_event
from ferryman.wire.nats.subjects import Subjects
from ferryman_cli.endpoints import BrokerPlace
from ferryman_cli.lifecycle_reader import connected_bus

MAX_EVENTS = 1_000_000


@dataclass(frozen=True, slots=True)
class Traces:
    """How many of the calls the log knows, how many of them have more lives than one, and what in
    their logs cannot be."""

    num_calls: int
    num_sent_again: int
    violations: Sequence[Violation]


async def traces_of(nats: str, heard: Collection[LifecycleEntry], names: Collection[str]) -> Traces:
    """Of the calls that were named so; a caller names each call differently.

    A log that met a full disk begins anew, so events that were `heard` as they came count as well.
    """
    async with connected_bus(BrokerPlace(nats)) as bus:
        history = await bus.history(Subjects().all_life, max_events=MAX_EVENTS)
    return judged(united([decode_event(entry.payload) for entry in history], heard), names)


def united(
    kept: Collection[LifecycleEntry], heard: Collection[LifecycleEntry]
) -> list[LifecycleEntry]:
    """The kept events, and those that were only heard. A publisher whose event was not acknowledged
    sends it again, and the log knows it by its number, but a listener hears it twice."""
    numbers = {_number(event) for event in kept}
    lost = {_number(event): event for event in heard if _number(event) not in numbers}
    return [*kept, *lost.values()]


def _number(event: LifecycleEntry) -> tuple[object, ...]:
    return event.publisher, event.request_id, event.seq


def judged(events: Sequence[LifecycleEntry], names: Collection[str]) -> Traces:
    """A call that outlived its router has a life, and an id, at each router it was sent to."""
    name_of = {
        event.request_id: event.facts.get("correlation_id", event.request_id)
        for event in events
        if event.name == "received"
    }
    lives: dict[object, dict[str, list[LifecycleEntry]]] = {}
    for event in events:
        name = name_of.get(event.request_id, event.request_id)
        if name in names:
            lives.setdefault(name, {}).setdefault(event.request_id, []).append(event)
    num_sent_again = sum(len(of_call) > 1 for of_call in lives.values())
    logs = [log for of_call in lives.values() for log in of_call.values()]
    return Traces(len(lives), num_sent_again, [found for log in logs for found in check(log)])
