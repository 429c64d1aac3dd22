"""Calls by anybody, as a server answers them: exactly, even while messages are still being sent.

A server that refuses a call ends it at once. The asyncio client of gRPC then overwrites the status
that came by an INTERNAL of its own whenever a write of its fails before it has looked
(https://github.com/grpc/grpc/issues/36066); the synchronous client keeps the server's. So calls are
made by the latter here, in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import grpc
import grpc.aio

from ferryman.wire.grpc.role_tokens import SCHEME, TOKEN_KEY
from ferryman.wire.grpc.status import typed

CALL_SECONDS = 120


async def answers_to(
    address: str, token: str, method: str, messages: Sequence[bytes]
) -> tuple[bytes, ...]:
    """All answers to one call of a method, by its path. On the wire all four shapes of rpc look the
    same. Raises the server's refusal, as a typed error."""
    try:
        return await asyncio.to_thread(_called, address, token, method, messages)
    except grpc.RpcError as error:
        # Both clients' errors have a code, details and trailers.
        raise typed(cast(grpc.aio.AioRpcError, error)) from error


def _called(address: str, token: str, method: str, messages: Sequence[bytes]) -> tuple[bytes, ...]:
    pairs = ((TOKEN_KEY, SCHEME + token),) if token else ()
    with grpc.insecure_channel(address) as channel:
        call: Any = channel.stream_stream(method)
        return tuple(call(iter(messages), timeout=CALL_SECONDS, metadata=pairs))
