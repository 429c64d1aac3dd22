"""A token stream says that its worker is lost when no connection comes about, however slowly."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from ferryman.wire.grpc.role_tokens import OPEN_TO_ALL
from ferryman.wire.grpc.rpc import Channels
from ferryman.wire.signed_orders import RouterSignatures
from ferryman_router.request.request_table import RequestTable
from ferryman_router.request.token_streams import TokenReader, TokenStream
from ferryman_router.routing.fleet import WorkerName

NAME = WorkerName("decode-00000001", 7)
READER = TokenReader("router-1", RouterSignatures(OPEN_TO_ALL))


async def test_a_worker_that_takes_connections_and_is_silent_is_lost() -> None:
    """As a stopped process: its kernel connects. Each try takes longer than the patience."""
    silent: set[asyncio.StreamWriter] = set()
    greeted = asyncio.Event()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        silent.add(writer)
        greeted.set()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    stream = TokenStream(NAME, address, READER, RequestTable())
    async with Channels() as channels, asyncio.timeout(120):
        await stream.run(channels, patience=0.5)
    assert greeted.is_set()
    # Nothing is accepted any more, but a connection that was may still be handed over.
    server.close()
    await server.wait_closed()
    while silent:
        writer = silent.pop()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
