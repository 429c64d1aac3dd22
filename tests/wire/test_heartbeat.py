"""Beats survive the way through JSON, and what is no beat is refused."""

from __future__ import annotations

import json
import math
from dataclasses import fields

import pytest

from ferryman.cache.manifest import Kind
from ferryman.errors import InvalidRequest
from ferryman.wire.nats.heartbeat import (
    Heartbeat,
    ServedState,
    beat_from_bytes,
    beat_to_bytes,
)

STATE = ServedState("f" * 32, 64, "d" * 32, (Kind.FULL, Kind.RECURRENT))
BEAT = Heartbeat(
    "decode",
    "decode-00000001",
    2**62,
    "127.0.0.1:1",
    True,
    STATE,
    2048,
    node="n1",
    load_seconds_per_byte=1e-9,
    page_bytes=4096,
    planes=("grpc", "nixl"),
)


def test_a_beat_survives_the_round_trip() -> None:
    assert beat_from_bytes(beat_to_bytes(BEAT)) == BEAT


@pytest.mark.parametrize(
    "payload", [b"", b"[]", b"{}", b"\xff", b'{"v":2}', json.dumps({"v": 1, "state": {}}).encode()]
)
def test_what_is_no_beat_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidRequest):
        beat_from_bytes(payload)


def with_value(name: str, value: object) -> bytes:
    raw = json.loads(beat_to_bytes(BEAT))
    part = raw["state"] if name in raw["state"] else raw
    part[name] = value
    return json.dumps(raw).encode()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("worker_id", []),
        ("address", None),
        ("epoch", {}),
        ("epoch", "7"),
        ("num_running", "many"),
        ("queue_tokens", -1),
        ("max_len", 2**64),
        ("max_len", True),
        ("step_seconds", math.nan),
        ("seconds_per_token", math.inf),
        ("seconds_per_token", -1e-9),
        ("free_slots", {"full": math.inf}),
        ("pool_slots", {"full": math.inf}),
        ("pool_slots", {"other": 1}),
        ("is_ready", 1),
        ("page_size", "64"),
        ("digest", 3),
    ],
)
def test_a_value_with_which_a_router_cannot_calculate_makes_it_no_beat(
    name: str, value: object
) -> None:
    with pytest.raises(InvalidRequest):
        beat_from_bytes(with_value(name, value))


@pytest.mark.parametrize(
    "name", [each.name for each in fields(Heartbeat) if isinstance(each.default, float)]
)
def test_a_whole_number_is_a_number_of_seconds(name: str) -> None:
    """JSON has one sort of numbers: a sender may write 2 for 2.0, but a yes is no number."""
    assert getattr(beat_from_bytes(with_value(name, 2)), name) == 2.0
    for other in (True, "2", None, -1, 2**64, math.nan):
        with pytest.raises(InvalidRequest, match="no beat"):
            beat_from_bytes(with_value(name, other))


def test_a_count_with_a_fraction_is_none() -> None:
    for other in (2.0, 2.5, True):
        with pytest.raises(InvalidRequest, match="no beat"):
            beat_from_bytes(with_value("num_queued", other))


def test_deep_nesting_is_no_beat() -> None:
    with pytest.raises(InvalidRequest, match="no beat"):
        beat_from_bytes(b"[" * 100_000)
