"""A peer that is stopped, not dead, is noticed: its connection is open, but nothing answers."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ferryman.errors import Unavailable
from ferryman.wire.grpc.rpc import channel
from ferryman.wire.grpc.status import typed_errors

SERVER = """
import asyncio
from ferryman.wire.grpc.rpc import listening

async def main():
    async with listening("127.0.0.1:0", lambda server: None, grace=0) as server:
        print(server.port, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_stopped_peer_fails_the_calls_under_way() -> None:
    peer = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVER, stdout=PIPE)
    try:
        assert peer.stdout is not None
        port = int(await peer.stdout.readline())
        async with channel(f"127.0.0.1:{port}") as connection:
            watch = health_pb2_grpc.HealthStub(connection).Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            peer.send_signal(signal.SIGSTOP)
            with pytest.raises(Unavailable), typed_errors():
                async with asyncio.timeout(120):
                    await watch.read()
    finally:
        peer.kill()
        await peer.communicate()
