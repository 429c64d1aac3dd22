"""Token streams: a router may go at any moment, and takes nobody with it."""

from __future__ import annotations

from ferryman.handoff.offsets import EMPTY_HASH, TokenFrame
from ferryman.wire.values import GoesOn, RequestTokens
from ferryman_decode.outlets import Outlets

TOKENS = RequestTokens("r1", TokenFrame(1, 0, (5,), EMPTY_HASH), (), GoesOn())


def test_tokens_gathered_for_a_router_that_left_are_dropped_with_it() -> None:
    outlets = Outlets(7)
    outlet = outlets.open("router-1")
    outlets.gather("router-1", TOKENS)
    outlets.forget("router-1", outlet)
    second = outlets.open("router-1")
    outlets.flush()
    assert second.num_waiting == 0, "it says itself what it lacks"


async def test_a_router_that_came_back_gets_what_was_gathered_for_it() -> None:
    outlets = Outlets(7)
    first = outlets.open("router-1")
    outlets.gather("router-1", TOKENS)
    second = outlets.open("router-1")
    outlets.forget("router-1", first)
    outlets.flush()
    frame = await anext(second.frames())
    assert frame.requests == (TOKENS,)
