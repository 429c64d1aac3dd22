"""A real nats-server with TLS: strangers' authorities believe nothing, and a new one is taken."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import nats
import pytest
from tests.certificates import forget_older_authorities, make_certificates
from tests.cluster_keys import KEY
from tests.waiting import until

from ferryman.runtime.credential_folders import write_server_access
from ferryman.runtime.embedded import EmbeddedServer, free_port, nats_command, start
from ferryman.security.credentials import ClusterRole, credentials_of
from ferryman.security.tls_folder import NATS, TlsFolder
from ferryman.wire.grpc.role_tokens import GrpcAccess
from ferryman.wire.nats.connection import NatsOptions
from ferryman.wire.nats.nats_bus import nats_bus
from ferryman.wire.nats.permissions import CertificateFiles

DECODE = credentials_of(KEY, ClusterRole.DECODE)
FAILSAFE_SECONDS = 120


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_certificates(tmp_path / "tls")


@contextmanager
def broker(place: Path, folder: Path, port: int) -> Iterator[EmbeddedServer]:
    place.mkdir(exist_ok=True)
    used = TlsFolder(folder, NATS)
    files = CertificateFiles(used.certificate, used.key)
    config = write_server_access(place, KEY, "local", files).nats_config
    server = start(nats_command(place / "nats", port, config, "tls"), place)
    try:
        yield server
    finally:
        server.stop()


def options_by_tls(folder: Path, port: int) -> NatsOptions:
    """Of a decode worker with the certificates in `folder`."""
    access = GrpcAccess(DECODE, TlsFolder(folder, "decode"))
    url = f"tls://127.0.0.1:{port}"
    return NatsOptions(url, "decode-1", DECODE.nats, authorities=access.authorities)


async def refusal(url: str, context: ssl.SSLContext) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        await nats.connect(
            url,
            tls=context,
            user=DECODE.nats.user,
            password=DECODE.nats.password,
            allow_reconnect=False,
        )
    return caught.value


@pytest.mark.parametrize("scheme", ["nats", "tls"])
async def test_no_password_is_shown_to_a_broker_of_strangers(
    scheme: str, folder: Path, tmp_path: Path
) -> None:
    strangers = make_certificates(tmp_path / "strangers")
    context = ssl.create_default_context(cafile=str(strangers / "ca.crt"))
    with broker(tmp_path / "nats", folder, free_port()) as server:
        url = server.url.replace("tls://", f"{scheme}://")
        async with asyncio.timeout(FAILSAFE_SECONDS):
            error = await refusal(url, context)
    assert "CERTIFICATE_VERIFY_FAILED" in str(error)
    log = server.log_path.read_text()
    assert "TLS handshake error" in log, "it came to the broker, and ended there"
    assert "authentication error" not in log


async def test_a_bus_comes_back_to_a_broker_with_a_certificate_of_a_new_authority(
    folder: Path, tmp_path: Path
) -> None:
    port = free_port()
    options = options_by_tls(folder, port)
    async with asyncio.timeout(FAILSAFE_SECONDS), nats_bus(options) as bus:
        with broker(tmp_path / "nats", folder, port):
            await bus.connected()
            make_certificates(folder, new_ca=True)
            forget_older_authorities(folder)
        await bus.disconnected()
        with broker(tmp_path / "nats", folder, port):
            await bus.connected()
            await bus.flush()


async def test_a_bus_takes_an_authority_that_came_while_the_broker_was_away(
    folder: Path, tmp_path: Path
) -> None:
    port = free_port()
    options = options_by_tls(folder, port)
    async with asyncio.timeout(FAILSAFE_SECONDS), nats_bus(options) as bus:
        with broker(tmp_path / "nats", folder, port):
            await bus.connected()
        await bus.disconnected()
        make_certificates(folder, new_ca=True)
        forget_older_authorities(folder)
        with broker(tmp_path / "nats", folder, port):
            await bus.connected()
            await bus.flush()


async def test_a_bus_does_not_believe_an_authority_that_was_taken_out_and_ends_behind_its_refusal(
    folder: Path, tmp_path: Path
) -> None:
    port = free_port()
    former = shutil.copytree(folder, tmp_path / "former")
    options = options_by_tls(folder, port)
    async with AsyncExitStack() as failsafe:
        async with asyncio.timeout(FAILSAFE_SECONDS), AsyncExitStack() as process:
            bus = await process.enter_async_context(nats_bus(options))
            with broker(tmp_path / "nats", folder, port):
                await bus.connected()
                make_certificates(folder, new_ca=True)
                forget_older_authorities(folder)
            await bus.disconnected()
            server = failsafe.enter_context(broker(tmp_path / "former-nats", former, port))
            await until(lambda: "TLS handshake error" in server.log_path.read_text())
    assert not bus.is_connected
