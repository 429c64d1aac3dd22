"""Callers of a cluster with TLS: each with the authorities and the certificate that it says."""

from __future__ import annotations

import ssl
from asyncio import StreamReader
from pathlib import Path

import grpc
import grpc.aio
import nats
from grpc_health.v1 import health_pb2, health_pb2_grpc
from nats.aio.client import Client as NatsClient
from tests.certificates import Uncertified
from tests.harness.cluster import Up
from tests.system.attacked_cluster import SUBJECTS, first_beats

from ferryman.security.credentials import ClusterRole, Login
from ferryman.security.tls import PLAINTEXT, ChannelSecurity, MutualTls, TlsMaterial
from ferryman.security.tls_folder import TlsFolder
from ferryman.wire.grpc.rpc import channel
from ferryman.wire.nats.connection import NatsOptions
from ferryman.wire.nats.nats_bus import nats_bus

FAILSAFE_SECONDS = 120


def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=(folder / "ca.crt").read_text())


async def addresses(cluster: Up, folder: Path) -> dict[str, str]:
    """Of the workers and the host-cache, as an observer hears them."""
    login = cluster.credentials(ClusterRole.OBSERVER).nats
    authorities = (folder / "ca.crt").read_bytes
    options = NatsOptions(cluster.said["nats"], "observer", login, authorities=authorities)
    async with nats_bus(options) as bus, bus.subscribed(SUBJECTS.all_beats) as heard:
        return {role: beat.address for role, beat in (await first_beats(heard)).items()}


def ways_to_call(folder: Path, strangers: Path) -> dict[str, ChannelSecurity]:
    """The way of a router, and those of strangers who have read its `ca.crt`."""
    ours, theirs = (TlsFolder(each, "router")() for each in (folder, strangers))
    forged = TlsMaterial(theirs.certificate, theirs.key, ours.authorities)
    return {
        "no TLS": PLAINTEXT,
        "no certificate": Uncertified(ours.authorities),
        "another authority's": MutualTls(lambda: forged),
        "ours": MutualTls(lambda: ours),
    }


async def health(address: str, way: ChannelSecurity) -> grpc.StatusCode:
    """The status of a call that wants no token."""
    async with channel(address, "", way) as opened:
        try:
            asked = health_pb2.HealthCheckRequest()
            await health_pb2_grpc.HealthStub(opened).Check(asked, timeout=FAILSAFE_SECONDS)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def logged_in(url: str, login: Login, trusted: Path) -> NatsClient:
    """A client of the broker that believes the authorities in a folder."""
    return await nats.connect(
        url,
        tls=trusting(trusted),
        user=login.user,
        password=login.password,
        allow_reconnect=False,
    )


async def read_to_end(reader: StreamReader) -> bytes:
    """All that a server says before it closes the connection, in whichever way."""
    said = b""
    try:
        while more := await reader.read(4096):
            said += more
    except ConnectionError:
        pass
    return said
