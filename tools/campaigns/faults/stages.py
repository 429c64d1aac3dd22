"""The stages of a request's life: which event begins each, and which one lasts when. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ferryman.handoff.lifecycle import DECODE, HOSTCACHE, PREFILL, ROUTER, LifecycleEntry

STAGES = {
    (ROUTER, "received"): "received",
    (ROUTER, "taken_over"): "received",
    (ROUTER, "routed"): "routed",
    (ROUTER, "migrated"): "migrated",
    (PREFILL, "queued"): "queued",
    (PREFILL, "prefetching"): "prefetching",
    (PREFILL, "prefetched"): "prefetched",
    (PREFILL, "admitted"): "admitted",
    (PREFILL, "chunk"): "prefilling",
    (DECODE, "reserved"): "reserved",
    (DECODE, "loaded"): "loaded",
    (DECODE, "verified"): "committed",
    (DECODE, "first_token"): "decoding",
    (DECODE, "progress"): "decoding",
    (DECODE, "retracted"): "retracted",
    (DECODE, "resumed"): "resumed",
    (DECODE, "moving"): "moving",
    (HOSTCACHE, "loaded"): "loaded from the host",
    (HOSTCACHE, "stored"): "stored in the host",
}
# A host-cache says that it has loaded or stored, and nothing afterwards.
FRESH_MS = 50


def stage_of(event: LifecycleEntry) -> str | None:
    """The stage that an event begins; None for an end."""
    return STAGES.get((event.role, event.name))


def stage_at(
    log: Iterable[LifecycleEntry], publisher: tuple[str, str, int], unix_ms: float
) -> str | None:
    """The stage in which a process had a request at that time; None if it had none, or had ended.

    `log` is of one request and attempt. A killed process takes its last events with it, so the
    stage may be a later one by as much as a message takes.
    """
    before = [e for e in log if e.publisher == publisher and e.unix_ms <= unix_ms]
    if not before:
        return None
    last = max(before, key=lambda event: event.seq)
    if last.role == HOSTCACHE and unix_ms - last.unix_ms > FRESH_MS:
        return None
    return stage_of(last)
