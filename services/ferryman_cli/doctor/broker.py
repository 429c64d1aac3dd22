"""Checks of NATS: that it answers, takes the login, and keeps the lifecycle log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from ferryman.errors import PermissionDenied, Unavailable
from ferryman.security.shown_urls import without_logins
from ferryman.wire.nats.connection import NatsOptions
from ferryman.wire.nats.lifecycle_log import STREAM, LogState
from ferryman.wire.nats.nats_bus import NatsBus, nats_bus
from ferryman_cli.doctor.fault_report import DoctorFinding

# A broker that listens has so long to take the login: a busy machine may be late.
LOGIN_SECONDS = 10.0
LISTEN_SECONDS = 3.0
LOOK_SECONDS = 0.05
PORT = 4222


@asynccontextmanager
async def reached_broker(options: NatsOptions) -> AsyncIterator[NatsBus]:
    """A bus with its broker connected. Raises PermissionDenied for a login that is refused, and
    Unavailable where nobody listens or answers."""
    if not await _listens(options):
        raise Unavailable("nobody listens there")
    now = asyncio.get_running_loop().time
    async with nats_bus(options) as bus:
        end = now() + LOGIN_SECONDS
        while not bus.is_connected:
            if bus.statistics().num_forbidden:
                raise PermissionDenied("it refuses the login")
            if now() > end:
                raise Unavailable("it listens, and does not answer")
            await asyncio.sleep(LOOK_SECONDS)
        yield bus


async def _listens(options: NatsOptions) -> bool:
    """Whether a server of the URL takes a connection."""
    for server in options.servers:
        where = urlsplit(server)
        try:
            async with asyncio.timeout(LISTEN_SECONDS):
                _, writer = await asyncio.open_connection(where.hostname, where.port or PORT)
        except (OSError, TimeoutError):
            continue
        writer.close()
        return True
    return False


def unreached_finding(options: NatsOptions, error: Exception) -> DoctorFinding:
    """The finding for an error of `reached_broker`."""
    at = without_logins(options.url)
    if isinstance(error, PermissionDenied):
        return DoctorFinding(
            "nats-login",
            f"NATS at {at} refuses the login {options.user or 'without a name'}",
            "ferryman credentials DIR --key CLUSTER.KEY writes the credentials of this cluster's"
            " key; give NATS its nats.conf, and --credentials DIR/router.json here",
        )
    host_and_port = at.rpartition("/")[2].replace(":", " ")
    return DoctorFinding(
        "nats-away",
        f"NATS at {at}: {error}; answers go on, and routers hear of no worker",
        f"start nats-server again, or kill -CONT it if it is stopped; nc -vz {host_and_port} shows"
        " whether its port is open",
    )


def log_findings(state: LogState, at: str) -> Iterator[DoctorFinding]:
    """Whether there is a lifecycle log; `at` is the broker's URL."""
    if not state.is_enabled:
        yield DoctorFinding(
            "jetstream",
            f"NATS at {at} runs without JetStream: there is no lifecycle log, so trace and explain"
            " know nothing",
            "start nats-server with -js and a folder, -sd DIR",
        )
    elif not state.has_stream:
        yield DoctorFinding(
            "lifecycle-log",
            f"NATS at {at} has no stream {STREAM}",
            "start a router: it makes the stream; ferryman logs -f router says why it could not",
        )
