"""Runs in a container on the cluster's network that was given no secret: tries every door.

Prints JSON: for each door the refusal, or what was got. Arguments: ROLE=HOST:PORT of services.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc
import nats
import redis.asyncio as aioredis

from ferryman.wire.v1 import decode_pb2, hostcache_pb2, prefill_pb2

PATIENCE_SECONDS = 60
INNER = (prefill_pb2, decode_pb2, hostcache_pb2)


async def _nats() -> str:
    await nats.connect("nats://nats:4222", max_reconnect_attempts=0, allow_reconnect=False)
    return "connected"


async def _redis() -> str:
    async with aioredis.Redis.from_url("redis://redis:6379/0") as client:
        return f"read {await client.get('fm:nodes')!r}"


async def _monitor() -> str:
    with socket.create_connection(("nats", 8222), timeout=PATIENCE_SECONDS):
        return "connected"


async def _call(address: str, method: str) -> str:
    """One empty message, as any client can send it; kinds of streams look the same on the wire."""
    with grpc.insecure_channel(address) as channel:
        call: Any = channel.stream_stream(method)
        return f"read {list(call(iter([b'']), timeout=PATIENCE_SECONDS))!r}"


async def _tried(attempt: Callable[[], Awaitable[str]]) -> str:
    try:
        return await attempt()
    except grpc.RpcError as error:
        return f"refused: {error.code().name}"
    except Exception as error:
        return f"refused: {type(error).__name__}: {error}"


async def main(addresses: list[str]) -> dict[str, str]:
    doors: dict[str, Callable[[], Awaitable[str]]] = {
        "nats": _nats,
        "redis": _redis,
        "monitor": _monitor,
    }
    services = [each for file in INNER for each in file.DESCRIPTOR.services_by_name.values()]
    for service in services:
        role = service.name.removesuffix("Service").lower()
        for address in (one.partition("=")[2] for one in addresses if one.startswith(f"{role}=")):
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}"
                doors[f"{address}{path}"] = partial(_call, address, path)
    return {door: await _tried(attempt) for door, attempt in doors.items()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(main(sys.argv[1:]))))
