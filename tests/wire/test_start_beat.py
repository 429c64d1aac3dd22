"""Start beats survive the way through JSON, and nobody takes one for a heartbeat."""

from __future__ import annotations

import json

import pytest
from tests.wire.test_heartbeat import BEAT

from ferryman.errors import InvalidRequest
from ferryman.wire.nats.heartbeat import (
    DECODE,
    HOSTCACHE,
    PREFILL,
    Beat,
    Heartbeat,
    StartBeat,
    StartPhase,
    beat_from_bytes,
    beat_to_bytes,
)

START = StartBeat("both", "both-00000001", 2**62, StartPhase.LOADING, 3, 4, 1.5)


def test_both_kinds_of_beat_survive_the_round_trip() -> None:
    assert beat_from_bytes(beat_to_bytes(START)) == START
    assert beat_from_bytes(beat_to_bytes(BEAT)) == BEAT


def test_a_start_beat_is_no_heartbeat() -> None:
    """A reader of heartbeats alone, as a router of an earlier version, misses the state in it."""
    assert "state" not in json.loads(beat_to_bytes(START))


def test_a_worker_that_does_both_starts_for_both_roles() -> None:
    assert [START.serves(role) for role in (PREFILL, DECODE, HOSTCACHE)] == [True, True, False]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("v", 2),
        ("phase", "sleeping"),
        ("phase", []),
        ("done", -1),
        ("done", 1.5),
        ("total", True),
        ("total", 2**64),
        ("epoch", "7"),
        ("seconds", -0.5),
        ("seconds", float("nan")),
        ("seconds", float("inf")),
        ("seconds", None),
        ("role", 1),
        ("worker_id", []),
    ],
)
def test_what_is_no_start_beat_is_refused(name: str, value: object) -> None:
    payload = json.dumps(json.loads(beat_to_bytes(START)) | {name: value}).encode()
    with pytest.raises(InvalidRequest):
        beat_from_bytes(payload)


@pytest.mark.parametrize("beat", [BEAT, START])
def test_a_field_that_only_newer_senders_know_is_passed_over(beat: Beat) -> None:
    """Else a rolling update takes each new worker from the routers that are still old."""
    raw = json.loads(beat_to_bytes(beat)) | {"mood": "good"}
    if isinstance(beat, Heartbeat):
        raw["state"]["colour"] = ["blue"]
    assert beat_from_bytes(json.dumps(raw).encode()) == beat


@pytest.mark.parametrize("payload", [b"", b"[]", b"{}", b"\xff", b'"phase"', b"[" * 100_000])
def test_what_is_no_beat_at_all_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidRequest):
        beat_from_bytes(payload)


def test_progress_is_said_in_words() -> None:
    assert START.doing == "loading weights, 75% done"
    compiling = StartBeat("decode", "decode-1", 7, StartPhase.COMPILING, 5, 0, 1.5)
    assert compiling.doing == "compiling loops, 5 so far"
    assert (
        StartBeat("decode", "decode-1", 7, StartPhase.CONNECTING, 0, 0, 1.5).doing == "connecting"
    )
