"""gRPC over TLS: both ends show certificates between services, the server alone at the public door.

Certificates change while processes run. A server asks for the newest at each handshake. A client's
calls begin over a connection made with the newest; calls under way end over the one they have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, cast

import grpc
import grpc.aio

from ferryman.errors import ConfigError

# Services are reached at addresses that no certificate can know in advance, so each shows this
# name. The role of the process is the common name.
SERVICE_NAME = "service.ferryman"

Options = tuple[tuple[str, Any], ...]
_COMMON_NAME = "x509_common_name"
_EXPECT_SERVICE: Options = (("grpc.ssl_target_name_override", SERVICE_NAME),)


@dataclass(frozen=True, slots=True, eq=False)
class TlsMaterial:
    """A certificate (or a chain) with its key, and the authorities that are trusted; all in PEM."""

    certificate: bytes
    key: bytes = field(repr=False)
    authorities: bytes


TlsSource = Callable[[], TlsMaterial]
"""Gives the newest material, and the same object for as long as nothing has changed. gRPC asks it
from threads of its own."""


def read_authorities(path: Path | str) -> bytes:
    """The content of a file of authorities. Raises ConfigError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"authorities {path}: {error.strerror}") from None


class ChannelSecurity(Protocol):
    """A way to make connections. `options` are gRPC's."""

    def open(self, address: str, options: Options) -> grpc.aio.Channel: ...


class Plaintext:
    """Without TLS: for networks that no stranger reaches."""

    def open(self, address: str, options: Options) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, options=options)


PLAINTEXT = Plaintext()


@dataclass(frozen=True, slots=True)
class MutualTls:
    """Between services: shows a certificate, and expects one of a service of this cluster."""

    source: TlsSource

    def open(self, address: str, options: Options) -> grpc.aio.Channel:
        channel = RenewedChannel(address, self.source, (*options, *_EXPECT_SERVICE))
        return cast(grpc.aio.Channel, channel)


@dataclass(frozen=True, slots=True)
class DoorTls:
    """For clients of the public door: shows no certificate, and expects one of the address's host
    from one of `authorities` (PEM), or from those that gRPC trusts."""

    authorities: bytes | None = None

    @staticmethod
    def of_file(path: Path | str) -> DoorTls:
        """With the authorities in a file, such as ca.crt. Raises ConfigError."""
        return DoorTls(read_authorities(path))

    def open(self, address: str, options: Options) -> grpc.aio.Channel:
        credentials = grpc.ssl_channel_credentials(self.authorities)
        return grpc.aio.secure_channel(address, credentials, options=options)


def mutual_credentials(source: TlsSource) -> grpc.ServerCredentials:
    """A server that takes connections of those who show a certificate of a trusted authority."""
    return _newest_credentials(source, wants_certificates=True)


def door_credentials(source: TlsSource) -> grpc.ServerCredentials:
    """A server that shows its certificate, and asks its clients for none."""
    return _newest_credentials(source, wants_certificates=False)


def _newest_credentials(source: TlsSource, *, wants_certificates: bool) -> grpc.ServerCredentials:
    """gRPC asks for the newest certificate at each handshake."""

    def newest() -> grpc.ServerCertificateConfiguration:
        material = source()
        pairs = [(material.key, material.certificate)]
        return grpc.ssl_server_certificate_configuration(pairs, material.authorities)

    dynamic: Any = grpc.dynamic_ssl_server_credentials
    credentials: grpc.ServerCredentials = dynamic(newest(), newest, wants_certificates)
    return credentials


def certified_name(context: Any) -> str:
    """The common name in the certificate that the caller showed; empty without one, or without TLS.

    The handshake has verified the certificate.
    """
    names = context.auth_context().get(_COMMON_NAME, ())
    return names[0].decode(errors="replace") if len(names) == 1 else ""


class _Connection:
    """The connections made with one material, and the number of calls under way over them."""

    def __init__(self, address: str, material: TlsMaterial, options: Options) -> None:
        self.material = material
        credentials = grpc.ssl_channel_credentials(
            material.authorities, material.key, material.certificate
        )
        self.channel = grpc.aio.secure_channel(address, credentials, options=options)
        self.num_calls = 0
        self._methods: dict[str, Callable[..., Any]] = {}

    def begin(self, method: str, make: Callable[[grpc.aio.Channel], Any]) -> Callable[..., Any]:
        """The method of this channel, made by `make` when it is first called."""
        if (call := self._methods.get(method)) is None:
            call = self._methods[method] = make(self.channel)
        return call


class RenewedChannel:
    """A channel to one address whose calls begin with the newest certificate of `source`.

    It offers what stubs and `Channels` use. A channel with an older certificate is kept while calls
    are under way over it.
    """

    def __init__(self, address: str, source: TlsSource, options: Options) -> None:
        self._address, self._source, self._options = address, source, options
        self._newest = _Connection(address, source(), options)
        self._older: set[_Connection] = set()
        self.unary_unary = self._shape("unary_unary")
        self.unary_stream = self._shape("unary_stream")
        self.stream_unary = self._shape("stream_unary")
        self.stream_stream = self._shape("stream_stream")

    @property
    def num_older(self) -> int:
        """Channels with an older certificate over which calls are under way."""
        return len(self._older)

    async def close(self, grace: float | None = None) -> None:
        """Ends all calls, after `grace` seconds."""
        for connection in (self._newest, *self._older):
            await connection.channel.close(grace)

    async def channel_ready(self) -> None:
        await self._current().channel.channel_ready()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last: grpc.ChannelConnectivity) -> None:
        await self._current().channel.wait_for_state_change(last)

    def _current(self) -> _Connection:
        material, old = self._source(), self._newest
        if material is not old.material:
            self._newest = _Connection(self._address, material, self._options)
            # gRPC closes a channel that no one refers to any more.
            if old.num_calls:
                self._older.add(old)
        return self._newest

    def _shape(self, shape: str) -> Callable[..., Any]:
        def of_method(method: str, *serializers: Any, **options: Any) -> Callable[..., Any]:
            make = lambda channel: getattr(channel, shape)(method, *serializers, **options)  # noqa: E731

            def call(*message: Any, **options: Any) -> Any:
                connection = self._current()
                begun = connection.begin(method, make)(*message, **options)
                connection.num_calls += 1
                begun.add_done_callback(lambda _: self._ended(connection))
                return begun

            return call

        return of_method

    def _ended(self, connection: _Connection) -> None:
        connection.num_calls -= 1
        if not connection.num_calls:
            self._older.discard(connection)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
