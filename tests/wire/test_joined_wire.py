"""Bounds and calls of the wire and the hand-off's values that a draw of planted defects changed
while no test noticed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import numpy as np
import pytest

from ferryman.errors import DeadlineExceeded, InvalidRequest, LeaseLost
from ferryman.handoff.effects import WriteFence, WriterId
from ferryman.handoff.receiver import Tombstones
from ferryman.handoff.usage import CachedTokens
from ferryman.wire.codec.pieces import WriteHeader
from ferryman.wire.codec.request import MAX_SALT_BYTES, _check_salt, _check_tokens
from ferryman.wire.grpc.rpc import Context, remaining_seconds, tags_for
from ferryman.wire.handoff import process_liveness
from ferryman.wire.handoff.grpc_plane import LOST_STATUS, send_units
from ferryman.wire.handoff.memory_plane import send_units_by_memory
from ferryman.wire.handoff.process_liveness import LivenessWatch
from ferryman.wire.nats.permissions import MAX_SHOWN, BrokerRefusals
from ferryman.wire.values import RequestContext

TOKENS = np.arange(3, dtype=np.int32)


def test_the_first_tokens_that_were_cached_are_those_of_the_nearest_tiers() -> None:
    cached = CachedTokens(device=10, host=20, storage=30, peer=40)
    assert cached.at_most(100) == cached
    assert cached.at_most(25) == CachedTokens(device=10, host=15)
    assert cached.at_most(61) == CachedTokens(device=10, host=20, storage=30, peer=1)
    assert cached.at_most(0) == CachedTokens()


def test_a_prompt_has_a_token_that_was_not_generated() -> None:
    _check_tokens(cast(Any, TOKENS), 2)
    for num_generated in (3, 4):
        with pytest.raises(InvalidRequest, match="comes before"):
            _check_tokens(cast(Any, TOKENS), num_generated)
    with pytest.raises(InvalidRequest, match="empty"):
        _check_tokens(cast(Any, TOKENS[:0]), 0)


def test_the_longest_salt_is_taken_and_none_that_is_longer() -> None:
    assert len(_check_salt(bytes(MAX_SALT_BYTES))) == MAX_SALT_BYTES
    with pytest.raises(InvalidRequest, match="salt"):
        _check_salt(bytes(MAX_SALT_BYTES + 1))


@pytest.mark.parametrize(("left", "seconds"), [(None, 9.0), (20.0, 9.0), (2.5, 2.5)])
def test_a_caller_s_deadline_bounds_the_time(left: float | None, seconds: float) -> None:
    assert remaining_seconds(_context(left), 9.0) == seconds


@pytest.mark.parametrize("left", [0.0, -1.0])
def test_a_call_that_arrives_at_its_deadline_is_late(left: float) -> None:
    """gRPC says 0 of each deadline that has passed."""
    with pytest.raises(DeadlineExceeded):
        remaining_seconds(_context(left), 9.0)


def _context(left: float | None) -> Context:
    return cast(Context, SimpleNamespace(time_remaining=lambda: left))


def test_work_is_tagged_with_its_request_attempt_and_trace() -> None:
    tags = tags_for(RequestContext("req-1", 3, 9.0, traceparent="00-1-2-01"))
    assert (tags.request_id, tags.attempt, tags.traceparent) == ("req-1", 3, "00-1-2-01")


class LostCall:
    """A stream that decode has ended, whose status gRPC lost."""

    error = grpc.aio.AioRpcError(
        grpc.StatusCode.UNKNOWN, grpc.aio.Metadata(), grpc.aio.Metadata(), LOST_STATUS
    )

    async def write(self, message: Any) -> None:
        raise asyncio.InvalidStateError

    async def done_writing(self) -> None: ...

    def cancel(self) -> None: ...

    async def _fail(self) -> None:
        raise self.error

    def __await__(self) -> Any:
        return self._fail().__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        raise self.error
        yield


class LostDecode:
    """Repeats what it said when it is asked to renew."""

    def WritePages(self) -> LostCall:
        return LostCall()

    LandPages = WritePages

    async def Renew(self, request: Any, **more: Any) -> None:
        raise LeaseLost("too late")


@pytest.mark.parametrize("plane", ["grpc", "memory"])
async def test_a_writer_whose_stream_lost_its_status_asks_for_it(plane: str) -> None:
    stub = cast(Any, LostDecode())
    reservation = cast(Any, SimpleNamespace(reservation_id="res-1", epoch=77, attempt=2))
    if plane == "grpc":
        sending = send_units(stub, reservation, "req-1", "digest", _no_units())
    else:
        header = WriteHeader(WriteFence(77, "res-1", 2), "req-1", "digest")
        memory = SimpleNamespace(key=b"key")
        store = cast(Any, SimpleNamespace(memory=memory, give_back=lambda place: None))
        sending = send_units_by_memory(stub, reservation, header, _no_units(), store)
    with pytest.raises(LeaseLost, match="too late"):
        await sending


async def _no_units() -> AsyncIterator[Any]:
    return
    yield


async def test_a_connection_that_its_process_closed_proves_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a look at the address, where somebody else may listen by then."""

    async def look(address: str, who: WriterId) -> LivenessWatch:
        raise AssertionError("nobody needs to look")

    monkeypatch.setattr(process_liveness, "watch_process", look)
    monkeypatch.setattr(process_liveness, "AGAIN_SECONDS", 0.0)
    reader = asyncio.StreamReader()
    reader.feed_eof()
    watch = LivenessWatch(WriterId("prefill-1", 7), "host:1", reader, cast(Any, None))
    await asyncio.wait_for(watch.ended(), 60)


def test_what_was_cancelled_first_is_forgotten_first() -> None:
    tombstones = Tombstones(9, 10.0)
    for name, now in (("r1", 0.0), ("r2", 5.0)):
        tombstones.add(name, 1, now)
    tombstones.expire(10.0)
    assert len(tombstones) == 1
    assert tombstones.holds("r2", 1, 10.0)
    tombstones.expire(15.0)
    assert len(tombstones) == 0


def test_each_refusal_is_counted_and_so_many_kinds_are_shown_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusals = BrokerRefusals()
    caplog.set_level(logging.WARNING)
    for number in range(MAX_SHOWN + 3):
        for _ in range(2):
            assert refusals.take(RuntimeError(f"Permissions Violation for subject {number}"))
    assert not refusals.take(RuntimeError("slow consumer"))
    assert refusals.number == 2 * (MAX_SHOWN + 3)
    assert len(caplog.records) == MAX_SHOWN
