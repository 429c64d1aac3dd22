"""The lifecycle events of one request in a cluster, as recorded."""

from __future__ import annotations

from ferryman.handoff.lifecycle import LifecycleEntry

START_MS = 1_800_000_000_000

# Role, worker id, start of its clock after START_MS, and its events with their times in its own ms.
_SAID = (
    ("router", "router-0000000a", 0, (("received", 0.0), ("routed", 2.0), ("finished", 100.0))),
    (
        "prefill",
        "prefill-0000000b",
        4,
        (("queued", 0.0), ("admitted", 10.5), ("chunk", 16.0), ("handed_off", 31.0)),
    ),
    (
        "decode",
        "decode-0000000c",
        12,
        (("reserved", 0.0), ("verified", 20.0), ("first_token", 24.0), ("finished", 86.0)),
    ),
)


def recorded_request(request_id: str) -> list[LifecycleEntry]:
    """Eleven events of one attempt that went well, publisher by publisher."""
    return [
        LifecycleEntry(
            role=role,
            worker_id=worker_id,
            epoch=7,
            request_id=request_id,
            attempt=1,
            seq=seq,
            name=name,
            facts={"tier": "[red]host[/red]"} if name == "admitted" else {"tokens": seq},
            unix_ms=START_MS + begin + int(elapsed),
            elapsed_ms=elapsed,
        )
        for role, worker_id, begin, said in _SAID
        for seq, (name, elapsed) in enumerate(said, 1)
    ]
