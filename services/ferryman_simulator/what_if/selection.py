"""The requests of a log that are simulated: the latest of those that the workers of now served.

A log outlives the cluster that wrote it: earlier processes had other settings.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ferryman.errors import ConfigError
from ferryman.handoff.lifecycle import DECODE, PREFILL, ROUTER, LifecycleEntry


@dataclass(frozen=True, slots=True)
class LogRange:
    """The latest `max_requests`, of the last `max_seconds` before the log's end."""

    max_requests: int
    max_seconds: float


@dataclass(frozen=True, slots=True)
class SelectedLog:
    """Their events, in the log's order; `num_older` requests were of other workers."""

    events: Sequence[LifecycleEntry]
    num_older: int


def selected(
    events: Sequence[LifecycleEntry], limits: LogRange, workers: Collection[str] = ()
) -> SelectedLog:
    """The requests within the limits that were routed to these workers; to any, if there are none.

    Raises ConfigError for a log of a worker that prefills and decodes.
    """
    _check_roles(events)
    received = {e.request_id: e.unix_ms for e in events if _is(e, "received")}
    routes = {
        e.request_id: (e.facts.get("prefill"), e.facts.get("decode")) for e in _routed(events)
    }
    theirs = [
        name
        for name in received
        if not workers or name not in routes or set(routes[name]) <= set(workers)
    ]
    end = max((received[name] for name in theirs), default=0)
    recent = [name for name in theirs if end - received[name] <= limits.max_seconds * 1000]
    kept = set(sorted(recent, key=received.__getitem__)[-limits.max_requests :])
    of_kept = [event for event in events if event.request_id in kept]
    return SelectedLog(of_kept, len(received) - len(theirs))


def _is(event: LifecycleEntry, name: str) -> bool:
    return event.role == ROUTER and event.name == name


def _routed(events: Sequence[LifecycleEntry]) -> list[LifecycleEntry]:
    return [event for event in events if _is(event, "routed")]


def _check_roles(events: Sequence[LifecycleEntry]) -> None:
    by_role = {
        role: {event.worker_id for event in events if event.role == role}
        for role in (PREFILL, DECODE)
    }
    if by_role[PREFILL] & by_role[DECODE]:
        raise ConfigError(
            "a worker of this log prefills and decodes (--worker both): a simulation has workers "
            "for each, and cannot tell what one pool for both would hold"
        )
