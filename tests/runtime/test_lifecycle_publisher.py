"""Events leave at once or are reported as lost; they are small and decode to what they were."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferryman.errors import QueueFull
from ferryman.handoff.lifecycle import LifecycleEntry, check
from ferryman.ids import NO_REQUEST
from ferryman.runtime.lifecycle import (
    MAX_EVENT_BYTES,
    Fact,
    LifecyclePublisher,
    Publisher,
    decode_event,
    encode_event,
)
from ferryman.wire.nats.subjects import Subjects

WHO = Publisher("decode", "decode-00000001", 2**63 - 1)


class BoundedBus:
    """A bus with room for `room` events."""

    def __init__(self, room: int = 1000) -> None:
        self.room = room
        self.sent: list[tuple[str, LifecycleEntry]] = []

    def publish(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> None:
        if not self.room:
            raise QueueFull("no room")
        self.room -= 1
        assert len(payload) <= MAX_EVENT_BYTES
        self.sent.append((subject, decode_event(payload)))

    def names(self, request_id: str = "req-1") -> list[str]:
        return [event.name for _, event in self.sent if event.request_id == request_id]


def ticks() -> Iterator[float]:
    return (tick / 8 for tick in count())


def publisher(bus: BoundedBus, max_requests: int = 100) -> LifecyclePublisher:
    clock, wall = ticks(), ticks()
    return LifecyclePublisher(
        bus.publish,
        Subjects("local"),
        WHO,
        clock=lambda: next(clock),
        wall_clock=lambda: next(wall),
        max_requests=max_requests,
    )


def test_an_event_says_who_what_and_when() -> None:
    bus = BoundedBus()
    life = publisher(bus)
    life.publish("req-1", 1, "reserved", traceparent="00-aa-bb-01", slots=3)
    life.publish("req-1", 1, "verified", bytes=4096)
    (subject, first), (_, second) = bus.sent
    assert subject == "ferryman.v1.local.life.decode.decode-00000001.req-1.reserved"
    assert (first.seq, first.attempt, first.facts) == (1, 1, {"slots": 3})
    assert (second.seq, second.traceparent) == (2, "00-aa-bb-01")
    assert second.elapsed_ms > first.elapsed_ms
    assert (first.publisher, first.unix_ms) == (("decode", "decode-00000001", 2**63 - 1), 0)


def test_what_found_no_room_is_owned_up_to_before_the_next_event() -> None:
    bus = BoundedBus(room=1)
    life = publisher(bus)
    for name in ("reserved", "verified", "first_token"):
        life.publish("req-1", 1, name)
    bus.room = 10
    life.publish("req-1", 1, "finished")
    assert bus.names() == ["reserved", "gap", "finished"]
    assert bus.sent[1][1].lost == (2, 3)
    assert [event.seq for _, event in bus.sent] == [1, 4, 5]
    assert life.statistics().num_dropped == 2
    found = {violation.rule for violation in check(event for _, event in bus.sent)}
    assert found <= {"missing_cause"}


def test_a_gap_that_finds_room_alone_covers_what_did_not() -> None:
    bus = BoundedBus(room=0)
    life = publisher(bus)
    life.publish("req-1", 1, "reserved")
    bus.room = 1
    life.publish("req-1", 1, "verified")
    assert bus.names() == ["gap"]
    bus.room = 10
    life.publish("req-1", 1, "first_token")
    assert [(event.name, event.seq) for _, event in bus.sent] == [
        ("gap", 2),
        ("gap", 4),
        ("first_token", 5),
    ]
    assert [event.lost for _, event in bus.sent[:2]] == [(1, 1), (3, 3)]


def test_a_request_that_lost_its_last_event_is_spoken_of_when_another_speaks() -> None:
    bus = BoundedBus(room=1)
    life = publisher(bus)
    life.publish("req-1", 1, "reserved")
    life.publish("req-1", 1, "aborted")
    bus.room = 10
    life.publish("req-2", 1, "reserved")
    assert bus.names() == ["reserved", "gap"]
    life.flush_gaps()
    assert bus.names() == ["reserved", "gap"]


def test_the_memory_of_requests_is_bounded() -> None:
    bus = BoundedBus(room=0)
    life = publisher(bus, max_requests=2)
    for number in range(5):
        life.publish(f"req-{number}", 1, "reserved")
    bus.room = 10
    life.flush_gaps()
    assert [event.request_id for _, event in bus.sent] == ["req-3", "req-4"]


facts = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=12),
    st.one_of(
        st.integers(-(2**63), 2**63),
        st.booleans(),
        st.text(max_size=2000),
        st.lists(st.integers(0, 2**32), max_size=400),
    ),
    max_size=40,
)


def test_what_belongs_to_no_request_is_numbered_on_however_many_requests_there_are() -> None:
    bus = BoundedBus()
    life = publisher(bus, max_requests=2)
    for turn in range(3):
        life.publish(NO_REQUEST, 0, "corrupt")
        for request in range(4):
            life.publish(f"req-{turn}-{request}", 1, "stored")
    assert [e.seq for _, e in bus.sent if e.request_id == NO_REQUEST] == [1, 2, 3]


@given(facts)
def test_an_event_is_at_most_a_kibibyte_whatever_it_says(said: dict[str, Fact]) -> None:
    event = LifecycleEntry(
        "hostcache", "hostcache-00000001", 2**63 - 1, "r" * 64, 3, 9, "stored", said,
        unix_ms=2**41, elapsed_ms=123456.789, traceparent="0" * 55,
    )  # fmt: skip
    payload = encode_event(event)
    assert len(payload) <= MAX_EVENT_BYTES
    back = decode_event(payload)
    assert (back.name, back.seq, back.request_id) == ("stored", 9, "r" * 64)
    whole = {name: back.facts[name] for name in back.facts if name in said}
    assert whole == {name: said[name] for name in whole}
    if set(back.facts) == set(said):
        assert back == event


def test_a_long_list_gives_way_to_its_length() -> None:
    event = LifecycleEntry("decode", "decode-1", 1, "r", 1, 1, "reserved", {"slots": [7] * 999})
    assert decode_event(encode_event(event)).facts == {"num_slots": 999}


def test_a_long_text_gives_way_to_a_count() -> None:
    event = LifecycleEntry("decode", "decode-1", 1, "r", 1, 1, "x", {"a": "x" * 999, "b": 1})
    assert decode_event(encode_event(event)).facts == {"b": 1, "omitted": 1}


EVENT = LifecycleEntry("decode", "decode-1", 1, "r", 1, 1, "decoding", {})


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"v": 2}',
        b'{"v": 1}',
        json.dumps({"v": 1, "role": "decode", "facts": 7}).encode(),
        b"[" * 100_000,
        encode_event(EVENT).replace(b'"epoch":1', b'"epoch":Infinity'),
    ],
)
def test_what_is_no_event_is_a_value_error(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r".*"):
        decode_event(payload)


def test_a_gap_without_bounds_is_no_event() -> None:
    event = LifecycleEntry("decode", "decode-1", 1, "r", 1, 1, "gap", {"from": "a"})
    with pytest.raises(ValueError, match="from where to where"):
        decode_event(encode_event(event))
