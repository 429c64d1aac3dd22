"""HTTP servers inside a service: an ASGI application on a port, for as long as a block runs."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ferryman.errors import ConfigError, FerrymanError
from ferryman.runtime.connections import ConnectionLimits, ConnectionTable
from ferryman.runtime.http_protocol import AnswerDate, BoundedProtocol
from ferryman.settings.groups import ListenSettings

_BACKLOG = 1024
SHOW_A_TOKEN = {"www-authenticate": "Bearer"}
_DEFAULT_LIMITS = ConnectionLimits()


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """The response of an observed endpoint; `content_type` belongs to `body`."""

    body: bytes
    content_type: str
    status: int = 200


Endpoints = Mapping[str, Callable[[], HttpAnswer]]
Check = Callable[[str, Sequence[str]], None]
"""Raises a FerrymanError for a reader of a path, known by its `authorization` headers, that may not
read it."""


def json_answer(value: object, status: int = 200) -> HttpAnswer:
    return HttpAnswer(json.dumps(value).encode(), "application/json", status)


def observed(open_to_all: Endpoints, guarded: Endpoints, check: Check) -> ASGIApp:
    """GET `/health`, `/metrics`, `/debug/ledger`, …: each path calls its function, on the loop.
    `check` is asked about readers of `guarded` ones."""
    routes = [Route(path, _endpoint(ask)) for path, ask in open_to_all.items()]
    routes += [Route(path, _endpoint(ask, check)) for path, ask in guarded.items()]
    return Starlette(routes=routes)


@asynccontextmanager
async def listening(
    app: ASGIApp,
    listen: ListenSettings,
    *,
    grace_seconds: float = 5.0,
    limits: ConnectionLimits = _DEFAULT_LIMITS,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[int]:
    """Serves `app` while the block runs and yields the port. Answers in progress get
    `grace_seconds`. `limits` bounds the number of clients and the time each may take for a request.
    With `tls` it is HTTPS.

    Raises ConfigError when the address is not available.
    """
    with _bound(listen) as bound:
        config = _config(app, grace_seconds, ConnectionTable(limits))
        server = _Server(config) if tls is None else _TlsServer(config, tls, limits.header_seconds)
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(server.serve(sockets=[bound]))
            await server.ready.wait()
            try:
                yield bound.getsockname()[1]
            finally:
                server.end()
                await asyncio.wait([serving])


def _config(app: ASGIApp, grace_seconds: float, table: ConnectionTable) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=partial(BoundedProtocol, table, AnswerDate()),  # type: ignore[arg-type]
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(grace_seconds)),
    )


class _Server(uvicorn.Server):
    """uvicorn without signal handlers, which `life` installs; an event is set when it is ready."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready, self._ending = asyncio.Event(), asyncio.Event()

    def end(self) -> None:
        """Takes no more connections; open ones get their grace."""
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        """Waits for the end. uvicorn's own loop looks for it ten times a second."""
        await self._ending.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.ready.set()


class _TlsServer(_Server):
    """The same over TLS. A handshake may take `handshake_seconds`, for which uvicorn has no option:
    by default a silent client would hold a file for a minute."""

    def __init__(
        self, config: uvicorn.Config, tls: ssl.SSLContext, handshake_seconds: float
    ) -> None:
        super().__init__(config)
        self._tls, self._handshake_seconds = tls, handshake_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                self._protocol,
                sock=sock,
                backlog=_BACKLOG,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_seconds,
            )
            for sock in sockets or ()
        ]
        self.started = True
        self.ready.set()

    def _protocol(self) -> asyncio.Protocol:
        make: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        state = self.lifespan.state
        return make(config=self.config, server_state=self.server_state, app_state=state)


@contextmanager
def _bound(listen: ListenSettings) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    with socket.socket(family) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((listen.host, listen.port))
            bound.listen(_BACKLOG)
        except OSError as error:
            address = f"{listen.host}:{listen.port}"
            raise ConfigError(f"cannot listen on {address}: {error.strerror}") from None
        yield bound


def _no_check(_path: str, _authorizations: Sequence[str]) -> None:
    """Refuses no reader."""


def _endpoint(
    ask: Callable[[], HttpAnswer], check: Check = _no_check
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            check(request.scope["path"], request.headers.getlist("authorization"))
        except FerrymanError as error:
            body = json_answer({"error": str(error)}).body
            return Response(body, error.http_status, SHOW_A_TOKEN, "application/json")
        reply = ask()
        return Response(reply.body, reply.status, media_type=reply.content_type)

    return answer
