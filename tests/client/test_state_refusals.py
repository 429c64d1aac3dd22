"""A refusal that gRPC loses, because it met the first message of a load on its way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import pytest

from ferryman.client import Client
from ferryman.client.client import MAX_LOST_REFUSALS
from ferryman.client.retries import ConnectionBroken
from ferryman.errors import Unauthenticated
from ferryman.wire.grpc.status import failure_of, status_of
from ferryman.wire.public import SignedState

SIGNED = SignedState("{}", b"", b"")
REFUSAL = status_of(failure_of(Unauthenticated("the API key is unknown")))
NO_FIELDS = grpc.aio.Metadata()


class RefusedCall:
    """Ended by the server before it read anything; `lost` is what gRPC says of it, then, at the
    write."""

    def __init__(self, *, lost: bool) -> None:
        self._lost, self.was_cancelled = lost, False

    async def write(self, _: object) -> None:
        if self._lost:
            code, words = grpc.StatusCode.INTERNAL, "Internal error from Core"
            raise grpc.aio.AioRpcError(code, NO_FIELDS, NO_FIELDS, words)

    async def read(self) -> Any:
        return grpc.aio.EOF

    async def code(self) -> grpc.StatusCode:
        return REFUSAL[0]

    async def details(self) -> str:
        return REFUSAL[1]

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return NO_FIELDS

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata(*REFUSAL[2])

    def cancel(self) -> None:
        self.was_cancelled = True


class OneDoor:
    """Gives these calls, one after the other."""

    def __init__(self, calls: list[RefusedCall]) -> None:
        self._calls = iter(calls)

    @asynccontextmanager
    async def asked(self) -> AsyncIterator[Any]:
        yield SimpleNamespace(stub=SimpleNamespace(LoadState=lambda **_: next(self._calls)))

    async def close(self) -> None:
        pass


async def load(calls: list[RefusedCall]) -> None:
    async with Client("127.0.0.1:1") as client:
        doors, client._doors = client._doors, cast(Any, OneDoor(calls))
        await doors.close()
        await client.load_state(SIGNED, ())


async def test_a_lost_refusal_is_asked_for_again() -> None:
    calls = [RefusedCall(lost=True), RefusedCall(lost=False)]
    with pytest.raises(Unauthenticated, match="the API key is unknown"):
        await load(calls)
    assert [call.was_cancelled for call in calls] == [True, True]


async def test_a_connection_that_always_breaks_is_given_up() -> None:
    calls = [RefusedCall(lost=True) for _ in range(MAX_LOST_REFUSALS + 1)]
    with pytest.raises(ConnectionBroken):
        await load(calls)
    assert [call.was_cancelled for call in calls] == [True] * MAX_LOST_REFUSALS + [False]
