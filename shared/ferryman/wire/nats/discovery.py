"""Attachments to a NATS connection: subscriptions, and an entry in service discovery.

Both are made when there is a connection; the client library renews them after an outage.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import nats.errors
import nats.micro
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.micro.service import Service

from ferryman.cancellation import cancels_kept
from ferryman.wire.nats.bus import Discoverable

FLUSH_SECONDS = 2


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
            self._service = await nats.micro.add_service(
                self._client,
                name=self._process.name,
                version=self._process.version,
                description=self._process.description,
                metadata=dict(self._process.metadata),
            )
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
