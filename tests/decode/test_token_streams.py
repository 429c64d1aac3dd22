"""Token streams: tokens for a router that left are dropped; one that came back gets its tokens."""

from __future__ import annotations

from ferryman.handoff.offsets import EMPTY_HASH, TokenFrame
from ferryman.wire.codec.tokens import request_tokens_from_wire
from ferryman.wire.values import RequestTokens, StreamContinues
from ferryman_decode.token_streams import ORPHAN_SECONDS, OrphanWatch, RouterStreams

TOKENS = RequestTokens("r1", TokenFrame(1, 0, (5,), EMPTY_HASH), (), StreamContinues())


def test_tokens_gathered_for_a_router_that_left_are_dropped_with_it() -> None:
    outlets = RouterStreams(7)
    outlet = outlets.open("router-1")
    outlets.gather("router-1", TOKENS)
    outlets.forget("router-1", outlet)
    second = outlets.open("router-1")
    outlets.flush()
    assert second.num_waiting == 0, "it says itself what it lacks"


async def test_a_router_that_came_back_gets_what_was_gathered_for_it() -> None:
    outlets = RouterStreams(7)
    first = outlets.open("router-1")
    outlets.gather("router-1", TOKENS)
    second = outlets.open("router-1")
    outlets.forget("router-1", first)
    outlets.flush()
    (entry,) = (await second.next_frame()).requests
    assert request_tokens_from_wire(entry) == TOKENS


def test_a_router_is_gone_when_it_has_had_no_stream_for_its_time_and_not_before() -> None:
    reading = {"there"}
    watch = OrphanWatch(reading.__contains__)
    assert watch.gone(["there", "silent"], 100.0) == frozenset()
    assert watch.gone(["there", "silent"], 100.0 + ORPHAN_SECONDS - 0.001) == frozenset()
    assert watch.gone(["there", "silent"], 100.0 + ORPHAN_SECONDS) == {"silent"}
    reading.add("silent")
    assert watch.gone(["there", "silent"], 200.0) == frozenset()
    reading.remove("silent")
    assert watch.gone(["there", "silent"], 201.0) == frozenset(), "it begins anew"
    assert watch.gone(["there", "silent"], 201.0 + ORPHAN_SECONDS - 0.001) == frozenset()
    assert watch.gone(["there", "silent"], 201.0 + ORPHAN_SECONDS) == {"silent"}
