"""Watches whether a process still lives, by a connection that its kernel closes when it ends.

A timeout does not prove that a process which may write into another's memory is dead: it may be
stopped, or far away. Its kernel closes its connections when it ends, and not before. So the process
listens, names itself, and then sends nothing. A watcher takes it for dead when the connection was
closed or reset, or when no process (or another one) listens at its address. Silence means nothing.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from ferryman.errors import Unavailable
from ferryman.handoff.effects import WriterId

CONNECT_SECONDS = 2.0
AGAIN_SECONDS = 1.0
MAX_BANNER_BYTES = 256
# A machine that vanished never closes a connection; with keepalive the watcher's kernel does it.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))


@asynccontextmanager
async def liveness_server(host: str, who: WriterId) -> AsyncIterator[int]:
    """Listens for the length of the block, which must end last; yields the port."""
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
class LivenessWatch:
    """An open connection to a process that has named itself."""

    who: WriterId
    address: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def close(self) -> None:
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()

    async def ended(self) -> None:
        """Returns once the process is known to have ended; never while it may live."""
        if not await _lasts(self.reader):
            return
        while True:  # the network failed, which proves nothing about the process
            await asyncio.sleep(AGAIN_SECONDS)
            try:
                again = await watch_process(self.address, self.who)
            except (ConnectionRefusedError, WrongProcess):
                return
            except (OSError, Unavailable):
                continue
            try:
                if not await _lasts(again.reader):
                    return
            finally:
                await again.close()


class WrongProcess(Unavailable):
    """Another process listens at the address."""


async def watch_process(address: str, who: WriterId) -> LivenessWatch:
    """Connects to the process `who`. Raises OSError, WrongProcess or Unavailable."""
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
            raise WrongProcess(f"{address} is not {who.worker_id} in epoch {who.epoch}")
    except (TimeoutError, ValueError) as error:
        writer.close()
        raise Unavailable(f"nobody says who lives at {address}") from error
    except BaseException:
        writer.close()
        raise
    _keep_alive(writer.get_extra_info("socket"))
    return LivenessWatch(who, address, reader, writer)


async def _lasts(reader: asyncio.StreamReader) -> bool:
    """Waits for the end of a connection; False when the other end closed it."""
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


def _banner(who: WriterId) -> bytes:
    return f"{who.worker_id} {who.epoch}\n".encode()
