"""Services ask each other for certificates: strangers get no connection, other roles no call, and
new files are taken while streams run."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.certificates import Uncertified, forget_older_authorities, make_certificates
from tests.cluster_keys import KEY, token_of

from ferryman.security.credentials import ClusterRole, credentials_of
from ferryman.security.tls import (
    PLAINTEXT,
    ChannelSecurity,
    MutualTls,
    RenewedChannel,
    TlsMaterial,
    TlsSource,
)
from ferryman.security.tls_folder import TlsFolder
from ferryman.wire.grpc.role_tokens import GrpcAccess, TokenChannel
from ferryman.wire.grpc.rpc import CHANNEL_OPTIONS, channel, listening
from ferryman.wire.v1 import decode_pb2
from ferryman.wire.v1.decode_pb2_grpc import (
    DecodeServiceServicer,
    DecodeServiceStub,
    add_DecodeServiceServicer_to_server,
)

ABORT = "/ferryman.wire.v1.DecodeService/Abort"
ROUTER, PREFILL, DECODE = ClusterRole.ROUTER, ClusterRole.PREFILL, ClusterRole.DECODE
FAILSAFE_SECONDS = 120


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_certificates(tmp_path / "tls")


@pytest.fixture
def strangers(tmp_path: Path) -> Path:
    return make_certificates(tmp_path / "strangers")


class Decode(DecodeServiceServicer):
    """Notes the certificate of each caller of Abort, and sends a frame for each thing in `news`."""

    def __init__(self) -> None:
        self.shown: list[bytes] = []
        self.refused: list[tuple[str, str]] = []
        self.news: asyncio.Queue[None] = asyncio.Queue()

    async def Abort(self, request: Any, context: Any) -> decode_pb2.AbortResponse:
        self.shown += context.auth_context()["x509_pem_cert"]
        return decode_pb2.AbortResponse()

    async def Tokens(self, request: Any, context: Any) -> AsyncIterator[decode_pb2.TokensResponse]:
        while True:
            await self.news.get()
            yield decode_pb2.TokensResponse()

    def refuse(self, method: str, reason: str) -> None:
        self.refused.append((method, reason))


@asynccontextmanager
async def serving(source: TlsSource) -> AsyncIterator[tuple[Decode, str]]:
    decode = Decode()
    locks = GrpcAccess(credentials_of(KEY, DECODE), source).locks(decode.refuse)
    register = lambda server: add_DecodeServiceServicer_to_server(decode, server)  # noqa: E731
    async with (
        asyncio.timeout(FAILSAFE_SECONDS),
        listening("127.0.0.1:0", register, grace=0, locks=locks) as server,
    ):
        yield decode, f"127.0.0.1:{server.port}"


def of(folder: Path, role: ClusterRole) -> MutualTls:
    return MutualTls(TlsFolder(folder, role.value))


async def abort(address: str, security: ChannelSecurity, token: str) -> grpc.StatusCode:
    async with channel(address, token, security) as way:
        try:
            await DecodeServiceStub(way).Abort(decode_pb2.AbortRequest(), timeout=60)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_a_role_calls_with_its_certificate_and_its_token(folder: Path) -> None:
    async with serving(TlsFolder(folder, "decode")) as (decode, address):
        assert await abort(address, of(folder, ROUTER), token_of(ROUTER)) is grpc.StatusCode.OK
    assert [_name(one) for one in decode.shown] == ["CN=router"]
    assert decode.refused == []


@pytest.mark.parametrize("shown", [PREFILL, ClusterRole.OBSERVER, DECODE])
async def test_a_token_beside_another_roles_certificate_is_refused_and_counted(
    folder: Path, shown: ClusterRole
) -> None:
    async with serving(TlsFolder(folder, "decode")) as (decode, address):
        found = await abort(address, of(folder, shown), token_of(ROUTER))
    assert found is grpc.StatusCode.PERMISSION_DENIED
    assert decode.refused == [(ABORT, "PermissionDenied")]
    assert decode.shown == []


async def test_a_certificate_without_a_token_is_refused_and_counted(folder: Path) -> None:
    async with serving(TlsFolder(folder, "decode")) as (decode, address):
        assert await abort(address, of(folder, ROUTER), "") is grpc.StatusCode.UNAUTHENTICATED
    assert decode.refused == [(ABORT, "Unauthenticated")]


async def test_strangers_with_a_token_get_no_connection(folder: Path, strangers: Path) -> None:
    ours, theirs = (TlsFolder(each, "router")() for each in (folder, strangers))
    forged = TlsMaterial(theirs.certificate, theirs.key, ours.authorities)
    ways: dict[str, ChannelSecurity] = {
        "no TLS": PLAINTEXT,
        "no certificate": Uncertified(ours.authorities),
        "a certificate of another authority": MutualTls(lambda: forged),
    }
    async with serving(TlsFolder(folder, "decode")) as (decode, address):
        found = {name: await abort(address, way, token_of(ROUTER)) for name, way in ways.items()}
        assert await abort(address, of(folder, ROUTER), token_of(ROUTER)) is grpc.StatusCode.OK
    assert found == dict.fromkeys(ways, grpc.StatusCode.UNAVAILABLE)
    assert len(decode.shown) == 1, "ours alone"


@pytest.mark.parametrize("name", ["observer", "door"])
async def test_a_client_believes_no_server_that_is_no_service(folder: Path, name: str) -> None:
    async with serving(TlsFolder(folder, name)) as (decode, address):
        found = await abort(address, of(folder, ROUTER), token_of(ROUTER))
    assert found is grpc.StatusCode.UNAVAILABLE
    assert decode.shown == []


async def test_a_client_believes_no_service_of_another_authority(
    folder: Path, strangers: Path
) -> None:
    async with serving(TlsFolder(strangers, "decode")) as (_, address):
        found = await abort(address, of(folder, ROUTER), token_of(ROUTER))
    assert found is grpc.StatusCode.UNAVAILABLE


async def test_health_wants_a_certificate_and_no_token(folder: Path) -> None:
    async with serving(TlsFolder(folder, "decode")) as (_, address):
        async with channel(address, "", of(folder, ClusterRole.OBSERVER)) as way:
            asked = health_pb2.HealthCheckRequest()
            answer = await health_pb2_grpc.HealthStub(way).Check(asked, timeout=60)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_new_files_serve_new_calls_while_an_old_stream_goes_on(folder: Path) -> None:
    """A whole change of authority, under a stream that began before it."""
    source = TlsFolder(folder, "router")
    async with serving(TlsFolder(folder, "decode")) as (decode, address):
        renewed: Any = MutualTls(source).open(address, CHANNEL_OPTIONS)
        way: Any = TokenChannel(renewed, token_of(ROUTER))
        async with way:
            stub = DecodeServiceStub(way)
            stream = stub.Tokens(decode_pb2.TokensRequest())
            await _next(stream, decode)
            await stub.Abort(decode_pb2.AbortRequest())
            make_certificates(folder, new_ca=True)
            await stub.Abort(decode_pb2.AbortRequest())
            first, second = decode.shown
            assert second == source().certificate != first, "the second shows the new one"
            await _next(stream, decode)
            forget_older_authorities(folder)
            await stub.Abort(decode_pb2.AbortRequest())
            await _next(stream, decode)
            assert renewed.num_older == 1, "the stream's connection is kept"
            stream.cancel()
            await _settled(renewed)
            assert renewed.num_older == 0


async def test_an_authority_that_is_trusted_no_more_lets_no_one_in(
    folder: Path, tmp_path: Path
) -> None:
    old = shutil.copytree(folder, tmp_path / "old")
    async with serving(TlsFolder(folder, "decode")) as (_, address):
        assert await abort(address, of(old, ROUTER), token_of(ROUTER)) is grpc.StatusCode.OK
        make_certificates(folder, new_ca=True)
        shutil.copy(folder / "ca.crt", old / "ca.crt")
        found = await abort(address, of(old, ROUTER), token_of(ROUTER))
        assert found is grpc.StatusCode.OK, "the earlier authority is still trusted"
        forget_older_authorities(folder)
        found = await abort(address, of(old, ROUTER), token_of(ROUTER))
        assert found is grpc.StatusCode.UNAVAILABLE


def _name(certificate: bytes) -> str:
    return x509.load_pem_x509_certificate(certificate).subject.rfc4514_string()


async def _next(stream: Any, decode: Decode) -> None:
    decode.news.put_nowait(None)
    assert await stream.read() is not grpc.aio.EOF


async def _settled(renewed: RenewedChannel) -> None:
    """The library tells of a call's end soon after it."""
    while renewed.num_older:  # noqa: ASYNC110
        await asyncio.sleep(0)
