"""The bus over NATS.

The client library could buffer while the broker is away and deliver old messages late, so its
buffer is off. Messages wait in our outbox. Pings detect a broker that is stopped.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from ferryman.credentials import ClusterRole, Login
from ferryman.errors import ConfigError, DeadlineExceeded, InvalidRequest, Unavailable
from ferryman.ids import NO_SECRET
from ferryman.wire.nats.bus import (
    DEADLINE_HEADER,
    MAX_PAYLOAD_BYTES,
    Answer,
    BusMessage,
    BusStatistics,
    Discoverable,
    Messages,
    RecordedMessage,
    check_subject,
    checked_payload,
    matches,
)
from ferryman.wire.nats.discovery import Attachment, Discovery, ServiceListener
from ferryman.wire.nats.lifecycle_log import (
    ALL_LIFE,
    Acknowledgements,
    LogLimits,
    ensure_stream,
    read_log,
)
from ferryman.wire.nats.outbox import OutboundMessage, Outbox
from ferryman.wire.nats.permissions import BrokerRefusals, inbox_of
from ferryman.wire.nats.replies import answer_from, answer_to
from ferryman.wire.nats.sender_proof import proof_for

log = logging.getLogger(__name__)

CONNECT_SECONDS = 2
RECONNECT_WAIT_SECONDS = 0.5
PING_SECONDS = 1
MAX_PINGS_OUTSTANDING = 2
FLUSH_SECONDS = 1.0
CLOSE_SECONDS = 1.0
_READERS = frozenset(ClusterRole) - {ClusterRole.ROUTER}
_SCHEMES = ("nats://", "tls://", "ws://", "wss://")


@dataclass(frozen=True, slots=True)
class NatsOptions:
    """The broker's URLs (with commas), the client's name, its login, and the limits of the log.

    A broker that asks for no login is shown none; a URL that names a user counts more. Without
    limits (None) the client leaves the log as it is, whatever its login allows. A worker proves by
    its `life_secret` that messages come from it. A broker with TLS has a certificate of one of the
    newest `authorities` (PEM), or (None) of the machine's.
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
        name tells nothing."""
        return None if self.user in _READERS else self.log

    @property
    def servers(self) -> list[str]:
        servers = [server.strip() for server in self.url.split(",")]
        for server in servers:
            if not server.startswith(_SCHEMES):
                raise ConfigError(f"{server!r} is no NATS URL; it begins with nats:// or tls://")
        return servers


@asynccontextmanager
async def nats_bus(options: NatsOptions) -> AsyncIterator[NatsBus]:
    """A bus for the length of a block, which begins at once, with or without a broker.

    Leaving the block sends the waiting messages, within FLUSH_SECONDS.
    """
    bus = NatsBus(options)
    sending = asyncio.create_task(bus.run(), name="nats bus")
    sending.add_done_callback(_report)
    try:
        yield bus
    finally:
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_SECONDS):
                await bus.flush()
        while not sending.done():  # a connection being made can swallow the cancel
            sending.cancel()
            await asyncio.wait((sending,), timeout=CONNECT_SECONDS)
        await bus.close()


def _report(sending: asyncio.Task[None]) -> None:
    if not sending.cancelled() and (error := sending.exception()):
        log.error("the bus has stopped sending", exc_info=error)


class NatsBus:
    """A `Bus` over one NATS connection; `nats_bus` runs it."""

    def __init__(self, options: NatsOptions, outbox: Outbox | None = None) -> None:
        self._options = options
        self._servers = options.servers
        self._client = Client()
        self._believed = b""
        self._outbox = outbox or Outbox()
        self._inbox = inbox_of(options.user)
        self._acks = Acknowledgements(f"{self._inbox}.{secrets.token_hex(11)}")
        self._refusals = BrokerRefusals()
        self._attached: list[Attachment] = []
        self._was_up = False
        self._has_log = False
        self._up, self._down = asyncio.Event(), asyncio.Event()
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._down.set()
        self._num_sent, self._num_unsendable = 0, 0
        self._num_missed = 0

    # Calls of all users.

    @property
    def is_connected(self) -> bool:
        return self._client.is_connected

    async def connected(self) -> None:
        """Waits until the broker is there; the caller sets the time limit."""
        await self._up.wait()

    async def disconnected(self) -> None:
        """Waits until the broker is away."""
        await self._down.wait()

    def publish(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        checked_payload(payload, self._max_payload)
        self._outbox.keep(self._outbound(subject, payload, headers))
        self._wake.set()

    def offer(self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None) -> None:
        checked_payload(payload, self._max_payload)
        self._outbox.offer(self._outbound(subject, payload, headers))
        self._wake.set()

    @asynccontextmanager
    async def subscribed(self, pattern: str) -> AsyncIterator[Messages]:
        messages = Messages()

        async def arrive(message: Msg) -> None:
            self._num_missed += not messages.try_put(_received(message))

        async with self._attachment(ServiceListener(self._client, pattern, arrive)):
            yield messages

    @asynccontextmanager
    async def answering(self, pattern: str, answer: Answer) -> AsyncIterator[None]:
        async def arrive(message: Msg) -> None:
            payload, headers = await answer_to(_received(message), _checked(answer))
            if message.reply:
                with suppress(nats.errors.Error, OSError):
                    await self._client.publish(message.reply, payload, headers=headers or None)

        async with self._attachment(ServiceListener(self._client, pattern, arrive)):
            yield

    async def request(self, subject: str, payload: bytes, *, timeout_seconds: float) -> bytes:
        checked_payload(payload, self._max_payload)
        if not self.is_connected:
            raise Unavailable("the broker is away")
        headers = {DEADLINE_HEADER: str(round(timeout_seconds * 1000))}
        try:
            message = await self._client.request(
                check_subject(subject), payload, timeout=timeout_seconds, headers=headers
            )
        except nats.errors.NoRespondersError:
            raise Unavailable(f"nobody answers on {subject}") from None
        except nats.errors.TimeoutError:
            raise DeadlineExceeded(f"no answer on {subject} in time") from None
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"the broker is away: {error}") from error
        return answer_from(message.data, message.headers or {})

    async def history(self, pattern: str, *, max_events: int) -> tuple[RecordedMessage, ...]:
        if not self.is_connected:
            raise Unavailable("the lifecycle log is away")
        return await read_log(self._client, pattern, max_events)

    @asynccontextmanager
    async def discoverable(self, process: Discoverable) -> AsyncIterator[None]:
        async with self._attachment(Discovery(self._client, process)):
            yield

    def statistics(self) -> BusStatistics:
        return BusStatistics(
            num_sent=self._num_sent,
            num_waiting=len(self._outbox),
            num_refused=self._outbox.num_refused,
            num_dropped=self._outbox.num_dropped + self._num_unsendable,
            num_recorded=self._acks.num_recorded,
            num_unrecorded=self._acks.num_unrecorded,
            num_missed=self._num_missed,
            num_forbidden=self._refusals.number,
        )

    # The job that connects and sends.

    async def run(self) -> None:
        """Connects, then sends waiting messages, for ever."""
        await self._connect()
        while True:
            await self._up.wait()
            if not self._has_log:
                await self._begin_log()
            await self._send_waiting()
            self._idle.set()
            await self._wake.wait()
            self._wake.clear()
            self._idle.clear()

    async def flush(self) -> None:
        """Waits until every message published so far was sent; for ever, while the broker is
        away."""
        while len(self._outbox) or not self._up.is_set():
            await self._up.wait()
            self._idle.clear()
            self._wake.set()
            await self._idle.wait()
        await self._client.flush()

    async def close(self) -> None:
        """Closes the connection. Without servers a reconnection ends; when only cancelled, it might
        go on."""
        self._up.clear()
        # uvloop raises RuntimeError for a transport that the broker has closed. Behind a handshake
        # that failed, the library waits for the end of a connection that never ends.
        with suppress(OSError, RuntimeError, nats.errors.Error):
            async with asyncio.timeout(CLOSE_SECONDS):
                if self._was_up:
                    self._client.set_server_pool([])
                await self._client.close()

    @property
    def _max_payload(self) -> int:
        return self._client.max_payload if self.is_connected else MAX_PAYLOAD_BYTES

    def _outbound(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None
    ) -> OutboundMessage:
        proof = proof_for(check_subject(subject), self._options.life_secret)
        return OutboundMessage(subject, payload, {**(headers or {}), **proof})

    async def _connect(self) -> None:
        # The library would prefer this login to one that the URL names.
        login = None if "@" in self._options.url else self._options.login
        self._believe_newest()
        await self._client.connect(
            user=login.user if login else None,
            password=login.password if login else None,
            servers=self._servers,
            name=self._options.client_name,
            inbox_prefix=self._inbox,
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
        await self._client.subscribe(self._acks.pattern, cb=self._acks.on_answer)
        self._was_up = True
        for attachment in tuple(self._attached):
            await attachment.attach()
        await self._on_connected()

    async def _begin_log(self) -> None:
        for message in reversed(self._acks.take_outstanding()):
            self._outbox.give_back(message)
        self._has_log = True
        if (limits := self._options.kept_log) is not None:
            await ensure_stream(self._client, limits)

    async def _send_waiting(self) -> None:
        while self._up.is_set():
            await self._acks.room()
            message = self._outbox.take()
            if message is None:
                return
            await self._send(message)

    async def _send(self, message: OutboundMessage) -> None:
        reply = ""
        if matches(ALL_LIFE, message.subject):
            reply, message = self._acks.enter(message)
        headers = dict(message.headers) or None
        try:
            await self._client.publish(message.subject, message.payload, reply, headers)
        except (nats.errors.OutboundBufferLimitError, nats.errors.ConnectionClosedError):
            self._acks.withdraw(reply)
            self._outbox.give_back(message)
            self._up.clear()
        except nats.errors.Error as error:
            self._acks.withdraw(reply)
            self._num_unsendable += 1
            log.warning("not sent subject=%s: %s", message.subject, error)
        else:
            self._num_sent += 1

    async def _on_connected(self) -> None:
        log.info("bus connected url=%s", self._options.url)
        self._has_log = False
        self._up.set()
        self._down.clear()
        self._wake.set()

    async def _on_disconnected(self) -> None:
        if self._up.is_set():
            log.warning("bus away url=%s", self._options.url)
        self._up.clear()
        self._down.set()
        self._believe_newest()

    def _believe_newest(self) -> None:
        """The next attempts to connect believe the newest authorities, and no earlier ones.

        Without any the library makes a context of its own for a broker with TLS.
        """
        authorities = self._options.authorities
        if authorities is not None and (newest := authorities()) != self._believed:
            # The library asks its options at each attempt.
            context = ssl.create_default_context(cadata=newest.decode("ascii"))
            self._client.options["tls"], self._believed = context, newest

    async def _on_error(self, error: Exception) -> None:
        # So ends each attempt that fails: the broker may be given a new certificate while away.
        self._believe_newest()
        if not self._refusals.take(error):
            log.debug("bus error: %r", error)

    @asynccontextmanager
    async def _attachment(self, attachment: Attachment) -> AsyncIterator[None]:
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


def _received(message: Msg) -> BusMessage:
    return BusMessage(message.subject, message.data, message.headers or {})


def _checked(answer: Answer) -> Answer:
    """Refuses what is no order of `request`.

    The broker checks who publishes, but not where its own answers go: the acknowledgement of an
    event can be sent to the subject of an order. It has no header of ours.
    """

    async def of_order(message: BusMessage) -> bytes:
        if DEADLINE_HEADER not in message.headers:
            raise InvalidRequest(f"an order carries the header {DEADLINE_HEADER}", "headers")
        return await answer(message)

    return of_order
