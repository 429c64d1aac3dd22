"""Beats survive the way through JSON, and what is no beat is refused."""

from __future__ import annotations

import json

import pytest

from ferryman.cache.manifest import Kind
from ferryman.errors import InvalidRequest
from ferryman.wire.nats.heartbeat import (
    Heartbeat,
    ServedState,
    heartbeat_from_bytes,
    heartbeat_to_bytes,
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
    assert heartbeat_from_bytes(heartbeat_to_bytes(BEAT)) == BEAT


@pytest.mark.parametrize(
    "payload", [b"", b"[]", b"{}", b"\xff", b'{"v":2}', json.dumps({"v": 1, "state": {}}).encode()]
)
def test_what_is_no_beat_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidRequest):
        heartbeat_from_bytes(payload)
