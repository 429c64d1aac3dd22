"""The order `probe`: a worker moves 1 MiB to a named peer and back, as a hand-off by gRPC would.

A router of the cluster signs the order for one worker and one peer, because the worker shows the
peer its token. Both ends are bounded in bytes and seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from ferryman.errors import InvalidRequest, Unavailable
from ferryman.wire.grpc.rpc import Channels

SERVICE, METHOD = "ferryman.wire.v1.ProbeService", "Echo"
PROBE_BYTES = 1 << 20
PROBE_SECONDS = 10.0


def register_echo(server: grpc.aio.Server) -> None:
    """The peer's end. Its messages are plain bytes: there is nothing in them to name."""
    methods: dict[str, Any] = {METHOD: grpc.unary_unary_rpc_method_handler(_echo)}
    handler = grpc.method_handlers_generic_handler(SERVICE, methods)
    server.add_generic_rpc_handlers((handler,))


async def _echo(content: bytes, _context: Any) -> bytes:
    if len(content) > PROBE_BYTES:
        raise InvalidRequest(f"a probe has at most {PROBE_BYTES} bytes", "content")
    return content


class PeerProbe:
    """The sender's end. `check` raises PermissionDenied for an address and a signature that no
    router of this cluster made for this worker."""

    def __init__(self, channels: Channels, check: Callable[[str, bytes], None]) -> None:
        self._channels, self._check = channels, check

    async def order(self, payload: bytes) -> bytes:
        """Obeys an order in JSON: `address` of the peer and the hex `signature` of a router.

        Answers with `bytes` each way, `seconds` for both, and whether the same bytes came back.
        Raises InvalidRequest, PermissionDenied, and Unavailable for a peer that cannot be reached.
        """
        try:
            asked = json.loads(payload)
            address, signature = str(asked["address"]), bytes.fromhex(asked["signature"])
        except (ValueError, LookupError, TypeError):
            raise InvalidRequest("a probe names an address and has a signature", "probe") from None
        self._check(address, signature)
        sent = os.urandom(PROBE_BYTES)
        began = time.monotonic()
        received = await self._moved(address, sent)
        seconds = time.monotonic() - began
        answer = {"bytes": len(received), "seconds": seconds, "is_same": received == sent}
        return json.dumps(answer).encode()

    async def _moved(self, address: str, content: bytes) -> bytes:
        # Not the channel of hand-offs: it may know since a while that the peer is away.
        way = self._channels.fresh(address)
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                echo: Any = way.unary_unary(f"/{SERVICE}/{METHOD}")
                received: bytes = await echo(content)
        except TimeoutError:
            raise Unavailable(f"{address} took longer than {PROBE_SECONDS:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"{address}: {error.code().name} {error.details()}") from None
        finally:
            await way.close()
        return received
