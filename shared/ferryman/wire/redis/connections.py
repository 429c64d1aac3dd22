"""Connections to Redis: by TCP, by TLS (`rediss://`), or by a socket of this machine (`unix://`).

A process with certificates believes a Redis that shows one of the cluster's authorities, as it
does NATS, and speaks to none without TLS: a password would go there in plain text.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from redis.asyncio import Redis
from redis.asyncio.connection import BlockingConnectionPool, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError

from ferryman.errors import ConfigError
from ferryman.security.credentials import Login
from ferryman.security.shown_urls import without_logins

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 8
PLAIN, BY_TLS = "redis", "rediss"
# Commands without a login, logins with a wrong password, and commands that a login does not allow.
REFUSALS = ("NOAUTH", "WRONGPASS", "NOPERM")

Authorities = Callable[[], bytes]


def redis_pool(
    url: str, login: Login | None, authorities: Authorities | None, socket_seconds: float
) -> BlockingConnectionPool:
    """Connects when it is first used. A user that the URL names counts more than `login`, and so do
    its `ssl_` options than `authorities` (PEM, asked at each connection).

    Raises ConfigError for a URL that is none, or that names no TLS though there are authorities.
    """
    try:
        options = {**parse_url(url), **_trust(url, authorities)}
    except ValueError as error:
        raise ConfigError(f"{url!r} is no Redis URL: {error}") from error
    if login is not None and "@" not in urlsplit(url).netloc:
        options |= {"username": login.user, "password": login.password}
    return BlockingConnectionPool(
        **options,
        max_connections=MAX_CONNECTIONS,
        timeout=socket_seconds,
        socket_timeout=socket_seconds,
        socket_connect_timeout=socket_seconds,
        retry=Retry(NoBackoff(), 0),
        decode_responses=True,
    )


def check_redis_scheme(url: str) -> None:
    """Raises ConfigError for a URL that a process with certificates does not use."""
    if urlsplit(url).scheme == PLAIN:
        raise ConfigError(
            f"Redis at {without_logins(url)}: with TLS_DIR it is reached by rediss:// or unix://"
        )


def _trust(url: str, authorities: Authorities | None) -> dict[str, Any]:
    if authorities is None:
        return {}
    check_redis_scheme(url)
    parts = urlsplit(url)
    if parts.scheme != BY_TLS or any(name.startswith("ssl_") for name in parse_qs(parts.query)):
        return {}
    return {"connection_class": RenewedTlsConnection, "authorities": authorities}


class RenewedTlsConnection(SSLConnection):
    """Believes a Redis whose certificate is of one of the newest `authorities` and names its host,
    and asks for them each time it connects."""

    def __init__(self, authorities: Authorities, **options: Any) -> None:
        super().__init__(**options)
        self._authorities, self._believed = authorities, b""

    async def connect(self) -> None:
        """Raises redis.exceptions.ConnectionError."""
        if not self.is_connected and (newest := self._authorities()) != self._believed:
            # The library's own context would also believe the machine's authorities.
            context = ssl.create_default_context(cadata=newest.decode("ascii"))
            self.ssl_context.context = cast(Any, context)
            self._believed = newest
        await super().connect()  # type: ignore[no-untyped-call]


class RefusalCount:
    """The logins and commands that Redis has refused, from this process and all others: it alone
    sees strangers, and counts its errors by kind.

    `number` is Redis's count at the last look, and restarts with Redis. `is_told` turns false if a
    Redis that others set up does not answer this user.
    """

    def __init__(self, client: Redis) -> None:
        self._client = client
        self.number, self.is_told = 0, True

    async def look(self) -> None:
        """Asks Redis. Raises a RedisError when it does not answer."""
        try:
            errors = await self._client.info("errorstats")
        except ResponseError as error:
            log.info("the index does not tell whom it refuses: %s", error)
            self.is_told = False
            return
        counters = (errors.get(f"errorstat_{kind}", {}) for kind in REFUSALS)
        self.number = sum(int(counter.get("count", 0)) for counter in counters)
