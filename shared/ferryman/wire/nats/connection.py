"""A connection to a NATS broker, which may come late, go away, and come back.

The client library reconnects for ever. Attachments (subscriptions, an entry in discovery) are made
when the connection is there, and the library renews them after an outage. Pings detect a broker
that is stopped.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.micro.service import Service, ServiceConfig

from ferryman.cancellation import cancels_kept
from ferryman.errors import ConfigError
from ferryman.ids import NO_SECRET
from ferryman.security.credentials import ClusterRole, Login
from ferryman.security.shown_urls import without_logins
from ferryman.wire.nats.bus import MAX_PAYLOAD_BYTES, Discoverable
from ferryman.wire.nats.lifecycle_log import LogLimits
from ferryman.wire.nats.permissions import BrokerRefusals, inbox_of

log = logging.getLogger(__name__)

CONNECT_SECONDS = 2
RECONNECT_WAIT_SECONDS = 0.5
PING_SECONDS = 1
MAX_PINGS_OUTSTANDING = 2
CLOSE_SECONDS = 1.0
_READERS = frozenset(ClusterRole) - {ClusterRole.ROUTER}
_SCHEMES = ("nats://", "tls://", "ws://", "wss://")
FLUSH_SECONDS = 2


@dataclass(frozen=True, slots=True)
class NatsOptions:
    """The broker's URLs (with commas), the client's name, its login, and the limits of the log.

    A broker that asks for no login is shown none; a URL that names a user counts more. Without
    limits (None) the client leaves the log as it is, even if its login allows more. A worker proves
    by its `life_secret` that messages come from it. A broker with TLS has a certificate of one of
    the newest `authorities` (PEM), or (None) of the machine's.
    """

    url: str
    client_name: str = "ferryman"
    login: Login | None = None
    log: LogLimits | None = field(default_factory=LogLimits)
    life_secret: str = field(default=NO_SECRET, repr=False)
    authorities: Callable[[], bytes] | None = None

    @property
    def user(self) -> str:
        """The name that the broker is shown; empty for none."""
        if "@" in self.url:
            return urlsplit(self.url.split(",")[0].strip()).username or ""
        return self.login.user if self.login else ""

    @property
    def kept_log(self) -> LogLimits | None:
        """The limits of the log that it makes: of our roles routers alone may, and a stranger's
        name shows nothing."""
        return None if self.user in _READERS else self.log

    @property
    def servers(self) -> list[str]:
        servers = [server.strip() for server in self.url.split(",")]
        for server in servers:
            if not server.startswith(_SCHEMES):
                raise ConfigError(
                    f"{without_logins(server)!r} is no NATS URL; it begins with nats:// or tls://"
                )
        return servers


class BrokerConnection:
    """One connection. `on_up` is called whenever it has come, or come back."""

    def __init__(self, options: NatsOptions, on_up: Callable[[], None]) -> None:
        self._options, self._on_up = options, on_up
        self._servers = options.servers
        self._believed = b""
        self._attached: list[Attachment] = []
        self._was_up = False
        self.client = Client()
        self.inbox = inbox_of(options.user)
        self.refusals = BrokerRefusals()
        self.up, self.down = asyncio.Event(), asyncio.Event()
        self.down.set()

    @property
    def is_connected(self) -> bool:
        return self.client.is_connected

    @property
    def max_payload(self) -> int:
        """The most bytes that the broker takes in a message."""
        return self.client.max_payload if self.is_connected else MAX_PAYLOAD_BYTES

    async def connect(self) -> None:
        """Waits until there is a broker, and attaches what waits for one."""
        # The library would prefer this login to one that the URL names.
        login = None if "@" in self._options.url else self._options.login
        self._believe_newest()
        await self.client.connect(
            user=login.user if login else None,
            password=login.password if login else None,
            servers=self._servers,
            name=self._options.client_name,
            inbox_prefix=self.inbox,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_connected,
            connect_timeout=CONNECT_SECONDS,
            reconnect_time_wait=RECONNECT_WAIT_SECONDS,  # type: ignore[arg-type]
            max_reconnect_attempts=-1,
            ping_interval=PING_SECONDS,
            max_outstanding_pings=MAX_PINGS_OUTSTANDING,
            pending_size=0,
        )
        self._was_up = True
        for attachment in tuple(self._attached):
            await attachment.attach()
        await self._on_connected()

    async def close(self) -> None:
        """Closes the connection. Without servers a reconnection ends; when only cancelled, it might
        go on."""
        self.up.clear()
        # uvloop raises RuntimeError for a transport that the broker has closed. After a handshake
        # that failed, the library waits for the end of a connection that never ends.
        with suppress(OSError, RuntimeError, nats.errors.Error):
            async with asyncio.timeout(CLOSE_SECONDS):
                if self._was_up:
                    self.client.set_server_pool([])
                await self.client.close()

    @asynccontextmanager
    async def attached(self, attachment: Attachment) -> AsyncIterator[None]:
        """Attaches now, or once the broker is there; the library renews it after outages."""
        self._attached.append(attachment)
        try:
            if self._was_up:
                await attachment.attach()
            yield
        finally:
            self._attached.remove(attachment)
            with suppress(nats.errors.Error, OSError, TimeoutError):
                await attachment.detach()

    async def _on_connected(self) -> None:
        log.info("bus connected url=%s", without_logins(self._options.url))
        self.up.set()
        self.down.clear()
        self._on_up()

    async def _on_disconnected(self) -> None:
        if self.up.is_set():
            log.warning("bus away url=%s", without_logins(self._options.url))
        self.up.clear()
        self.down.set()
        self._believe_newest()

    def _believe_newest(self) -> None:
        """The next attempts to connect believe the newest authorities, and no earlier ones.

        Without any the library makes a context of its own for a broker with TLS.
        """
        authorities = self._options.authorities
        if authorities is not None and (newest := authorities()) != self._believed:
            # The library asks its options at each attempt.
            context = ssl.create_default_context(cadata=newest.decode("ascii"))
            self.client.options["tls"], self._believed = context, newest

    async def _on_error(self, error: Exception) -> None:
        # Each failed attempt ends so: the broker may be given a new certificate while away.
        self._believe_newest()
        if not self.refusals.take(error):
            log.debug("bus error: %r", error)


class ServiceListener:
    """A subscription with a callback, made once there is a connection."""

    def __init__(
        self, client: Client, pattern: str, arrive: Callable[[Msg], Awaitable[None]]
    ) -> None:
        self._client, self._pattern, self._arrive = client, pattern, arrive
        self._subscription: Subscription | None = None

    async def attach(self) -> None:
        if self._subscription is None:
            self._subscription = await self._client.subscribe(self._pattern, cb=self._arrive)
            await _reached_broker(self._client)

    async def detach(self) -> None:
        if self._subscription is not None:
            await self._subscription.unsubscribe()


class Discovery:
    """An entry in `$SRV` discovery."""

    def __init__(self, client: Client, process: Discoverable) -> None:
        self._client, self._process = client, process
        self._service: Service | None = None

    async def attach(self) -> None:
        if self._service is None:
            config = ServiceConfig(
                name=self._process.name,
                version=self._process.version,
                description=self._process.description,
                metadata=dict(self._process.metadata),
            )
            self._service = Service(self._client, config)
            # It flushes when it has subscribed, and raises where a broker does not answer.
            with cancels_kept(), suppress(nats.errors.Error, OSError):
                await self._service.start()
            await _reached_broker(self._client)

    async def detach(self) -> None:
        if self._service is not None:
            await self._service.stop()


Attachment = ServiceListener | Discovery


async def _reached_broker(client: Client) -> None:
    """Returns when the broker has the subscription, so that later messages arrive. Without a broker
    there are no messages to miss.

    The first ping may overtake commands not yet written to the socket; the second cannot.
    """
    with cancels_kept(), suppress(nats.errors.Error, OSError):
        await client.flush(FLUSH_SECONDS)
        await client.flush(FLUSH_SECONDS)
