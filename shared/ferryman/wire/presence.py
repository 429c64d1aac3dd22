"""Whether a process still lives, as its kernel knows it: a connection that ends with the process.

A process that may write into another's memory cannot be believed dead on a timeout: it may be
stopped, or far away. Its kernel closes its connections when it is gone, and not before. So it
listens, says who it is, and holds still; who watches believes in a death when the connection was
closed or reset, or when nobody (or somebody else) listens where it was. Silence means nothing.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from ferryman.errors import Unavailable
from ferryman.handoff.effects import Writer

CONNECT_SECONDS = 2.0
AGAIN_SECONDS = 1.0
MAX_BANNER_BYTES = 256
# A machine that vanished never closes anything; these make its successor's kernel do it.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))


@asynccontextmanager
async def presence(host: str, who: Writer) -> AsyncIterator[int]:
    """Listens for the length of the block, which is the last to end; yields the port."""
    guests: set[asyncio.StreamWriter] = set()

    async def receive(reader: asyncio.StreamReader, guest: asyncio.StreamWriter) -> None:
        guests.add(guest)
        try:
            with suppress(ConnectionError):
                guest.write(_banner(who))
                while await reader.read(MAX_BANNER_BYTES):
                    pass
        finally:
            guests.discard(guest)
            guest.close()

    server = await asyncio.start_server(receive, host, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for guest in tuple(guests):
            guest.close()


@dataclass(frozen=True, slots=True)
class Watch:
    """An open connection to a process that said who it is."""

    who: Writer
    address: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def close(self) -> None:
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()

    async def ended(self) -> None:
        """Returns once the process is known to be gone; as long as it may live, never."""
        if not await _lasts(self.reader):
            return
        while True:  # the network failed, which says nothing of the process
            await asyncio.sleep(AGAIN_SECONDS)
            try:
                again = await watch(self.address, self.who)
            except (ConnectionRefusedError, SomebodyElse):
                return
            except (OSError, Unavailable):
                continue
            try:
                if not await _lasts(again.reader):
                    return
            finally:
                await again.close()


class SomebodyElse(Unavailable):
    """Another process listens there."""


async def watch(address: str, who: Writer) -> Watch:
    """Connects to the process `who`. Raises OSError, SomebodyElse or Unavailable."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise Unavailable(f"{address!r} is no host:port to watch a process at")
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            opening = asyncio.open_connection(host, int(port), limit=MAX_BANNER_BYTES)
            reader, writer = await opening
    except TimeoutError as error:
        raise Unavailable(f"nobody answers at {address}") from error
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            banner = await reader.readline()
        if banner != _banner(who):
            raise SomebodyElse(f"{address} is not {who.worker_id} in epoch {who.epoch}")
    except (TimeoutError, ValueError) as error:
        writer.close()
        raise Unavailable(f"nobody says who lives at {address}") from error
    except BaseException:
        writer.close()
        raise
    _keep_alive(writer.get_extra_info("socket"))
    return Watch(who, address, reader, writer)


async def _lasts(reader: asyncio.StreamReader) -> bool:
    """Waits for the end of a connection; False when the other end made it."""
    try:
        while await reader.read(1):
            pass
    except ConnectionResetError:
        return False
    except OSError:
        return True
    return False


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _banner(who: Writer) -> bytes:
    return f"{who.worker_id} {who.epoch}\n".encode()
