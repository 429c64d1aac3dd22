"""A way to a server on which a test can hold back what the server answers."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Connection:
    """One client's connection; what the server says waits while `answers_flow` is not set."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.answers_flow = asyncio.Event()
        self.answers_flow.set()

    def drop(self) -> None:
        """Ends it as a network does."""
        self._writer.transport.abort()


class HoldingProxy:
    """Passes bytes on. After `hold_next(mark)` the next connection over which a client sends `mark`
    has its answers held back from then on; an empty mark is sent by every client.

    `held` has that connection once the server had an answer on it that had to wait.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._mark: bytes | None = None
        self._is_armed = False
        self._have_said: list[Connection] = []
        self.address = ""
        self.num_connections = 0
        self.held: asyncio.Queue[Connection] = asyncio.Queue()

    def hold_next(self, mark: bytes) -> None:
        """Ends connections that have said it: HTTP/2 spells a name once per connection."""
        self._mark, self._is_armed = mark, True
        while self._have_said:
            self._have_said.pop().drop()

    def _note(self, client: Connection, content: bytes) -> None:
        if self._mark is None or self._mark not in content:
            return
        self._have_said.append(client)
        if self._is_armed:
            self._is_armed = False
            client.answers_flow.clear()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either end closes it."""
        self.num_connections += 1
        from_server, to_server = await asyncio.open_connection(*self._target)
        client, server = Connection(reader, writer), Connection(from_server, to_server)
        self._note(client, b"")
        ways = (
            asyncio.create_task(self._questions(client, server)),
            asyncio.create_task(self._answers(client, server)),
        )
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.wait(ways)
            for end in (writer, to_server):
                end.transport.abort()
                with suppress(OSError):
                    await end.wait_closed()

    async def _questions(self, client: Connection, server: Connection) -> None:
        with suppress(OSError):
            while content := await client._reader.read(1 << 16):
                self._note(client, content)
                server._writer.write(content)
                await server._writer.drain()

    async def _answers(self, client: Connection, server: Connection) -> None:
        with suppress(OSError):
            while content := await server._reader.read(1 << 16):
                if not client.answers_flow.is_set():
                    self.held.put_nowait(client)
                    await client.answers_flow.wait()
                client._writer.write(content)
                await client._writer.drain()


@asynccontextmanager
async def holding_proxy(
    target: str, *, listen: str = "127.0.0.1:0", tls: ssl.SSLContext | None = None
) -> AsyncIterator[HoldingProxy]:
    """Listens before `target` (both host:port) for as long as the block runs. With `tls` clients
    speak TLS, which ends here."""
    proxy = HoldingProxy(target)
    serving: set[asyncio.Task[None]] = set()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(proxy.serve(reader, writer))
        serving.add(task)
        task.add_done_callback(serving.discard)

    host, _, port = listen.rpartition(":")
    server = await asyncio.start_server(begin, host, int(port), ssl=tls)
    proxy.address = f"{host}:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        for task in tuple(serving):
            task.cancel()
        if serving:
            await asyncio.wait(serving)
        await server.wait_closed()
