"""The fleet as the web page shows it: one line a worker, from its latest heartbeat."""

from __future__ import annotations

from typing import Any

from ferryman.wire.nats.heartbeat import HEARTBEAT_SECONDS, Heartbeat
from ferryman_router.routing.dispatcher import Dispatcher
from ferryman_router.routing.fleet import Fleet, FleetWorker

LATE_SECONDS = 3.0 * HEARTBEAT_SECONDS


def fleet_view(
    fleet: Fleet, dispatcher: Dispatcher, num_in_flight: int, now: float
) -> dict[str, Any]:
    """The workers and host-caches, the starts that are waited for, and the queue here.

    Numbers are rounded: a view that differs is sent again.
    """
    return {
        "queued": len(dispatcher),
        "queue_seconds": round(dispatcher.queue_seconds(), 1),
        "in_flight": num_in_flight,
        "workers": [_worker(worker, now) for worker in fleet],
        "starts": list(dispatcher.patience.under_way(now)),
    }


def _worker(worker: FleetWorker, now: float) -> dict[str, Any]:
    beat = worker.beat
    return {
        "id": beat.worker_id,
        "role": beat.role,
        "state": _state(worker, now),
        "node": beat.node,
        "running": beat.num_running,
        "max_running": beat.max_running,
        "queued": beat.num_queued,
        "queue_tokens": worker.queue_tokens,
        "tokens_per_second": _inverse(beat.seconds_per_token),
        "step_ms": round(beat.step_seconds * 1000, 2),
        "slots": _slots(beat),
        "accepted_drafts": _share(beat.accepted_tokens, beat.drafted_tokens),
        "bytes_per_second": {
            "host": _inverse(beat.load_seconds_per_byte),
            "storage": _inverse(beat.storage_seconds_per_byte),
            "peer": _inverse(beat.peer_seconds_per_byte),
        },
        "planes": list(beat.planes),
        "arithmetic": beat.state.arithmetic,
        "exactness": beat.state.exactness.value,
    }


def _slots(beat: Heartbeat) -> dict[str, dict[str, int]]:
    """Slots by kind; the total is 0 from a sender that does not say it."""
    return {
        str(kind): {"free": free, "total": beat.pool_slots.get(kind, 0)}
        for kind, free in beat.free_slots.items()
    }


def _state(worker: FleetWorker, now: float) -> str:
    if now - worker.last_heard > LATE_SECONDS:
        return "silent"
    if worker.is_suspect:
        return "suspect"
    if not worker.beat.is_ready:
        return "draining"
    return "quarantined" if worker.beat.is_quarantined else "ready"


def _inverse(seconds: float) -> int:
    """Units a second; 0 before the first measurement."""
    return round(1 / seconds) if seconds else 0


def _share(part: int, whole: int) -> float | None:
    """None if there is nothing to have a share of."""
    return round(part / whole, 3) if whole else None
