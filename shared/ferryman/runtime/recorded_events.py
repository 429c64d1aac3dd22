"""Events as they come out of the lifecycle log, and those of them that count.

The broker lets a role publish on subjects of that role alone, and reads no payload. So an event
counts if its payload names the role, the worker, the request and the event of its subject: then
a process with that role's login published it. The log does not show which one.
"""

from __future__ import annotations

from ferryman.errors import InvalidRequest
from ferryman.handoff.lifecycle import LifecycleEntry
from ferryman.runtime.lifecycle import decode_event
from ferryman.wire.nats.subjects import Subjects


def credible_event(subject: str, payload: bytes, subjects: Subjects) -> LifecycleEntry | None:
    """The event; None for what is no event, or was published on a subject that is not its own."""
    try:
        event = decode_event(payload)
        expected = subjects.life(event.role, event.worker_id, event.request_id, event.name)
    except (ValueError, InvalidRequest):
        return None
    return event if subject == expected else None
