"""The lifecycle law over all that a worker has said."""

from __future__ import annotations

from dataclasses import replace

from tests.harness.pair import WorkerPair

from ferryman.handoff.lifecycle import ROUTER, LifecycleEntry, Violation, check


def violations(pair: WorkerPair, *finished: str) -> list[Violation]:
    """The findings of `ferryman trace --check` in all events of the worker.

    A router adds its own, for all requests, and for those that it has seen `finished`.
    """
    said = pair.decode.events()
    return check([*said, *_by_router({event.request_id for event in said}, finished)])


def _by_router(request_ids: set[str], finished: tuple[str, ...]) -> list[LifecycleEntry]:
    found = []
    for request_id in request_ids:
        one = LifecycleEntry(ROUTER, "router-1", 1, request_id, 1, 1, "received", {})
        found += [one, replace(one, seq=2, name="routed")]
        if request_id in finished:
            found.append(replace(one, seq=3, name="finished", facts={"reason": "length"}))
    return found
