"""`ferryman explain` says more of a request than its routes: it reads the lifecycle log."""

from __future__ import annotations

from dataclasses import replace

from tests.cli.recorded import recorded_request

from ferryman.client import LifecycleEvent
from ferryman.handoff.lifecycle import LifecycleEntry
from ferryman.runtime.lifecycle import encode_event
from ferryman_cli.explain import HeldTokens, held_tokens


def as_read(entry: LifecycleEntry) -> LifecycleEvent:
    text = encode_event(entry).decode()
    return LifecycleEvent(entry.role, entry.worker_id, entry.name, text, entry.seq)


def test_tokens_that_decode_had_itself_are_told_by_tier() -> None:
    events = recorded_request("r1")
    assert held_tokens(map(as_read, events)) == []
    facts = {"held": {"device": 32, "host": 16}, "path": "grpc"}
    events = [
        replace(event, facts=facts) if event.name == "reserved" else event for event in events
    ]
    (held,) = held_tokens(map(as_read, events))
    assert held == HeldTokens(1, "decode-0000000c", {"device": 32, "host": 16})
    assert held.text == (
        "attempt 1: decode-0000000c had tokens of the prompt itself: 32 in tier device,"
        " 16 in tier host"
    )
